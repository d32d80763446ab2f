"""Shardwise plans, checks, simulates, compiles and runs the sharding of Flax NNX models on JAX."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._public import *  # noqa: F403  (a type checker reads its names)

    __version__: str
else:
    # The first name that is asked for brings JAX and Flax: `shardwise --help`, and the shell that
    # completes a word, ask for none and answer at once.
    def _load() -> dict[str, Any]:
        public = importlib.import_module("._public", __name__)
        found = {name: x for name, x in vars(public).items() if not name.startswith("_")}
        globals().update(found)
        return found

    def __getattr__(name: str) -> Any:
        if name == "__all__":
            return sorted(_load())
        if name == "__version__":
            from importlib import metadata  # slow, and only this asks for it

            globals()[name] = metadata.version(__name__)
            return globals()[name]
        # What is private is a module, and never asked of them.
        if name.startswith("_") or name not in _load():
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return globals()[name]

    def __dir__() -> list[str]:
        ours = {*globals(), *_load(), "__version__"}
        return sorted(ours - {"Any", "TYPE_CHECKING", "annotations", "importlib"})
