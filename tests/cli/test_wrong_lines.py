"""A part of the wrong command lines; `python tests/support/wrong_lines.py` runs them all."""

import pytest
import wrong_lines

LINES = list(wrong_lines.lines())


def test_there_are_many():
    assert len(LINES) > 500
    assert {words[0] for words, _ in LINES if words} >= {
        *("plan", "check", "compile", "report", "train", "checkpoints", "launch", "demo", "learn"),
        *("explain", "models", "chips", "doctor"),
    }


# Those of `learn check` start a process each; every third of the others is enough for each run.
CHOSEN = [line for line in LINES if line[0][:2] != ["learn", "check"]][::3]


@pytest.mark.parametrize("part", range(4))
def test_each_ends_in_one_sentence(part):
    for words, amiss, status, err in wrong_lines.campaign(CHOSEN[part::4]):
        assert not amiss, (words, status, err)
