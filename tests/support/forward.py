"""A compiled forward pass, and the collectives in it."""

import re

import jax
from flax import nnx


def run(model, args):
    """Returns the output of the compiled forward pass, and how often each collective is in it."""
    graphdef, state = nnx.split(model)
    compiled = jax.jit(lambda s, a: nnx.merge(graphdef, s)(*a)).lower(state, args).compile()
    return compiled(state, args), count(compiled)


def collectives(model, args):
    """Returns how often each collective occurs in the compiled forward pass."""
    return run(model, args)[1]


def count(compiled):
    """Returns how often each collective occurs in a compiled program."""
    found = re.findall(
        r"= (?:\([^=]*?\)|\S+) (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(",
        compiled.as_text(),
    )
    return {kind: found.count(kind) for kind in set(found)}
