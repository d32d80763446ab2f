"""A state to take away: as a command line and as Python, which give the same numbers."""

from __future__ import annotations

import json
import shlex
from typing import Any

from .._nnx import Recipe
from ..models import Decoder
from .source import Source, step_fields
from .state import State


def command_of(state: State, source: Source) -> str:
    """Returns the command line of a state, quoted for a shell; empty if there is none.

    Rules of paths are a file on the command line: it is given on standard input.
    """
    if not source.command:
        return ""
    # Arithmetic needs no chips, and `compile` does.
    name = "plan" if state.on == "none" else "compile"
    words = ["shardwise", name, state.target, "--mesh", state.axes, "--on", state.on]
    if state.strategy:
        words += ["--strategy", state.strategy]
    has_file = bool(state.rules or source.logical)
    split = any(part in state.strategy for part in ("fsdp", "zero"))
    options = [
        ("batch", state.batch),
        ("remat", state.remat),
        ("accumulate", state.accumulate),
        ("loss-chunks", state.loss_chunks),
        ("offload", state.offload),
        ("microbatches", state.microbatches),
        ("optimizer", state.optimizer),
        ("min-bytes", state.min_bytes if split else ""),
    ]
    for option, value in options:
        if value:
            words += [f"--{option}", str(value)]
    words += source.options
    if source.calibration is not None:
        words += ["--calibration", source.calibration]
    if not has_file:
        return shlex.join(words)
    return f"{shlex.join([*words, '--rules', '/dev/stdin'])} <<'RULES'\n{rules_text(state, source)}RULES"


def rules_text(state: State, source: Source) -> str:
    """Returns the rules of a state as a rules file."""
    lines = []
    if source.logical:
        lines.append("[logical]")
        for name, axes in source.logical.items():
            axes = [] if axes is None else axes
            lines.append(
                f"{json.dumps(str(name))} = {json.dumps(axes if isinstance(axes, str) else list(axes))}"
            )
    for pattern, spec in state.rules:
        lines += ["[[rules]]", f"{json.dumps(pattern)} = {json.dumps(spec)}"]
    return "".join(f"{line}\n" for line in lines)


def python_of(state: State, source: Source, found: Any) -> str:
    """Returns a program that makes the same layout, and compiles it if there are chips."""
    is_recipe = isinstance(found, Recipe)
    named = source.command and ":" not in state.target
    lines = ["import shardwise as sw"]
    if state.rules:
        lines.append("from jax.sharding import PartitionSpec as P")
    body = _named(state, found) if named else _loaded(state, source, found)
    name = "recipe" if is_recipe else "model"
    body.append(f'mesh = sw.mesh("{state.axes}", on="{state.on}")')
    rules = [f"{{{json.dumps(pattern)}: {spec}}}" for pattern, spec in state.rules]
    split = any(part in state.strategy for part in ("fsdp", "zero"))
    if state.strategy:
        rules.append(json.dumps(state.strategy))
    more = ", inputs=(recipe.batch,)" if named else ""
    if source.logical:
        more += f", logical={dict(source.logical)!r}"
    if state.min_bytes and split:
        body.append(f"# --min-bytes {state.min_bytes} is sw.fsdp(min_bytes=...) in Python")
    shown = rules[0] if len(rules) == 1 else f"[{', '.join(rules)}]"
    given = f", {shown}" if rules else ""
    body.append(f"layout = sw.layout({name}, mesh{given}{more})")
    body.append("print(sw.check(layout))")
    if state.on != "none" and is_recipe:
        body.append(f"print(sw.compile({name}, layout))")
    imports, rest = (
        [line for line in body if _is_import(line)],
        [b for b in body if not _is_import(b)],
    )
    return "\n".join([*sorted({*imports, *lines}, key=_order), "", *rest]) + "\n"


def _is_import(line: str) -> bool:
    return line.startswith(("import ", "from "))


def _order(line: str) -> tuple[int, str]:
    standard = line in ("import dataclasses", "import runpy")
    return (0 if standard else 1, line.split()[1])


def _named(state: State, found: Any) -> list[str]:
    """Returns the lines that make the recipe of a published shape."""
    remat = None if state.remat == "none" else state.remat or "nothing_saveable"
    config = f"dataclasses.replace(models.CONFIGS[{json.dumps(state.target)}], remat={remat!r}"
    config += f", microbatches={state.microbatches})" if state.microbatches else ")"
    shape = tuple(found.batch.shape) if isinstance(found, Recipe) else (8, 2048)
    more = "".join(
        f", {name}={value!r}"
        for name, value in step_fields(state).items()
        if name not in ("remat", "microbatches")
    )
    return [
        "import dataclasses",
        "import jax",
        "import optax",
        "from flax import nnx",
        "from shardwise import models",
        f"config = {config}",
        "recipe = sw.Recipe(",
        "    model=lambda: models.Decoder(config, rngs=nnx.Rngs(0)),",
        "    loss=models.next_token_loss,",
        f"    optimizer=optax.{state.optimizer or 'adamw'}(1e-4),",
        f'    batch=jax.ShapeDtypeStruct({shape}, "int32"),',
        f'    compute_dtype="bfloat16"{more},',
        ")",
    ]


def _loaded(state: State, source: Source, found: Any) -> list[str]:
    """Returns the lines that load a target and change its step."""
    place, _, name = state.target.rpartition(":")
    variable = "recipe" if isinstance(found, Recipe) or found is None else "model"
    if not source.command:
        lines = [f"# {variable} is the one that the studio was opened on"]
    elif place.endswith(".py"):
        lines = [
            "import runpy",
            f"{variable} = runpy.run_path({json.dumps(place)})[{json.dumps(name)}]",
        ]
    else:
        first, _, rest = name.partition(".")
        lines = [
            f"from {place} import {first}",
            f"{variable} = {first}{'.' + rest if rest else ''}",
        ]
    if not isinstance(found, Recipe):
        return lines
    fields = step_fields(state)
    changes = [
        f"{key}={value!r}" for key, value in fields.items() if key not in ("remat", "microbatches")
    ]
    if state.batch:
        shapes = _shapes(found.batch)
        changes.append(f"batch={shapes}")
        if "jax." in shapes:
            lines.insert(0, "import jax")
    if state.optimizer:
        lines.insert(0, "import optax")
        changes.append(f"optimizer=optax.{state.optimizer}(1e-4)")
    if "remat" in fields or "microbatches" in fields:
        changes += _changed_model(found, fields, lines)
    if changes:
        lines.insert(0, "import dataclasses")
        lines.append(f"recipe = dataclasses.replace(recipe, {', '.join(changes)})")
    return lines


def _changed_model(found: Recipe, fields: dict[str, Any], lines: list[str]) -> list[str]:
    """Returns the changes of a recipe for remat and microbatches, which a Decoder has itself."""
    from .._search import Abilities

    if not isinstance(Abilities(found).model, Decoder):
        return [f"remat={found.remat!r}"] if "remat" in fields else []
    lines += ["make = recipe.model", "def changed():", "    model = make()"]
    lines += [
        f"    model.{key} = {fields[key]!r}" for key in ("remat", "microbatches") if key in fields
    ]
    lines.append("    return model")
    return ["model=changed", "remat=None"]


def _shapes(batch: Any) -> str:
    """Returns a batch as Python."""
    if hasattr(batch, "shape"):
        return f'jax.ShapeDtypeStruct({tuple(batch.shape)}, "{batch.dtype}")'
    if isinstance(batch, dict):
        return "{" + ", ".join(f"{key!r}: {_shapes(value)}" for key, value in batch.items()) + "}"
    if isinstance(batch, list | tuple):
        inner = ", ".join(_shapes(value) for value in batch)
        return f"[{inner}]" if isinstance(batch, list) else f"({inner},)"
    return repr(batch)
