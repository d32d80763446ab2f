"""The collectives of a compiled program: their mesh axes, sizes, counts and causes."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np

from .._chips import sent_bytes
from .program import Instruction, Module, Shape
from .slices import between_slices, slice_groups
from .source import Source, cause_of, leaf_of

# From the HLO name to the name in the cost model.
_KINDS = {
    "all-reduce": "psum",
    "all-gather": "all_gather",
    "reduce-scatter": "psum_scatter",
    "all-to-all": "all_to_all",
    "ragged-all-to-all": "all_to_all",
    "collective-permute": "ppermute",
    "collective-broadcast": "pbroadcast",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Collective:
    """One collective of a compiled program.

    Attributes:
        kind: its HLO name, such as `all-gather`.
        axes: the mesh axes it runs over, in the mesh's order.
        devices: how many devices are in one of its groups, or slices if it runs between them.
        shape: the shape of its largest operand on one device, such as `bf16[256,512]`.
        arrays: how many arrays it moves at once.
        sent_bytes: bytes that one device sends each time it runs, in the ring model.
        times: how many times a step runs it.
        source: what it comes from.
        hosts: over how many hosts (GPUs), or slices (TPUs), the devices of a group are spread; 0 if
            it is not known.
    """

    kind: str
    axes: tuple[str, ...]
    devices: int
    shape: str
    arrays: int
    sent_bytes: int
    times: int
    source: Source
    hosts: int = 0

    @property
    def total_bytes(self) -> int:
        """Bytes that one device sends in a step."""
        return self.sent_bytes * self.times

    @property
    def crosses(self) -> bool:
        """Whether it sends anything from one host, or slice, to another."""
        return self.hosts > 1


def collectives(
    module: Module,
    mesh: Mapping[str, int],
    paths: Collection[str],
    host_of: Sequence[int] | None = None,
) -> list[Collective]:
    """Returns every collective of a program, asynchronous and fused ones once each.

    Args:
        module: the compiled program.
        mesh: the sizes of the mesh's axes by name, in order.
        paths: the paths of the model's modules.
        host_of: the host, or the slice, of each device in the mesh's order, if that is known.
    """
    found = []
    for computation, instruction, times in _collective_instructions(module):
        kind = _kind(module, computation, instruction)
        groups, members, axes = _groups(module, instruction, mesh)
        if members == 1:
            continue  # over axes of size 1: nothing is sent
        operands = _operands(module, computation, instruction)
        if not operands:
            continue
        total = sum(shape.nbytes for shape in operands)
        source = cause_of(module, computation, instruction, paths)
        leaf = leaf_of(module, computation, instruction) if kind != "all-reduce" else ""
        found.append(
            Collective(
                kind=kind,
                axes=axes,
                devices=members,
                shape=str(max(operands, key=lambda shape: shape.nbytes)),
                arrays=len(operands),
                sent_bytes=sent_bytes(_KINDS[kind], total, members),
                times=times,
                source=dataclasses.replace(source, leaf=leaf),
                hosts=_most_hosts(groups, host_of) if host_of is not None else 0,
            )
        )
    return found


def _collective_instructions(module: Module) -> Iterator[tuple[str, Instruction, int]]:
    chains = set()
    for computation, times, _ in module.runs():
        for instruction in module.computations.get(computation, ()):
            known = instruction.opcode.removesuffix("-start") in _KINDS
            if not known and not between_slices(instruction):
                continue
            # A TPU splits a collective into a start, a middle and an end, each fused with other
            # work, and all three contain it: they share a channel and a chain.
            chain = re.search(r'chain_id="?(\w+)', instruction.rest)
            if chain is not None:
                channel = re.search(r"channel_id=(\d+)", instruction.rest)
                key = (chain[1], channel[1] if channel else "")
                if key in chains:
                    continue
                chains.add(key)
            yield computation, instruction, times


def _kind(module: Module, computation: str, instruction: Instruction) -> str:
    if between := between_slices(instruction):
        return between
    kind = instruction.opcode.removesuffix("-start")
    # A TPU's reduce-scatter is an all-reduce fused with the slice that each device keeps.
    caller = module.callers.get(computation)
    if kind == "all-reduce" and caller is not None and caller[1].opcode == "fusion":
        own = caller[1].shapes and instruction.shapes
        if own and caller[1].shapes[0].size < instruction.shapes[0].size:
            return "reduce-scatter"
    return kind


def collective_kind(module: Module, computation: str, instruction: Instruction) -> str:
    """Returns the HLO name of the collective that an instruction is, or an empty string."""
    if instruction.opcode.removesuffix("-start") not in _KINDS:
        return between_slices(instruction)
    return _kind(module, computation, instruction)


def collective_parts(
    module: Module,
    computation: str,
    instruction: Instruction,
    mesh: Mapping[str, int],
) -> tuple[int, list[list[int]], tuple[str, ...]]:
    """Returns a collective's bytes on one device, its groups of devices, and its mesh axes.

    The bytes are those of the larger of what it takes and what it gives.
    """
    taken = sum(shape.nbytes for shape in _operands(module, computation, instruction))
    groups, members, axes = _groups(module, instruction, mesh)
    gathers = (between_slices(instruction) or instruction.opcode).startswith("all-gather")
    size = taken * members if gathers else taken
    return size, groups, axes


def _operands(module: Module, computation: str, instruction: Instruction) -> list[Shape]:
    own = module.by_name[computation]
    return [shape for name in instruction.operands if name in own for shape in own[name].shapes]


def _most_hosts(groups: Sequence[Sequence[int]], host_of: Sequence[int]) -> int:
    return max((len({host_of[device] for device in group}) for group in groups), default=0)


def _groups(
    module: Module, instruction: Instruction, mesh: Mapping[str, int]
) -> tuple[list[list[int]], int, tuple[str, ...]]:
    """Returns the groups of a collective, how many devices are in one, and the axes it spans."""
    sizes = tuple(mesh.values())
    pairs = instruction.attribute("source_target_pairs")
    if between_slices(instruction):
        groups = slice_groups(module, instruction)
        members = max((len(group) for group in groups), default=1)
    elif pairs:
        groups = [pair for pair in _lists(pairs) if pair[0] != pair[1]]
        members = 2 if groups else 1
    else:
        # Of several slices, a program numbers the devices of one.
        every = module.partitions if module.partitions > 1 else math.prod(sizes)
        groups = replica_groups(instruction.attribute("replica_groups"), every)
        members = max((len(group) for group in groups), default=1)
    used = set()
    for group in groups:
        places = np.array(np.unravel_index(np.array(group), sizes))
        used |= {i for i in range(len(sizes)) if len(set(places[i].tolist())) > 1}
    return groups, members, tuple(name for i, name in enumerate(mesh) if i in used)


def replica_groups(text: str, devices: int) -> list[list[int]]:
    """Returns the groups that HLO writes as lists, as a reshaped range, or by axes of a mesh."""
    named = re.match(r"mesh\[([^\]]*)\](.*)", text, re.S)
    if named:
        return _named_groups(named[1], named[2])
    iota = re.match(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if iota:
        shape, dims = _numbers(iota[1]), _numbers(iota[2])
        order = np.arange(math.prod(dims)).reshape(dims)
        if iota[3]:
            order = order.transpose(_numbers(iota[3]))
        return order.reshape(shape[0], -1).tolist()
    return _lists(text) or [list(range(devices))]


def _named_groups(mesh: str, rest: str) -> list[list[int]]:
    """Returns the groups of `mesh['a'=2,'b'=4] {'a'}`, which may use a part of an axis, `'b':(2)2`."""
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh)}
    order = np.arange(math.prod(sizes.values()))
    given = re.search(r"device_ids=\(?\[?([\d,\s]+)", rest)
    if given:
        order = np.array(_numbers(given[1].replace(" ", "")))
    used = re.findall(
        r"'([^']+)'(?::\((\d+)\)(\d+))?", rest[rest.rindex("{") :] if "{" in rest else ""
    )
    # Each axis is divided into the dims before a part, the part itself, and those after it.
    dims: list[int] = []
    chosen: list[int] = []
    for name, size in sizes.items():
        parts = sorted((int(m or 1), int(k or size)) for n, m, k in used if n == name)
        left = 1
        for before, part in parts:
            dims += [before // left, part]
            chosen.append(len(dims) - 1)
            left = before * part
        dims.append(size // left)
    others = [i for i in range(len(dims)) if i not in chosen]
    members = math.prod(dims[i] for i in chosen)
    return order.reshape(dims).transpose(others + chosen).reshape(-1, members).tolist()


def _lists(text: str) -> list[list[int]]:
    return [_numbers(inner) for inner in re.findall(r"\{([\d,]+)\}", text)]


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


def by_axis(rows: Sequence[Collective]) -> dict[str, dict[str, tuple[int, int]]]:
    """Returns, by axes and kind, how many collectives a step runs and the bytes sent."""
    table: dict[str, dict[str, tuple[int, int]]] = {}
    for row in rows:
        kinds = table.setdefault(",".join(row.axes), {})
        count, sent = kinds.get(row.kind, (0, 0))
        kinds[row.kind] = (count + row.times, sent + row.total_bytes)
    return table
