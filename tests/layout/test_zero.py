"""ZeRO 1 and 2: what is planned for optimizer state and gradients while weights stay as they are."""

import itertools

import jax
import models
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import shardwise as sw
from shardwise._layout import Named, zero_axes
from shardwise._step import data_axes

ADAM = optax.adamw(1e-3)


def lay(make, rules=None, axes="data=2,model=4", **options):
    return sw.layout(make, sw.mesh(axes, on="none"), rules, **options)


def linear(inner, outer, **options):
    return lambda: nnx.Linear(inner, outer, rngs=nnx.Rngs(0), **options)


def mlp():
    return models.Mlp(16, 32, nnx.Rngs(0))


def updates(layout):
    return {leaf.path: (leaf.spec, leaf.moments, leaf.gradients) for leaf in layout.leaves}


ZERO = {
    "zero1": (linear(16, 32), "zero1", "data=8", {"kernel": (P(), P(None, "data"), None), "bias": (P(), P("data"), None)}),
    "zero2": (linear(16, 32), "zero2", "data=8", {"kernel": (P(), P(None, "data"), P(None, "data")), "bias": (P(), P("data"), P("data"))}),
    "indivisible": (linear(16, 6), "zero1", "data=8", {"kernel": (P(), P("data"), None), "bias": (P(), P(), None)}),
    "free dim beside tensor": (linear(16, 32, use_bias=False), [{"kernel": P(None, "model")}, sw.zero1("data", min_bytes=0)], "data=2,model=4", {"kernel": (P(None, "model"), P("data", "model"), None)}),
    "the same dim as tensor": (linear(3, 32, use_bias=False), [{"kernel": P(None, "model")}, sw.zero1("data", min_bytes=0)], "data=2,model=4", {"kernel": (P(None, "model"), P(None, ("model", "data")), None)}),
    "before other rules": (linear(16, 32, use_bias=False), [sw.zero2("data", min_bytes=0), {"kernel": P("model")}], "data=2,model=4", {"kernel": (P("model"), P("model", "data"), P("model", "data"))}),
    "two axes": (linear(16, 32, use_bias=False), "zero1", "replica=2,data=4", {"kernel": (P(), P(None, ("replica", "data")), None)}),
    "two axes apart": (linear(4, 6, use_bias=False), "zero1", "replica=2,data=4", {"kernel": (P(), P("data", "replica"), None)}),
    "beside fsdp": (linear(16, 32, use_bias=False), "fsdp+zero1", "data=2,fsdp=4", {"kernel": (P(None, "fsdp"), P("data", "fsdp"), None)}),
    "an axis of the weights' own": (linear(16, 32, use_bias=False), [{"kernel": P("data")}, sw.zero1("data", min_bytes=0)], "data=8", {"kernel": (P("data"), P("data"), None)}),
    "one device": (linear(16, 32, use_bias=False), "zero1", "data=1", {"kernel": (P(), P(), None)}),
}  # fmt: skip


def small(rules):
    """Returns rules by name with min_bytes=0, since these models are tiny."""
    return Named(rules, 0) if isinstance(rules, str) else rules


@pytest.mark.parametrize(("make", "rules", "axes", "wanted"), ZERO.values(), ids=ZERO)
def test_what_is_split_beside_the_weights(make, rules, axes, wanted):
    layout = lay(make, small(rules), axes)
    assert updates(layout) == wanted
    # JAX itself accepts each spec, and splits arrays as planned.
    mesh = sw.mesh(axes, on=f"cpu:{layout.mesh.size}")
    placed = layout.on(mesh).for_optimizer(ADAM)
    state = jax.jit(
        lambda: ADAM.init(nnx.state(make(), nnx.Param)), out_shardings=placed.shardings
    )()
    for leaf, array in zip(placed.leaves, jax.tree.leaves(state), strict=True):
        assert leaf.shard_bytes == array.addressable_shards[0].data.nbytes


def test_stacked_layers_are_not_split_by_depth():
    def make():
        return nnx.vmap(lambda r: nnx.Linear(16, 8, use_bias=False, rngs=r))(nnx.Rngs(0).split(64))

    leaf = lay(make, sw.zero1("data", min_bytes=0), "data=8")["kernel"]
    assert leaf.moments == P(None, "data")


def test_variables_without_optimizer_state_are_left_alone():
    def make():
        return nnx.BatchNorm(64, rngs=nnx.Rngs(0))

    layout = lay(make, sw.zero1("data", min_bytes=0), "data=8")
    assert {p: m for p, (_, m, _) in updates(layout).items()} == {
        "bias": P("data"), "scale": P("data"), "mean": None, "var": None,
    }  # fmt: skip
    assert "a variable of type BatchStat has no optimizer state" in layout.explain("mean")


def test_the_reason_and_the_caption_say_so():
    layout = lay(linear(16, 30), sw.zero2("data", min_bytes=0), "data=8")
    assert layout.explain("kernel") == (
        "kernel  float32[16,30]  Param  on data=8\n"
        "  spec P()  shard [16,30]  1.9 KiB of 1.9 KiB on each device  copies 8\n"
        "  optimizer state P('data',)  shard [2,30]\n"
        "  gradient P('data',)  shard [2,30]\n"
        "  decided by no rule: replicated on every device; zero2('data'): gradient and optimizer state "
        "as P('data'): dim 0 (size 16) is the largest free dim divisible by 8\n"
        "  considered, in order:\n"
        "    zero2('data'): unchanged - gradient and optimizer state as P('data'): dim 0 (size 16) is the "
        "largest free dim divisible by 8"
    ).replace("P('data',)", "P('data')")
    assert layout["bias"].reason.endswith("zero2('data'): gradient and optimizer state as P(): no dim of (30,) can be split 8 ways more")  # fmt: skip
    assert str(layout).splitlines()[-1] == (
        "2 leaves on data=8: 2.0 KiB of 2.0 KiB on each of 8 devices (exact); gradients and optimizer "
        "state of 1 leaf also split over data; not split: 1 indivisible leaf (120 B)"
    )
    assert layout.for_optimizer(ADAM)["0.mu.kernel"].reason == (
        "optimizer: follows kernel P('data'), the same shape (zero2('data'): gradient and optimizer state "
        "as P('data'): dim 0 (size 16) is the largest free dim divisible by 8)"
    )
    assert not sw.check(layout)  # replicated weights are what was asked for


OPTIMIZERS = {
    "adafactor": (optax.adafactor(1e-3, min_dim_size_to_factor=8), 4),
    "multi_transform": (optax.multi_transform({"a": ADAM, "b": optax.sgd(1e-2, momentum=0.9)}, lambda p: jax.tree.map(lambda x: "a" if x.ndim > 1 else "b", p)), 6),
    "multi_steps": (optax.MultiSteps(ADAM, 2).gradient_transformation(), 12),
    "lion": (optax.lion(1e-3), 4),
}  # fmt: skip


@pytest.mark.parametrize(("tx", "split"), OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_states_of_other_optimizers_follow(tx, split):
    mesh = sw.mesh("data=8", on="cpu:8")
    planned = sw.layout(mlp, mesh, sw.zero1("data", min_bytes=0)).for_optimizer(tx)
    state = jax.jit(lambda: tx.init(nnx.state(mlp(), nnx.Param)), out_shardings=planned.shardings)()
    live = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state))
    assert planned.bytes_per_device == live
    assert sum(not leaf.is_replicated for leaf in planned.leaves) == split


def test_rules_for_the_state_of_an_optimizer_alone():
    layout = lay(linear(16, 32), "dp", "data=8")
    own = lay(linear(16, 32), sw.zero1("data", min_bytes=0), "data=8").for_optimizer(ADAM)
    for rules in (sw.zero1("data", min_bytes=0), sw.fsdp("data", min_bytes=0)):
        state = layout.for_optimizer(ADAM, rules=rules)
        assert [leaf.spec for leaf in state.leaves] == [leaf.spec for leaf in own.leaves]
    assert layout.for_optimizer(ADAM, rules={"kernel": P("data")})["0.nu.kernel"].spec == P("data")
    dead = layout.for_optimizer(ADAM, rules={"kernels": P("data")})
    assert [finding.code for finding in sw.check(dead)] == ["SW107"]
    with pytest.raises(
        ValueError, match="which needs the model: give zero1, zero2, fsdp, path patterns"
    ):
        layout.for_optimizer(ADAM, rules=sw.tensor("data"))


def test_a_lockfile_a_diff_and_another_mesh_remember_it(tmp_path):
    layout = lay(linear(16, 32), sw.zero2("data", min_bytes=0), "data=8")
    layout.save(tmp_path / "layout.json")
    loaded = sw.load_layout(tmp_path / "layout.json")
    assert updates(loaded) == updates(layout)
    assert not sw.diff(loaded, layout)
    plain = lay(linear(16, 32), "dp", "data=8")
    assert sw.diff(plain, layout).changed["bias"] == (
        "float32[32] P()", "float32[32] P(), gradient P('data'), optimizer state P('data')",
    )  # fmt: skip
    assert updates(layout.on(sw.mesh("data=4", on="none"))) == updates(layout)
    assert [str(f).splitlines()[1].strip() for f in sw.check(layout.on(sw.mesh("data=3", on="none"))).errors] == [
        "its optimizer state: dim 0 (size 32) cannot be split 3 ways over axis 'data'",
        "its optimizer state: dim 1 (size 32) cannot be split 3 ways over axis 'data'",
    ]  # fmt: skip


def test_the_batch_is_split_over_axes_that_zero_uses():
    layout = lay(mlp, sw.zero1("shards", min_bytes=0), "shards=8")
    assert zero_axes(layout.leaves) == data_axes(layout) == ("shards",)
    assert not sw.check(layout)  # no unused axis


def test_a_strategy_that_splits_nothing_is_a_finding():
    layout = lay(linear(3, 5), "zero1", "data=8")
    assert str(sw.check(layout)).splitlines()[:2] == [
        "warning[SW111] unused-axis: data",
        "  zero1 split nothing over axis 'data' of size 8: 2 leaves have no free dim divisible by 8, 80 B on each device",
    ]  # fmt: skip
    layout = lay(linear(16, 32), sw.zero2("data", min_bytes=2**20), "data=8")
    assert "help: sw.zero2('data', min_bytes=0) would leave 272 B of each moment on each device" in str(sw.check(layout))  # fmt: skip


WRONG = {
    "no data axis": (lambda: lay(mlp, "zero1", "model=8"), "strategy 'zero1' needs an axis named 'replica' or 'data' or 'dp' or 'batch' or 'fsdp', but the mesh has model=8: rename one, or use sw.zero1(axis)"),
    "unknown axis": (lambda: lay(mlp, sw.zero2("date")), "zero2 uses axis 'date', which the mesh does not have: did you mean 'data'? its axes are data=2, model=4"),
    "both": (lambda: lay(mlp, "zero1+zero2"), "strategy 'zero1+zero2' contradicts itself: use each part once, and either dp or fsdp, zero1 or zero2"),
    "no axes": (lambda: sw.zero1(), "zero1() needs one or more distinct axis names"),
    "bytes": (lambda: sw.zero2("data", min_bytes=-1), "zero2 has min_bytes=-1: it must be a non-negative integer"),
    **{
        f"beside fsdp, {name}": (lambda rules=rules: lay(mlp, rules, "data=8"), "zero2 has nothing to split: fsdp over 'data' already splits weights, gradients and optimizer state (ZeRO 3); use fsdp alone, or a mesh with one axis for each, such as data=2,fsdp=4")
        for name, rules in {"by name": "fsdp+zero2", "as rules": [sw.fsdp("data", min_bytes=0), sw.zero2("data")]}.items()
    },
}  # fmt: skip


@pytest.mark.parametrize(("act", "message"), WRONG.values(), ids=WRONG)
def test_what_is_refused(act, message):
    with pytest.raises(ValueError) as error:
        act()
    assert str(error.value) == message


def test_memory_is_never_more_and_shards_divide_evenly():
    sizes = (1, 2, 3, 4, 6, 8, 12)
    for shape in itertools.product(sizes, sizes):

        def make(shape=shape):
            return nnx.Linear(*shape, use_bias=False, rngs=nnx.Rngs(0))

        for axes in ("data=2,fsdp=3", "replica=2,data=2"):
            leaf = lay(make, Named("zero1", 0), axes)["kernel"]
            assert not leaf.update_faults
