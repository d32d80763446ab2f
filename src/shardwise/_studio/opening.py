"""Opens a studio: from the command line until Ctrl-C, or inline in a notebook."""

from __future__ import annotations

import contextlib
import dataclasses
import html
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from flax import nnx

from .._base import cleaned_up_on_signal, public, show_type
from .._layout import Layout
from .._mesh import chips_of, show_spec
from .._nnx import Recipe
from .source import Source, applied
from .state import State, parse_query

if TYPE_CHECKING:
    from .server import Running

_INLINE_HEIGHT = 860
_NEEDS = ("starlette", "uvicorn")


def open_studio(
    source: Source,
    *,
    tell: Callable[[str], None],
    browse: bool = True,
    port: int = 0,
    idle_minutes: float = 30,
) -> str:
    """Runs a studio until it is interrupted, or no page was heard of for long; returns why it ended.

    Args:
        source: what it is about.
        tell: is called with the address, before the browser is opened.
        browse: whether to open a browser.
        port: the port; 0 for any that is free.
        idle_minutes: how long no page must be heard of.
    """
    running = start(source, port=port)
    try:
        with cleaned_up_on_signal(running.studio.stop_tasks):
            tell(running.studio.address)
            if browse:
                _browse(running.studio.address)
            while running.is_alive and running.idle_seconds < 60 * idle_minutes:
                time.sleep(0.2)
    finally:
        running.stop()
    return f"no page was open for {idle_minutes:g} minutes"


def start(source: Source, *, port: int = 0, framed: bool = False) -> Running:
    """Returns a studio's server, which runs.

    Raises:
        ModuleNotFoundError: its libraries are not installed.
    """
    try:
        from .server import Running, Studio
    except ModuleNotFoundError as error:
        if error.name in _NEEDS:
            raise ValueError(
                f"the studio needs {error.name}, which is not installed: pip install "
                f'"shardwise[studio]"'
            ) from error
        raise
    return Running(Studio(source, framed=framed), port=port)


def _browse(address: str) -> None:
    import webbrowser

    with contextlib.suppress(webbrowser.Error):
        webbrowser.open(address)


@public
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class InlineStudio:
    """A studio that a notebook shows. Returned by `layout.studio()`; it ends with the process.

    Attributes:
        address: of its page, with a token, for a browser on this machine.
    """

    address: str
    _running: Any = dataclasses.field(repr=False)

    def stop(self) -> None:
        """Ends its server."""
        self._running.stop()

    def __repr__(self) -> str:
        """Returns its address."""
        return f"InlineStudio({self.address!r}): open the address in a browser on this machine"

    def _repr_html_(self) -> str:
        where = html.escape(self.address)
        return (
            f'<iframe src="{where}" title="Shardwise studio" allow="clipboard-write" '
            f'style="width:100%;height:{_INLINE_HEIGHT}px;border:1px solid #8886"></iframe>'
            f'<p style="font-size:.85em">Nothing above? The page is served to browsers on the machine '
            f'of the kernel only: <a href="{where}" target="_blank" rel="noopener">open it there</a>, '
            f"or forward its port.</p>"
        )


def notebook_studio(layout: Layout, model: Any) -> InlineStudio:
    """Returns a studio that begins with a layout; see `Layout.studio`."""
    if not (isinstance(model, Recipe | nnx.Module) or callable(model)):
        raise ValueError(
            f"the model is {show_type(model)}: give the sw.Recipe, the function or the nnx.Module "
            f"that the layout was made from"
        )
    chips = chips_of(layout.mesh)
    start_state = State(
        "this layout",
        str(chips) if chips is not None else "none",
        tuple(dict(layout.mesh.shape).items()),
        strategy=_update_strategy(layout),
        rules=_rules_of(layout),
    )
    parse_query(start_state.query)  # or raises: it has too many rules
    source = Source(
        start_state, (start_state.target,), lambda state: applied(model, state), command=False
    )
    running = start(source, framed=True)
    return InlineStudio(running.studio.address, running)


def _rules_of(layout: Layout) -> tuple[tuple[str, str], ...]:
    """Returns path patterns that give a layout's specs; layers that are alike share one."""
    groups: dict[str, list[tuple[str, str]]] = {}
    for leaf in layout.leaves:
        pattern = ".".join("*" if key.isdigit() else key for key in leaf.path.split("."))
        groups.setdefault(pattern, []).append((leaf.path, show_spec(leaf.spec)))
    rules: list[tuple[str, str]] = []
    for pattern, rows in groups.items():
        specs = {spec for _, spec in rows}
        rules += [(pattern, specs.pop())] if len(specs) == 1 else rows
    return tuple(rules)


def _update_strategy(layout: Layout) -> str:
    """Returns the strategy that splits gradients and optimizer state beyond the weights."""
    if any(leaf.gradients is not None for leaf in layout.leaves):
        return "zero2"
    return "zero1" if any(leaf.moments is not None for leaf in layout.leaves) else ""
