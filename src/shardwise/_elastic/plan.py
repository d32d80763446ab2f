"""Planning ahead: the layouts of the smaller meshes that a run may have to go on with."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from .._base import count, either, public, show_bytes
from .._check import Finding, Findings, LayoutError, make_finding
from .._chips import Chips
from .._compile import CompileError, step_machine
from .._estimate import estimate
from .._jax import is_in_host_memory
from .._layout import Layout
from .._mesh import DATA_AXES, AnyMesh, free_axis, show_mesh, with_devices
from .._nnx import Recipe
from .._step import Blueprint, make_blueprint
from .chips_left import chips_left, compiled_peak


@public
@dataclasses.dataclass(frozen=True)
class Smaller:
    """What a run is with fewer processes, or why it cannot go on with them.

    Attributes:
        processes: how many processes.
        layout: what the layout's rules decide on their devices; None if there is no such mesh.
        recipe: the recipe, with `accumulate` for the same global batch.
        state_bytes: what one device holds between steps (exact).
        peak_bytes: what one device needs at its peak (modelled); None if that is unknown.
        problem: why the run cannot go on with so many; None if it can.
        compiled_bytes: what one device needs at its peak (compiled); None if it was not compiled.
    """

    processes: int
    layout: Layout | None
    recipe: Recipe
    state_bytes: int
    peak_bytes: int | None
    problem: Finding | None
    compiled_bytes: int | None = None

    def __str__(self) -> str:
        """Returns it in one line, or the problem."""
        if self.problem is not None:
            return str(self.problem)
        assert self.layout is not None
        label, most = "modelled", self.peak_bytes
        if self.compiled_bytes is not None:
            label, most = "compiled", self.compiled_bytes
        peak = "" if most is None else f", {show_bytes(most)} at most ({label})"
        return (
            f"{count(self.processes, 'process', 'processes')}: {show_mesh(self.layout.mesh)}, "
            f"accumulate={self.recipe.accumulate}, {show_bytes(self.state_bytes)} of state on each "
            f"device (exact){peak}"
        )


@public
@dataclasses.dataclass(frozen=True)
class ElasticPlan(Sequence[Smaller]):
    """What a run is with each smaller number of processes. Returned by `sw.elastic_plan`.

    Attributes:
        processes: how many the run has when none is lost.
        items: what it is with fewer.
    """

    processes: int
    items: tuple[Smaller, ...]

    def __getitem__(self, index: Any) -> Any:
        """Returns one of them."""
        return self.items[index]

    def __len__(self) -> int:
        """Returns how many numbers were planned for."""
        return len(self.items)

    @property
    def findings(self) -> Findings:
        """Why the run cannot go on with some of them."""
        return Findings(tuple(s.problem for s in self.items if s.problem is not None))

    @property
    def sizes(self) -> list[int]:
        """The numbers of processes that the run can go on with."""
        return sorted([*(s.processes for s in self.items if s.problem is None), self.processes])

    def require(self, least: int | None) -> None:
        """Raises if the run cannot go on with `least`, or, if that is None, with any fewer.

        Raises:
            LayoutError: it cannot.
        """
        if least is None:
            problems = self.findings.items if len(self.sizes) == 1 else ()
        else:
            problems = tuple(
                s.problem for s in self.items if s.processes == least and s.problem is not None
            )
        if problems:
            raise LayoutError(Findings(problems))

    def __str__(self) -> str:
        """Returns a line for each, or its problem."""
        return "\n".join(map(str, self.items))

    __repr__ = __str__


def shrinking_axis(layout: Layout, processes: int) -> str:
    """Returns the axis of a layout's mesh that follows the number of processes.

    Raises:
        ValueError: every size of the mesh was given.
    """
    mesh = layout.mesh
    axis = free_axis(mesh)
    if axis is None:  # not made by `sw.mesh`, or of no devices that are here
        named = [a for a in mesh.shape if a in DATA_AXES]
        even = [a for a, size in mesh.shape.items() if size % processes == 0]
        axis = next(iter([*named, *even]), "")
    if not axis:
        shown = show_mesh(mesh)
        free = ",".join(f"{a}={-1 if i == 0 else s}" for i, (a, s) in enumerate(mesh.shape.items()))
        raise ValueError(
            f"an elastic run is laid out anew when it loses a process, but the mesh {shown} has fixed "
            f"sizes: let one follow the number of devices, such as "
            + either(f"sw.mesh({free!r})", f"--mesh {free}")
        )
    return axis


def scaled(recipe: Recipe, layout: Layout, now: int, full: int) -> Recipe:
    """Returns the recipe for fewer processes: the same batch, in as many more microbatches.

    Raises:
        ValueError: the batch cannot be split over this mesh.
    """
    if now >= full:
        return recipe
    least = -(-recipe.accumulate * full // now)
    rows = min((x.shape[0] for x in jax.tree.leaves(recipe.batch) if x.shape), default=1)
    _ = make_blueprint(dataclasses.replace(recipe, accumulate=1), layout).batch
    for parts in range(least, max(rows, least) + 1):
        try:
            found = dataclasses.replace(recipe, accumulate=parts)
            _ = make_blueprint(found, layout).batch
            return found
        except LayoutError:
            raise
        except ValueError:
            continue
    raise ValueError(
        f"a batch of {rows} cannot be computed in at least {least} microbatches on "
        f"{show_mesh(layout.mesh)}: make it a multiple of {least} times the ways that it is split"
    )


@public
def elastic_plan(
    recipe: Recipe,
    layout: Layout,
    processes: int,
    *,
    sizes: Sequence[int] | None = None,
    capacity: int | None = None,
    compiled: bool = False,
) -> ElasticPlan:
    """Returns what a run would be with each smaller number of processes, the largest first.

    Args:
        recipe: the recipe, for all processes.
        layout: the layout on the mesh of all processes, which may have absent chips.
        processes: how many processes, or hosts, that are.
        sizes: the numbers of processes to plan for; by default, all smaller ones.
        capacity: the bytes of one device, where the mesh does not say.
        compiled: whether each step is compiled too, by the compiler of the mesh's chips, which need
            not be there. Of a TPU, fewer hosts are the slice with as many chips, if there is one.

    Raises:
        ValueError: all sizes of the mesh are fixed, or it has no equal part for each process; or
            `compiled`, and there is nothing to compile for.
        CompileError: the compiler has failed.

    Example:
        >>> import jax, optax, shardwise as sw
        >>> from flax import nnx
        >>> make = lambda: nnx.Linear(1024, 1024, rngs=nnx.Rngs(0))
        >>> recipe = sw.Recipe(model=make, loss=lambda model, x: model(x).mean(),
        ...                    optimizer=optax.adam(0.1), batch=jax.ShapeDtypeStruct((32, 1024), "float32"))
        >>> layout = sw.layout(make, sw.mesh("data=4", on="none"), "fsdp")
        >>> plan = sw.elastic_plan(recipe, layout, 4)
        >>> plan.sizes, plan.findings[0].message[:65]
        ([1, 2, 4], "batch of shape (32, 1024) cannot be split as P('data') on data=3:")
        >>> print(plan[1])
        2 processes: data=2, accumulate=2, 6.0 MiB of state on each device (exact)
    """
    if isinstance(processes, bool) or not isinstance(processes, int) or processes < 1:
        raise ValueError(f"processes must be a positive integer, got {processes!r}")
    if layout.mesh.size % processes:
        raise ValueError(
            f"the mesh {show_mesh(layout.mesh)} has {layout.mesh.size} devices, which {processes} "
            f"processes cannot have equal parts of"
        )
    if compiled and chips_left(layout.mesh, 1, layout.mesh.size) is None:
        raise ValueError(
            f"compiled=True needs chips to compile for, which the mesh {show_mesh(layout.mesh)} does not "
            f"name: make it with on='h100:4x8' or on='v5p:2x2x4'"
        )
    wanted = range(processes - 1, 0, -1) if sizes is None else sizes
    found = _plan(recipe, layout, processes, wanted, capacity, compiled)
    return ElasticPlan(processes, tuple(found))


def _plan(
    recipe: Recipe,
    layout: Layout,
    full: int,
    sizes: Sequence[int],
    capacity: int | None,
    compiled: bool,
) -> Iterator[Smaller]:
    axis = shrinking_axis(layout, full)
    each = layout.mesh.size // full
    for processes in sizes:
        where = f"{count(processes, 'process', 'processes')} of {full}"
        smaller, fewer, held, peak, most = None, recipe, 0, None, capacity
        problem, proved = None, None
        try:
            chips = _chips(layout.mesh, processes, each)
            left = chips_left(layout.mesh, processes, each) if compiled else chips
            mesh = with_devices(layout.mesh, axis, each * processes, left)
            smaller = layout.made_on(mesh)
            fewer = scaled(recipe, smaller, processes, full)
            held = _held(make_blueprint(fewer, smaller))
            if chips is not None:
                modelled = estimate(fewer, smaller)
                peak, most = modelled.peak_bytes, capacity or modelled.capacity
            needed = held if peak is None else max(held, peak)
            if most is not None and needed > most:
                label = "modelled" if needed == peak else "exact, for the state alone"
                problem = make_finding(
                    "SW701",
                    where,
                    f"each device of {show_mesh(mesh)} needs {show_bytes(needed)} ({label}), and has "
                    f"{show_bytes(most)}",
                    _HELP,
                )
            elif compiled and left is not None:
                proved, why = compiled_peak(fewer, smaller, capacity)
                problem = make_finding("SW701", where, why, _HELP) if why else None
        except CompileError:
            raise
        except LayoutError as error:
            first = error.findings.errors[0]
            problem = make_finding("SW701", where, f"{first.path}: {first.message}", first.help)
        except ValueError as error:
            problem = make_finding("SW701", where, str(error).splitlines()[0], _HELP)
        yield Smaller(processes, smaller, fewer, held, peak, problem, proved)


_HELP = "give the run a higher minimum of processes, or a layout that fits fewer of them"


def device_capacity(mesh: Mesh) -> int | None:
    """Returns the bytes of one of this process's devices, or None if they are not known."""
    device = next(d for d in mesh.devices.flat if d.process_index == jax.process_index())
    stats = device.memory_stats() or {}
    return stats.get("bytes_limit")


def _held(blueprint: Blueprint) -> int:
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(blueprint.abstract)
        if not is_in_host_memory(x.sharding)
    )


def _chips(mesh: AnyMesh, processes: int, each: int) -> Chips | None:
    """Returns the chips of so many processes, if a step on them can be estimated."""
    machine = step_machine(mesh)
    if machine is None or len(machine.chips.topology) != 2 or machine.chips.chip.gpu is None:
        return None  # fewer hosts of a TPU slice are another slice: what is left cannot be foreseen
    return Chips(machine.chips.chip, (processes, each))
