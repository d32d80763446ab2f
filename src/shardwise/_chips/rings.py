"""What a collective costs: the bytes that one device sends, under the ring model.

The model: an all-reduce is a reduce-scatter and an all-gather around a ring, each of n-1 steps
that send one n-th; an all-to-all sends every other device its part directly; a permute and a
broadcast send the value once. Real networks and compilers do better or worse: these figures are
modelled.
"""

from __future__ import annotations

MODEL = (
    "ring model, in multiples of the operand: psum, pmax and pmin send 2(n-1)/n, psum_scatter and "
    "all_to_all (n-1)/n, all_gather n-1, ppermute 1"
)


def sent_bytes(kind: str, local_bytes: int, devices: int) -> int:
    """Returns the bytes that one device sends in one collective (modelled).

    Args:
        kind: `psum`, `pmax`, `pmin`, `all_gather`, `psum_scatter`, `all_to_all`, `ppermute` or
            `pbroadcast`.
        local_bytes: bytes of the operand on one device.
        devices: the number of participating devices.
    """
    if devices == 1:
        return 0
    if kind in ("psum", "pmax", "pmin"):
        return 2 * (devices - 1) * local_bytes // devices
    if kind == "all_gather":
        return (devices - 1) * local_bytes
    if kind in ("psum_scatter", "all_to_all"):
        return (devices - 1) * local_bytes // devices
    return local_bytes
