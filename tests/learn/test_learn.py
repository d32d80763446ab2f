"""The lesson pages: their blocks run in order, and print what the pages show."""

from pathlib import Path

import pages
import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted([*(DOCS / "learn").glob("*.md"), *(DOCS / "guides").glob("*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_blocks_print_what_they_show(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert pages.run_all(page, "body.py")


def test_there_are_pages():
    assert [page.stem for page in PAGES] == [
        "absent_chips",
        "budgets",
        "checkpoints",
        "from_flax",
        "from_fsdp2",
        "from_maxtext",
        "inference",
        "layouts",
        "lora",
        "many_hosts",
        "pipelines",
        "report",
        "search",
        "step_time",
        "studio",
        "training",
        "weights",
        "index",
        "into_a_mesh",
        "parallelism",
        "shard_map",
        "specs",
        "state_and_layout",
    ]
