"""Rematerialisation policies in words: which named activations are saved, and where."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Iterator
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

SAVING_FORM = "save:NAMES, offload:NAMES, or both joined by +, such as save:q,k,v+offload:input"
# Where JAX runs attention as one kernel of cuDNN's, its results have no names of their own.
_ATTENTION, _CONTEXT = "dot_product_attention_fwd", "context"


@dataclasses.dataclass(frozen=True, slots=True)
class Saving:
    """The names of activations that a policy saves on the device, and those it offloads to the host.

    Example:
        >>> from shardwise._jax.saving import parse_saving
        >>> parse_saving("save:q,k+offload:input")
        Saving(saved=('q', 'k'), offloaded=('input',))
    """

    saved: tuple[str, ...] = ()
    offloaded: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """All of them."""
        return self.saved + self.offloaded

    def policy(self) -> Any:
        """Returns a policy for `jax.checkpoint`; inside `known_names`, it is checked for unknown names."""
        choose = jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=self.saved,
            names_which_can_be_offloaded=self.offloaded,
            offload_src="device",
            offload_dst="pinned_host",
        )
        seen: set[str] = set()
        if (asked := _asked.value) is not None:
            asked.policies.append((self, seen))

        def policy(primitive: Any, *operands: Any, **params: Any) -> Any:
            if primitive.name == "name":
                seen.add(params["name"])
            elif primitive.name.startswith(_ATTENTION) and _CONTEXT in self.names:
                seen.add(_CONTEXT)
                return choose(_name_primitive(), name=_CONTEXT)
            return choose(primitive, *operands, **params)

        return policy


def is_saving(text: str) -> bool:
    """Returns whether a policy is spelled as names to save or to offload."""
    return ":" in text


def parse_saving(text: str) -> Saving:
    """Returns the names in `save:q,k,v+offload:input`.

    Raises:
        ValueError: the text is not of that form.
    """
    found: dict[str, tuple[str, ...]] = {}
    for part in text.split("+"):
        verb, _, names = part.partition(":")
        listed = tuple(names.split(","))
        well_formed = all(re.fullmatch(r"[\w.\-]+", name) for name in listed)
        if verb not in ("save", "offload") or verb in found or not well_formed:
            raise ValueError(f"remat {text!r} is not a policy: write {SAVING_FORM}")
        found[verb] = listed
    saving = Saving(found.get("save", ()), found.get("offload", ()))
    twice = sorted({name for name in saving.names if saving.names.count(name) > 1})
    if twice:
        raise ValueError(f"remat {text!r} names {', '.join(twice)} more than once")
    return saving


@dataclasses.dataclass(slots=True, eq=False)
class _Asked:
    policies: list[tuple[Saving, set[str]]] = dataclasses.field(default_factory=list)


_asked: Any = jax.make_user_context(None)


@contextlib.contextmanager
def known_names() -> Iterator[None]:
    """Raises if a policy made inside has a name that no activation has.

    Raises:
        ValueError: such a name, with those that there are.
    """
    asked = _Asked()
    with _asked(asked):
        yield
    for saving, seen in asked.policies:
        unknown = [name for name in saving.names if name not in seen]
        if unknown:
            has = f"it names {', '.join(sorted(seen))}" if seen else "it names none"
            raise ValueError(
                f"remat saves {', '.join(map(repr, unknown))}, but the model names no such "
                f"activation: {has} (jax.ad_checkpoint.checkpoint_name gives names)"
            )


@functools.cache
def _name_primitive() -> Any:
    (eqn,) = jax.make_jaxpr(lambda x: checkpoint_name(x, _CONTEXT))(0.0).eqns
    return eqn.primitive
