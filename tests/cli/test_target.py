"""Targets: whatever the user's file does when it is imported, one sentence or a clean result."""

import json
import os
import sys
from pathlib import Path

import forked
import pytest

FILES = {
    "leaves.py": "import os\nos._exit(7)\n",
    "exits.py": "import sys\n\nsys.exit(0)\n",
    "exit_word.py": "exit('no')\n",
    "late.py": "import os\ndef make():\n    os._exit(3)\n",
    "late_exit.py": "def make():\n    raise SystemExit(4)\n",
    "recursive.py": "def f():\n    return f()\nf()\n",
    "misspelt.py": "def make(:\n",
    "empty.py": "",
    "reads.py": "input()\n",
    "moves.py": "import os\nos.chdir('/')\nfrom shardwise.examples.decoder import make\n",
    "prints.py": "import os, subprocess, threading, time\n"
    "print('printed')\nos.write(1, b'written\\n')\nsubprocess.run(['echo', 'echoed'])\n"
    "def talk():\n    while True:\n        print('from a thread'); time.sleep(0.01)\n"
    "threading.Thread(target=talk, daemon=True).start()\n"
    "from shardwise.examples.decoder import make\n",
    "forks.py": "import os\nos.fork()\nfrom shardwise.examples.decoder import make\n",
}
MESH = ("--mesh", "data=8")
pytestmark = pytest.mark.usefixtures("folder")
FORM = "write path/to/file.py:name or package.module:name"
OUT = 'which would end shardwise: leave it out, or put it under if __name__ == "__main__"'
# fmt: off
CASES = {
    "leaves.py:make": f"importing leaves.py called os._exit(7), at leaves.py:2, {OUT}",
    "leaves:make": f"importing leaves called os._exit(7), at leaves.py:2, {OUT}",
    "exits.py:make": f"importing exits.py called sys.exit(0), at exits.py:3, {OUT}",
    "exit_word.py:make": f"importing exit_word.py called sys.exit(no), at exit_word.py:1, {OUT}",
    "late.py:make": f"making the model of late.py:make called os._exit(3), at late.py:3, {OUT}",
    "late_exit.py:make": f"making the model of late_exit.py:make called sys.exit(4), at late_exit.py:2, {OUT}",
    "recursive.py:make": "importing recursive.py failed: RecursionError: maximum recursion depth exceeded, at recursive.py:2",
    "misspelt.py:make": "importing misspelt.py failed: SyntaxError: invalid syntax (misspelt.py, line 1)",
    "empty.py:make": "target 'empty.py:make': empty.py has no 'make'; it defines no such names",
    "binary.py:make": "importing binary.py failed: …",
    "latin.py:make": "importing latin.py failed: SyntaxError: …",
    "reads.py:make": "importing reads.py failed: …",
    "folder.py:make": f"target file folder.py is a folder: {FORM}",
    "empty.py:a:b": f"target 'empty.py:a:b' has two names after its file: {FORM}",
    "..:make": f"target module '..' is not the name of a module: {FORM}",
    ".empty:make": f"target module '.empty' is not the name of a module: {FORM}",
    "a b:make": f"target module 'a b' is not the name of a module: {FORM}",
    ":": f"target ':' does not name a factory: {FORM}",
}
# fmt: on


@pytest.mark.parametrize("form", ["text", "json"])
@pytest.mark.parametrize("target", CASES)
def test_what_cannot_be_loaded_is_one_sentence(run, target, form):
    os.mkdir("folder.py")
    Path("binary.py").write_bytes(bytes(range(256)))
    Path("latin.py").write_bytes(b"name = '\xe9'\n")
    status, out, err = run("plan", target, *MESH, "--format", form)
    told = CASES[target]
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"shardwise: {told.rstrip('…')}")
    assert told.endswith("…") or err == f"shardwise: {told}\n"


def start(*arguments):
    return forked.run([sys.executable, "-m", "shardwise", *arguments], timeout=120)


def test_what_a_target_prints_goes_to_stderr_to_the_end():
    done = start("plan", "prints.py:make", *MESH, "--format", "json")
    assert done.returncode == 0 and json.loads(done.stdout)["verdict"]
    assert {"printed", "written", "echoed", "from a thread"} <= set(done.stderr.splitlines())


def test_a_target_that_forks_gives_one_result():
    done = start("plan", "forks.py:make", *MESH, "--format", "json")
    assert done.returncode == 0 and json.loads(done.stdout)["verdict"]


def test_paths_are_relative_to_where_the_command_was_started(run, folder):
    status, _, err = run("plan", "moves.py:make", *MESH, "--save", "layout.json")
    assert (status, err) == (0, "saved layout.json\n") and (folder / "layout.json").is_file()


def test_a_target_that_leaves_is_told_in_a_process_too():
    done = start("plan", "leaves.py:make", *MESH, "--format", "json")
    assert (done.returncode, done.stdout) == (
        2,
        "",
    ) and "os._exit(7), at leaves.py:2" in done.stderr


CALLED = """
from flax import nnx

class Model(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(16, 32, rngs=rngs)
        self.down = nnx.Linear(32, 16, rngs=rngs)

    def __call__(self, batch, *, scale=None):
        x = batch["x"] if isinstance(batch, dict) else batch
        return self.down(nnx.relu(self.up(x)))

def make():
    return Model(nnx.Rngs(0))
"""


@pytest.mark.parametrize(
    "inputs",
    [
        "float32[8,16]",
        "batch=float32[8,16]",
        "batch=float32[8,16]; scale=float32[]",
        '{"x": "float32[8,16]", "y": "int32[8]"}',
        'batch={"x": "float32[8,16]"}',
    ],
)
def test_inputs_may_have_names_and_be_dicts(run, folder, inputs):
    (folder / "called.py").write_text(CALLED)
    sys.modules.pop("called", None)
    options = ("--mesh", "data=2,model=4", "--strategy", "tensor", "--inputs", inputs)
    status, out, err = run("plan", "called.py:make", *options, "--explain", "up.kernel")
    assert (status, err) == (0, "") and "traced as one dim of 32" in out
    status, out, err = run("compile", "called.py:make", *options, "--on", "cpu:8")
    assert (status, err) == (0, "") and out.startswith("needs ")


@pytest.mark.parametrize(
    ("inputs", "told"),
    [
        (
            "x=float32[8];int32[8]",
            "has some arguments with names and some without: name all or none",
        ),
        ("x=int32[8];x=int32[8]", "names an argument twice: give each once"),
        ("int32[0,64]", "has 'int32[0,64]': a size must be at least 1"),
        ("int32[9999999999999]", "has 'int32[9999999999999]': no array is that large"),
        ('{"x": 3}', "has 3: write dtype[shape], "),
        ('{"x": ', "it is not JSON (Expecting value"),
        ("{}", "has {}: write dtype[shape], "),
        ("", "has '': write dtype[shape], "),
    ],
)
def test_inputs_that_are_wrong(run, folder, inputs, told):
    (folder / "called.py").write_text(CALLED)
    status, out, err = run("plan", "called.py:make", *MESH, "--inputs", inputs)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"shardwise: --inputs {inputs!r}")
    assert told in err
