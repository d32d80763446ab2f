"""The digest of an array: the same on every mesh, different after any change."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardwise as sw
from shardwise._checkpoint import digest as digest_v2
from shardwise._checkpoint import digest_v1

DTYPES = (
    *("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"),
    *("int4", "uint4", "int8", "int16", "int32", "uint8", "uint16", "uint32", "bool", "complex64"),
)
MESHES = {"data=1": 1, "data=8": 8, "data=2,model=4": 8, "a=2,b=2,c=2": 8, "data=3": 3}


def put(array, axes="data=1", spec=None):
    spec = P() if spec is None else spec
    # From the host: to cut an array that is on a device, JAX compiles a program for each shape.
    return jax.device_put(
        np.asarray(array), NamedSharding(sw.mesh(axes, on=f"cpu:{MESHES[axes]}"), spec)
    )


def values(arrays):
    found = digest_v2.digests({str(i): x for i, x in enumerate(arrays)})()
    return [found[str(i)].value for i in range(len(arrays))]


def digest(array):
    return values([put(array)])[0]


def noise(shape, dtype="float32", seed=0):
    # By NumPy: for JAX, each operation on each shape and dtype is a program to compile.
    drawn = np.clip(2 * np.random.default_rng(seed).normal(size=shape), -6, 6).astype("float32")
    drawn = drawn > 0 if dtype == "bool" else drawn
    drawn = np.abs(drawn) if dtype.startswith("u") else drawn
    drawn = drawn + 1j * drawn[::-1] if dtype == "complex64" else drawn
    return jnp.asarray(drawn.astype(jnp.dtype(dtype)))


BOTH = pytest.mark.parametrize("shape", [(12, 10), (96, 60)], ids=["small", "large"])


def test_the_cipher_is_threefry():
    """Compared with the known answers of the Random123 library, and with JAX's own."""
    # From kat_vectors: threefry2x32, 20 rounds.
    known = [
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF,) * 2, (0xFFFFFFFF,) * 2, (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ]
    for key, block, want in known:
        got = digest_v2._threefry(tuple(map(np.uint32, key)), tuple(map(jnp.uint32, block)))
        assert tuple(map(int, got)) == want


# Each leaves the sum of format 1, or another sum that is linear or ignores positions, unchanged.
CHANGES = {
    "two signs flipped": lambda x: x.at[0, 0].multiply(-1).at[5, 7].multiply(-1),
    "four signs flipped": lambda x: x.at[2:4, 1:3].multiply(-1),
    "negated": lambda x: -x,
    "rows reversed": lambda x: x[::-1],
    "rows rolled": lambda x: jnp.roll(x, 1, axis=0),
    "columns rolled": lambda x: jnp.roll(x, 1, axis=1),
    "two elements swapped": lambda x: x.at[0, 0].set(x[3, 4]).at[3, 4].set(x[0, 0]),
    "two neighbours swapped": lambda x: x.at[0, 0].set(x[0, 1]).at[0, 1].set(x[0, 0]),
    "one added and taken away": lambda x: x.at[0, 0].add(1).at[0, 1].add(-1),
    "a block of zeros": lambda x: x.at[:4, :4].set(0),
    "another block of zeros": lambda x: x.at[4:8, :4].set(0),
    "all zeros": jnp.zeros_like,
    "negative zeros": lambda x: -jnp.zeros_like(x),
    "ones": jnp.ones_like,
}


@BOTH
def test_crafted_changes_all_have_another_digest(shape):
    x = noise(shape)
    variants = {"as it was": x, **{name: change(x) for name, change in CHANGES.items()}}
    found = values([put(v) for v in variants.values()])
    assert len(set(found)) == len(variants), dict(zip(variants, found, strict=True))


def test_the_old_sum_saw_none_of_these():
    """Why format 1 was replaced: it remains only to read old checkpoints."""
    x = noise((96, 64))
    old = [digest_v1.sums({"x": put(v)})["x"] for v in (x, -x, CHANGES["two signs flipped"](x))]
    assert old[0] == old[1] == old[2]
    square = noise((64, 64))
    assert digest_v1.sums({"x": put(square)}) == digest_v1.sums({"x": put(square.T)})
    assert digest(square) != digest(square.T)


@BOTH
def test_shape_and_dtype_belong_to_the_digest(shape):
    x = noise(shape)
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    others = [x, bits, bits.astype(jnp.uint32), x.T, x.reshape(-1), x[None], x[:, None, :]]
    zeros = [jnp.zeros(shape, dtype) for dtype in ("float32", "int32", "uint32", "bfloat16")]
    found = values([put(other) for other in (*others, *zeros)])
    assert len(set(found)) == len(found)


PLACES = (("data=1", None), ("data=8", P("data")), ("data=2,model=4", P("model", "data")))


@pytest.fixture(scope="module")
def small():
    """The digests of a small array of each dtype in each place; those of a place are one program."""
    arrays = [noise((8, 24), dtype) for dtype in DTYPES]
    found = [values([put(x, *place) for x in arrays]) for place in PLACES]
    return {dtype: {each[i] for each in found} for i, dtype in enumerate(DTYPES)}


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_and_every_bit_of_it(dtype, small):
    large = noise((8, 5200), dtype)
    assert values([put(large)]) == values([put(large, *PLACES[-1])])
    x = noise((8, 24), dtype)
    assert len(small[dtype]) == 1
    bits = {"bool": 1, "int4": 4, "uint4": 4, "float4_e2m1fn": 4}.get(dtype, 0)
    x = np.asarray(x)
    raw = x.view({1: "u1", 2: "u2", 4: "u4", 8: "u8"}[x.dtype.itemsize])
    flipped = []
    for bit in range(bits or 8 * x.dtype.itemsize):
        changed = raw.copy()
        changed[2, 3] ^= np.array(1 << bit, raw.dtype)
        flipped.append(changed.view(x.dtype))
    found = values([put(v) for v in (x, x[::-1], *flipped)])
    assert len(set(found)) == len(found)
    assert found[0] in small[dtype]


def test_words_of_eight_bytes():
    with jax.enable_x64(True):
        x = put(jnp.asarray(np.random.default_rng(0).normal(size=(8, 4))))
        assert x.dtype == "float64"
        y = put(x * (1 + 2**-50))  # changes only the low word
        first, second = values([x, y])
        assert first != second
        assert values([put(x, "data=8", P("data"))]) == [first]


SHAPES = st.sampled_from(
    [(), (24,), (48, 24), (24, 24, 2), (2, 24, 24, 24), (1, 24, 1), (5000,), (24, 4800), (0, 24)]
)


@st.composite
def placements(draw, rank):
    axes = draw(st.sampled_from(list(MESHES)))
    names = draw(st.permutations([part.split("=")[0] for part in axes.split(",")]))
    entries = [[] for _ in range(rank)]
    for name in names:
        dim = draw(st.integers(0, rank))
        if dim < rank:
            entries[dim].append(name)
    return axes, P(*(tuple(entry) or None for entry in entries))


@settings(max_examples=12, deadline=None)
@given(data=st.data(), shape=SHAPES, dtype=st.sampled_from(["float32", "bfloat16", "int8"]))
def test_no_mesh_and_no_spec_changes_it(data, shape, dtype):
    x = noise(shape, dtype)
    want = values([put(x)])
    axes, spec = data.draw(placements(len(shape)))
    sharding = NamedSharding(sw.mesh(axes, on=f"cpu:{MESHES[axes]}"), spec)
    try:
        sharding.shard_shape(shape)
    except ValueError:
        return  # not divisible
    assert values([put(x, axes, spec)]) == want
    # Nor do the other arrays, which determine how they are grouped into programs.
    beside = [put(noise((48, 96), seed=i), axes) for i in range(3)]
    assert values([*beside, put(x, axes, spec), *beside])[3:4] == want


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_few_changed_words_change_it(data):
    x = np.asarray(noise((16, 16))).view(np.uint32).copy()
    before = digest(jnp.asarray(x))
    places = data.draw(st.lists(st.integers(0, 255), min_size=1, max_size=6, unique=True))
    for place in places:
        x.reshape(-1)[place] ^= data.draw(st.integers(1, 2**32 - 1))
    assert digest(jnp.asarray(x)) != before


def test_the_digest_reports_whether_values_are_finite():
    arrays = {
        "small": noise((4, 4)),
        "small nan": noise((4, 4)).at[1, 1].set(jnp.nan),
        "large": noise((96, 96)),
        "large inf": noise((96, 96)).at[50, 1].set(-jnp.inf),
        "integers": jnp.arange(5),
        "complex": jax.lax.complex(noise((4,)), noise((4,)).at[0].set(jnp.inf)),
    }
    placed = {name: put(x, "data=8") for name, x in arrays.items()}
    found = {name: digest.finite for name, digest in digest_v2.digests(placed)().items()}
    assert [name for name, finite in found.items() if not finite] == [
        *("small nan", "large inf", "complex")
    ]


def test_many_arrays_are_few_programs():
    arrays = {str(i): put(noise((96, 96), seed=i), "data=2,model=4", P("data")) for i in range(30)}
    arrays |= {f"small{i}": put(noise((4, i + 1)), "data=2,model=4") for i in range(20)}
    digest_v2._parts_on.cache_clear()
    found = digest_v2.digests(arrays)()
    assert len({d.value for d in found.values()}) == len(arrays)
    assert digest_v2._parts_on.cache_info().currsize <= 3
    assert found["7"].value == digest(noise((96, 96), seed=7))
