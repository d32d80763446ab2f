"""What holds to the bit also holds with the compiler's usual optimisation.

The tests turn it down, to compile quickly; fused and reordered sums are what it may add. So each
test that is marked `bitwise` is run in a process that leaves XLA's flags as users have them; the
process that starts it leaves them out.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
# The pages that say what holds to the bit, and the tests that it is.
RESUMED = "train/test_fit.py::test_resume_is_bitwise"
RESTORED = "checkpoint/test_checkpoints.py::test_restores_bitwise_onto_any_layout"
CLAIMS = {
    "README.md": (RESUMED, RESTORED),
    "docs/who.md": (RESUMED,),
    "docs/guides/checkpoints.md": (RESUMED, RESTORED),
    "docs/guides/training.md": (
        "step/test_recipe.py::test_untrained_variables_stay_bitwise_equal",
    ),
}
# Pages that say it of runs that a benchmark makes and compares, with the usual flags.
MEASURED = {"docs/guides/many_hosts.md": "benchmarks/elastic.py"}
SAID = re.compile(r"\bbitwise\b|\bbit[- ]for[- ]bit\b|\bto the bit\b")


@pytest.fixture(scope="module")
def outcomes():
    """What became of each marked test, by file and name."""
    # Only the files that have one: to collect all takes longer than some of them.
    files = [
        p for p in TESTS.rglob("test_*.py") if "\n@pytest.mark.bitwise" in p.read_text("utf-8")
    ]
    options = ["-m", "bitwise", "-p", "no:cacheprovider", "-v", "-v"]
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "PYTEST_ADDOPTS")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *map(str, files)],
        cwd=ROOT,
        env=environment | {"SHARDWISE_TESTS_XLA_FLAGS": "usual"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return re.findall(r"^tests/(\S+::\w+)(?:\[.*\])? (\w+)", done.stdout, re.M)


def test_they_hold_with_the_usual_flags(outcomes):
    assert len(outcomes) > 40
    assert {how for _, how in outcomes} == {"PASSED"}


@pytest.mark.parametrize("page", CLAIMS)
def test_what_a_page_claims_is_among_them(page, outcomes):
    assert {*CLAIMS[page]} <= {name for name, _ in outcomes}


def test_no_page_claims_more():
    """One that says so for the first time gets a line above, and a test that is marked."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    saying = [page for page in pages if SAID.search(page.read_text(encoding="utf-8"))]
    names = {page.relative_to(ROOT).as_posix() for page in saying}
    assert names <= {*CLAIMS, *MEASURED}
    for page, benchmark in MEASURED.items():
        assert benchmark in (ROOT / page).read_text("utf-8") and (ROOT / benchmark).exists()
