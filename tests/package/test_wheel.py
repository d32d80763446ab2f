"""The wheel: all that it needs is in it, and it works from an empty folder."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "-w",
        str(folder),
        str(ROOT),
    ]
    subprocess.run(command, check=True, capture_output=True, text=True)
    (found,) = folder.glob("shardwise-*.whl")
    return found


def test_every_file_of_the_package_is_in_it(wheel):
    package = ROOT / "src"
    wanted = {
        str(path.relative_to(package))
        for path in (package / "shardwise").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info" not in name}
    pages = {f"shardwise/codes/{path.name}" for path in (ROOT / "docs" / "codes").iterdir()}
    assert inside == wanted | pages and "shardwise/codes/SW104.md" in pages
    assert {
        "shardwise/py.typed",
        "shardwise/_report/assets/main.js",
        "shardwise/examples/text.txt",
    } <= inside


def test_it_is_small(wheel):
    assert wheel.stat().st_size < 1_000_000


def test_it_works_from_an_empty_folder(wheel, tmp_path):
    """Not from this repository: only what was installed is on the path, beside what it depends on."""
    site = tmp_path / "site"
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(site)]
    subprocess.run([*command, str(wheel)], check=True, capture_output=True, text=True)
    page = tmp_path / "report.html"
    target = ["shardwise.examples.decoder:make", "--mesh", "data=8", "--strategy", "fsdp"]
    script = (
        "import shardwise, sys; assert shardwise.__file__.startswith(sys.argv.pop(1)); "
        "from shardwise._cli.app import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(site), "report", *target, "-o", str(page)],
        env={**os.environ, "PYTHONPATH": str(site)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert page.stat().st_size > 50_000 and str(page) in done.stdout
    done = subprocess.run(
        [sys.executable, "-c", script, str(site), "explain", "SW104"],
        env={**os.environ, "PYTHONPATH": str(site)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (ROOT / "docs" / "codes" / "SW104.md").read_text()
