"""Files that somebody else wrote: data of the expected form, or one sentence."""

import json
import os
import stat

import hypothesis
import hypothesis.strategies as st
import pytest

import shardwise as sw
from shardwise._base import parse_json, read_json, read_toml, tell, visible, write_atomically
from shardwise._cli.rules_file import read_rules
from shardwise._time.calibration import load_calibration
from shardwise._weights.naming.names import read_names

FORM = {"name": str, "sizes": list[int], "rate?": float | None}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "it is empty"),
        ("{", "it is not JSON"),
        ("[" * 100_000, "nested too deeply"),
        ("[" * 70 + "]" * 70, "nested more than 64 levels deep"),
        ("[NaN]", "NaN is not a number of JSON"),
        ("[1" + "0" * 5000 + "]", "is out of range"),
        ("[1e400]", "which is out of range"),
        ("[]", "it is a list instead of an object"),
        ('{"name": "a"}', "it has no 'sizes'"),
        ('{"name": "a", "sizes": [1, true]}', "sizes[1] is True"),
        ('{"name": 3, "sizes": []}', "name is 3"),
        ('{"name": "a", "sizes": [], "more": 1}', "it has an unknown 'more'"),
    ],
)
def test_json_of_another_form(tmp_path, text, told):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ValueError) as caught:
        read_json(tmp_path / "x.json", FORM)
    assert told in str(caught.value)


def test_json_of_the_form():
    assert parse_json('{"name": "a", "sizes": [1], "rate": 1}', FORM)["sizes"] == [1]


@pytest.mark.parametrize("text", ["a = " + "[" * 5000, "[" * 9000, ".".join("a" * 3000) + " = 1"])
def test_toml_that_exhausts_its_parser(tmp_path, text):
    (tmp_path / "x.toml").write_text(text)
    for read in (read_toml, read_rules, read_names):
        with pytest.raises(ValueError):
            read(tmp_path / "x.toml")


def test_what_is_not_a_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/zero"):
        with pytest.raises(ValueError, match="it is not a regular file"):
            read_json(path)
    (tmp_path / "large").write_bytes(b" " * 100)
    with pytest.raises(ValueError, match="it is larger than 99 bytes"):
        read_json(tmp_path / "large", most=99)


def test_a_pipe_of_the_shell():
    """As `--rules <(…)` and `<<` have it."""
    reading, writing = os.pipe()
    os.write(writing, b'{"name": "a", "sizes": []}')
    os.close(writing)
    assert read_json(f"/dev/fd/{reading}", FORM)["name"] == "a"
    os.close(reading)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["format", "mesh", "leaves", "path", "products"]), inner)
    ),
    max_leaves=12,
)
READERS = [sw.load_layout, sw.load_compiled, load_calibration, sw.models.config_from_hf]


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(JSON.map(lambda body: json.dumps(body).encode()) | st.binary(max_size=60))
def test_every_reader_ends_in_a_sentence(data):
    path = f"/dev/shm/shardwise-{os.getpid()}.json"
    with open(path, "wb") as file:
        file.write(data)
    try:
        for read in (*READERS, read_rules, read_names):
            with pytest.raises(ValueError) as caught:
                read(path)
                raise ValueError("it was read")
            assert not isinstance(caught.value, UnicodeError | json.JSONDecodeError)
    finally:
        os.unlink(path)


def test_no_control_character_reaches_a_terminal(capsys):
    tell("kernel\x1b[2J\x07\u202e, a tab\tand a line\nstay")
    assert capsys.readouterr().out == "kernel\\x1b[2J\\x07\\u202e, a tab\tand a line\nstay\n"
    assert visible("é→µ") == "é→µ"


def test_a_written_file_is_new_and_keeps_its_mode(tmp_path, monkeypatch):
    target, other = tmp_path / "out.json", tmp_path / "other"
    other.write_text("precious")
    target.write_text("old")
    target.chmod(0o600)
    opened = []
    real = os.open

    def spy(path, flags, *rest, **more):
        opened.append((str(path), flags))
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", spy)
    # The name that earlier versions wrote through.
    (tmp_path / f".out.json.{os.getpid()}.partial").symlink_to(other)
    write_atomically(target, "new")
    assert (target.read_text(), other.read_text()) == ("new", "precious")
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    ((path, flags),) = [row for row in opened if "partial" in row[0]]
    assert flags & os.O_EXCL and flags & os.O_NOFOLLOW and os.path.dirname(path) == str(tmp_path)
