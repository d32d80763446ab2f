"""Collectives between TPU slices, which a compiled program spells as transfers through the hosts."""

from __future__ import annotations

import re

from .program import Instruction, Module

_KINDS = {
    "ALL_REDUCE": "all-reduce",
    "ALL_GATHER": "all-gather",
    "REDUCE_SCATTER": "reduce-scatter",
    "ALL_TO_ALL": "all-to-all",
}
# A device's number in a target is that of its slice, from 1, times this, plus its own.
_SLICE = 100_000


def between_slices(instruction: Instruction) -> str:
    """Returns the HLO name of the collective between slices that a `send` begins, or nothing."""
    if instruction.opcode != "send" or "_xla_megascale_target=" not in instruction.rest:
        return ""
    kind = re.search(r'_xla_megascale_transfer_type="?(\w+)', instruction.rest)
    return _KINDS.get(kind[1] if kind else "", "collective-permute")


def rendezvous(instruction: Instruction) -> str:
    """Returns the name that the `send` and the `recv` of one transfer share."""
    found = re.search(r'_xla_host_transfer_rendezvous="?([^",}]+)', instruction.rest)
    return found[1] if found else ""


def slice_groups(module: Module, send: Instruction) -> list[list[int]]:
    """Returns the groups of slices, or pairs of a permute, each as the first device of a slice.

    Devices are numbered slice by slice, in the order of the mesh.
    """
    every = re.search(r'_xla_megascale_target="?\{([\d,:]+)\}x', send.rest)
    if every:
        found = [_numbers(every[1])]
    else:
        listed = re.search(r'_xla_megascale_target="?\{(\{.*?\})\}', send.rest)
        groups = re.findall(r"\{([^{}]+)\}", listed[1]) if listed else []
        # One for each device of a slice, of which all have the same slices.
        found = [[n // _SLICE for n in _numbers(group)] for group in groups]
    unique = dict.fromkeys(tuple(dict.fromkeys(group)) for group in found)
    return [[(number - 1) * module.partitions for number in group] for group in unique]


def _numbers(text: str) -> list[int]:
    found: list[int] = []
    for part in re.split(r",|->", text):
        first, _, last = part.partition(":")
        found += range(int(first), int(last or first) + 1)
    return found
