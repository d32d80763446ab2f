"""The command `explain`: the page of a finding's code."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Annotated

import typer

from ..._base import is_live, stdout, tell, tell_json
from ..options import Format, FormatOption, command

# The wheel has its own copy; in a source checkout the pages are part of the docs.
_PLACES = (Path(__file__).parents[2] / "codes", Path(__file__).parents[4] / "docs" / "codes")


@command(
    help="""Explain a finding's code: what it finds, why it is bad, an example, what to do instead.

Without a code, list all codes. To see what decided a leaf's spec, use plan --explain PATH.

Examples:

\b
  shardwise explain SW104
  shardwise explain --format json

Exit status: 0 explained, 2 there is no such code.""",
)
def explain(
    code: Annotated[
        str | None, typer.Argument(metavar="[CODE]", help="SW104 or its name, indivisible-dim.")
    ] = None,
    format: FormatOption = Format.text,
) -> None:
    """Prints the page of a code."""
    if code is None:
        _list(format)
        return
    from ..._check import CODES

    found = find_code(code)
    page = read_page(found)
    name, severity = CODES[found]
    if format is Format.json:
        tell_json([{"code": found, "name": name, "severity": severity, "page": page}])
    elif is_live(stdout()):
        from rich.console import Console
        from rich.markdown import Markdown

        Console(file=stdout()).print(Markdown(page))
    else:
        tell(page.rstrip("\n"))


def find_code(given: str) -> str:
    """Returns the code with this code or readable name.

    Raises:
        ValueError: there is no such code.
    """
    from ..._check import CODES, nearest_codes

    names = {name: code for code, (name, _) in CODES.items()}
    word = given.strip().strip("[]")
    if word.upper() in CODES:
        return word.upper()
    if word.lower() in names:
        return names[word.lower()]
    near = nearest_codes(word)
    near += difflib.get_close_matches(word.lower(), names, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    hint += "shardwise explain lists all codes"
    leaf = "; to explain a leaf, use shardwise plan --explain PATH" if "." in word else ""
    raise ValueError(f"{given!r} is not a code: {hint}{leaf}")


def read_page(code: str) -> str:
    """Returns the page of a code, as Markdown."""
    for place in _PLACES:
        if (place / f"{code}.md").is_file():
            return (place / f"{code}.md").read_text(encoding="utf-8")
    raise ValueError(f"the page of {code} is missing from this installation of shardwise")


def _list(format: Format) -> None:
    from ..._base import text_table
    from ..._check import CODES

    if format is Format.json:
        tell_json(
            [
                {"code": code, "name": name, "severity": severity, "page": read_page(code)}
                for code, (name, severity) in CODES.items()
            ]
        )
        return
    rows = [
        (code, severity, name, _first_sentence(read_page(code)))
        for code, (name, severity) in CODES.items()
    ]
    table = text_table(("code", "severity", "name", "finds"), rows, right=())
    tell(f"{table}\n\nshardwise explain SW104 prints the page of a code, with an example")


def _first_sentence(page: str) -> str:
    text = page.partition("## What it finds")[2].strip().split("\n\n")[0]
    return re.split(r"(?<=[.])\s", " ".join(text.split()).replace("`", ""))[0]
