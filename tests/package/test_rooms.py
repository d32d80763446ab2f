"""What import-linter cannot hold: the size of rooms and files, their names, and the map of them."""

import ast
import inspect
import itertools
import pickle
import re
import traceback
import typing
from pathlib import Path

import pytest
from public import public_things

import shardwise

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "shardwise"
FILES = sorted(PACKAGE.rglob("*.py"))
ROOMS = sorted({path.parent for path in FILES} - {PACKAGE})
TOP = sorted(room.name for room in ROOMS if room.parent == PACKAGE)
# Models to try the commands on; what they do is tested with the commands.
WITHOUT_TESTS = {"examples"}


def name_of(room):
    return room.relative_to(PACKAGE).as_posix()


def test_these_are_the_rooms():
    assert {"_base", "_layout", "_check", "_compile", "_train", "_cli", "models"} <= set(TOP)
    assert {name_of(room) for room in ROOMS} >= {"_layout/flow", "_cli/running"}


@pytest.mark.parametrize("room", ROOMS, ids=name_of)
def test_a_room_has_ten_files_at_most(room):
    assert len(list(room.glob("*.py"))) <= 10


@pytest.mark.parametrize("room", ROOMS, ids=name_of)
def test_a_room_has_a_door_that_says_what_is_behind_it(room):
    door = ast.parse((room / "__init__.py").read_text(encoding="utf-8"))
    assert ast.get_docstring(door)


def test_no_file_is_longer_than_600_lines():
    long = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    assert not {str(path): lines for path, lines in long.items() if lines > 600}


def one_edit_apart(one, other):
    """Returns whether one letter more, less or changed makes one word the other."""
    if len(one) > len(other):
        one, other = other, one
    if one == other or len(other) - len(one) > 1:
        return False
    same = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(one))
    return one[same + (len(one) == len(other)) :] == other[same + 1 :]


def test_what_is_one_edit_apart():
    assert one_edit_apart("compile", "compiled") and one_edit_apart("held", "help")
    assert one_edit_apart("body", "ody") and not one_edit_apart("plan", "plan")
    assert not one_edit_apart("compiled", "compiler_") and not one_edit_apart("agree", "eager")


def test_no_two_names_differ_by_a_letter():
    """Files of one name in different rooms are told apart by their rooms."""
    names = {path.stem.lstrip("_") for path in FILES if path.name != "__init__.py"}
    pairs = itertools.combinations(sorted(names), 2)
    assert [pair for pair in pairs if one_edit_apart(*pair)] == []


@pytest.mark.parametrize("room", [name for name in TOP if name not in WITHOUT_TESTS])
def test_a_room_has_a_folder_of_tests(room):
    folder = ROOT / "tests" / room.lstrip("_")
    assert list(folder.glob("test_*.py"))


def test_the_map_names_every_room():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text.partition("## The map")[2].partition("\n## ")[0]
    named = {name.rstrip("/") for name in re.findall(r"`([\w/]+)`", section)}
    inside = {name_of(room) for room in ROOMS}
    assert not inside - named, "rooms that are not on the map"
    assert not [name for name in named if "_" in name[:1] and not list(PACKAGE.glob(f"{name}*"))]
    files = re.findall(r"`([\w/]+\.py)`", section)
    assert len(files) >= 20
    assert not [file for file in files if not list(PACKAGE.rglob(file))]


def test_the_worked_examples_name_files_that_are_there():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text.partition("## Worked examples")[2]
    named = re.findall(r"`((?:src|tests|docs)/[\w./]+\.\w+|\w+\.yml)`", section)
    assert len(named) >= 15
    assert not [name for name in named if not (ROOT / name).exists()]


# --- public names ---------------------------------------------------------------------------------


PUBLIC = [
    pytest.param(*full.rsplit(".", 1), thing, id=full)
    for full, thing in public_things().items()
    if inspect.isclass(thing) or inspect.isfunction(thing)
]


def test_these_are_public():
    assert len(PUBLIC) >= 60


@pytest.mark.parametrize("module, name, thing", PUBLIC)
def test_a_public_name_says_where_users_import_it_from(module, name, thing):
    assert (thing.__module__, thing.__qualname__) == (module, name)
    assert f"{module}.{name}" in repr(thing) or not inspect.isclass(thing)
    assert pickle.loads(pickle.dumps(thing)) is thing
    assert typing.get_type_hints(thing) is not None  # no name of its file is missing
    if inspect.isfunction(thing):
        assert f"def {name}" in inspect.getsource(thing)


def test_an_error_is_printed_under_its_public_name():
    with pytest.raises(shardwise.BudgetExceeded) as caught:
        raise shardwise.BudgetExceeded("too much")
    assert traceback.format_exception_only(caught.value) == ["shardwise.BudgetExceeded: too much\n"]


def test_the_version_is_that_of_the_package():
    from importlib.metadata import version

    assert shardwise.__version__ == version("shardwise")
    assert "__version__" in dir(shardwise) and "__version__" not in shardwise.__all__
