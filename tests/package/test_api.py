"""The public API, frozen: names, signatures and fields as they stand in api.txt.

What is meant to change is changed there too, by `python tests/package/test_api.py`, and so is seen in a review.
"""

import dataclasses
import inspect
from pathlib import Path

import pytest

import shardwise
from shardwise import learn, models, problems

FROZEN = Path(__file__).with_name("api.txt")
MODULES = (shardwise, models, problems)


def api():
    """Returns a line for each public name, method and field."""
    lines = []
    for module in MODULES:
        names = getattr(module, "__all__", None) or [
            n for n in dir(module) if not n.startswith("_")
        ]
        for name in sorted(names):
            value = getattr(module, name)
            if inspect.ismodule(value) or not getattr(value, "__module__", "").startswith(
                "shardwise"
            ):
                continue
            lines += described(f"{module.__name__}.{name}", value)
    return "\n".join(lines) + "\n"


def described(name, value):
    if not inspect.isclass(value):
        yield f"{name}{inspect.signature(value)}" if callable(value) else name
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
    with pytest.raises(AttributeError):
        _ = shardwise.no_such_name  # pyright: ignore[reportAttributeAccessIssue]
    assert learn.__name__ == "shardwise.learn"


if __name__ == "__main__":
    FROZEN.write_text(api(), encoding="utf-8")
