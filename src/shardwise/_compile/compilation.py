"""Compiles a recipe's step, or a model's forward pass, for present or absent devices."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, Mesh

from .._base import option, public
from .._check import Findings
from .._chips import Chips, gpu_of_kind
from .._hlo import (
    EDGES,
    Module,
    Reshard,
    bytes_accessed,
    collectives,
    parse_hlo,
    reshards,
    work_of,
)
from .._jax import module_bytes, needs_devices, opened
from .._layout import Layout, Method, require_layout
from .._memory import (
    Kinds,
    Lifetimes,
    LiveMemory,
    compiled_lifetimes,
    largest_buffers,
    live_of,
    modelled_lifetimes,
    workspace_bound,
)
from .._mesh import AnyMesh, chips_of, show_mesh
from .._nnx import Recipe
from .._time import Calibration, Machine, load_calibration, time_of
from .findings import Facts, compile_findings
from .job import Job, job_of, traced
from .result import Compiled, Memory
from .toolchain import Program, absent_mesh, compile_absent, compile_here, start_backends


@public
def compile(
    recipe: Recipe | Callable[[], nnx.Module] | nnx.Module,
    layout: Layout,
    *,
    inputs: Any = None,
    method: Method = None,
    calibration: str | os.PathLike[str] | None = None,
    show: bool = True,
) -> Compiled:
    """Returns a training step, compiled by the real compiler of the layout's devices.

    The step is the one of `sw.train_step`. Absent devices, as in `sw.mesh(…, on="v5p:4x8x8")` and
    `on="h100:8x8"`, need their compiler (`shardwise[tpu]`, `shardwise[gpu]`) but no accelerator;
    their compilations are cached on disk.

    Args:
        recipe: the recipe; or a model, or a function that builds it, to compile only the forward
            pass in evaluation mode.
        layout: its layout.
        inputs: for a model: the arguments of its call, in the form `sw.layout` takes; dim 0 of each
            array is split over the data axes.
        method: for a model: the method to call with `inputs`, in the form `sw.layout` takes.
        calibration: the file that `shardwise chips measure` wrote, to price the step by what was
            measured instead of by the shipped rates.
        show: whether to show on the terminal that a compiler is running.

    Raises:
        LayoutError: the layout has errors; nothing was compiled.
        ValueError: the mesh has no devices to compile for, the compiler is not installed, the
            topology does not exist, or the loss cannot be traced.

    Example:
        >>> import jax, optax, shardwise as sw
        >>> from flax import nnx
        >>> make = lambda: nnx.Linear(64, 64, use_bias=False, rngs=nnx.Rngs(0))
        >>> recipe = sw.Recipe(model=make, loss=lambda model, x: model(x).mean(),
        ...                    optimizer=optax.sgd(0.1), batch=jax.ShapeDtypeStruct((32, 64), "float32"))
        >>> layout = sw.layout(make, sw.mesh("data=8", on="cpu:8"), "dp")
        >>> compiled = sw.compile(recipe, layout)
        >>> compiled.memory.parameters
        16384
        >>> [(row.kind, row.axes) for row in compiled.collectives]
        [('all-reduce', ('data',))]
    """
    mesh = require_layout(layout).mesh
    if not isinstance(mesh, Mesh) and chips_of(mesh) is None:
        raise ValueError(
            f"the mesh {show_mesh(mesh)} has no devices to compile for: make it with "
            f"on='v5p:4x8x8', on='h100:8x8' or on='cpu:8'"
        )
    if isinstance(recipe, Recipe) and inputs is not None:
        raise ValueError("inputs= is only for a model: a recipe has its own batch")
    if isinstance(recipe, Recipe) and method is not None:
        raise ValueError("method= is only for a model: a recipe has its own loss")
    measured = load_calibration(calibration) if calibration is not None else None
    step_machine(mesh, measured)  # rejects a calibration of other chips before anything is compiled
    job = job_of(recipe, layout, inputs, method)
    try:
        program = _compiled(job, mesh, show)
    except _NeedsDevices:
        chips = chips_of(mesh)
        assert chips is not None and isinstance(mesh, AbstractMesh)
        there = absent_mesh(chips, mesh)
        there_job = job_of(recipe, layout.on(there), inputs, method)
        program = compile_here(traced(there_job).lower(), there, there_job.options)
    stand_in = bool(program.refused) and not program.hlo
    if stand_in:
        hlo, noise = _structure(recipe, layout, inputs, method, show)
        program = dataclasses.replace(
            program, hlo=hlo, lifetimes=None, noise=f"{program.noise}\n{noise}"
        )
    return _result(job, program, mesh, measured, stand_in=stand_in)


class _NeedsDevices(Exception):
    """The program is partitioned by functions of this process, for devices that must be known."""


def _compiled(job: Job, mesh: AnyMesh, show: bool) -> Program:
    chips = chips_of(mesh)
    if chips is None:
        assert isinstance(mesh, Mesh)
        return compile_here(traced(job).lower(), mesh, job.options)
    return _handed_over(job, chips, mesh, show)


def _handed_over(job: Job, chips: Chips | None, mesh: AnyMesh, show: bool) -> Program:
    lowered = lowered_job(job, chips)
    module = module_bytes(lowered.compiler_ir("stablehlo"))
    same = _without_callers(lowered.as_text(debug_info=True))
    options = job.options if chips is not None else {}
    return compile_absent(module, chips, mesh.shape, options, same, show=show)


def lowered_job(job: Job, chips: Chips | None) -> Any:
    """Returns a job lowered for the platform of some chips; for the CPU if there are none."""
    platforms = {"gpu": "cuda", "tpu": "tpu"}
    platform = platforms[chips.platform] if chips is not None else "cpu"
    start_backends()  # quietly, but what the user's code prints during tracing is kept
    stepped = traced(job)
    try:
        return stepped.lower(lowering_platforms=(platform,))
    except ValueError as error:
        if needs_devices(opened(stepped.jaxpr)[0]):
            raise _NeedsDevices from error
        raise


def lowered_step(recipe: Any, layout: Layout, inputs: Any, method: Method) -> tuple[Job, Any]:
    """Returns a job, and it lowered for the chips of its layout, which need not be present."""
    mesh = layout.mesh
    chips = chips_of(mesh)
    job = job_of(recipe, layout, inputs, method)
    if chips is None:
        return job, traced(job).lower()
    try:
        return job, lowered_job(job, chips)
    except _NeedsDevices:
        assert isinstance(mesh, AbstractMesh)
        there = job_of(recipe, layout.on(absent_mesh(chips, mesh)), inputs, method)
        return there, traced(there).lower()


def _reshards(job: Job, chips: Chips | None) -> list[Reshard]:
    try:
        return reshards(lowered_job(job, chips).compiler_ir("stablehlo"))
    except _NeedsDevices:
        return []


def _structure(
    recipe: Any, layout: Layout, inputs: Any, method: Method, show: bool
) -> tuple[str, str]:
    """Returns the step's HLO for CPU devices, which have no memory limit, and what was printed.

    If the compiler of the chips says that the step does not fit and leaves no program behind, this
    stands in for it: it is partitioned in the same way, but its buffers are not those of the chips.
    """
    mesh = layout.mesh
    bare = AbstractMesh(tuple(mesh.shape.values()), mesh.axis_names, axis_types=mesh.axis_types)
    try:
        seen = _handed_over(job_of(recipe, layout.on(bare), inputs, method), None, bare, show)
    except (ValueError, _NeedsDevices) as error:
        # That it does not fit is known, and is the result; only its causes are missing.
        why = str(error) or "it can be compiled in the process that has its devices alone"
        return (
            "",
            f"shardwise: the causes are not known, since the step is not compiled for CPU devices: {why}",
        )
    return seen.hlo, seen.noise


def _without_callers(text: str) -> str:
    """Returns StableHLO's text without the locations of the code that called `compile`.

    The same step, compiled from another line, is the same program.
    """
    defined = dict(re.findall(r"^(#loc\d*) = loc\((.*)\)$", text, re.M))
    begins = tuple(f'"{edge}"' for edge in EDGES)
    edges = {name for name, location in defined.items() if location.startswith(begins)}
    calls = [re.fullmatch(r"callsite\((#loc\d*) at (#loc\d*)\)", t) for t in defined.values()]
    outside = {call[2] for call in calls if call is not None and call[1] in edges}
    todo = list(outside)
    while todo:
        for name in re.findall(r"#loc\d*", defined.get(todo.pop(), "")):
            if name not in outside:
                outside.add(name)
                todo.append(name)
    return _renumbered(text, {name: defined[name] for name in defined if name not in outside})


def _renumbered(text: str, defined: dict[str, str]) -> str:
    """Returns StableHLO's text with these locations alone, numbered as the program names them.

    How many locations there are above the edge moves the numbers of all others.
    """
    numbers: dict[str, str] = {}
    named: list[str] = []

    def number(found: re.Match[str]) -> str:
        name = found[0]
        if name not in defined:
            return "#caller"
        if name not in numbers:
            numbers[name] = f"#loc{len(named)}"
            named.append(name)
        return numbers[name]

    lines = [line for line in text.splitlines() if not re.match(r"#loc\d* = ", line)]
    kept = [re.sub(r"#loc\d*", number, line) for line in lines]
    for name in named:  # which grows by what they name
        location = re.sub(r"#loc\d*", number, defined[name])
        kept.append(f"{numbers[name]} = loc({location})")
    return "\n".join(kept)


def _result(
    job: Job,
    program: Program,
    mesh: AnyMesh,
    calibration: Calibration | None,
    *,
    stand_in: bool = False,
) -> Compiled:
    chips = chips_of(mesh)
    if chips is not None:
        where, platform = str(chips), chips.platform
        capacity: int | None = chips.chip.capacity_bytes
    else:
        assert isinstance(mesh, Mesh)
        device = mesh.devices.flat[0]
        where, platform = device.device_kind, device.platform
        limits = device.memory_stats() if platform != "cpu" else None
        capacity = limits.get("bytes_limit") if limits else None
    if program.stats:
        memory = _memory(job, program.stats, capacity, platform)
    else:
        memory = _memory_in_words(job, program.refused, capacity)
    module = parse_hlo(program.hlo) if program.hlo else None
    hosts = host_of(mesh)
    rows = collectives(module, dict(mesh.shape), job.paths, hosts) if module else []
    total = memory.temporaries if memory else None
    lifetimes = _lifetimes(program, module) if module else None
    buffers = largest_buffers(module, job.paths, lifetimes, total) if module and lifetimes else []
    work = work_of(module) if module else None
    machine = step_machine(mesh, calibration) if program.stats and not program.refused else None
    time = time_of(module, machine, job.paths, tokens_of(job.batch)) if module and machine else None
    live = None
    if module and lifetimes and memory and not stand_in:
        code = program.stats.get("generated_code_size_in_bytes", 0) if platform == "tpu" else 0
        live = _live(job, module, lifetimes, memory, machine, code)
    compiled = Compiled(
        time=time,
        live=live,
        workspace_bound=workspace_bound(module) if module and platform == "gpu" else 0,
        machine=machine,
        paths=job.paths,
        chips=where,
        platform=platform,
        mesh=dict(mesh.shape),
        memory=memory,
        refused=program.refused,
        stand_in=stand_in and bool(program.hlo),
        collectives=tuple(rows),
        buffers=tuple(buffers),
        flops=work.flops if work else None,
        bytes_accessed=bytes_accessed(module) if module else None,
        findings=Findings(()),
        not_counted=work.not_counted if work else {},
        noise=program.noise,
        seconds=program.seconds,
        cached=program.cached,
        hlo=program.hlo,
        layout=job.layout,
    )
    moved = functools.cache(lambda: _reshards(job, chips))
    facts = Facts(job.layout, job.batch, job.accumulate, job.paths, module, moved)
    findings = Findings(tuple(compile_findings(compiled, facts)))
    return dataclasses.replace(compiled, findings=findings)


def host_of(mesh: AnyMesh) -> list[int] | None:
    """Returns the host (or the slice of TPUs) of each device in the mesh's order, if it is known."""
    chips = chips_of(mesh)
    if chips is not None:
        hosts = chips.slices if chips.platform == "tpu" else chips.topology[0]
        return [device * hosts // mesh.size for device in range(mesh.size)]
    if isinstance(mesh, Mesh):
        return [device.process_index for device in mesh.devices.flat]
    return None


def _lifetimes(program: Program, module: Module) -> Lifetimes:
    """Returns when each temporary is alive: as the compiler says, if it does."""
    if program.lifetimes is None:
        return modelled_lifetimes(module)
    return compiled_lifetimes(program.lifetimes)


def _live(
    job: Job,
    module: Module,
    lifetimes: Lifetimes,
    memory: Memory,
    machine: Machine | None,
    code: int,
) -> LiveMemory | None:
    shapes = [(leaf.shape, leaf.shard_shape) for leaf in job.layout.leaves]
    state = memory.parameters + memory.optimizer + memory.batch
    resident = {
        "parameters": (memory.parameters, "exact"),
        "optimizer": (memory.optimizer, "exact"),
        "batch": (memory.batch, "exact"),
        "outputs and padding": (
            max(0, memory.arguments + memory.outputs - memory.aliased - state),
            "compiled",
        ),
        "code": (code, "compiled"),
    }
    spent = machine.spent(module) if machine is not None else None
    kinds = Kinds.by_leaves(shapes)
    return live_of(module, lifetimes, resident, memory.peak, job.paths, kinds, spent)


def step_machine(mesh: AnyMesh, calibration: Calibration | None = None) -> Machine | None:
    """Returns the chips that a program is priced on, if there are rates for them.

    Raises:
        ValueError: the calibration is of other chips.
    """
    chips = chips_of(mesh)
    if chips is None and isinstance(mesh, Mesh):
        chip = gpu_of_kind(mesh.devices.flat[0].device_kind)
        if chip is not None:
            hosts = len({device.process_index for device in mesh.devices.flat})
            chips = Chips(chip, (hosts, mesh.size // hosts))
    if chips is None and calibration is not None:
        raise ValueError(
            f"the calibration is of {calibration.chip} ({calibration.device}), but the mesh has no "
            f"chips whose step times are modelled: name them, such as "
            f"{option('on', f'{calibration.chip}:1x8')}, or leave the calibration out"
        )
    return Machine(chips, dict(mesh.shape), calibration) if chips is not None else None


def tokens_of(batch: Any) -> int | None:
    """Returns how many tokens a global batch has: the elements of its first matrix of integers.

    Integers in more dims are labels of pixels or the like, not tokens.
    """
    for leaf in jax.tree.leaves(batch):
        if len(leaf.shape) == 2 and jnp.issubdtype(leaf.dtype, jnp.integer):
            return math.prod(leaf.shape)
    return None


def _memory_in_words(job: Job, refused: str, capacity: int | None) -> Memory | None:
    """Returns the memory that a compiler reports when it rejects a program, if it reports any."""
    units = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
    # Both are totals, with the arguments in them, whatever the first one calls itself: it equals the
    # sum of all allocations in the compiler's own report.
    total = re.search(r"HLO temporaries \(([\d.]+)([KMGT])\)|Used ([\d.]+)([KMGT]) of", refused)
    if total is None:
        return None
    number, unit = (text for text in total.groups() if text is not None)
    state = job.parameters_bytes + job.optimizer_bytes
    arguments = state + job.batch_bytes
    temporaries = max(0, int(float(number) * units[unit]) - arguments)
    return Memory(
        arguments=arguments,
        outputs=state,
        temporaries=temporaries,
        aliased=state,
        peak=arguments + temporaries,
        capacity=capacity,
        parameters=job.parameters_bytes,
        optimizer=job.optimizer_bytes,
        batch=job.batch_bytes,
        host_state=job.host_bytes,
    )


def _memory(job: Job, stats: dict[str, int], capacity: int | None, target_platform: str) -> Memory:
    arguments = stats["argument_size_in_bytes"]
    outputs = stats["output_size_in_bytes"]
    aliased = stats["alias_size_in_bytes"]
    temporaries = stats["temp_size_in_bytes"]
    host = stats.get("host_temp_size_in_bytes", 0)
    if target_platform == "tpu":
        # All allocations plus the program's code. The statistic for temporaries is none: older
        # versions report 0, and newer ones more than a device has, for programs that fit.
        total = stats.get("total_allocation_bytes") or stats.get("peak_memory_in_bytes", 0)
        if total:
            total += stats.get("generated_code_size_in_bytes", 0)
            temporaries = max(0, total - arguments - outputs + aliased)
    return Memory(
        arguments=arguments,
        outputs=outputs,
        temporaries=temporaries,
        aliased=aliased,
        peak=arguments + outputs - aliased + temporaries,
        capacity=capacity,
        parameters=job.parameters_bytes,
        optimizer=job.optimizer_bytes,
        batch=job.batch_bytes,
        host_state=job.host_bytes,
        host_temporaries=host,
    )
