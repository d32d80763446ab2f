"""The command line: what it prints where, and its exit status."""

import json
import os
import subprocess
import sys

import forked
import jax
import pytest
from jax.sharding import PartitionSpec as P

import shardwise as sw
from shardwise._base.tables import show_bytes
from shardwise._cli.rules_file import read_rules
from shardwise.examples import decoder

MESH = ("--mesh", "data=2,model=4")
FILES = {
    "width.py": "WIDTH = 16",
    "mlp.py": """
import jax
import optax
import shardwise as sw
from flax import nnx
from width import WIDTH  # beside this file

init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "mlp"))

class Mlp(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, 32, rngs=rngs)
        self.down = nnx.Linear(32, WIDTH, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))

    def half(self, x):
        return self.up(x)

def make():
    return Mlp(nnx.Rngs(0))

def named():
    return nnx.Linear(8, 16, kernel_init=init, rngs=nnx.Rngs(0))

def needs(config):
    return make()

def breaks():
    raise KeyError("config.width")

def number():
    return 3

class factories:
    make = staticmethod(make)

live = make()
seed = 0
recipe = sw.Recipe(
    model=make, loss=lambda model, x: model(x).sum(), optimizer=optax.adamw(1e-3),
    batch=jax.ShapeDtypeStruct((8, 16), "float32"),
)
""",
    "imports_nothing.py": "import nothing_of_this_name",
    "divides.py": "\n\n1 / 0",
    "misspelt.py": "def make(:",
    "notes.txt": "a model of two layers",
    "backend.py": "import jax\nprint(len(jax.devices()))\nfrom mlp import make",
    "column.toml": """
[[rules]]
"**.kernel" = "P(None, 'model')"
"**.bias" = "P('model')"
[[rules]]
"down.*" = "P()"
""",
    "named.toml": "strategy = 'fsdp'\n[logical]\nembed = []\nmlp = ['data', 'model']",
    "wrong.toml": "[rules]\n'up.kernel' = \"P(None, 'modle')\"",
    "not.toml": "strategy = ",
    "unknown.toml": "stratgy = 'fsdp'",
    "typed.toml": "strategy = 3",
    "least.toml": "strategy = 'fsdp'\nmin_bytes = -1",
    "bytes.toml": "strategy = 'fsdp'\nmin_bytes = '1KiB'",
    "number.toml": "[[rules]]\n'**' = 3",
    "nested.toml": "[[rules]]\nup.kernel = 'P()'",
    "spec.toml": "[[rules]]\n'**' = 'Q()'",
    "pattern.toml": "[[rules]]\n'a..b' = 'P()'",
    "axis.toml": "[logical]\nmlp = 3",
}


def start(*arguments):
    """Runs a command in a process of its own."""
    return forked.run([sys.executable, "-m", "shardwise", *arguments], timeout=300)


def lay(make, rules=None, **options):
    return sw.layout(make, sw.mesh("data=2,model=4", on="none"), rules, **options)


def planned(layout, summary="no findings"):
    """Returns what `plan` prints first: the verdict, then every leaf."""
    held = f"{show_bytes(layout.bytes_per_device)} of {show_bytes(layout.total_bytes)}"
    return f"{summary}: each of 8 devices holds {held} (exact)\n\n{layout}\n"


def cited(findings):
    told = "explains it, and what to do"
    return f"\nshardwise explain {findings[0].code} {told}" if findings else ""


def mlp():
    import mlp

    return mlp


pytestmark = pytest.mark.usefixtures("folder")
TARGETS = ["mlp.py:make", "./mlp.py:live", "mlp:make", "mlp.py:factories.make"]


@pytest.mark.parametrize("target", TARGETS)
def test_plan_prints_the_layout_and_its_findings(run, target):
    status, out, err = run("plan", target, *MESH, "--strategy", "tensor")
    assert (status, err) == (0, "")
    assert out == planned(lay(mlp().make, "tensor"))


def test_plan_of_a_recipe_counts_its_optimizer(run):
    status, out, err = run("plan", "mlp.py:recipe", *MESH, "--strategy", "tensor")
    layout = lay(mlp().make, "tensor")
    moments = layout.for_optimizer(mlp().recipe.optimizer)
    assert (status, err) == (0, "")
    batch = mlp().recipe.batch
    split = batch.size * batch.dtype.itemsize // 2  # over data=2
    held = show_bytes(layout.bytes_per_device + moments.bytes_per_device + split)
    told = planned(layout).replace("(exact)\n", f"(exact), with optimizer and batch {held}\n", 1)
    assert out == told
    out = json.loads(
        run("plan", "mlp.py:recipe", *MESH, "--strategy", "tensor", "--format", "json")[1]
    )
    assert out["optimizer_bytes_per_device"] == moments.bytes_per_device == 2 * 1120 + 4
    assert out["batch_bytes_per_device"] == split


def test_plan_as_json_is_the_library_s_and_saves_what_loads(run, folder):
    rules = [{"**.kernel": P(None, "model"), "**.bias": P("model")}, {"down.*": P()}]
    status, out, err = run(
        *("plan", "mlp.py:make", *MESH, "--rules", "column.toml", "--format", "json"),
        *("--on", "v5e:2x4", "--save", "layout.json"),
    )
    layout, shown = lay(mlp().make, rules), json.loads(out)
    assert (status, err) == (0, "saved layout.json\n")
    assert shown["mesh"] == {"data": 2, "model": 4} and shown["axes"] == "data=2,model=4"
    assert shown["bytes_per_device"] == layout.bytes_per_device
    assert shown["total_bytes"] == layout.total_bytes
    assert shown["optimizer_bytes_per_device"] is None and shown["findings"] == []
    for row, leaf in zip(shown["leaves"], layout.leaves, strict=True):
        assert row["path"] == leaf.path and row["shape"] == list(leaf.shape)
        assert row["shard_shape"] == list(leaf.shard_shape) and row["reason"] == leaf.reason
        assert row["shard_bytes"] == leaf.shard_bytes and row["copies"] == leaf.copies
    assert not sw.diff(sw.load_layout(folder / "layout.json"), layout)


def test_a_plan_with_errors_is_shown_and_saved(run):
    status, out, err = run(
        *("plan", "mlp.py:make", *MESH, "--rules", "wrong.toml", "--format", "json"),
        *("--save", "layout.json"),
    )
    assert (status, err) == (1, "saved layout.json\n")
    found = sw.check(sw.load_layout("layout.json"))
    shown = json.loads(out)
    assert [f["code"] for f in shown["findings"]] == [f.code for f in found] == ["SW101", "SW111"]
    (row,) = [row for row in shown["leaves"] if row["path"] == "up.kernel"]
    assert (row["shard_shape"], row["shard_bytes"], row["copies"]) == (None, None, None)


def test_logical_names_and_a_strategy_from_a_rules_file(run):
    status, out, _ = run("plan", "mlp.py:named", *MESH, "--rules", "named.toml")
    layout = lay(mlp().named, "fsdp", logical={"embed": None, "mlp": ("data", "model")})
    assert layout["kernel"].spec == P(None, ("data", "model"))
    assert status == 0 and out.startswith(planned(layout, sw.check(layout).summary))


def test_inputs_are_traced_and_explained(run):
    options = ("--strategy", "tensor", "--inputs", " float32[8, 16] ", "--explain", "up.kernel")
    status, out, err = run("plan", "mlp.py:make", *MESH, *options)
    assert (status, err) == (0, "")
    assert "traced as one dim of 32 with down.kernel, up.bias: 1 all-reduce" in out
    assert out.startswith(
        "up.kernel  float32[16,32]  Param  on data=2,model=4\n  spec P(None, 'model')"
    )


@pytest.mark.parametrize("form", ["text", "concise", "github", "json"])
@pytest.mark.parametrize(("rules", "found"), [("wrong.toml", 1), ("column.toml", 0)])
def test_check_in_every_format(run, form, rules, found):
    status, out, err = run("check", "mlp.py:make", *MESH, "--rules", rules, "--format", form)
    findings = sw.check(lay(mlp().make, read_rules(rules).rules))
    wanted = {
        "text": f"{findings}{cited(findings)}",
        "concise": "\n".join(finding.concise for finding in findings),
        "github": "\n".join(finding.github for finding in findings),
        "json": findings.to_json(),
    }
    assert (status, err, len(findings.errors)) == (found, "", found)
    assert out.rstrip("\n") == wanted[form]
    assert form != "github" or all(line.startswith("::") for line in out.splitlines())


def test_check_allows(run):
    assert run("check", "mlp.py:make", *MESH)[0] == 1
    done = run("check", "mlp.py:make", *MESH, "--allow", "SW111:model")
    assert done == (0, "no findings, 1 allowed\n", "")
    allow = ("--allow", "SW111:model", "--allow", "SW105:up.**", "--format", "concise")
    status, out, _ = run("check", "mlp.py:make", *MESH, *allow)
    assert status == 1
    assert (
        out
        == "up.**: warning[SW112] SW105 is allowed here but not found (help: remove the allowance)\n"
    )


def test_plan_allows_what_check_allows(run):
    status, out, err = run("plan", "mlp.py:make", *MESH, "--allow", "SW111:model")
    assert (status, err) == (0, "")
    assert out.startswith("no findings, 1 allowed: ") and "SW111" not in out


@pytest.mark.parametrize("command", ["plan", "check"])
def test_help_has_examples_and_the_exit_status(run, command):
    status, out, err = run(command, "--help")
    text = " ".join(out.split())
    assert (status, err) == (0, "") and "Exit status: 0 " in text
    example = (
        f"shardwise {command} shardwise.examples.decoder:make --mesh data=2,model=4 --strategy"
    )
    assert example in text and "TARGET is path/to/file.py:name or package.module:name" in text


BYTES = "give a number of bytes, such as 65536, 64KiB or 1MiB"
FORM = 'a rules file may have strategy = "fsdp", min_bytes = "64KiB", a table [logical] with mlp = "model" or embed = [], and tables [[rules]] with "**.kernel" = "P(None, \'model\')"'
NAMES = "write path/to/file.py:name or package.module:name"
SHAPES = 'write dtype[shape], such as int32[8,128], several joined by ;, with names as in tokens=int32[8,128], or an argument that is a dict as {"x": "float32[8,16]"}'
SPEC = "write the spec as a string, such as \"P(None, 'model')\""
# fmt: off
# arguments after `plan`, and the sentence; a sentence of the parser's own is known by its start
ERRORS = {
    "no target": ((), "Missing argument 'TARGET'…"),
    "no mesh": (("mlp.py:make",), "Missing option '--mesh'…"),
    "option": (("mlp.py:make", *MESH, "--rule", "x"), "No such option: --rule…"),
    "format": (("mlp.py:make", *MESH, "--format", "xml"), "--format 'xml' is not one of 'text', 'json'"),
    "no name": (("mlp.py", *MESH), f"target 'mlp.py' does not name a factory: {NAMES}"),
    "empty name": (("mlp.py:", *MESH), f"target 'mlp.py:' does not name a factory: {NAMES}"),
    "file": (("mpl.py:make", *MESH), "target file mpl.py does not exist"),
    "no Python": (("notes.txt:make", *MESH), "target file notes.txt is not taken for Python: its name must end in .py"),
    "no target in a file": (("notes.txt", *MESH), "target 'notes.txt' is a file: name what makes the model in a file of Python, as in path/to/file.py:name"),
    "module": (("mpl.sub:make", *MESH), "target module mpl.sub does not exist (looked in the current folder and among installed packages); a file is named as path/to/file.py:name"),
    "name": (("mlp.py:mak", *MESH), "target 'mlp.py:mak': mlp.py has no 'mak'; it has make"),
    "type": (("mlp.py:seed", *MESH), "target 'mlp.py:seed' is an int: name a factory, an nnx.Module or a Recipe"),
    "import": (("imports_nothing.py:make", *MESH), "importing imports_nothing.py failed: ModuleNotFoundError: No module named 'nothing_of_this_name', at imports_nothing.py:1"),
    "import of a module": (("imports_nothing:make", *MESH), "importing imports_nothing failed: ModuleNotFoundError: No module named 'nothing_of_this_name', at imports_nothing.py:1"),
    "import's own error": (("divides.py:make", *MESH), "importing divides.py failed: ZeroDivisionError: division by zero, at divides.py:3"),
    "syntax": (("misspelt.py:make", *MESH), "importing misspelt.py failed: SyntaxError: invalid syntax (misspelt.py, line 1)"),
    "factory's error": (("mlp.py:breaks", *MESH), "KeyError: 'config.width', at mlp.py:31"),
    "factory's argument": (("mlp.py:needs", *MESH), "the model's factory 'needs' needs the argument 'config': give a function of no arguments, such as lambda: Model(config, rngs=...)"),
    "factory's return": (("mlp.py:number", *MESH), "the model's factory returned an int: it must return an nnx.Module"),
    "mesh": (("mlp.py:make", "--mesh", "data"), "mesh 'data' has 'data' where an axis is expected: write axes as data=2,model=4"),
    "devices": (("mlp.py:make", *MESH, "--on", "cpu:6"), "mesh data=2,model=4 needs 8 devices, but --on cpu:6 has 6: these fit 6: data=2,model=3; data=1,model=6; data=3,model=2; data=6,model=1; or --on cpu:8 for 8 virtual CPU devices"),
    "strategy": (("mlp.py:make", *MESH, "--strategy", "zero"), "unknown strategy 'zero': did you mean 'zero2'? Use 'dp', 'fsdp', 'zero1', 'zero2', 'expert', 'sequence', 'tensor', 'pipeline', or several joined by +, such as 'fsdp+tensor', or 'best' for the fastest of them"),
    "no rules": (("mlp.py:make", *MESH, "--rules", "no.toml"), "rules file no.toml cannot be read: No such file or directory"),
    "rules in no TOML": (("mlp.py:make", *MESH, "--rules", "not.toml"), "rules file not.toml: it is not TOML (Invalid value (at end of document))"),
    "unknown rules": (("mlp.py:make", *MESH, "--rules", "unknown.toml"), f"rules file unknown.toml has an unknown key 'stratgy': {FORM}"),
    "typed rules": (("mlp.py:make", *MESH, "--rules", "typed.toml"), f"rules file typed.toml does not have the expected form: {FORM}"),
    "rule of a number": (("mlp.py:make", *MESH, "--rules", "number.toml"), f"rules file number.toml maps pattern '**' to 3: {SPEC}"),
    "rule without quotes": (("mlp.py:make", *MESH, "--rules", "nested.toml"), f"rules file nested.toml maps pattern 'up' to {{'kernel': 'P()'}}: {SPEC}"),
    "rule's spec": (("mlp.py:make", *MESH, "--rules", "spec.toml"), "'Q()' is not a spec: write it as P(None, 'model') or P(('data', 'model'))"),
    "rule's pattern": (("mlp.py:make", *MESH, "--rules", "pattern.toml"), "'a..b' is not a path pattern: separate steps with dots, such as 'layers.*.kernel' (one step) or '**.kernel' (any number of steps)"),
    "logical": (("mlp.py:make", *MESH, "--rules", "axis.toml"), "[logical] mlp = 3 is not an axis: give an axis name, or a list of them"),
    "two strategies": (("mlp.py:make", *MESH, "--rules", "named.toml", "--strategy", "dp"), "--strategy dp conflicts with the rules file, which sets strategy = 'fsdp': give one of them"),
    "min-bytes": (("mlp.py:make", *MESH, "--strategy", "fsdp", "--min-bytes", "64kb"), f"--min-bytes '64kb' is not a number of bytes: {BYTES}"),
    "half a byte": (("mlp.py:make", *MESH, "--strategy", "fsdp", "--min-bytes", "0.3"), f"--min-bytes '0.3' is not a number of bytes: {BYTES}"),
    "min-bytes of dp": (("mlp.py:make", *MESH, "--strategy", "dp", "--min-bytes", "0"), "--min-bytes applies only to fsdp, zero1 and zero2, but the strategy is dp"),
    "min-bytes alone": (("mlp.py:make", *MESH, "--min-bytes", "0"), "--min-bytes applies only to fsdp, zero1 and zero2, but no strategy is given"),
    "rules' min_bytes": (("mlp.py:make", *MESH, "--rules", "least.toml"), f"rules file least.toml has min_bytes = -1: {BYTES}"),
    "two min_bytes": (("mlp.py:make", *MESH, "--rules", "bytes.toml", "--min-bytes", "0"), "--min-bytes 0 conflicts with the rules file, which sets min_bytes: give one of them"),
    "inputs": (("mlp.py:make", *MESH, "--inputs", "int32[8];f32"), f"--inputs 'int32[8];f32' has 'f32': {SHAPES}"),
    "inputs' dtype": (("mlp.py:make", *MESH, "--inputs", "int33[8]"), "--inputs 'int33[8]' has 'int33', which is not a dtype: did you mean int32?"),
    "inputs' shape": (("mlp.py:make", *MESH, "--strategy", "tensor", "--inputs", "float32[8,15]"), "Mlp.__call__ cannot be traced: TypeError: dot_general requires contracting dimensions to have the same shape, got (15,) and (16,) at …"),
    "explain": (("mlp.py:make", *MESH, "--explain", "up.kernal"), "no leaf has the path 'up.kernal'; nearest: up.kernel, down.kernel"),
}
# fmt: on


def test_min_bytes_is_an_option_and_may_stand_in_the_rules(run):
    def bias(*how):
        status, out, _ = run("plan", "mlp.py:make", "--mesh", "data=2", *how, "--format", "json")
        assert status == 0
        return {leaf["path"]: leaf["spec"] for leaf in json.loads(out)["leaves"]}

    everything = bias("--strategy", "fsdp", "--min-bytes", "0")
    assert set(everything.values()) == {"P('data')", "P(None, 'data')"}
    some = bias("--strategy", "fsdp", "--min-bytes", "1KiB")
    assert some["up.bias"] == "P()" and some["up.kernel"] == everything["up.kernel"]
    assert (
        some == bias("--rules", "bytes.toml") == bias("--strategy", "fsdp", "--min-bytes", "1024")
    )


def test_the_help_of_a_finding_speaks_of_options(run):
    how = ("--mesh", "data=8", "--strategy", "fsdp", "--min-bytes", "64MiB")
    status, out, _ = run("check", "shardwise.examples.decoder:make", *how)
    assert status == 1
    assert "help: --min-bytes 0 would leave 10.0 MiB on each device; --allow 'SW105:**' or" in out
    status, out, _ = run("check", "shardwise.examples.decoder:make", *how, "--allow", "SW105:**")
    assert (status, out) == (0, "no findings, 54 allowed\n")
    status, out, _ = run(
        "plan",
        "mlp.py:make",
        "--mesh",
        "data=2",
        "--strategy",
        "fsdp",
        "--min-bytes",
        "1MiB",
        "--explain",
        "up.bias",
    )
    assert "bytes are fewer than min_bytes=1,048,576" in out


@pytest.mark.parametrize("case", ERRORS)
def test_what_cannot_run_is_one_sentence(run, case):
    arguments, message = ERRORS[case]
    status, out, err = run("plan", *arguments)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"shardwise: {message.rstrip('…')}")
    assert message.endswith("…") or err == f"shardwise: {message}\n"


@pytest.mark.parametrize(
    ("allow", "message"),
    [
        ("SW105", "--allow 'SW105': write CODE:PATTERN, such as SW105:embed.**"),
        ("SW999:**", "--allow names 'SW999', an unknown code: "),
    ],
)
def test_wrong_allowances(run, allow, message):
    status, out, err = run("check", "mlp.py:make", *MESH, "--allow", allow)
    assert (status, out) == (2, "") and err.startswith(f"shardwise: {message}")


def test_a_method_is_traced_instead_of_the_call(run):
    arguments = ("plan", "mlp.py:make", *MESH, "--strategy", "tensor", "--inputs", "float32[8,16]")
    status, out, _ = run(*arguments, "--method", "half", "--format", "json")
    assert status == 0
    reasons = {leaf["path"]: leaf["reason"] for leaf in json.loads(out)["leaves"]}
    assert "the outputs of the model are split; no all-reduce" in reasons["up.kernel"]
    for wrong, message in (
        (("--method", "halve"), "the model, a Mlp, has no method 'halve'; it has half"),
        (("--inputs", "float32[8,15]", "--method", "half"), "Mlp.half cannot be traced: "),
    ):
        status, out, err = run(*arguments, *wrong)
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert err.startswith(f"shardwise: {message}")
    status, out, err = run("plan", "mlp.py:make", *MESH, "--method", "half")
    assert (status, err) == (
        2,
        "shardwise: --method half needs --inputs, the arguments of its call\n",
    )


def test_a_recipe_is_traced_by_its_loss(run):
    status, out, _ = run("plan", "mlp.py:recipe", *MESH, "--strategy", "tensor", "--format", "json")
    assert status == 0
    reasons = {leaf["path"]: leaf["reason"] for leaf in json.loads(out)["leaves"]}
    assert reasons["up.kernel"].endswith(
        "dim 1, traced as one dim of 32 with down.kernel, up.bias: 1 all-reduce in the forward pass"
    )


# --- in a process of its own ----------------------------------------------------------------------


PROCESSES = {
    "clean": (("check", "shardwise.examples.decoder:make", *MESH, "--strategy", "fsdp+tensor"), 0),
    "findings": (("check", "mlp.py:make", *MESH, "--rules", "wrong.toml"), 1),
    "no factory": (("plan", "mlp.py:maker", *MESH), 2),
    "factory's error": (("plan", "mlp.py:breaks", *MESH), 2),
    "no command": (("paln",), 2),
}


@pytest.mark.parametrize("case", PROCESSES)
def test_exit_status_and_streams(case):
    arguments, status = PROCESSES[case]
    done = start(*arguments)
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr
    assert bool(done.stdout) == (status < 2) and bool(done.stderr) == (status == 2)


def test_a_target_may_start_a_backend_when_it_is_imported(folder, monkeypatch):
    done = start("plan", "backend.py:make", *MESH, "--on", "cpu:8", "--strategy", "tensor")
    assert done.returncode == 0, done.stderr
    monkeypatch.syspath_prepend(folder)
    assert done.stdout == planned(lay(mlp().make, "tensor"))
    assert done.stderr.startswith("8\n")  # what the target prints


def test_the_other_side_of_a_report_may_have_more_devices():
    sides = ("--mesh", "data=2", "--on", "cpu:2", "--against-mesh", "data=4", "--against-on")
    done = start("report", "backend.py:make", *sides, "cpu:4", "-o", "two.html")
    assert (done.returncode, set(done.stderr.split())) == (0, {"4"})


def test_the_installed_command_plans_the_example():
    command = os.path.join(os.path.dirname(sys.executable), "shardwise")
    target = ("shardwise.examples.decoder:make", *MESH, "--strategy", "fsdp+tensor")
    shapes = ("--inputs", "int32[8,128]", "--format", "json")
    done = subprocess.run(
        [command, "plan", *target, *shapes], capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stderr) == (0, "")
    inputs = jax.ShapeDtypeStruct((8, 128), "int32")
    layout = lay(decoder.make, "fsdp+tensor", inputs=inputs)
    assert json.loads(done.stdout)["bytes_per_device"] == layout.bytes_per_device
