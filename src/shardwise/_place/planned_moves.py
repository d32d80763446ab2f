"""The plan of a move from one layout to another: which bytes go from which device to which."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import Mesh

from .._base import count, either, public, show_bytes, text_table
from .._check import check, require_match
from .._layout import Layout, fold_paths, require_layout
from .._mesh import AnyMesh, normal_spec, show_mesh, show_spec
from .pieces import Boxes, Exchange, Place, exchange_of, place_of

# Temporary copies of a part of a leaf are at most this large, unless a limit asks for less.
_CHUNKS = tuple(2**size for size in (26, 24, 22, 20, 18, 16))
BETWEEN = "between the meshes"
_ROWS = 24


class TransferTooLarge(ValueError):
    """Raised when a move needs more memory than its limit."""


@public
@dataclasses.dataclass(frozen=True, slots=True)
class Move:
    """How one leaf moves from one layout to another.

    Attributes:
        path: the leaf's path.
        bytes: the bytes of the leaf.
        specs: its specs, before and after, as text.
        sent_bytes: the bytes that leave a device for another one, over all devices (exact).
        peak_bytes: what a device needs for this leaf while it moves, at most: the old shard, the
            new one, and copies of the parts that are under way (exact).
        steps: in how many steps its parts are sent; 0 if nothing is copied.
    """

    path: str
    bytes: int
    specs: tuple[str, str]
    sent_bytes: int
    peak_bytes: int
    steps: int


@public
@dataclasses.dataclass(frozen=True)
class Transfer:
    """The plan of a move between two layouts of one model. Returned by `sw.transfer`.

    Devices are named by their ids; on meshes without devices, by their positions in the mesh.

    Attributes:
        meshes: both meshes, as `data=2,model=4`.
        moves: the leaves in the order in which they are moved.
        by_axis: the bytes that are sent between devices that differ along these axes of the new
            mesh, over all devices (exact).
        by_pair: the bytes that one device sends to another (exact).
        before: bytes that the fullest device holds before the move (exact).
        after: bytes that the fullest device holds after it (exact).
        peak_bytes: the most bytes that any device holds while it goes (exact).
        chunk_bytes: the size up to which parts of a leaf are copied in one piece.
        limit: the limit that was asked for.
        keep: whether the old arrays stay.
    """

    meshes: tuple[str, str]
    moves: tuple[Move, ...]
    by_axis: dict[str, int]
    by_pair: dict[tuple[int, int], int]
    before: int
    after: int
    peak_bytes: int
    chunk_bytes: int
    limit: int | None = None
    keep: bool = False

    @property
    def sent_bytes(self) -> int:
        """The bytes that are sent from a device to another one, over all devices."""
        return sum(move.sent_bytes for move in self.moves)

    @property
    def most_received(self) -> int:
        """The bytes that the device which receives most receives."""
        return max(self._totals(1).values(), default=0)

    @property
    def most_sent(self) -> int:
        """The bytes that the device which sends most sends."""
        return max(self._totals(0).values(), default=0)

    def _totals(self, end: int) -> Counter[int]:
        found: Counter[int] = Counter()
        for pair, size in self.by_pair.items():
            found[pair[end]] += size
        return found

    @property
    def verdict(self) -> str:
        """What is sent and what it needs, in one sentence."""
        stay = "the old arrays stay" if self.keep else "old arrays are freed as they are moved"
        return (
            f"{self.meshes[0]} -> {self.meshes[1]}: {show_bytes(self.sent_bytes)} sent between "
            f"devices, at most {show_bytes(self.most_received)} to one; a device holds "
            f"{show_bytes(self.before)} before, {show_bytes(self.after)} after and at most "
            f"{show_bytes(self.peak_bytes)} during the move, where {stay} (exact)"
        )

    def __str__(self) -> str:
        """Returns the verdict, the bytes by axis, and the leaves that are sent."""
        rows = [(axes, show_bytes(size)) for axes, size in self.by_axis.items()]
        blocks = [self.verdict]
        if rows:
            blocks.append(text_table(("sent over", "bytes"), rows, right=(1,)))
        moved = [move for move in self.moves if move.steps]
        groups: dict[Any, list[Move]] = {}
        for move in sorted(moved, key=lambda move: (-move.sent_bytes, move.path)):
            alike = dataclasses.replace(move, path=re.sub(r"\d+", "#", move.path))
            groups.setdefault(alike, []).append(move)
        rows = [
            (
                fold_paths([_keys(move.path) for move in group]),
                *m.specs,
                show_bytes(m.sent_bytes),
                show_bytes(m.peak_bytes),
                str(m.steps),
            )
            for m, group in groups.items()
        ]
        if rows:
            head = ("leaf", "from", "to", "sent for each", "peak on a device", "steps")
            blocks.append(text_table(head, rows[:_ROWS], right=(3, 4, 5)))
        if len(rows) > _ROWS:
            blocks.append(f"and {len(rows) - _ROWS} more")
        still = len(self.moves) - len(moved)
        if still:
            what = count(still, "leaf stays", "leaves stay")
            blocks.append(f"{what} where {'it is' if still == 1 else 'they are'}")
        return "\n\n".join(blocks)

    def to_dict(self) -> dict[str, Any]:
        """Returns the plain data that `--format json` prints."""
        return {
            "meshes": list(self.meshes),
            "sent_bytes": self.sent_bytes,
            "most_sent": self.most_sent,
            "most_received": self.most_received,
            "before": self.before,
            "after": self.after,
            "peak_bytes": self.peak_bytes,
            "chunk_bytes": self.chunk_bytes,
            "limit": self.limit,
            "keep": self.keep,
            "by_axis": dict(self.by_axis),
            "by_pair": [
                {"from": a, "to": b, "bytes": size} for (a, b), size in self.by_pair.items()
            ],
            "moves": [
                {**dataclasses.asdict(move), "specs": list(move.specs)} for move in self.moves
            ],
        }


@public
def transfer(old: Layout, new: Layout, *, limit: int | None = None, keep: bool = False) -> Transfer:
    """Returns the plan of moving a model from one layout to another, without moving anything.

    Each device receives the bytes that it needs and does not hold, once, from a device that
    holds them: one that differs from it along as few axes of the new mesh as possible. On meshes
    without devices, the devices of both are taken to be the same, in the order of the mesh.

    Args:
        old: the layout that the arrays have.
        new: the layout that they are to have, of the same model; on the same mesh or another one.
        limit: the most bytes that a device may hold while it goes. Leaves are moved one after the
            other, and parts of them in pieces that are small enough.
        keep: whether the old arrays stay; by default, each is freed when it has been moved.

    Raises:
        LayoutError: the layouts are not of the same model, or have errors.
        ValueError: the move needs more than `limit`; the least that it needs is named.

    Example:
        >>> import shardwise as sw
        >>> from flax import nnx
        >>> make = lambda: nnx.Linear(1024, 4096, use_bias=False, rngs=nnx.Rngs(0))
        >>> mesh = sw.mesh("data=4", on="none")
        >>> plan = sw.transfer(sw.layout(make, mesh, "fsdp"), sw.layout(make, mesh, "dp"))
        >>> plan.sent_bytes == 4 * 3 * 4 * 2**20  # each of 4 devices lacks 3 of 4 shards of 4 MiB
        True
    """
    for each in (require_layout(old), require_layout(new)):
        check(each).raise_if_errors()
    help = "both layouts must be of one model"
    require_match(new, {leaf.keys: leaf for leaf in old.leaves}, help)
    real = isinstance(old.mesh, Mesh) and isinstance(new.mesh, Mesh)
    sides = [place_of(each.mesh, device_ids(each.mesh, real)) for each in (old, new)]
    after = {leaf.keys: leaf for leaf in new.leaves}
    known: dict[Any, tuple[Boxes, Boxes]] = {}
    rows = []
    for leaf in old.leaves:
        pair = (leaf, after[leaf.keys])
        key = (leaf.shape, *(normal_spec(each.spec) for each in pair))
        if key not in known:
            known[key] = tuple(  # pyright: ignore[reportArgumentType] - two of them
                side.boxes(each.shape, each.spec, each.sizes)
                for side, each in zip(sides, pair, strict=True)
            )
        specs = tuple(show_spec(normal_spec(each.spec)) for each in pair)
        rows.append(Row(leaf.path, leaf.shape, leaf.dtype, leaf.bytes, specs, *known[key]))
    meshes = (show_mesh(old.mesh), show_mesh(new.mesh))
    return plan_rows(rows, sides[1], meshes, limit=limit, keep=keep)[0]


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """An array that is to be moved: what it is, and which part each device holds, then and now."""

    path: str
    shape: tuple[int, ...]
    dtype: Any
    bytes: int
    specs: tuple[str, ...]
    old: Boxes
    new: Boxes


def device_ids(mesh: AnyMesh, real: bool = True) -> list[int]:
    """Returns the ids of a mesh's devices; their places, on a mesh without devices."""
    if real and isinstance(mesh, Mesh):
        return [device.id for device in mesh.devices.flat]
    return list(range(mesh.size))


def plan_rows(
    rows: Sequence[Row],
    place: Place,
    meshes: tuple[str, str],
    *,
    limit: int | None,
    keep: bool,
) -> tuple[Transfer, list[tuple[Row, Exchange]]]:
    """Returns the plan of moving arrays, and how each moves, in order.

    Raises:
        ValueError: the move needs more than the limit.
    """
    if limit is not None and limit <= 0:
        raise ValueError(f"limit must be a positive number of bytes, got {limit}")
    known: dict[Any, Exchange] = {}
    pairs = []
    for row in rows:
        key = (row.dtype, id(row.old), id(row.new))
        if key not in known:
            known[key] = exchange_of(row.dtype, row.old, row.new, place, BETWEEN)
        pairs.append((row, known[key]))
    chunk, needs, order, peak, after = _try(pairs, _CHUNKS[0], keep)
    for smaller in _CHUNKS[1:]:
        if limit is not None and peak > limit:
            chunk, needs, order, peak, after = _try(pairs, smaller, keep)
    before = max(_resident(pairs).values(), default=0)
    if limit is not None and peak > limit:
        worst, exchange = max(order, key=lambda pair: _alone(pair[1], needs))
        raise TransferTooLarge(
            f"the move needs {show_bytes(peak)} on one device, but the limit is "
            f"{show_bytes(limit)}: a device holds {show_bytes(before)} before and "
            f"{show_bytes(after)} after, and {worst.path} alone needs "
            f"{show_bytes(_alone(exchange, needs))} while it moves"
            + (f"; without {either('keep', '--keep')}, old arrays are freed as they are moved"
               if keep else "")
        )  # fmt: skip
    by_axis: Counter[str] = Counter()
    by_pair: Counter[tuple[int, int]] = Counter()
    steps = {id(each): each.count_steps(chunk) for each in known.values()}
    for _, exchange in order:
        by_pair.update(exchange.by_pair)
        by_axis.update(exchange.by_axis)
    plan = Transfer(
        meshes=meshes,
        moves=tuple(
            Move(
                row.path,
                row.bytes,
                (row.specs[0], row.specs[1]),
                sum(exchange.by_pair.values()),
                _alone(exchange, needs),
                steps[id(exchange)],
            )
            for row, exchange in order
        ),
        by_axis=dict(by_axis.most_common()),
        by_pair=dict(sorted(by_pair.items())),
        before=before,
        after=after,
        peak_bytes=peak,
        chunk_bytes=chunk,
        limit=limit,
        keep=keep,
    )
    return plan, order


Pairs = Sequence[tuple[Row, Exchange]]
Needs = Mapping[int, Mapping[int, int]]


def _try(
    pairs: Pairs, chunk: int, keep: bool
) -> tuple[int, Needs, list[tuple[Row, Exchange]], int, int]:
    """Returns a size of pieces, what they need, the order, and the most bytes during and after."""
    needs = {id(each): each.temporary(chunk) for each in {id(e): e for _, e in pairs}.values()}
    order = _ordered(pairs, needs)
    return chunk, needs, order, *_play(order, needs, keep)


def _extra(exchange: Exchange, device: int, needs: Needs) -> int:
    """Returns the bytes that a device needs for a move besides what it holds before."""
    return exchange.taken.get(device, 0) + needs[id(exchange)].get(device, 0)


def _alone(exchange: Exchange, needs: Needs) -> int:
    """Returns what a move needs on one device, with the old shard."""
    return max(exchange.held(d) + _extra(exchange, d, needs) for d in exchange.devices)


def _ordered(pairs: Pairs, needs: Needs) -> list[tuple[Row, Exchange]]:
    """Returns the moves in an order that needs little memory.

    First come those that free more than they take, the least demanding first; then the others,
    those with the largest temporary copies first, while little of the new is there.
    """

    def order(pair: tuple[Row, Exchange]) -> tuple[bool, int]:
        move = pair[1]
        change = max(move.taken.get(d, 0) - move.freed.get(d, 0) for d in move.devices)
        need = max(_extra(move, d, needs) for d in move.devices)
        return (change > 0, need if change <= 0 else change - need)

    return sorted(pairs, key=order)


def _resident(pairs: Pairs) -> Counter[int]:
    """Returns the bytes on each device before anything moves."""
    found: Counter[int] = Counter()
    for row, exchange in pairs:
        for device in row.old:
            found[device] += exchange.held(device)
    return found


def _play(order: Pairs, needs: Needs, keep: bool) -> tuple[int, int]:
    """Returns the most bytes that a device holds during the moves, and after them."""
    resident = _resident(order)
    peak = max(resident.values(), default=0)
    for _, exchange in order:
        for device in exchange.devices:
            peak = max(peak, resident[device] + _extra(exchange, device, needs))
        for device in exchange.devices:
            resident[device] += exchange.taken.get(device, 0)
            resident[device] -= 0 if keep else exchange.freed.get(device, 0)
    return peak, max(resident.values(), default=0)


def _keys(path: str) -> tuple[int | str, ...]:
    return tuple(int(key) if key.isdecimal() else key for key in path.split("."))
