"""The commands about chips, as a stranger uses them: what they print where, and their exit status."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from forked import Forked

import shardwise as sw
from shardwise._chips.chips import CHIPS
from shardwise._time import Calibration
from shardwise.models import CONFIGS

FILES = {
    "small.py": """
import jax
import optax
import shardwise as sw
from flax import nnx


class Mlp(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(256, 1024, rngs=rngs)
        self.down = nnx.Linear(1024, 256, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


def make():
    return Mlp(nnx.Rngs(0))


def loss(model, x):
    return (model(x) ** 2).mean()


def talk(model, x):
    print("the user's own words")
    return loss(model, x)


def cannot(model, x):
    return model(x.reshape(-1, 7)).mean()


def wide():
    return nnx.Linear(1, 2**33, use_bias=False, rngs=nnx.Rngs(0))


def recipe_of(model=make, loss=loss, width=256, rows=32):
    batch = jax.ShapeDtypeStruct((rows, width), "float32")
    return sw.Recipe(model=model, loss=loss, optimizer=optax.adamw(1e-3), batch=batch)


recipe = recipe_of()
many = recipe_of(rows=2**26)
talks = recipe_of(loss=talk)
fails = recipe_of(loss=cannot)
huge = recipe_of(model=wide, width=1)
""",
    "axis.toml": "[rules]\n'*.kernel' = \"P(None, 'modle')\"",
}
FSDP = ("--mesh", "data=4", "--strategy", "fsdp")
GPU, TPU = ("--on", "h100:1x4"), ("--on", "v5e:2x2")
STEP = ("compile", "small.py:recipe", *FSDP)
KERNEL = 256 * 1024 * 4

pytestmark = pytest.mark.usefixtures("folder")


@pytest.fixture(autouse=True)
def nothing_leaks():
    """What these commands set for compilers is not set for anyone else."""
    before = dict(os.environ)
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    yield
    after = {name: text for name, text in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    assert after == {k: v for k, v in before.items() if k != "PYTEST_CURRENT_TEST"}
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)] == handlers


@pytest.mark.parametrize(
    ("on", "chip"), [(GPU, CHIPS["h100"]), (TPU, CHIPS["v5e"])], ids=["gpu", "tpu"]
)
def test_what_fits_has_status_0_as_text_as_json_and_saved(run, folder, on, chip):
    status, out, err = run(*STEP, *on)
    assert (status, err) == (0, "")
    first, time, *rest = out.splitlines()
    assert re.fullmatch(r"[\d.]+ µs per step \(.* to .*, modelled\), \d+% MFU, bound by \w+", time)
    assert re.fullmatch(
        r"fits: needs [\d.]+ MiB of [\d.]+ GiB, [\d.]+ GiB to spare, "
        rf"on each of 4 devices of {on[1]} \(compiled\)",
        first,
    )
    assert re.fullmatch(r"  █*▓*▒*░*▚*·+  0\.\d% of [\d.]+ GiB", rest[0])
    assert rest[1].startswith("  █ parameters 517.0 KiB (exact)  ▓ optimizer 1.0 MiB (exact)")
    table = rest[rest.index("") + 1 :]
    assert table[0].split() == ["memory", "of", "one", "device", "bytes"]
    assert any(line.startswith("over data: ") and "all-gather" in line for line in rest)
    assert any("small.py:" in line for line in rest)

    status, out, err = run(*STEP, *on, "--format", "json", "--save", "step.json")
    assert (status, err) == (0, "saved step.json\n")
    shown = json.loads(out)
    assert shown["fits"] is True and shown["verdict"] == first and shown["cached"] is True
    assert shown["chips"] == on[1] and shown["platform"] == chip.platform
    assert shown["mesh"] == {"data": 4} and shown["refused"] == ""
    memory = shown["memory"]
    assert memory["capacity"] == chip.capacity_bytes
    assert memory["peak"] == memory["capacity"] - shown["spare_bytes"]
    # Each device holds a quarter of two kernels, and all of two biases; Adam twice that.
    assert memory["parameters"] == 2 * KERNEL // 4 + (1024 + 256) * 4
    assert memory["optimizer"] == 2 * memory["parameters"] + 4
    assert memory["batch"] == 32 // 4 * 256 * 4
    for row in shown["collectives"]:
        assert row["axes"] == ["data"] and row["times"] >= 1 and row["sent_bytes"] > 0
        assert row["total_bytes"] == row["times"] * row["sent_bytes"]
    gathers = [row for row in shown["collectives"] if row["kind"] == "all-gather"]
    assert gathers and any(row["source"]["place"].startswith("small.py:") for row in gathers)
    assert shown["by_axis"]["data"]["all-gather"]["count"] == sum(r["times"] for r in gathers)
    assert shown["findings"] == []

    assert json.loads((folder / "step.json").read_text()) == shown
    loaded = sw.load_compiled("step.json")
    assert loaded.fits and loaded.memory.peak == memory["peak"]
    assert json.loads(json.dumps(loaded.to_dict())) == shown


@pytest.mark.parametrize("on", ["h100:1x4", "v5e:2x2"], ids=["gpu", "tpu"])
def test_what_does_not_fit_has_status_1(run, folder, on):
    arguments = ("compile", "small.py:huge", "--mesh", "data=4", "--on", on)
    note = "note: the layout has 1 warning (SW105): shardwise check shows it\n"
    status, out, err = run(*arguments, "--save", "huge.json")
    assert (status, err) == (1, f"{note}saved huge.json\n")
    verdict = out.splitlines()[0]
    assert re.match(
        r"does not fit: needs [\d.]+ [GT]iB of [\d.]+ GiB, [\d.]+ [GT]iB too much", verdict
    )
    assert "error[SW301]" in out
    tries = f"no strategy fits on this mesh; shardwise search small.py:huge --on {on} also"
    assert re.search(rf"^help: {tries}", out, re.M)
    status, out, err = run(*arguments, "--format", "json")
    shown = json.loads(out)
    assert (status, err) == (1, note)
    assert shown["fits"] is False and shown["spare_bytes"] < 0
    assert shown["verdict"].splitlines()[0] == verdict
    assert "SW301" in [finding["code"] for finding in shown["findings"]]
    assert sw.load_compiled("huge.json").fits is False
    status, out, err = run("plan", *arguments[1:], "--compile")
    assert (status, err) == (1, "") and out.startswith(verdict)


def test_devices_that_are_here_get_no_verdict(run):
    status, out, err = run("compile", "small.py:talks", *FSDP, "--on", "cpu:4")
    assert (status, set(err.splitlines())) == (0, {"the user's own words"})
    assert re.match(r"needs [\d.]+ [KM]iB on each of 4 devices of cpu \(compiled\)\n", out)


@pytest.mark.parametrize("sizes", ["64", "64x256"])
def test_a_batch_of_another_size(run, sizes):
    status, out, err = run(*STEP, "--on", "cpu:4", "--batch", sizes, "--format", "json")
    assert (status, err) == (0, "")
    assert json.loads(out)["memory"]["batch"] == 64 // 4 * 256 * 4


def test_a_published_shape_takes_sequences_and_tokens(run):
    """Its layout and its batch, without the half minute of its compilation."""
    arguments = ("plan", "qwen3-0.6b", *FSDP, "--batch", "8x128", "--format", "json")
    status, out, err = run(*arguments)
    assert (status, err) == (0, "")
    assert 0.59e9 < json.loads(out)["total_bytes"] / 4 < 0.6e9


def test_rematerialisation_is_in_the_program(run):
    flops = {}
    for policy in ("none", "nothing_saveable"):
        status, out, err = run(*STEP, "--on", "cpu:4", "--remat", policy, "--format", "json")
        assert (status, err) == (0, "")
        flops[policy] = json.loads(out)["flops"]
    # The first matmul is done again; what the second returns is not needed.
    assert flops["nothing_saveable"] > flops["none"]


def test_the_forward_pass_of_a_model(run):
    arguments = ("compile", "small.py:make", *FSDP, "--on", "cpu:4", "--inputs", "float32[32,256]")
    status, out, err = run(*arguments, "--format", "json")
    shown = json.loads(out)
    assert (status, err, shown["fits"]) == (0, "", None)
    assert shown["memory"]["optimizer"] == 0
    assert shown["memory"]["batch"] == 32 // 4 * 256 * 4
    assert "reduce-scatter" not in {row["kind"] for row in shown["collectives"]}


def test_plan_compiles_too(run):
    arguments = ("plan", "small.py:recipe", *FSDP, *GPU)
    _, plan, _ = run(*arguments)
    status, out, err = run(*arguments, "--compile")
    assert (status, err) == (0, "")
    # The compiler's verdict comes first, and the bar is of what it says.
    compiled, verdict, *_ = out.splitlines()
    assert compiled.startswith("fits: needs ") and verdict == plan.splitlines()[0]
    assert "░ temporaries" in out and "░ temporaries" not in plan
    assert "one step, without compiling it" in plan and "one step, without" not in out
    table = plan.partition("\n\n")[2].partition("\n\none step, without")[0]
    assert table in out and "over data: " in out.partition(table)[2]

    status, out, err = run(*arguments, "--compile", "--format", "json")
    shown = json.loads(out)
    assert (status, err) == (0, "")
    assert shown["compiled"]["fits"] is True
    assert shown["compiled"]["memory"]["parameters"] == shown["bytes_per_device"]
    assert "compiled" not in json.loads(run(*arguments, "--format", "json")[1])


def test_a_plan_that_holds_its_state_says_first_that_its_step_does_not_fit(run):
    status, out, err = run("plan", "small.py:many", *FSDP, *GPU)
    state, step, *_ = out.splitlines()
    assert (status, err) == (0, "") and "h100 has 79.2 GiB" in state
    assert re.fullmatch(
        r"the step does not fit: needs about [\d.]+ GiB of 79\.2 GiB \(modelled; .*\), on h100:1x4",
        step,
    )
    assert "the step" not in run("plan", "small.py:recipe", *FSDP, *GPU)[1].splitlines()[1]


@pytest.fixture
def measured(folder):
    """The file of an H100 whose products take twice as long, and memory ten times."""
    Calibration("h100", "NVIDIA H100", {"bf16": 0.5, "f32": 0.5}, 3e11).save("slow.json")
    return ("--calibration", "slow.json")


def test_a_plan_is_priced_by_what_was_measured(run, measured):
    arguments = ("plan", "small.py:recipe", *FSDP, *GPU, "--format", "json")
    shipped = json.loads(run(*arguments)[1])["estimate"]["parts"]
    status, out, err = run(*arguments, *measured)
    assert (status, err) == (0, "")
    # Of the parts: the step itself is as long as launching it takes.
    assert sum(json.loads(out)["estimate"]["parts"].values()) > sum(shipped.values())
    status, out, err = run(*arguments, *measured, "--compile")
    assert (status, err) == (0, "")
    assert json.loads(out)["compiled"]["time"]["rates"] == "measured, calibrated on NVIDIA H100"
    status, out, err = run("plan", "small.py:make", *FSDP, *GPU, *measured)
    assert (status, err) == (0, "") and out.endswith("whose arguments --inputs gives\n")


def test_a_report_is_priced_by_what_was_measured(run, folder, measured):
    page = ("report", "small.py:recipe", *FSDP, "-o", "page.html")
    status, _, err = run(*page, *GPU, "--compile", *measured)
    assert (status, err) == (0, "")
    assert "calibrated on NVIDIA H100" in (folder / "page.html").read_text()
    status, _, err = run(*page, *GPU, *measured)
    assert status == 2 and "--calibration prices a compiled step: add --compile" in err


@pytest.mark.parametrize("command", ["plan", "compile", "report"])
@pytest.mark.parametrize(
    ("on", "why"),
    [
        ("a100:1x4", r"the calibration is of h100 \(NVIDIA H100\), but the chips are a100:1x4"),
        ("cpu:4", "no chips whose step times are modelled: name them, such as --on h100:1x8,"),
    ],
    ids=["other chips", "no chips"],
)
def test_a_calibration_must_be_of_the_chips(run, measured, command, on, why):
    output = ("--compile", "-o", "page.html") if command == "report" else ()
    status, out, err = run(command, "small.py:recipe", *FSDP, "--on", on, *measured, *output)
    assert (status, out) == (2, "") and re.search(why, err)


def test_plan_with_errors_is_shown_and_not_compiled(run):
    arguments = ("plan", "small.py:recipe", "--mesh", "data=4", "--rules", "axis.toml", *GPU)
    _, plan, _ = run(*arguments)
    status, out, err = run(*arguments, "--compile")
    assert (status, err) == (1, "")
    assert out == f"{plan}\nnot compiled because the layout has errors\n" and "error[SW101]" in out
    status, out, err = run(*arguments, "--compile", "--format", "json")
    assert (status, err, json.loads(out)["compiled"]) == (1, "", None)


def test_warnings_of_the_layout_are_noted(run):
    mesh = ("--mesh", "seq=2,data=2", "--on", "cpu:4", "--strategy", "fsdp")
    status, out, err = run("compile", "small.py:recipe", *mesh)
    assert status == 0 and "SW111" not in out
    assert err == "note: the layout has 1 warning (SW111): shardwise check shows it\n"
    status, out, err = run("plan", "small.py:recipe", *mesh, "--compile")
    assert (status, err) == (0, "") and "warning[SW111]" in out


def test_chips(run):
    status, out, err = run("chips")
    assert (status or 0, err) == (0, "")
    header, *rows = out.splitlines()
    assert header.startswith("chip ") and [row.split()[0] for row in rows] == list(CHIPS)
    for unit in ("HBM (GiB)", "usable/device (GiB)", "HBM (TB/s)", "link (GB/s)"):
        assert unit in header
    h100 = next(re.split("  +", row) for row in rows if row.startswith("h100"))
    assert h100[3:5] == ["80.0", "79.2"]  # one unit, so that the columns compare
    status, out, err = run("chips", "--format", "json")
    shown = {row["name"]: row for row in json.loads(out)}
    assert (status or 0, err, list(shown)) == (0, "", list(CHIPS))
    assert shown["v5e"]["capacity_bytes"] == CHIPS["v5e"].capacity_bytes
    assert shown["v5e"]["gpu"] is None and shown["h100"]["gpu"]["capability"] == [9, 0]


def test_models(run):
    status, out, err = run("models")
    assert (status or 0, err) == (0, "")
    header, *rows = out.splitlines()
    assert header.split() == ["model", "parameters", "layers", "width"]
    assert [row.split()[0] for row in rows] == list(CONFIGS)
    assert re.search(r"^qwen3-0.6b +0.596 B +28 +1024$", out, re.M)


def test_doctor(run):
    status, out, err = run("doctor")
    assert (status or 0, err) == (0, "")
    versions, tested, devices, tpu, gpu, cudnn = out.splitlines()
    assert re.fullmatch(
        r"tested with jax .*, flax .*, .*; the installed ones are among these", tested
    )
    assert re.match(r"Python 3\.\d+\.\d+, shardwise \S+, jax \S+, jaxlib ", versions)
    assert devices == "devices: 1 x cpu"
    assert re.fullmatch(r"TPU compiler \(v4, .*\): yes, libtpu \S+", tpu)
    assert re.fullmatch(r"GPU compiler \(a100, .*\): yes, jax-cuda1\d-plugin .*", gpu)
    assert cudnn.startswith("cuDNN, for its attention on absent GPUs: ")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            (*STEP, "--on", "h300:1x4"),
            r"--on h300:1x4 does not name a known chip \(did you mean h\d00 or h\d00\?\): use here \(the ",
        ),
        ((*STEP, "--on", "h100"), "--on h100 does not say how many chips: .*such as 'h100:8x8'"),
        ((*STEP, "--on", "v5e:2x2x2"), "--on v5e:2x2x2 has 3 sizes, .* v5e has 2"),
        (
            ("compile", "small.py:recipe", "--mesh", "data=3", "--batch", "9", "--on", "v5e:1x3"),
            "--on v5e:1x3 is not a slice that v5e comes in: the nearest are 'v5e:1x1', 'v5e:2x2', 'v5e:2x4'",
        ),
        (
            ("compile", "small.py:recipe", "--mesh", "data=8", *TPU),
            "mesh data=8 needs 8 devices, but --on v5e:2x2 has 4: these fit 4: data=4",
        ),
        (
            ("compile", "qwen3-0.5b", *FSDP, *GPU),
            r"target 'qwen3-0.5b' is not a published shape \(the nearest are qwen3-0.6b, ",
        ),
        ((*STEP, "--on", "none"), "--on none has no devices to compile for: name chips, such as "),
        (("plan", *STEP[1:], "--compile"), "--on none has no devices to compile for: name chips"),
        (
            ("compile", "small.py:recipe", "--mesh", "data=4", "--rules", "axis.toml", *GPU),
            "not compiled because the layout has errors: down.kernel: error.SW101. axis "
            "'modle' is not on the mesh .*; shardwise check shows 1 more",
        ),
        ((*STEP, *GPU, "--batch", "32x"), "--batch '32x': write sizes, such as 256 or 256x4096"),
        ((*STEP, *GPU, "--batch", "0"), "--batch '0': write sizes, such as 256 or 256x4096"),
        (
            (*STEP, *GPU, "--batch", "32x256x2"),
            r"--batch 32x256x2 has 3 sizes, but the recipe's batch has a leaf of shape \(32, 256\)",
        ),
        (
            (*STEP, *GPU, "--batch", "30"),
            r"batch of shape \(30, 256\) .* \(size 30\) cannot be split 4 ways over axis 'data'",
        ),
        (
            ("compile", "qwen3-0.6b", *FSDP, *GPU, "--batch", "8"),
            "--batch 8: qwen3-0.6b takes sequences x tokens, such as 256x4096",
        ),
        (
            ("compile", "qwen3-0.6b", *FSDP, *GPU, "--batch", "9x128"),
            r"batch of shape \(9, 128\) .* \(size 9\) cannot be split 4 ways over axis 'data'",
        ),
        (
            ("compile", "small.py:make", *FSDP, *GPU),
            r"target 'small.py:make' is a model: give .* --inputs 'int32\[8,128\]', or name a Recipe",
        ),
        (
            ("compile", "small.py:make", *FSDP, *GPU, "--batch", "8"),
            "--batch needs a recipe, and target 'small.py:make' is not one",
        ),
        (
            ("compile", "small.py:make", *FSDP, *GPU, "--remat", "none"),
            "--remat needs a recipe, and target 'small.py:make' is not one",
        ),
        (
            (*STEP, *GPU, "--remat", "dots"),
            "--remat 'dots' is not a policy: give one of none, .*dots_saveable",
        ),
        (
            ("compile", "qwen3-0.6b", *FSDP, *GPU, "--remat", "dots"),
            "--remat 'dots' is not a policy: give one of none, .*dots_saveable",
        ),
        (
            (*STEP, *GPU, "--save", "nowhere/step.json"),
            "--save nowhere/step.json cannot be written: there is no folder nowhere",
        ),
        ((*STEP, *GPU, "--save", "."), "--save . is a folder: name a file"),
        ((*STEP, *GPU, "--format", "yaml"), "--format 'yaml' is not one of "),
        (("compile", "small.py:recipe", *GPU), "Missing option '--mesh'"),
    ],
    ids=lambda given: " ".join(given)[:60] if isinstance(given, tuple) else "",
)
def test_what_cannot_be_done_is_one_line_and_status_2(run, folder, arguments, told):
    # Only what comes before a compiler may be refused here, so the file would be half written.
    if "--save" not in arguments:
        arguments = (*arguments, "--save", "step.json")
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    assert re.match(f"shardwise: {told}", err) and err.count("\n") == 1, err
    assert "Traceback" not in err and "site-packages" not in err
    assert sorted(path.name for path in folder.iterdir() if path.is_file()) == sorted(FILES)


@pytest.mark.parametrize("on", ["h100:1x4", "cpu:4"], ids=["absent", "here"])
def test_a_loss_that_fails_is_told_by_the_user_s_own_line(run, folder, on):
    status, out, err = run("compile", "small.py:fails", *FSDP, "--on", on)
    assert (status, out) == (2, "")
    line = FILES["small.py"].splitlines().index("    return model(x.reshape(-1, 7)).mean()") + 1
    assert err.startswith("shardwise: the step cannot be traced: ") and err.count("\n") == 1
    assert f'File "{folder}/small.py", line {line}, in cannot' in err
    assert "TypeError: cannot reshape array of shape (32, 256)" in err
    assert "site-packages" not in err and err.count("File ") == 1


@pytest.mark.parametrize("command", ["compile", "plan"])
def test_a_file_that_cannot_be_made_is_one_line_too(run, command):
    """Not even root can, but only trying shows it; nothing is printed that looks like success."""
    status, out, err = run(command, *STEP[1:], "--on", "cpu:4", "--save", "/proc/step.json")
    assert (status, out) == (2, "")
    assert re.fullmatch(r"shardwise: .*cannot be written.*: [\w ]+\n", err)


def plain_environment(folder):
    """Returns a shell's: nothing of JAX is set, and temporary files have a place of their own."""
    names = ("JAX_PLATFORMS", "XLA_FLAGS", "SHARDWISE_CACHE")
    kept = {name: text for name, text in os.environ.items() if name not in names}
    (folder / "tmp").mkdir()
    return {**kept, "TMPDIR": str(folder / "tmp"), "XDG_CACHE_HOME": str(folder / "cache")}


@pytest.mark.parametrize("on", ["v5e:2x2", "here"])
def test_nothing_is_on_stderr_in_a_plain_environment(folder, on):
    size = "data=4" if on != "here" else "data=1"
    command = ("compile", "small.py:make", "--mesh", size, "--on", on, "--strategy", "fsdp")
    done = subprocess.run(
        [sys.executable, "-m", "shardwise", *command, "--inputs", "float32[32,256]"],
        env=plain_environment(folder),
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert re.match(r"(fits: )?needs ", done.stdout)
    assert list((folder / "tmp").glob("shardwise-*")) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_killed_in_the_middle_nothing_is_left(folder, number):
    process = Forked(
        [sys.executable, "-m", "shardwise", *STEP, *TPU, "--save", "step.json"],
        env=plain_environment(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    workers = []
    while process.poll() is None and not (
        workers and list((folder / "tmp").glob("shardwise-*/noise"))
    ):
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
            workers = [int(child) for child in text.split()]
        time.sleep(0.02)
    assert workers
    process.send_signal(number)
    word = {signal.SIGTERM: "terminated", signal.SIGINT: "interrupted"}[number]
    assert process.communicate(timeout=30) == ("", f"shardwise: {word}\n")
    assert process.returncode == 128 + number
    # It kills its compilers and goes: on a busy machine they need a moment to be gone as well.
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{worker}").exists() for worker in workers):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert list((folder / "tmp").glob("shardwise-*")) == []
    assert not (folder / "step.json").exists()
