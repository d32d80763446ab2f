"""Exercises of lesson 5: what data, FSDP, pipeline, sequence and expert parallelism do and cost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from ..._parallel import Timetable
from ..._simulate import simulate
from .._exercise import Case, Exercise
from .bodies import body_case

Part = tuple[jax.Array, jax.Array, jax.Array]


def _normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape).astype("float32"))


def _step_bytes_cases() -> Iterator[Case]:
    shapes = [(16, 32), (16,)]
    rows = [([(8, 4)], 4, "data"), ([(8, 4)], 4, "fsdp")]
    rows += [(shapes, n, how) for n in (2, 8, 1) for how in ("data", "fsdp")]
    for leaves, n, how in rows:
        hint = "a single device sends nothing" if n == 1 else ""
        yield Case((leaves, n, how), _traced_bytes(leaves, n, how), hint=hint)


def _traced_bytes(shapes: list[tuple[int, ...]], n: int, how: str) -> int:
    """Returns the bytes that the collectives of such a step send, as the simulation counts them."""

    def data(weights: list[Any]) -> list[Any]:
        return [jax.lax.psum(2 * w, "data") for w in weights]

    def fsdp(weights: list[Any]) -> list[Any]:
        gathered = [jax.lax.all_gather(w, "data", tiled=True) for w in weights]
        return [jax.lax.psum_scatter(2 * w, "data", tiled=True) for w in gathered]

    body, spec = (data, P()) if how == "data" else (fsdp, P("data"))
    weights = [np.zeros(shape, "float32") for shape in shapes]
    f = simulate(body, mesh=f"data={n}", in_specs=(spec,), out_specs=spec, check_vma=False)
    return f.trace(weights).total_bytes


def _fsdp_gradient_cases() -> Iterator[Case]:
    for n in (4, 8):
        w, x = _normal(0, 8, 4), _normal(1, 16, 8)
        expected = jax.grad(lambda w, x=x: jnp.sum((x @ w) ** 2))(w)
        yield body_case(
            "fsdp_gradient",
            {"w": w, "x": x},
            expected,
            axes=f"data={n}",
            in_specs={"w": P("data"), "x": P("data")},
            out_specs=P("data"),
            most_bytes=2 * (n - 1) * w.nbytes // n,
        )


def _bubble_cases() -> Iterator[Case]:
    rows = [(4, 8, 1), (4, 16, 1), (1, 3, 1), (8, 1, 1), (4, 8, 2), (4, 16, 4), (3, 7, 1)]
    for stages, microbatches, rounds in rows:
        expected = Timetable(stages, microbatches, rounds).bubble
        yield Case((stages, microbatches, rounds), expected)


def _join_softmax_cases() -> Iterator[Case]:
    scores, values = 3 * np.asarray(_normal(2, 4, 6)), np.asarray(_normal(3, 6, 5))
    masked = scores.copy()
    masked[1, :2] = masked[2] = -np.inf
    nan = "exp(-inf - -inf) is nan: a part that sees no key has largest -inf and total 0"
    rows = [(scores, 3, ""), (scores * 40, 2, "exp of the raw scores overflows")]
    rows += [(masked, 2, nan), (masked, 4, nan)]
    for all_scores, cut, hint in rows:
        parts = (
            _part(all_scores[:, :cut], values[:cut]),
            _part(all_scores[:, cut:], values[cut:]),
        )
        call = f"join_softmax(the part of {cut} keys, the part of {6 - cut})"
        yield Case(parts, _part(all_scores, values), call=call, hint=hint)


def _part(scores: np.ndarray, values: np.ndarray) -> Part:
    """Returns the largest score, the total and the weighted sum of one set of keys."""
    largest = scores.max(axis=1)
    weights = np.exp(scores - np.where(largest == -np.inf, 0, largest)[:, None])
    return jnp.asarray(largest), jnp.asarray(weights.sum(axis=1)), jnp.asarray(weights @ values)


def _exchange_cases() -> Iterator[Case]:
    for n, experts, places in ((4, 8, 2), (2, 6, 3)):
        sent = _normal(4, experts, n * places, 2)
        yield body_case(
            "exchange",
            {"sent": sent},
            sent,
            axes=f"expert={n}",
            in_specs={"sent": P(None, "expert")},
            out_specs=P("expert"),
            collectives={"all_to_all": 1},
        )


EXERCISES: tuple[Exercise, ...] = (
    Exercise(
        "step_bytes",
        "shapes, n, how",
        "Returns the bytes that each of n devices sends in one training step for float32 "
        "parameters of the given shapes, by the ring model. `how` is 'data' (every gradient is "
        "all-reduced) or 'fsdp' (every parameter is gathered once, every gradient is "
        "reduce-scattered). n divides dim 0 of each shape.",
        "step_bytes([(8, 4)], 4, 'data')\n  → 192",
        "an all-reduce sends 2(n-1)/n of the array; a gather and a reduce-scatter send (n-1)/n of "
        "the full array each",
        _step_bytes_cases,
    ),
    Exercise(
        "fsdp_gradient",
        "w, x",
        "The body of FSDP: the rows of the weight `w` and the rows of the batch `x` are both split "
        "over the axis 'data'. Returns this device's rows of the gradient with respect to `w` of "
        "the sum of (x @ w) ** 2 over the whole batch. Gather the weight at most once, and send "
        "each device only its own rows of the gradient.",
        "over data=4, the global w and x → jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w)",
        "all_gather(w, 'data', tiled=True), take the local gradient with respect to the full "
        "weight, then psum_scatter(…, 'data', tiled=True); or differentiate through the "
        "all_gather, whose transpose is a psum_scatter",
        _fsdp_gradient_cases,
    ),
    Exercise(
        "bubble",
        "stages, microbatches, rounds",
        "Returns how long a stage of a pipeline is idle per unit of its work, as a float. GPipe has "
        "one round, the circular schedule has several.",
        "bubble(4, 8, 1)\n  → 0.375",
        "a stage is idle for stages - 1 ticks in total, however many rounds there are, and works on "
        "every microbatch once per round",
        _bubble_cases,
    ),
    Exercise(
        "join_softmax",
        "a, b",
        "Combines the attention of one set of queries to two sets of keys. A part is the tuple "
        "(largest, total, weighted): for each query the largest score, the sum of "
        "exp(score - largest), and the sum of exp(score - largest) times the values, with shapes "
        "[queries], [queries] and [queries, depth]. Returns the part for all keys together. A part "
        "may be fully masked for a query: then largest is -inf and the rest is 0.",
        "join_softmax(part(scores[:, :3], values[:3]), part(scores[:, 3:], values[3:]))\n"
        "  → part(scores, values)",
        "the new largest is the larger of the two, and each part is rescaled by exp(its own largest "
        "- the new largest)",
        _join_softmax_cases,
    ),
    Exercise(
        "exchange",
        "sent",
        "The body that sends tokens to their experts: on each device `sent` has shape [experts, "
        "places, width], this device's tokens for every expert. The experts are split over the axis "
        "'expert'. Returns [experts / devices, devices * places, width]: the tokens of all devices, "
        "in order, for this device's experts. One all_to_all is enough.",
        "over expert=4, the global array split by P(None, 'expert') → the same, split by P('expert')",
        "jax.lax.all_to_all(sent, 'expert', split_axis=…, concat_axis=…, tiled=True): split the dim "
        "to distribute, and concatenate what each device sends",
        _exchange_cases,
    ),
)
