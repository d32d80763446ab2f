"""The command `check`: every problem with a layout."""

from __future__ import annotations

import enum
from typing import Annotated

import typer

from ..._base import tell
from ..help_text import OUTPUT
from ..laid_out import lay_out
from ..options import (
    TARGETS,
    AllowOption,
    InputsOption,
    MeshOption,
    MethodOption,
    MinBytesOption,
    OnOption,
    RulesOption,
    StrategyOption,
    Target,
    command,
    parse_allow,
)
from .plan import cite


class CheckFormat(enum.StrEnum):
    """How findings are printed."""

    text = "text"
    concise = "concise"
    json = "json"
    github = "github"


@command(
    help=f"""Check a layout and report every problem at once, with its code, path, numbers and help.

For the page of a code, run shardwise explain SW104.

{TARGETS}

Examples:

\b
  shardwise check shardwise.examples.decoder:make --mesh data=2,model=4 --strategy fsdp+tensor

\b
  shardwise check model.py:make --mesh data=8,model=4 --rules rules.toml --format github

\b
  shardwise check model.py:make --mesh data=8 --allow "SW105:embed.**"

Exit status: 0 clean, 1 findings, 2 could not run."""
)
def check(
    target: Target,
    mesh: MeshOption,
    on: OnOption = "none",
    strategy: StrategyOption = None,
    min_bytes: MinBytesOption = None,
    rules: RulesOption = None,
    inputs: InputsOption = None,
    method: MethodOption = None,
    allow: AllowOption = None,
    format: Annotated[
        CheckFormat,
        typer.Option(
            "--format",
            help="Print findings in full, one per line, as JSON (docs/reference/json.md), or as "
            "GitHub Actions annotations.",
            rich_help_panel=OUTPUT,
        ),
    ] = CheckFormat.text,
) -> None:
    """Checks a layout and prints its findings."""
    from ..._check import check as check_layout

    allowed = parse_allow(allow or [])
    _, layout = lay_out(
        target, mesh, on, strategy, rules, inputs, method=method, min_bytes=min_bytes
    )
    findings = check_layout(layout, allow=allowed)
    match format:
        case CheckFormat.json:
            tell(findings.to_json())
        case CheckFormat.concise:
            for finding in findings:
                tell(finding.concise)
        case CheckFormat.github:
            for finding in findings:
                tell(finding.github)
        case CheckFormat.text:
            tell(str(findings))
            cite(findings)
    raise typer.Exit(1 if findings else 0)
