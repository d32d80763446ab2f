"""Wrong command lines, over every command: each must end in one clear sentence.

`python tests/support/wrong_lines.py` runs them all and prints what is amiss; tests/cli/test_wrong_lines.py runs
a part. All run in one process: JAX is imported once.
"""

import contextlib
import io
import os
import re
import shlex
import sys
import tempfile
from pathlib import Path

FILES = {
    "m.py": """
import jax, optax
import shardwise as sw
from flax import nnx

class Mlp(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(16, 32, rngs=rngs)
        self.down = nnx.Linear(32, 16, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))

def make():
    return Mlp(nnx.Rngs(0))

def needs(config):
    return make()

def breaks():
    raise KeyError("width")

def nothing():
    return None

number, text, mesh, listed = 3, "a", sw.mesh("a=2", on="none"), [1]
recipe = sw.Recipe(
    model=make, loss=lambda model, x: model(x).sum(), optimizer=optax.adamw(1e-3),
    batch=jax.ShapeDtypeStruct((8, 16), "float32"),
)
broken = sw.Recipe(
    model=make, loss=lambda model, x: model(x.reshape(-1, 7)).sum(), optimizer=optax.adamw(1e-3),
    batch=jax.ShapeDtypeStruct((8, 16), "float32"),
)
""",
    "exits.py": "import sys\nsys.exit(0)",
    "leaves.py": "import os\nos._exit(0)",
    "empty.py": "",
    "bad.py": "def f(:",
    "raises.py": "1 / 0",
    "imports.py": "import no_such_module_at_all",
    "bad.toml": "strategy = ",
    "odd.toml": "stratgy = 'fsdp'",
    "typed.toml": "strategy = 3",
    "pattern.toml": "[[rules]]\n'a..b' = 'P()'",
    "spec.toml": "[[rules]]\n'**' = 'Q('",
    "number.toml": "[[rules]]\n'**' = 3",
    "axis.toml": "[[rules]]\n'**.kernel' = \"P('modle')\"",
    "logical.toml": "[logical]\nmlp = 3",
    "list.json": "[]",
    "empty.json": "",
    "object.json": "{}",
    "half.json": '{"version": 1, "leaves": [',
    "odd.json": '{"target": 3}',
    "lesson.py": "x = 1",
}
CHIPS = (
    "v5p", "v5p:", "v5p:x", "v5p:4", "v5p:4x4", "v5p:3x5x7", "v5p:8x4x4", "v5p:0x4x4", "v5p:-4x4x4",
    "v5p:4x4x4x4", "v5p:4.0x4x4", "v5p:4x4x99999999999999999999", "v5e:1000x1000", "v5e:4x2",
    "v5e:2x2x1", "v4:1x2x3", "v6e:16x32", "tpu7x:3x3x3", "v7:2x2", "tpu", "gpu:8", "h100", "h100:1x9",
    "h100:9", "h100:0x8", "h100:8x", "h100:8x8x8", "h100:99999999999x8", "h300:8x8", "cpu", "cpu:",
    "cpu:0", "cpu:-1", "cpu:x", "cpu:99999", "cpu:99999999999999999999", "nowhere", "", " ", "8",
)  # fmt: skip
MESHES = (
    "", " ", ",", "=", "data", "data=", "=8", "data=x", "data=0", "data=-2", "data=1.5", "data=8,",
    "data=4,data=2", "data=-1", "data=-1,model=-1", "data:8", "data 8", "8", "1a=8", "data=8;model=2",
    "data=100000000000000000000", "data=70000,model=70000", "data=²", "data=" + "9" * 5000, "da ta=8",
)  # fmt: skip
TARGETS = (
    "", ":", "m.py", "m.py:", ":make", "m.py:mak", "m.py:make:x", "no.py:make", "no.mod:make", "m:mak",
    "..:make", ".m:make", "a b:make", "m.py:make.x", "m.py:number", "m.py:text", "m.py:mesh",
    "m.py:listed", "m.py:nothing", "m.py:needs", "m.py:breaks", "exits.py:make", "leaves.py:make",
    "empty.py:make", "bad.py:make", "raises.py:make", "imports.py:make", "folder.py:make", "folder:make",
    "llama3-9b", "llama", "/:x", "m.py:__name__", "binary.py:make", "http://x/y.py:make", "m.toml:make",
)  # fmt: skip
INPUTS = (
    "", ";", "f32", "int32", "int32[8", "int32[]]", "int33[8]", "int32[-1]", "int32[8,]x", "int32[0,64]",
    "int32[8.0]", "float32[8,15]", "float32[99999999999999]", "x=float32[8,16];int32[8]", "x=",
    "x=float32[8];x=int32[8]", "{}", "{", '{"x": 3}', '{"x": "f32"}', "[1]", "y=float32[8,16]",
    "float32[8,16];float32[8,16]", "null", "float32[²]",
)  # fmt: skip
STRATEGIES = (
    "",
    "zero",
    "fsdp+",
    "+",
    "fsdp+zero",
    "FSDP",
    "fsdp tensor",
    "fsdp,tensor",
    "tensor+tensor",
)
RULES = (
    "no.toml", "folder", "", "bad.toml", "odd.toml", "typed.toml", "pattern.toml", "spec.toml",
    "number.toml", "logical.toml", "binary.py", "m.py",
)  # fmt: skip
BATCHES = ("", "x", "0", "-1", "8x", "8x0", "1.5", "8x16x2", "7", "99999999999999999999", "8,16")
REMATS = ("", "dots", "None", "save_nothing", "dots_saveable+x")
PLACES = ("", "-", ".", "folder", "no/x.json", "m.py/x.json", "m.py", "/proc/x.json", "/dev/full")
ALLOWS = ("", ":", "SW105", "SW105:", ":x", "SW1:x", "SW999:**", "sw105:x", "SW105:a..b")
FORMATS = ("", "xml", "JSON ", "yaml")
LAID = "m.py:make --mesh data=8"
USER_CODE = re.compile(r"importing|KeyError: 'width'|cannot be called|cannot be traced")


def lines():
    """Yields every line: its words, and the statuses that are right."""

    def given(command, base, option, values, *, fine=()):
        for value in values:
            yield [command, *shlex.split(base), option, value], (0, 1, 2) if value in fine else (2,)

    for command in ("plan", "check"):
        for target in TARGETS:
            yield [command, target, "--mesh", "data=8"], (2,)
        yield from given(command, "m.py:make", "--mesh", MESHES)
        yield from given(command, LAID, "--on", CHIPS, fine=(" ",))
        yield from given(command, f"{LAID} --strategy tensor", "--inputs", INPUTS)
        yield from given(command, LAID, "--strategy", STRATEGIES, fine=("tensor+tensor",))
        yield from given(command, LAID, "--rules", RULES)
    yield from given("check", LAID, "--allow", ALLOWS, fine=("SW105:a..b",))
    yield from given("check", LAID, "--format", FORMATS)
    yield from given("plan", LAID, "--format", FORMATS)
    weights = "check m.py:make no --mesh data=8"
    yield ["weights"], (2,)
    yield ["weights", "chek", "m.py:make", "no", "--mesh", "data=8"], (2,)
    yield ["weights", "check", "m.py:make", "no"], (2,)
    yield ["weights", "save", "m.py:make", "no", "--mesh", "data=8"], (2,)
    yield from given("weights", weights, "--names", ("no.toml", "folder", "bad.toml", "odd.toml"))
    yield from given("weights", weights, "--dtype", ("x", "int8"))
    yield from given("weights", weights, "--allow", ALLOWS, fine=("SW105:a..b",))
    yield from given("weights", weights, "--checkpoints", ("runs",))
    yield from given("weights", weights, "--step", ("1", "x"))
    yield from given("plan", LAID, "--save", PLACES)
    yield from given("plan", LAID, "--explain", ("", "up", "up.kernal", "up.*", "."))
    for command in ("plan", "compile"):
        on = "--on cpu:8" if command == "compile" else ""
        yield from given(
            command, f"m.py:recipe --mesh data=8 {on}", "--batch", BATCHES, fine=("7",)
        )
        yield from given(command, f"m.py:recipe --mesh data=8 {on}", "--remat", REMATS)
        yield from given(command, f"m.py:make --mesh data=8 {on}", "--batch", ("8",))
        yield from given(command, f"m.py:make --mesh data=8 {on}", "--remat", ("none",))
    yield from given("plan", "llama3-8b --mesh data=8", "--batch", ("8", "8x9x9", "x"))
    compile_on = "m.py:recipe --mesh data=8"
    yield from given(
        "compile", compile_on, "--on", ("none", *CHIPS[:8], "cpu:4", "h100:1x9", "v5e:1x1")
    )
    yield from given("compile", f"{compile_on} --on cpu:8", "--save", PLACES[:7])
    yield from given("compile", f"{compile_on} --on cpu:8", "--rules", ("axis.toml", *RULES[:4]))
    yield from given("compile", "m.py:make --mesh data=8 --on cpu:8", "--inputs", INPUTS[:9])
    for rest in (
        "m.py:make --mesh data=8 --on cpu:8", "m.py:broken --mesh data=8 --on cpu:8", "m.py:recipe",
        "m.py:recipe --mesh data=8 --on cpu:8 --strategy nope", "m.py:number --mesh data=8",
    ):  # fmt: skip
        yield ["compile", *rest.split()], (2,)

    report = "-o out.html --mesh data=8"
    for target in (*TARGETS[:10], "no.json", "list.json", "empty.json", "object.json", "half.json",
                   "odd.json", "folder.json"):  # fmt: skip
        json = target.endswith(".json")
        yield ["report", target, *("-o out.html" if json else report).split()], (2,)
    yield from given("report", LAID, "-o", PLACES)
    for rest in (
        "m.py:make -o out.html", "m.py:make --mesh data=8", "object.json -o out.html --mesh data=8",
        "m.py:make -o out.html --mesh data=8 --against no.py:make",
        "m.py:make -o out.html --mesh data=8 --against object.json",
        "m.py:make -o out.html --mesh data=8 --against-mesh data",
        "m.py:make -o out.html --mesh data=8 --against-on v9:2",
        "m.py:make -o out.html --mesh data=8 --against-strategy zero",
        "m.py:make -o out.html --mesh data=8 --against-rules no.toml",
        "m.py:make -o out.html --mesh data=8 --compile", "m.py:make -o m.py --mesh data=8",
    ):  # fmt: skip
        yield ["report", *rest.split()], (2,)

    train = "m.py:recipe --mesh data=8 --on cpu:8"
    yield from given("train", f"{train} --data m.py:number", "--steps", ("", "x", "1.5"))
    yield from given("train", f"{train} --steps 1", "--data", (
        "", "no.py:data", "m.py:no", "m.py:number", "m.py:breaks", "no.npy", "folder", "m.py",
    ))  # fmt: skip
    for rest in (
        "", "m.py:recipe", "m.py:recipe --mesh data=8", "m.py:make --mesh data=8 --on cpu:8 --steps 1",
        f"{train} --steps 1", f"{train} --steps 1 --resume", f"{train} --steps 1 --every 2",
        f"{train} --steps 1 --minutes 1", f"{train} --steps 1 --keep x",
        f"{train} --steps 1 --checkpoints m.py --data m.py:number",
        "m.py:recipe --mesh data=8 --on none --steps 1 --data m.py:number",
        "m.py:recipe --mesh data=9 --on cpu:8 --steps 1",
        "m.py:number --mesh data=8 --on cpu:8 --steps 1",
    ):  # fmt: skip
        yield ["train", *rest.split()], (2,)
    for rest in (
        "", "no/such", "m.py", "folder", "folder --step x", "folder --preflight m.py:recipe",
        "folder --preflight m.py:make --mesh data=8", "folder --preflight m.py:no --mesh data=8",
        "folder --preflight m.py:recipe --mesh data", "folder --format xml",
        "folder --preflight m.py:recipe --mesh data=8 --step 7",
    ):  # fmt: skip
        yield ["checkpoints", *rest.split()], (2,)
    for rest in (
        "", "-n 2", "-n 0 -- true", "-n -1 -- true", "-n x -- true", "-- true",
        "-n 1 -- no-such-program-at-all", "-n 1 --devices 0 -- true", "-n 1 -- ./m.py",
        "-n 2 --min 1 -- true", "-n 2 --elastic --min 0 -- true", "-n 2 --elastic --min 3 -- true",
        "-n 2 --elastic --back-after -1 -- true", "-n 2 --elastic --back-after nan -- true",
    ):  # fmt: skip
        yield ["launch", *rest.split()], (2,)
    for rest in ("--steps 0", "--steps x", "--steps -1", "--steps 3", "--step 4", "extra"):
        yield ["demo", *rest.split()], (2,)
    for rest in (
        "start", "start x", "start 0", "start 99 a.py", "start 1 m.py", "start 1 a.txt",
        "start 1 no/a.py", "check", "check 1", "check x m.py", "check 99 m.py", "check 1 no.py",
        "check 1 folder", "check 1 rules.toml", "check 1 lesson.py --only nope",
        "check 1 lesson.py --limit 0", "check 1 lesson.py --limit x", "check 1 bad.py", "nope",
        "check 1 lesson.py --format xml", "check 1 exits.py", "check 1 leaves.py", "check 1 folder.py",
    ):  # fmt: skip
        yield ["learn", *rest.split()], (2,)
    for rest in ("SW1", "SW999", "nope", "up.kernel", "SW104 SW105", "''", "--format xml"):
        yield ["explain", *shlex.split(rest)], (2,)
    for command in ("models", "chips", "doctor"):
        for rest in ("extra", "--format", "--format xml", "--no-such-option"):
            yield [command, *rest.split()], (2,)
    for rest in ("paln", "--verison", "plan --mesh", "plan m.py:make --mesh data=8 extra", "--format json",
                 "plan m.py:make --mesh data=8 --strateg fsdp", "check m.py:make --mesh data=8 --save x"):  # fmt: skip
        yield rest.split(), (2,)


def make_files(folder):
    for name, text in FILES.items():
        (folder / name).write_text(text)
    (folder / "binary.py").write_bytes(bytes(range(256)))
    for name in ("folder", "folder.py", "folder.json"):
        (folder / name).mkdir()


def run(words):
    """Returns the status, stdout and stderr of a command line, run in this process."""
    from shardwise import _cli

    out, err = io.StringIO(), io.StringIO()
    before = sys.argv, os.getcwd()
    sys.argv = ["shardwise", *words]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            _cli.main()
    except SystemExit as ended:
        status = ended.code or 0
    finally:
        sys.argv = before[0]
        os.chdir(before[1])
    return status, out.getvalue(), err.getvalue()


def judge(words, statuses, status, out, err):
    """Yields what is amiss."""
    if status not in statuses:
        yield f"status {status}, not {statuses}"
    if status != 2:
        return
    if out:
        yield f"prints {out[:60]!r} though it fails"
    if err.count("\n") != 1 or not err.startswith("shardwise: "):
        yield "not one sentence"
    if "Traceback" in err:
        yield "a traceback"
    text = err.removeprefix("shardwise: ")
    if re.search(r"\b[A-Z]\w*(Error|Exception)\b", text) and not USER_CODE.search(text):
        yield "a raw exception"
    if re.search(
        r"\bsw\.\w+\(|(?<![\w-])(on|allow|inputs|rules|logical|dtype|length)=|jax\.config", text
    ):
        yield "advice in Python"
    if len(text) < 20:
        yield "hardly a sentence"
    if not USER_CODE.search(text) and text.rstrip().endswith((":", ",", " in", "''", "None")):
        yield "stops in mid-sentence"


def campaign(chosen):
    """Yields each line with what is amiss with it, if anything is."""
    path = [*sys.path]
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):
        make_files(Path(name))
        for words, statuses in chosen:
            takes_json = words[0] in ("plan", "check", "compile") and "--format" not in words
            more = ["--format", "json"] if takes_json else []
            status, out, err = run([*words, *more])
            yield words, list(judge(words, statuses, status, out, err)), status, err
    sys.path[:] = path
    for file in FILES:
        sys.modules.pop(file.removesuffix(".py"), None)


def main():
    import logging

    import jax

    logging.disable()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    chosen = [line for line in lines() if len(sys.argv) == 1 or line[0][0] in sys.argv[1:]]
    count = wrong = 0
    for words, amiss, status, err in campaign(chosen):
        count += 1
        wrong += bool(amiss)
        if amiss or "-v" in sys.argv:
            print(
                f"{shlex.join(words)[:200]}\n  [{status}] {err.rstrip()[:600]}\n  {'; '.join(amiss)}"
            )
    print(f"{count} lines, {wrong} amiss")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
