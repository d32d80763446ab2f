"""A short campaign of faults; `benchmarks/faults.py` is the long one."""

import os
import sys
from pathlib import Path

import forked
import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.once
def test_a_short_campaign_breaks_nothing():
    done = forked.run(
        [sys.executable, str(ROOT / "benchmarks" / "faults.py"),
         "--rounds", "hostile=8,spec=8,lost=8,file=8,elastic=1", "--seed", "3"],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": os.environ.get("XLA_FLAGS", "")},
        timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    rows = {row.split()[0]: row.split()[1:5] for row in done.stdout.splitlines()[1:]}
    eight = dict.fromkeys(("hostile", "spec", "lost", "file"), ["8", "8", "8", "0"])
    assert rows == eight | {"elastic": ["1", "2", "2", "0"]}
