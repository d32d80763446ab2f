"""What each JAX primitive does to dims: the transfer rules of `dataflow`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from ..._jax import opened, scan_parts
from .dataflow import Tracer, Val
from .factors import Dim, fresh, regroup, resolve

Transfer = Callable[[Tracer, Any, list[Val]], list[Val]]
RULES: dict[str, Transfer] = {}

_ELEMENTWISE = """
abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e bitcast_convert_type
cbrt ceil clamp clz complex conj convert_element_type copy cos cosh device_put digamma div eq eq_to
erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igammac igamma_grad_a imag integer_pow is_finite
layout_constraint le le_to lgamma log log1p log2 logistic lt lt_to max min mul mulhi name ne neg
nextafter not one_minus_square optimization_barrier or polygamma polynomial population_count pow pvary
real reduce_precision regularized_incomplete_beta rem reshard round rsqrt select_n
sharding_constraint shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square
stop_gradient sub tan tanh with_memory_space_constraint xor zeros_like zeta
""".split()


def _rule(*names: str) -> Callable[[Transfer], Transfer]:
    def add(transfer: Transfer) -> Transfer:
        RULES.update(dict.fromkeys(names, transfer))
        return transfer

    return add


def _past(values: Sequence[Val]) -> tuple[bool, int]:
    live, past = False, 0
    for value in values:
        live |= value.live
        past |= value.past
    return live, past


def _shapes(eqn: Any) -> list[tuple[int, ...]]:
    return [tuple(getattr(v.aval, "shape", ())) for v in eqn.outvars]


def unknown_primitive(tracer: Tracer, eqn: Any, values: list[Val]) -> list[Val]:
    """Returns values that share no dims with the operands, and marks those dims as broken."""
    live, past = _past(values)
    for value in values:
        for dim in value.dims:
            tracer.breaks(dim, f"it goes through {eqn.primitive.name!r}")
    return [tracer.unknown(shape, live, past) for shape in _shapes(eqn)]


@_rule(*_ELEMENTWISE)
def _elementwise(tracer: Tracer, eqn: Any, values: list[Val]) -> list[Val]:
    live, past = _past(values)
    if len(eqn.outvars) > 1:  # optimization_barrier, device_put: each operand to its own output
        return list(values)
    (shape,) = _shapes(eqn)
    dims = [fresh(size) for size in shape]
    seen = [False] * len(shape)
    for atom, value in zip(eqn.invars, values, strict=True):
        if len(value.dims) != len(shape):
            continue
        for d, size in enumerate(shape):
            if atom.aval.shape[d] != size or size == 1:  # a dim of size 1 is broadcast
                continue
            if seen[d]:
                tracer.same(dims[d], value.dims[d], "two dims that meet do not line up")
            else:
                dims[d], seen[d] = value.dims[d], True
    return [Val(dims, live, past)]


@_rule("transpose")
def _transpose(tracer: Tracer, eqn: Any, values: list[Val]) -> list[Val]:
    (x,) = values
    return [Val([x.dims[d] for d in eqn.params["permutation"]], x.live, x.past)]


@_rule("reshape", "squeeze")
def _reshape(tracer: Tracer, eqn: Any, values: list[Val]) -> list[Val]:
    x, (shape,) = values[0], _shapes(eqn)
    dims = regroup(x.dims, shape)
    if dims is None:
        for dim in x.dims:
            tracer.breaks(dim, "a reshape cuts across it")
        return [tracer.unknown(shape, x.live, x.past)]
    return [Val(dims, x.live, x.past)]


@_rule("broadcast_in_dim", "broadcast_to")
def _broadcast(tracer: Tracer, eqn: Any, values: list[Val]) -> list[Val]:
    x, (shape,) = values[0], _shapes(eqn)
    dims = [fresh(size) for size in shape]
    first = len(shape) - len(x.dims)
    places = eqn.params.get("broadcast_dimensions", range(first, len(shape)))
    for dim, to in enumerate(places):
        if eqn.invars[0].aval.shape[dim] == shape[to]:
            dims[to] = x.dims[dim]
    return [Val(dims, x.live, x.past)]


@_rule(
    *("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or"),
    *("reduce_xor", "argmax", "argmin", "reduce"),
)
def _reduce(tracer: Tracer, eqn: Any, values: list[Val]) -> list[Val]:
    axes = eqn.params.get("axes", eqn.params.get("dimensions", ()))
    live, past = _past(values)
    outputs = []
    for x in values[: len(eqn.outvars)]:
        for dim in axes:
            tracer.reduces(x.dims[dim], "it is reduced over, as a norm or a softmax does")
        kept = [d for i, d in enumerate(x.dims) if i not in axes]
        outputs.append(Val(kept, live, past))
    return outputs


@_rule("slice")
def _slice(tracer: Tracer, eqn: Any, values: list[Val]) -> list[Val]:
    return [_window(tracer, eqn, values[0], "it is sliced")]


@_rule("dynamic_slice")
def _dynamic_slice(tracer: Tracer, eqn: Any, values: list[Val]) -> list[Val]:
    live, past = _past(values)
    out = _window(tracer, eqn, values[0], "it is sliced at a position that varies")
    return [Val(out.dims, live, past)]


@_rule("pad")
def _pad(tracer: Tracer, eqn: Any, values: list[Val]) -> list[Val]:
    return [_window(tracer, eqn, values[0], "it is padded")]


@_rule("split")
def _split(tracer: Tracer, eqn: Any, values: list[Val]) -> list[Val]:
    (x,) = values
    axis = eqn.params["axis"]
    tracer.breaks(x.dims[axis], "it is split into parts")
    return [
        Val([fresh(s) if d == axis else x.dims[d] for d, s in enumerate(shape)], x.live, x.past)
        for shape in _shapes(eqn)
    ]


def _window(tracer: Tracer, eqn: Any, x: Val, why: str) -> Val:
    """Returns `x` with every dim whose size changes marked as broken and replaced."""
    before, (after,) = eqn.invars[0].aval.shape, _shapes(eqn)
    dims: list[Dim] = []
    for dim, (old, new) in enumerate(zip(before, after, strict=True)):
        if old != new:
            tracer.breaks(x.dims[dim], why)
        dims.append(x.dims[dim] if old == new else fresh(new))
    return Val(dims, x.live, x.past)


@_rule("concatenate")
def _concatenate(tracer: Tracer, eqn: Any, values: list[Val]) -> list[Val]:
    axis = eqn.params["dimension"]
    live, past = _past(values)
    if len(values) == 1:
        return [values[0]]
    for x in values:
        tracer.breaks(x.dims[axis], "it is concatenated with others")
    for x in values[1:]:
        for d, (a, b) in enumerate(zip(values[0].dims, x.dims, strict=True)):
            if d != axis:
                tracer.same(a, b, "two dims that meet do not line up")
    (shape,) = _shapes(eqn)
    dims = [fresh(s) if d == axis else values[0].dims[d] for d, s in enumerate(shape)]
    return [Val(dims, live, past)]


@_rule("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "rev", "sort")
def _along(tracer: Tracer, eqn: Any, values: list[Val]) -> list[Val]:
    named = [eqn.params[k] for k in ("axis", "dimension", "dimensions") if k in eqn.params]
    axes = named[0] if isinstance(named[0], tuple) else (named[0],)
    for x in values:
        for axis in axes:
            tracer.breaks(x.dims[axis], f"{eqn.primitive.name!r} runs along it")
    return [Val(x.dims, x.live, x.past) for x in values]


@_rule("top_k")
def _top_k(tracer: Tracer, eqn: Any, values: list[Val]) -> list[Val]:
    (x,) = values
    tracer.breaks(x.dims[-1], "'top_k' runs along it")
    return [Val([*x.dims[:-1], fresh(s[-1])], x.live, x.past) for s in _shapes(eqn)]


@_rule("iota", "rng_bit_generator", "random_seed", "random_bits", "random_wrap", "random_unwrap")
@_rule("random_fold_in", "random_split", "random_clone", "random_gamma", "threefry2x32")
def _source(tracer: Tracer, eqn: Any, values: list[Val]) -> list[Val]:
    return [tracer.unknown(shape) for shape in _shapes(eqn)]


@_rule("dot_general")
def _dot(tracer: Tracer, eqn: Any, values: list[Val]) -> list[Val]:
    lhs, rhs = values
    (lc, rc), (lb, rb) = eqn.params["dimension_numbers"]
    for a, b in [*zip(lc, rc, strict=True), *zip(lb, rb, strict=True)]:
        tracer.same(lhs.dims[a], rhs.dims[b], "two contracted dims do not line up")
    left = [d for i, d in enumerate(lhs.dims) if i not in (*lc, *lb)]
    right = [d for i, d in enumerate(rhs.dims) if i not in (*rc, *rb)]
    past = lhs.past | rhs.past
    if lhs.live and rhs.live:
        kind, produced = "activations", []
    elif lhs.live or rhs.live:
        kind, produced = "weights", right if lhs.live else left
    else:
        kind, produced = "leaves", []
    past |= tracer.site(kind, [lhs.dims[d] for d in lc], produced, past)
    batch = [lhs.dims[d] for d in lb]
    return [Val([*batch, *left, *right], lhs.live or rhs.live, past)]


@_rule("conv_general_dilated")
def _conv(tracer: Tracer, eqn: Any, values: list[Val]) -> list[Val]:
    lhs, rhs = values
    numbers = eqn.params["dimension_numbers"]
    lhs_spec, rhs_spec, out_spec = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    (shape,) = _shapes(eqn)
    channels, kernel_in, kernel_out = (
        lhs.dims[lhs_spec[1]],
        rhs.dims[rhs_spec[1]],
        rhs.dims[rhs_spec[0]],
    )
    groups = eqn.params["feature_group_count"]
    past = lhs.past | rhs.past
    dims = [fresh(size) for size in shape]
    if eqn.params["batch_group_count"] == 1:
        dims[out_spec[0]], dims[out_spec[1]] = lhs.dims[lhs_spec[0]], kernel_out
    if groups > 1 and eqn.params["batch_group_count"] == 1 and _size(channels) == groups:
        # Depthwise: each channel produces its own outputs, which are its inner factor.
        outer = regroup([kernel_out], (groups, _size(kernel_out) // groups))
        if outer is None:
            tracer.breaks(kernel_out, "the groups of a convolution cut across it")
            tracer.breaks(channels, "the groups of a convolution cut across it")
        else:
            tracer.same(channels, outer[0], "the channels of a convolution do not line up")
    elif groups > 1 or eqn.params["batch_group_count"] > 1:
        # XLA gathers the channels before such a convolution, however they are split.
        for dim in (lhs.dims[lhs_spec[0]], channels, kernel_in, kernel_out):
            tracer.breaks(dim, "a convolution mixes it within groups")
    else:
        tracer.same(channels, kernel_in, "the channels of a convolution do not line up")
        kind = "weights" if lhs.live != rhs.live else "activations" if lhs.live else "leaves"
        past |= tracer.site(kind, [channels], [kernel_out], past)
    for spec, x in ((lhs_spec, lhs), (rhs_spec, rhs)):
        for d in spec[2:]:
            tracer.breaks(x.dims[d], "a convolution slides along it")
    return [Val(dims, lhs.live or rhs.live, past)]


def _size(dim: Dim) -> int:
    return math.prod(factor.size for factor in resolve(dim))


@_rule("reduce_window_sum", "reduce_window_max", "reduce_window_min", "reduce_window")
def _pool(tracer: Tracer, eqn: Any, values: list[Val]) -> list[Val]:
    live, past = _past(values)
    outputs = []
    for x, shape in zip(values, _shapes(eqn), strict=False):
        dims: list[Dim] = []
        for d, window in enumerate(eqn.params["window_dimensions"]):
            if window == 1 and x.dims[d] and shape[d] == eqn.invars[0].aval.shape[d]:
                dims.append(x.dims[d])
            else:
                tracer.breaks(x.dims[d], "a window slides along it")
                dims.append(fresh(shape[d]))
        outputs.append(Val(dims, live, past))
    return outputs


@_rule("gather")
def _gather(tracer: Tracer, eqn: Any, values: list[Val]) -> list[Val]:
    operand, indices = values
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    (shape,) = _shapes(eqn)
    live, past = _past(values)
    batching = tuple(numbers.operand_batching_dims)
    dims = [fresh(size) for size in shape]
    index_dims = iter(indices.dims[:-1])
    for d in range(len(shape)):
        if d not in numbers.offset_dims:
            dims[d] = next(index_dims)
    for d, other in zip(batching, numbers.start_indices_batching_dims, strict=True):
        tracer.same(operand.dims[d], indices.dims[other], "two batch dims do not line up")
    offsets = iter(numbers.offset_dims)
    kept: list[Dim] = []
    looked_up: list[Dim] = []
    for d, dim in enumerate(operand.dims):
        if d in batching:
            continue
        if d in numbers.collapsed_slice_dims:
            looked_up.append(dim)
            continue
        to = next(offsets)
        if sizes[d] == eqn.invars[0].aval.shape[d]:
            dims[to] = dim
            kept.append(dim)
        else:
            tracer.breaks(dim, "it is sliced at positions that vary")
    if operand.live:
        for dim in looked_up:
            tracer.reduces(dim, "it is indexed")
    elif not indices.live:
        for dim in looked_up:
            tracer.breaks(dim, "it is indexed")
    elif looked_up:
        past |= tracer.site("lookup", looked_up, kept, past)
    return [Val(dims, live, past)]


@_rule("dynamic_update_slice")
def _update_slice(tracer: Tracer, eqn: Any, values: list[Val]) -> list[Val]:
    operand, update = values[0], values[1]
    for d, (old, new) in enumerate(
        zip(eqn.invars[0].aval.shape, eqn.invars[1].aval.shape, strict=True)
    ):
        if old == new:
            tracer.same(operand.dims[d], update.dims[d], "two dims that meet do not line up")
            tracer.written.append(operand.dims[d])
        else:
            tracer.breaks(operand.dims[d], "a part of it is overwritten")
            tracer.breaks(update.dims[d], "it overwrites a part of another dim")
    live, past = _past(values)
    return [Val(operand.dims, live, past)]


@_rule("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max")
def _scatter(tracer: Tracer, eqn: Any, values: list[Val]) -> list[Val]:
    operand, updates = values[0], values[2]
    numbers = eqn.params["dimension_numbers"]
    sizes, update_sizes = eqn.invars[0].aval.shape, eqn.invars[2].aval.shape
    window = iter(numbers.update_window_dims)
    # The update's other dims are those of the indices, in order, except the index dim itself.
    scattered = [d for d in range(len(update_sizes)) if d not in numbers.update_window_dims]
    batching = dict(
        zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True)
    )
    for d, dim in enumerate(operand.dims):
        if d in batching:
            along = updates.dims[scattered[batching[d]]]
            tracer.same(dim, along, "two batch dims do not line up")
            tracer.written.append(dim)
            continue
        if d in numbers.inserted_window_dims:
            tracer.breaks(dim, "it is written at positions that vary")
            continue
        other = next(window)
        if update_sizes[other] == sizes[d]:
            tracer.same(dim, updates.dims[other], "two dims that meet do not line up")
            tracer.written.append(dim)
        else:
            tracer.breaks(dim, "a part of it is overwritten")
            tracer.breaks(updates.dims[other], "it overwrites a part of another dim")
    live, past = _past(values)
    return [Val(operand.dims, live, past)]


@_rule("unstack")
def _unstack(tracer: Tracer, eqn: Any, values: list[Val]) -> list[Val]:
    (x,) = values
    axis = eqn.params["axis"]
    tracer.breaks(x.dims[axis], "it is split into parts")
    rest = [d for i, d in enumerate(x.dims) if i != axis]
    return [Val(rest, x.live, x.past) for _ in eqn.outvars]


@_rule("stack")
def _stack(tracer: Tracer, eqn: Any, values: list[Val]) -> list[Val]:
    axis, (shape,) = eqn.params["axis"], _shapes(eqn)
    live, past = _past(values)
    for x in values[1:]:
        for a, b in zip(values[0].dims, x.dims, strict=True):
            tracer.same(a, b, "two dims that meet do not line up")
    dims = list(values[0].dims)
    dims.insert(axis, fresh(shape[axis]))
    return [Val(dims, live, past)]


@_rule("debug_callback", "debug_print", "check", "inspect_sharding")
def _no_effect(tracer: Tracer, eqn: Any, values: list[Val]) -> list[Val]:
    return [tracer.unknown(shape) for shape in _shapes(eqn)]


@_rule("scan")
def _scan(tracer: Tracer, eqn: Any, values: list[Val]) -> list[Val]:
    consts, carries = scan_parts(eqn)
    kept, scanned = values[: consts + carries], values[consts + carries :]
    carry = kept[consts:]
    inner = [Val(x.dims[1:], x.live, x.past) for x in scanned]
    carry = _settle(eqn.params["jaxpr"], kept[:consts], carry, inner)
    for x in scanned:
        tracer.scanned.append(x.dims[0])
    outputs = tracer.call(eqn.params["jaxpr"], [*kept[:consts], *carry, *inner])
    _tie(tracer, carry, outputs[:carries])
    carried = [
        Val(x.dims, x.live or y.live, x.past | y.past)
        for x, y in zip(outputs[:carries], carry, strict=True)
    ]
    stacked = [
        Val([fresh(eqn.params["length"]), *y.dims], y.live, y.past) for y in outputs[carries:]
    ]
    for y in stacked:
        tracer.scanned.append(y.dims[0])
    return [*carried, *stacked]


@_rule("while")
def _while(tracer: Tracer, eqn: Any, values: list[Val]) -> list[Val]:
    cond, body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    carry = _settle(eqn.params["body_jaxpr"], values[cond : cond + body], values[cond + body :], [])
    outputs = tracer.call(eqn.params["body_jaxpr"], [*values[cond : cond + body], *carry])
    _tie(tracer, carry, outputs)
    return outputs


@_rule("cond")
def _cond(tracer: Tracer, eqn: Any, values: list[Val]) -> list[Val]:
    branches = [tracer.call(branch, values[1:]) for branch in eqn.params["branches"]]
    for other in branches[1:]:
        _tie(tracer, branches[0], other)
    merged = []
    for results in zip(*branches, strict=True):
        live, past = _past([*results, values[0]])
        merged.append(Val(results[0].dims, live, past))
    return merged


def _settle(
    body: Any, before: Sequence[Val], carry: Sequence[Val], after: Sequence[Val]
) -> list[Val]:
    """Returns the carry, marked as live where the loop's body makes it depend on the inputs."""
    carry = list(carry)
    while not all(x.live for x in carry):
        scratch = Tracer()  # only whether values are live matters here
        invars = opened(body)[0].invars
        args = [
            scratch.unknown(v.aval.shape, live=x.live)
            for v, x in zip(invars, (*before, *carry, *after), strict=True)
        ]
        outputs = scratch.call(body, args)
        newly = [y.live and not x.live for x, y in zip(carry, outputs, strict=False)]
        if not any(newly):
            break
        carry = [Val(x.dims, x.live or new, x.past) for x, new in zip(carry, newly, strict=True)]
    return carry


def _tie(tracer: Tracer, before: Sequence[Val], after: Sequence[Val]) -> None:
    for x, y in zip(before, after, strict=True):
        for a, b in zip(x.dims, y.dims, strict=True):
            tracer.same(a, b, "a loop's carry changes its factors")
