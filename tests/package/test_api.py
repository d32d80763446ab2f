"""The public API, frozen: names, signatures and fields as they stand in api.txt.

What is meant to change is changed there too, by `python tests/package/test_api.py`, and so is seen in a review.
"""

import dataclasses
import inspect
import re
import sys
from pathlib import Path

import pytest

import shardwise

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from public import public_things  # noqa: E402

FROZEN = Path(__file__).with_name("api.txt")


def api():
    """Returns a line for each public name, method and field."""
    lines = [line for name, thing in public_things().items() for line in described(name, thing)]
    return "\n".join(lines) + "\n"


def described(name, value):
    if not inspect.isclass(value):
        shown = inspect.signature(value) if callable(value) else f": {type(value).__name__}"
        yield f"{name}{shown}"
        return
    bases = [base.__name__ for base in value.__bases__ if base is not object]
    yield f"class {name}({', '.join(bases)})"
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            if not field.name.startswith("_"):
                yield f"  {field.name}: {field.type}"
    elif "__init__" in vars(value):
        yield f"  __init__{inspect.signature(value.__init__)}"
    for member in sorted(n for n in vars(value) if not n.startswith("_")):
        found = inspect.getattr_static(value, member)
        if inspect.isfunction(found):
            yield f"  {member}{inspect.signature(found)}"
        elif isinstance(found, property) or hasattr(found, "func"):
            yield f"  {member}"


def test_it_is_as_it_was():
    assert api() == FROZEN.read_text(encoding="utf-8"), (
        "the public API changed: if it is meant, run python tests/package/test_api.py and say so in the commit"
    )


def test_nothing_else_is_reachable_by_chance():
    """What the package imports for itself is seen by nobody, nor completed by a notebook."""
    frozen = re.findall(r"^(?:class )?shardwise\.(\w+)", FROZEN.read_text(encoding="utf-8"), re.M)
    own = {"models", "problems", "learn", "examples"}  # when something has imported them
    shown = {name for name in dir(shardwise) if not name.startswith("_")}
    assert sorted(shown - own) == sorted(set(frozen) - own) == shardwise.__all__
    for name in ("no_such_name", "_no_such_name"):
        with pytest.raises(AttributeError, match=f"^module 'shardwise' has no attribute '{name}'$"):
            getattr(shardwise, name)


if __name__ == "__main__":
    FROZEN.write_text(api(), encoding="utf-8")
