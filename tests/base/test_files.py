"""Files are replaced completely or not at all; links, devices and permissions are respected."""

import json
import os
import stat
import threading
from pathlib import Path

import pytest

from shardwise._base.files import write_atomically

FILES = {
    "model.py": "from shardwise.examples.decoder import make\n",
    "rules.toml": "strategy = 'fsdp'\n",
}
pytestmark = pytest.mark.usefixtures("folder")
PLAN = ("plan", "model.py:make", "--mesh", "data=8")


def test_a_link_is_followed_and_permissions_stay(tmp_path):
    (tmp_path / "there").mkdir()
    real, link = tmp_path / "there" / "real.json", tmp_path / "link.json"
    real.write_text("old")
    real.chmod(0o640)
    link.symlink_to("there/real.json")
    write_atomically(link, "new")
    assert link.is_symlink() and real.read_text() == "new"
    assert stat.S_IMODE(real.stat().st_mode) == 0o640
    assert os.listdir(tmp_path / "there") == ["real.json"]


def test_a_link_to_nothing_makes_its_target(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "made")
    write_atomically(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "made").read_text() == "new"


def test_a_device_is_written_to_and_not_replaced(run, tmp_path):
    try:
        os.mknod("full", 0o666 | stat.S_IFCHR, os.makedev(1, 7))  # as /dev/full
        open("full").close()
    except PermissionError:
        pytest.skip("only root can make a device")
    status, out, err = run(*PLAN, "--save", "full")
    assert (status, out) == (2, "")
    assert err == "shardwise: the layout cannot be written to full: No space left on device\n"
    assert stat.S_ISCHR(os.stat("full").st_mode)


def test_a_pipe_is_written_to(run):
    os.mkfifo("pipe")
    read = []
    reader = threading.Thread(target=lambda: read.append(Path("pipe").read_text()))
    reader.start()
    status, _, err = run(*PLAN, "--save", "pipe")
    reader.join()
    assert (status, err) == (0, "saved pipe\n") and json.loads(read[0])
    assert stat.S_ISFIFO(os.stat("pipe").st_mode)


def test_a_saved_file_can_be_printed(run):
    status, out, _ = run(*PLAN, "--save", "/dev/stdout")
    assert status == 0 and out.startswith("{")


def test_a_file_that_the_command_reads_is_not_overwritten(run):
    assert run(*PLAN, "--save", "layout.json")[0] == 0
    os.symlink("layout.json", "link.json")
    before = {name: Path(name).read_text() for name in ("layout.json", "model.py", "rules.toml")}
    cases = {
        ("report", "layout.json", "-o", "layout.json"): ("--output layout.json", "layout.json"),
        ("report", "layout.json", "-o", "link.json"): ("--output link.json", "layout.json"),
        (*PLAN, "--save", "./model.py"): ("--save ./model.py", "model.py:make"),
        ("plan", "model:make", "--mesh", "data=8", "--save", "model.py"): (
            "--save model.py",
            "model:make",
        ),
        (*PLAN, "--rules", "rules.toml", "--save", "rules.toml"): (
            "--save rules.toml",
            "rules.toml",
        ),
    }
    for arguments, (option, read) in cases.items():
        message = f"shardwise: {option} would overwrite {read}, which this command reads: name another file\n"
        assert run(*arguments) == (2, "", message)
    assert before == {name: Path(name).read_text() for name in before}


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("", "--save '' is not a file: name one, or /dev/stdout to print it"),
        ("-", "--save '-' is not a file: name one, or /dev/stdout to print it"),
        (".", "--save . is a folder: name a file"),
        ("no/l.json", "--save no/l.json cannot be written: there is no folder "),
        ("model.py/l.json", "--save model.py/l.json cannot be written: there is no folder "),
    ],
)
def test_paths_that_cannot_be_written(run, path, message):
    status, out, err = run(*PLAN, "--save", path)
    assert (status, out, err.count("\n")) == (2, "", 1) and err.startswith(f"shardwise: {message}")
