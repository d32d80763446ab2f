"""The marks name what is there: a file or a test that is renamed does not lose its mark unseen."""

import re
from pathlib import Path

import marks
import pytest

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize("path", [*marks.ONCE, *marks.FAST])
def test_a_marked_file_is_there(path):
    text = (TESTS / path).read_text(encoding="utf-8")
    defined = set(re.findall(r"^def (test_\w+)", text, re.M))
    assert defined
    excepted = {name.partition("[")[0] for name in marks.ONCE.get(path, ())}
    assert excepted <= defined


def test_every_room_has_a_fast_file():
    rooms = {path.parent.name for path in TESTS.glob("*/test_*.py")}
    assert {path.partition("/")[0] for path in marks.FAST} == rooms - marks.NOT_FAST


@pytest.mark.parametrize(
    ("path", "name", "found"),
    [
        ("report/test_report.py", "test_it_prints", ["once"]),
        ("report/test_report.py", "test_the_command", []),
        ("learn/test_learn.py", "test_blocks_print_what_they_show[training]", []),
        ("learn/test_learn.py", "test_blocks_print_what_they_show[lora]", ["once"]),
        ("mesh/test_mesh.py", "test_anything", ["fast"]),
    ],
)
def test_marks_of_a_test(path, name, found):
    assert marks.marks_of(path, name) == found
