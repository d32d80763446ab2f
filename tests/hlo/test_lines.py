"""Lines of instructions that do not have one of their own: by hand, and of real programs."""

import absent_steps
import pytest

from shardwise._hlo import cause_of, parse_hlo

TABLES = """HloModule m, is_scheduled=true

FileNames
1 "/home/me/model.py"

FunctionNames
1 "Block.__call__"

FileLocations
1 {file_name_id=1 function_name_id=1 line=10 end_line=10 column=4 end_column=9}
2 {file_name_id=1 function_name_id=1 line=20 end_line=20 column=4 end_column=9}
3 {file_name_id=1 function_name_id=1 line=30 end_line=30 column=4 end_column=9}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=1}
3 {file_location_id=3 parent_frame_id=1}

"""
TEXT = (
    TABLES
    + """%fused (f: f32[64]) -> f32[64] {
  %f = f32[64]{0} parameter(0)
  %inner = f32[64]{0} negate(%f), metadata={op_name="jit(step)/jvp(mlp)/neg" stack_frame_id=2}
  ROOT %last = f32[64]{0} copy(%inner)
}

%body (p: (s32[], f32[64], f32[64])) -> (s32[], f32[64], f32[64]) {
  %p = (s32[], f32[64]{0}, f32[64]{0}) parameter(0)
  %n = s32[] get-tuple-element(%p), index=0
  %w = f32[64]{0} get-tuple-element(%p), index=1
  %acc = f32[64]{0} get-tuple-element(%p), index=2
  %gathered = f32[64]{0} all-gather(%w), replica_groups={}, dimensions={0}
  %dot = f32[64]{0} multiply(%gathered, %acc), metadata={op_name="jit(step)/transpose(jvp(mlp))/dot_general" stack_frame_id=3}
  %sum = f32[64]{0} all-reduce(%dot), replica_groups={}, to_apply=%add
  ROOT %t = (s32[], f32[64]{0}, f32[64]{0}) tuple(%n, %w, %sum)
}

%cond (q: (s32[], f32[64], f32[64])) -> pred[] {
  %q = (s32[], f32[64]{0}, f32[64]{0}) parameter(0)
  %m = s32[] get-tuple-element(%q), index=0
  %bound = s32[] constant(5)
  ROOT %less = pred[] compare(%m, %bound), direction=LT
}

ENTRY %main (a: f32[64]) -> f32[64] {
  %a = f32[64]{0} parameter(0), metadata={op_name="state.model['head']"}
  %moved = f32[64]{0} collective-permute(%a), source_target_pairs={{0,1}}, metadata={op_name="state.model['head']"}
  %whole = f32[64]{0} all-gather(%moved), replica_groups={}, dimensions={0}, metadata={op_name="state.model['head']"}
  %used = f32[64]{0} add(%whole, %whole), metadata={op_name="jit(step)/jvp(head)/add" stack_frame_id=1}
  %fusion = f32[64]{0} fusion(%used), kind=kLoop, calls=%fused
  %both = f32[64]{0} all-reduce(%fusion), replica_groups={}, to_apply=%add
  %zero = s32[] constant(0)
  %init = (s32[], f32[64]{0}, f32[64]{0}) tuple(%zero, %whole, %both)
  %loop = (s32[], f32[64]{0}, f32[64]{0}) while(%init), condition=%cond, body=%body
  %out = f32[64]{0} get-tuple-element(%loop), index=2
  %final = f32[64]{0} all-reduce(%out), replica_groups={}, to_apply=%add
  %lone = f32[64]{0} iota(), iota_dimension=0
  %updated = f32[64]{0} add(%final, %a), metadata={op_name="jit(step)/add"}
  ROOT %r = (f32[64]{0}, f32[64]{0}) tuple(%updated, %lone)
}
"""
)


@pytest.mark.parametrize(
    ("computation", "name", "line", "module", "op", "backward"),
    [
        # A gathered parameter: the line that reads it.
        ("main", "whole", 10, "head", "add", False),
        ("main", "moved", 10, "head", "add", False),
        # What a fusion makes: the line inside of it, the nearest to its result.
        ("main", "fusion", 20, "mlp", "neg", False),
        ("main", "both", 20, "mlp", "neg", False),
        # In a loop: gathered there for the product, and reduced after it.
        ("body", "gathered", 30, "mlp", "dot_general", True),
        ("body", "sum", 30, "mlp", "dot_general", True),
        # What a loop leaves.
        ("main", "final", 30, "mlp", "dot_general", True),
    ],
)
def test_a_line_is_that_of_what_makes_or_reads_it(computation, name, line, module, op, backward):
    parsed = parse_hlo(TEXT)
    found = cause_of(parsed, computation, parsed.by_name[computation][name], ["head", "mlp"])
    assert found.place.endswith(f"model.py:{line}")
    assert (found.module, found.op, found.backward) == (module, op, backward)


def test_what_has_nothing_around_it_has_no_line():
    parsed = parse_hlo(TEXT)
    assert cause_of(parsed, "main", parsed.by_name["main"]["lone"], []).place == ""


def test_which_value_of_a_tuple_is_not_guessed():
    parsed = parse_hlo(TEXT)
    assert cause_of(parsed, "main", parsed.by_name["main"]["init"], []).place == ""


CASES = [("scanned", "gpu"), ("scanned", "tpu"), ("unrolled", "gpu")]


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_every_collective_of_a_decoder_has_a_line(case):
    compiled, _ = absent_steps.compiled(*case)
    sent = sum(row.total_bytes for row in compiled.collectives)
    known = sum(row.total_bytes for row in compiled.collectives if row.source.place)
    assert known == sent > 0
    # Of its temporaries, nearly every byte.
    rows = [row for row in compiled.buffers if row.shape != "other"]
    named = sum(row.total_bytes for row in rows if row.source.place)
    assert named > 0.95 * sum(row.total_bytes for row in rows)
