"""Properties that hold for all inputs: our arithmetic against JAX's own errors and arrays."""

import ast
import dataclasses
import functools
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardwise as sw
from shardwise._mesh.spec import faults, parse_spec

AXES = ("data", "model", "x", "fsdp")
UNKNOWN = ("modle", "seq")
DTYPES = ("float32", "bfloat16", "int8", "uint32", "bool")
KEYS = {"threefry2x32": 2, "rbg": 4, "unsafe_rbg": 4}


def cases(count):
    """Returns the settings of a property that is tested on the same `count` cases every time."""
    return settings(max_examples=count, derandomize=True, deadline=None, database=None)


@functools.cache
def cpu_mesh(axes):
    return sw.mesh(dict(axes), on=f"cpu:{math.prod(size for _, size in axes)}")


@functools.cache
def bare_mesh(axes):
    return sw.mesh(dict(axes), on="none")


MESHES = [
    tuple(zip(AXES, sizes, strict=False))
    for rank in range(1, 5)
    for sizes in itertools.product(range(1, 9), repeat=rank)
    if math.prod(sizes) <= 8
]
sizes = st.one_of(st.integers(0, 48), st.sampled_from((8, 16, 24, 48)))
shapes = st.lists(sizes, max_size=4).map(tuple)


# Strategies are made once: hypothesis checks each new one, which takes longer than a draw.
@functools.cache
def wild_specs(axes):
    """Specs that may be wrong in any way."""
    axis = st.sampled_from([name for name, _ in axes] * 3 + list(UNKNOWN))
    entry = st.one_of(st.none(), axis, st.lists(axis, max_size=3).map(tuple))
    return st.lists(entry, max_size=5).map(lambda entries: P(*entries))


orders = functools.cache(st.permutations)


@functools.cache
@st.composite
def tame_specs(draw, axes, ndim):
    """Specs that use each axis at most once, on dims that exist; only sizes may be wrong."""
    entries = [[] for _ in range(ndim)]
    for name, _ in draw(orders(axes)):
        if ndim and draw(st.booleans()):
            entries[draw(st.integers(0, ndim - 1))].append(name)
    spec = [tuple(e) if len(e) > 1 or draw(st.booleans()) else (e or [None])[0] for e in entries]
    while spec and not spec[-1] and draw(st.booleans()):
        spec.pop()
    return P(*spec)


@functools.cache
def specs(axes, ndim):
    return st.one_of(tame_specs(axes, ndim), tame_specs(axes, ndim), wild_specs(axes))


def zeros(shape, dtype):
    if dtype in KEYS:
        return jax.random.wrap_key_data(np.zeros((*shape, KEYS[dtype]), np.uint32), impl=dtype)
    return np.zeros(shape, jnp.dtype(dtype))


class Holder(nnx.Module):
    def __init__(self, arrays):
        for i, (shape, dtype) in enumerate(arrays):
            setattr(self, f"w{i}", nnx.Param(zeros(shape, dtype)))


def place(array, axes, spec):
    """Returns the array as JAX places it, or None if JAX refuses to."""
    try:
        return jax.device_put(array, NamedSharding(cpu_mesh(axes), spec))
    except (ValueError, jax.errors.JAXTypeError):
        return None
    except Exception as error:  # JAX's error of duplicate axes is private, and no ValueError
        assert type(error).__name__ == "DuplicateSpecError", error
        return None


meshes = st.sampled_from(MESHES)
choices = functools.cache(st.sampled_from)


@st.composite
def one_leaf(draw, dtypes=DTYPES):
    axes, shape, dtype = draw(meshes), draw(shapes), draw(choices(dtypes))
    return axes, shape, dtype, draw(specs(axes, len(shape)))


@cases(600)
@given(one_leaf())
@example(((("x", 2),), (0,), "bool", P("x")))
@example(((("x", 2),), (), "int8", P(None)))
@example(((("x", 2),), (4,), "int8", P(("x", "x"))))
@example(((("x", 1),), (4, 4), "int8", P("x", "x")))
@example(((("x", 2), ("data", 2)), (4,), "int8", P((), None)))
def test_sound_exactly_when_jax_places_it(case):
    """jax#26946, jax#27808: we find what JAX rejects, and nothing else."""
    axes, shape, dtype, spec = case
    placed = place(zeros(shape, dtype), axes, spec)
    for mesh in (cpu_mesh(axes), bare_mesh(axes)):
        layout = sw.layout(Holder([(shape, dtype)]), mesh, {"**": spec})
        assert (not layout["w0"].faults) == (placed is not None), layout["w0"].faults
        assert (not sw.check(layout).errors) == (placed is not None)
        if placed is None:
            with pytest.raises(ValueError, match="cannot be applied"):
                _ = layout.shardings
        else:
            assert layout.shardings["w0"].get_value().shard_shape(shape) == layout["w0"].shard_shape


@cases(400)
@given(one_leaf((*DTYPES * 4, *KEYS)))
def test_shards_match_live_arrays(case):
    axes, shape, dtype, spec = case
    placed = place(zeros(shape, dtype), axes, spec)
    assume(placed is not None)
    holders = {}
    for shard in placed.addressable_shards:
        # For keys, JAX gives the index into the underlying words, which have one more dim.
        index = tuple(p.indices(size) for p, size in zip(shard.index, shape, strict=False))
        holders.setdefault(index, []).append(shard.device)
    for mesh in (cpu_mesh(axes), bare_mesh(axes)):
        layout = sw.layout(Holder([(shape, dtype)]), mesh, {"**": spec})
        leaf = layout["w0"]
        assert leaf.dtype == placed.dtype
        assert {shard.data.shape for shard in placed.addressable_shards} == {leaf.shard_shape}
        assert {shard.data.nbytes for shard in placed.addressable_shards} == {leaf.shard_bytes}
        assert leaf.bytes == layout.total_bytes == placed.nbytes
        assert layout.bytes_per_device == leaf.shard_bytes
        if leaf.size:  # all the shards of an empty array have one and the same index
            assert {len(devices) for devices in holders.values()} == {leaf.copies}


@st.composite
def whole_layouts(draw, tame=True):
    axes = draw(meshes)
    arrays, rules = [], {}
    for i in range(draw(st.integers(1, 4))):
        shape, dtype = draw(shapes), draw(choices((*DTYPES * 4, *KEYS)))
        spec = draw(tame_specs(axes, len(shape)) if tame else specs(axes, len(shape)))
        rules[f"w{i}"] = spec
        arrays.append((shape, dtype))
    return axes, arrays, rules


@cases(150)
@given(whole_layouts())
def test_bytes_per_device_are_the_sum_over_live_arrays(case):
    axes, arrays, rules = case
    placed = [place(zeros(*a), axes, s) for a, s in zip(arrays, rules.values(), strict=True)]
    assume(all(array is not None for array in placed))
    resident = dict.fromkeys(cpu_mesh(axes).devices.flat, 0)
    for shard in (shard for array in placed for shard in array.addressable_shards):
        resident[shard.device] += shard.data.nbytes
    for mesh in (cpu_mesh(axes), bare_mesh(axes)):
        layout = sw.layout(Holder(arrays), mesh, rules)
        assert set(resident.values()) == {layout.bytes_per_device}
        assert layout.total_bytes == sum(array.nbytes for array in placed)
        state = nnx.split(Holder(arrays))[1]
        live = jax.tree.unflatten(jax.tree.structure(state), placed)
        assert not sw.audit(layout, live)


def bare(leaf):
    """Returns the leaf without what a lockfile does not keep: how its spec was decided."""
    return dataclasses.replace(leaf, trail=())


@cases(100)
@given(whole_layouts(tame=False))
def test_lockfile_round_trip(tmp_path_factory, case):
    axes, arrays, rules = case
    path = tmp_path_factory.getbasetemp() / "layout.json"
    layout = sw.layout(Holder(arrays), cpu_mesh(axes), rules)
    layout.save(path)
    text = path.read_text()
    for loaded in (sw.load_layout(path), sw.load_layout(path, cpu_mesh(axes))):
        assert [bare(leaf) for leaf in loaded.leaves] == [bare(leaf) for leaf in layout.leaves]
        assert list(sw.check(loaded)) == list(sw.check(layout))
        difference = sw.diff(layout, loaded)
        assert not difference and str(difference) == "no difference"
        assert loaded.bytes_per_device == layout.bytes_per_device
        assert loaded.mesh.shape == layout.mesh.shape
        loaded.save(path)
        assert path.read_text() == text


words = st.text("ab0", min_size=1, max_size=2) | st.sampled_from(("kernel", "layers", "a.b", "é"))
trees = st.recursive(
    st.none(),
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3)
        | st.dictionaries(words, inner, min_size=1, max_size=3)
    ),
    max_leaves=6,
).filter(lambda tree: tree is not None)
steps = st.sampled_from(("*", "**", "**", "?", "a", "b", "kernel", "layers", "0", "1", "ab"))
globs = st.text("ab0*?", min_size=1, max_size=3)
patterns = st.lists(steps | globs, min_size=1, max_size=5).map(".".join)


def build(tree):
    if tree is None:
        return nnx.Param(np.zeros(2, np.float32))
    if isinstance(tree, list):
        return nnx.List([build(node) for node in tree])
    return nnx.Dict({name: build(node) for name, node in tree.items()})


def paths(tree):
    if tree is None:
        return [()]
    nodes = enumerate(tree) if isinstance(tree, list) else tree.items()
    return [(key, *rest) for key, node in nodes for rest in paths(node)]


def step_matches(glob, text):
    if not glob:
        return not text
    if glob[0] == "*":
        return any(step_matches(glob[1:], text[i:]) for i in range(len(text) + 1))
    return bool(text) and glob[0] in ("?", text[0]) and step_matches(glob[1:], text[1:])


def path_matches(pattern, path):
    if not pattern:
        return not path
    if pattern[0] == "**":
        return any(path_matches(pattern[1:], path[i:]) for i in range(len(path) + 1))
    if not path or not step_matches(pattern[0], str(path[0])):
        return False
    return path_matches(pattern[1:], path[1:])


@cases(400)
@given(trees, patterns)
@example({"a": {"b": None}}, "a.**.b")
@example({"a.b": None, "a": {"b": None}}, "a.b")
@example([[None]], "**.0")
@example({"layers": [{"kernel": None}] * 11}, "layers.10.kernel")
def test_patterns_match_as_a_simple_matcher_does(tree, pattern):
    layout = sw.layout(build(tree), sw.mesh("x=2", on="none"), {pattern: P("x")})
    wanted = {keys for keys in paths(tree) if path_matches(pattern.split("."), keys)}
    assert {leaf.keys for leaf in layout.leaves} == set(paths(tree))
    assert {leaf.keys for leaf in layout.leaves if leaf.spec == P("x")} == wanted
    assert [dead for dead, _ in layout.dead_patterns] == ([] if wanted else [pattern])
    assert ("SW107" in {finding.code for finding in sw.check(layout)}) == (not wanted)


@cases(150)
@given(trees)
def test_lockfile_keeps_every_path(tmp_path_factory, tree):
    path = tmp_path_factory.getbasetemp() / "paths.json"
    layout = sw.layout(build(tree), sw.mesh("x=2", on="none"))
    layout.save(path)
    loaded = sw.load_layout(path)
    assert [leaf.keys for leaf in loaded.leaves] == [leaf.keys for leaf in layout.leaves]
    assert not sw.diff(layout, loaded)


numbers = st.integers(-2, 20).map(str) | st.sampled_from(("", "+1", "1.5", "0x2", "²", "٣", "1_0"))
axis_texts = st.builds("{}{}{}".format, st.text("ab=, \0", max_size=3), st.just("="), numbers)
mesh_texts = st.text(max_size=12) | st.lists(axis_texts, max_size=4).map(",".join)
chips = st.sampled_from(("cpu", "none", "v5p", "v5e", "h200", "tpu7x", "NONE", " cpu ", "gpu", ""))
topologies = st.lists(numbers, max_size=4).map("x".join)
targets = st.none() | st.text(max_size=8) | chips | st.builds("{}:{}".format, chips, topologies)


@cases(800)
@given(mesh_texts, targets, st.booleans() | st.text("ab", max_size=2))
@example("a=-1", "cpu:0", False)
@example("a=-1,b=-1", "none", True)
@example("a=1,a=1", "none", False)
@example("é=2", "none", "é")
def test_mesh_raises_nothing_but_value_error(axes, on, explicit):
    assert len(jax.devices()) == 8  # it has started, so that no text can start another number
    try:
        mesh = sw.mesh(axes, on, explicit=explicit)
    except ValueError as error:
        assert str(error)
    else:
        assert sw.mesh(dict(mesh.shape), on, explicit=explicit) == mesh


@cases(400)
@given(one_leaf(("int8",)))
@example(((("data", 2), ("model", 4)), (4, 6, 8), "int8", P(None, "model", "data")))
@example(((("data", 2), ("model", 4)), (6, 8), "int8", P(("data", "model"))))
def test_help_of_an_indivisible_dim_is_accepted_by_jax(case):
    axes, shape, dtype, spec = case
    layout = sw.layout(Holder([(shape, dtype)]), bare_mesh(axes), {"w0": spec})
    errors = sw.check(layout).errors
    codes = {finding.code for finding in errors}
    for finding in (finding for finding in errors if finding.code == "SW104"):
        better = re.fullmatch(r"P\((.*)\) divides evenly", finding.help)
        if better:
            entries = ast.literal_eval(f"({better[1].removesuffix(',')},)")
            assert place(zeros(shape, dtype), axes, P(*entries)) is not None, entries
        elif codes <= {"SW103", "SW104"}:  # the axes themselves are sound
            dim, size = map(int, re.search(r"pad dim (\d+) to (\d+)", finding.help).groups())
            assert size > shape[dim]
            assert place(zeros((size,), dtype), axes, P(spec[dim])) is not None


# --- what is suggested is accepted ----------------------------------------------------------------

LOGICAL = ("embed", "mlp", "heads")
MISTYPED = {"modle": "model", "dat": "data", "fdsp": "fsdp"}


some_axes = st.lists(st.sampled_from(AXES), min_size=1, max_size=3, unique=True)
divisible = st.lists(st.sampled_from((1, 2, 3, 4, 6, 8, 16, 24)), max_size=4).map(tuple)


@functools.cache
def faulty_entries(names, ndim):
    tokens = st.sampled_from((*names, *names, *LOGICAL, *MISTYPED))
    entry = st.one_of(st.none(), tokens, st.lists(tokens, min_size=2, max_size=2).map(tuple))
    return st.lists(entry, max_size=ndim)


@st.composite
def faulty_specs(draw):
    names = draw(some_axes)
    sizes = {name: draw(choices((1, 2, 3, 4, 8))) for name in names}
    shape = draw(divisible)
    return sizes, shape, P(*draw(faulty_entries(tuple(names), len(shape))))


def codes_of(shape, spec, sizes):
    return {fault.code for fault in faults(shape, spec, sizes, frozenset(LOGICAL))}


def replaced(spec, places):
    def one(entry):
        axes = entry if isinstance(entry, tuple) else (entry,)
        kept = tuple(a for a in (places.get(axis, axis) for axis in axes) if a is not None)
        return kept or None

    return P(*map(one, spec))


@given(faulty_specs())
@cases(600)
def test_every_spec_that_a_fault_suggests_is_accepted(case):
    sizes, shape, spec = case
    found = faults(shape, spec, sizes, frozenset(LOGICAL))
    before = {fault.code for fault in found}
    for fault in found:
        better = re.search(r"(P\(.*\)) divides evenly", fault.help)
        if better:
            assert codes_of(shape, parse_spec(better[1]), sizes) == set(), fault
        suggested = re.search(r"did you mean '(\w+)'", fault.help)
        if suggested:
            wrong = re.search(r"axis '(\w+)' is not", fault.message)[1]
            after = faults(shape, replaced(spec, {wrong: suggested[1]}), sizes, frozenset(LOGICAL))
            assert {f.code for f in after} <= before, fault
            assert not any(f.code == "SW101" and repr(wrong) in f.message for f in after)
    places = {}
    for fault in found:
        if fault.code == "SW109":
            places |= ast.literal_eval(re.search(r"logical=(\{.*?\})", fault.help)[1])
    if places:
        assert codes_of(shape, replaced(spec, places), sizes) <= before - {"SW109"}


class Named(nnx.Module):
    """Leaves whose dims share names."""

    def __init__(self, leaves):
        self.leaves = nnx.List(
            [nnx.Param(np.zeros(shape, "f4"), out_sharding=names) for shape, names in leaves]
        )


named_shapes = st.lists(st.sampled_from((2, 3, 4, 8)), min_size=1, max_size=3).map(tuple)


@st.composite
def named_leaves(draw):
    names = draw(some_axes)
    sizes = {name: draw(choices((1, 2, 4))) for name in names}
    leaves = []
    for _ in range(draw(st.integers(1, 3))):
        shape = draw(named_shapes)
        tokens = choices((None, *names, *LOGICAL))
        dims = [draw(tokens) for _ in shape]
        leaves.append((shape, tuple(dims)))
    return sizes, leaves


@given(named_leaves())
@cases(150)
def test_suggested_axes_for_names_suit_every_leaf(case):
    sizes, leaves = case
    mesh = bare_mesh(tuple(sizes.items()))
    found = sw.check(sw.layout(lambda: Named(leaves), mesh))
    places = {}
    for finding in found:
        if finding.code == "SW109":
            places |= ast.literal_eval(re.search(r"logical=(\{.*?\})", finding.help)[1])
    if places:
        again = sw.check(sw.layout(lambda: Named(leaves), mesh, logical=places))
        before = {(f.code, f.path) for f in found.errors if f.code != "SW109"}
        assert {(f.code, f.path) for f in again.errors} <= before
