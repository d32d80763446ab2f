"""Exercises of lesson 3: shard_map bodies, simulated and run on virtual devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

from ..._simulate import simulate
from .._exercise import Case, Exercise
from .bodies import body_case


def _normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape).astype("float32"))


def _split_and_join_cases() -> Iterator[Case]:
    linear = nnx.Linear(3, 2, rngs=nnx.Rngs(0))

    def layer(part: jax.Array) -> jax.Array:
        return linear(part)

    def centre(part: jax.Array) -> jax.Array:
        return part - part.mean(axis=0)

    def total(part: jax.Array) -> jax.Array:
        return part.sum(axis=0, keepdims=True)

    rows: list[tuple[Callable[..., Any], int, str]] = [
        (layer, 4, ""),
        (layer, 1, ""),
        (layer, 8, ""),
        (centre, 2, "the function must see one piece at a time, never all of x"),
        (total, 4, "f may return fewer rows than the piece has: join whatever it returns"),
    ]
    x = _normal(0, 8, 3)
    for f, n, hint in rows:
        expected = simulate(f, mesh=f"data={n}", in_specs=P("data"), out_specs=P("data"))(x)
        call = f"split_and_join({f.__name__}, x of float32[8, 3], {n})"
        yield Case((f, x, n), expected, call=call, hint=hint)


def _standardise_cases() -> Iterator[Case]:
    plain = 3 + np.asarray(_normal(1, 8, 4)) * np.arange(1, 5, dtype="float32")
    x, expected = jnp.asarray(plain), (plain - plain.mean(axis=0)) / plain.std(axis=0)
    for axes, spec in [
        ("data=4", P("data")),
        ("data=2,model=4", P("data", "model")),
    ]:
        how = {"axes": axes, "in_specs": {"x": spec}, "out_specs": spec}
        yield body_case("standardise", {"x": x}, expected, **how)


def _tensor_mlp_cases() -> Iterator[Case]:
    w = {
        "up": _normal(2, 4, 16),
        "up_bias": _normal(3, 16),
        "down": _normal(4, 16, 4),
        "down_bias": _normal(5, 4),
    }
    specs = {"up": P(None, "model"), "up_bias": P("model"), "down": P("model"), "down_bias": P()}
    x = _normal(6, 8, 4)
    hidden = jax.nn.relu(x @ w["up"] + w["up_bias"])
    expected = hidden @ w["down"] + w["down_bias"]
    for axes, spec in [("model=4", P()), ("data=2,model=4", P("data"))]:
        yield body_case(
            "tensor_mlp",
            {"w": w, "x": x},
            expected,
            axes=axes,
            in_specs={"w": specs, "x": spec},
            out_specs=spec,
            collectives={"psum": 1},
        )


def _mean_gradient_cases() -> Iterator[Case]:
    w, x = _normal(7, 3), _normal(8, 16, 3)
    expected = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    for n in (4, 8):
        yield body_case(
            "mean_gradient",
            {"w": w, "x": x},
            expected,
            axes=f"data={n}",
            in_specs={"w": P(), "x": P("data")},
            out_specs=P(),
        )


def _ring_sum_cases() -> Iterator[Case]:
    for n in (4, 8, 1):
        x = _normal(9 + n, n * 2, 3)
        expected = np.tile(np.asarray(x).reshape(n, 2, 3).sum(axis=0), (n, 1))
        yield body_case(
            "ring_sum",
            {"x": x},
            expected,
            axes=f"ring={n}",
            in_specs={"x": P("ring")},
            out_specs=P("ring"),
            constants=(n,),
            collectives={"ppermute": max(1, 2 * (n - 1))},
            most_bytes=(n - 1) * 24,
        )


EXERCISES: tuple[Exercise, ...] = (
    Exercise(
        "split_and_join",
        "f, x, n",
        "Returns what a shard_map over n devices would, on one device and without shard_map: splits "
        "the rows of `x` into n pieces, calls `f` on each, and joins the results along dim 0.",
        "split_and_join(lambda part: 2 * part, jnp.arange(8.0).reshape(4, 2), 2)\n"
        "  → the same as 2 * x",
        "jax.lax.dynamic_slice_in_dim(x, i * rows, rows, axis=0) is the i-th piece",
        _split_and_join_cases,
    ),
    Exercise(
        "standardise",
        "x",
        "The body of a shard_map whose rows are split over the axis 'data'. Returns this device's "
        "rows, standardised: subtract from each column its mean, and divide by its standard "
        "deviation, both over the rows of all devices. The mesh may have other axes.",
        "over data=4, the global x → (x - x.mean(axis=0)) / x.std(axis=0)",
        "the mean of the local rows is not the mean of all rows: jax.lax.pmean(…, 'data'). The "
        "variance is the mean squared distance from the mean of all rows, not of the local ones",
        _standardise_cases,
    ),
    Exercise(
        "tensor_mlp",
        "w, x",
        "The body of a tensor-parallel MLP: relu(x @ up + up_bias) @ down + down_bias. `w` has the "
        "keys up, up_bias, down and down_bias. The hidden units (columns of up, items of up_bias, "
        "rows of down) are split over the axis 'model'; down_bias is replicated. One psum is "
        "enough.",
        "over model=4, the global w and x → the same as without a mesh",
        "each device has the sum over its own hidden units. A bias added before the psum is added "
        "once by each device",
        _tensor_mlp_cases,
    ),
    Exercise(
        "mean_gradient",
        "w, x",
        "The body of a data-parallel gradient: `w` is replicated, and the rows of `x` are split "
        "over the axis 'data'. Returns the gradient with respect to `w` of the mean of "
        "(x @ w) ** 2 over the rows of all devices.",
        "over data=4, the global w and x → jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)",
        "JAX itself sums the gradient of a replicated weight over the devices, so a pmean after it "
        "changes nothing. Average the loss, or start with jax.lax.pcast(w, 'data', to='varying')",
        _mean_gradient_cases,
    ),
    Exercise(
        "ring_sum",
        "x, n",
        "The body of an all-reduce by hand: on each of the n devices of the axis 'ring', returns "
        "the sum of `x` over all of them, using ppermute alone. No device may send more than n - 1 "
        "times the bytes of its `x`.",
        "over ring=4, where device i has x = [i] → [6] on each",
        "n - 1 hops: pass on what you received, and add it to the sum. A device's own x counts once",
        _ring_sum_cases,
    ),
)
