"""Pipelines against the plain stack: values, gradients, the bubble, and what is rejected."""

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardwise as sw

WIDTH, LAYERS, ROWS = 8, 8, 24


class Block(nnx.Module):
    def __init__(self, rngs, axis=None):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 16, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(16, WIDTH, use_bias=False, rngs=rngs)
        self.axis = axis

    def __call__(self, x, scale=1.0):
        out = self.down(nnx.gelu(self.up(self.norm(x)))) * scale
        return x + (out if self.axis is None else jax.lax.psum(out, self.axis))


def stacked(make=Block, layers=LAYERS):
    build = nnx.vmap(make, in_axes=0, out_axes=0)
    return build(nnx.Rngs(0).split(layers))


GRAPHDEF, STATE = nnx.split(stacked())
X = jnp.asarray(np.random.default_rng(1).normal(size=(ROWS, 3, WIDTH)).astype("float32"))


def unsplit(state, x, *extras):
    def layer(h, part):
        return nnx.merge(GRAPHDEF, part)(h, *extras), None

    return jax.lax.scan(layer, x, state)[0]


def grads(fn, *args):
    def scalar(*args):
        return jnp.sum(jnp.sin(fn(*args)))

    return jax.jit(jax.value_and_grad(scalar, tuple(range(len(args)))))(*args)


def assert_near(got, want, tolerance=2e-4):
    def near(a, b):
        assert a.dtype == b.dtype and a.size == b.size
        np.testing.assert_allclose(
            np.float32(a).reshape(b.shape), np.float32(b), rtol=tolerance, atol=tolerance
        )

    jax.tree.map(near, got, want)


@functools.cache
def want():
    """What the plain stack returns; a worker that only collects these tests does not compute it."""
    return grads(unsplit, STATE, X)


SCHEDULES = [("gpipe", None), ("circular", 2)]
BOTH = pytest.mark.parametrize(("schedule", "rounds"), SCHEDULES, ids=["gpipe", "circular"])


def sharded(mesh):
    """Returns shardings: the stack split over `stage`, its hidden units over `model`."""
    specs = {"up": P("stage", None, "model"), "down": P("stage", "model")}
    return jax.tree_util.tree_map_with_path(
        lambda path, _: NamedSharding(mesh, specs.get(path[0].key, P("stage"))), STATE
    )


def fold(state, rounds):
    if rounds is None:
        return state
    return jax.tree.map(lambda a: a.reshape(rounds, -1, *a.shape[1:]), state)


@BOTH
@pytest.mark.parametrize(
    ("mesh", "microbatches"),
    [("stage=4,data=2", 12), (lambda: sw.mesh("data=2,stage=4"), 4)],
    ids=["simulated", "real"],
)
def test_a_global_stack_on_a_mesh(schedule, rounds, mesh, microbatches):
    mesh = mesh if isinstance(mesh, str) else mesh()

    def run(state, x):
        stack = nnx.merge(GRAPHDEF, state)
        how = {"axis": "stage", "microbatches": microbatches, "schedule": schedule}
        return sw.pipeline(stack, **how, rounds=rounds, mesh=mesh)(x)

    assert_near(grads(run, STATE, X), want())


@pytest.mark.parametrize("run", [sw.simulate, jax.shard_map], ids=["simulated", "real"])
@pytest.mark.parametrize(
    ("schedule", "rounds", "check_vma"),
    [("gpipe", None, False), ("circular", 2, True)],
    ids=["gpipe", "circular"],
)
def test_in_a_body_with_a_data_axis(schedule, rounds, run, check_vma):
    def body(state, x):
        stack = nnx.merge(GRAPHDEF, state)
        return sw.pipeline(stack, axis="stage", microbatches=4, schedule=schedule)(x)

    spec = P("stage") if rounds is None else P(None, "stage")
    fn = run(
        body,
        mesh=sw.mesh("data=2,stage=4"),
        in_specs=(spec, P("data")),
        out_specs=P("data"),
        check_vma=check_vma,
    )
    assert_near(grads(fn, fold(STATE, rounds), X), want())


@pytest.mark.parametrize("run", [sw.simulate, jax.shard_map], ids=["simulated", "real"])
def test_in_a_body_with_data_and_tensor_axes(run):
    graphdef = nnx.graphdef(stacked(lambda rngs: Block(rngs, "model")))

    def body(state, x):
        return sw.pipeline(nnx.merge(graphdef, state), axis="stage", microbatches=6)(x)

    mesh = sw.mesh("stage=2,data=2,model=2")
    specs = jax.tree.map(lambda s: s.spec, sharded(mesh))
    fn = run(body, mesh=mesh, in_specs=(specs, P("data")), out_specs=P("data"))
    assert_near(grads(fn, STATE, X), want())


def test_other_axes_are_left_to_the_compiler():
    mesh = sw.mesh("stage=2,data=2,model=2")
    state = jax.device_put(STATE, sharded(mesh))
    x = jax.device_put(X, NamedSharding(mesh, P("data")))

    def run(state, x):
        stack = nnx.merge(GRAPHDEF, state)
        return sw.pipeline(stack, axis="stage", microbatches=6, mesh=mesh)(x)

    found = grads(run, state, x)
    assert_near(found, want())
    kernel = found[1][0]["up"]["kernel"]
    assert kernel.addressable_shards[0].data.shape[0] == LAYERS // 2


def test_under_set_mesh():
    with jax.set_mesh(sw.mesh("stage=4,data=2")):
        pipe = sw.pipeline(stacked(), axis="stage", microbatches=4)
        assert_near(jax.jit(lambda x: pipe(x))(X), unsplit(STATE, X))
        assert pipe.timetable().stages == 4


@pytest.mark.parametrize("form", [list, tuple, nnx.List, lambda b: nnx.Sequential(*b)])
def test_forms_of_a_stack(form):
    def layer(i):
        return nnx.merge(GRAPHDEF, jax.tree.map(lambda a: a[i], STATE))

    pipe = sw.pipeline(
        form([layer(i) for i in range(LAYERS)]), axis="stage", microbatches=4, mesh="stage=2"
    )
    assert_near(pipe(X), unsplit(STATE, X))


def test_pytrees_extras_and_low_precision():
    class Pair(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(WIDTH, WIDTH, param_dtype="bfloat16", rngs=rngs)

        def __call__(self, batch, scale):
            h = batch["h"] + scale * jnp.tanh(self.linear(batch["h"])) * batch["mask"]
            return {"h": h.astype("bfloat16"), "mask": batch["mask"]}

    blocks = [Pair(nnx.Rngs(i)) for i in range(4)]
    batch = {"h": X[:, 0].astype("bfloat16"), "mask": (jnp.arange(ROWS) % 2)[:, None]}
    want = batch
    for block in blocks:
        want = block(want, 0.5)
    got = sw.pipeline(blocks, axis="stage", microbatches=6, mesh="stage=4")(batch, 0.5)
    assert_near(got, want, 2e-2)


def test_remat_in_a_block():
    class Lean(Block):
        def __call__(self, x):
            graphdef, state = nnx.split(self)

            @jax.checkpoint
            def run(state, x):
                return Block.__call__(nnx.merge(graphdef, state), x)

            return run(state, x)

    graphdef = nnx.graphdef(stacked(Lean))

    def run(state, x):
        stack = nnx.merge(graphdef, state)
        return sw.pipeline(stack, axis="stage", microbatches=4, mesh="stage=4")(x)

    assert_near(grads(run, STATE, X), want())


def test_a_block_that_is_not_finite_on_zeros_has_finite_gradients():
    class Unit(nnx.Module):
        def __init__(self, rngs):
            self.scale = nnx.Param(jnp.ones(WIDTH))

        def __call__(self, x):
            return self.scale * x / jnp.sqrt(jnp.sum(x**2, axis=-1, keepdims=True))

    blocks = [Unit(nnx.Rngs(0)) for _ in range(4)]

    def loss(x):
        return jnp.sum(sw.pipeline(blocks, axis="stage", microbatches=4, mesh="stage=4")(x) ** 3)

    assert jnp.all(jnp.isfinite(jax.grad(loss)(X[:, 0])))


# --- the timetable --------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 4))
def test_the_bubble_matches_theory(stages, groups, rounds):
    microbatches = stages * groups
    timetable = sw.Timetable(stages, microbatches, rounds)
    assert timetable.bubble == pytest.approx((stages - 1) / (microbatches * rounds))
    assert timetable.ticks == microbatches * rounds + stages - 1
    seen = {}
    for tick in range(timetable.ticks):
        for stage in range(stages):
            if (at := timetable.at(tick, stage)) is not None:
                microbatch, round_ = at
                seen[microbatch, round_ * stages + stage] = tick
    # Every microbatch visits every part of the depth once, on consecutive ticks.
    assert len(seen) == microbatches * rounds * stages
    for (microbatch, part), tick in seen.items():
        assert part == 0 or seen[microbatch, part - 1] == tick - 1


@pytest.mark.parametrize(
    ("schedule", "rounds", "ticks"), [("gpipe", None, 11), ("circular", 2, 19)]
)
def test_the_timetable_is_what_runs(schedule, rounds, ticks):
    def body(state, x):
        pipe = sw.pipeline(
            nnx.merge(GRAPHDEF, state), axis="stage", microbatches=8, schedule=schedule
        )
        assert pipe.timetable().ticks == ticks
        return pipe(x)

    spec = P("stage") if rounds is None else P(None, "stage")
    fn = sw.simulate(body, mesh="stage=4", in_specs=(spec, P()), out_specs=P())
    hops, total = fn.trace(fold(STATE, rounds), X)
    assert (hops.kind, hops.times, hops.shape) == ("ppermute", ticks, (3, 3, WIDTH))
    assert (total.kind, total.times) == ("psum", 1)
    assert hops.line.startswith(f"{os.path.relpath(__file__)}:")


def test_the_circular_grid_prints():
    assert str(sw.Timetable(2, 4, 2)) == (
        "stage 0  0a 1a 0b 1b 2a 3a 2b 3b  ·\n"
        "stage 1   · 0a 1a 0b 1b 2a 3a 2b 3b\n"
        "9 ticks, 1 of them idle on each stage: bubble 12.5% of the work"
    )
    assert " … 65 more" in str(sw.Timetable(6, 100))


# --- what is rejected -----------------------------------------------------------------------------


class Drops(nnx.Module):
    def __init__(self, rngs):
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.scale = nnx.Param(jnp.ones(WIDTH))

    def __call__(self, x):
        return self.drop(x) * self.scale


class Widens(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)

    def __call__(self, x):
        return self.linear(x)


def blocks(make=Block, count=LAYERS):
    return [make(nnx.Rngs(i)) for i in range(count)]


@pytest.mark.parametrize(
    ("stack", "options", "text"),
    [
        (blocks, {"schedule": "1f1b"}, "schedule must be one of gpipe, circular, got '1f1b'"),
        (blocks, {"rounds": 2}, "rounds applies only to schedule='circular'"),
        (blocks, {"microbatches": 5}, "batch has 24 rows, which cannot be split evenly into 5"),
        (blocks, {"microbatches": 0}, "microbatches must be a positive integer, got 0"),
        (lambda: blocks(count=6), {}, "6 layers cannot be split over 4 stages"),
        (blocks, {"axis": "stge"}, "axis 'stge' is not on the mesh stage=4: did you mean 'stage'"),
        (blocks, {"mesh": None}, "a pipeline is called outside of any mesh with axis 'stage'"),
        (
            blocks,
            {"schedule": "circular", "rounds": 2, "microbatches": 6},
            "6 microbatches cannot go round 4 stages: the circular schedule needs a multiple of 4",
        ),
        (blocks, {"schedule": "circular", "rounds": 3}, "8 layers cannot be folded into 3 rounds"),
        (lambda: [], {}, "the stack is empty"),
        (lambda: [1, 2], {}, "block 0 of the stack must be an nnx.Module, got int"),
        (lambda: jnp.ones(3), {}, "a pipeline takes a stacked nnx.Module or a sequence of modules"),
        (
            lambda: [Block(nnx.Rngs(0)), Widens(nnx.Rngs(0))],
            {},
            "block 1 of the stack differs from block 0",
        ),
        (
            lambda: blocks(Widens),
            {},
            r"maps float32\[6,3,8\] to float32\[6,3,16\]: its output must match its input",
        ),
        (lambda: blocks(Drops), {}, "a block of the pipeline changes its drop.rngs.count"),
        (lambda: blocks(lambda rngs: nnx.Dropout(0.0)), {}, "the stack has no arrays"),
    ],
)
def test_errors(stack, options, text):
    how = {"axis": "stage", "microbatches": 4, "mesh": "stage=4"} | options
    with pytest.raises(ValueError, match=text):
        sw.pipeline(stack(), **how)(X)


def test_a_stack_of_unequal_depths_is_rejected():
    state = nnx.split(stacked())[1]
    state["norm"]["bias"] = nnx.Param(jnp.zeros((LAYERS + 1, WIDTH)))
    pipe = sw.pipeline(nnx.merge(GRAPHDEF, state), axis="stage", microbatches=4, mesh="stage=4")
    with pytest.raises(ValueError, match=r"leading dims \(\d,\), but others have"):
        pipe(X)


def test_rounds_in_a_body_are_rejected():
    def body(state, x):
        stack = nnx.merge(GRAPHDEF, state)
        how = {"microbatches": 4, "schedule": "circular", "rounds": 2}
        return sw.pipeline(stack, axis="stage", **how)(x)

    fn = sw.simulate(body, mesh="stage=2", in_specs=(P("stage"), P()), out_specs=P())
    with pytest.raises(ValueError, match="rounds folds a global stack, but in a body"):
        fn(STATE, X)
