"""The files of the page: the studio's own, and those of the report that it shares."""

from __future__ import annotations

from importlib import resources

from .._report import asset

# In the order in which they are concatenated; each uses only those before it.
_SHARED = (
    "data.js", "lists.js", "theme.js", "cards.js", "grid.js", "tree.js", "treemap.js", "leaf.js", "model.js",
    "hardware.js", "mesh.js", "live.js", "memory.js", "timeline.js", "time.js", "traffic.js", "findings.js", "front.js",
)  # fmt: skip
_OWN = ("talk.js", "controls.js", "figures.js", "views.js", "pins.js", "explore.js", "studio.js")
_STYLES = ("page.css", "pictures.css", "search.css")


def page_files() -> dict[str, tuple[str, str]]:
    """Returns each file's text and media type, by its name in an address; the page is ``."""
    script = "\n".join([*(asset(name) for name in _SHARED), *(own_asset(name) for name in _OWN)])
    style = "\n".join([*(asset(name) for name in _STYLES), own_asset("studio.css")])
    return {
        "": (own_asset("studio.html"), "text/html"),
        "studio.js": (f'"use strict";\n(() => {{\n{script}\n}})();\n', "text/javascript"),
        "studio.css": (style, "text/css"),
        "icon.svg": (own_asset("icon.svg"), "image/svg+xml"),
    }


def own_asset(name: str) -> str:
    """Returns the text of one of the studio's own files."""
    return (resources.files("shardwise._studio") / "assets" / name).read_text(encoding="utf-8")
