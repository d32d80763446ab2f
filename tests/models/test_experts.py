"""Mixtures of experts: tokens travel, experts stay, and the results are those of one device."""

import collections
import dataclasses
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
from shardwise import models
from shardwise._step.blueprint import make_blueprint
from shardwise.models._experts import Experts
from shardwise.models._layers import gated

BATCH, LENGTH = 16, 8
pytestmark = pytest.mark.usefixtures("built_once")

CONFIG = models.Config(
    layers=1, width=16, hidden=24, heads=4, kv_heads=2, vocab=64, experts=8, tied=True
)
TOKENS = np.random.default_rng(0).integers(0, 64, (BATCH, LENGTH)).astype("int32")
CONFIGS = {
    "all": CONFIG,
    "scanned": dataclasses.replace(
        CONFIG, layers=2, capacity=1.0, scan=True, remat="nothing_saveable"
    ),
}
EXPERT = {"experts": "expert"}
# Each: the mesh, the rules, the names, the spec of the batch.
MESHES = {
    "one": ("data=1", "dp", None, None),
    "expert": ("data=2,expert=4", None, EXPERT, P(("data", "expert"))),
    "expert+fsdp": ("data=2,expert=4", sw.fsdp("data", min_bytes=0), EXPERT, None),
    "expert+tensor": ("expert=4,model=2", None, {**EXPERT, "mlp": "model"}, P("expert")),
}


def mixed(experts, x):
    """Returns the mixture computed densely, with every expert run on every token."""
    scores = x @ experts.router[...]
    best, ids = jax.lax.top_k(scores, experts.chosen)
    shares = jax.nn.softmax(best)
    both = jnp.einsum("bld,edgf->blegf", x, experts.up[...])
    answers = jnp.einsum("blef,efd->bled", gated(both, "silu"), experts.down[...])
    weights = (jax.nn.one_hot(ids, scores.shape[-1]) * shares[..., None]).sum(-2)
    return jnp.einsum("bled,ble->bld", answers, weights)


def test_tokens_go_to_the_experts_that_the_router_chooses():
    x = jax.random.normal(jax.random.key(0), (4, LENGTH, 16))
    experts = Experts(CONFIG, rngs=nnx.Rngs(1))
    roomy = Experts(dataclasses.replace(CONFIG, capacity=4.0), rngs=nnx.Rngs(1))

    def run(mix, experts):
        return nnx.jit(nnx.value_and_grad(lambda e: (mix(e, x) ** 2).sum()))(experts)

    want = jax.tree.leaves(run(mixed, experts))
    for module in (experts, roomy):
        for a, b in zip(jax.tree.leaves(run(Experts.__call__, module)), want, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_first_choices_and_earlier_tokens_come_first():
    """With one place per expert, only the first of the tokens that choose the same two gets in."""
    config = dataclasses.replace(CONFIG, capacity=0.5)  # 0.5 * 8 tokens * 2 / 8 experts = 1 place
    experts = Experts(config, rngs=nnx.Rngs(1))
    token = jax.random.normal(jax.random.key(0), (16,))
    x = jnp.broadcast_to(token, (1, LENGTH, 16))
    out, want = (np.asarray(nnx.jit(ask)(experts, x)) for ask in (Experts.__call__, mixed))
    np.testing.assert_allclose(out[0, 0], want[0, 0], rtol=1e-4, atol=1e-6)
    assert np.abs(out[0, 0]).max() > 0 and not out[0, 1:].any()


@functools.cache
def stepped(name, where):
    """Returns the loss, the parameters after one step, and the compiled text of the step."""
    config, (axes, rules, logical, spec) = CONFIGS[name], MESHES[where]
    recipe = sw.Recipe(
        model=lambda: models.Decoder(config, rngs=nnx.Rngs(0)),
        loss=models.next_token_loss,
        optimizer=optax.sgd(1.0),
        batch=jax.ShapeDtypeStruct((BATCH, LENGTH), "int32"),
        batch_spec=spec,
    )
    mesh = sw.mesh(axes, on="cpu:1" if where == "one" else "cpu:8")
    plan = make_blueprint(recipe, sw.layout(recipe.model, mesh, rules, logical=logical))
    draw = np.random.default_rng(0)
    weights = jax.tree.map(lambda x: draw.normal(0, 0.2, x.shape).astype(x.dtype), plan.abstract)
    state = jax.device_put(weights, plan.shardings)
    tokens = jax.device_put(TOKENS, plan.batch.sharding)
    compiled = jax.jit(plan.step).lower(state, tokens).compile()
    after, metrics = compiled(state, tokens)
    return float(metrics["loss"]), jax.tree.map(np.asarray, after.model), compiled.as_text()


CASES = [
    ("all", "expert"),
    ("all", "expert+fsdp"),
    ("scanned", "expert+tensor"),
]


@pytest.mark.parametrize(("name", "where"), CASES, ids=["-".join(c) for c in CASES])
def test_a_step_on_a_mesh_equals_that_of_one_device(name, where):
    loss, after, text = stepped(name, where)
    want, wanted, _ = stepped(name, "one")
    np.testing.assert_allclose(loss, want, rtol=2e-5)
    for path, value in wanted.items():
        # The step moves by exactly the gradient, so this compares gradients.
        np.testing.assert_allclose(after[path], value, rtol=2e-5, atol=2e-5, err_msg=path)
    counts = collections.Counter(
        re.findall(r" (all-gather|all-to-all|all-reduce)(?:-start)?\(", text)
    )
    # There and back, forward and backward; remat runs the forward pass twice.
    assert counts["all-to-all"] == (6 if name == "scanned" else 4)
    if "fsdp" not in where:
        assert not counts["all-gather"]  # no expert's weights are gathered
    else:  # over data only: the gathered weights are those of the device's own two experts
        gathered = re.findall(r"= f32\[(\d+),[^\]]*\]\S* all-gather\(", text)
        assert not re.search(r"= f32\[8,(?:16,2,24|24,16)\]\S* all-gather", text) and gathered


def test_a_batch_that_cannot_reach_all_experts_is_refused():
    axes, rules, logical, spec = MESHES["expert+fsdp"]

    def make():
        return models.Decoder(CONFIG, rngs=nnx.Rngs(0))

    layout = sw.layout(make, sw.mesh(axes, on="cpu:8"), rules, logical=logical)
    inputs = jax.ShapeDtypeStruct((2, LENGTH), "int32")
    told = "2 sequences cannot be split 4 ways over expert, as experts need: make the batch a"
    with pytest.raises(ValueError, match=told):
        sw.compile(make, layout, inputs=inputs, show=False)
