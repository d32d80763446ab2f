"""Pipelines of global arrays: where runs of layers go, random streams, and what is rejected."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from test_pipeline import GRAPHDEF, LAYERS, STATE, WIDTH, Block, X, assert_near, stacked, unsplit

import shardwise as sw
from shardwise._parallel.stages import Place, choose_microbatches, to_stages


@pytest.mark.parametrize(("stages", "rounds"), [(2, 2), (4, 2), (2, 4), (4, 3)])
def test_runs_of_layers_go_to_the_stages_that_run_them(stages, rounds):
    mesh = sw.mesh(f"pipe={stages}", on=f"cpu:{stages}")
    place = Place(mesh, False, "pipe", ())
    layers = jnp.arange(stages * rounds * 2)
    found = jax.jit(lambda x: to_stages(x, place, rounds, is_folded=False))(layers)
    want = np.asarray(layers).reshape(rounds, stages, 2).swapaxes(0, 1)
    np.testing.assert_array_equal(found, want)
    assert found.sharding.shard_shape(found.shape)[0] == 1


@pytest.mark.parametrize(
    ("rows", "stages", "ways", "rounds", "want"),
    [
        (64, 4, 1, 1, 16),  # four for each stage
        (64, 4, 8, 1, 8),  # each of one row on each device
        (24, 4, 1, 1, 12),  # a multiple of the stages
        (6, 4, 1, 1, 6),
        (2, 4, 1, 1, 2),
        (24, 4, 2, 3, 12),
    ],
)
def test_the_default_number_of_microbatches(rows, stages, ways, rounds, want):
    assert choose_microbatches(rows, stages, ways, rounds) == want


def test_no_number_of_microbatches_suits_the_circular_schedule():
    with pytest.raises(ValueError, match="6 rows, split 2 ways, .* make the batch a multiple of 8"):
        choose_microbatches(6, 4, 2, 2)


@pytest.mark.parametrize(
    "how", [{"microbatches": 6}, {"schedule": "circular"}], ids=["uneven", "folded"]
)
def test_on_the_mesh_that_is_set(how):
    state = STATE
    if how.get("schedule"):
        state = jax.tree.map(lambda a: a.reshape(2, -1, *a.shape[1:]), STATE)
    with jax.set_mesh(sw.mesh("stage=4,data=2")):
        stack = nnx.merge(GRAPHDEF, state)
        found = sw.pipeline(stack, axis="stage", **how)(X)
    assert_near(found, unsplit(STATE, X))


def test_without_an_axis_the_stack_runs_unsplit():
    pipe = sw.pipeline(stacked())
    assert_near(pipe(X), unsplit(STATE, X))
    with jax.set_mesh(sw.mesh("stage=4,data=2")):  # no layout splits the stack
        assert "ppermute" not in str(jax.make_jaxpr(pipe)(X))
    assert repr(pipe) == f"Pipeline({LAYERS} layers over the layout's axis, gpipe)"


# --- random streams -------------------------------------------------------------------------------


class Drops(nnx.Module):
    def __init__(self, rngs):
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.scale = nnx.Param(jnp.ones(WIDTH))

    def __call__(self, x):
        return x + self.drop(x) * self.scale


@pytest.mark.parametrize("rounds", [None, 2], ids=["gpipe", "circular"])
def test_dropout_differs_between_microbatches_and_layers_and_its_counts_advance(rounds):
    stack = stacked(Drops, 4)
    how = {} if rounds is None else {"schedule": "circular", "rounds": rounds}
    with jax.set_mesh(sw.mesh("stage=2,data=4")):
        pipe = sw.pipeline(stack, axis="stage", microbatches=4, **how)
        first, second = (np.asarray(pipe(jnp.ones((8, WIDTH)))) for _ in range(2))
    np.testing.assert_array_equal(stack.drop.rngs.count[...], 2)
    assert (first != second).any()
    assert len(np.unique(first, axis=0)) == 8
    # Each of four layers keeps or triples: all alike would leave 1 and 81.
    assert len(np.unique(first)) > 2
    sw.pipeline(stack)(jnp.ones((8, WIDTH)))
    np.testing.assert_array_equal(stack.drop.rngs.count[...], 3)


def test_dropout_in_evaluation_changes_nothing():
    stack = stacked(Drops, 4)
    stack.eval()
    with jax.set_mesh(sw.mesh("stage=2,data=4")):
        found = sw.pipeline(stack, axis="stage", microbatches=4)(jnp.ones((8, WIDTH)))
    np.testing.assert_array_equal(found, 2.0**4)
    np.testing.assert_array_equal(stack.drop.rngs.count[...], 0)


# --- what is rejected -----------------------------------------------------------------------------


class Normed(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)

    def __call__(self, x):
        return self.norm(x)


@pytest.mark.parametrize(
    ("make", "options", "arguments", "message"),
    [
        (
            Normed,
            {},
            (),
            "a block of the pipeline changes its norm.mean, and the change would be lost",
        ),
        (Block, {"axis": None, "mesh": "stage=4"}, (), "a pipeline with mesh= needs axis="),
        (Block, {}, (nnx.Rngs(0),), "an argument of the pipeline has type Rngs, whose state"),
        (Block, {"microbatches": 5}, (), "batch has 24 rows, which cannot be split evenly into 5"),
        (lambda rngs: Block(rngs), {"axis": "stge"}, (), "outside of any mesh with axis 'stge'"),
    ],
    ids=["batch statistics", "mesh alone", "rngs", "microbatches", "axis"],
)
def test_errors_on_a_set_mesh(make, options, arguments, message):
    with jax.set_mesh(sw.mesh("stage=4,data=2")), pytest.raises(ValueError, match=message):
        how = {"axis": "stage", "microbatches": 4} | options
        sw.pipeline(stacked(make), **how)(X, *arguments)


def test_a_timetable_needs_the_microbatches_and_the_stages():
    with pytest.raises(ValueError, match="give microbatches= for a timetable before that"):
        sw.pipeline(stacked()).timetable()
    with pytest.raises(ValueError, match="outside of any step whose layout splits stacks"):
        sw.pipeline(stacked(), microbatches=4).timetable()
    assert sw.pipeline(stacked(), microbatches=4).timetable(2).ticks == 5


def test_an_explicit_mesh_runs_the_manual_schedule():
    mesh = sw.mesh("stage=4,data=2", explicit=True)
    with jax.set_mesh(mesh):
        # On Explicit axes JAX 0.12 wants the stack to be split already.
        stack = nnx.merge(GRAPHDEF, jax.device_put(STATE, P("stage")))
        pipe = sw.pipeline(stack, axis="stage", microbatches=4)
        assert_near(jax.jit(lambda x: pipe(x))(jax.device_put(X, P())), unsplit(STATE, X))
