"""The terminal: bars, tree, colours, progress, completion, help, and JSON that matches its schemas."""

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import termios
from pathlib import Path

import numpy as np
import pages
import pytest
import schemas
import typer
from flax import nnx
from jax.sharding import PartitionSpec as P

import shardwise as sw
from shardwise import _cli
from shardwise._base import terminal
from shardwise._base.tables import show_bytes, show_count, show_flops, show_seconds
from shardwise._check.findings import CODES
from shardwise._cli import complete
from shardwise._cli.bars import bar
from shardwise._cli.planning.tree import tree_text
from shardwise._compile.result import Part
from shardwise._layout.strategies import flatten_rules
from shardwise._nnx.recipe import remat_policy
from shardwise.examples import decoder, text
from shardwise.models import CONFIGS

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "json.md"
SHARDWISE = shutil.which("shardwise", path=os.path.dirname(sys.executable))
FILES = {
    "model.py": """
from flax import nnx

class Model(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(64, 256, rngs=rngs)
        self.blocks = nnx.List([nnx.Linear(256, 256, rngs=rngs) for _ in range(3)])

    def __call__(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = nnx.relu(block(x))
        return x

def make():
    return Model(nnx.Rngs(0))
""",
    "train.py": """
import jax
import optax
import shardwise as sw
from model import make

recipe = sw.Recipe(
    model=make, loss=lambda model, x: (model(x) ** 2).mean(), optimizer=optax.adamw(1e-3),
    batch=jax.ShapeDtypeStruct((16, 128), "int32"),
)
""",
    "rows.py": "def shard_shape(shape, spec, mesh): return shape",
    "rules.toml": '[[rules]]\n"blocks.*.kernel" = "P(\'data\')"',
    "wrong.toml": '[[rules]]\n"blocks.*.kernel" = "P(\'date\')"',
}
for _name, _spec in (("old.json", P("data")), ("new.json", P())):
    _rules = {"**.embedding": _spec}
    FILES[_name] = sw.layout(decoder.make, sw.mesh("data=2", on="none"), _rules).lockfile()
MESH = ("--mesh", "data=8", "--on", "cpu:8", "--strategy", "fsdp")
TRAIN = ("train", "train.py:recipe", *MESH, "--data", "tokens.npy", "--length", "128")

pytestmark = pytest.mark.usefixtures("folder")


@pytest.fixture(autouse=True)
def tokens(folder):
    np.save(folder / "tokens.npy", np.arange(20_000, dtype="uint16") % 64)


# --- JSON -----------------------------------------------------------------------------------------

# The arguments, the schema and the exit status.
JSON = {
    "plan": (("plan", "train.py:recipe", *MESH), "plan", 0),
    "plan for chips": (("plan", "model.py:make", *MESH[:2], "--on", "v5e:2x4"), "plan", 0),
    "plan with errors": (("plan", "model.py:make", *MESH[:2], "--rules", "wrong.toml"), "plan", 1),
    "plan that compiles": (("plan", "train.py:recipe", *MESH, "--compile"), "plan", 0),
    "explain": (("plan", "model.py:make", *MESH, "--explain", "embed.embedding"), "explain", 0),
    "explain a code": (("explain", "SW104"), "explain_code", 0),
    "explain all codes": (("explain",), "explain_code", 0),
    "check": (("check", "model.py:make", *MESH), "check", 0),
    "check with errors": (
        ("check", "model.py:make", *MESH[:2], "--rules", "wrong.toml"),
        "check",
        1,
    ),
    "compile": (("compile", "train.py:recipe", *MESH), "compile", 0),
    "search": (
        ("search", "train.py:recipe", "--on", "h100:1x2", "--strategy", "fsdp", "--compile", "0"),
        "search",
        0,
    ),
    "transfer": (("transfer", "old.json", "new.json", "--limit", "1GiB"), "transfer", 0),
    "chips": (("chips",), "chips", 0),
    "models": (("models",), "models", 0),
    "doctor": (("doctor",), "doctor", 0),
    "learn": (("learn",), "learn", 0),
    "learn check": (("learn", "check", "2", "rows.py"), "learn_check", 1),
}


@pytest.mark.parametrize("case", JSON)
def test_json_matches_its_schema(run, case):
    arguments, schema, status = JSON[case]
    found, out, err = run(*arguments, "--format", "json")
    assert (found or 0) == status and out.isascii(), err
    schemas.validate(schema, json.loads(out))


def test_json_of_a_run_and_its_checkpoints(run, folder):
    arguments = (*TRAIN, "--checkpoints", "runs/a", "--logs", "logs", "--format", "json")
    _, out, err = run(*arguments, "--steps", "2")
    found = json.loads(out)
    schemas.validate("train", found)
    assert (found["first_step"], found["last_step"], found["status"]) == (0, 2, 0), err
    assert found["saved_steps"] == [2] and found["metrics"]["loss"] > 0
    assert found["optimizer_bytes_per_device"] == 2 * found["bytes_per_device"] + 4
    _, out, _ = run(*arguments, "--steps", "3", "--resume")
    schemas.validate("train", json.loads(out))
    assert json.loads(out)["first_step"] == 2

    target = ("--preflight", "train.py:recipe", "--mesh", "data=4", "--on", "cpu:4")
    for more, schema in (((), "checkpoints"), (target, "preflight")):
        _, out, _ = run("checkpoints", "runs/a", *more, "--format", "json")
        schemas.validate(schema, json.loads(out))
    sw.save_weights(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), folder / "weights.safetensors")
    for action, status in (("check", 1), ("load", 1)):
        found, out, _ = run(
            "weights", action, "train.py:recipe", "weights.safetensors", *MESH, "--format", "json"
        )
        schemas.validate("weights", json.loads(out))
        assert found == status and json.loads(out)["findings"][0]["code"] == "SW601"
    (folder / "runs/a/2/about/about.json").unlink()
    rows = json.loads(run("checkpoints", "runs/a", "--format", "json")[1])
    schemas.validate("checkpoints", rows)
    assert [bool(row["damaged"]) for row in rows] == [True, False]


def test_every_schema_is_tested_and_every_command_has_one():
    used = {schema for _, schema, _ in JSON.values()} | {
        "train",
        "checkpoints",
        "preflight",
        "weights",
    }
    # tests/cli/test_generate_cli.py has that of generate.
    assert used | {"leaf", "finding", "generate"} == set(schemas.SCHEMAS)
    for name, command in commands():
        if name not in ("demo", "launch", "report", "studio"):
            assert any(param.name == "format" for param in command.params), name


def test_the_page_has_every_field_and_its_examples_are_valid():
    text = PAGE.read_text(encoding="utf-8")
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", text, re.M | re.S))
    assert set(sections) == set(schemas.SCHEMAS)
    for name, section in sections.items():
        schema = schemas.SCHEMAS[name]
        assert re.findall(r"^\| `.*$", section, re.M) == list(schemas.rows(schema)), name
        if name not in ("leaf", "finding"):
            assert f"`{schema['title']}`" in section
            (example,) = re.findall(r"^```json\n(.*?)^```", section, re.M | re.S)
            schemas.validate(name, json.loads(example))


def test_what_the_page_runs(monkeypatch):
    monkeypatch.setenv("PATH", os.path.dirname(SHARDWISE), prepend=os.pathsep)
    assert pages.run_all(PAGE, "json.md") == 1


# --- bars and the tree ----------------------------------------------------------------------------

PARTS = [Part("parameters", 30, "exact"), Part("temporaries", 20, "compiled")]
LEGEND = "  █ parameters 30 B (exact)  ░ temporaries 20 B (compiled)"
BARS = {
    "fits": (100, f"  {'█' * 22}{'░' * 14}{'·' * 36}  50.0% of 100 B\n{LEGEND}  · 50 B to spare"),
    "does not": (
        40,
        f"  {'█' * 43}{'░' * 15}▏{'░' * 13}  125.0% of 40 B\n{LEGEND}  ▏ capacity, 10 B too much",
    ),
    "not known": (None, f"  {'█' * 43}{'░' * 29}\n{LEGEND}"),
}


@pytest.mark.parametrize("case", BARS)
def test_memory_is_a_bar_against_the_capacity(case):
    capacity, wanted = BARS[case]
    assert bar(PARTS, capacity).plain == wanted


def test_parts_of_a_bar_are_as_long_as_their_sum():
    """Rounded one by one, nine parts of a ninth each would be too long or too short."""
    parts = [Part("parameters", 1, "exact") for _ in range(9)]
    assert bar(parts, 9).plain.splitlines()[0] == f"  {'█' * 72}  100.0% of 9 B"


def test_plan_draws_what_it_knows_against_the_chip_s_memory(run):
    recipe = ("plan", "train.py:recipe", *MESH[:2], "--rules", "rules.toml")
    _, out, _ = run(*recipe, "--on", "v5e:2x4")
    assert (
        "  █ parameters 163.0 KiB (exact)  ▓ optimizer 326.0 KiB (exact)  ▒ batch 1.0 KiB (exact)"
        in out
    )
    assert "█" not in run(*recipe)[1] and "█" not in run(*recipe, "--on", "cpu:8")[1]


def test_plan_of_one_device_reads_well(run):
    _, out, _ = run("plan", "model.py:make", "--mesh", "data=1")
    verdict, *_, caption = out.splitlines()
    assert verdict == "no findings: 1 device holds 835.0 KiB of 835.0 KiB (exact)"
    assert caption == "7 leaves on data=1: 835.0 KiB of 835.0 KiB on 1 device (exact)"


TREE = """\
model                 bytes/device  share  split       shape
├── blocks.{0..2} ×3      99.0 KiB  60.7%  over data
│   ├── bias               3.0 KiB   1.8%  replicated  float32[256]
│   └── kernel            96.0 KiB  58.9%  P('data')   float32[256,256]
└── embed.embedding       64.0 KiB  39.3%  replicated  float32[64,256]
163.0 KiB on each of 8 devices of data=8 (exact), 41.1% of them in 4 replicated leaves; a folded row is the sum of its layers
"""


def test_the_model_as_a_tree(run):
    status, out, _ = run(
        "plan", "model.py:make", "--mesh", "data=8", "--rules", "rules.toml", "--tree"
    )
    verdict, _, rest = out.partition("\n\n")
    assert status == 0 and verdict.endswith(
        "each of 8 devices holds 163.0 KiB of 835.0 KiB (exact)"
    )
    assert rest.startswith(TREE)


def test_a_tree_folds_only_identical_layers_and_counts_every_byte():
    mesh = sw.mesh("data=2,model=4", on="none")
    layout = sw.layout(decoder.make, mesh, {"blocks.1.down.kernel": P(None, "model")})
    rows = re.findall(r"^(.*?) {2,}([\d.]+ [KMG]?i?B) +[\d.]+%", tree_text(layout), re.M)
    tops = [(name, size) for name, size in rows if name[0] in "├└"]
    assert tops == [("├── blocks", "61.0 MiB"), ("├── embed.embedding", "16.0 MiB"), ("└── norm.scale", "2.0 KiB")]  # fmt: skip
    assert show_bytes(layout.bytes_per_device) == "77.0 MiB"
    blocks = [(name, size) for name, size in rows if re.match("│   [├└]", name)]
    assert blocks == [("│   ├── * ×3", "48.0 MiB"), ("│   └── 1", "13.0 MiB")]


# --- colours, encodings, progress -----------------------------------------------------------------

LIGHT = """
import time
from shardwise._base.terminal import tell, working
with working("waiting for nothing"):
    time.sleep(0.4)
tell("fits: ×80 … (exact)")
tell("no colour here")
"""


def on_terminal(*command, columns=100, **environment):
    """Returns what a command writes to its own terminal, on both streams."""
    ours, theirs = os.openpty()
    termios.tcsetwinsize(theirs, (24, columns))
    environment = {**os.environ, "TERM": "xterm-256color", **environment}
    for name in ("NO_COLOR", "COLUMNS"):
        if name not in environment or not environment[name]:
            environment.pop(name, None)
    process = subprocess.Popen(command, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    out = b""
    with contextlib.suppress(OSError):  # what Linux raises when the other end is closed
        while piece := os.read(ours, 65536):
            out += piece
    os.close(ours)
    assert process.wait() in (0, 1), out
    return out.decode().replace("\r\n", "\n")


def screen(text):
    """Returns the lines left on the screen after text that erases lines and moves the cursor up."""
    lines, row = [""], 0
    for token in re.findall(r"\x1b\[[\d;?]*[A-Za-z]|\n|\r|[^\x1b\n\r]+", text):
        if token == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif token.endswith("A") and token.startswith("\x1b["):
            row -= int(token[2:-1] or 1)
        elif token == "\x1b[2K":
            lines[row] = ""
        elif token[0] not in "\x1b\r":
            lines[row] += token
    return "\n".join(lines)


def test_colours_and_progress_are_for_a_terminal_only():
    shown = on_terminal(sys.executable, "-c", LIGHT)
    assert "\x1b[1;32mfits" in shown and "waiting for nothing" in shown
    plain = "fits: ×80 … (exact)\nno colour here\n"
    assert screen(shown) == plain
    for more in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        assert on_terminal(sys.executable, "-c", LIGHT, **more) == plain
    done = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == (plain, "")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp437"])
def test_any_encoding_gets_a_complete_text(encoding):
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    done = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, env=environment)
    text = done.stdout.decode(encoding).splitlines()[0]
    assert (done.stderr, text.replace("x80", "×80")) == (b"", "fits: ×80 ... (exact)")


def test_every_drawn_character_has_a_plain_form():
    drawn = TREE + "".join(text for _, text in BARS.values())
    assert drawn.translate(terminal._PLAIN).isascii()


def test_a_command_on_a_terminal_shows_progress_and_cleans_up(run):
    command = ("plan", "model.py:make", "--mesh", "data=8", "--on", "v5e:2x4", "--tree")
    shown = on_terminal(SHARDWISE, *command)
    assert "laying out model.py:make" in shown and "\x1b[?25h" in shown  # the cursor is restored
    assert "\x1b[1;33mreplicated" in shown
    left = screen(shown)
    assert "laying out" not in left and left == run(*command)[1]


def test_a_narrow_terminal_cuts_nothing_off():
    code = (
        "from shardwise._base.terminal import tell; from shardwise._cli.bars import bar; from shardwise._compile.result import Part\n"
        "tell(bar([Part('parameters', 2**33, 'exact')], 2**34)); tell('x' * 300)"
    )
    text = re.sub(r"\x1b\[[\d;]*m", "", on_terminal(sys.executable, "-c", code, columns=30))
    drawn, *legend, long = text.splitlines()
    assert drawn.endswith("50.0% of 16.0 GiB") and len(drawn) == 31
    assert " ".join(" ".join(legend).split()) == "█ parameters 8.0 GiB (exact) · 8.0 GiB to spare"
    assert long == "x" * 300


def test_a_reader_that_goes_away_is_not_an_error():
    command = f"{sys.executable} -m shardwise models --help | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("141\n", "")


# --- completion -----------------------------------------------------------------------------------

COMPLETED = {
    "commands": ("shardwise c", {"check", "checkpoints", "chips", "compile"}),
    "chips": ("shardwise plan x --on v5", {"v5e:4x4", "v5p:4x4x4"}),
    "devices": ("shardwise compile x --on c", {"cpu:8"}),
    "models": ("shardwise plan llama3", {name for name in CONFIGS if name.startswith("llama3")}),
    "strategies": (
        "shardwise check x --strategy f",
        {"fsdp", "fsdp+tensor", "fsdp+pipeline", "fsdp+expert", "fsdp+sequence"},
    ),
    "policies": ("shardwise compile x --remat no", {"none", "nothing_saveable"}),
    "formats": ("shardwise check x --format ", {"text", "concise", "json", "github"}),
    "options": ("shardwise plan x --tr", {"--tree"}),
}


def test_bash_completes():
    """As bash does it: loads the installed script, and calls its function."""
    script = f"""
        export PATH={shlex.quote(os.path.dirname(SHARDWISE))}:$PATH
        eval "$(_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION=1 shardwise --show-completion bash)"
        complete -p shardwise >/dev/null || exit 1
        try() {{
            COMP_WORDS=("$@") COMP_CWORD=$(( $# - 1 ))
            _shardwise_completion shardwise
            echo "${{COMPREPLY[@]}}"
        }}
    """
    for line, _ in COMPLETED.values():
        script += f"try {line}{repr('') if line.endswith(' ') else ''}\n"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    found = dict(zip(COMPLETED, done.stdout.splitlines(), strict=True))
    for case, (_, wanted) in COMPLETED.items():
        assert set(found[case].split()) == wanted, case


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_complete(shell):
    environment = {
        **os.environ,
        "_SHARDWISE_COMPLETE": f"complete_{shell}",
        "_TYPER_COMPLETE_ARGS": "shardwise plan x --on h1",
        "_TYPER_COMPLETE_WORD_TO_COMPLETE": "h1",
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }
    done = subprocess.run([SHARDWISE], capture_output=True, text=True, env=environment)
    assert "h100:8x8" in done.stdout.replace("\\", "") and done.stderr == ""
    environment = {**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    done = subprocess.run(
        [SHARDWISE, "--show-completion", shell], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0 and "_SHARDWISE_COMPLETE" in done.stdout


def test_completions_are_valid():
    for name in complete.STRATEGIES:
        sizes = {"data": 2, "model": 4, "pipe": 2, "expert": 2, "sequence": 2}
        # A sequence axis splits the batch alone: no rule for leaves.
        assert flatten_rules(name, sizes) or name == "sequence"
    for on in complete.complete_devices(""):
        if on not in ("here", "none", "cpu:8"):
            assert sw.mesh({"data": -1}, on=on).size > 1
    for policy in complete.POLICIES[1:]:
        assert remat_policy(policy)


LAZY = {
    "import": "import shardwise",
    "help": "import shardwise._cli.app as c; sys.argv = ['shardwise', '--help']; c.main()",
    "help of a command": "import shardwise._cli.app as c; sys.argv = ['shardwise', 'plan', '--help']; c.main()",
    "completion": "import shardwise._cli.complete as c; assert c.complete_target('llama3-8b')",
}


@pytest.mark.parametrize("case", LAZY)
def test_jax_is_not_imported_before_it_is_needed(case):
    code = f"import atexit, sys\natexit.register(lambda: print('jax' in sys.modules))\n{LAZY[case]}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.endswith("False\n"), done.stderr


# --- help -----------------------------------------------------------------------------------------


def commands():
    return typer.main.get_command(_cli.options.app).commands.items()


MINE = ("plan", "check", "compile", "train", "checkpoints", "chips", "models", "doctor")
MINE = (*MINE, "explain", "weights")  # and those of search, in tests/cli/test_search_cli.py


def test_every_example_of_a_help_runs(run, folder):
    """One after the other, in one folder; tests/cli/test_cli_run.py runs those of demo and launch."""
    shown = [
        line
        for words in ((), *((name,) for name in MINE))
        for line in pages.help_examples(run(*words, "--help")[1])
    ]
    assert len(shown) >= 21
    sw.save_weights(text.recipe.model(), folder / "weights")
    done = {f"shardwise {shlex.join(words)} --format json" for words, _, _ in JSON.values()}
    for line in dict.fromkeys(line for line in shown if line not in done):
        status, out, err = run(*shlex.split(line)[1:])
        assert status in (None, 0, 1) and out + err, (line, err)
        assert "no findings" in out or status != 1 or "[SW" in out or "::warning" in out, line


def test_help_is_a_page_to_learn_from(run):
    status, out, err = run("--help")
    assert (status or 0, err) == (0, "")
    assert re.findall(r"^(\w[\w ]*):$", out, re.M) == ["Options", "Plan", "Run", "Learn", "Look up"]
    for name, command in commands():
        assert re.search(rf"^  {name} +\S", out, re.M), name
        text = command.get_help(command.make_context(name, [], resilient_parsing=True))
        assert pages.help_examples(text) or name == "learn", name
        for param in command.params:
            assert getattr(param, "help", "x"), (name, param.name)
    assert "Exit status: 0 clean, 1 findings" in out and "docs/index.md" in out


def test_version(run):
    from importlib.metadata import version

    assert run("--version") == (0, f"shardwise {version('shardwise')}\n", "")


# --- small things ---------------------------------------------------------------------------------


def test_an_unknown_chip_is_reported_in_terms_of_options(run):
    _, _, err = run("plan", "model.py:make", "--mesh", "data=8", "--on", "h1000:8")
    assert err == (
        "shardwise: --on h1000:8 does not name a known chip (did you mean h100 or h200?): use here "
        "(the devices of this machine), 'cpu:N', 'none', or one of v4, v5e, v5p, v6e, tpu7x, a100, "
        "h100, h200, b200, gb200 with its topology, such as 'v5p:4x8x8'\n"
    )


def test_plan_takes_a_policy(run):
    plan = ("plan", "train.py:recipe", *MESH)
    assert run(*plan, "--remat", "dots_saveable")[0] == 0
    assert "--remat 'dots' is not a policy" in run(*plan, "--remat", "dots")[2]


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (show_seconds(11.15), "11.2 s"),
        (show_seconds(0.8237), "824 ms"),
        (show_seconds(0.99999), "1 s"),
        (show_seconds(0.00035), "350 µs"),
        (show_seconds(200), "3 min 20 s"),
        (show_flops(2.61e14), "261 TFLOP"),
        (show_flops(65536), "65.5 kFLOP"),
        (show_flops(512), "512 FLOP"),
        (show_flops(999_900), "1 MFLOP"),
        (show_flops(3e21), "3000 EFLOP"),
        (show_count(9170), "9.17k"),
        (show_count(110), "110"),
        (show_count(1.5e9), "1.5G"),
    ],
)
def test_numbers_are_readable(shown, text):
    assert shown == text


def test_a_code_is_explained_without_the_docs(run):
    status, out, err = run("explain", "sw104")
    assert (status, err) == (0, "") and out.startswith("# SW104 indivisible-dim\n")
    assert run("explain", "indivisible-dim") == (0, out, "")
    _, out, _ = run("explain")
    assert [line.split()[0] for line in out.splitlines()[1:-2]] == list(CODES)
    text = "shardwise: {!r} is not a code: {}shardwise explain lists all codes\n"
    assert run("explain", "SW14") == (2, "", text.format("SW14", "did you mean SW104? "))
    assert run("explain", "SW999") == (2, "", text.format("SW999", ""))
    _, out, _ = run("check", "model.py:make", *MESH[:2], "--rules", "wrong.toml")
    assert out.endswith("shardwise explain SW101 explains it, and what to do\n")


def test_a_missing_argument_is_reported_with_an_example(run):
    for name, command in commands():
        needed = [param for param in command.params if param.required]
        if needed:
            status, out, err = run(name)
            assert (status, out, err.count("\n")) == (2, "", 1)
            assert re.match(rf"shardwise: Missing .*: for example, shardwise {name} \S", err), err
