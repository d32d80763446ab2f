"""Exercises of lesson 4: models that are initialised directly into their shards."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.core import Tracer
from jax.sharding import PartitionSpec as P
from jax.sharding import SingleDeviceSharding

from ..._base import show_bytes, show_type
from ..._check import audit
from ..._layout import Layout, by_rank, fsdp, layout
from ..._mesh import mesh as make_mesh
from ..._mesh import normal_spec, show_spec
from ..._nnx import Recipe
from ..._place import shard
from ..._train import train_state
from .._exercise import Case, Differs, Exercise

_COLUMN = by_rank({2: P(None, "model"), 1: P("model")})
_NORMAL = nnx.initializers.lecun_normal()


class Mlp(nnx.Module):
    """Two layers."""

    def __init__(self, width: int, hidden: int, kernel_init: Any, dtype: Any = jnp.float32):
        """Makes the layers."""
        how: dict[str, Any] = {"kernel_init": kernel_init, "param_dtype": dtype}
        how["rngs"] = nnx.Rngs(0)
        self.up = nnx.Linear(width, hidden, **how)
        self.down = nnx.Linear(hidden, width, use_bias=False, **how)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the MLP of `x`."""
        return self.down(nnx.relu(self.up(x)))


def _guarded(make: Any) -> Callable[..., jax.Array]:
    """Returns an initialiser that may be traced but not run, so it never makes a full array."""

    def made(key: Any, shape: Any, dtype: Any = jnp.float32, **rest: Any) -> jax.Array:
        if not isinstance(key, Tracer):
            size = show_bytes(float(np.prod(shape, dtype=float)) * jnp.dtype(dtype).itemsize)
            raise Differs(
                f"the model is built outside of any trace: a full array of shape {tuple(shape)}, "
                f"{size}, would be on one device"
            )
        return make(key, shape, dtype, **rest)

    return made


def _abstract_bytes_cases() -> Iterator[Case]:
    sizes = [
        (8, 32, "float32"),
        (8, 32, "bfloat16"),
        (2**14, 2**16, "float32"),
        (2**18, 2**20, "bfloat16"),
    ]
    for width, hidden, dtype in sizes:

        def make(width: int = width, hidden: int = hidden, dtype: str = dtype) -> nnx.Module:
            return Mlp(width, hidden, _guarded(_NORMAL), dtype)

        expected = layout(make, make_mesh("data=1", on="none")).total_bytes
        call = f"abstract_bytes(make), an MLP of {width} x {hidden} in {dtype}"
        yield Case((make,), expected, call=call)


def _init_sharded_cases() -> Iterator[Case]:
    for axes, rules in [
        ("model=8", _COLUMN),
        ("data=2,model=4", [_COLUMN, fsdp("data", min_bytes=0)]),
    ]:

        def make() -> nnx.Module:
            return Mlp(16, 32, _guarded(_NORMAL))

        plan = layout(make, make_mesh(axes, on="cpu:8"), rules)
        arrays = _arrays(Mlp(16, 32, _NORMAL))
        expected = {path: np.asarray(array) for path, array in arrays.items()}
        call = f"init_sharded(make, layout), a small MLP on {axes}"
        hint = "if values differ: is the model built with a different seed?"

        def run(f: Any, make: Any = make, plan: Any = plan) -> Any:
            return _placed(f, make, plan)

        yield Case((make, plan), expected, run, call, hint)


def _placed(function: Callable[..., Any], make: Any, plan: Layout) -> dict[str, Any]:
    """Returns the arrays of the model that `function` makes, if they are placed as planned."""
    with _moves_watched():
        model = function(make, plan)
    if not isinstance(model, nnx.Module):
        raise Differs(
            f"it is {show_type(model)}, expected the model: "
            f"nnx.merge(graphdef, state) builds it from its state"
        )
    live = _arrays(model)
    for leaf in plan.leaves:
        if leaf.path not in live:
            raise Differs(f"it has no leaf {leaf.path!r}")
        sharding = live[leaf.path].sharding
        wanted = jax.sharding.NamedSharding(plan.mesh, leaf.spec)
        if not sharding.is_equivalent_to(wanted, len(leaf.shape)):
            spec = getattr(sharding, "spec", None)
            got = "is on one device" if spec is None else f"has {show_spec(normal_spec(spec))}"
            raise Differs(f"{leaf.path} {got}, planned {show_spec(leaf.spec)}")
    return {path: np.asarray(array) for path, array in live.items()}


@contextlib.contextmanager
def _moves_watched() -> Iterator[None]:
    """Raises `Differs` if a full array on one device is moved."""
    move = jax.device_put

    def watched(x: Any, *args: Any, **kwargs: Any) -> Any:
        for array in jax.tree.leaves(x):
            is_live = isinstance(array, jax.Array) and not isinstance(array, Tracer)
            if is_live and array.ndim and isinstance(array.sharding, SingleDeviceSharding):
                raise Differs(
                    f"a full array of shape {array.shape} was on one device before it was moved to "
                    f"its shards"
                )
        return move(x, *args, **kwargs)

    jax.device_put = watched
    try:
        yield
    finally:
        jax.device_put = move


def _arrays(model: nnx.Module) -> dict[str, Any]:
    return {
        ".".join(map(str, path)): variable[...]
        for path, variable in nnx.to_flat_state(nnx.split(model)[1])
    }


def _small() -> nnx.Module:
    # Only placement matters here, and zeros are faster to make.
    return Mlp(16, 32, nnx.initializers.zeros_init())


def _not_as_planned_cases() -> Iterator[Case]:
    alone = _small()
    wide, flat = "data=2,model=4", "data=1,model=8"
    others: list[tuple[str, str, Any]] = [
        ("as planned", wide, _COLUMN),
        ("with the rows of down over data", wide, [_COLUMN, {"down.kernel": P("data")}]),
        ("replicated on each device", wide, "dp"),
        ("with up.bias over both axes", wide, [_COLUMN, {"up.bias": P(("data", "model"))}]),
        # An axis of size 1 splits nothing, so these are placed as planned.
        (f"over {flat} with kernels P('data', 'model')", flat, {"*.kernel": P("data", "model")}),
    ]
    for text, axes, rules in others:
        mesh = make_mesh(axes, on="cpu:8")
        plan = layout(alone, mesh, _COLUMN)
        model = shard(alone, layout(alone, mesh, rules))
        expected = sorted(finding.path for finding in audit(plan, model).errors)
        call = f"not_as_planned(layout, model), where the model is placed {text}"
        yield Case((plan, model), expected, call=call)
    plan = layout(alone, make_mesh(wide, on="cpu:8"), _COLUMN)
    expected = sorted(finding.path for finding in audit(plan, alone).errors)
    yield Case(
        (plan, alone),
        expected,
        call="not_as_planned(layout, model), where the model is on one device",
        hint="an array on one device has a SingleDeviceSharding, which has no spec",
    )


def _training_bytes_cases() -> Iterator[Case]:
    rows: list[tuple[str, Any, str, Any]] = [
        ("data=2,model=4", _COLUMN, "optax.adamw(1e-3)", optax.adamw(1e-3)),
        ("data=8", fsdp("data", min_bytes=0), "optax.adamw(1e-3)", optax.adamw(1e-3)),
        ("data=8", "dp", "optax.sgd(0.1)", optax.sgd(0.1)),
        ("model=8", _COLUMN, "optax.sgd(0.1, momentum=0.9)", optax.sgd(0.1, momentum=0.9)),
        (
            "data=2,model=4",
            _COLUMN,
            "optax.adafactor(1e-3, min_dim_size_to_factor=8)",
            optax.adafactor(1e-3, min_dim_size_to_factor=8),
        ),
    ]
    for axes, rules, text, tx in rows:
        plan = layout(_small, make_mesh(axes, on="cpu:8"), rules)
        recipe = Recipe(
            model=_small,
            loss=lambda model, x: model(x).mean(),
            optimizer=tx,
            batch=jax.ShapeDtypeStruct((8, 16), "float32"),
        )
        state = train_state(recipe, plan)
        arrays = jax.tree.leaves((state.model, state.optimizer))
        expected = sum(array.addressable_shards[0].data.nbytes for array in arrays)
        call = f"training_bytes(layout of a small MLP on {axes}, {text})"
        yield Case((plan, tx), expected, call=call)


EXERCISES: tuple[Exercise, ...] = (
    Exercise(
        "abstract_bytes",
        "make",
        "Returns the bytes of all leaves of the model that `make()` builds, without allocating any "
        "of them: the model may be larger than this machine.",
        "abstract_bytes(lambda: nnx.Linear(8, 16, rngs=nnx.Rngs(0)))\n  → 576",
        "nnx.eval_shape(make) is the model with shapes in place of arrays",
        _abstract_bytes_cases,
    ),
    Exercise(
        "init_sharded",
        "make, layout",
        "Returns the model that `make()` builds, with every leaf placed as the layout says. No full "
        "array may ever be on one device.",
        "init_sharded(make, layout).up.kernel.sharding.spec\n  → P(None, 'model')",
        "jax.jit(lambda: nnx.split(make())[1], out_shardings=layout.shardings) makes the state "
        "directly in its shards; sw.init does the same leaf by leaf",
        _init_sharded_cases,
    ),
    Exercise(
        "not_as_planned",
        "layout, model",
        "Returns the sorted paths of all leaves of a live model that are not placed as the layout "
        "says.",
        "not_as_planned(layout, sw.init(make, layout))\n  → []",
        "specs that are written differently may be equivalent: "
        "array.sharding.is_equivalent_to(planned, array.ndim)",
        _not_as_planned_cases,
    ),
    Exercise(
        "training_bytes",
        "layout, tx",
        "Returns the bytes that one device holds of the parameters and of the state of the optax "
        "optimizer `tx`, together.",
        "training_bytes(layout, optax.sgd(0.1))\n  → layout.bytes_per_device: sgd has no state",
        "layout.for_optimizer(tx) is a layout too. Adam has two arrays for each parameter and a "
        "count of 4 bytes; other optimizers have fewer or smaller arrays",
        _training_bytes_cases,
    ),
)
