"""What holds to the bit also holds with the compiler's usual optimisation.

The tests turn it down, to compile quickly; fused and reordered sums are what it may add. So each
test that is marked `bitwise` is run again in a process that leaves XLA's flags as users have them.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Each claim of the docs, where it is made, and the test that holds it.
CLAIMS = {
    "docs/guides/training.md: the others stay bitwise as they are": (
        "nnx/test_recipe.py::test_what_is_not_trained_stays_bitwise"
    ),
    "docs/guides/checkpoints.md: Values are bitwise those that were saved": (
        "checkpoint/test_checkpoints.py::test_restores_bitwise_onto_any_layout"
    ),
    "docs/guides/checkpoints.md: On the same mesh it is bitwise": (
        "train/test_fit.py::test_resume_is_bitwise"
    ),
    "docs/learn/into_a_mesh.md: bitwise the values that the model has on one device": (
        "place/test_place.py::test_init_gives_the_same_values_in_shards"
    ),
}


@pytest.fixture(scope="module")
def outcomes():
    """What became of each marked test, by file and name."""
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "PYTEST_ADDOPTS")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-m", "bitwise", "-p", "no:cacheprovider", "-v", "-v"],
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


@pytest.mark.parametrize("claim", CLAIMS)
def test_each_claim_of_the_docs_is_among_them(claim, outcomes):
    page, _, words = claim.partition(": ")
    said = " ".join((ROOT / page).read_text(encoding="utf-8").split())
    assert words in said, f"{page} no longer says so: bring this table up to date"
    assert CLAIMS[claim] in {name for name, _ in outcomes}


def test_no_claim_is_left_out():
    """A page that says `bitwise` is one of those above."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    saying = {
        page.relative_to(ROOT).as_posix()
        for page in pages
        if page.name not in ("CHANGELOG.md", "README.md", "CONTRIBUTING.md")
        and re.search(r"\bbitwise\b", page.read_text(encoding="utf-8"))
    }
    assert saying == {claim.partition(":")[0] for claim in CLAIMS}
