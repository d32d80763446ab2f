"""Measures the devices of this machine: products, copies, attention, collectives."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from .._chips import CHIPS, gpu_of_kind
from .._time import Calibration, attention_seconds, gpu_rates, product_seconds

_SIZES = ((2048, 2048, 2048), (4096, 4096, 4096), (8192, 8192, 4096), (8192, 2048, 1024))
_BYTES = (2**20, 2**24, 2**28)


def seconds_of(function: Callable[..., Any], *arguments: Any, least: float = 0.05) -> float:
    """Returns the seconds of one call, without waiting between calls: the median of five rounds."""
    jax.block_until_ready(function(*arguments))
    start = time.perf_counter()
    jax.block_until_ready(function(*arguments))
    calls = max(1, math.ceil(least / max(1e-6, time.perf_counter() - start)))
    found = []
    for _ in range(5):
        start = time.perf_counter()
        result = None
        for _ in range(calls):
            result = function(*arguments)
        jax.block_until_ready(result)
        found.append((time.perf_counter() - start) / calls)
    return float(np.median(found))


class Row(NamedTuple):
    """What was measured: its name, its unit, the figure, and the shipped one if there is one."""

    name: str
    unit: str
    measured: float
    shipped: float | None


def measure(limit: float, progress: Callable[[str], None]) -> tuple[Calibration, list[Row]]:
    """Measures the devices of this machine.

    Args:
        limit: seconds after which nothing more is begun.
        progress: called with what is about to be measured.

    Raises:
        ValueError: there is no table for this kind of device to compare with.
    """
    devices = jax.devices()
    kind = devices[0].device_kind
    chip = gpu_of_kind(kind)
    if chip is None:
        known = ", ".join(c.name for c in CHIPS.values() if c.gpu is not None)
        raise ValueError(
            f"there is no model to calibrate for {kind!r}: step times of {known} are modelled by "
            f"kernels that can be measured; those of TPUs come from their compiler"
        )
    rates, end = gpu_rates(chip.name), time.monotonic() + limit
    rows: list[Row] = []
    products: dict[str, float] = {}
    for name, dtype in (("bf16", jnp.bfloat16), ("f32", jnp.float32)):
        shares = []
        for m, n, k in _SIZES:
            if time.monotonic() > end:
                break
            progress(f"product {m}x{n}x{k} {name}")
            a, b = _normal((m, k), dtype), _normal((k, n), dtype)
            took = seconds_of(jax.jit(jnp.matmul), a, b)
            shipped = product_seconds(rates, name, m, n, k)
            if name == "bf16":
                shipped /= 1 - rates.power  # nothing else runs: the power limit is met
            flops = 2 * m * n * k
            rows.append(Row(*(f"product {m}x{n}x{k} {name}", "TFLOP/s", flops / took / 1e12, flops / shipped / 1e12)))  # fmt: skip
            shares.append(shipped / took)
        if shares:
            products[name] = float(np.median(shares))
    bandwidth = attention = None
    if time.monotonic() < end:
        progress("copy")
        x = _normal((2**28,), jnp.float32)
        took = seconds_of(jax.jit(lambda x: x + 1), x)
        bandwidth = 2 * x.nbytes / took
        rows.append(Row(*("copy of 1 GiB", "TB/s", bandwidth / 1e12, rates.bandwidth / 1e12)))
    if time.monotonic() < end and devices[0].platform in ("gpu", "cuda"):
        progress("attention")
        try:
            q = _normal((4, 4096, 16, 128), jnp.bfloat16)
            call = jax.jit(
                lambda q: jax.nn.dot_product_attention(
                    q, q, q, is_causal=True, implementation="cudnn"
                )
            )
            took = seconds_of(call, q)
            shipped = attention_seconds(rates, (4, 4096, 16, 128))
            flops = 2 * 2 * 4 * 16 * 4096 * 4096 * 128 / 2
            rows.append(Row(*("attention, causal, 4096 long", "TFLOP/s", flops / took / 1e12, flops / shipped / 1e12)))  # fmt: skip
            attention = shipped / took
        except (RuntimeError, ValueError) as error:
            progress(f"attention was not measured: {str(error).splitlines()[0][:80]}")
    collectives = []
    for kind_, count, size, took in _collectives(devices, end, progress):
        collectives.append((kind_, count, size, took))
        rows.append(Row(*(f"{kind_} over {count}, {size / 2**20:.0f} MiB", "GB/s", size / took / 1e9, None)))  # fmt: skip
    found = Calibration(chip.name, kind, products, bandwidth, attention, tuple(collectives))
    return found, rows


def _normal(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return jax.jit(lambda: jax.random.normal(jax.random.key(0), shape, jnp.float32).astype(dtype))()


def _collectives(
    devices: list[Any], end: float, progress: Callable[[str], None]
) -> Iterator[tuple[str, int, int, float]]:
    count = 2
    while count <= len(devices):
        mesh = jax.sharding.Mesh(np.array(devices[:count]), ("x",))
        bodies = {
            "all-gather": lambda x: jax.lax.all_gather(x, "x", tiled=True),
            "all-reduce": lambda x: jax.lax.psum(x, "x"),
            "reduce-scatter": lambda x: jax.lax.psum_scatter(x, "x", tiled=True),
        }
        for kind, body in bodies.items():
            for size in _BYTES:
                if time.monotonic() > end:
                    return
                progress(f"{kind} over {count}, {size / 2**20:.0f} MiB")
                elements = size // 4
                shape = (elements,) if kind == "all-gather" else (elements * count,)
                x = jax.device_put(np.ones(shape, np.float32), NamedSharding(mesh, P("x")))
                call = jax.jit(
                    jax.shard_map(
                        body, mesh=mesh, in_specs=P("x"),
                        out_specs=P() if kind != "reduce-scatter" else P("x"), check_vma=False,
                    )
                )  # fmt: skip
                yield kind, count, size, seconds_of(call, x)
        count *= 2
