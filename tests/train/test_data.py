"""Data: the order of samples, positions, sources, and the placement of batches."""

import functools
import re

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardwise as sw

MESHES = {
    "dp": ("data=8", "dp", None),
    "replicated": ("model=8", "tensor", None),
    "both": ("data=2,model=4", "fsdp+tensor", P(("data", "model"))),
    "second-dim": ("data=2,model=4", "dp", P("data", "model")),
}


def make():
    return nnx.Linear(8, 8, rngs=nnx.Rngs(0))


@functools.cache
def place(where="dp"):
    axes, rules, spec = MESHES[where]
    return sw.layout(make, sw.mesh(axes, on="cpu:8"), rules), spec


def recipe(batch, spec=None):
    return sw.Recipe(
        model=make,
        loss=lambda model, batch: jnp.float32(0),
        optimizer=optax.sgd(0.1),
        batch=batch,
        batch_spec=spec,
    )


def rows(count, *shape, dtype="int32"):
    return jax.ShapeDtypeStruct((count, *shape), dtype)


def batches(data, batch, where="dp", position=0):
    layout, spec = place(where)
    return data.batches(recipe(batch, spec), layout, position=position)


def take(data, count, size=8, position=0, shape=(), where="dp"):
    """Returns the samples of `count` batches, concatenated."""
    found = batches(data, rows(size, *shape), where, position)
    return np.concatenate([np.asarray(next(found)) for _ in range(count)])


NUMBERS = np.arange(40, dtype="int32")


@functools.cache
def order(epochs=3):
    """Returns the numbers of `epochs` epochs of 40, in order."""
    return take(sw.data(NUMBERS, seed=5), epochs * 5)


def test_each_epoch_has_each_sample_once_in_its_own_order():
    epochs = order().reshape(3, 40)
    for epoch in epochs:
        assert sorted(epoch) == list(NUMBERS) and list(epoch) != list(NUMBERS)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    np.testing.assert_array_equal(take(sw.data(NUMBERS, seed=5), 15), order())
    assert list(take(sw.data(NUMBERS, seed=6), 5)) != list(order()[:40])
    np.testing.assert_array_equal(take(sw.data(NUMBERS, shuffle=False), 6), [*range(40), *range(8)])


@pytest.mark.parametrize("where", MESHES)
def test_the_order_does_not_depend_on_the_mesh_and_batches_are_placed_as_planned(where):
    grid = np.broadcast_to(NUMBERS[:, None], (40, 4))
    layout, spec = place(where)
    found = batches(sw.data(grid, seed=5), rows(8, 4), where)
    for i in range(6):
        batch = next(found)
        np.testing.assert_array_equal(batch[:, 0], order()[8 * i : 8 * i + 8])
        want = spec or P("data" if "data" in layout.mesh.shape else None)
        assert batch.sharding.is_equivalent_to(NamedSharding(layout.mesh, want), 2)
        for shard in batch.addressable_shards:
            np.testing.assert_array_equal(shard.data, np.asarray(batch)[shard.index])
    assert found.position == 48


@settings(max_examples=15, deadline=None)
@given(
    first=st.sampled_from([8, 16, 24]),
    second=st.sampled_from([8, 16, 24]),
    taken=st.integers(0, 4),
    prefetch=st.integers(1, 4),
)
def test_a_position_continues_exactly_even_with_another_batch_size(first, second, taken, prefetch):
    data = sw.data(NUMBERS, seed=5, prefetch=prefetch)
    found = batches(data, rows(first))
    before = [np.asarray(next(found)) for _ in range(taken)]
    assert found.position == first * taken
    after = take(data, 1, second, found.position)
    total = first * taken + second
    np.testing.assert_array_equal(np.concatenate([*before, after]), order(4)[:total])


@settings(max_examples=15, deadline=None)
@given(count=st.integers(1, 50), seed=st.integers(0, 2**32 - 1), epochs=st.integers(1, 3))
def test_epochs_end_and_have_each_sample_equally_often(count, seed, epochs):
    data = sw.data(np.arange(count, dtype="int32"), seed=seed, epochs=epochs)
    assert len(data) == count
    if count < 8:
        with pytest.raises(
            ValueError, match=f"the data has {count} samples?, fewer than one batch"
        ):
            batches(data, rows(8))
        return
    taken = [np.asarray(batch) for batch in batches(data, rows(8))]
    assert len(taken) == count * epochs // 8
    flat = np.concatenate(taken)
    for epoch in range(len(flat) // count):
        part = flat[epoch * count : (epoch + 1) * count]
        assert sorted(part) == list(range(count))
    assert np.bincount(flat).max() <= epochs


def test_tokens_of_files_and_arrays(tmp_path):
    tokens = np.arange(1003, dtype="uint16")
    np.save(tmp_path / "tokens.npy", tokens)
    tokens.tofile(tmp_path / "tokens.bin")
    want = tokens[:1000].reshape(100, 10)
    sources = [
        sw.data(tmp_path / "tokens.npy", length=10, shuffle=False),
        sw.data(str(tmp_path / "tokens.bin"), length=10, dtype="uint16", shuffle=False),
        sw.data(tokens, length=10, shuffle=False),
        sw.data(jnp.asarray(tokens), length=10, shuffle=False),
    ]
    for data in sources:
        assert len(data) == 100
        batch = next(batches(data, rows(8, 10)))
        assert batch.dtype == "int32"
        np.testing.assert_array_equal(batch, want[:8])
    mixed = take(sw.data(tmp_path / "tokens.npy", length=10, seed=1), 12, shape=(10,))
    assert {tuple(row) for row in mixed} < {tuple(row) for row in want}


class Squares:
    """A random access source of pairs."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return {"x": np.int32(index), "y": np.full(3, index**2, "float32")}


PAIRS = {"x": NUMBERS, "y": np.repeat(NUMBERS.astype("float32") ** 2, 3).reshape(40, 3)}
SOURCES = {
    "dict": lambda: PAIRS,
    "source": Squares,
    "list": lambda: [Squares()[i] for i in range(40)],
    "grain": lambda: grain.MapDataset.source(Squares()).map(lambda s: s),
    "grain-range": lambda: grain.MapDataset.range(40).map(lambda i: Squares()[i]),
    "devices": lambda: jax.tree.map(jnp.asarray, PAIRS),
}


@pytest.mark.parametrize("name", SOURCES)
def test_sources(name):
    data = sw.data(SOURCES[name](), seed=5)
    assert len(data) == 40
    found = batches(data, {"x": rows(8), "y": rows(8, 3, dtype="float32")})
    for i in range(6):
        batch = next(found)
        np.testing.assert_array_equal(batch["x"], order()[8 * i : 8 * i + 8])
        np.testing.assert_array_equal(batch["y"][:, 2], np.asarray(batch["x"]) ** 2)


def test_a_tuple_of_arrays_is_a_pytree_of_rows():
    data = sw.data((PAIRS["x"], PAIRS["y"]), seed=5)
    assert len(data) == 40
    x, y = next(batches(data, (rows(8), rows(8, 3, dtype="float32"))))
    np.testing.assert_array_equal(x, order()[:8])
    np.testing.assert_array_equal(y[:, 0], order()[:8] ** 2)


def test_a_transform_sees_each_sample():
    data = sw.data(NUMBERS, seed=5, transform=lambda x: {"x": x * 2, "odd": np.int32(x % 2)})
    batch = next(batches(data, {"x": rows(8), "odd": rows(8)}))
    np.testing.assert_array_equal(batch["x"], order()[:8] * 2)
    np.testing.assert_array_equal(batch["odd"], order()[:8] % 2)


class Counted:
    def __init__(self):
        self.read = []

    def __len__(self):
        return 40

    def __getitem__(self, index):
        self.read.append(int(index))
        return np.int32(index)


def test_batches_are_read_ahead_but_not_counted():
    source = Counted()
    found = batches(sw.data(source, prefetch=3, shuffle=False), rows(8))
    assert found.position == 0
    next(found)
    assert found.position == 8 and len(source.read) >= 3 * 8
    assert set(range(24)) <= set(source.read)
    # A position in the middle skips without reading.
    source = Counted()
    next(batches(sw.data(source, prefetch=1, shuffle=False), rows(8), position=16))
    assert min(source.read) == 16


def test_a_step_takes_the_batches_as_they_are_placed():
    layout, _ = place()
    loss = lambda model, x: (model(x) ** 2).mean()  # noqa: E731
    batch = rows(8, 8, dtype="float32")
    given = sw.Recipe(model=make, loss=loss, optimizer=optax.sgd(0.1), batch=batch)
    state, step = sw.train_state(given, layout), sw.train_step(given, layout)
    found = sw.data(np.ones((16, 8), "float32"), epochs=2).batches(given, layout)
    losses = []
    for batch in found:
        assert step._put(batch) is batch
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert len(losses) == 4 and losses == sorted(losses, reverse=True)
    assert step.jitted._cache_size() == 1


def test_64_bit_data_feeds_a_64_bit_recipe():
    found = batches(sw.data(np.arange(16), shuffle=False), rows(8, dtype="int64"))
    batch = next(found)
    np.testing.assert_array_equal(batch, np.arange(8))
    assert found._put(batch) is batch


def test_a_batch_in_another_container_is_refused():
    pair = (np.ones(8, "int32"), np.ones(8, "int32"))
    step = sw.train_step(recipe(pair), place()[0])
    with pytest.raises(ValueError, match="different structure") as caught:
        step(None, list(pair))
    got, wanted = str(caught.value).split("got ")[1].split(", wanted ")
    assert got != wanted


REFUSED = {
    "prefetch": (
        lambda path: sw.data(NUMBERS, prefetch=0),
        "prefetch must be a positive integer, got 0",
    ),
    "empty": (lambda path: sw.data(NUMBERS[:0]), "the data has no samples"),
    "generator": (
        lambda path: sw.data(x for x in ()),
        "the data has type generator: give a token file, arrays, or a source with len and [i]",
    ),
    "scalar": (
        lambda path: sw.data(np.ones(())),
        "arrays of samples must have the same number of rows (dim 0), got ()",
    ),
    "rows": (
        lambda path: sw.data({"x": NUMBERS, "y": NUMBERS[:3]}),
        "must have the same number of rows (dim 0), got {'x': (40,), 'y': (3,)}",
    ),
    "missing": (lambda path: sw.data(path / "no.npy", length=4), "no.npy does not exist"),
    "no-length": (
        lambda path: sw.data(path / "t.npy"),
        "t.npy must be cut into samples: give length=, the number of tokens",
    ),
    "no-dtype": (
        lambda path: sw.data(path / "t.bin", length=4),
        "t.bin has no header with its dtype: give dtype=, such as 'uint16'",
    ),
    "bad-dtype": (
        lambda path: sw.data(path / "t.bin", length=4, dtype="int17"),
        "t.bin cannot be read: data type 'int17' not understood",
    ),
    "no-npy": (lambda path: sw.data(path / "bad.npy", length=4), "bad.npy cannot be read"),
    "length": (
        lambda path: sw.data(NUMBERS, length=0),
        "length=0 cannot cut 40 tokens into samples",
    ),
    "too-long": (
        lambda path: sw.data(NUMBERS, length=41),
        "length=41 cannot cut 40 tokens into samples",
    ),
    "floats": (
        lambda path: sw.data(np.ones(8), length=2),
        "length=2 needs a one-dimensional array of integers, got float64 of shape (8,)",
    ),
    "two-dims": (lambda path: sw.data(np.ones((8, 2), int), length=2), "got int64 of shape (8, 2)"),
    "epochs": (
        lambda path: sw.data(NUMBERS, epochs=0),
        "epochs must be a positive integer or None",
    ),
    "seed": (
        lambda path: sw.data(NUMBERS, seed=-1),
        "seed must be from 0 to 2**32 - 1, as Grain requires, got -1",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_data_that_is_refused(case, tmp_path):
    np.save(tmp_path / "t.npy", NUMBERS)
    NUMBERS.tofile(tmp_path / "t.bin")
    (tmp_path / "bad.npy").write_text("this is no array")
    build, words = REFUSED[case]
    with pytest.raises(ValueError, match=re.escape(words)):
        build(tmp_path)


WRONG = {
    "dtype": (
        NUMBERS,
        rows(8, dtype="float32"),
        0,
        "batch is int32[8], wanted float32[8] (cast it: .astype('float32'))",
    ),
    "shape": (np.ones((40, 3), "int32"), rows(8, 4), 0, "its batch has shape (3,), wanted (4,)"),
    "structure": ({"x": NUMBERS}, {"y": rows(8)}, 0, "got batch['x'], wanted batch['y']"),
    "sizes": (
        {"x": NUMBERS},
        {"x": rows(8), "y": rows(16)},
        0,
        "batch have [8, 16] samples (dim 0): sw.data needs the same number of samples in every leaf",
    ),
    "ragged": (
        [np.ones(1 + i, "int32") for i in range(8)],
        rows(8, 4),
        0,
        "the samples of a batch have different shapes: [(1,), (2,)",
    ),
    "negative": (NUMBERS, rows(8), -8, "position must be a non-negative integer, got -8"),
}


@pytest.mark.parametrize("case", WRONG)
def test_batches_that_are_refused(case):
    source, batch, position, words = WRONG[case]
    with pytest.raises(ValueError, match=re.escape(words)):
        next(batches(sw.data(source), batch, position=position))


@pytest.mark.parametrize("position", [36, 40, 48])
def test_a_position_past_the_end_is_refused(position):
    left = max(40 - position, 0)
    with pytest.raises(ValueError, match=f"the data has {left} samples left of 40, fewer than one"):
        batches(sw.data(NUMBERS, epochs=1), rows(8), position=position)


# --- data that would silently train wrong ---------------------------------------------------------


@pytest.mark.parametrize("where", ["dp", "second-dim"])
@pytest.mark.parametrize("length", [8, 32])
def test_samples_of_another_length_than_the_batch_are_refused(where, length):
    data = sw.data(np.arange(32 * 16), length=length)
    with pytest.raises(ValueError) as caught:
        next(batches(data, rows(8, 16), where))
    assert str(caught.value) == (
        f"a sample does not match the recipe: its batch has shape ({length},), wanted (16,), since a "
        f"batch is int32[8, 16]"
    )


def test_a_leaf_of_another_shape_is_named():
    data = sw.data({"x": np.zeros((8, 4, 3), "int32"), "y": np.zeros((8, 4), "int32")})
    batch = {"x": rows(8, 4, 2), "y": rows(8, 4)}
    with pytest.raises(ValueError, match=r"its batch\['x'\] has shape \(4, 3\), wanted \(4, 2\)"):
        next(batches(data, batch))


def test_tokens_that_do_not_fit_are_refused():
    tokens = np.arange(160)
    tokens[37] = 2**32 + 5
    data = sw.data(tokens, length=16, shuffle=False)
    with pytest.raises(ValueError, match="^token 4294967301 at index 37 does not"):
        next(batches(data, rows(8, 16)))


def test_integers_that_jax_would_change_are_refused():
    numbers = np.arange(40)
    numbers[3] = 2**32 + 5
    wanted = (
        r"^batch has 4294967301 in sample 3, which does not fit int32: JAX would turn it into 5$"
    )
    with pytest.raises(ValueError, match=wanted):
        next(batches(sw.data(numbers), rows(40, dtype="int64")))
    step = sw.train_step(recipe(rows(40, dtype="int64")), place()[0])
    with pytest.raises(ValueError, match=wanted):
        step(sw.train_state(recipe(rows(40, dtype="int64")), place()[0]), numbers)


def test_a_transform_or_a_source_that_returns_none_is_refused_at_once():
    data = sw.data(NUMBERS, transform=lambda x: None if x == 7 else x)
    with pytest.raises(ValueError, match="^transform returned None for sample 7: "):
        take(data, 5)
    with pytest.raises(ValueError, match=r"^sample \d+ of the data is None: "):
        take(sw.data([None] * 40), 1)


@pytest.mark.parametrize("epochs", [None, 8])
def test_fewer_samples_than_one_batch_are_refused(epochs):
    with pytest.raises(ValueError, match="^the data has 3 samples, fewer than one batch of 16, "):
        batches(sw.data(NUMBERS[:3], epochs=epochs), rows(16))


class Embedding(nnx.Module):
    def __init__(self):
        self.tokens = nnx.Embed(64, 8, rngs=nnx.Rngs(0))
        self.kinds = nnx.Param(jnp.ones((3, 8)))

    def __call__(self, tokens, kinds):
        return self.tokens(tokens) + self.kinds[kinds]


def lookup_loss(model, batch):
    x = model(batch["tokens"][:, :-1], batch["kinds"][:, :-1])
    logits = jax.nn.log_softmax(model.tokens.attend(x))
    picked = jnp.take_along_axis(logits, batch["tokens"][:, 1:, None], axis=-1)
    # Labels may be out of range on purpose.
    labels = jnp.take_along_axis(logits, batch["labels"][:, :-1, None], axis=-1)[..., 0]
    return -picked.mean() + jnp.where(batch["labels"][:, :-1] < 0, 0, labels).mean()


def lookup_batch():
    return {
        "tokens": np.full((64, 9), 63, "int32"),
        "kinds": np.full((64, 9), 2, "int32"),
        "labels": np.full((64, 9), -100, "int32"),
    }


def fit_lookups(samples, accumulate=1, as_data=True):
    recipe = sw.Recipe(
        model=Embedding,
        loss=lookup_loss,
        optimizer=optax.sgd(0.1),
        batch={name: rows(16, 9) for name in samples},
        accumulate=accumulate,
    )
    layout = sw.layout(Embedding, sw.mesh("data=2", on="cpu:2"), "dp")
    given = [{name: x[i : i + 16] for name, x in samples.items()} for i in range(0, 64, 16)]
    data = sw.data(samples) if as_data else given
    return sw.fit(recipe, layout, data, steps=4, show=False)


def test_integers_within_bounds_train():
    assert int(fit_lookups(lookup_batch()).step) == 4


@pytest.mark.parametrize(
    ("leaf", "place", "value", "size"),
    [
        ("tokens", (20, 3), 64, 64),
        ("tokens", (20, 8), 2**20, 64),  # only a target
        ("tokens", (20, 0), -1, 64),
        ("kinds", (20, 0), 3, 3),
    ],
    ids=["token", "target", "negative", "kind"],
)
@pytest.mark.parametrize("as_data", [True, False], ids=["data", "batches"])
def test_integers_out_of_bounds_are_refused(leaf, place, value, size, as_data):
    samples = lookup_batch()
    samples[leaf][place] = value
    with pytest.raises(ValueError) as caught:
        fit_lookups(samples, as_data=as_data)
    sample = 20 if as_data else 4  # in the data, or in the batch
    assert str(caught.value).startswith(
        f"batch['{leaf}'] has {value} in sample {sample}, but the weight that it looks up has "
        f"{size} rows: "
    )


def test_integers_that_index_no_weight_are_not_bounded():
    samples = lookup_batch()
    samples["kinds"][:, 8] = 1000  # cut off by the loss
    fit_lookups(samples)


def test_tokens_outside_the_vocabulary_of_the_shipped_decoder_are_refused():
    from shardwise.examples import text

    layout = sw.layout(text.make, sw.mesh("data=2", on="cpu:2"), "dp")
    tokens = np.zeros(64 * 64, "int32")
    tokens[70] = 300
    with pytest.raises(ValueError, match=r"batch has 300 in sample 1, .* has 256 rows"):
        sw.fit(text.recipe, layout, sw.data(tokens, length=64), steps=1, show=False)
