"""The site builds strictly, says all that is public, and asks nothing of anybody else's server."""

import html
import html.parser
import os
import re
import shlex
import shutil
import subprocess
import sys
import urllib.parse
import zlib
from pathlib import Path

import jax
import numpy as np
import pages
import pytest
import typer
import yaml
from public import public_names

import shardwise
from shardwise import models, problems
from shardwise._cli.options import app

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
ENVIRONMENT = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}


class Page(html.parser.HTMLParser):
    """What a page loads, what it links to, and what can be linked to in it."""

    def __init__(self, text):
        super().__init__()
        self.loads, self.links, self.anchors = [], [], set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.anchors |= {given[key] for key in ("id", "name") if given.get(key)}
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        loads = {"src", "srcset", "poster", "data", "action"}
        self.loads += [given[key] for key in loads & given.keys() if given[key]]
        if tag == "link" and given.get("rel") not in ("canonical", "next", "prev"):
            self.loads.append(given["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the site, built once."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(folder)],
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def built(site):
    """Every page of the site, by its path in it."""
    found = {}
    for path in site.rglob("*.html"):
        found[path.relative_to(site).as_posix()] = Page(path.read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize("module", [shardwise, models, problems], ids=lambda m: m.__name__)
def test_every_public_name_is_in_the_reference(module, site):
    inventory = (site / "objects.inv").read_bytes().split(b"\n", 4)[4]
    said = {line.split()[0] for line in zlib.decompress(inventory).decode().splitlines()}
    names = [f"{module.__name__}.{name}" for name in public_names(module)]
    assert len(names) >= (50 if module is shardwise else 4)
    assert not [name for name in names if name not in said]


def test_every_page_is_in_the_navigation():
    """And nothing is there that has no page; mkdocs says the same, but only of what it sees."""
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = set(re.findall(r"[\w/]+\.md", text))
    there = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert there == {page for page in listed if not page.startswith("benchmarks/")}
    assert yaml.safe_load(text)["strict"] is True


def test_no_link_leads_nowhere(site, built):
    assert len(built) > 40
    for path, page in built.items():
        for link in page.links:
            at = urllib.parse.urlsplit(link)
            # The page of a wrong address does not know where it will be seen from.
            if at.scheme or at.netloc or path == "404.html":
                continue
            target = path
            if at.path:
                target = os.path.normpath(os.path.join(os.path.dirname(path), at.path))
            assert (site / target).exists(), f"{path} links to {link}"
            if at.fragment and target in built:
                anchor = urllib.parse.unquote(at.fragment)
                assert anchor in built[target].anchors, f"{path} links to {link}"


def test_nothing_is_loaded_from_elsewhere(site, built):
    for path, page in built.items():
        for load in page.loads:
            assert not re.match(r"(\w+:)?//", load), f"{path} loads {load}"
    for sheet in site.rglob("*.css"):
        text = sheet.read_text(encoding="utf-8")
        found = re.findall(r"(?:url\(|@import)\s*['\"]?((?:https?:)?//[^)'\"]+)", text)
        assert not found, f"{sheet.name} loads {found}"


def commands(command, words=()):
    """Yields the words of a command and of every one below it."""
    yield words
    for name, below in getattr(command, "commands", {}).items():
        yield from commands(below, (*words, name))


def test_the_commands_help_is_what_the_page_says(site, run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = (site / "reference" / "command_line.html").read_text(encoding="utf-8")
    said = html.unescape(re.sub(r"<[^>]+>", "", text))
    found = list(commands(typer.main.get_command(app)))
    assert {(), ("plan",), ("check",), ("compile",), ("train",)} <= set(found)
    for words in found:
        status, out, _ = run(*words, "--help")
        assert status == 0
        assert out.strip() in said, words


@pytest.mark.parametrize("page", ["index", "start"])
def test_blocks_print_what_they_show(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert pages.run_all(DOCS / f"{page}.md", "body.py")


@pytest.mark.bitwise
def test_the_shell_of_the_start_page_does_what_its_python_does(tmp_path, monkeypatch, run):
    """From the same checkpoint: the same steps, and every array alike to the bit."""
    found = list(pages.blocks(DOCS / "start.md"))
    code = [text for language, text in found if language == "python"]
    last = next(i for i, text in enumerate(code) if "steps=30" in text)
    scope, (here, there) = {}, (tmp_path / "python", tmp_path / "shell")
    here.mkdir()
    monkeypatch.chdir(here)
    for text in code[:last]:
        pages.run(text, "train.py", scope)
    shutil.copytree(here, there)
    pages.run(code[last], "train.py", scope)

    lines = [line for text in code[1:] for line in text.splitlines()]
    names = ("batch = ", "recipe = ", "data = ")
    held = [code[0], *(line for line in lines if line.startswith(names))]
    (there / "train.py").write_text("\n".join(held))
    (command,) = [t for k, t in found if k == "bash" and t.startswith("shardwise train")]
    monkeypatch.chdir(there)
    status, _, err = run(*shlex.split(command)[1:])
    assert not status, err

    layout, ends = scope["other"], []
    for folder in (here, there):
        store = shardwise.Checkpoints(folder / "runs" / "first")
        assert store.steps() == [10, 20, 30]
        ends.append(store.restore(scope["recipe"], layout))
    assert jax.tree.all(jax.tree.map(np.array_equal, *ends))
    assert ends[1].model["up.kernel"].sharding == scope["state"].model["up.kernel"].sharding


RUN = """
import sys
import nbclient, nbformat
from jupyter_client.manager import AsyncKernelManager

notebook = nbformat.read(sys.argv[1], 4)
nbformat.validate(notebook)
manager = AsyncKernelManager(kernel_name="python3", transport="ipc")
nbclient.NotebookClient(notebook, timeout=240, km=manager).execute()
for cell in notebook.cells:
    for output in cell.get("outputs", ()):
        print(output.get("text", ""))
"""


def test_the_notebook_runs(tmp_path):
    """In a process and a kernel of its own, from top to bottom."""
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(ROOT / "examples" / "notebook.ipynb")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "(measured)" in done.stdout
    assert "(compiled)" in done.stdout


def test_the_notebook_is_stored_without_outputs():
    text = (ROOT / "examples" / "notebook.ipynb").read_text(encoding="utf-8")
    cells = yaml.safe_load(text)["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert code
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in code)
