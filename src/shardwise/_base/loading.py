"""Importing a user's file, and the modules beside it, without taking an installed package's name."""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType

_SUFFIXES = tuple(importlib.machinery.all_suffixes())


def add_folder(folder: str) -> None:
    """Lets modules in a folder be imported, where nothing installed has their name.

    It goes last on the path, although Python puts a script's own folder first: packages that are
    already imported import others lazily, and a `types.py` or `optax.py` of the user's would take
    the place of theirs.
    """
    folder = os.path.realpath(folder)
    if folder not in map(os.path.realpath, sys.path):
        sys.path.append(folder)
        _added.add(folder)
    if _InstalledFirst not in sys.meta_path:
        last = sys.meta_path.index(importlib.machinery.PathFinder)
        sys.meta_path.insert(last, _InstalledFirst)


_added: set[str] = set()


class _InstalledFirst:
    """Finds installed namespace packages, such as `orbax`, before a file in an added folder.

    Being last on the path is not enough for these: a module anywhere on it is preferred to a
    folder without an `__init__.py`.
    """

    @classmethod
    def find_spec(
        cls, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Returns the spec of an installed namespace package, else None."""
        if path is not None:
            return None
        installed = [place for place in sys.path if place not in _added]
        spec = importlib.machinery.PathFinder.find_spec(name, installed, target)
        return spec if spec is not None and spec.loader is None else None


def load_file(path: str) -> ModuleType:
    """Returns the module that a user's file is; modules beside it can be imported.

    A file with the name of an installed package or a standard module, such as `flax.py`, becomes a
    module of another name, `flax_file`, so that its classes can be pickled and their source found.

    Args:
        path: the file.

    Raises:
        Exception: whatever importing it raises.
    """
    path = os.path.abspath(path)
    add_folder(os.path.dirname(path))
    name = _free_name(path)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _free_name(path: str) -> str:
    name = os.path.splitext(os.path.basename(path))[0]
    while _is_taken(name, path):
        name += "_file"
    return name


def _is_taken(name: str, path: str) -> bool:
    if name in sys.stdlib_module_names or name in sys.builtin_module_names:
        return True
    if name in sys.modules:
        return not _is_same(getattr(sys.modules[name], "__file__", None), path)
    folder = os.path.dirname(path)
    elsewhere = [place for place in sys.path if not _is_same(place or os.getcwd(), folder)]
    return importlib.machinery.PathFinder.find_spec(name, elsewhere) is not None


def shadowed(folder: str) -> Iterator[tuple[str, str, str]]:
    """Yields imports in a folder's modules that did not find the file beside them.

    Each is the importing file, the file beside it that was passed over, and the file that was found.
    Call it after everything is imported, or after importing has failed.
    """
    folder = os.path.realpath(folder)
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or os.path.realpath(os.path.dirname(file)) != folder:
            continue
        for name in _imported(file):
            own = beside(folder, name)
            if own is None or _is_same(own, file):
                continue  # none; or it is flax.py itself, which imports flax
            found = getattr(sys.modules.get(name), "__file__", None) or "Python's own"
            if name in sys.modules and not _is_same(found, own):
                yield file, own, found


def _imported(file: str) -> list[str]:
    """Returns the first steps of the names that a file imports, each once."""
    try:
        with open(file, "rb") as source:
            tree = ast.parse(source.read())
    except (OSError, SyntaxError, ValueError):  # no source, or none that Python reads
        return []
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.append(node.module)
    return list(dict.fromkeys(name.partition(".")[0] for name in names))


def beside(folder: str, name: str) -> str | None:
    """Returns the file that `import name` would be, were the folder first on the path."""
    package = os.path.join(folder, name, "__init__.py")
    files = [package, *(os.path.join(folder, name + suffix) for suffix in _SUFFIXES)]
    return next((file for file in files if os.path.isfile(file)), None)


def _is_same(one: str | None, other: str | None) -> bool:
    if one is None or other is None:
        return False
    with contextlib.suppress(OSError):
        return os.path.realpath(one) == os.path.realpath(other)
    return False
