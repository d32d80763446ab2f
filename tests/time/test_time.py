"""What a step takes: prices of instructions, the schedule, its parts and its timeline."""

import dataclasses
import json
import re
import time as clock

import jax
import pytest
from mlp_step import compiled_step

import shardwise as sw
from shardwise._chips import parse_chips
from shardwise._compile import tokens_of
from shardwise._hlo import access_of, parse_hlo
from shardwise._time import (
    Calibration,
    Machine,
    StepTime,
    gpu_rates,
    load_calibration,
    product_seconds,
    time_of,
    timeline_of,
)
from shardwise._time.cycles import torus_of
from shardwise._time.links import gpu_seconds, measured_seconds, tpu_seconds
from shardwise._time.pricing import GpuPricer
from shardwise._time.pricing.kernels import tiled_seconds
from shardwise._time.pricing.rates import H200
from shardwise._train.progress import compared

HEAD = "HloModule m\n\n"


def module(body, *others):
    return parse_hlo(HEAD + "\n\n".join([*others, "ENTRY %main {\n" + body + "\n}\n"]))


def only(found, name):
    return found.by_name["main"][name]


# --- what is really read and written --------------------------------------------------------------


def test_a_slice_of_a_stack_is_not_the_stack():
    fused = """%fused (p0: f32[16,1024], p1: s32[]) -> f32[1,1024] {
  %p0 = f32[16,1024]{1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  %cut = f32[1,1024]{1,0} dynamic-slice(%p0, %p1, %zero), dynamic_slice_sizes={1,1024}
  ROOT %neg = f32[1,1024]{1,0} negate(%cut)
}"""
    found = module(
        "  %a = f32[16,1024]{1,0} parameter(0)\n  %i = s32[] parameter(1)\n"
        "  ROOT %f = f32[1,1024]{1,0} fusion(%a, %i), kind=kLoop, calls=%fused",
        fused,
    )
    access = access_of(found, "main", only(found, "f"))
    assert (access.read, access.written) == (4096 + 4, 4096)


def test_an_update_in_place_writes_the_update_alone():
    fused = """%fused (p0: f32[16,1024], p1: f32[1,1024], p2: s32[]) -> f32[16,1024] {
  %p0 = f32[16,1024]{1,0} parameter(0)
  %p1 = f32[1,1024]{1,0} parameter(1)
  %p2 = s32[] parameter(2)
  %zero = s32[] constant(0)
  ROOT %put = f32[16,1024]{1,0} dynamic-update-slice(%p0, %p1, %p2, %zero)
}"""
    found = module(
        "  %a = f32[16,1024]{1,0} parameter(0)\n  %b = f32[1,1024]{1,0} parameter(1)\n"
        "  %i = s32[] parameter(2)\n"
        "  ROOT %f = f32[16,1024]{1,0} fusion(%a, %b, %i), kind=kLoop, calls=%fused",
        fused,
    )
    access = access_of(found, "main", only(found, "f"))
    assert (access.read, access.written) == (4096 + 4, 4096)


# --- prices ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2048, 4096, 8192])
def test_large_products_reach_the_rate_that_was_measured(size):
    products = H200.products["bf16"]
    seconds = tiled_seconds(products, H200.cores, H200.bandwidth, 1.0, 1, size, size, size)
    assert 600e12 < 2 * size**3 / seconds < 900e12


def test_more_work_takes_longer():
    products = H200.products["bf16"]
    times = [
        tiled_seconds(products, H200.cores, H200.bandwidth, 1.0, 1, 256 * n, 512, 512)
        for n in range(1, 40)
    ]
    assert times == sorted(times)


def gemm(m, n, k, dtype="bf16"):
    return module(
        f"  %a = {dtype}[{m},{k}]{{1,0}} parameter(0)\n"
        f"  %b = {dtype}[{k},{n}]{{1,0}} parameter(1)\n"
        f"  ROOT %d = ({dtype}[{m},{n}]{{1,0}}, s8[33554432]{{0}}) custom-call(%a, %b), "
        'custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":'
        '{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],'
        '"rhs_contracting_dimensions":["0"],"lhs_batch_dimensions":[],"rhs_batch_dimensions":[]}}}'
    )


def test_float32_products_take_longer_than_bfloat16():
    wide, narrow = (gemm(4096, 4096, 4096, dtype) for dtype in ("f32", "bf16"))
    prices = [GpuPricer(m, H200).price("main", only(m, "d")) for m in (wide, narrow)]
    assert prices[0].seconds > 1.5 * prices[1].seconds
    assert prices[0].flops == prices[1].flops == 2 * 4096**3


def seconds_of(found, name):
    return GpuPricer(found, H200).price("main", only(found, name)).seconds


def test_rows_that_are_no_multiple_of_16_bytes_take_older_kernels():
    odd, even = (seconds_of(gemm(4096, n, 4096, "f32"), "d") for n in (4094, 4096))
    assert odd > 1.4 * even


def convolution(target, given, other, out, window, labels="b01f_o01i->b01f", groups=1):
    return module(
        f"  %a = {given} parameter(0)\n"
        f"  %b = {other} parameter(1)\n"
        f"  ROOT %d = ({out}, u8[131]{{0}}) custom-call(%a, %b), window={{{window}}}, "
        f"dim_labels={labels}, feature_group_count={groups}, "
        f'custom_call_target="__cudnn$conv{target}"'
    )


def of_window(target, dtype, batch, size, channels, out, window=3, stride=1, groups=1):
    """Returns a convolution of images in which nothing is padded but for the window."""
    made = size // stride
    x, y = (f"{dtype}[{batch},{n},{n},{c}]{{3,2,1,0}}" for n, c in ((size, channels), (made, out)))
    w = f"{dtype}[{out},{window},{window},{channels // groups}]{{3,2,1,0}}"
    given, other, result = {
        "Input": (y, w, x),
        "Filter": (x, y, w),
    }.get(target.removeprefix("Backward"), (x, w, y))
    text = f"size={window}x{window} stride={stride}x{stride} pad=1_1x1_1"
    return convolution(target, given, other, result, text, groups=groups)


@pytest.mark.parametrize(
    ("target", "dtype", "sizes", "microseconds"),
    [
        ("Forward", "bf16", (48, 32, 256, 256), 78.7),
        ("Forward", "bf16", (64, 56, 64, 64), 38.6),
        ("Forward", "bf16", (128, 32, 160, 160), 115.2),
        ("BackwardInput", "bf16", (256, 32, 160, 160), 217.0),
        ("BackwardFilter", "bf16", (256, 16, 320, 320), 220.9),
        ("BackwardFilter", "bf16", (64, 28, 192, 192), 71.9),
        ("BackwardFilter", "f32", (64, 56, 64, 64), 155.8),
        ("BackwardFilter", "f32", (256, 8, 640, 640), 622.9),
        ("Forward", "bf16", (64, 56, 256, 64, 1), 34.0),
        ("Forward", "f32", (64, 128, 3, 64), 151.9),
        ("Forward", "bf16", (64, 56, 192, 192, 7, 1, 192), 272.5),
        ("BackwardFilter", "bf16", (64, 56, 192, 192, 7, 1, 192), 201.5),
        ("Forward", "f32", (56, 80, 160, 160, 3, 1, 160), 155.5),
        ("Forward", "bf16", (64, 56, 128, 128, 3, 1, 32), 92.0),
        ("Forward", "bf16", (64, 10, 768, 768, 5, 1, 768), 486.3),
    ],
)
def test_convolutions_take_about_what_was_measured(target, dtype, sizes, microseconds):
    found = of_window(target, dtype, *sizes)
    assert seconds_of(found, "d") * 1e6 == pytest.approx(microseconds, rel=0.2)


def test_channels_that_fill_no_tile_cost_as_much_as_a_tile():
    few, full = (of_window("BackwardFilter", "f32", 48, 96, n, 64) for n in (48, 64))
    assert seconds_of(few, "d") == pytest.approx(seconds_of(full, "d"), rel=0.1)


def test_channels_that_kernels_do_not_take_are_copied():
    odd, even = (of_window("Forward", "bf16", 16, 64, n, n) for n in (100, 104))
    assert seconds_of(odd, "d") > 1.5 * seconds_of(even, "d")


def test_a_convolution_of_volumes_lays_its_arrays_out_anew():
    x, w = "bf16[8,64,16,56,56]{4,3,2,1,0}", "bf16[64,64,3,3,3]{4,3,2,1,0}"
    found = convolution(
        "Forward", x, w, x, "size=3x3x3 pad=1_1x1_1x1_1", labels="bf012_oi012->bf012"
    )
    assert seconds_of(found, "d") * 1e6 == pytest.approx(293, rel=0.15)


def test_a_convolution_without_labels_still_has_a_price():
    x = "f32[8,32,32,16]{3,2,1,0}"
    found = convolution("Forward", x, "f32[16,3,3,16]{3,2,1,0}", x, "size=3x3", labels="?")
    assert seconds_of(found, "d") > 0


@pytest.mark.parametrize(
    ("size", "given", "other", "out", "microseconds"),
    [
        (64, "64,128,128", "128,64,64", "64,2,2,128", 1344.0),
        (32, "128,64,64", "256,32,32", "128,2,2,256", 349.4),
    ],
)
def test_a_gradient_as_a_dilated_convolution_keeps_few_cores_busy(
    size, given, other, out, microseconds
):
    found = convolution(
        "Forward",
        f"f32[{given},16]{{3,2,1,0}}",
        f"f32[{other},16]{{3,2,1,0}}",
        f"f32[{out}]{{3,2,1,0}}",
        f"size={size}x{size} rhs_dilate=2x2 rhs_reversal=1x1",
    )
    assert seconds_of(found, "d") * 1e6 == pytest.approx(microseconds, rel=0.1)


def summed(channels):
    """Returns sums over the pixels of images of bfloat16, as of a batch norm."""
    inner = f"""%inner (p: bf16[256,32,32,{channels}]) -> f32[512,{channels}] {{
  %p = bf16[256,32,32,{channels}]{{3,2,1,0}} parameter(0)
  %c = f32[256,32,32,{channels}]{{3,2,1,0}} convert(%p)
  %b = f32[512,512,{channels}]{{2,1,0}} bitcast(%c)
  %z = f32[] constant(0)
  ROOT %r = f32[512,{channels}]{{1,0}} reduce(%b, %z), dimensions={{1}}, to_apply=%add
}}"""
    return module(
        f"  %a = bf16[256,32,32,{channels}]{{3,2,1,0}} parameter(0)\n"
        f"  ROOT %d = f32[512,{channels}]{{1,0}} fusion(%a), kind=kInput, calls=%inner",
        inner,
    )


def test_sums_over_pixels_stream_slower_where_loads_are_not_vectorised():
    odd, even = (seconds_of(summed(n), "d") / n for n in (160, 128))
    assert odd > 1.3 * even


SLICED = """%inner (p0: {d}[8,4096,4096], p1: {d}[4096,4096], p2: s32[]) -> {d}[4096,4096] {{
  %p0 = {d}[8,4096,4096]{{2,1,0}} parameter(0)
  %p1 = {d}[4096,4096]{{1,0}} parameter(1)
  %p2 = s32[] parameter(2)
  %zero = s32[] constant(0)
  %cut = {d}[1,4096,4096]{{2,1,0}} dynamic-slice(%p0, %p2, %zero, %zero), dynamic_slice_sizes={{1,4096,4096}}
  %a = {d}[4096,4096]{{1,0}} bitcast(%cut)
  ROOT %d = {d}[4096,4096]{{1,0}} custom-call(%a, %p1), custom_call_target="__cublas$lt$matmul", backend_config={{"gemm_backend_config":{{"dot_dimension_numbers":{{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"],"lhs_batch_dimensions":[],"rhs_batch_dimensions":[]}}}}}}
}}"""


@pytest.mark.parametrize(("dtype", "slower"), [("f32", True), ("bf16", False)])
def test_products_of_slices_in_place_take_older_kernels_in_float32(dtype, slower):
    whole = seconds_of(gemm(4096, 4096, 4096, dtype), "d")
    found = module(
        f"  %x = {dtype}[8,4096,4096]{{2,1,0}} parameter(0)\n"
        f"  %y = {dtype}[4096,4096]{{1,0}} parameter(1)\n  %i = s32[] parameter(2)\n"
        f"  ROOT %f = {dtype}[4096,4096]{{1,0}} fusion(%x, %y, %i), kind=kCustom, calls=%inner",
        SLICED.format(d=dtype),
    )
    assert (seconds_of(found, "f") > 1.4 * whole) is slower


def transposing(*steps):
    """Returns a fusion that transposes the last two of three equal dims, once for each step."""
    lines = ["  %t0 = f32[512,512,512]{2,1,0} parameter(0)"]
    for i, order in enumerate(steps):
        lines.append(
            f"  %t{i + 1} = f32[512,512,512]{{2,1,0}} transpose(%t{i}), dimensions={{{order}}}"
        )
    lines[-1] = lines[-1].replace("  %", "  ROOT %", 1)
    head = "%inner (t0: f32[512,512,512]) -> f32[512,512,512] {"
    return module(
        "  %x = f32[512,512,512]{2,1,0} parameter(0)\n"
        "  ROOT %f = f32[512,512,512]{2,1,0} fusion(%x), kind=kInput, calls=%inner",
        "\n".join([head, *lines, "}"]),
    )


def test_a_transpose_of_a_transpose_reads_single_elements():
    once, twice = transposing("0,2,1"), transposing("0,2,1", "1,0,2")
    assert seconds_of(twice, "f") > 2 * seconds_of(once, "f")


def test_kernels_of_the_gpu_before_scale_with_the_others():
    assert gpu_rates("a100").products["f32"].older is None
    f32 = H200.products["f32"]
    half = f32.scaled(0.5)
    assert f32.older is not None and half.older is not None
    assert (half.rate, half.older.rate) == (f32.rate / 2, f32.older.rate / 2)


def test_an_unknown_kernel_is_named_and_widens_the_bound():
    body = (
        "  %a = f32[1048576]{0} parameter(0)\n"
        '  ROOT %c = f32[1048576]{0} custom-call(%a), custom_call_target="mystery", '
        'metadata={op_name="jit(step)/mystery_kernel"}'
    )
    machine = Machine(parse_chips("h200:1x1"), {"data": 1})
    known = time_of(module(body.replace("custom-call", "copy")), machine, (), None)
    found = time_of(module(body), machine, (), None)
    assert found.unpriced == {"mystery_kernel": 1}
    assert found.parts["unknown"] > 0
    assert found.high - found.seconds > known.high - known.seconds


def test_a_chip_without_rates_is_named_with_the_nearest():
    with pytest.raises(ValueError, match="no measured rates for 'h300'.*nearest.*h[12]00"):
        gpu_rates("h300")


# --- links ----------------------------------------------------------------------------------------


def test_measured_collectives_are_met():
    # A row of the table: 2 GiB gathered over 8 H100s at 402 GB/s.
    seconds = measured_seconds("h100", "all-gather", 8, 2**31)
    assert 2**31 / seconds == pytest.approx(402e9, rel=0.02)


@pytest.mark.parametrize("kind", ["all-gather", "reduce-scatter", "all-reduce", "all-to-all"])
def test_across_nodes_is_slower_than_within(kind):
    chips = parse_chips("h100:2x8")
    within = gpu_seconds(chips, kind, 2**28, [list(range(8))])
    across = gpu_seconds(chips, kind, 2**28, [list(range(0, 16, 8))])
    assert (within.name, across.name) == ("nvlink", "network")
    assert across.seconds > within.seconds


def test_a_ring_on_the_torus_is_twice_as_fast_as_a_line():
    cube, part = parse_chips("v5p:4x4x4"), parse_chips("v5p:2x2x4")
    ring = torus_of(cube, {"data": 64})
    line = torus_of(part, {"data": 16})
    assert ring.wraps == (True,) * 3 and line.wraps == (False,) * 3
    row = [i for i, place in enumerate(ring.coordinates) if place[:2] == (0, 0)]
    other = [i for i, place in enumerate(line.coordinates) if place[:2] == (0, 0)]
    fast = tpu_seconds(cube, ring, "all-gather", 2**30, row).seconds
    slow = tpu_seconds(part, line, "all-gather", 2**30, other).seconds
    assert slow / fast == pytest.approx(2.0, rel=0.01)


# --- the schedule ---------------------------------------------------------------------------------

LOOP = """%body (p: (s32[], f32[1048576])) -> (s32[], f32[1048576]) {
  %p = (s32[], f32[1048576]{0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[1048576]{0} get-tuple-element(%p), index=1
  %y = f32[1048576]{0} copy(%x)
  ROOT %t = (s32[], f32[1048576]{0}) tuple(%i, %y)
}

%cond (p: (s32[], f32[1048576])) -> pred[] {
  %p = (s32[], f32[1048576]{0}) parameter(0)
  ROOT %c = pred[] constant(true)
}"""


def looped(trips):
    return module(
        "  %i = s32[] parameter(0)\n  %x = f32[1048576]{0} parameter(1)\n"
        "  %t = (s32[], f32[1048576]{0}) tuple(%i, %x)\n"
        "  ROOT %w = (s32[], f32[1048576]{0}) while(%t), condition=%cond, body=%body, "
        f'backend_config={{"known_trip_count":{{"n":"{trips}"}}}}',
        LOOP,
    )


def test_a_loop_takes_its_trips():
    machine = Machine(parse_chips("h200:1x1"), {"data": 1})
    one, many = (machine.schedule(looped(n)).seconds for n in (1, 100))
    assert many == pytest.approx(100 * one)


ASYNC = """  %a = bf16[4096,4096]{{1,0}} parameter(0)
  %p = bf16[512,4096]{{1,0}} parameter(1)
  %s = (bf16[512,4096]{{1,0}}, bf16[4096,4096]{{1,0}}) all-gather-start(%p), channel_id=1, \
replica_groups=[1,8]<=[8], dimensions={{0}}
{between}
  %e = bf16[4096,4096]{{1,0}} all-gather-done(%s)
{after}
"""


def test_what_runs_between_start_and_done_hides_the_transfer():
    copies = "\n".join(f"  %c{i} = bf16[4096,4096]{{1,0}} copy(%a)" for i in range(40))
    machine = Machine(parse_chips("h200:1x8"), {"data": 8})
    hidden = time_of(module(ASYNC.format(between=copies, after="")), machine, (), None)
    bare = time_of(module(ASYNC.format(between="", after=copies)), machine, (), None)
    (row,) = hidden.communication
    assert row.axes == ("data",) and row.link == "nvlink"
    assert row.exposed == 0 and row.overlapped == row.seconds > 0
    assert {share.name: share.bytes for share in hidden.instructions}["s"] == 2 * 4096 * 4096
    assert bare.communication[0].exposed == pytest.approx(bare.communication[0].seconds)
    assert bare.seconds == pytest.approx(hidden.seconds + row.seconds)


# --- a real step on chips that are absent -------------------------------------------------------


@pytest.fixture
def compiled():
    return compiled_step()


def test_the_parts_are_the_whole(compiled):
    time = compiled[2].time
    assert sum(time.parts.values()) == pytest.approx(time.seconds)
    assert time.low < time.seconds < time.high
    assert {row.axes for row in time.communication} == {("data",)}
    assert 0 < time.mfu < 1 and time.tokens is None and time.tokens_per_second is None
    assert time.gains[time.bound] == max(time.gains.values())
    assert {"up", "down"} <= {share.name for share in time.modules}
    assert any(re.search(r"mlp_step\.py:\d+", share.name) for share in time.lines)
    assert time.verdict in str(compiled[2])


@pytest.mark.parametrize(
    "shape, tokens", [((8, 32), 256), ((8, 32, 32), None), ((8,), None)], ids=str
)
def test_only_a_matrix_of_integers_holds_tokens(shape, tokens):
    batch = {
        "x": jax.ShapeDtypeStruct((8, 4), "float32"),
        "y": jax.ShapeDtypeStruct(shape, "int32"),
    }
    assert tokens_of(batch) == tokens


def test_saved_and_read_back(compiled, tmp_path):
    compiled[2].save(tmp_path / "compiled.json")
    again = sw.load_compiled(tmp_path / "compiled.json").time
    assert again == StepTime.from_dict(json.loads(json.dumps(compiled[2].time.to_dict())))
    with pytest.raises(ValueError, match="does not keep its program"):
        sw.load_compiled(tmp_path / "compiled.json").timeline()
    damaged = json.loads((tmp_path / "compiled.json").read_text())
    damaged["time"] = {"seconds": 1}
    (tmp_path / "damaged.json").write_text(json.dumps(damaged))
    with pytest.raises(ValueError, match="'time' is damaged"):
        sw.load_compiled(tmp_path / "damaged.json")


def test_the_timeline_opens_in_perfetto(compiled, tmp_path):
    timeline = compiled[2].timeline()
    timeline.save(tmp_path / "step.json")
    trace = json.loads((tmp_path / "step.json").read_text())
    slices = [row for row in trace["traceEvents"] if row["ph"] == "X"]
    tracks = {row["args"]["name"] for row in trace["traceEvents"] if row["name"] == "thread_name"}
    assert tracks == set(timeline.streams) and "compute" in tracks and "nvlink" in tracks
    end = max(row["ts"] + row["dur"] for row in slices)
    assert end == pytest.approx(timeline.seconds * 1e6, rel=1e-3)
    # On one stream nothing overlaps.
    for track in {row["tid"] for row in slices}:
        own = sorted((row["ts"], row["dur"]) for row in slices if row["tid"] == track)
        for (start, long), (following, _) in zip(own, own[1:], strict=False):
            assert start + long <= following + 0.01
    assert any(row["args"].get("flops") for row in slices)
    # The largest message is the batch in bfloat16, which is smaller than a kernel.
    (link,) = [row["tid"] for row in trace["traceEvents"] if row["args"].get("name") == "nvlink"]
    moved = [row["args"].get("bytes", 0) for row in slices if row["tid"] == link]
    assert all(moved) and max(moved) == 2 * 2048 * 1024
    assert any("mlp_step.py" in row["args"].get("line", "") for row in slices)


def test_a_program_of_many_instructions_is_priced_at_once(tmp_path):
    """Four times what a scanned 70B step has; benchmarks/pricing.py measures a real one."""
    layers, lines = 1500, ["  %x0 = bf16[4096,4096]{1,0} parameter(0)"]
    lines.append("  %p = bf16[512,4096]{1,0} parameter(1)")
    for i in range(layers):
        lines += [
            f"  %s{i} = (bf16[512,4096]{{1,0}}, bf16[4096,4096]{{1,0}}) all-gather-start(%p), "
            f"channel_id={i + 1}, replica_groups=[1,8]<=[8], dimensions={{0}}, "
            f'metadata={{op_name="jit(step)/block{i}/all_gather"}}',
            f"  %a{i} = bf16[4096,4096]{{1,0}} add(%x{i}, %x{i})",
            f"  %t{i} = bf16[4096,4096]{{1,0}} copy(%a{i})",
            f"  %d{i} = bf16[4096,4096]{{1,0}} all-gather-done(%s{i})",
            f"  %m{i} = bf16[4096,4096]{{1,0}} dot(%t{i}, %d{i}), lhs_contracting_dims={{1}}, "
            f'rhs_contracting_dims={{0}}, metadata={{op_name="jit(step)/block{i}/dot_general"}}',
            f"  %x{i + 1} = bf16[4096,4096]{{1,0}} negate(%m{i})",
        ]
    found = module("\n".join(lines))
    machine = Machine(parse_chips("h200:1x8"), {"data": 8})
    began = clock.process_time()
    time = time_of(found, machine, (), None)
    timeline = timeline_of(found, machine.throttled(found), (), "many")
    assert clock.process_time() - began < 4  # 1 s on a machine at rest
    assert len(timeline.events) == 5 * layers and time.model_flops == 2 * 4096**3 * layers
    timeline.save(tmp_path / "step.json")
    assert (tmp_path / "step.json").stat().st_size < 5e6


def test_faster_chips_take_less_time(compiled):
    _, _, full = compiled
    slow = dataclasses.replace(full.machine, chips=parse_chips("a100:1x8"))
    assert time_of(parse_hlo(full.hlo), slow, (), None).seconds > full.time.seconds


# --- calibration ----------------------------------------------------------------------------------


def calibration(**changes):
    return dataclasses.replace(
        Calibration("h100", "NVIDIA H100", {"bf16": 0.5, "f32": 1.0}, 2e12, 1.0), **changes
    )


def test_measured_rates_replace_the_shipped_ones(compiled, tmp_path):
    recipe, layout, full = compiled
    calibration().save(tmp_path / "slow.json")
    slow = sw.compile(recipe, layout, calibration=tmp_path / "slow.json", show=False)
    assert slow.time.seconds > full.time.seconds
    assert "calibrated on NVIDIA H100" in slow.time.rates


def test_measured_collectives_are_used():
    rows = tuple(("all-gather", 8, size, size / 1e9) for size in (2**20, 2**28))
    chips = parse_chips("h100:1x8")
    machine = Machine(chips, {"data": 8}, calibration(collectives=rows))
    assert machine.link("all-gather", 2**24, [list(range(8))]).seconds == pytest.approx(
        2**24 / 1e9, rel=0.01
    )


@pytest.mark.parametrize(
    "text, why",
    [
        ("", "it is empty"),
        ("{}", "chips measure"),
        ('{"format": 1, "chip": "h100"}', "it has no 'device'"),
        ('{"format": 1, "chip": "z9", "device": "", "products": {}}', "no measured rates"),
        ('{"format": 1, "chip": "h100", "device": "", "products": {"bf16": -1}}', "positive"),
    ],
)
def test_what_is_no_calibration_is_refused(text, why, tmp_path):
    (tmp_path / "c.json").write_text(text)
    with pytest.raises(ValueError, match=f"c.json is not a calibration.*{why}"):
        load_calibration(tmp_path / "c.json")


def test_a_calibration_of_other_chips_is_refused(compiled, tmp_path):
    recipe, layout, _ = compiled
    calibration(chip="a100").save(tmp_path / "c.json")
    with pytest.raises(ValueError, match="calibration is of a100.*chips are h100:1x8"):
        sw.compile(recipe, layout, calibration=tmp_path / "c.json", show=False)


def test_a_slow_run_is_told_where_to_look(compiled):
    found = sw.estimate(*compiled[:2])
    assert "expected (modelled)" in compared(found, found.seconds)
    assert "Look at whether the data" not in compared(found, found.seconds)
    assert "Look at whether the data" in compared(found, 2 * found.seconds)
    assert compared(None, 1.0) == ""


def test_large_products_of_16_and_8_bits():
    flops = 2 * 8192**3
    known = (product_seconds(H200, dtype, *(8192,) * 3) for dtype in ("bf16", "f16", "f8e4m3fn"))
    wide, same, narrow = known
    assert same == wide
    # NVIDIA's peaks of an H200, which no product reaches.
    assert 989e12 > flops / wide > 650e12 and 1979e12 > flops / narrow > 1.5 * flops / wide
