"""The strategy that splits stacks of layers, and what `check` says of the layouts it makes."""

import jax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import shardwise as sw
from shardwise._layout import stage_axes
from shardwise._step import data_axes
from shardwise._step.activations import activation_rules


class Own(nnx.Module):
    """A block without Flax's layers: only a trace finds its stack."""

    def __init__(self, rngs):
        self.weight = nnx.Param(jax.random.normal(rngs.params(), (16, 16)))

    def __call__(self, x):
        return x + x @ self.weight[...]


class Net(nnx.Module):
    def __init__(self, block, layers=8):
        self.embed = nnx.Embed(32, 16, rngs=nnx.Rngs(0))
        self.blocks = nnx.vmap(block)(nnx.Rngs(0).split(layers))

    def __call__(self, tokens):
        return sw.pipeline(self.blocks)(self.embed(tokens))


def linear(rngs):
    return nnx.Linear(16, 16, rngs=rngs)


def lay(make, axes, rules, **more):
    return sw.layout(make, sw.mesh(axes, on="none"), rules, **more)


TOKENS = jax.ShapeDtypeStruct((8, 4), "int32")


@pytest.mark.parametrize(
    ("block", "rules", "more", "path", "spec"),
    [
        (linear, "pipeline", {}, "blocks.kernel", P("pipe")),
        (linear, "dp+pipeline", {}, "blocks.bias", P("pipe")),
        (
            linear,
            [sw.fsdp("data", min_bytes=0), "pipeline"],
            {},
            "blocks.kernel",
            P("pipe", "data"),
        ),
        (Own, "pipeline", {"inputs": TOKENS}, "blocks.weight", P("pipe")),
        (linear, [{"blocks.kernel": P("data")}, "pipeline"], {}, "blocks.kernel", P("data")),
    ],
    ids=["flax", "dp", "fsdp", "traced", "taken"],
)
def test_stacks_are_split(block, rules, more, path, spec):
    layout = lay(lambda: Net(block), "data=2,pipe=4", rules, **more)
    assert layout[path].spec == spec
    assert layout[path].stacked == (0,)
    assert "pipe" not in layout["embed.embedding"].spec


def test_the_batch_is_split_over_the_stages_and_the_step_knows_their_axis():
    layout = lay(lambda: Net(linear), "data=2,pipe=4", "fsdp+pipeline")
    assert stage_axes(layout.leaves) == ("pipe",)
    assert data_axes(layout) == ("data", "pipe")
    assert dict(activation_rules(layout))["stages"] == ("pipe",)
    assert "a stack of 8 layers" in layout["blocks.kernel"].reason


def test_an_axis_that_splits_other_dims_too_is_not_one_of_stages():
    rules = {"blocks.kernel": P("model"), "embed.embedding": P("model")}
    layout = lay(lambda: Net(linear), "data=2,model=4", rules)
    assert stage_axes(layout.leaves) == ()
    assert data_axes(layout) == ("data",)


def test_a_stack_that_does_not_divide_is_one_finding():
    layout = lay(lambda: Net(linear, 6), "data=2,pipe=4", "dp+pipeline")
    assert str(sw.check(layout)) == (
        "error[SW104] indivisible-dim: blocks.bias\n"
        "  dim 0 (size 6) cannot be split 4 ways over axis 'pipe': it is the dim of 2 leaves, "
        "blocks.bias, blocks.kernel\n"
        "  shape (6, 16)  spec P('pipe')  mesh data=2,pipe=4\n"
        "  help: it is a stack of layers: use 4 or 8 of them, or pipe of size 2 or 3 or 6\n"
        "1 error, 0 warnings"
    )


@pytest.mark.parametrize(
    ("block", "axes", "rules", "more", "message"),
    [
        (
            Own,
            "pipe=4",
            "pipeline",
            {},
            "stages found no stack of layers: .*; inputs= lets a trace",
        ),
        (linear, "x=4", "pipeline", {}, "needs an axis named 'pipe' or 'stage', .* sw.stages"),
        (linear, "pipe=4", sw.stages("pip"), {}, "stages uses axis 'pip'.* did you mean 'pipe'"),
    ],
    ids=["no stack", "no axis", "mistyped"],
)
def test_errors(block, axes, rules, more, message):
    with pytest.raises(ValueError, match=message):
        lay(lambda: Net(block), axes, rules, **more)


def test_stages_takes_the_name_of_an_axis():
    with pytest.raises(ValueError, match="needs the name of one axis"):
        sw.stages(("pipe", "data"))
