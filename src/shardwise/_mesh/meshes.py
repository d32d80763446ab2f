"""Meshes by name: of this machine's devices, of virtual devices, or of none at all."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh

from .._base import either, option, public, show_type
from .._chips import MOST_DEVICES, Chips, parse_chips

AnyMesh = Mesh | AbstractMesh
_MOST_CPU_DEVICES = 1024
# The names of axes that a batch is split over.
DATA_AXES = ("replica", "data", "dp", "batch", "fsdp")
# The names of axes that the second dim of a batch, its sequences, is split over.
SEQUENCE_AXES = ("sequence",)
# The logical name that a step maps to the axis over which its layout splits stacks of layers.
STAGES = "stages"
# JAX keeps one mesh for each set of devices and axes: made in both ways, its axis counts as free.
_FREE: weakref.WeakKeyDictionary[Mesh, str] = weakref.WeakKeyDictionary()


@public
def mesh(
    axes: str | Mapping[str, int],
    on: str | Sequence[Any] | None = None,
    *,
    explicit: bool | Sequence[str] = False,
) -> AnyMesh:
    """Returns a mesh with the named axes.

    Args:
        axes: `"data=2,model=4"` or `{"data": 2, "model": 4}`; one size may be -1, which
            is inferred from the number of devices.
        on: None for all devices of this machine; `"cpu:8"` for eight virtual CPU devices;
            `"none"` for no devices at all (an `AbstractMesh`: arithmetic only); a chip and its
            topology (`"v5p:4x8x8"`, `"h200:8x8"`) for chips that are not attached, also an
            `AbstractMesh`; `"2xv5p:4x8x8"` for two such slices, which the outermost axes are split
            over; or a sequence of devices.
        explicit: True to make all axes Explicit, or the names of those to make Explicit. The
            default is Auto, under which any model works unchanged unless it names axes itself
            with `out_sharding=` or `reshard`, which needs Explicit axes.

    Raises:
        ValueError: the axes do not parse or do not fit the devices, or `on` names no devices.

    Example:
        >>> import shardwise as sw
        >>> sw.mesh("data=2,model=4", on="none").shape["model"]
        4
        >>> sw.mesh({"data": -1}, on="cpu:8").size
        8
    """
    sizes = _parse_axes(axes)
    types = _axis_types(tuple(sizes), explicit)
    if isinstance(on, str) and on.strip().lower() == "none":
        if -1 in sizes.values():
            raise ValueError(
                f"{_show(sizes)} leaves a size to be inferred, but {option('on', 'none')} has no devices to "
                f"infer it from: give every size"
            )
        return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=types)
    if isinstance(on, str) and not _is_cpu(on):
        chips: Any = parse_chips(on)
        sizes = _fit(sizes, chips.device_count, f"{option('on', on)} has", ())
        chips.slices_by_axis(tuple(sizes.values()))
        return AbstractMesh(
            tuple(sizes.values()), tuple(sizes), axis_types=types, abstract_device=chips
        )
    free = next((axis for axis, size in sizes.items() if size == -1), "")
    devices, have = _devices(on)
    sizes = _fit(sizes, len(devices), have, devices)
    _require_each_process(devices)
    shape, names = tuple(sizes.values()), tuple(sizes)
    try:
        made = jax.make_mesh(shape, names, axis_types=types, devices=devices)
    except NotImplementedError:  # no product of torus axes gives these sizes: split a torus axis
        ordered = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
        made = Mesh(ordered, names, axis_types=types)
    _FREE[made] = free or _FREE.get(made, "")
    return made


def free_axis(mesh: AnyMesh) -> str | None:
    """Returns the axis of a mesh from `sw.mesh` whose size was inferred from the devices.

    An empty text if every size was given, and None if the mesh was not made by `sw.mesh`.
    """
    return _FREE.get(mesh) if isinstance(mesh, Mesh) else None


def with_devices(
    mesh: AnyMesh, axis: str, devices: int, chips: Chips | None = None
) -> AbstractMesh:
    """Returns a mesh with another number of devices, of which an axis takes what others leave.

    Raises:
        ValueError: they are no multiple of the sizes of the other axes.
    """
    rest = mesh.size // mesh.shape[axis]
    if devices % rest:
        others = _show({a: s for a, s in mesh.shape.items() if a != axis})
        raise ValueError(f"{devices} devices are no multiple of {rest} ({others})")
    sizes = {**mesh.shape, axis: devices // rest}
    return AbstractMesh(
        tuple(sizes.values()), tuple(sizes), axis_types=mesh.axis_types, abstract_device=chips
    )


def show_mesh(mesh: AnyMesh) -> str:
    """Returns the axes of `mesh` as `data=2,model=4`, which `sw.mesh` reads."""
    return _show(mesh.shape)


def chips_of(mesh: AnyMesh) -> Chips | None:
    """Returns the chips of a mesh from `sw.mesh(on="v5p:4x8x8")`, or None for any other mesh."""
    found = mesh.abstract_device if isinstance(mesh, AbstractMesh) else None
    return found if isinstance(found, Chips) else None


def mesh_types(mesh: AnyMesh) -> dict[str, str]:
    """Returns the type of each axis, by name: `Auto`, `Explicit` or `Manual`."""
    return {a: t.name for a, t in zip(mesh.axis_names, mesh.axis_types, strict=True)}


def _show(sizes: Mapping[str, int]) -> str:
    return ",".join(f"{name}={size}" for name, size in sizes.items())


def _short(text: str) -> str:
    return text if len(text) < 100 else f"{text[:97]}..."


def _parse_axes(axes: str | Mapping[str, int]) -> dict[str, int]:
    form = either(
        "write axes as 'data=2,model=4' or {'data': 2, 'model': 4}", "write axes as data=2,model=4"
    )
    pairs: list[tuple[Any, Any]] = []
    if isinstance(axes, str):
        for part in axes.split(","):
            name, equals, size = part.partition("=")
            size = size.strip()
            if not equals or not (size.isascii() and size.removeprefix("-").isdecimal()):
                raise ValueError(
                    f"mesh {axes!r} has {part.strip()!r} where an axis is expected: {form}"
                )
            # Python refuses to parse integers with thousands of digits, and no size is that large.
            pairs.append((name.strip(), int(size) if len(size) < 20 else MOST_DEVICES + 1))
    elif isinstance(axes, Mapping):
        pairs = list(axes.items())
    else:
        raise ValueError(f"mesh axes are {show_type(axes)}: {form}")
    sizes: dict[str, int] = {}
    for name, size in pairs:
        if not isinstance(name, str) or not name.isidentifier():
            raise ValueError(f"mesh axis {name!r} is not a name: {form}")
        if name in sizes:
            raise ValueError(f"mesh axis {name!r} appears twice in {axes!r}: give each axis once")
        if isinstance(size, bool) or not isinstance(size, int) or (size < 1 and size != -1):
            raise ValueError(
                f"mesh axis {name!r} has size {size!r}: give a positive integer, or -1 to infer it"
            )
        sizes[name] = size
    if not sizes:
        raise ValueError(f"the mesh has no axes: {form}")
    if math.prod(size for size in sizes.values() if size != -1) > MOST_DEVICES:
        raise ValueError(
            f"mesh {_short(str(axes))!r} has more devices than the limit of {MOST_DEVICES:,}"
        )
    if list(sizes.values()).count(-1) > 1:
        raise ValueError(f"mesh {_show(sizes)} has more than one size -1: only one can be inferred")
    return sizes


def _axis_types(names: tuple[str, ...], explicit: bool | Sequence[str]) -> tuple[AxisType, ...]:
    if isinstance(explicit, str):
        explicit = (explicit,)
    chosen = names if explicit is True else () if explicit is False else tuple(explicit)
    unknown = [name for name in chosen if name not in names]
    if unknown:
        raise ValueError(
            f"explicit={explicit!r} names {unknown[0]!r}, which is not an axis of this mesh: "
            f"its axes are {', '.join(names)}"
        )
    return tuple(AxisType.Explicit if name in chosen else AxisType.Auto for name in names)


def _is_cpu(on: str) -> bool:
    return on.strip().lower().partition(":")[0] == "cpu"


def _devices(on: str | Sequence[Any] | None) -> tuple[list[Any], str]:
    """Returns the devices that `on` names, and the start of a clause that counts them."""
    if on is None:
        devices = jax.devices()
        return devices, f"the {devices[0].platform} backend has"
    if not isinstance(on, str):
        devices = list(on)
        if not devices or not all(isinstance(d, jax.Device) for d in devices):
            raise ValueError(
                f"on={on!r} is not a sequence of devices: give jax.devices() or some of them"
            )
        return devices, "on= has"
    count_text = on.strip().partition(":")[2].strip()
    if not (count_text.isascii() and count_text.isdecimal()) or not count_text.strip("0"):
        raise ValueError(f"{option('on', on)} does not say how many CPU devices: write 'cpu:8'")
    # Python refuses to parse integers with thousands of digits, and no count is that large.
    return _cpu_devices(int(count_text[:18])), f"{option('on', on)} has"


def _cpu_devices(count: int) -> list[Any]:
    if count > _MOST_CPU_DEVICES:
        raise ValueError(
            f"{option('on', f'cpu:{count}')} asks for more than {_MOST_CPU_DEVICES} virtual devices: "
            f"{option('on', 'none')} plans for any number of devices"
        )
    settings: Any = jax.config
    if jax.distributed.is_initialized():
        # Each process has created its own devices already; `count` is the total over processes.
        devices = jax.devices("cpu")
        if len(devices) < count:
            raise ValueError(
                f"{option('on', f'cpu:{count}')} needs {count} CPU devices, but the "
                f"{jax.process_count()} processes of this run have {len(devices)} in total: start "
                f"them with more (shardwise launch --devices N gives each process N)"
            )
        return devices[:count]
    # JAX refuses the setting once a backend runs, and no other public API tells whether one does.
    if settings.jax_num_cpu_devices < count:
        try:
            jax.config.update("jax_num_cpu_devices", count)
        except RuntimeError:
            pass
    try:
        devices = jax.devices("cpu")
    except RuntimeError as error:
        raise ValueError(
            f"{option('on', f'cpu:{count}')} needs the CPU backend, which JAX cannot start "
            f"(jax_platforms is {settings.jax_platforms!r}): add cpu to it"
        ) from error
    if len(devices) < count:
        raise ValueError(
            f"{option('on', f'cpu:{count}')} needs {count} CPU devices, but JAX has already started "
            f"with {len(devices)}: call sw.mesh, or jax.config.update('jax_num_cpu_devices', {count}), "
            f"before the first line that makes an array or asks for devices, such as nnx.Rngs(0), "
            f"jnp.ones(2) or jax.devices()"
        )
    return devices[:count]


def _require_each_process(devices: Sequence[Any]) -> None:
    """Raises if the mesh has no device of some process: that process could not take part."""
    missing = set(range(jax.process_count())) - {device.process_index for device in devices}
    if missing:
        raise ValueError(
            f"the mesh has {len(devices)} of the {jax.device_count()} devices, but none from process "
            f"{min(missing)}: each of the {jax.process_count()} processes needs one, so use all "
            f"devices, or start fewer processes"
        )


def _fit(sizes: dict[str, int], count: int, have: str, devices: Sequence[Any]) -> dict[str, int]:
    """Returns `sizes` with -1 filled in, or raises with the sizes that would fit `count`."""
    known = math.prod(s for s in sizes.values() if s != -1)
    if -1 in sizes.values() and count % known == 0:
        return {a: count // known if s == -1 else s for a, s in sizes.items()}
    if -1 not in sizes.values() and known == count:
        return sizes
    needs = f"a multiple of {known}" if -1 in sizes.values() else str(known)
    if count > 10**9:
        help_text = "give sizes with that product"
    else:
        found = _factorisations(count, sizes)
        fits = "; ".join(_show(dict(zip(sizes, f, strict=True))) for f in found)
        help_text = f"these fit {count}: {fits}"
    if known < count and devices and -1 not in sizes.values():
        is_cpu = devices[0].platform == "cpu"
        part = option("on", f"cpu:{known}") if is_cpu else f"on=jax.devices()[:{known}]"
        # The command line has no way to select some of the other kinds of devices.
        if is_cpu or not either("", "shell"):
            help_text += f"; or {part} for {known} of them"
    # Processes that have joined a run have their devices already.
    if count < known <= _MOST_CPU_DEVICES and devices and not jax.distributed.is_initialized():
        help_text += f"; or {option('on', f'cpu:{known}')} for {known} virtual CPU devices"
    raise ValueError(f"mesh {_show(sizes)} needs {needs} devices, but {have} {count}: {help_text}")


def _factorisations(count: int, sizes: Mapping[str, int], most: int = 6) -> list[tuple[int, ...]]:
    """Returns ways to write `count` as one factor per axis, those closest to `sizes` first."""
    low = [d for d in range(1, math.isqrt(count) + 1) if count % d == 0]
    divisors = sorted({*low, *(count // d for d in low)})

    def split(rest: int, axes: int) -> list[tuple[int, ...]]:
        if axes == 1:
            return [(rest,)]
        return [(d, *m) for d in divisors if rest % d == 0 for m in split(rest // d, axes - 1)]

    wanted = list(sizes.values())

    def distance(found: tuple[int, ...]) -> float:
        return sum(abs(math.log(f / w)) for f, w in zip(found, wanted, strict=True) if w > 0)

    return sorted(split(count, len(sizes)), key=distance)[:most]
