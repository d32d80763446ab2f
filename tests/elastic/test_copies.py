"""Copies in memory: each shard on two hosts, restored on any mesh bit for bit, or not at all."""

import collections
import dataclasses
import os
from multiprocessing import AuthenticationError
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import shardwise as sw
from shardwise._elastic import Copies, DamagedCopy
from shardwise._elastic.bundles import box_of, bundles_of, neighbour
from shardwise._elastic.wire import Peer, Server, new_secret, own_address
from shardwise._step import make_blueprint


class Net(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0, dropout=1)
        self.up = nnx.Linear(12, 48, rngs=rngs, param_dtype="bfloat16")
        self.norm = nnx.BatchNorm(48, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.empty = nnx.Param(jnp.zeros((0, 4)))
        self.few = nnx.Variable(jnp.arange(4, dtype="int4"))

    def __call__(self, x):
        return self.drop(self.norm(self.up(x)))


RECIPE = sw.Recipe(
    model=Net,
    loss=lambda model, x: (model(x) ** 2).mean().astype("float32"),
    optimizer=optax.adam(0.1),
    batch=jax.ShapeDtypeStruct((24, 12), "float32"),
    ema=0.9,
)


def blueprint_on(axes, count):
    rules = [sw.tensor("model")] if "model" in axes else []
    mesh = sw.mesh(axes, on=f"cpu:{count}")
    return make_blueprint(RECIPE, sw.layout(Net, mesh, [*rules, sw.fsdp("data", min_bytes=0)]))


def copies_on(blueprint, folder):
    said = []
    copies = Copies(blueprint, folder, run="a", coordinator=None, warn=said.append)
    copies.said = said
    return copies


def state_on(blueprint):
    return sw.train_state(RECIPE, blueprint.layout)


def values(state):
    def one(x):
        raw = jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        return np.asarray(raw).tobytes()

    return jax.tree.map(one, state)


@pytest.fixture
def taken(tmp_path):
    """A copy of a state on four devices."""
    blueprint = blueprint_on("data=4", 4)
    copies, state = copies_on(blueprint, tmp_path), state_on(blueprint)
    copies.take(8, state, 192)
    copies.wait()
    assert not copies.said
    yield copies, state
    copies.close()


@pytest.mark.parametrize("axes, count", [("data=3", 3), ("data=2,model=2", 4), ("data=1", 1)])
def test_restored_bit_for_bit_on_another_mesh(taken, axes, count, tmp_path):
    copies, state = taken
    smaller = copies_on(blueprint_on(axes, count), tmp_path)
    found = smaller.newest()
    assert found.step == 8
    restored, position = smaller.restore(found)
    assert position == 192
    assert values(restored) == values(state)
    assert restored.model["up.kernel"].sharding.mesh.size == count
    smaller.close()


def test_the_copy_before_is_kept_until_the_next_is_complete(taken, tmp_path):
    copies, state = taken
    for step in (12, 16, 20):
        copies.take(step, state, 0)
    copies.wait()
    assert {path.name.split(".")[1] for path in tmp_path.iterdir()} == {"20"}
    assert copies.newest().step == 20
    assert copies.bytes_here == sum(piece.size for b in copies.bundles for piece in b.pieces)
    assert copies.room_missing() == ""


def test_a_changed_byte_is_noticed(taken, tmp_path):
    copies, _ = taken
    found = copies.newest()
    (path,) = tmp_path.glob("*.8.0.0")
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedCopy, match="are not those that were copied"):
        copies.restore(found)
    path.write_bytes(data[:200])
    assert copies.newest() is None  # no header: it does not count
    path.unlink()
    with pytest.raises(DamagedCopy):
        copies.restore(found)


def test_a_full_memory_stops_the_copies_and_not_the_run(taken, monkeypatch):
    copies, state = taken

    def full(*given):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    copies.take(12, state, 0)
    assert copies.said == [
        "process 0 makes no more copies in memory: OSError: [Errno 28] No space left on device"
    ]
    assert copies.newest().step == 8


# --- who keeps what -------------------------------------------------------------------------------


def spread(blueprint, processes):
    """The arrays of a state as if their devices were of several processes."""
    from shardwise._checkpoint import on_disk
    from shardwise._step import named_arrays

    @dataclasses.dataclass(eq=False)  # devices are keys
    class Device:
        process_index: int

    def one(x):
        indices = {
            Device(device.id * processes // blueprint.layout.mesh.size): index
            for device, index in x.sharding.devices_indices_map(x.shape).items()
        }
        sharding = SimpleNamespace(devices_indices_map=lambda shape: indices)
        return SimpleNamespace(shape=x.shape, dtype=x.dtype, size=x.size, sharding=sharding)

    return {name: one(x) for name, x in named_arrays(on_disk(blueprint.abstract)).items()}


@pytest.mark.parametrize("hosts", [(0, 1, 2, 3), (0, 0, 1, 1), (0, 1, 0, 1)], ids=str)
@pytest.mark.parametrize("axes", ["data=4", "data=2,model=2", "data=8", "data=4,model=2"])
def test_after_any_single_loss_everything_is_there(axes, hosts):
    count = int(np.prod([int(part.split("=")[1]) for part in axes.split(",")]))
    arrays = spread(blueprint_on(axes, count), 4)
    bundles = bundles_of(arrays, hosts)
    held = collections.defaultdict(set)
    for name, x in arrays.items():
        for device, index in x.sharding.devices_indices_map(x.shape).items() if x.size else ():
            held[name, box_of(index, x.shape)].add(device.process_index)
    for lost in set(hosts):
        left = {
            (piece.name, piece.box)
            for b in bundles
            for piece in b.pieces
            if hosts[b.owner] != lost or hosts[b.second] != lost
        }
        assert left == held.keys()
    for b in bundles:
        for piece in b.pieces:
            holders = held[piece.name, piece.box]
            assert b.owner in holders
            # What another host holds is not sent to it.
            assert b.sent == (len({hosts[p] for p in holders}) == 1)
            assert b.sent or b.second in holders


def test_the_neighbour_is_on_another_host():
    assert [neighbour(i, (0, 0, 1, 1)) for i in range(4)] == [2, 2, 0, 0]
    assert neighbour(0, (0, 0)) is None


# --- between hosts --------------------------------------------------------------------------------


@pytest.fixture
def server(tmp_path):
    folder = tmp_path / "theirs"
    folder.mkdir()
    server = Server(folder, own_address("127.0.0.1:1"), new_secret())
    yield server
    server.close()


def test_a_file_is_kept_and_given_back_in_parts(server, tmp_path):
    path = tmp_path / "aa.1.0.0to1"
    path.write_bytes(bytes(range(256)) * 1000)
    peer = Peer(server.address, server._secret.decode())
    peer.put(path)
    assert (server.folder / path.name).read_bytes() == path.read_bytes()
    assert peer.get(path.name, 255, 3) == bytes([255, 0, 1])
    peer.close()


def test_strangers_and_strange_names_are_refused(server, tmp_path):
    with pytest.raises(AuthenticationError):
        Peer(server.address, new_secret())
    outside = tmp_path / "secret"
    outside.write_text("secret")
    peer = Peer(server.address, server._secret.decode())
    with pytest.raises((EOFError, OSError)):
        peer.get("../secret", 0, 6)
    again = Peer(server.address, server._secret.decode())  # it still serves
    again.close()
