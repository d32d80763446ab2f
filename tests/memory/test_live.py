"""What is alive when: against what the compilers themselves report, and by hand."""

import json

import absent_steps
import pytest
from absent_steps import LAYERS

import shardwise as sw
from shardwise._hlo import Source, parse_hlo
from shardwise._memory import (
    Kinds,
    LiveMemory,
    compiled_lifetimes,
    largest_buffers,
    modelled_lifetimes,
)

CASES = [
    ("scanned", "gpu"),
    ("scanned", "tpu"),
    ("unrolled", "gpu"),
    ("images", "gpu"),
    ("images", "tpu"),
]


@pytest.fixture(params=CASES, ids="-".join)
def step(request):
    return (*request.param, *absent_steps.compiled(*request.param))


def test_the_fullest_moment_is_the_peak_that_the_compiler_reports(step):
    """XLA's statistic counts live bytes, without the space between arrays; `memory.peak` has both."""
    _, _, compiled, program = step
    live, memory = compiled.live, compiled.memory
    code = sum(owner.bytes[live.peak] for owner in live.owners if owner.kind == "code")
    assert live.label == "compiled"
    wanted = program.stats["peak_memory_in_bytes"]
    assert live.peak_bytes - code == pytest.approx(wanted, rel=1e-3)
    assert live.peak_bytes == max(live.bytes) == live.bytes[live.peak]
    assert live.compiled_bytes == memory.peak
    assert 0.75 < live.explained <= 1.0
    for owner in live.owners:
        if owner.kind in ("parameters", "optimizer", "batch"):
            assert set(owner.bytes) == {getattr(memory, owner.kind)} and owner.label == "exact"


def test_moments_follow_one_another_over_the_modelled_step(step):
    _, _, compiled, _ = step
    live = compiled.live
    assert list(live.places) == sorted(set(live.places)) and live.places[0] == 0
    assert list(live.seconds) == sorted(live.seconds) and live.seconds[-1] == live.length
    # What is not in it: the launches of iterations.
    assert 0.9 * compiled.time.seconds < live.length <= compiled.time.seconds * 1.001
    assert len(json.dumps(live.to_dict())) < 100_000
    assert LiveMemory.from_dict(json.loads(json.dumps(live.to_dict()))) == live


def test_a_loop_is_one_iteration_for_as_long_as_all_take():
    for platform in ("gpu", "tpu"):
        live = absent_steps.compiled("scanned", platform)[0].live
        assert [loop.times for loop in live.loops] == [LAYERS, LAYERS]
        forward, backward = live.loops
        assert forward.last < backward.first and forward.first < live.peak
        loops = sum(live.seconds[loop.last] - live.seconds[loop.first] for loop in live.loops)
        assert loops > 0.3 * live.length
    assert absent_steps.compiled("unrolled", "gpu")[0].live.loops == ()


def test_owners_are_kinds_modules_and_lines(step):
    name, _, compiled, _ = step
    live = compiled.live
    kinds = {owner.kind for owner in live.owners}
    assert {"parameters", "optimizer", "batch", "activations"} <= kinds
    most = max((o for o in live.owners if o.kind == "activations"), key=lambda o: max(o.bytes))
    line = {"images": "absent_steps.py:"}.get(name, "models/_")
    assert line in most.place
    if name == "unrolled":
        # Layers that repeat are one owner.
        assert any(o.module.startswith("blocks.*") for o in live.owners)
        assert not any("blocks.0" in o.module for o in live.owners)
    found = live.at(live.peak)
    assert sum(found.values()) == live.peak_bytes
    assert list(found.values()) == sorted(found.values(), reverse=True)
    assert str(live).startswith(sw._base.show_bytes(live.peak_bytes))


def test_gradients_of_stacked_layers_are_alive_in_the_backward_pass():
    compiled = absent_steps.compiled("scanned", "gpu")[0]
    live = compiled.live
    gradients = [o for o in live.owners if o.kind == "gradients"]
    forward, backward = live.loops
    during = sum(o.bytes[backward.last] for o in gradients)
    assert 0.4 * compiled.memory.parameters < during < 1.6 * compiled.memory.parameters
    assert (
        sum(o.bytes[forward.first] for o in gradients) < 0.2 * during
    )  # no weights in another dtype


def test_without_the_compiler_s_word_the_order_of_the_program_says_it():
    compiled, program = absent_steps.compiled("scanned", "gpu")
    module = parse_hlo(compiled.hlo)
    said = compiled_lifetimes(program.lifetimes).peak()[0]
    modelled = modelled_lifetimes(module)
    assert modelled.label == "modelled"
    assert modelled.peak()[0] == pytest.approx(said, rel=0.2)
    rows = largest_buffers(module, compiled.paths, modelled, compiled.memory.temporaries)
    assert {row.label for row in rows} == {"modelled"}


TEXT = """HloModule m, is_scheduled=true

%body (p: (s32[], f32[256])) -> (s32[], f32[256]) {
  %p = (s32[], f32[256]{0}) parameter(0)
  %n = s32[] get-tuple-element(%p), index=0
  %x = f32[256]{0} get-tuple-element(%p), index=1
  %work = f32[1024]{0} custom-call(%x), custom_call_target="w"
  %y = f32[256]{0} custom-call(%work), custom_call_target="y"
  ROOT %t = (s32[], f32[256]{0}) tuple(%n, %y)
}

%cond (q: (s32[], f32[256])) -> pred[] {
  %q = (s32[], f32[256]{0}) parameter(0)
  %m = s32[] get-tuple-element(%q), index=0
  %bound = s32[] constant(5)
  ROOT %less = pred[] compare(%m, %bound), direction=LT
}

ENTRY %main (a: f32[256]) -> f32[256] {
  %a = f32[256]{0} parameter(0)
  %zero = s32[] constant(0)
  %kept = f32[512]{0} custom-call(%a), custom_call_target="k"
  %start = f32[256]{0} custom-call(%kept), custom_call_target="s"
  %init = (s32[], f32[256]{0}) tuple(%zero, %start)
  %loop = (s32[], f32[256]{0}) while(%init), condition=%cond, body=%body
  %z = f32[256]{0} get-tuple-element(%loop), index=1
  ROOT %out = f32[256]{0} custom-call(%z, %kept), custom_call_target="o"
}
"""


def test_lifetimes_by_the_order_of_a_program():
    lifetimes = modelled_lifetimes(parse_hlo(TEXT))
    place = {name: i for i, name in enumerate(lifetimes.sequence)}
    assert place["work"] < place["loop"] < place["out"]  # the body runs before its loop ends
    spans = {v.name: (v.bytes, v.start, v.end) for v in lifetimes.values if v.bytes > 1}
    # A result is in its own memory, and what a loop leaves is in that of what it began with.
    assert spans == {
        "kept": (2048, place["kept"], place["out"]),
        "start": (1024, place["start"], place["out"]),
        "work": (4096, place["work"], place["y"]),
    }
    assert lifetimes.peak() == (2048 + 1024 + 4096, place["work"])


def test_kinds_by_the_shapes_of_leaves():
    kinds = Kinds.by_leaves([((8, 512, 8, 64), (8, 256, 8, 64))])
    module = parse_hlo(TEXT)
    made = module.by_name["main"]["kept"]

    def kind(shape, place="model.py:3", backward=True):
        return kinds.of(module, "main", made, Source("op", "", place, backward), shape)

    # One layer, split or gathered, transposed, and with heads and depth made one.
    for shape in ("f32[8,256,8,64]", "f32[512,8,64]", "bf16[512,256]", "f32[8,64,256]"):
        assert kind(shape) == "gradients", shape
    assert kind("f32[512,8,64]", backward=False) == "activations"
    assert kind("f32[32,512]") == "temporaries"
    assert kind("f32[32,512]", place="", backward=False) == "temporaries"


# --- saved ----------------------------------------------------------------------------------------


def test_a_saved_compilation_keeps_it(tmp_path):
    compiled = absent_steps.compiled("images", "gpu")[0]
    path = tmp_path / "compiled.json"
    compiled.save(path)
    again = sw.load_compiled(path)
    assert again.live == compiled.live
    found = json.loads(path.read_text())
    found["live"]["owners"][0]["bytes"].pop()
    path.write_text(json.dumps(found))
    with pytest.raises(ValueError, match="its 'live' is damaged"):
        sw.load_compiled(path)
    del found["live"]  # as an earlier version saved it
    path.write_text(json.dumps(found))
    assert sw.load_compiled(path).live is None
