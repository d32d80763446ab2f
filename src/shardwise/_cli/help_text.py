"""How the help is laid out: commands and options in groups, a first session, exit statuses."""

from __future__ import annotations

from typing import Any

import typer.core

GROUPS = {
    "Plan": ("plan", "check", "compile", "search", "transfer", "report", "studio"),
    "Run": ("train", "checkpoints", "weights", "generate", "launch"),
    "Learn": ("demo", "learn"),
    "Look up": ("explain", "models", "chips", "doctor"),
}
MODEL, STEP, OUTPUT = "The model on its mesh", "The step", "Output"

ABOUT = """Plan, check, compile and run the sharding of Flax NNX models on JAX, before renting a chip.

A first session, with models that ship with the package and without any accelerator: show what
every device would hold; see what is wrong with a mesh that is too wide; find out whether the model
fits on eight TPUs, and what they would send each other (their compiler comes with
"shardwise[tpu]"); train a recipe on eight virtual CPU devices, with checkpoints:

\b
  shardwise plan shardwise.examples.decoder:make --mesh data=2,model=4 --strategy fsdp+tensor
  shardwise check shardwise.examples.decoder:make --mesh data=2,model=16 --strategy tensor
  shardwise compile shardwise.examples.decoder:make --mesh data=2,model=4 --on v5e:2x4 \\
    --strategy fsdp+tensor --inputs "int32[8,128]"
  shardwise train shardwise.examples.text:recipe --mesh data=8 --on cpu:8 --strategy fsdp \\
    --steps 2 --checkpoints runs/a"""

ENDING = """Exit status: 0 clean, 1 findings or does not fit, 2 could not run, with one sentence on stderr.

shardwise COMMAND --help shows examples of each command. docs/reference/json.md describes the output
of --format json. NO_COLOR=1 turns colours off.

For the page of a finding's code, run shardwise explain SW104. The documentation is in docs/ of the
source tree; start with docs/index.md."""


class Group(typer.core.TyperGroup):
    """The root command, whose help lists the commands in groups."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Returns the commands' names, in the order of their groups."""
        known = [name for names in GROUPS.values() for name in names]
        return sorted(self.commands, key=lambda n: known.index(n) if n in known else len(known))

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Writes a section for each group."""
        left = self.list_commands(ctx)
        for title, names in [*GROUPS.items(), ("More", tuple(left))]:
            found = [name for name in names if name in left]
            left = [name for name in left if name not in found]
            rows = [(name, self.commands[name].get_short_help_str(100)) for name in found]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


class Command(typer.core.TyperCommand):
    """A command whose help lists its options in groups."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Writes a section for the arguments and one for each group of options."""
        groups: dict[str, list[Any]] = {"Arguments": []}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                is_argument = param.param_type_name == "argument"
                title = getattr(param, "rich_help_panel", None) or "Options"
                groups.setdefault("Arguments" if is_argument else title, []).append(record)
        for title, rows in groups.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)
