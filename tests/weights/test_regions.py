"""The algebra of regions against NumPy, which does the same to whole arrays."""

import itertools
import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise._weights import copies, reading
from shardwise._weights.files import File, Tensor
from shardwise._weights.reading import Reader, Source, empty_shards, reads_halves, wanted_bytes
from shardwise._weights.regions import CannotView, join_boxes, meet, place, view_of, volume

SIZES = st.sampled_from([1, 2, 3, 4, 6, 8])


def factorings(total):
    """Returns shapes of up to three dims with this many elements."""
    parts = [n for n in range(1, total + 1) if total % n == 0]
    return [(a, b, total // a // b) for a in parts for b in parts if total // a % b == 0] + [
        (a, total // a) for a in parts
    ]


@st.composite
def chains(draw):
    """Draws a shape, and steps that NumPy and a view both take."""
    shape = tuple(draw(st.lists(SIZES, min_size=1, max_size=4)))
    steps, now = [], shape
    for kind in draw(st.lists(st.sampled_from(["permute", "reshape", "split"]), max_size=4)):
        if kind == "permute":
            order = tuple(draw(st.permutations(range(len(now)))))
            steps.append(("permute", (order,)))
            now = tuple(now[d] for d in order)
        elif kind == "reshape" and math.prod(now) > 0:
            now = draw(st.sampled_from(factorings(math.prod(now))))
            steps.append(("reshape", (now,)))
        elif kind == "split":
            dim = draw(st.integers(0, len(now) - 1))
            start = draw(st.integers(0, now[dim]))
            stop = draw(st.integers(start, now[dim]))
            steps.append(("split", (dim, start, stop)))
            now = (*now[:dim], stop - start, *now[dim + 1 :])
    return shape, steps


def by_numpy(array, steps):
    for kind, args in steps:
        if kind == "permute":
            array = array.transpose(*args)
        elif kind == "reshape":
            array = array.reshape(*args)
        else:
            dim, start, stop = args
            array = array[(slice(None),) * dim + (slice(start, stop),)]
    return array


def by_view(shape, steps):
    view = view_of(shape)
    for kind, args in steps:
        view = getattr(view, kind)(*args)
    return view


def stored(tmp_path, array, name="BF16"):
    """Returns a tensor in a file whose data begins at an odd byte."""
    path = tmp_path / "data"
    path.write_bytes(b"\x01" * 13 + array.tobytes())
    about = path.stat()
    file = File(str(path), about.st_size, (about.st_mtime_ns, about.st_ino))
    return Tensor("t", name, array.shape, file, 13, array.nbytes)


def grid(shape, ways):
    """Returns the boxes of an array that is split as evenly as it goes."""
    cuts = [
        [(size * i // n, size * (i + 1) // n) for i in range(n)]
        for size, n in zip(shape, ways, strict=True)
    ]
    return [box for box in itertools.product(*cuts) if volume(box)]


def filled(tensor, piece, boxes, dtype):
    """Reads shards, and returns them with the bytes that were read."""
    sources = [Source(tensor, piece)]
    zeros = reads_halves(sources, np.dtype(dtype))
    shards = empty_shards(boxes, np.dtype(dtype), zeros=zeros)
    with Reader(2) as reader:
        read = [f.result() for f in list(reader.fill(sources, shards))]
    return shards, sum(read)


@settings(deadline=None, max_examples=150)
@given(
    chains(),
    st.lists(st.integers(1, 3), min_size=4, max_size=4),
    st.sampled_from([2, 10, 64, 2**20]),
    st.sampled_from([0, 4, 4096]),
    st.sampled_from([1, 2**14]),
    st.sampled_from([1, 2**14]),
    st.sets(st.integers(0, 80)),
)
def test_shards_have_what_numpy_slices(
    tmp_path_factory, chain, ways, block, gap, direct, turned, absent
):
    shape, steps = chain
    array = np.arange(math.prod(shape), dtype=np.uint16).reshape(shape)
    try:
        view = by_view(shape, steps)
    except CannotView:
        # Only where NumPy has to copy: a reshape of dims that are apart in memory.
        copied = by_numpy(array, steps)
        assert not np.shares_memory(copied, array) or any(kind == "split" for kind, _ in steps)
        return
    wanted = by_numpy(array, steps)
    assert view.shape == wanted.shape
    tensor = stored(tmp_path_factory.mktemp("regions"), array)
    piece = place(view, wanted.shape, (), ())
    boxes = grid(wanted.shape, ways[: wanted.ndim])
    boxes = [box for n, box in enumerate(boxes) if n not in absent]  # of other processes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "BLOCK_BYTES", block)
        patch.setattr(reading, "MOST_BLOCK_BYTES", block)
        patch.setattr(reading, "GAP_BYTES", gap)
        patch.setattr(copies, "_DIRECT_BYTES", direct)
        patch.setattr(copies, "_TURNED", turned)
        shards, read = filled(tensor, piece, boxes, ml_dtypes.bfloat16)
        assert read == wanted_bytes([Source(tensor, piece)], boxes, np.dtype(ml_dtypes.bfloat16))
    for shard in shards:
        index = tuple(slice(*pair) for pair in shard.box)
        np.testing.assert_array_equal(shard.array.view(np.uint16), wanted[index])
    if gap == 0:
        assert read == 2 * sum(volume(box) for box in boxes)


@pytest.mark.parametrize(
    "stored_as, name, wanted",
    [
        ("bfloat16", "BF16", "float32"),
        ("float32", "F32", "bfloat16"),
        ("float16", "F16", "float32"),
        ("float32", "F32", "float16"),
        ("float8_e4m3fn", "F8_E4M3", "bfloat16"),
        ("int64", "I64", "int32"),
        ("float64", "F64", "float32"),
    ],
)
def test_casts_are_those_of_numpy(tmp_path, monkeypatch, stored_as, name, wanted):
    monkeypatch.setattr(copies, "_TURNED", 1)  # by XLA, whose integers have 32 bits at most
    values = np.random.default_rng(0).normal(size=(24, 40)) * 50
    array = values.astype(np.dtype(stored_as))
    tensor = stored(tmp_path, array, name)
    piece = place(view_of(array.shape).permute((1, 0)), (40, 24), (), ())
    shards, _ = filled(tensor, piece, grid((40, 24), (2, 3)), wanted)
    for shard in shards:
        index = tuple(slice(*pair) for pair in shard.box)
        expected = array.T[index].astype(np.dtype(wanted))
        assert shard.array.tobytes() == expected.tobytes()


def test_a_piece_goes_to_its_index_of_a_stack(tmp_path):
    array = np.arange(24, dtype=np.uint16).reshape(4, 6)
    tensor = stored(tmp_path, array)
    piece = place(view_of((4, 6)).permute((1, 0)), (3, 6, 2, 4), (1,), (None, 0))
    shards, read = filled(tensor, piece, grid((3, 6, 2, 4), (1, 2, 1, 2)), "float32")
    whole = np.zeros((3, 6, 2, 4), np.float32)
    whole[1, :, 0] = array.view(ml_dtypes.bfloat16).T
    for shard in shards:
        index = tuple(slice(*pair) for pair in shard.box)
        np.testing.assert_array_equal(shard.array, whole[index])
    assert read == 48


def test_boxes_are_joined_where_they_make_up_a_larger_one():
    assert join_boxes(grid((8, 6), (4, 3))) == [((0, 8), (0, 6))]
    halves = [((0, 4), (0, 6)), ((4, 8), (0, 3))]
    assert join_boxes(halves) == halves
    assert meet(((0, 4), (2, 6)), ((2, 8), (0, 3))) == ((2, 4), (2, 3))
    assert meet(((0, 4),), ((4, 8),)) is None


@pytest.mark.parametrize(
    "make, text",
    [
        (lambda: view_of((4, 6)).permute((1, 0)).reshape((8, 3)), "mixes dims"),
        (lambda: view_of((4, 6)).reshape((5, 5)), "has not 24 elements"),
        (lambda: view_of((4, 6)).reshape((-1, 5)), "does not divide 24 elements"),
        (lambda: view_of((4, 6)).permute((2, 0, 1)), "is for 3 dims"),
        (lambda: view_of((4, 6)).split(0, 2, 5), r"is outside of \(4, 6\)"),
        (lambda: place(view_of((4, 6)), (4, 7), (), ()), r"it is \(4, 6\), where \(4, 7\)"),
        (lambda: place(view_of((4, 6)), (2, 4, 6), (2,), ()), "index 2 is outside of a dim of 2"),
    ],
)
def test_what_does_not_fit_is_refused(make, text):
    with pytest.raises(CannotView, match=text):
        make()
