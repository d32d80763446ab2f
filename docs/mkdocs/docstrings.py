"""How the package's docstrings are read for the reference."""

from __future__ import annotations

from typing import Any

import griffe


class Examples(griffe.Extension):
    """Shows the section that the docstrings call `Example:` as code."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Gives the section the name that the parser knows."""
        if obj.docstring is not None:
            obj.docstring.value = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")
