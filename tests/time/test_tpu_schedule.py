"""What a TPU's program hides: collectives in calls, fusions and chains, and attention's mask."""

import pytest

from shardwise._chips import parse_chips
from shardwise._hlo import flops_of, parse_hlo
from shardwise._time import Machine

GROUP = "replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add"
CYCLES = 'backend_config={"window_config":{"estimated_cycles":"%s"}}'
HEAD = """HloModule step

%add (a: bf16[], b: bf16[]) -> bf16[] {
  %a = bf16[] parameter(0)
  %b = bf16[] parameter(1)
  ROOT %sum = bf16[] add(%a, %b)
}

%loop (p: bf16[8388608]) -> bf16[8388608] {
  %p = bf16[8388608]{0} parameter(0)
  ROOT %twice = bf16[8388608]{0} add(%p, %p)
}
"""


def schedule_of(text, on="v6e:2x4", size=8):
    return Machine(parse_chips(on), {"fsdp": size}).schedule(parse_hlo(HEAD + text))


def on_link(schedule):
    return [s for s in schedule.slices if s.stream == "ici"]


def program(cycles):
    return f"""
%inner (p: bf16[8388608]) -> bf16[8388608] {{
  %p = bf16[8388608]{{0}} parameter(0)
  ROOT %reduced = bf16[8388608]{{0}} all-reduce(%p), channel_id=1, {GROUP}
}}, execution_thread="sparsecore"

ENTRY %main (x: bf16[8388608]) -> bf16[8388608] {{
  %x = bf16[8388608]{{0}} parameter(0)
  %begun = ((), (), s32[]) call-start(), async_execution_thread="sparsecore", to_apply=%inner
  %before = bf16[8388608]{{0}} fusion(%x), kind=kLoop, calls=%loop, {CYCLES % cycles}
  %given = ((bf16[8388608]), bf16[8388608]) call-update(%begun, %before)
  %during = bf16[8388608]{{0}} fusion(%x), kind=kLoop, calls=%loop, {CYCLES % cycles}
  ROOT %done = bf16[8388608]{{0}} call-done(%given)
}}
"""


def test_a_call_to_the_sparse_cores_begins_where_it_gets_its_operands():
    schedule = schedule_of(program(10_000))
    (reduced,) = on_link(schedule)
    before, during = (s for s in schedule.slices if s.stream == "compute")
    assert reduced.start == pytest.approx(before.seconds)
    assert reduced.exposed == pytest.approx(reduced.seconds - during.seconds)
    assert schedule.seconds == pytest.approx(before.seconds + reduced.seconds)


def test_work_that_takes_longer_hides_the_call():
    (reduced,) = on_link(schedule := schedule_of(program(10_000_000)))
    assert reduced.seconds > 0 and reduced.exposed == 0
    assert schedule.seconds == pytest.approx(2 * schedule.slices[0].seconds)


def test_the_largest_integer_is_no_estimate():
    assert schedule_of(program(2**63 - 1)).seconds < 1


def test_a_reduce_scatter_written_as_a_fusion_runs_on_the_link():
    schedule = schedule_of(f"""
%scatter (p: bf16[8388608], i: s32[]) -> bf16[1048576] {{
  %p = bf16[8388608]{{0}} parameter(0)
  %i = s32[] parameter(1)
  %all = bf16[8388608]{{0}} all-reduce(%p), channel_id=1, {GROUP}
  ROOT %own = bf16[1048576]{{0}} dynamic-slice(%all, %i), dynamic_slice_sizes={{1048576}}
}}

ENTRY %main (x: bf16[8388608], i: s32[]) -> bf16[1048576] {{
  %x = bf16[8388608]{{0}} parameter(0)
  %i = s32[] parameter(1)
  ROOT %fused = bf16[1048576]{{0}} fusion(%x, %i), kind=kCustom, calls=%scatter
}}
""")
    (only,) = schedule.slices
    assert (only.stream, only.axes) == ("ici", ("fsdp",))
    assert only.exposed == pytest.approx(schedule.seconds) == pytest.approx(only.seconds)


def test_the_parts_of_a_chain_are_one_collective():
    parts = "\n".join(
        f"""
%part{n} (p: bf16[8388608]) -> bf16[8388608] {{
  %p = bf16[8388608]{{0}} parameter(0)
  ROOT %all{n} = bf16[8388608]{{0}} all-reduce(%p), channel_id=1, {GROUP}, frontend_attributes={{chain_id="7"}}
}}"""
        for n in range(3)
    )
    steps = "\n".join(
        f"  %step{n} = bf16[8388608]{{0}} fusion(%x), kind=kOutput, calls=%part{n}, "
        f"{CYCLES % 10_000}"
        for n in range(3)
    )
    schedule = schedule_of(f"""{parts}

ENTRY %main (x: bf16[8388608]) -> bf16[8388608] {{
  %x = bf16[8388608]{{0}} parameter(0)
{steps}
  ROOT %end = bf16[8388608]{{0}} copy(%step2)
}}
""")
    (only,) = on_link(schedule)
    compute = [s for s in schedule.slices if s.stream == "compute"]
    assert only.exposed == pytest.approx(only.seconds - sum(s.seconds for s in compute[:3]))


@pytest.mark.parametrize(("blocks", "share"), [("4,4", 1 / 2), ("16,4", 1 / 4)])
def test_the_mask_of_splash_attention_is_not_its_queries(blocks, share):
    name = "jit(step)/splash_mha_fwd_residuals/pallas_call"
    module = parse_hlo(
        HEAD
        + f"""
ENTRY %main (m: s8[1,{blocks}], q: bf16[2,8,2048,128], k: bf16[2,2,2048,128]) -> bf16[2,8,2048,128] {{
  %m = s8[1,{blocks}]{{2,1,0}} parameter(0)
  %q = bf16[2,8,2048,128]{{3,2,1,0}} parameter(1)
  %k = bf16[2,2,2048,128]{{3,2,1,0}} parameter(2)
  ROOT %a = bf16[2,8,2048,128]{{3,2,1,0}} custom-call(%m, %m, %q, %k, %k), custom_call_target="tpu_custom_call", metadata={{op_name="{name}"}}
}}
"""
    )
    attention = module.computations["main"][-1]
    # Scores and values, each two flops for each pair of positions that is not masked.
    assert flops_of(module, "main", attention) == 2 * 2 * 2 * 8 * 2048 * 2048 * 128 * share


@pytest.mark.parametrize("copied", [False, True], ids=["read", "copied"])
@pytest.mark.parametrize(("added", "trips"), [(1, 8), (2, 4), (3, 3)])
def test_an_unrolled_loop_counts_by_more_than_one(added, trips, copied):
    module = parse_hlo(
        HEAD
        + f"""
%body (s: (bf16[8388608], u32[])) -> (bf16[8388608], u32[]) {{
  %s = (bf16[8388608]{{0}}, u32[]) parameter(0)
  %x = bf16[8388608]{{0}} get-tuple-element(%s), index=0
  %n = u32[] get-tuple-element(%s), index=1
  %copy = u32[] copy(%n)
  %by = u32[] constant({added})
  %next = u32[] add(%{"copy" if copied else "n"}, %by)
  ROOT %out = (bf16[8388608]{{0}}, u32[]) tuple(%x, %next)
}}

%more (s: (bf16[8388608], u32[])) -> pred[] {{
  %s = (bf16[8388608]{{0}}, u32[]) parameter(0)
  %most = u32[] constant(8)
  %n = u32[] get-tuple-element(%s), index=1
  ROOT %less = pred[] compare(%n, %most), direction=LT
}}

ENTRY %main (s: (bf16[8388608], u32[])) -> (bf16[8388608], u32[]) {{
  %s = (bf16[8388608]{{0}}, u32[]) parameter(0)
  ROOT %loop = (bf16[8388608]{{0}}, u32[]) while(%s), condition=%more, body=%body
}}
"""
    )
    assert module.trips("main", module.computations["main"][-1]) == trips
