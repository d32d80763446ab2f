"""Uses the package where every name without a promise is gone: `poisoned.py FOLDER`.

They are gone for the package alone, since JAX needs them itself: what its own modules import, and
what the one module that may reach for such names asks of an object.
"""

import builtins
import importlib
import sys
import tempfile
from pathlib import Path

GONE = (
    *("jax._src", "jax.extend", "jax.experimental.topologies", "jax.experimental.pallas.ops"),
    *("jaxlib", "flax.core.spmd", "orbax.checkpoint.future"),
)
ATTRIBUTES = {"_src", "extend", "topologies", "ops", "spmd", "future"} | {
    *("source_info", "_pytree__nodes", "sharding")
}
blocked: list[str] = []
import_name, import_module = builtins.__import__, importlib.import_module


def is_gone(name: str) -> bool:
    return any(name == gone or name.startswith(f"{gone}.") for gone in GONE)


def refuse(name: str, caller: str) -> None:
    if caller.partition(".")[0] == "shardwise" and is_gone(name):
        blocked.append(name)
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def poisoned_import(name, globals=None, locals=None, fromlist=(), level=0):
    caller = (globals or {}).get("__name__") or ""
    if level == 0:
        for each in (name, *(f"{name}.{item}" for item in fromlist or ())):
            refuse(each, caller)
    return import_name(name, globals, locals, fromlist, level)


def poisoned_module(name, package=None):
    refuse(name, sys._getframe(1).f_globals.get("__name__", ""))
    return import_module(name, package)


def poisoned_getattr(value, name, *default):
    if name in ATTRIBUTES:
        blocked.append(name)
        if default:
            return default[0]
        raise AttributeError(f"no attribute {name!r}")
    return getattr(value, name, *default)


builtins.__import__, importlib.import_module = poisoned_import, poisoned_module

import jax

jax.config.update("jax_num_cpu_devices", 8)
sys.path.append(str(Path(__file__).parents[1] / "support"))
import programs

programs.keep()
import jax.numpy as jnp
import optax
from flax import nnx

import shardwise as sw
from shardwise._cli import main
from shardwise._jax import private

vars(private)["getattr"] = poisoned_getattr
for gone in ("jax._src", "jax.extend.core", "jaxlib"):
    try:  # the poison itself: were it none, everything below would pass
        exec(f"import {gone}", {"__name__": "shardwise.any"})
    except ModuleNotFoundError:
        continue
    raise AssertionError(gone)


class Mlp(nnx.Module):
    """Two layers, of which the first has an annotation, and an array that is data."""

    def __init__(self, rngs: nnx.Rngs, names=("embed", "mlp")):
        kernel = nnx.initializers.normal()
        kernel = nnx.with_metadata(kernel, out_sharding=names) if names else kernel
        self.up = nnx.Linear(16, 32, kernel_init=kernel, rngs=rngs)
        self.down = nnx.Linear(32, 16, rngs=rngs)
        self.scales = nnx.data([jnp.ones(16)])

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x))) * self.scales[0]


def make() -> Mlp:
    return Mlp(nnx.Rngs(0))


def plain() -> nnx.Module:
    return Mlp(nnx.Rngs(0), names=None)


INPUTS = jax.ShapeDtypeStruct((8, 16), "float32")
recipe = sw.Recipe(
    model=plain, loss=lambda model, x: model(x).mean(), optimizer=optax.adamw(1e-3), batch=INPUTS
)


def plans(folder: str) -> None:
    mesh = sw.mesh("data=2,model=4", on="cpu:8")
    print("mesh")
    layout = sw.layout(make, mesh, logical={"embed": None, "mlp": "model"})
    assert layout["up.kernel"].shard_shape == (16, 8)
    print("layout")
    split = sw.layout(
        plain, mesh, [sw.tensor("model"), sw.fsdp("data", min_bytes=0)], inputs=INPUTS
    )
    assert split["up.kernel"].shard_shape == (8, 8)
    assert split["down.kernel"].shard_shape == (8, 8)
    print("tensor")
    assert not sw.check(split).errors
    print("check")
    sys.argv = ["shardwise", "plan", "shardwise.examples.decoder:make", "--mesh", "data=2,model=4"]
    sys.argv += ["--strategy", "fsdp+tensor", "--format", "json"]
    sys.stdout, before = open(Path(folder, "plan.json"), "w"), sys.stdout
    try:
        main()
    except SystemExit as ended:
        assert ended.code == 0, ended.code
    finally:
        sys.stdout = before
    print("plan")
    Path(folder, "report.html").write_text(str(layout.report().html))
    print("report")
    model = sw.shard(plain(), split)
    assert model.up.kernel.addressable_shards[0].data.shape == (8, 8)
    print("shard")
    assert sw.init(plain, split).up.kernel.addressable_shards[0].data.shape == (8, 8)
    print("init")
    spec = jax.sharding.PartitionSpec("data")
    relu = sw.simulate(jax.nn.relu, mesh=mesh, in_specs=spec, out_specs=spec)
    assert jax.grad(lambda x: relu(x).sum())(jnp.ones(8)).tolist() == [1.0] * 8
    print("simulate")
    assert blocked, "nothing was asked for"
    print("blocked")


def fails() -> None:
    mesh = sw.mesh("data=8", on="cpu:8")
    layout = sw.layout(plain, mesh, "fsdp")
    absent = sw.layout(plain, sw.mesh("data=8", on="v5e:2x4"), "fsdp")
    features = {
        "compile": lambda: sw.compile(recipe, layout),
        "absent": lambda: sw.compile(recipe, absent),
        "distributed": sw.distributed,
        "save": lambda: save(layout),
    }
    for name, use in features.items():
        try:
            use()
        except Exception as error:
            print(f"{name}: {' '.join(str(error).split())}")


def save(layout: sw.Layout) -> None:
    state = sw.train_state(recipe, layout)
    with tempfile.TemporaryDirectory() as folder:
        kept = sw.Checkpoints(folder)
        kept.save(1, state)
        kept.wait()


if __name__ == "__main__":
    given = sys.argv[1]
    plans(given)
    fails()
