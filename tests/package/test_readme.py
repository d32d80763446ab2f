"""The README's Python blocks run, in order, and print what it shows."""

from pathlib import Path

import pages

README = Path(__file__).parents[2] / "README.md"


def test_readme_blocks_print_what_they_show(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert pages.run_all(README, "train.py") >= 4
