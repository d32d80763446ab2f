"""The public names of the package, as its modules state them."""

import re
from pathlib import Path

import shardwise
from shardwise import learn, models, problems

MODULES = (shardwise, models, problems, learn)


def public_names(module):
    """Returns the names that a module lists, imports as themselves (`import x as x`), or defines."""
    if module is shardwise:
        return module.__all__
    text = Path(module.__file__).read_text(encoding="utf-8")
    defined = [
        name
        for name, value in vars(module).items()
        if getattr(value, "__module__", None) == module.__name__ and not name.startswith("_")
    ]
    return sorted({*re.findall(r"import (\w+) as \1$", text, re.M), *defined})


def public_things():
    """Returns every public name with its module, and what it is."""
    return {
        f"{module.__name__}.{name}": getattr(module, name)
        for module in MODULES
        for name in public_names(module)
    }
