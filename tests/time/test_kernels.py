"""Kernels of programs that were profiled on an H200: their prices are near what was measured."""

import pytest

from shardwise._hlo import parse_hlo
from shardwise._time.pricing import GpuPricer
from shardwise._time.pricing.rates import H200

MICRO = 1e-6


def price_of(body, *others):
    text = "HloModule m\n\n" + "\n\n".join([*others, "ENTRY %main {\n" + body + "\n}\n"])
    found = parse_hlo(text)
    return GpuPricer(found, H200).price("main", found.by_name["main"]["k"])


def product(batch, rows, columns, contracted, dtype="f32"):
    """Returns the price of a product of row-major arrays, in batches or not."""
    lead, order = (f"{batch},", "{2,1,0}") if batch > 1 else ("", "{1,0}")
    dims, first = ('["0"]', "2") if batch > 1 else ("[]", "1")
    second = "1" if batch > 1 else "0"
    return price_of(
        f"  %a = {dtype}[{lead}{rows},{contracted}]{order} parameter(0)\n"
        f"  %b = {dtype}[{lead}{contracted},{columns}]{order} parameter(1)\n"
        f"  ROOT %k = (f32[{lead}{rows},{columns}]{order}, s8[33554432]{{0}}) custom-call(%a, %b), "
        'custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":'
        f'{{"dot_dimension_numbers":{{"lhs_contracting_dimensions":["{first}"],'
        f'"rhs_contracting_dimensions":["{second}"],"lhs_batch_dimensions":{dims},'
        f'"rhs_batch_dimensions":{dims}}}}}}}'
    )


@pytest.mark.parametrize(
    ("sizes", "dtype", "microseconds"),
    [
        # Rows that are no multiple of 16 bytes: a vocabulary of 30,522 words, windows of 7 x 7.
        ((1, 18432, 30522, 512), "f32", 5061.0),
        ((1, 512, 30522, 18432), "f32", 4377.0),
        ((16384, 49, 32, 49), "bf16", 141.5),
        # Many small products, without tensor cores.
        ((8192, 26, 64, 13), "f32", 45.0),
        # The same sizes of windows, padded to rows of 16 bytes.
        ((16384, 32, 56, 56), "bf16", 70.2),
    ],
)
def test_products_with_rows_of_any_length(sizes, dtype, microseconds):
    assert product(*sizes, dtype).seconds == pytest.approx(microseconds * MICRO, rel=0.25)


ADD = """%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %s = f32[] add(%x, %y)
}"""
LAST = """%last (x: bf16[], y: bf16[]) -> bf16[] {
  %x = bf16[] parameter(0)
  ROOT %y = bf16[] parameter(1)
}"""


def scattered(into, updates, window, dtype="f32", how="add"):
    """Returns the price of adding (or placing) updates at indices."""
    layout = ",".join(str(n) for n in reversed(range(len(into.split(",")))))
    rank = ",".join(str(n) for n in reversed(range(len(updates.split(",")))))
    rows = updates.split(",")[0]
    return price_of(
        f"  %a = {dtype}[{into}]{{{layout}}} parameter(0)\n"
        f"  %i = s32[{rows},1]{{1,0}} parameter(1)\n"
        f"  %u = {dtype}[{updates}]{{{rank}}} parameter(2)\n"
        f"  ROOT %k = {dtype}[{into}]{{{layout}}} scatter(%a, %i, %u), "
        f"update_window_dims={{{window}}}, inserted_window_dims={{}}, "
        f"scatter_dims_to_operand_dims={{0}}, index_vector_dim=1, to_apply=%{how}",
        ADD,
        LAST,
    )


@pytest.mark.parametrize(
    ("into", "updates", "window", "microseconds"),
    [
        ("32000,1152", "12288,1,1152", "1,2", 35.3),  # an embedding's gradient
        ("16384,256", "131072,1,256", "1,2", 647.0),  # messages that nodes of a graph share
        ("128,80,80,64", "13107200,1,1,1,1", "1,2,3,4", 191.7),  # each pixel of max-pooling
    ],
)
def test_updates_that_are_added(into, updates, window, microseconds):
    found = scattered(into, updates, window)
    assert found.seconds == pytest.approx(microseconds * MICRO, rel=0.25)


def test_updates_that_are_placed_wait_for_nobody():
    added, placed = (
        scattered("16,1920,384", "24576,1,1,384", "1,2,3", "bf16", how) for how in ("add", "last")
    )
    assert added.seconds == pytest.approx(60.7 * MICRO, rel=0.25)
    assert placed.seconds < added.seconds / 3


def softmax_gradient(tile, warps):
    """Returns the price of the gradient of a softmax over rows of 384, as Triton computes it."""
    dims = "f32[48,8,384,384]{3,2,1,0}"
    inner = f"""%inner (p0: f32[48,8,384,384], p1: f32[48,8,384,384], p2: f32[48,8,384]) -> f32[48,8,384,384] {{
  %p0 = {dims} parameter(0)
  %p1 = {dims} parameter(1)
  %p2 = f32[48,8,384]{{2,1,0}} parameter(2)
  %b = {dims} broadcast(%p2), dimensions={{0,1,2}}
  %d = {dims} divide(%p0, %b)
  %e = {dims} exponential(%p1)
  %m1 = {dims} multiply(%d, %e)
  %m2 = {dims} multiply(%m1, %b)
  %zero = f32[] constant(0)
  %r = f32[48,8,384]{{2,1,0}} reduce(%m2, %zero), dimensions={{3}}, to_apply=%add
  %br = {dims} broadcast(%r), dimensions={{0,1,2}}
  %m3 = {dims} multiply(%br, %e)
  %m4 = {dims} multiply(%m3, %d)
  ROOT %s = {dims} subtract(%m1, %m4)
}}"""
    sizes = ",".join(f'"{n}"' for n in tile)
    return price_of(
        f"  %a = {dims} parameter(0)\n  %b = {dims} parameter(1)\n"
        "  %c = f32[48,8,384]{2,1,0} parameter(2)\n"
        f"  ROOT %k = {dims} fusion(%a, %b, %c), kind=kCustom, calls=%inner, "
        'backend_config={"fusion_backend_config":{"kind":"__triton","block_level_fusion_config":'
        f'{{"num_warps":"{warps}","output_tiles":[{{"sizes":[{sizes}]}}]}}}}}}',
        ADD,
        inner,
    )


def test_rows_that_do_not_fit_into_registers_stream_slower():
    fits = softmax_gradient((1, 1, 16, 384), 8).seconds
    full = softmax_gradient((2, 1, 16, 384), 8).seconds
    apart = softmax_gradient((4, 8, 1, 384), 8).seconds
    assert 1.3 * fits < full < apart / 1.3
    assert apart == pytest.approx(544.7 * MICRO, rel=0.2)


def gathered(tables, width):
    """Returns the price of reading rows of some tables and writing them side by side."""
    given = [f"  %t{i} = f32[40000,{width}]{{1,0}} parameter({i})" for i in range(tables)]
    index = f"  %i = s32[16384,1]{{1,0}} parameter({tables})"
    rows = [
        f"  %g{i} = f32[16384,{width}]{{1,0}} gather(%t{i}, %i), offset_dims={{1}}, "
        f"collapsed_slice_dims={{0}}, start_index_map={{0}}, index_vector_dim=1, "
        f"slice_sizes={{1,{width}}}"
        for i in range(tables)
    ]
    out = f"f32[16384,{tables * width}]{{1,0}}"
    names = ", ".join(f"%g{i}" for i in range(tables))
    signature = ", ".join(f"t{i}: f32[40000,{width}]" for i in range(tables))
    inner = "\n".join(
        [
            f"%inner ({signature}, i: s32[16384,1]) -> f32[16384,{tables * width}] {{",
            *given,
            index,
            *rows,
            f"  ROOT %c = {out} concatenate({names}), dimensions={{1}}",
            "}",
        ]
    )
    names = ", ".join([*(f"%t{i}" for i in range(tables)), "%i"])
    body = [*given, index, f"  ROOT %k = {out} fusion({names}), kind=kLoop, calls=%inner"]
    return price_of("\n".join(body), inner)


def test_rows_of_many_tables_are_read_at_random():
    assert gathered(26, 32).seconds == pytest.approx(69 * MICRO, rel=0.15)
    assert 2 * gathered(2, 416).seconds < gathered(26, 32).seconds * 1.2


def test_elements_of_columns_are_added_apart():
    pairs = scattered("16384,27,27", "351,16384,1,1", "1,2,3")
    assert pairs.seconds == pytest.approx(341 * MICRO, rel=0.2)


def sums(rows, columns, *, writes):
    """Returns the price of sums over columns, and of writing what they are of."""
    shape = f"f32[{rows},{columns}]{{1,0}}"
    root = "%t = (f32[{c}]{{0}}, {s}) tuple(%r, %n)" if writes else "%q = f32[{c}]{{0}} copy(%r)"
    out = f"(f32[{columns}]{{0}}, {shape})" if writes else f"f32[{columns}]{{0}}"
    inner = f"""%inner (p0: f32[{rows},{columns}]) -> f32[{columns}] {{
  %p0 = {shape} parameter(0)
  %n = {shape} negate(%p0)
  %zero = f32[] constant(0)
  %r = f32[{columns}]{{0}} reduce(%n, %zero), dimensions={{0}}, to_apply=%add
  ROOT {root.format(c=columns, s=shape)}
}}"""
    return price_of(
        f"  %a = {shape} parameter(0)\n  ROOT %k = {out} fusion(%a), kind=kInput, calls=%inner",
        ADD,
        inner,
    )


def test_few_blocks_that_sum_and_write_take_a_while():
    assert sums(3136, 256, writes=True).seconds == pytest.approx(36.9 * MICRO, rel=0.25)
    assert sums(3136, 256, writes=False).seconds < 10 * MICRO


def test_a_long_window_with_a_bias_goes_without_shared_memory():
    found = price_of(
        "  %a = f32[16,4128,128]{2,1,0} parameter(0)\n  %b = f32[256,33,128]{2,1,0} parameter(1)\n"
        "  %c = f32[256]{0} parameter(2)\n"
        "  ROOT %k = (f32[16,4096,256]{2,1,0}, u8[131]{0}) custom-call(%a, %b, %c), "
        "window={size=33}, dim_labels=b0f_o0i->b0f, "
        'custom_call_target="__cudnn$convBiasActivationForward"'
    )
    assert found.seconds == pytest.approx(1675.6 * MICRO, rel=0.1)
    assert found.gap > 0


def test_the_clock_falls_where_products_and_attention_fill_the_step():
    shares = [H200.slowdown(share) for share in (0.3, 0.5, 0.7, 0.9)]
    assert shares[0] == 1.0 and shares == sorted(shares)
    assert shares[-1] < 1.2


def attended(window):
    """Returns the price of a causal attention whose queries see so many keys, or all: 0."""
    shape = "bf16[2,6144,7,128]{3,2,1,0}"
    return price_of(
        "\n".join(f"  %{n} = {shape} parameter({i})" for i, n in enumerate("abc"))
        + "\n  ROOT %k = (bf16[2,7,6144,128]{3,1,2,0}, f32[2,7,6144]{2,1,0}) "
        'custom-call(%a, %b, %c), custom_call_target="__cudnn$fmhaSoftmax", '
        'backend_config={"cudnn_fmha_backend_config":{"mask_type":"CAUSAL",'
        f'"sliding_window_length": {window}}}}}'
    )


def test_a_sliding_window_leaves_keys_out():
    full, near = attended(0), attended(1024)
    assert near.flops == 4 * 2 * 7 * 128 * (1024 * 6144 - 1024**2 // 2)
    assert near.seconds == pytest.approx(106.9 * MICRO, rel=0.2)
    assert full.seconds == pytest.approx(269 * MICRO, rel=0.2)


@pytest.mark.parametrize(
    ("dtype", "images", "filters", "out", "window", "microseconds"),
    [
        # The gradients of transposed convolutions, with the batch for channels.
        ("bf16", "64,64,64,48", "64,64,64,48", "3,4,4,64", 64, 1101.8),
        ("bf16", "128,32,32,48", "64,32,32,48", "64,4,4,128", 32, 280.9),
        ("f32", "80,96,96,12", "160,48,48,12", "80,2,2,160", 48, 1113.2),
    ],
)
def test_gradients_written_as_convolutions(dtype, images, filters, out, window, microseconds):
    found = price_of(
        f"  %a = {dtype}[{images}]{{3,2,1,0}} parameter(0)\n"
        f"  %b = {dtype}[{filters}]{{3,2,1,0}} parameter(1)\n"
        f"  ROOT %k = ({dtype}[{out}]{{3,2,1,0}}, u8[0]{{0}}) custom-call(%a, %b), "
        f"window={{size={window}x{window} rhs_dilate=2x2}}, dim_labels=b01f_o01i->b01f, "
        'custom_call_target="__cudnn$convForward"'
    )
    assert found.seconds == pytest.approx(microseconds * MICRO, rel=0.15)


def transposed(kind, last):
    """Returns the price of a transpose that brings the batch of some images last."""
    given, made = f"f32[{last},96,96,80]{{3,2,1,0}}", f"f32[80,96,96,{last}]{{3,2,1,0}}"
    inner = f"""%inner (p0: f32[{last},96,96,80]) -> f32[80,96,96,{last}] {{
  %p0 = {given} parameter(0)
  ROOT %t = {made} transpose(%p0), dimensions={{3,1,2,0}}
}}"""
    return price_of(
        f"  %a = {given} parameter(0)\n  ROOT %k = {made} fusion(%a), kind={kind}, calls=%inner",
        inner,
    )


def test_a_transpose_that_puts_few_last_reads_single_elements():
    assert transposed("kLoop", 12).seconds == pytest.approx(70.4 * MICRO, rel=0.15)
    assert transposed("kInput", 48).seconds < 2 * transposed("kLoop", 12).seconds


def updated(filters, turned):
    """Returns the price of an Adam update of a filter, of weights turned before it or in it."""
    rows, columns = filters
    mine, theirs = f"f32[1,1,{rows},{columns}]{{3,2,1,0}}", f"f32[{columns},1,1,{rows}]{{3,2,1,0}}"
    names = ["mu", "nu", "w"]
    given = [mine, mine, theirs if turned else mine]
    lines = [
        f"  %{n} = {s} parameter({i})" for i, (n, s) in enumerate(zip(names, given, strict=True))
    ]
    lines.append(f"  %g = {theirs} parameter(3)")
    found = []
    for n, shape in zip(names, given, strict=True):
        if shape == mine:
            lines.append(f"  %{n}t = {theirs} transpose(%{n}), dimensions={{3,0,1,2}}")
        lines.append(f"  %{n}a = {theirs} add(%{n if shape != mine else n + 't'}, %g)")
        lines.append(f"  %{n}o = {mine} transpose(%{n}a), dimensions={{1,2,3,0}}")
        found.append(f"%{n}o")
    out = f"({mine}, {mine}, {mine})"
    lines.append(f"  ROOT %all = {out} tuple({', '.join(found)})")
    signature = ", ".join(
        f"{n}: {s.split('{')[0]}" for n, s in zip([*names, "g"], [*given, theirs], strict=True)
    )
    inner = f"%inner ({signature}) -> {out} {{\n" + "\n".join(lines) + "\n}"
    outer = [
        f"  %{n} = {s} parameter({i})" for i, (n, s) in enumerate(zip(names, given, strict=True))
    ]
    return price_of(
        "\n".join([*outer, f"  %g = {theirs} parameter(3)"])
        + f"\n  ROOT %k = {out} fusion(%mu, %nu, %w, %g), kind=kInput, calls=%inner",
        inner,
    )


def test_updates_of_filters_of_single_pixels():
    assert updated((256, 1024), turned=True).seconds == pytest.approx(5.9 * MICRO, rel=0.5)
    assert updated((1024, 2048), turned=True).seconds == pytest.approx(41.3 * MICRO, rel=0.3)
    assert updated((192, 384), turned=False).seconds == pytest.approx(4.5 * MICRO, rel=0.4)
