"""The marks name what is there: a file or a test that is renamed does not lose its mark unseen."""

import re
from pathlib import Path

import marks
import pytest

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize("path", [*marks.ONCE, *marks.SWEEPS, *marks.FAST])
def test_a_marked_file_is_there(path):
    text = (TESTS / path).read_text(encoding="utf-8")
    defined = set(re.findall(r"^def (test_\w+)", text, re.M))
    assert defined
    excepted = {name.partition("[")[0] for name in marks.ONCE.get(path, ())}
    assert excepted | {*marks.SWEEPS.get(path, ())} <= defined
    assert defined - {test for test, cases in marks.SWEEPS.get(path, {}).items() if not cases}


def test_the_cases_that_every_python_runs_are_there(request):
    collected = {}
    for item in request.session.items:
        path = item.path.relative_to(TESTS).as_posix()
        collected.setdefault((path, item.originalname), set()).add(item.name)
    named = {
        (path, test): cases for path, tests in marks.SWEEPS.items() for test, cases in tests.items()
    }
    for path, names in marks.ONCE.items():
        for test, _, case in (name.partition("[") for name in names if "[" in name):
            named[path, test] = (*named.get((path, test), ()), case.removesuffix("]"))
    for (path, test), cases in named.items():
        if (path, test) in collected:
            assert {f"{test}[{case}]" for case in cases} <= collected[path, test]


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
        ("train/test_train.py", "test_loss_curves_are_those_of_one_device[mlp-one]", []),
        ("train/test_train.py", "test_loss_curves_are_those_of_one_device[mlp-fsdp]", ["once"]),
        ("train/test_fit.py", "test_the_bar_of_a_terminal", ["once"]),
        ("cli/test_cli.py", "test_exit_status_and_streams[clean]", ["once", "fast"]),
    ],
)
def test_marks_of_a_test(path, name, found):
    assert marks.marks_of(path, name) == found
