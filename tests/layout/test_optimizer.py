"""The optimizer's state, compared with optax's own state, live arrays and compiled updates."""

import functools
import re

import jax
import jax.numpy as jnp
import models
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from optax import contrib

import shardwise as sw

TOKENS = jax.ShapeDtypeStruct((4, 6), "int32")
MODELS = {
    # Square MLP kernels, 3-D attention kernels.
    "decoder": lambda: models.Transformer(nnx.Rngs(0), width=16, hidden=16, layers=1),
    # The same with a stacked dim in front, of a size that no other dim has.
    "scanned": lambda: models.Scanned(nnx.Rngs(0)),
    # The stack has the same size as heads and depth: sizes are ambiguous.
    "scanned-4": lambda: models.Scanned(nnx.Rngs(0), layers=4, hidden=16),
}


def is_matrix(params):
    return jax.tree.map(lambda x: x.ndim > 1, params)


def by_rank(params):
    return jax.tree.map(lambda x: "adam" if x.ndim > 1 else "sgd", params)


def factored(**more):
    return optax.adafactor(1e-2, min_dim_size_to_factor=4, **more)


TRANSFORMS = {
    "adam": optax.adam(1e-3),
    "adamw-mask": optax.adamw(1e-3, mask=is_matrix),
    "sgd": optax.sgd(1e-2),
    "sgd-momentum": optax.sgd(1e-2, momentum=0.9, nesterov=True),
    "lion": optax.lion(1e-3),
    "lamb": optax.lamb(1e-3),
    "bfloat16-moment": optax.adam(1e-3, mu_dtype=jnp.bfloat16),
    "adafactor": factored(),
    "adafactor-momentum": factored(momentum=0.9),
    "adafactor-unfactored": optax.adafactor(1e-3),
    "multi-transform": optax.multi_transform(
        {"adam": optax.adam(1e-3), "sgd": optax.sgd(1e-2, momentum=0.9)}, by_rank
    ),
    "masked": optax.masked(optax.adam(1e-3), is_matrix),
    "multi-steps": optax.MultiSteps(optax.adam(1e-3), 4),
    "ema-chain": optax.chain(optax.adam(1e-3), optax.ema(0.9)),
    "schedule": optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 1e-3, 2, 10)),
    "inject-hyperparams": optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3),
    "inject-adafactor": optax.inject_hyperparams(
        optax.adafactor, static_args=("min_dim_size_to_factor",)
    )(learning_rate=1e-3, min_dim_size_to_factor=4),
    "apply-if-finite": optax.apply_if_finite(optax.adam(1e-3), 3),
    "clip-chain": optax.chain(
        optax.clip_by_global_norm(1.0), optax.adaptive_grad_clip(0.1), optax.adamw(1e-3)
    ),
    "schedule-free": contrib.schedule_free_adamw(1e-3),
    "sm3": optax.sm3(1e-2),
    "muon": contrib.muon(1e-3),
    "lbfgs": optax.lbfgs(memory_size=3),
}
UPDATED = [
    *(("decoder", name) for name in ("adafactor", "sm3", "clip-chain")),
    *(("scanned", name) for name in ("adafactor-momentum", "inject-adafactor", "sm3")),
    *(("scanned", name) for name in ("adamw-mask", "multi-transform", "multi-steps")),
    ("scanned-4", "adafactor"),
]


@functools.cache
def mesh():
    return sw.mesh("data=2,model=4", on="cpu:8")


@functools.cache
def planned(name):
    """Returns a model's layout and its sharded parameters."""
    rules = [sw.tensor("model"), sw.fsdp("data", min_bytes=0)]
    layout = sw.layout(MODELS[name], mesh(), rules, inputs=TOKENS)
    assert not sw.check(layout).errors
    return layout, nnx.state(sw.init(MODELS[name], layout), nnx.Param)


def as_tuples(spec, ndim):
    entries = [() if e is None else e if isinstance(e, tuple) else (e,) for e in spec]
    return entries + [()] * (ndim - len(entries))


def shardings_of(tree):
    return jax.tree.map(lambda x: x.sharding, tree)


def held_by_first_device(tree):
    first = mesh().devices.flat[0]
    shards = [s for array in jax.tree.leaves(tree) for s in array.addressable_shards]
    return sum(shard.data.nbytes for shard in shards if shard.device == first)


def gradients(params, seed):
    """Returns host gradients of the parameters' structure."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: rng.normal(size=x.shape).astype(x.dtype), params)


def on_host(tree):
    return jax.tree.map(np.asarray, tree)


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("model", ["decoder", "scanned"])
def test_state_matches_optax(model, transform):
    layout, params = planned(model)
    tx = TRANSFORMS[transform]
    opt = layout.for_optimizer(tx)
    abstract = jax.eval_shape(tx.init, params)
    for tree in (opt.abstract, opt.shardings, opt.specs):
        assert jax.tree.structure(tree) == jax.tree.structure(abstract)
    for planned_array, array in zip(
        jax.tree.leaves(opt.abstract), jax.tree.leaves(abstract), strict=True
    ):
        assert (planned_array.shape, planned_array.dtype) == (array.shape, array.dtype)
    assert not sw.check(opt).errors


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("model", ["decoder", "scanned"])
def test_state_is_sharded_like_its_parameters(model, transform):
    """flax#5112: the moments of stacked layers keep the stacked dim, as live arrays do."""
    layout, params = planned(model)
    tx = TRANSFORMS[transform]
    opt = layout.for_optimizer(tx)
    state = jax.jit(tx.init, out_shardings=opt.shardings)(params)
    assert not sw.audit(opt, state)
    assert held_by_first_device(state) == opt.bytes_per_device
    assert sum(x.nbytes for x in jax.tree.leaves(state)) == opt.total_bytes
    # Eagerly, optax makes a part of the parameter's shape with zeros_like, which keeps the
    # parameter's sharding: JAX itself says where it belongs.
    followed = 0
    for leaf, live in zip(opt.leaves, jax.tree.leaves(tx.init(params)), strict=True):
        if isinstance(live.sharding, NamedSharding) and leaf.ndim:
            wanted = NamedSharding(mesh(), leaf.spec)
            assert live.sharding.is_equivalent_to(wanted, leaf.ndim), leaf.path
            followed += 1
    assert followed or transform == "sgd"


def kept_dims(tx, params):
    """Returns, for each dim of each array of the state, the matching dim of the parameter.

    Found by running the update: a dim of the state is that dim of that parameter along
    which the gradient must vary for the state to vary.
    """
    params = on_host(params)
    flat, treedef = jax.tree.flatten(params)
    step = jax.jit(lambda grads: tx.update(grads, tx.init(params), params)[1])
    ones = [np.ones_like(x) for x in flat]
    kept = [[None] * x.ndim for x in jax.tree.leaves(jax.eval_shape(tx.init, params))]
    for owner, param in enumerate(flat):
        for dim in range(param.ndim):
            ramp = np.arange(1.0, 1 + param.shape[dim], dtype=param.dtype)
            varied = ones[owner] * np.expand_dims(ramp, [d for d in range(param.ndim) if d != dim])
            grads = [varied if i == owner else x for i, x in enumerate(ones)]
            state = jax.tree.leaves(step(jax.tree.unflatten(treedef, grads)))
            for dims, array in zip(kept, state, strict=True):
                for mine in range(array.ndim):
                    if np.ptp(np.asarray(array, np.float32), axis=mine).max() > 1e-3:
                        assert dims[mine] in (None, (owner, dim))
                        dims[mine] = (owner, dim)
    return kept


@pytest.mark.parametrize("transform", ["adafactor", "sm3"])
@pytest.mark.parametrize("model", MODELS)
def test_factored_parts_keep_the_dims_that_the_update_keeps(model, transform):
    layout, params = planned(model)
    opt = layout.for_optimizer(TRANSFORMS[transform])
    owners = [leaf for leaf in layout.leaves if leaf.kind == "Param"]
    kept = kept_dims(TRANSFORMS[transform], params)
    factored_parts = 0
    for leaf, dims in zip(opt.leaves, kept, strict=True):
        axes = [as_tuples(owners[d[0]].spec, owners[d[0]].ndim)[d[1]] if d else () for d in dims]
        if not any(leaf.path.endswith(o.path) and leaf.shape == o.shape for o in owners):
            assert as_tuples(leaf.spec, leaf.ndim) == axes, leaf.path
            factored_parts += any(axes)
    assert factored_parts > 10


@functools.cache
def run_updates(model, transform):
    """Returns the compiled update, and the updates and states of two steps under it."""
    layout, params = planned(model)
    tx = TRANSFORMS[transform]
    opt = layout.for_optimizer(tx)
    places = shardings_of(params)
    update = jax.jit(
        tx.update,
        in_shardings=(places, opt.shardings, places),
        out_shardings=(places, opt.shardings),
    )
    state = jax.jit(tx.init, out_shardings=opt.shardings)(params)
    compiled = update.lower(params, state, params).compile()
    steps = []
    for seed in range(2):
        grads = jax.device_put(gradients(params, seed), places)
        updates, state = compiled(grads, state, params)
        assert not sw.audit(opt, state)
        steps.append((updates, state))
    return compiled, steps


@pytest.mark.parametrize(("model", "transform"), UPDATED)
def test_sharded_update_equals_the_unsharded(model, transform):
    """Adafactor over split kernels, square, stacked and 3-D, steps as on one device."""
    params = on_host(planned(model)[1])
    tx = TRANSFORMS[transform]
    update, state = jax.jit(tx.update), tx.init(params)
    for seed, (sharded_updates, sharded_state) in enumerate(run_updates(model, transform)[1]):
        updates, state = update(gradients(params, seed), state, params)
        for got, want in zip(
            jax.tree.leaves((sharded_updates, sharded_state)),
            jax.tree.leaves((updates, state)),
            strict=True,
        ):
            np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize(("model", "transform"), UPDATED)
def test_update_moves_no_parameter(model, transform):
    """An array that is split along the wrong dim would have to be gathered or permuted."""
    compiled, _ = run_updates(model, transform)
    kinds = r" (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
    assert set(re.findall(kinds, compiled.as_text())) <= {"all-reduce"}


class Annotated(nnx.Module):
    """A square kernel with the annotation of tensor parallelism and FSDP."""

    def __init__(self, rngs):
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("data", "model"))
        self.up = nnx.Linear(16, 16, kernel_init=init, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.up(x)


def annotated_stack():
    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=(0,), out_axes=0, transform_metadata={nnx.PARTITION_NAME: None})
    def stack(rngs):
        return Annotated(rngs)

    return stack(nnx.Rngs(0))


ANNOTATED = {
    "plain": (lambda: Annotated(nnx.Rngs(0)), P("data", "model"), P("data"), P("model")),
    "stacked": (annotated_stack, P(None, "data", "model"), P(None, "data"), P(None, "model")),
}


@pytest.mark.parametrize("case", ANNOTATED)
def test_adafactor_on_an_annotated_kernel(case):
    """PAINS 10 (flax#5112) and 19: nnx.Optimizer loses the stack, or raises a rank error."""
    make, kernel, row, column = ANNOTATED[case]
    layout = sw.layout(make, mesh())
    assert layout["up.kernel"].spec == kernel
    tx = factored(momentum=0.9)
    opt = layout.for_optimizer(tx)
    found = {leaf.path.split(".up.")[0].split(".")[-1]: leaf.spec for leaf in opt.leaves}
    assert found | {"v_row": row, "v_col": column, "ema": kernel, "v": P()} == found
    params = nnx.state(sw.init(make, layout), nnx.Param)
    state = jax.jit(tx.init, out_shardings=opt.shardings)(params)
    assert not sw.audit(opt, state)
    grads = jax.device_put(gradients(params, 0), shardings_of(params))
    updates, state = jax.jit(tx.update, out_shardings=(shardings_of(params), opt.shardings))(
        grads, state, params
    )
    assert not sw.audit(opt, state)
    host = on_host(params)
    want = jax.jit(tx.update)(gradients(params, 0), tx.init(host), host)
    for a, b in zip(jax.tree.leaves((updates, state)), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-7)


def test_lbfgs_memory_keeps_every_dim():
    layout, _ = planned("scanned")
    opt = layout.for_optimizer(TRANSFORMS["lbfgs"])
    memory = [leaf for leaf in opt.leaves if "memory" in leaf.path and leaf.ndim > 1]
    assert len(memory) == 2 * len(layout.leaves)
    for leaf in memory:
        owner = layout[leaf.path.split("_memory.")[1]]
        assert as_tuples(leaf.spec, leaf.ndim) == [(), *as_tuples(owner.spec, owner.ndim)]


def test_only_trained_variables_have_optimizer_state():
    def make():
        return nnx.LoRALinear(16, 32, lora_rank=4, rngs=nnx.Rngs(0))

    layout = sw.layout(make, mesh(), {"**.lora_b": P(None, "model"), "kernel": P("data", "model")})
    tx = optax.adam(1e-3)
    opt = layout.for_optimizer(tx, wrt=nnx.LoRAParam)
    model = sw.init(make, layout)
    params = nnx.state(model, nnx.LoRAParam)
    assert jax.tree.structure(opt.abstract) == jax.tree.structure(jax.eval_shape(tx.init, params))
    assert not sw.audit(opt, tx.init(params), allow={"SW201": "0.count"})
    assert opt["0.mu.lora.lora_b"].spec == P(None, "model")
    assert "kernel" not in str(opt)


def test_lockfile_of_a_state(tmp_path):
    layout, params = planned("scanned")
    opt = layout.for_optimizer(TRANSFORMS["adafactor"])
    opt.save(tmp_path / "opt.json")
    loaded = sw.load_layout(tmp_path / "opt.json", mesh())
    assert not sw.diff(opt, loaded)
    state = sw.shard(on_host(TRANSFORMS["adafactor"].init(params)), loaded)
    assert not sw.audit(opt, state)


def test_a_value_that_is_not_an_optimizer_is_refused(tmp_path):
    layout, _ = planned("scanned")
    with pytest.raises(ValueError, match="not an optax transformation: it has no init"):
        layout.for_optimizer(1e-3)
    layout.save(tmp_path / "layout.json")
    with pytest.raises(ValueError, match="loaded from a lockfile has no variables"):
        sw.load_layout(tmp_path / "layout.json").for_optimizer(optax.adam(1e-3))
