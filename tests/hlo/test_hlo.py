"""Reading HLO: against programs that XLA compiled here, and forms that other compilers write."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardwise as sw
from shardwise._hlo.flops import Work, bytes_accessed, work_of
from shardwise._hlo.program import Shape, parse_hlo, parse_shapes
from shardwise._hlo.traffic import by_axis, collectives, replica_groups
from shardwise._memory.buffers import workspace_bound


def hlo_of(function, *args, **options):
    return parse_hlo(jax.jit(function, **options).lower(*args).compile().as_text())


def arrays(*shapes):
    return [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]


# --- shapes and attributes ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "shapes", "sizes"),
    [
        ("f32[8,128]{1,0}", ["f32[8,128]"], [4096]),
        ("bf16[4,256]{1,0:T(8,128)(2,1)S(1)}", ["bf16[4,256]"], [2048]),
        ("(f32[2]{0}, (s8[3]{0}, pred[]))", ["f32[2]", "s8[3]", "pred[]"], [8, 3, 1]),
        ("u4[5]", ["u4[5]"], [3]),
        ("token[]", [], []),
    ],
)
def test_shapes(text, shapes, sizes):
    found = parse_shapes(text)
    assert [str(shape) for shape in found] == shapes
    assert [shape.nbytes for shape in found] == sizes


def test_memory_beside_the_main_one_is_known_by_its_layout():
    assert parse_shapes("f32[8]{0:T(128)}")[0].in_hbm
    assert not parse_shapes("f32[8]{0:T(128)S(1)}")[0].in_hbm
    assert Shape("f32", (8,)).in_hbm


TEXT = """HloModule jit_f, is_scheduled=true

FileNames
1 "/home/me/model.py"
2 "/home/me/train.py"

FunctionNames
1 "Block.__call__"
2 "main"

FileLocations
1 {file_name_id=2 function_name_id=2 line=7 end_line=7 column=4 end_column=9}
2 {file_name_id=1 function_name_id=1 line=42 end_line=42 column=4 end_column=9}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}

%body (p: (s32[], f32[4])) -> (s32[], f32[4]) {
  %p = (s32[], f32[4]{0}) parameter(0)
  %n = s32[] get-tuple-element(%p), index=0
  %x = f32[4]{0} get-tuple-element(%p), index=1
  %ar = f32[4]{0} all-reduce(%x), replica_groups=[2,4]<=[4,2]T(1,0), to_apply=%add, metadata={op_name="jit(f)/while/body/jvp(blocks)/psum" stack_frame_id=2}
  ROOT %t = (s32[], f32[4]{0}) tuple(%n, %ar)
}

%cond (p: (s32[], f32[4])) -> pred[] {
  %p.1 = (s32[], f32[4]{0}) parameter(0)
  %n.1 = s32[] get-tuple-element(%p.1), index=0
  %bound = s32[] constant(5)
  ROOT %less = pred[] compare(%n.1, %bound), direction=LT
}

ENTRY %main (a: f32[4]) -> f32[4] {
  %a = f32[4]{0} parameter(0), metadata={op_name="state.model['w']"}
  %zero = s32[] constant(0)
  %kernel = f32[4]{0} custom-call(%a), custom_call_target="tpu_custom_call", frontend_attributes={note={
"more":"lines"
}}, metadata={op_name="jit(f)/kernel" stack_frame_id=1}
  %init = (s32[], f32[4]{0}) tuple(%zero, %kernel)
  %loop = (s32[], f32[4]{0}) while(%init), condition=%cond, body=%body
  ROOT %out = f32[4]{0} get-tuple-element(%loop), index=1
}
"""


def test_lines_frames_and_loops():
    module = parse_hlo(TEXT)
    entry = module.by_name["main"]
    assert entry["kernel"].op_name == "jit(f)/kernel"  # behind lines of its own
    assert module.trips("main", entry["loop"]) == 5  # by the condition's bound, as TPUs have it
    reduce = module.by_name["body"]["ar"]
    assert module.stack(reduce) == [
        ("/home/me/model.py", 42, "Block.__call__"),
        ("/home/me/train.py", 7, "main"),
    ]
    (row,) = collectives(module, {"data": 4, "model": 2}, ["blocks"])
    assert (row.kind, row.axes, row.devices, row.times) == ("all-reduce", ("data",), 4, 5)
    assert row.sent_bytes == 2 * 3 * 16 // 4 and row.total_bytes == 5 * row.sent_bytes
    assert row.source.module == "blocks" and row.source.op == "psum"
    assert row.source.place.endswith("model.py:42")


def test_elements_of_tuples_as_the_tpu_compiler_dumps_them():
    text = """HloModule step, num_partitions=4

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8] parameter(0)
  %both = (f32[8], bf16[4]) fusion(%x), kind=kLoop, calls=%inner
  %sent = bf16[4] collective-permute(%both#1), source_target_pairs={{0,1},{1,2},{2,3},{3,0}}
  ROOT %sum = f32[8] add(%both#0, %x)
}
"""
    module = parse_hlo(text)
    (permute,) = collectives(module, {"data": 4}, ())
    assert (permute.shape, permute.arrays, permute.sent_bytes) == ("bf16[4]", 1, 8)
    assert module.by_name["main"]["both#0"].shapes[0].dims == (8,)


def test_no_entry_is_refused():
    with pytest.raises(ValueError, match="no entry"):
        parse_hlo("HloModule nothing\n")


# --- groups ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{{0,1},{2,3}}", [[0, 1], [2, 3]]),
        ("[2,2]<=[4]", [[0, 1], [2, 3]]),
        ("[2,2]<=[2,2]T(1,0)", [[0, 2], [1, 3]]),
        ("[4,2]<=[2,2,2]T(0,2,1)", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("mesh['a'=2,'b'=2] {'b'}", [[0, 1], [2, 3]]),
        ("mesh['a'=2,'b'=2] {'a'}", [[0, 2], [1, 3]]),
        ("mesh['a'=4] {'a':(2)2}", [[0, 1], [2, 3]]),
        ("mesh['a'=4] {'a':(1)2}", [[0, 2], [1, 3]]),
        ("{}", [[0, 1, 2, 3]]),
        ("", [[0, 1, 2, 3]]),
    ],
)
def test_groups(text, groups):
    assert replica_groups(text, 4) == groups


MESHES = ["a=8", "a=2,b=4", "a=4,b=2", "a=2,b=2,c=2"]


@pytest.mark.parametrize("axes", MESHES)
def test_axes_are_those_that_were_asked_for(axes):
    """Every set of axes of a mesh, in every collective, by the compiler's own groups."""
    mesh = sw.mesh(axes, on="cpu:8")
    names = tuple(mesh.shape)
    sets = [(n,) for n in names] + ([names[:2], names[1:]] if len(names) > 2 else [names])
    for over in sets:
        count = int(np.prod([mesh.shape[n] for n in over]))

        def body(x, over=over, count=count):
            gathered = jax.lax.all_gather(x, over, tiled=True)
            scattered = jax.lax.psum_scatter(gathered, over, tiled=True)
            turned = jax.lax.all_to_all(scattered.reshape(count, -1), over, 0, 0)
            return jax.lax.psum(turned, over)

        run = jax.shard_map(body, mesh=mesh, in_specs=P(names), out_specs=P(), check_vma=False)
        module = hlo_of(run, *arrays((8 * count * 4,)))
        rows = collectives(module, dict(mesh.shape), [])
        by_mesh_order = tuple(n for n in names if n in over)
        assert {row.axes for row in rows} == {by_mesh_order}
        local = count * 4 * 4
        ring = (count - 1) * local
        assert {row.kind: row.sent_bytes for row in rows} == {
            "all-gather": ring,
            "reduce-scatter": ring,
            "all-to-all": ring // count,
            "all-reduce": 2 * ring // count,
        }


def test_permutes_go_along_the_axis_whose_places_change():
    mesh = sw.mesh("a=2,b=4", on="cpu:8")

    def body(x):
        pairs = [(i, (i + 1) % 4) for i in range(4)]
        return jax.lax.fori_loop(0, 6, lambda _, x: jax.lax.ppermute(x, "b", pairs), x)

    run = jax.shard_map(body, mesh=mesh, in_specs=P(("a", "b")), out_specs=P(("a", "b")))
    rows = collectives(hlo_of(run, *arrays((32,))), dict(mesh.shape), [])
    assert by_axis(rows) == {"b": {"collective-permute": (6, 6 * 16)}}


# --- arithmetic -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "shapes", "expected"),
    [
        (lambda a, b: a @ b, [(8, 16), (16, 32)], 2 * 8 * 16 * 32),
        (lambda a, b: jnp.einsum("bij,bjk->bik", a, b), [(3, 8, 16), (3, 16, 4)], 2 * 3 * 8 * 16 * 4),
        (lambda a, b: jax.lax.scan(lambda c, _: (c @ b, None), a, None, length=7)[0],
         [(8, 16), (16, 16)], 7 * 2 * 8 * 16 * 16),
        (lambda a, b: jax.lax.fori_loop(
            0, 3, lambda _, c: jax.lax.fori_loop(0, 5, lambda _, d: d @ b, c), a),
         [(8, 16), (16, 16)], 15 * 2 * 8 * 16 * 16),
        (lambda x, k: jax.lax.conv_general_dilated(
            x, k, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")),
         [(2, 8, 8, 3), (3, 3, 3, 16)], 2 * 2 * 6 * 6 * 16 * 3 * 3 * 3),
        (lambda x, k: jax.lax.conv_general_dilated(
            x, k, (2,), [(1, 1)], dimension_numbers=("NHC", "HIO", "NHC")),
         # Of 4 outputs and 3 taps, one pair falls on the padding.
         [(2, 8, 3), (3, 3, 16)], 2 * 2 * 16 * 3 * 11),
    ],
    ids=["product", "batched", "scan", "nested loops", "convolution", "padded convolution"],
)  # fmt: skip
def test_flops(function, shapes, expected):
    assert work_of(hlo_of(function, *arrays(*shapes))) == Work(expected, {})


def test_a_loop_of_unknown_length_is_named():
    def until(a, b):
        return jax.lax.while_loop(lambda c: jnp.sum(c) < 1e6, lambda c: c @ b, a)

    work = work_of(hlo_of(until, *arrays((8, 16), (16, 16))))
    assert work.flops == 2 * 8 * 16 * 16
    assert work.not_counted == {"all but one run of a loop of unknown length": 1}
    adding = work_of(hlo_of(lambda a: jax.lax.while_loop(
        lambda c: jnp.sum(c) < 1e6, lambda c: c + 1, a), *arrays((8, 16))))  # fmt: skip
    assert adding.not_counted == {}


_CUDNN = """HloModule m

ENTRY %main (a: f32[8,33,33,64], b: f32[128,3,3,64], c: f32[8,16,16,128]) -> f32[] {{
  %a = f32[8,33,33,64]{{3,2,1,0}} parameter(0)
  %b = f32[128,3,3,64]{{3,2,1,0}} parameter(1)
  %c = f32[8,16,16,128]{{3,2,1,0}} parameter(2)
  ROOT %r = ({result}, u8[0]{{0}}) custom-call({operands}), window={{size=3x3 stride=2x2}}, {labels}custom_call_target="{target}", backend_config={{}}
}}
"""
_FORWARD = ("f32[8,16,16,128]{3,2,1,0}", "%a, %b")
_INPUT = ("f32[8,33,33,64]{3,2,1,0}", "%c, %b")
_FILTER = ("f32[128,3,3,64]{3,2,1,0}", "%a, %c")
_LABELS = "dim_labels=b01f_o01i->b01f, "


@pytest.mark.parametrize(
    ("target", "arrays", "labels", "counted"),
    [
        ("__cudnn$convForward", _FORWARD, _LABELS, True),
        ("__cudnn$convBiasActivationForward", _FORWARD, _LABELS, True),
        ("__cudnn$convForwardGraph", _FORWARD, _LABELS, True),
        ("__cudnn$convBackwardInput", _INPUT, _LABELS, True),
        ("__cudnn$convBackwardFilter", _FILTER, _LABELS, True),
        ("__cudnn$convForward", _FORWARD, "", False),
        ("__cudnn$convForward", _FORWARD, "dim_labels=b01f?_o01i?->b01f?, ", False),
        ("their_kernel", _FORWARD, _LABELS, False),
    ],
)
def test_convolutions_of_a_library(target, arrays, labels, counted):
    text = _CUDNN.format(result=arrays[0], operands=arrays[1], labels=labels, target=target)
    products = 2 * 8 * 16 * 16 * 128 * 3 * 3 * 64
    expected = Work(products, {}) if counted else Work(0, {target: 1})
    assert work_of(parse_hlo(text)) == expected


def test_bytes_accessed_are_what_goes_in_and_out():
    module = hlo_of(lambda a: jnp.sin(a) * 2, *arrays((1024,)))
    assert bytes_accessed(module) == 2 * 4096


def test_a_split_product_does_its_part():
    mesh = sw.mesh("data=8", on="cpu:8")
    split, whole = (NamedSharding(mesh, spec) for spec in (P("data"), P()))
    module = hlo_of(lambda a, b: a @ b, *arrays((64, 32), (32, 16)), in_shardings=(split, whole))
    assert work_of(module).flops == 2 * 64 * 32 * 16 // 8


def test_convolutions_may_take_a_larger_workspace_on_the_device():
    text = """HloModule m

ENTRY %main {
  %x = f32[8,16,16,32]{3,2,1,0} parameter(0)
  %k = f32[64,3,3,32]{3,2,1,0} parameter(1)
  ROOT %c = (f32[8,16,16,64]{3,2,1,0}, u8[1000]{0}) custom-call(%x, %k), \
custom_call_target="__cudnn$convForward"
}
"""
    arrays = 4 * (8 * 16 * 16 * 32 + 64 * 3 * 3 * 32 + 8 * 16 * 16 * 64)
    assert workspace_bound(parse_hlo(text)) == 2 * arrays - 1000
    assert workspace_bound(parse_hlo(text.replace("__cudnn$conv", "__cublas$"))) == 0
