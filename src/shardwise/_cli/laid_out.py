"""A target as the options ask for it: laid out, estimated, planned, compiled.

JAX and Flax are imported inside functions: help and completion need neither.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from .._base import claim_stdout, working

if TYPE_CHECKING:
    from .._compile import Compiled, Plan
    from .._estimate import Estimate
    from .._layout import Layout
    from .published import StepOptions
    from .rules_file import RulesFile


def lay_out(
    target: str,
    mesh: str | None,
    on: str,
    strategy: str | None,
    rules: str | None,
    inputs: str | None,
    step: StepOptions | None = None,
    *,
    method: str | None = None,
    min_bytes: str | None = None,
    saved: str | None = None,
) -> tuple[Any, Layout]:
    """Returns what the target names, and its layout."""
    from .published import StepOptions

    if saved is not None:
        given = {
            "--mesh": mesh, "--strategy": strategy, "--rules": rules, "--min-bytes": min_bytes,
        }  # fmt: skip
        extra = next((name for name, value in given.items() if value is not None), None)
        if extra is not None:
            raise ValueError(f"{extra} conflicts with --layout {saved}, which has its own")
    elif mesh is None:
        raise ValueError("Missing option '--mesh': give axes and sizes, such as data=2,model=4")
    if method is not None and inputs is None:
        raise ValueError(f"--method {method} needs --inputs, the arguments of its call")
    with working(f"laying out {target}"):
        return _lay_out(
            target, mesh, on, strategy, rules, inputs, step or StepOptions(), method, min_bytes, saved,
        )  # fmt: skip


def _lay_out(
    target: str,
    mesh: str | None,
    on: str,
    strategy: str | None,
    rules: str | None,
    inputs: str | None,
    step: StepOptions,
    method: str | None,
    min_bytes: str | None,
    saved: str | None,
) -> tuple[Any, Layout]:
    import jax

    from .._layout import layout, load_layout
    from .._mesh import show_mesh
    from .published import is_named, load_step
    from .rules_file import read_rules
    from .target import contained, parse_inputs

    # What the user's code prints must not mix with our output.
    claim_stdout()
    lock = load_layout(saved) if saved is not None else None
    # The mesh comes first: importing the target may start a backend with too few devices.
    if on != "here":
        # No accelerator is needed: without this, JAX looks for one and warns about it.
        jax.config.update("jax_platforms", "cpu")
    device_mesh = make_mesh(show_mesh(lock.mesh) if lock is not None else mesh or "", on)
    shapes = parse_inputs(inputs) if inputs is not None else None
    file = read_rules(rules) if rules is not None else None
    best = strategy == "best"
    named = named_strategy(file, None if best else strategy, min_bytes)
    if best and (named or file is not None):
        raise ValueError("--strategy best cannot be combined with --rules: name a strategy")
    all_rules = [*(file.rules if file is not None else []), *named]
    logical = file.logical if file is not None else None
    found = load_step(target, step, devices=device_mesh.size)
    if lock is not None and saved is not None:
        with contained(f"making the model of {target}"):
            found = _with_saved_step(found, step, saved)
            return found, _matched(target, found, lock.on(device_mesh), saved)
    if is_named(target):
        # Its model takes the batch unchanged, so it can always be traced.
        shapes = shapes or (found.batch,)
    with contained(f"making the model of {target}"):
        if best:
            return found, _best(target, found, device_mesh, inputs=shapes, method=method)
        # A recipe without --inputs is traced through its loss.
        planned = layout(
            found, device_mesh, all_rules, logical=logical, inputs=shapes, method=method
        )
    return found, planned


def _with_saved_step(found: Any, step: StepOptions, saved: str) -> Any:
    """Returns a recipe with what a lockfile says of its step, except what the options say."""
    from .._layout import read_step
    from .._nnx import Recipe
    from .._search import with_step

    fields = read_step(saved)
    given = {name: getattr(step, name) for name in fields if getattr(step, name) is not None}
    kept = {name: value for name, value in fields.items() if name not in given}
    if not fields or not isinstance(found, Recipe):
        return found
    if kept:
        typer.echo(f"note: {saved} sets {_show_step(kept)}", err=True)
    for name, value in given.items():
        said, own = _show_step({name: value}), _show_step({name: fields[name]})
        if said != own:
            typer.echo(f"note: {said} is used in place of {own} in {saved}", err=True)
    return with_step(found, kept)


def _show_step(fields: dict[str, Any]) -> str:
    """Returns fields of a step as options."""
    return " ".join(
        f"--{name.replace('_', '-')} {'none' if value in (None, '') else value}"
        for name, value in fields.items()
    )


def _matched(target: str, found: Any, lock: Layout, saved: str | None) -> Layout:
    """Returns a saved layout as that of the target's model."""
    from .._check import LayoutError, matched
    from .._nnx import Recipe, abstract_model

    abstract = abstract_model(found.model if isinstance(found, Recipe) else found, lock.mesh)
    try:
        return matched(lock, abstract.state)
    except LayoutError as error:
        raise ValueError(
            f"--layout {saved} is not a layout of {target}: {error.findings[0].concise}"
        ) from error


def _best(target: str, found: Any, mesh: Any, **options: Any) -> Layout:
    """Returns the layout of the strategy with the fastest step, and says which it is."""
    from .._base import show_seconds
    from .._nnx import Recipe
    from .._search import rank_strategies

    if not isinstance(found, Recipe):
        raise ValueError(
            f"--strategy best needs a recipe, and target {target!r} is not one: a model alone has "
            f"no step to time"
        )
    (name, layout, estimate), *others = rank_strategies(found, mesh, **options)
    over = f", of {len(others) + 1} strategies" if others else ""
    fits = {True: "", False: "; it does not fit", None: "; it may fit"}[estimate.fits]
    typer.echo(
        f"note: the best strategy is {name}: {show_seconds(estimate.seconds)} per step "
        f"(modelled){over}{fits}",
        err=True,
    )
    return layout


def named_strategy(
    file: RulesFile | None, strategy: str | None, min_bytes: str | None
) -> list[Any]:
    """Returns the strategy named in the rules file or the options, as a list of one or none."""
    from .._base import parse_bytes
    from .._layout import Named

    if file is not None and file.strategy is not None and strategy is not None:
        raise ValueError(
            f"--strategy {strategy} conflicts with the rules file, which sets strategy = "
            f"{file.strategy!r}: give one of them"
        )
    if file is not None and file.min_bytes is not None and min_bytes is not None:
        raise ValueError(
            f"--min-bytes {min_bytes} conflicts with the rules file, which sets min_bytes: give one "
            f"of them"
        )
    name = strategy if strategy is not None else file.strategy if file is not None else None
    size = file.min_bytes if file is not None else None
    option = "min_bytes in the rules file"
    if min_bytes is not None:
        option = "--min-bytes"
        try:
            size = parse_bytes(min_bytes)
        except ValueError as error:
            raise ValueError(f"--min-bytes {error}") from error
    if size is not None and not any(part in (name or "") for part in ("fsdp", "zero")):
        has = f"the strategy is {name}" if name is not None else "no strategy is given"
        raise ValueError(f"{option} applies only to fsdp, zero1 and zero2, but {has}")
    return [Named(name, size)] if name is not None else []


def make_mesh(mesh: str, on: str) -> Any:
    """Returns the mesh of the options."""
    from .._compile import start_backends
    from .._mesh import mesh as new_mesh

    if on == "here":
        start_backends()
        return new_mesh(mesh)
    return new_mesh(mesh, on=on)


def require_calibration(calibration: str | None, layout: Layout) -> None:
    """Raises if a calibration cannot be read, or is not of the chips of a layout."""
    from .._compile import step_machine
    from .._time import load_calibration

    if calibration is not None:
        step_machine(layout.mesh, load_calibration(calibration))


def require_devices(on: str) -> None:
    """Raises if there are no devices to compile for."""
    if on == "none":
        raise ValueError(
            "--on none has no devices to compile for: name chips, such as --on v5p:4x8x8 or "
            "--on h100:8x8, or virtual devices, such as --on cpu:8"
        )


def compile_target(
    target: str,
    found: Any,
    layout: Layout,
    inputs: str | None,
    method: str | None = None,
    calibration: str | None = None,
    *,
    note: bool = True,
) -> Compiled:
    """Returns what `lay_out` returned, compiled.

    Args:
        target: the target.
        found: what it names.
        layout: its layout.
        inputs: the arguments of a model's call.
        method: the method to call with them.
        calibration: the file of measured rates.
        note: whether to say on stderr that `check` would find something, which a compilation does
            not show.

    Raises:
        ValueError: the layout has errors, or a model's inputs are missing.
    """
    from .._base import count
    from .._check import LayoutError, check
    from .._compile import compile as compile_step
    from .._mesh import chips_of
    from .._nnx import Recipe
    from .target import parse_inputs

    if not isinstance(found, Recipe) and inputs is None:
        raise ValueError(
            f"target {target!r} is a model: give the arguments of its call, such as "
            f"--inputs 'int32[8,128]', or name a Recipe to compile a training step"
        )
    # A recipe has its own batch: inputs only affect its layout.
    shapes = None if isinstance(found, Recipe) or inputs is None else parse_inputs(inputs)
    chips = chips_of(layout.mesh)
    where = f" for {chips}" if chips is not None else ""
    try:
        with working(f"compiling {target}{where}"):
            compiled = compile_step(
                found,
                layout,
                inputs=shapes,
                method=method if shapes else None,
                calibration=calibration,
                show=False,
            )
    except LayoutError as error:
        more = len(error.findings) - 1
        rest = f"; shardwise check shows {more} more" if more else ""
        raise ValueError(
            f"not compiled because the layout has errors: {error.findings[0].concise}{rest}"
        ) from error
    warnings = check(layout).warnings if note else ()
    if warnings:
        codes = ", ".join(dict.fromkeys(finding.code for finding in warnings))
        them = "it" if len(warnings) == 1 else "them"
        typer.echo(
            f"note: the layout has {count(len(warnings), 'warning')} ({codes}): shardwise check "
            f"shows {them}",
            err=True,
        )
    return compiled


def estimate_target(
    found: Any,
    layout: Layout,
    inputs: str | None,
    method: str | None = None,
    calibration: str | None = None,
) -> tuple[Estimate | None, str]:
    """Returns the estimate of what `lay_out` returned, or None and why there is none.

    Both are empty where nobody expects one: without chips, or for a model without inputs.
    """
    from .._estimate import estimate
    from .._mesh import chips_of
    from .._nnx import Recipe
    from .target import parse_inputs

    if chips_of(layout.mesh) is None:
        return None, ""
    if not (isinstance(found, Recipe) or inputs):
        why = "--calibration prices the call of a model, whose arguments --inputs gives"
        return None, why if calibration is not None else ""
    shapes = None if isinstance(found, Recipe) or inputs is None else parse_inputs(inputs)
    try:
        with working("estimating a step"):
            estimated = estimate(
                found,
                layout,
                inputs=shapes,
                method=method if shapes else None,
                calibration=calibration,
            )
            return estimated, ""
    except ValueError as error:
        return None, str(error)


def plan_target(
    target: str,
    found: Any,
    layout: Layout,
    inputs: str | None,
    method: str | None = None,
    calibration: str | None = None,
    *,
    compile: bool,
    allow: dict[str, list[str]] | None = None,
) -> Plan:
    """Returns the plan of what `lay_out` returned, also compiled if asked and free of errors."""
    import dataclasses

    from .._compile import plan_of

    plan = plan_of(found, layout)
    if allow:
        plan = dataclasses.replace(plan, allow=allow)
    if not compile or plan.findings.errors:
        return plan
    compiled = compile_target(target, found, layout, inputs, method, calibration, note=False)
    return dataclasses.replace(plan, compiled=compiled)
