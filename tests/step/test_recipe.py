"""Recipes: each option of the step, compared with plain JAX, Optax and Flax."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import shardwise as sw

STEPS, ROWS, WIDTH = 4, 16, 16
pytestmark = pytest.mark.usefixtures("built_once")

TOLERANCE = 2e-5  # relative, float32
RNG = np.random.default_rng(0)
BATCHES = [
    {k: RNG.normal(size=(ROWS, WIDTH)).astype("float32") for k in ("x", "y")} for _ in range(STEPS)
]


def waves(key, shape, dtype):
    """Pseudo-random numbers that compile quickly."""
    return jnp.sin(jnp.arange(np.prod(shape), dtype=dtype) ** 2).reshape(shape) / 4


def linear(rngs, hidden=WIDTH, **how):
    return nnx.Linear(WIDTH, hidden, kernel_init=waves, rngs=rngs, **how)


class Mlp(nnx.Module):
    def __init__(self, rngs):
        self.up = linear(rngs, 32)
        self.down = nnx.Linear(32, WIDTH, kernel_init=waves, rngs=rngs)

    def __call__(self, x):
        return self.down(jnp.tanh(self.up(x)))


def make():
    return Mlp(nnx.Rngs(0))


def loss(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def adamw():
    return optax.adamw(1e-2, eps=1e-5)


@functools.cache
def mesh(axes="data=2,model=4"):
    return sw.mesh(axes, on="cpu:8")


def recipe(**changes):
    base = {"model": make, "loss": loss, "optimizer": adamw(), "batch": BATCHES[0]}
    return sw.Recipe(**{**base, **changes})


def begin(axes="data=2,model=4", rules="fsdp+tensor", **changes):
    """Returns the recipe's state and step."""
    given = recipe(**changes)
    layout = sw.layout(given.model, mesh(axes), rules)
    return sw.train_state(given, layout), sw.train_step(given, layout)


def run(steps=STEPS, **changes):
    """Returns losses, metrics of the last step, the last state, and the step."""
    state, step = begin(**changes)
    losses = []
    for batch in BATCHES[:steps]:
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert step.jitted._cache_size() == 1
    return losses, metrics, state, step


def optax_loop(tx, make=make, loss=loss):
    """Returns the losses of a plain loop on one device."""
    graphdef, params, rest = nnx.split(make(), nnx.Param, ...)
    tx = optax.with_extra_args_support(tx)

    @jax.jit
    def step(params, opt, batch):
        def value(params):
            return loss(nnx.merge(graphdef, params, rest), batch)

        value, grads = jax.value_and_grad(value)(params)
        updates, opt = tx.update(grads, opt, params, value=value)
        return optax.apply_updates(params, updates), opt, value

    opt, losses = tx.init(params), []
    for batch in BATCHES:
        params, opt, value = step(params, opt, batch)
        losses.append(float(value))
    return losses


@functools.cache
def plain():
    return optax_loop(adamw())


def near(got, want, tolerance=TOLERANCE):
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=1e-6)


def ndims(tree):
    return jax.tree.map(lambda x: "matrix" if x.ndim > 1 else "vector", tree)


OPTIMIZERS = {
    "adamw": adamw,
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=8),
    "sgd": lambda: optax.sgd(0.1),
    "masked": lambda: optax.masked(adamw(), lambda p: jax.tree.map(lambda x: x.ndim > 1, p)),
    "multi-transform": lambda: optax.multi_transform(
        {"matrix": adamw(), "vector": optax.sgd(0.1)}, ndims
    ),
    "schedule-free": lambda: optax.contrib.schedule_free_adamw(1e-2, eps=1e-5),
    "plateau": lambda: optax.chain(adamw(), optax.contrib.reduce_on_plateau(patience=1)),
    "polyak": optax.polyak_sgd,
    "hyperparameters": lambda: optax.inject_hyperparams(optax.sgd)(
        optax.linear_schedule(0.1, 0.01, 3)
    ),
    "multi-steps": lambda: optax.MultiSteps(optax.sgd(0.1, momentum=0.9), 2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name):
    losses, _, state, _ = run(optimizer=OPTIMIZERS[name]())
    near(losses, plain() if name == "adamw" else optax_loop(OPTIMIZERS[name]()))
    if name == "sgd":
        assert state.optimizer == {}


@pytest.mark.parametrize("parts", [2, 8])
def test_accumulate_equals_the_full_batch_for_a_mean_loss(parts):
    def loud(model, batch):
        return loss(model, batch), {"rows": batch["x"].shape[0], "first": batch["x"][0, 0]}

    losses, metrics, _, _ = run(loss=loud, accumulate=parts)
    near(losses, plain())
    assert float(metrics["rows"]) == ROWS / parts
    # Microbatch j has samples j, j + n, …; metrics are means over microbatches.
    near(metrics["first"], BATCHES[-1]["x"][:parts, 0].mean())


class Normed(nnx.Module):
    def __init__(self, rngs):
        self.inner = linear(rngs, use_bias=False)
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.inner(x))


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_accumulate_carries_statistics_from_part_to_part(dtype):
    def make():
        return Normed(nnx.Rngs(0))

    _, _, state, _ = run(1, model=make, accumulate=2, compute_dtype=dtype)
    model = make()
    for part in (0, 1):
        model(BATCHES[0]["x"][part::2])
    for path, want in (("norm.mean", model.norm.mean), ("norm.var", model.norm.var)):
        assert state.model[path].dtype == "float32"
        atol = 1e-6 if dtype is None else 1e-3
        np.testing.assert_allclose(state.model[path], want[...], rtol=TOLERANCE, atol=atol)


def test_clip():
    losses, metrics, _, _ = run(clip=0.1)
    near(losses, optax_loop(optax.chain(optax.clip_by_global_norm(0.1), adamw())))
    assert set(metrics) == {"loss", "grad_norm"}
    _, metrics, _, _ = run(1, clip=1e6, accumulate=2)
    grads = jax.tree.leaves(nnx.grad(loss)(make(), BATCHES[0]))
    near(metrics["grad_norm"], np.sqrt(sum(np.square(g).sum() for g in grads)))


def test_a_metric_named_as_ours_is_refused_or_kept_apart():
    def loud(model, batch):
        return loss(model, batch), {"grad_norm": jnp.float32(-1)}

    state, step = begin(loss=loud, clip=1.0)
    with pytest.raises(ValueError, match="grad_norm"):
        step(state, BATCHES[0])


def test_only_the_loss_sees_compute_dtype():
    seen = {}

    def spy(model, batch):
        out = model(batch["x"])
        seen.update(out=out.dtype, kernel=model.up.kernel.dtype, x=batch["x"].dtype)
        return jnp.mean((out - batch["y"]) ** 2)

    losses, metrics, state, _ = run(loss=spy, compute_dtype="bfloat16", ema=0.5)
    assert seen == {"out": jnp.bfloat16, "kernel": jnp.bfloat16, "x": jnp.bfloat16}
    floats = [x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)]
    assert {str(x.dtype) for x in floats} == {"float32"} and metrics["loss"].dtype == "float32"
    near(losses, plain(), 2e-2)
    kernel = np.asarray(state.model["up.kernel"])
    assert (kernel != kernel.astype(jnp.bfloat16).astype("float32")).any()


SAVE_NOTHING = jax.checkpoint_policies.nothing_saveable
# The value of remat, and the number of matrix products in the step: without remat, 2 forward and 3
# backward, since the batch needs no gradient. A rematerialised module does not recompute its last.
REMATS = {
    "none": (None, 5),
    "saved": ("everything_saveable", 5),
    "name": ("nothing_saveable", 7),
    "policy": (SAVE_NOTHING, 7),
    "module": ({"inner": "nothing_saveable"}, 6),
    "modules": ({"**.up": "dots_saveable", "*": SAVE_NOTHING}, 6),
}


class Outer(nnx.Module):
    def __init__(self, rngs):
        self.inner = Mlp(rngs)

    def __call__(self, x):
        return self.inner(x)


@pytest.mark.parametrize("case", REMATS)
def test_remat_recomputes_the_same_values(case):
    given, products = REMATS[case]
    losses, _, _, step = run(2, model=lambda: Outer(nnx.Rngs(0)), remat=given)
    near(losses, plain()[:2])
    jaxpr = str(jax.make_jaxpr(step.blueprint.step)(step.blueprint.abstract, step.blueprint.batch))
    assert jaxpr.count("dot_general[") == products


class Dropping(nnx.Module):
    def __init__(self, rngs):
        self.inner, self.drop = linear(rngs), nnx.Dropout(0.5)

    def __call__(self, x, rngs, scale=1.0, *, flag=True):
        return self.drop(self.inner(x), rngs=rngs) * (scale if flag else 0)


class Dropped(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([Dropping(rngs) for _ in range(2)])

    def __call__(self, x, rngs):
        for block in self.blocks:
            x = block(x, rngs, 2.0, flag=True)
        return x


def noisy(model, batch, rngs):
    return jnp.mean((model(batch["x"], rngs) - batch["y"]) ** 2)


@functools.cache
def dropped(axes="data=2,model=4", rules="fsdp+tensor", patterns=()):
    remat = dict(patterns) or None
    return run(
        model=lambda: Dropped(nnx.Rngs(0)), loss=noisy, rngs=3, remat=remat, axes=axes, rules=rules
    )[0]


def test_rngs_are_new_at_each_step_and_the_same_on_each_mesh():
    near(dropped("data=8", "dp"), dropped())
    state, step = begin(
        model=lambda: Dropped(nnx.Rngs(0)), loss=noisy, rngs=3, optimizer=optax.sgd(0.0)
    )
    seen = set()
    for _ in range(3):
        state, metrics = step(state, BATCHES[0])
        seen.add(float(metrics["loss"]))
    assert len(seen) == 3
    parts = run(1, loss=lambda m, b, r: (loss(m, b), {"noise": r.uniform()}), rngs=3, accumulate=2)
    full = run(1, loss=lambda m, b, r: (loss(m, b), {"noise": r.uniform()}), rngs=3)
    assert float(parts[1]["noise"]) != float(full[1]["noise"])


def test_rngs_that_are_passed_to_a_module_with_remat_advance():
    near(dropped(patterns=(("blocks.*", "nothing_saveable"),)), dropped())


LAST = nnx.All(nnx.Param, nnx.PathContains("down"))


@pytest.mark.bitwise
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("remat", [None, {"up": "nothing_saveable"}], ids=["kept", "remat"])
def test_untrained_variables_stay_bitwise_equal(dtype, remat):
    before, _ = begin(wrt=LAST)
    before = {path: np.asarray(x) for path, x in before.model.items()}
    _, _, state, _ = run(2, wrt=LAST, compute_dtype=dtype, ema=0.9, remat=remat)
    for path in before:
        same = np.array_equal(before[path], state.model[path])
        assert same == path.startswith("up."), path
    assert set(state.ema) == {"down.kernel", "down.bias"}
    assert not any("up" in path for path in state.optimizer)


def test_adapters_train_alone():
    def make():
        return nnx.LoRALinear(WIDTH, WIDTH, lora_rank=8, rngs=nnx.Rngs(0))

    first = {path: np.asarray(x) for path, x in begin(model=make)[0].model.items()}
    losses, _, state, _ = run(model=make, wrt=nnx.LoRAParam, optimizer=optax.sgd(0.5))
    moved = {path for path in first if not np.array_equal(first[path], state.model[path])}
    assert moved == {"lora.lora_a", "lora.lora_b"} and losses[-1] != losses[0]


def test_ema():
    state, step = begin(ema=0.75, rules=[sw.fsdp("data", "model", min_bytes=0)])
    want = {path: np.asarray(x) for path, x in state.model.items()}
    for batch in BATCHES:
        state, _ = step(state, batch)
        want = {p: 0.75 * old + 0.25 * np.asarray(state.model[p]) for p, old in want.items()}
    average = state.to_model(make, ema=True)
    for path in want:
        near(state.ema[path], want[path])
        assert state.ema[path].sharding == state.model[path].sharding
    np.testing.assert_array_equal(average.up.kernel[...], state.ema["up.kernel"])
    assert average(BATCHES[0]["x"]).shape == (ROWS, WIDTH)
    with pytest.raises(ValueError, match="no moving average: give the recipe ema=0.999"):
        begin()[0].to_model(make, ema=True)


def test_an_ema_with_zero_decay_is_kept_too():
    _, _, state, _ = run(1, ema=0.0)
    np.testing.assert_array_equal(state.ema["up.kernel"], state.model["up.kernel"])


SPECS = {
    "one": (P(None, "data"), P(None, "data")),
    "tree": ({"x": P(("data", "model")), "y": P()}, P(("data", "model"))),
    "default": (None, P(("data",))),
}


@pytest.mark.parametrize("case", SPECS)
def test_batch_spec(case):
    given, want = SPECS[case]
    losses, _, _, step = run(2, batch_spec=given)
    assert step.blueprint.batch["x"].sharding.spec == want
    near(losses, plain()[:2])


def test_compiler_options_reach_the_compiler():
    near(run(1, compiler_options={"xla_cpu_enable_fast_math": False})[0], plain()[:1])
    state, step = begin(compiler_options={"xla_no_such_option": 1})
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"):
        step(state, BATCHES[0])


def test_metrics_are_those_of_the_loss():
    def loud(model, batch):
        out = model(batch["x"])
        return jnp.mean((out - batch["y"]) ** 2), {"mean": out.mean(), "nested": {"n": 3}}

    _, metrics, _, _ = run(1, loss=loud)
    near(metrics["mean"], make()(BATCHES[0]["x"]).mean())
    assert list(metrics) == ["loss", "mean", "nested"] and int(metrics["nested"]["n"]) == 3


def test_64_bit_batches_are_converted_as_in_jax():
    wide = {key: x.astype("float64") for key, x in BATCHES[0].items()}
    state, step = begin(batch=wide)
    state, first = step(state, wide)
    state, _ = step(state, jax.tree.map(jnp.asarray, wide))
    near(first["loss"], plain()[0])
    assert step.jitted._cache_size() == 1


class Weak(nnx.Module):
    def __init__(self, rngs):
        self.inner, self.scale = linear(rngs), nnx.Variable(jnp.asarray(1.0))

    def __call__(self, x):
        self.scale[...] = self.scale[...] * jnp.float32(0.5)
        return self.inner(x)


def test_weak_types_compile_once():
    _, _, state, _ = run(3, model=lambda: Weak(nnx.Rngs(0)))
    assert float(state.model["scale"]) == 0.125


LOSSES = {
    "array": (
        lambda m, b: m(b["x"]),
        "returned an array of shape (16, 16): it must return a scalar",
    ),
    "number": (lambda m, b: 1.0, "returned a value of type float"),
    "nothing": (lambda m, b: None, "returned a value of type NoneType"),
    "integer": (lambda m, b: jnp.sum(b["x"] > 0), "int32"),
    "three": (lambda m, b: (loss(m, b), {}, 1), "must return a scalar, or a scalar and a dict"),
    "list": (
        lambda m, b: (loss(m, b), [1]),
        "returned metrics of type list: return a dict of names",
    ),
    "logits": (
        lambda m, b: (loss(m, b), m(b["x"])),
        "returned metrics of shape (16, 16): return a dict of names",
    ),
    "named": (lambda m, b: (loss(m, b), {"loss": 1}), "returned a metric named 'loss', which is"),
}


ARGUMENTS = {
    "rngs without a seed": (
        lambda model, batch, rngs: 0.0,
        None,
        "called as loss(model, batch), but its arguments are (model, batch, rngs): give the recipe "
        "rngs=0, for a third argument",
    ),
    "a seed without rngs": (
        lambda model, batch: 0.0,
        0,
        "called as loss(model, batch, rngs), but its arguments are (model, batch): leave out rngs=, "
        "or add the argument",
    ),
    "one argument": (
        lambda model: 0.0,
        None,
        "but its arguments are (model): it must take a model and a batch",
    ),
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_losses_of_other_arguments(case):
    given, seed, words = ARGUMENTS[case]
    with pytest.raises(ValueError, match=re.escape(words)):
        recipe(loss=given, rngs=seed)


@pytest.mark.parametrize("case", LOSSES)
def test_losses_that_are_refused(case):
    given, words = LOSSES[case]
    state, step = begin(loss=given, rules="dp")
    with pytest.raises(ValueError, match=re.escape(words)):
        step(state, BATCHES[0])
    assert not any(x.is_deleted() for x in jax.tree.leaves(state))


RECIPES = {
    "model": (
        {"model": Mlp(nnx.Rngs(0))},
        "model must be a function of no arguments that returns an nnx.Module, got a Mlp",
    ),
    "loss": ({"loss": 3}, "loss must be a function of a model and a batch, got an int"),
    "optimizer": ({"optimizer": 0.1}, "optimizer must be an optax transformation, got a float"),
    "batch": ({"batch": {"x": (8, 16)}}, "batch['x'][0] is 8: use jax.ShapeDtypeStruct"),
    "no-parts": ({"accumulate": 0}, "accumulate must be a positive integer, got 0"),
    "bool-parts": ({"accumulate": True}, "accumulate must be a positive integer, got True"),
    "parts": (
        {"accumulate": 3},
        "accumulate=3 cannot split batch['x'] of shape (16, 16): dim 0 (size 16) is not divisible",
    ),
    "clip": ({"clip": 0}, "clip must be a positive norm, got 0"),
    "clip-nan": ({"clip": float("nan")}, "clip must be a positive norm, got nan"),
    "clip-text": ({"clip": "1"}, "clip must be a positive norm, got '1'"),
    "ema": ({"ema": 1.0}, "ema must be a decay of at least 0 and below 1, such as 0.999, got 1.0"),
    "ema-text": (
        {"ema": "0.9"},
        "ema must be a decay of at least 0 and below 1, such as 0.999, got '0.9'",
    ),
    "rngs": ({"rngs": nnx.Rngs(0)}, "rngs must be an integer seed, got Rngs"),
    "dtype": (
        {"compute_dtype": "int8"},
        "compute_dtype must be a floating-point dtype, such as 'bfloat16', got 'int8'",
    ),
    "no-dtype": ({"compute_dtype": "float17"}, "compute_dtype must be a floating-point dtype"),
    "policy": (
        {"remat": "dots"},
        "remat='dots' is not a policy of jax.checkpoint_policies that takes no arguments: use checkpoint_dots",
    ),
    "needs-arguments": (
        {"remat": "save_only_these_names"},
        "such as save:q,k,v+offload:input; or pass a policy object, such as jax.checkpoint_policies.save_only",
    ),
    "saved-form": ({"remat": "keep:q"}, "remat 'keep:q' is not a policy: write save:NAMES"),
    "saved-twice": (
        {"remat": "save:q+offload:q"},
        "remat 'save:q+offload:q' names q more than once",
    ),
    "offload": ({"offload": "model"}, "offload must be 'optimizer', 'ema' or both"),
    "offload-ema": ({"offload": "ema"}, "offload names 'ema', but it has no ema="),
    "module-policy": ({"remat": {"up": "all"}}, "remat='all' is not a policy"),
}


@pytest.mark.parametrize("case", RECIPES)
def test_recipes_that_are_refused(case):
    changes, words = RECIPES[case]
    with pytest.raises(ValueError, match=re.escape(words)):
        recipe(**changes)


SMALL = jax.ShapeDtypeStruct((ROWS, WIDTH), "float32")
STEPS_REFUSED = {
    "nothing": (
        {"wrt": nnx.BatchStat},
        "selects no variable of the model, so nothing would be trained: its variables are of kind Param",
    ),
    "batch": (
        {"batch": {"x": SMALL, "y": jax.ShapeDtypeStruct((9, WIDTH), "float32")}},
        "batch['y'] of shape (9, 16) cannot be split as P('data') on data=2,model=4: dim 0 (size 9) cannot be split 2 ways over axis 'data'",
    ),
    "axis": (
        {"batch_spec": P("dta")},
        "batch['x'] of shape (16, 16) cannot be split as P('dta') on data=2,model=4: axis 'dta' is not on the mesh; did you mean 'data'? the mesh has data, model",
    ),
    "tree": (
        {"batch_spec": {"x": P()}},
        "give one PartitionSpec, or a pytree of them like the batch, which has batch['x'], batch['y']",
    ),
    "parts": (
        {"accumulate": 4, "batch_spec": P(("data", "model"))},
        "accumulate=4 splits batch['x'] into microbatches of 4 samples, which cannot be split 8 ways over data+model: make the batch a multiple of 32",
    ),
}


@pytest.mark.parametrize("case", STEPS_REFUSED)
def test_steps_that_are_refused(case):
    changes, words = STEPS_REFUSED[case]
    given = recipe(**changes)
    with pytest.raises(ValueError, match=re.escape(words)):
        sw.train_step(given, sw.layout(make, mesh(), "fsdp+tensor"))


def test_a_remat_pattern_that_matches_nothing_is_refused():
    state, step = begin(remat={"blocks.*": "dots_saveable"})
    words = "remat pattern 'blocks.*' matches no module that is called: the model has down, up"
    with pytest.raises(ValueError, match=re.escape(words)):
        step(state, BATCHES[0])
    assert not any(x.is_deleted() for x in jax.tree.leaves(state))


def test_a_trained_variable_without_a_gradient_is_named():
    class Masked(nnx.Module):
        def __init__(self):
            self.linear = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
            self.mask = nnx.Param(jnp.ones((8,), bool))

    recipe = sw.Recipe(
        model=Masked,
        loss=lambda model, x: (model.linear(x) * model.mask[...]).mean(),
        optimizer=optax.sgd(0.1),
        batch=jax.ShapeDtypeStruct((8, 8), "float32"),
    )
    layout = sw.layout(Masked, sw.mesh("data=8", on="cpu:8"), "dp")
    with pytest.raises(ValueError, match="mask is bool, which has no gradient, but wrt="):
        sw.train_step(recipe, layout)
