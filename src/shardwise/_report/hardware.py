"""The devices of a mesh as the hardware joins them: hosts of GPUs, the torus of a TPU slice."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from .._chips import parse_chips
from .._time import torus_of

# The most devices of a slice that the page draws one by one, at their places on the torus.
_MOST = 1024


def hardware_data(
    chips: str, platform: str, mesh: Mapping[str, int], hosts: int = 1
) -> dict[str, Any]:
    """Returns how many hosts or slices there are, and where each device of a slice lies.

    Args:
        chips: the chips, such as `h100:2x8`; another text for other devices.
        platform: `gpu`, `tpu`, `cpu`, or nothing for a mesh without devices.
        mesh: the sizes of the mesh's axes by name.
        hosts: how many hosts devices that are present are on.
    """
    devices = math.prod(mesh.values())
    try:
        found = parse_chips(chips)
    except ValueError:
        kind = platform or "none"
        return {"kind": kind, "chip": chips, "boxes": hosts, "local": devices // hosts}
    kind, boxes = found.platform, found.slices
    if kind == "gpu":
        boxes = found.topology[0]
    data: dict[str, Any] = {"kind": kind, "chip": found.chip.name, "boxes": boxes}
    data["local"] = devices // boxes
    if kind == "tpu" and devices // boxes <= _MOST:
        torus = torus_of(found, mesh)
        data |= {
            "sizes": list(torus.sizes),
            "wraps": list(torus.wraps),
            "cores": found.chip.devices_per_chip,
            "places": [list(place) for place in torus.coordinates],
        }
    return data
