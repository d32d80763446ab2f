"""What qwix made of a model: plain paths, how arrays are quantised, and scales of adapters."""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
from flax import nnx

from .adapters import WRAPPED
from .leaf import Leaf
from .paths import Keys, child_of, show_path

if TYPE_CHECKING:
    from .abstract import AbstractModel


def is_bypassed(model: nnx.Module, method: str) -> bool:
    """Returns whether qwix adapted a model, but not this method: it would run without adapters."""
    kind = type(model)
    return hasattr(kind, "_unquantized_type") and method not in vars(kind)


def plain_path(leaf: Leaf) -> str:
    """Returns the path that a leaf has in the model without adapters and quantisation.

    `up.base_module.kernel` (`nnx.LoRA`) is `up.kernel`, and `up.kernel.array.qvalue` (qwix) too.
    """
    return show_path(plain_keys(leaf.keys))


def plain_keys(keys: Keys) -> Keys:
    """Returns the keys of `plain_path`."""
    if WRAPPED in keys:
        keys = tuple(key for key in keys if key != WRAPPED)
    if keys[-1:] == ("qvalue",):
        keys = keys[:-1]
        keys = keys[:-1] if keys[-1:] == ("array",) else keys
    return keys


def quantiser(leaf: Leaf, model: AbstractModel) -> tuple[Any, Callable[[Any], Any]] | None:
    """Returns how qwix quantises the array that `leaf` has the values of, and a function that does.

    The function returns a `QArray`; None if the model does not say how, or `leaf` is no such array.
    """
    if leaf.keys[-2:] != ("array", "qvalue"):
        return None
    owner = model.modules.get(leaf.keys[:-3])
    how = getattr(child_of(owner, leaf.keys[-3]), "how", None)
    if how is None:
        return None
    one: Callable[[Any], Any] = functools.partial(_quantised, how=how)
    for _ in leaf.stacked:
        one = jax.vmap(one)
    return how, one


def _quantised(array: Any, how: Any) -> Any:
    # A model that was quantised has imported it: it is no dependency of ours.
    return importlib.import_module("qwix").quantize(
        array,
        how.qtype,
        channelwise_axes=how.channelwise_axes,
        tiled_axes=how.tiled_axes,
        calibration_method=how.calibration_method,
    )


def dequantised(leaf: Leaf, model: nnx.Module) -> tuple[Any, Callable[[Any], Any]] | None:
    """Returns the quantised array whose values are `leaf`, and the function that dequantises it.

    None if it is not one of qwix.
    """
    node = _at(model, leaf.keys[:-1]) if leaf.keys[-1:] == ("qvalue",) else None
    if type(node).__name__ != "QArray":
        return None
    plain = jax.tree.map(
        lambda x: x[...] if isinstance(x, nnx.Variable) else x,
        node,
        is_leaf=lambda x: isinstance(x, nnx.Variable),
    )
    return plain, importlib.import_module("qwix").dequantize


def adapter_scale(leaf: Leaf, model: nnx.Module) -> float | None:
    """Returns what the product of an adapter's halves is multiplied by; None if that is unknown."""
    if isinstance(_at(model, leaf.keys[:-1]), nnx.LoRA):
        return 1.0
    assert leaf.follows is not None and leaf.follows.rank is not None
    place = "/".join(map(str, leaf.keys[:-1]))
    for rule in _qwix_rules(model):
        # The first rule that fits a module is the one that qwix applies.
        if getattr(rule, "rank", None) == leaf.shape[leaf.follows.rank] and re.fullmatch(
            rule.module_path, place
        ):
            return rule.alpha / rule.rank
    return None


def _qwix_rules(model: nnx.Module) -> Sequence[Any]:
    """Returns the rules of the provider with which qwix wrapped a model's method."""
    for method in vars(type(model)).values():
        for cell in getattr(method, "__closure__", None) or ():
            try:
                content = cell.cell_contents
            except ValueError:  # a variable that was never set
                continue
            for argument in getattr(content, "args", ()):
                if isinstance(getattr(argument, "_rules", None), list):
                    return argument._rules
    return ()


def _at(model: Any, keys: Keys) -> Any:
    for key in keys:
        model = child_of(model, key)
    return model
