"""`shardwise search`: what it prints where, its exit status, and that the commands it prints work."""

import json
import re
import shlex
import signal
import subprocess
import sys

import numpy as np
import pages
import pytest
import schemas
from forked import Forked

import shardwise as sw

FILES = {
    "tower.py": """
import jax
import jax.numpy as jnp
import optax
import shardwise as sw
from flax import nnx


class Tower(nnx.Module):
    def __init__(self, width, rngs):
        self.embed = nnx.Embed(64, width, rngs=rngs)
        self.blocks = nnx.List([nnx.Linear(width, width, rngs=rngs) for _ in range(3)])

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = nnx.relu(block(x))
        return x


def make():
    return Tower(256, nnx.Rngs(0))


def wide():
    return nnx.Linear(65536, 65536, use_bias=False, rngs=nnx.Rngs(0))


recipe = sw.Recipe(
    model=make, loss=lambda model, x: jnp.mean(model(x) ** 2), optimizer=optax.adam(1e-3),
    batch=jax.ShapeDtypeStruct((64, 32), "int32"),
)
huge = sw.Recipe(
    model=wide, loss=lambda model, x: model(x).mean(), optimizer=optax.adam(1e-3),
    batch=jax.ShapeDtypeStruct((64, 65536), "float32"),
)
"""
}
SEARCH = ("search", "tower.py:recipe", "--on", "h100:1x4", "--compile", "0")
LINE = re.compile(r"^  (shardwise .*)$", re.M)

pytestmark = pytest.mark.usefixtures("folder")


def commands_in(out):
    """Returns the words of the commands that a search prints to go on with."""
    return [shlex.split(line)[1:] for line in LINE.findall(out)]


def test_the_table_comes_with_the_ends_of_the_front(run):
    status, out, err = run(*SEARCH, "--axis", "sequence=1", "--price", "h100=3")
    assert status == 0
    assert out.splitlines()[0].split()[:3] == ["mesh", "strategy", "remat"]
    for name in ("fastest", "smallest", "cheapest"):
        assert re.search(rf"^{name} +\d+: .* per step", out, re.M), name
    assert "less memory" in out and re.search(r"^no other layout is both faster", out, re.M)
    lines = err.splitlines()
    assert lines[0].startswith("best of 1: ") and all("best of" in line for line in lines)


def test_the_commands_to_go_on_with_ask_for_what_was_found(run, folder):
    """Remat goes to the blocks and the batch is split, as in the search: the estimate is the same."""
    np.save(folder / "tokens.npy", np.arange(20_000, dtype="uint16") % 64)
    fixed = (
        "--accumulate",
        "2",
        "--remat",
        "nothing_saveable",
        "--batch",
        "32",
        "--axis",
        "fsdp=4",
    )
    status, out, err = run(*SEARCH, *fixed, "--save", "layout.json", "--format", "json")
    assert status == 0 and err.endswith("saved layout.json\n")
    found = json.loads(out)
    best = found["candidates"][found["best"]]
    assert best["mesh"] == {"fsdp": 4} and best["accumulate"] == 2
    _, out, _ = run(*SEARCH, *fixed, "--save", "layout.json")
    compile_, train = commands_in(out)
    assert compile_[0] == "compile" and train[0] == "train"

    # As compile lays it out, without its compiler.
    status, out, err = run("plan", *compile_[1:], "--format", "json")
    assert status == 0, err
    shown = json.loads(out)
    assert shown["estimate"]["seconds"] == pytest.approx(best["seconds"])
    assert shown["estimate"]["peak_bytes"] == best["peak_bytes"]

    here = ("--on", "cpu:4", "--data", "tokens.npy", "--length", "32")
    more = [word if word != "1000" else "2" for word in train]
    status, out, err = run(*more, *here, "--format", "json")
    assert not status, err
    trained = json.loads(out)
    assert trained["axes"] == "fsdp=4" and trained["last_step"] == 2
    assert trained["bytes_per_device"] == shown["bytes_per_device"]


def test_one_file_trains_as_proposed(run, folder):
    """The lockfile of a search has the step too; options win over it, and that is said."""
    np.save(folder / "tokens.npy", np.arange(20_000, dtype="uint16") % 64)
    fixed = ("--accumulate", "2", "--remat", "nothing_saveable", "--mesh", "fsdp=4")
    assert run(*SEARCH, *fixed, "--save", "layout.json")[0] == 0
    saved = json.loads((folder / "layout.json").read_text(encoding="utf-8"))
    assert saved["step"]["accumulate"] == 2 and saved["step"]["remat"] == "nothing_saveable"
    train = ("train", "tower.py:recipe", "--layout", "layout.json", "--steps", "1", "--on", "cpu:4")
    data = ("--data", "tokens.npy", "--length", "32")
    status, _, err = run(*train, *data)
    assert not status
    assert "note: layout.json sets --remat nothing_saveable --accumulate 2" in err
    status, _, err = run(*train, *data, "--accumulate", "1")
    assert not status and "--accumulate 1 is used in place of --accumulate 2 in layout.json" in err
    saved["step"]["speed"] = 3
    (folder / "layout.json").write_text(json.dumps(saved), encoding="utf-8")
    status, _, err = run(*train, *data)
    assert status == 2 and "layout.json is a damaged layout" in err and "'speed'" in err


def test_a_saved_layout_takes_the_place_of_mesh_and_strategy(run):
    how = ("--mesh", "data=4", "--strategy", "fsdp", "--min-bytes", "0")
    assert run("plan", "tower.py:make", *how, "--save", "layout.json")[0] == 0
    status, out, err = run("plan", "tower.py:make", "--layout", "layout.json", "--format", "json")
    assert (status, err) == (0, "")
    wanted = sw.load_layout("layout.json")
    found = {row["path"]: row["spec"] for row in json.loads(out)["leaves"]}
    assert found == {leaf.path: leaf.to_dict()["spec"] for leaf in wanted.leaves}
    other = run("plan", "tower.py:wide", "--layout", "layout.json")
    assert other[0] == 2 and "--layout layout.json is not a layout of tower.py:wide" in other[2]
    both = run("plan", "tower.py:make", "--layout", "layout.json", "--strategy", "dp")
    assert both[0] == 2 and "--strategy conflicts with --layout layout.json" in both[2]


def test_when_nothing_fits_the_status_is_1_and_what_would_is_shown(run, folder):
    status, out, err = run(
        *("search", "tower.py:huge", "--on", "v5e:1x1", "--compile", "0", "--save", "layout.json"),
        *("--format", "json"),
    )
    assert status == 1 and "layout.json was not written: nothing fits" in err
    assert not (folder / "layout.json").exists()
    found = json.loads(out)
    schemas.validate("search", found)
    assert found["best"] is None and found["remedies"][0]["fits"]
    chips = found["remedies"][0]["chips"]
    status, out, _ = run("search", "tower.py:huge", "--on", "v5e:1x1", "--compile", "0")
    assert status == 1 and "nothing fits on v5e:1x1" in out
    assert any(chips in words for words in commands_in(out))


def test_the_page_is_written(run, folder):
    status, _, err = run(*SEARCH, "--strategy", "fsdp", "--report", "page.html")
    assert status == 0 and err.endswith("saved page.html\n")
    assert "Layouts on h100:1x4" in (folder / "page.html").read_text(encoding="utf-8")


def test_the_best_strategy_of_a_mesh(run):
    plan = ("plan", "tower.py:recipe", "--mesh", "data=4", "--on", "h100:1x4")
    status, out, err = run(*plan, "--strategy", "best", "--format", "json")
    assert status == 0
    (name,) = re.findall(r"^note: the best strategy is (\S+): .* \(modelled\), of", err, re.M)
    seconds = {}
    for each in ("dp", "fsdp"):
        shown = json.loads(run(*plan, "--strategy", each, "--format", "json")[1])
        seconds[each] = shown["estimate"]["seconds"]
    assert seconds[name] == min(seconds.values())
    assert json.loads(out)["estimate"]["seconds"] == seconds[name]


def test_a_strategy_that_would_fit_is_proposed(folder):
    from shardwise._cli.planning.compile import _propose_strategy
    from shardwise._cli.target import load_target

    recipe = load_target("tower.py:huge")
    layout = sw.layout(recipe, sw.mesh("data=8", on="h100:1x8"))
    proposed = _propose_strategy("tower.py:huge", recipe, layout)
    fits = [n for n in ("dp", "fsdp") if sw.estimate(recipe, layout_of(recipe, n)).fits]
    assert "fsdp" in fits and re.search(r"--strategy (\w+) would fit: about", proposed)[1] in fits


def layout_of(recipe, strategy):
    return sw.layout(recipe, sw.mesh("data=8", on="h100:1x8"), strategy)


H100 = ("--on", "h100:1x4")
# The arguments, and the sentence or its beginning.
# fmt: off
ERRORS = {
    "model": (("search", "tower.py:make", *H100), "target 'tower.py:make' is a function: a search needs a Recipe, which has a loss, an optimizer and a batch, or a published shape such as llama3-8b"),
    "devices": (("search", "tower.py:recipe", "--on", "cpu:4"), "--on cpu:4 has no known speed: name chips, such as --on v5p:4x8x8 or --on h100:1x8"),
    "chip": (("search", "tower.py:recipe", "--on", "x100:1x4"), "--on x100:1x4 does not name a known chip"),
    "mesh": ((*SEARCH, "--mesh", "data=3"), "--mesh has 3 devices, but h100:1x4 has 4"),
    "mesh's axis": ((*SEARCH, "--mesh", "rows=4"), "--mesh has the axis 'rows': a search has the axes pipe, data, fsdp, expert, sequence, model"),
    "axis": ((*SEARCH, "--axis", "rows=4"), "--axis has the axis 'rows': a search has the axes pipe, data, fsdp, expert, sequence, model"),
    "axis' size": ((*SEARCH, "--axis", "model"), "--axis 'model': write model=8"),
    "price": ((*SEARCH, "--price", "h100=x"), "--price h100=x: give dollars for an hour of one chip, such as 4.20"),
    "limit": ((*SEARCH, "--limit", "0"), "--limit must be positive, got 0"),
    "batch per device": ((*SEARCH, "--batch-per-device", "-1"), "--batch-per-device '-1': give a number of samples, or free"),
    "offload": ((*SEARCH, "--offload", "weights"), "a recipe's offload must be 'optimizer', 'ema' or both"),
    "remat": ((*SEARCH, "--remat", "dots"), "--remat 'dots' is not a policy"),
    "nothing": ((*SEARCH, "--axis", "fsdp=3"), "nothing was priced; nothing to try on h100:1x4"),
    "batch": (("search", "llama3-8b", "--on", "h100"), "--on h100 asks how many chips llama3-8b takes, which depends on the batch: give one, such as --batch 256x4096"),
    "best of a model": (("plan", "tower.py:make", "--mesh", "data=4", *H100, "--strategy", "best"), "--strategy best needs a recipe, and target 'tower.py:make' is not one"),
    "best of none": (("plan", "tower.py:recipe", "--mesh", "data=4", "--strategy", "best"), "the best strategy is only known for chips: give the mesh some, as in --on h100:1x8"),
}
# fmt: on


@pytest.mark.parametrize("case", ERRORS)
def test_what_cannot_run_is_one_sentence(run, case):
    arguments, message = ERRORS[case]
    status, out, err = run(*arguments)
    assert (status, out) == (2, "") and err.startswith(f"shardwise: {message}"), err


def test_the_examples_of_the_help_run(run):
    """Those of small models; of the large ones, the options are read."""
    shown = pages.help_examples(run("search", "--help")[1])
    assert len(shown) == 4
    for line in shown:
        words = shlex.split(line)[1:]
        small = "shardwise.examples.text:recipe" in words
        # With fewer layouts to price, or none.
        fewer = ("--remat", "none", "--axis", "model=1", "--axis", "sequence=1")
        status, out, err = run(*words, *(fewer if small else ("--on", "none")))
        assert (status == 0 and out) if small else "--on none has no known speed" in err, line


def test_an_interrupt_prints_what_is_known():
    with Forked(
        [sys.executable, "-m", "shardwise", *SEARCH],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert "best of 1: " in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert "stopped early: interrupted" in out and "Traceback" not in err
