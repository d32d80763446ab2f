"""The README's Python blocks run, in order, and print what it shows."""

from pathlib import Path

import pages

README = Path(__file__).parent.parent / "README.md"


def test_readme_blocks_print_what_they_show(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scope, printed, shown = {}, None, 0
    for language, code in pages.blocks(README):
        if language == "python":
            printed = pages.run(code, "train.py", scope)
        elif language == "text":
            assert printed == code
            shown += 1
    assert shown >= 4
