"""One page that shows a layout and its compilation, as a file or inline in a notebook."""

from __future__ import annotations

import dataclasses
import html
import json
import os
from collections.abc import Sequence
from importlib import metadata, resources
from typing import Any

from .._base import public, show_type, visible, write_atomically
from .._compile import Compiled, Plan
from .._layout import Layout
from .._mesh import chips_of, show_mesh
from .data import plan_data

# In the order in which they are concatenated; each uses only those before it.
_STYLES = ("page.css", "pictures.css")
_SCRIPTS = (
    "data.js", "lists.js", "theme.js", "cards.js", "grid.js", "tree.js", "treemap.js", "leaf.js", "model.js", "hardware.js", "mesh.js",
    "live.js", "memory.js", "timeline.js", "time.js", "traffic.js", "findings.js", "summary.js", "compare.js", "link.js", "side.js", "main.js",
)  # fmt: skip
# The page loads nothing, and the browser enforces it.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
_INLINE_HEIGHT = 720


@public
@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Report:
    """One self-contained HTML page. Returned by `layout.report()` and `compiled.report()`.

    A notebook displays it inline.

    Attributes:
        title: what it shows.
        html: the page.
    """

    title: str
    html: str

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the page to a file, which any browser opens from disk."""
        write_atomically(path, self.html)

    def __repr__(self) -> str:
        """Returns its title and size; the page itself is for a browser."""
        return f"Report({self.title!r}, {len(self.html):,} characters: save(path) and open it)"

    def _repr_html_(self) -> str:
        # An iframe keeps the styles of the page and of the notebook apart.
        return (
            f'<iframe srcdoc="{html.escape(self.html)}" title="{html.escape(self.title)}" '
            f'style="width:100%;height:{_INLINE_HEIGHT}px;border:1px solid #8886"></iframe>'
        )


def report_of(shown: Layout | Compiled, against: Layout | Compiled | None = None) -> Report:
    """Returns the page of a layout or a compilation, alone or next to another one."""
    plans = []
    for one in [shown] if against is None else [shown, against]:
        if isinstance(one, Compiled):
            plans.append((_name(one), Plan(one.layout, one)))
        elif isinstance(one, Layout):
            plans.append((_name(one), Plan(one)))
        else:
            raise ValueError(f"against is {show_type(one)}: give a layout or a compilation")
    return report_of_plans(plans)


def _name(one: Layout | Compiled) -> str:
    if isinstance(one, Compiled):
        axes = ",".join(f"{axis}={size}" for axis, size in one.mesh.items())
        return f"{axes} on {one.chips}"
    chips = chips_of(one.mesh)
    return f"{show_mesh(one.mesh)} on {chips}" if chips is not None else show_mesh(one.mesh)


def report_of_plans(plans: Sequence[tuple[str, Plan]], asks: Sequence[str] = ()) -> Report:
    """Returns the page of one plan, or of two to compare.

    Args:
        plans: each with its name.
        asks: the command that compiles each; without them, the page names the call in Python.
    """
    asks = asks or ["sw.compile(recipe, layout).report()"] * len(plans)
    title = " against ".join(name for name, _ in plans)
    names = [name for name, _ in plans]
    if len(set(names)) < len(names):
        names = ["this", "the other"]
    found = [
        plan_data(name, plan, ask) for name, (_, plan), ask in zip(names, plans, asks, strict=True)
    ]
    data = {"title": title, "version": metadata.version("shardwise"), "sides": found}
    return page_of("page.html", title, data, _STYLES, _SCRIPTS)


def page_of(
    template: str, title: str, data: Any, styles: Sequence[str], scripts: Sequence[str]
) -> Report:
    """Returns a page made of assets, with its data inside.

    Args:
        template: the file of the page, with a comment where each part goes.
        title: what the page shows.
        data: plain data, for JSON.
        styles: files of CSS, in order.
        scripts: files of JavaScript, in order.
    """
    # Only "<" could end the script element early.
    text = json.dumps(_visible(data), separators=(",", ":")).replace("<", "\\u003c")
    parts = {
        "title": html.escape(visible(title)),
        "policy": _POLICY,
        "style": "\n".join(asset(name) for name in styles),
        "script": "\n".join(asset(name) for name in scripts),
        "data": text,
    }
    page = asset(template)
    for name, part in parts.items():
        page = page.replace(f"<!--{name}-->", part, 1)
    return Report(title, page)


def _visible(data: Any) -> Any:
    """Returns plain data whose texts have no control characters, whatever file they are from."""
    if isinstance(data, str):
        return visible(data)
    if isinstance(data, dict):
        return {_visible(name): _visible(value) for name, value in data.items()}
    return [_visible(value) for value in data] if isinstance(data, list | tuple) else data


def asset(name: str) -> str:
    """Returns the text of one of the files that pages are made of."""
    return (resources.files("shardwise._report") / "assets" / name).read_text(encoding="utf-8")
