"""Copies of the state in the memory of two hosts, from which a smaller run goes on."""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import shutil
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._base import show_bytes
from .._check import LayoutError
from .._checkpoint import array_rows, flight_check, in_memory, on_disk
from .._mesh import show_mesh
from .._place import own_mesh
from .._processes import exchange, pid_space, post, posted
from .._step import Blueprint, TrainState, named_arrays, show_array
from .bundles import Bundle, box_of, bundles_of
from .wire import Peer, Server, new_secret, own_address

_FOOTER = 8
# A copy is complete only once all processes have written it: until then the one before it is kept,
# and, while a process is late, the one before that.
_KEPT = 3


class DamagedCopy(Exception):
    """A copy in memory cannot be used."""


@dataclass(frozen=True)
class Found:
    """A complete copy: its step, and for each of its bundles a process that has it, with its size."""

    step: int
    round: int
    places: Mapping[str, tuple[int, int]]


class Copies:
    """Copies of a run's state in memory; all processes make and use them together.

    Attributes:
        incomplete: the newest step of which a part is lost, as `newest` has found.

    Args:
        blueprint: what is run.
        folder: where this host keeps copies; it outlives the processes.
        run: what is run, such as the directory of its checkpoints.
        coordinator: the address of process 0.
        warn: prints a line.
    """

    def __init__(
        self,
        blueprint: Blueprint,
        folder: Path,
        *,
        run: str,
        coordinator: str | None,
        warn: Callable[[str], None],
    ) -> None:
        self.folder, self._warn = folder, warn
        self.me = jax.process_index()
        self._run = hashlib.sha256(run.encode()).hexdigest()[:12]
        self._blueprint = blueprint
        self._secret = exchange("sharing a secret", new_secret())[0]
        self._server = Server(folder, own_address(coordinator), self._secret)
        # Copies of the same step by other processes are other copies.
        before = max((round for _, _, round, _ in self._files()), default=-1)
        mine = json.dumps([[pid_space(), str(folder)], self._server.address, before])
        rows = [json.loads(row) for row in exchange("finding the hosts", mine)]
        self.round = 1 + max(before for _, _, before in rows)
        self._addresses = [(address[0], address[1]) for _, address, _ in rows]
        hosts = [tuple(host) for host, _, _ in rows]
        self.bundles = bundles_of(named_arrays(on_disk(blueprint.abstract)), hosts)
        self._writing: threading.Thread | None = None
        self._peers: dict[int, Peer] = {}
        self._failed: Exception | None = None
        self.incomplete: int | None = None

    @property
    def bytes_here(self) -> int:
        """What one copy takes in the memory of this process's host, for this process (exact)."""
        mine = (b for b in self.bundles if self.me in (b.owner, b.second))
        return sum(piece.size for bundle in mine for piece in bundle.pieces)

    @property
    def survives_a_host(self) -> bool:
        """Whether every shard is kept by two hosts."""
        return all(bundle.second is not None for bundle in self.bundles)

    def room_missing(self) -> str:
        """Returns what is wrong if the host's memory does not hold the copies, else nothing."""
        needed, free = _KEPT * self.bytes_here, shutil.disk_usage(self.folder).free
        if needed <= free:
            return ""
        return (
            f"process {self.me} needs {show_bytes(needed)} in {self.folder} for {_KEPT} copies of its "
            f"part of the state, and {show_bytes(free)} are free"
        )

    def take(self, step: int, state: TrainState, position: int) -> None:
        """Copies the state to this host's memory, and then, in the background, to another host."""
        self.wait()
        if self._failed is not None:
            return
        arrays = named_arrays(on_disk(state))
        about = {
            "step": step,
            "position": int(position),
            "mesh": show_mesh(self._blueprint.layout.mesh),
            "arrays": array_rows(state),
            "bundles": [bundle.name for bundle in self.bundles],
        }
        mine = [b for b in self.bundles if b.owner == self.me or self._holds(b)]
        try:
            shards = _host_shards(arrays, mine)
            files = [(bundle, self._begun(bundle, step, shards)) for bundle in mine]
        except OSError as error:
            return self._fail(error)
        self._writing = threading.Thread(target=self._finish, args=(step, files, about))
        self._writing.start()

    def wait(self) -> None:
        """Waits until the current copy is complete here and where it is sent to."""
        if self._writing is not None:
            self._writing.join()
            self._writing = None

    def close(self) -> None:
        """Waits for the current copy, and ends what serves others."""
        self.wait()
        self._server.close()
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()

    def _holds(self, bundle: Bundle) -> bool:
        return bundle.second == self.me and not bundle.sent

    def _path(self, step: int, bundle: Bundle) -> Path:
        return self.folder / f"{self._run}.{step}.{self.round}.{bundle.name}"

    def _begun(self, bundle: Bundle, step: int, shards: Mapping[Any, np.ndarray]) -> Path:
        """Writes the values of a bundle, and returns the file, which is not complete yet."""
        part = self._path(step, bundle).with_name(f".{self._path(step, bundle).name}")
        size = sum(piece.size for piece in bundle.pieces)
        with part.open("w+b") as file:
            _reserve(file.fileno(), size)
            with mmap.mmap(file.fileno(), size) as memory:
                whole, at = np.frombuffer(memory, "uint8"), 0
                for piece in bundle.pieces:
                    values = shards[piece.name, piece.box]
                    whole[at : at + piece.size] = _as_bytes(values)
                    at += piece.size
                del whole
        return part

    def _finish(self, step: int, files: list[tuple[Bundle, Path]], about: dict[str, Any]) -> None:
        try:
            for bundle, part in files:
                _complete(part, bundle, about)
                path = self._path(step, bundle)
                part.replace(path)
                if bundle.sent and bundle.second is not None and bundle.owner == self.me:
                    self._peer(bundle.second).put(path)
            post("copies", str(step))
            self._prune()
        except Exception as error:  # a process may be lost: then the whole run will know
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._failed = error
        text = f"{type(error).__name__}: {error}"
        self._warn(f"process {self.me} makes no more copies in memory: {text}")

    def _peer(self, process: int) -> Peer:
        if process not in self._peers:
            self._peers[process] = Peer(self._addresses[process], self._secret)
        return self._peers[process]

    def _prune(self) -> None:
        """Removes the copies from before the newest that all processes have completed."""
        steps = posted("copies")
        if len(steps) < len(self._addresses):
            return
        oldest = min(map(int, steps.values()))
        for path, step, round, _ in self._files():
            if step < oldest or (step == oldest and round < self.round):
                path.unlink(missing_ok=True)

    def _files(self) -> Iterator[tuple[Path, int, int, str]]:
        for path in self.folder.glob(f"{self._run}.*"):
            _, step, round, name = path.name.split(".")
            yield path, int(step), int(round), name

    def newest(self) -> Found | None:
        """Returns the newest complete copy, or None; the same on all processes."""
        mine: dict[str, Any] = {}
        for path, step, round, name in self._files():
            with contextlib.suppress(OSError, ValueError, KeyError):
                entry = mine.setdefault(f"{step}.{round}", {"have": {}, "needed": None})
                entry["have"][name] = path.stat().st_size
                if entry["needed"] is None:
                    entry["needed"] = _Local(path).header()["bundles"]
        found: dict[tuple[int, int], Any] = {}
        rows = exchange("looking for copies in memory", json.dumps(mine))
        for process, row in enumerate(map(json.loads, rows)):
            for key, entry in row.items():
                step, round = map(int, key.split("."))
                places, needed = found.setdefault((step, round), ({}, set()))
                needed.update(entry["needed"] or [None])
                for name, size in entry["have"].items():
                    if name not in places or process == self.me:
                        places[name] = (process, size)
        for (step, round), (places, needed) in sorted(found.items(), reverse=True):
            if needed and needed <= places.keys():
                return Found(step, round, places)
            self.incomplete = self.incomplete or step
        return None

    def restore(self, found: Found) -> tuple[TrainState, int]:
        """Returns the state of a copy in this run's shards, and the position in the data.

        Raises:
            DamagedCopy: a part of it is missing or damaged.
            LayoutError: it is of another recipe.
        """
        blueprint = self._blueprint
        stored = on_disk(blueprint.abstract)
        try:
            sources = [self._source(found, name) for name in found.places]
            headers = [source.header() for source in sources]
            about = headers[0]
            flight_check(blueprint, about).findings.raise_if_errors()
            pieces: dict[str, list[_Stored]] = {}
            for source, header in zip(sources, headers, strict=True):
                for name, box, offset, size, crc in header["pieces"]:
                    corners = tuple((start, stop) for start, stop in box)
                    pieces.setdefault(name, []).append(_Stored(source, corners, offset, size, crc))
            with own_mesh(blueprint.layout.mesh):
                arrays = {
                    name: _read(name, x, pieces.get(name, []))
                    for name, x in named_arrays(stored).items()
                }
                parts = (
                    {path: arrays[f"{part}.{path}"] for path in getattr(stored, part)}
                    for part in ("model", "optimizer", "ema")
                )
                state = TrainState(arrays["step"], *parts)
                return in_memory(state, blueprint), about["position"]
        except LayoutError:
            raise
        except (OSError, EOFError, KeyError, ValueError) as error:
            raise DamagedCopy(f"{type(error).__name__}: {error}") from error

    def _source(self, found: Found, name: str) -> _Local | _Remote:
        process, size = found.places[name]
        file = f"{self._run}.{found.step}.{found.round}.{name}"
        if process == self.me:
            return _Local(self.folder / file)
        return _Remote(self._peer(process), file, size)


class _Local:
    """A file of a copy on this host."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.size = path.stat().st_size

    def part(self, offset: int, size: int) -> bytes:
        with self._path.open("rb") as file:
            file.seek(offset)
            return file.read(size)

    def header(self) -> Any:
        return _header(self.part, self.size)


class _Remote:
    """A file of a copy on the host of another process."""

    def __init__(self, peer: Peer, name: str, size: int) -> None:
        self._peer, self._name, self.size = peer, name, size

    def part(self, offset: int, size: int) -> bytes:
        return self._peer.get(self._name, offset, size)

    def header(self) -> Any:
        return _header(self.part, self.size)


@dataclass(frozen=True)
class _Stored:
    """A piece of an array in a file."""

    source: _Local | _Remote
    box: tuple[tuple[int, int], ...]
    offset: int
    size: int
    crc: int

    def values(self, name: str, dtype: Any) -> np.ndarray:
        data = self.source.part(self.offset, self.size)
        if zlib.crc32(data) != self.crc:
            raise DamagedCopy(f"the values of {show_array(name)} are not those that were copied")
        shape = [stop - start for start, stop in self.box]
        return np.frombuffer(data, "uint8").view(dtype).reshape(shape)


def _header(part: Callable[[int, int], bytes], size: int) -> Any:
    length = int.from_bytes(part(size - _FOOTER, _FOOTER), "little")
    return json.loads(part(size - _FOOTER - length, length))


def _complete(part: Path, bundle: Bundle, about: dict[str, Any]) -> None:
    """Adds where each piece is, and its checksum."""
    rows, at = [], 0
    with part.open("r+b") as file:
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory:
            with memoryview(memory) as view:
                for piece in bundle.pieces:
                    crc = zlib.crc32(view[at : at + piece.size])
                    rows.append([piece.name, piece.box, at, piece.size, crc])
                    at += piece.size
        header = json.dumps({**about, "pieces": rows}).encode()
        file.seek(0, os.SEEK_END)
        file.write(header + len(header).to_bytes(_FOOTER, "little"))


def _reserve(file: int, size: int) -> None:
    """Makes a file this large: where memory is full, that is an error here, and not later."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, size)
    else:
        os.truncate(file, size)


def _host_shards(
    arrays: Mapping[str, jax.Array], bundles: list[Bundle]
) -> dict[tuple[str, Any], np.ndarray]:
    """Returns the shards of these bundles in host memory; all transfers run at once."""
    wanted = {(piece.name, piece.box) for bundle in bundles for piece in bundle.pieces}
    found = {}
    for name in {name for name, _ in wanted}:
        for shard in arrays[name].addressable_shards:
            key = name, box_of(shard.index, arrays[name].shape)
            if key in wanted and key not in found:
                shard.data.copy_to_host_async()
                found[key] = shard.data
    return {key: np.asarray(data) for key, data in found.items()}


def _as_bytes(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values).reshape(-1).view("uint8")


def _read(name: str, x: Any, pieces: list[_Stored]) -> jax.Array:
    """Returns an array in the shards of `x`, from the pieces of a copy."""
    dtype = jnp.dtype(x.dtype)

    def region(index: Any) -> np.ndarray:
        box = box_of(index, x.shape)
        out = np.empty([stop - start for start, stop in box], dtype)
        filled = 0
        for piece in pieces:
            common = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, piece.box, strict=True)]
            if any(start >= stop for start, stop in common):
                continue
            to = tuple(slice(a - o, b - o) for (a, b), (o, _) in zip(common, box, strict=True))
            of = tuple(
                slice(a - o, b - o) for (a, b), (o, _) in zip(common, piece.box, strict=True)
            )
            out[to] = piece.values(name, dtype)[of]
            filled += out[to].size
        if filled != out.size:
            raise DamagedCopy(f"{filled} of {out.size} values of {show_array(name)} are there")
        return out

    return jax.make_array_from_callback(x.shape, x.sharding, region)
