"""What the site has that docs/ has not: files that its pages link to, and the commands' own help.

The pages are read where they lie, too, so their links are those of the repository; a link out of
docs/, such as to benchmarks/memory.md, brings that file into the site.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
COMMANDS = "<!-- The site shows the help of every command here. -->"
LINK = re.compile(r"(\]\()((?:\.\./)+)([^)#\s]+)")


def on_files(files: Any, config: Any) -> Any:
    """Returns the site's files with those outside docs/ that its pages link to."""
    wanted = set()
    for file in files.documentation_pages():
        for _, up, path in LINK.findall(file.content_string):
            if _leaves(file.src_uri, up) and (ROOT / path).is_file():
                wanted.add(path)
    for path in sorted(wanted):
        files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Returns a page's text with links out of docs/ turned into links within the site."""

    def inside(match: re.Match[str]) -> str:
        start, up, path = match.groups()
        return f"{start}{up[3:] if _leaves(page.file.src_uri, up) else up}{path}"

    if "/" not in page.file.src_uri:
        page.meta["hide"] = ["navigation"]  # a column with one entry, the page itself
    if COMMANDS in markdown:
        markdown = markdown.replace(COMMANDS, _commands())
    return LINK.sub(inside, markdown)


def _leaves(uri: str, up: str) -> bool:
    return up.count("../") > uri.count("/")


@functools.cache
def _commands() -> str:
    """Returns a section for each command, with what `--help` prints."""
    import typer

    from shardwise._cli.options import app

    parts = []

    def add(command: Any, name: str, parent: Any = None) -> None:
        # As wide as on a terminal of 80 columns, whatever the terminal of this build is.
        wide = {"terminal_width": 78} if parent is None else {}
        with command.make_context(
            name, [], parent=parent, resilient_parsing=True, **wide
        ) as context:
            text = command.get_help(context).rstrip()
            parts.append(f"## {context.command_path}\n\n```text\n{text}\n```")
            for each in getattr(command, "commands", {}) and command.list_commands(context):
                add(command.commands[each], each, context)

    add(typer.main.get_command(app), "shardwise")
    return "\n\n".join(parts)
