"""The loss in chunks: the same values and gradients as with all logits, which never exist."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import shardwise as sw
from shardwise import models
from shardwise._jax import opened, sub_jaxprs

pytestmark = pytest.mark.usefixtures("built_once")

BATCH, LENGTH, WIDTH, VOCAB = 8, 16, 32, 96
DRAW = np.random.default_rng(0)
HIDDEN = DRAW.normal(size=(BATCH, LENGTH, WIDTH)).astype("float32")
KERNEL = DRAW.normal(size=(WIDTH, VOCAB)).astype("float32")
TARGETS = DRAW.integers(0, VOCAB, (BATCH, LENGTH)).astype("int32")
WEIGHTS = (DRAW.random((BATCH, LENGTH)) < 0.7).astype("float32") * 2


def whole(hidden, kernel, targets, weights=None, softcap=None):
    """Returns the loss as a textbook writes it."""
    logits = hidden @ kernel
    logits = logits if softcap is None else softcap * jnp.tanh(logits / softcap)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return losses.mean() if weights is None else (weights * losses).sum() / weights.sum()


CASES = {
    "plain": {},
    "masked": {"weights": WEIGHTS},
    "softcap": {"softcap": 3.0},
    "both": {"weights": WEIGHTS, "softcap": 3.0},
}


@pytest.mark.parametrize("chunks", [1, 4, LENGTH])
@pytest.mark.parametrize("case", CASES, ids=list(CASES))
def test_chunks_change_neither_the_loss_nor_its_gradients(case, chunks):
    def scaled(loss):
        return lambda *args, **more: 5 * loss(*args, **more)

    def differentiate(loss, **more):
        found = jax.jit(jax.value_and_grad(scaled(loss), argnums=(0, 1)))
        return found(HIDDEN, KERNEL, TARGETS, **{**CASES[case], **more})

    def ours(*args, softcap=None, **more):
        return models.head_loss(*args, softcap=CASES[case].get("softcap"), chunks=chunks, **more)

    want, want_gradients = differentiate(whole)
    got, gradients = differentiate(ours)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    for one, other in zip(gradients, want_gradients, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def test_tokens_without_a_sequence_are_chunked_too():
    flat = (HIDDEN.reshape(-1, WIDTH), KERNEL, TARGETS.reshape(-1))
    np.testing.assert_allclose(models.head_loss(*flat, chunks=32), whole(*flat), rtol=1e-6)


def test_float16_keeps_small_gradients_under_a_loss_scale():
    hidden, kernel = (jnp.asarray(x * 0.05, "float16") for x in (HIDDEN, KERNEL))

    def gradient(loss):
        return jax.grad(lambda h: 2.0**14 * loss(h, kernel, TARGETS))(hidden)

    got = gradient(lambda *args: models.head_loss(*args, chunks=4))
    want = gradient(whole)
    np.testing.assert_allclose(got, want, rtol=0.02, atol=2e-3)


def test_bfloat16_sums_the_kernel_s_gradient_in_float32():
    hidden, kernel = (jnp.asarray(x, "bfloat16") for x in (HIDDEN, KERNEL))
    exact = jax.grad(whole, argnums=1)(hidden.astype("float32"), kernel.astype("float32"), TARGETS)
    for chunks in (1, LENGTH):
        got = jax.grad(models.head_loss, argnums=1)(hidden, kernel, TARGETS, chunks=chunks)
        assert got.dtype == jnp.bfloat16
        error = jnp.linalg.norm(got.astype("float32") - exact) / jnp.linalg.norm(exact)
        assert error < 0.02, chunks


def shapes(jaxpr):
    """Yields the shape of every value of a program."""
    for eqn in jaxpr.eqns:
        yield from (tuple(v.aval.shape) for v in eqn.outvars)
        for inner in sub_jaxprs(eqn):
            yield from shapes(opened(inner)[0])


@pytest.mark.parametrize("chunks", [1, 4])
def test_logits_are_never_whole(chunks):
    loss = jax.value_and_grad(lambda h, k: models.head_loss(h, k, TARGETS, chunks=chunks), (0, 1))
    largest = max(
        shape[:-1] == (BATCH, LENGTH) and shape[-1] == VOCAB
        for shape in shapes(jax.make_jaxpr(loss)(HIDDEN, KERNEL).jaxpr)
        if len(shape) == 3
    )
    assert largest is (chunks == 1)


MESHES = {
    "fsdp": ("data=8", "fsdp", {}),
    "fsdp+tensor": ("data=2,model=4", "fsdp+tensor", {}),
    "sequence": ("data=2,seq=4", "fsdp", {"batch_spec": P("data", "seq")}),
    "accumulated": ("data=4,model=2", "fsdp+tensor", {"accumulate": 2, "clip": 1.0}),
}
SMALL = models.Config(layers=1, width=32, hidden=32, heads=4, vocab=VOCAB, scan=True)


@pytest.mark.parametrize("tied", [False, True], ids=["head", "tied"])
@pytest.mark.parametrize("case", MESHES, ids=list(MESHES))
def test_a_sharded_step_takes_the_same_step_in_chunks(case, tied):
    axes, rules, more = MESHES[case]
    config = dataclasses.replace(SMALL, tied=tied)
    recipe = sw.Recipe(
        model=lambda: models.Decoder(config, rngs=nnx.Rngs(0)),
        loss=models.next_token_loss,
        optimizer=optax.sgd(1.0),
        batch=jax.ShapeDtypeStruct((BATCH, LENGTH), "int32"),
        **more,
    )
    layout = sw.layout(recipe, sw.mesh(axes, on="cpu:8"), rules)
    after = []
    for chunks in (1, 4):
        chosen = dataclasses.replace(recipe, loss_chunks=chunks)
        state, metrics = sw.train_step(chosen, layout)(sw.train_state(chosen, layout), TARGETS)
        after.append((metrics, state.model))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), *after)


def test_the_kernel_is_gathered_and_its_gradient_summed_once():
    config = dataclasses.replace(SMALL, vocab=8192, layers=1)
    recipe = sw.Recipe(
        model=lambda: models.Decoder(config, rngs=nnx.Rngs(0)),
        loss=models.next_token_loss,
        optimizer=optax.sgd(1.0),
        batch=jax.ShapeDtypeStruct((BATCH, LENGTH), "int32"),
        loss_chunks=8,
    )
    compiled = sw.compile(recipe, sw.layout(recipe, sw.mesh("data=8", on="cpu:8"), "fsdp"))
    large = [row for row in compiled.collectives if row.total_bytes > 2**18]
    assert large and {row.times for row in large} == {1}


class Own(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)

    def __call__(self, tokens):
        return self.embed(tokens)


def own_recipe(loss, **more):
    batch = jax.ShapeDtypeStruct((BATCH, LENGTH), "int32")
    make = lambda: Own(nnx.Rngs(0))  # noqa: E731
    return sw.Recipe(model=make, loss=loss, optimizer=optax.sgd(0.1), batch=batch, **more)


def test_any_model_s_loss_takes_its_chunks_from_the_recipe_even_if_jitted():
    seen = []

    @jax.jit
    def inner(hidden, kernel, tokens):
        seen.append(1)
        return models.head_loss(hidden, kernel, tokens)

    def loss(model, tokens):
        return inner(model(tokens), model.embed.embedding[...].T, tokens)

    mesh = sw.mesh("data=8", on="cpu:8")
    values = []
    for chunks in (1, 2, 2):
        recipe = own_recipe(loss, loss_chunks=chunks)
        layout = sw.layout(recipe, mesh, "dp")
        state = sw.train_state(recipe, layout)
        values.append(float(sw.train_step(recipe, layout)(state, TARGETS)[1]["loss"]))
    assert len(seen) >= 2 and values == pytest.approx([values[0]] * 3, rel=1e-6)


def test_chunks_without_an_effect_are_refused():
    def loss(model, tokens):
        logits = model(tokens) @ model.embed.embedding[...].T
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()

    recipe = own_recipe(loss, loss_chunks=4)
    layout = sw.layout(recipe.model, sw.mesh("data=8", on="cpu:8"), "dp")
    with pytest.raises(ValueError, match=r"loss_chunks=4 has no effect.*models\.head_loss"):
        sw.compile(recipe, layout)


REFUSED = {
    "chunks that do not divide": ((HIDDEN, KERNEL, TARGETS), {"chunks": 5}, "5 chunks do not div"),
    "no chunks": ((HIDDEN, KERNEL, TARGETS), {"chunks": 0}, "must be a positive integer, got 0"),
    "a kernel as it is stored": ((HIDDEN, KERNEL.T, TARGETS), {}, "make no logits"),
    "targets of other positions": ((HIDDEN, KERNEL, TARGETS[:, 1:]), {}, r"must have the shape"),
}


@pytest.mark.parametrize("case", REFUSED, ids=list(REFUSED))
def test_losses_that_are_refused(case):
    args, more, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        models.head_loss(*args, **more)


def test_recipes_with_no_chunks_are_refused():
    with pytest.raises(ValueError, match="loss_chunks must be a positive integer, got 0"):
        own_recipe(lambda model, batch: 0.0, loss_chunks=0)
