"""Runs a program with many independent outputs in parts.

A single jitted program that initialises every leaf of a model keeps the temporaries of many leaves
alive at once, and compiles the same initialiser again for every layer. Here the traced program is
cut up: small values (random keys, scalars) are computed first, then each leaf by its own program,
one after the other. Programs that differ only in their inputs, such as those of identical layers,
are compiled once, also when the same model is initialised again.
"""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from .._jax import cut_jaxpr, is_jaxpr, is_literal, jaxpr_as_fun

# In elements: random keys and counts are smaller. Floating-point values are always computed in
# jitted programs, since rounding may differ without jit.
_SMALL = 4096
_LIGHT_BYTES = 2**28
# Jitted programs by key, the last used last. Each keeps alive what the key has only the ids of, so
# those with large constants are left out.
_PROGRAMS: collections.OrderedDict[Any, tuple[Any, Any]] = collections.OrderedDict()
_MOST_PROGRAMS = 128
_CONSTANT_BYTES = 2**20


def run_in_parts(closed: Any, shardings: Sequence[NamedSharding]) -> list[jax.Array]:
    """Returns the outputs of a closed jaxpr without inputs, each with its sharding."""
    jaxpr, consts = closed.jaxpr, list(closed.consts)
    known = dict(zip(jaxpr.constvars, consts, strict=True))
    small, large = _separate(jaxpr, set(known))
    computed = {v for eqn in small for v in eqn.outvars} | set(known)
    parts = [
        _Part(jaxpr, indices, eqns, computed, shardings)
        for indices, eqns in _parts(jaxpr.outvars, large, computed)
    ]
    keys = _Keys()
    keyed = [(part, (keys.of(part.jaxpr), tuple(part.shardings))) for part in parts]
    # Cutting the program would drop or reorder prints in an initialiser, and a small model whose
    # leaves are mostly different gains nothing from it.
    mostly_different = 2 * len({key for _, key in keyed}) > len(parts)
    light = sum(_bytes(v) for v in jaxpr.outvars) < _LIGHT_BYTES
    if closed.effects or (mostly_different and light):
        key = (keys.of(jaxpr), tuple(map(id, consts)), tuple(shardings))
        return list(_jitted(key, closed, list(shardings), keys)())

    wanted = [v for v in dict.fromkeys(v for p in parts for v in p.inputs) if v not in known]
    outputs = [i for i, v in enumerate(jaxpr.outvars) if is_literal(v) or v in computed]
    # Run without jit: one program for hundreds of random keys would take long to compile.
    first = cut_jaxpr(jaxpr, list(known), [*wanted, *(jaxpr.outvars[i] for i in outputs)], small)
    values = jaxpr_as_fun(first)(*consts)
    known.update(zip(wanted, values, strict=False))
    results: list[Any] = [None] * len(jaxpr.outvars)
    for i, value in zip(outputs, values[len(wanted) :], strict=True):
        results[i] = put_anywhere(value, shardings[i])

    compiled: dict[Any, Any] = {}
    for part, key in keyed:
        if key not in compiled:
            compiled[key] = _jitted(key, part.jaxpr, part.shardings, keys)
        # Wait, so that only one part's temporaries are in memory at a time.
        arrays = jax.block_until_ready(compiled[key](*(known[v] for v in part.inputs)))
        for i, array in zip(part.indices, arrays, strict=True):
            results[i] = array
    return results


def _jitted(key: Any, closed: Any, shardings: list[NamedSharding], keys: _Keys) -> Any:
    """Returns the jitted program of a closed jaxpr, the one of an earlier call if there is one."""
    if key in _PROGRAMS:
        _PROGRAMS.move_to_end(key)
        return _PROGRAMS[key][0]
    program = jax.jit(jaxpr_as_fun(closed), out_shardings=shardings)
    constants = (*getattr(closed, "consts", ()), *keys.constants)
    if sum(getattr(c, "nbytes", 0) for c in constants) <= _CONSTANT_BYTES:
        _PROGRAMS[key] = program, (closed, keys)
        if len(_PROGRAMS) > _MOST_PROGRAMS:
            _PROGRAMS.popitem(last=False)
    return program


def put_anywhere(value: Any, sharding: Any) -> jax.Array:
    """Returns a value placed with a sharding, which may span processes.

    `jax.device_put` does not move a process's arrays to the devices of other processes. Here every
    process has the same value, so each places its own shards of it.
    """
    if sharding.is_fully_addressable:
        return jax.device_put(value, sharding)
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        impl = str(jax.random.key_impl(value))
        return wrap_keys(put_anywhere(jax.random.key_data(value), sharding), sharding, impl)
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        return jax.device_put(value, sharding)
    host = np.asarray(value)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def wrap_keys(data: jax.Array, sharding: Any, impl: str) -> jax.Array:
    """Returns random keys from their raw key data, with the given sharding."""
    return _wrap_on(sharding, impl)(data)


@functools.lru_cache(maxsize=64)
def _wrap_on(sharding: Any, impl: str) -> Any:
    return jax.jit(functools.partial(jax.random.wrap_key_data, impl=impl), out_shardings=sharding)


class _Part:
    """Outputs that share equations, and the program that computes them from small values."""

    def __init__(
        self,
        jaxpr: Any,
        indices: list[int],
        eqns: list[Any],
        computed: set[Any],
        shardings: Sequence[NamedSharding],
    ):
        read = (v for eqn in eqns for v in eqn.invars if not is_literal(v))
        self.indices = indices
        self.inputs = [v for v in dict.fromkeys(read) if v in computed]
        self.jaxpr = cut_jaxpr(jaxpr, self.inputs, [jaxpr.outvars[i] for i in indices], eqns)
        self.shardings = [shardings[i] for i in indices]


def _separate(jaxpr: Any, known: set[Any]) -> tuple[list[Any], list[Any]]:
    """Returns the equations that involve only small values, and the rest."""
    small_vars = {v for v in known if _is_small(v)}
    small, large = [], []
    for eqn in jaxpr.eqns:
        inputs_small = all(is_literal(v) or v in small_vars for v in eqn.invars)
        if inputs_small and all(_is_small(v) for v in eqn.outvars):
            small.append(eqn)
            small_vars.update(eqn.outvars)
        else:
            large.append(eqn)
    return small, large


def _parts(
    outvars: Sequence[Any], large: Sequence[Any], computed: set[Any]
) -> Iterator[tuple[list[int], list[Any]]]:
    """Yields groups of outputs that share equations, each with the equations it needs."""
    producer = {v: n for n, eqn in enumerate(large) for v in eqn.outvars}
    group_of: dict[int, int] = {}  # by equation
    groups: dict[int, tuple[list[int], set[int]]] = {}
    for index, out in enumerate(outvars):
        if is_literal(out) or out in computed:
            continue
        needed: set[int] = set()
        met: set[int] = set()
        stack = [producer[out]]
        while stack:
            n = stack.pop()
            if n in needed:
                continue
            if n in group_of:
                met.add(group_of[n])
                continue
            needed.add(n)
            stack += [producer[v] for v in large[n].invars if not is_literal(v) and v in producer]
        indices = [index]
        for other in met:
            more, eqns = groups.pop(other)
            indices, needed = [*more, *indices], needed | eqns
        groups[index] = (indices, needed)
        group_of.update(dict.fromkeys(needed, index))
    for indices, needed in groups.values():
        yield indices, [large[n] for n in sorted(needed)]


def _bytes(var: Any) -> int:
    dtype = getattr(var.aval, "dtype", None)
    return math.prod(getattr(var.aval, "shape", ())) * getattr(dtype, "itemsize", 0)


def _is_small(var: Any) -> bool:
    size = math.prod(getattr(var.aval, "shape", ()))
    exact = not jnp.issubdtype(getattr(var.aval, "dtype", jnp.bool_), jnp.inexact)
    return size <= (_SMALL if exact else 1)


class _Keys:
    """Computes keys: two jaxprs with equal keys compute the same function of their inputs."""

    def __init__(self) -> None:
        self.inner: dict[int, tuple[Any, Any]] = {}
        self.objects: list[Any] = []

    @property
    def constants(self) -> list[Any]:
        """The constants of inner jaxprs."""
        return [c for value, _ in self.inner.values() for c in getattr(value, "consts", ())]

    def of(self, jaxpr: Any) -> Any:
        """Returns the key of a jaxpr: its equations, variables numbered in order of appearance."""
        numbers: dict[Any, int] = {}

        def atom(v: Any) -> Any:
            if is_literal(v):
                return ("literal", str(v.aval), np.asarray(v.val).tobytes())
            return numbers.setdefault(v, len(numbers))

        def variable(v: Any) -> Any:
            return (numbers.setdefault(v, len(numbers)), str(v.aval))

        head = tuple(variable(v) for v in (*jaxpr.constvars, *jaxpr.invars))
        body = tuple(
            (
                eqn.primitive,
                tuple(atom(v) for v in eqn.invars),
                tuple((name, self._parameter(eqn.params[name])) for name in sorted(eqn.params)),
                tuple(variable(v) for v in eqn.outvars),
            )
            for eqn in jaxpr.eqns
        )
        return (head, body, tuple(atom(v) for v in jaxpr.outvars))

    def _parameter(self, value: Any) -> Any:
        inner = getattr(value, "jaxpr", value)
        if is_jaxpr(inner):
            # JAX caches traces, so every layer has the same object. It is kept alive, so that no
            # other object can get its id.
            if id(value) not in self.inner:
                consts = tuple(id(c) for c in getattr(value, "consts", ()))
                self.inner[id(value)] = (value, (self.of(inner), consts))
            return self.inner[id(value)][1]
        if isinstance(value, tuple | list):
            return tuple(self._parameter(v) for v in value)
        try:
            hash(value)
        except TypeError:
            self.objects.append(value)  # kept alive, as above
            return ("object", id(value))
        return value
