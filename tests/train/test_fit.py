"""The training loop: bitwise resume, stopping by signals, logs, and never saving a bad state."""

import importlib.util
import json
import math
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from forked import Forked

import shardwise as sw

SCRIPT = Path(__file__).parents[1] / "scripts" / "kill_fit.py"
spec = importlib.util.spec_from_file_location("kill_fit", SCRIPT)
run = importlib.util.module_from_spec(spec)
spec.loader.exec_module(run)

SMALL = sw.Recipe(
    model=lambda: nnx.Linear(8, 4, rngs=nnx.Rngs(0)),
    loss=lambda model, x: (model(x) ** 2).mean(),
    optimizer=optax.adam(1e-2),
    batch=jax.ShapeDtypeStruct((16, 8), "float32"),
)
BATCH = run.SAMPLES[:16]


def small_layout(model=SMALL.model):
    return sw.layout(model, sw.mesh("data=2", on="cpu:2"), "dp")


def fit_small(data=None, steps=4, recipe=SMALL, **more):
    data = run.data() if data is None else data
    return sw.fit(
        recipe, small_layout(recipe.model), data, **{"steps": steps, "show": False} | more
    )


def bits(state):
    def one(x):
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(x) if is_key else x).tobytes()

    return [one(x) for x in jax.tree.leaves(state)]


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The states of steps 20 and 25 of an uninterrupted run."""
    checkpoints = sw.Checkpoints(tmp_path_factory.mktemp("straight"), keep=None, every=5)
    state = sw.fit(
        run.RECIPE, run.layout_on(), run.data(), steps=25, checkpoints=checkpoints, show=False
    )
    assert checkpoints.steps() == [5, 10, 15, 20, 25]
    return checkpoints, bits(state)


# --- resumed --------------------------------------------------------------------------------------


@pytest.mark.bitwise
def test_resume_is_bitwise(straight, tmp_path):
    """BatchNorm, dropout, moving average, accumulation, and the position in the data and epoch."""
    whole = straight[0]
    for steps in (10, 20):
        checkpoints = sw.Checkpoints(tmp_path)
        state = sw.fit(
            run.RECIPE,
            run.layout_on(),
            run.data(),
            steps=steps,
            checkpoints=checkpoints,
            show=False,
        )
    assert checkpoints.steps() == [10, 20]
    assert bits(state) == bits(whole.restore(run.RECIPE, run.layout_on(), step=20))
    assert checkpoints.about()["position"] == whole.about(20)["position"] == 320


def test_resume_on_another_mesh(straight, tmp_path):
    """The same order of data, and the same numbers up to the order of sums: 1e-4."""
    whole = straight[0]
    (tmp_path / "10").symlink_to(whole.directory / "10")
    other = sw.layout(run.Net, sw.mesh("data=2,model=2", on="cpu:4"), [sw.tensor("model")])
    state = sw.fit(
        run.RECIPE, other, run.data(), steps=20, checkpoints=sw.Checkpoints(tmp_path), show=False
    )
    want = whole.restore(run.RECIPE, run.layout_on(), step=20)
    for path, x in {**state.model, **state.ema}.items():
        if jnp.issubdtype(x.dtype, jnp.floating):
            y = (want.ema if path in want.ema and x is state.ema.get(path) else want.model)[path]
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4, err_msg=path)


@pytest.mark.bitwise
def test_plain_iterables_are_advanced_on_resume(tmp_path):
    batches = [BATCH * (1 + i / 10) for i in range(8)]
    want = bits(fit_small(batches, steps=8))
    for steps, data in ((3, list(batches)), (8, (b for b in batches))):
        state = fit_small(data, steps=steps, checkpoints=sw.Checkpoints(tmp_path))
    assert bits(state) == want


@pytest.mark.bitwise
def test_a_run_that_is_done_does_nothing(tmp_path, capsys):
    checkpoints = sw.Checkpoints(tmp_path / "run")
    done = fit_small(checkpoints=checkpoints)
    capsys.readouterr()
    again = fit_small(checkpoints=checkpoints, show=True)
    assert bits(again) == bits(done)
    assert capsys.readouterr().err == (
        f"resumed from step 4 in {tmp_path / 'run'}\n"
        "nothing to do: the run already has 4 of 4 steps\n"
    )
    assert checkpoints.steps() == [4]


def test_a_new_run_never_loses_its_checkpoints_to_older_ones(tmp_path):
    checkpoints = sw.Checkpoints(tmp_path, every=2, keep=2)
    fit_small(steps=8, checkpoints=checkpoints)
    with pytest.raises(ValueError, match="resume=False"):
        fit_small(steps=4, checkpoints=checkpoints, resume=False)
    assert checkpoints.steps() == [6, 8]


@pytest.mark.bitwise
def test_under_a_mesh_that_is_set(tmp_path):
    with jax.set_mesh(sw.mesh("other=4", on="cpu:4")):
        state = fit_small(
            steps=2, checkpoints=sw.Checkpoints(tmp_path), evaluate=run.data(), evaluate_every=1
        )
    assert bits(state) == bits(fit_small(steps=2))


# --- what is saved and written --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "saved"),
    [({}, [7]), ({"every": 3}, [3, 6, 7]), ({"minutes": 1e-6}, [1, 2, 3, 4, 5, 6, 7])]
    + [({"every": 7, "minutes": 1e6}, [7])],
    ids=str,
)
def test_when_it_saves(tmp_path, more, saved):
    checkpoints = sw.Checkpoints(tmp_path, keep=None, **more)
    fit_small(steps=7, checkpoints=checkpoints)
    assert checkpoints.steps() == saved
    assert [checkpoints.about(s)["position"] for s in saved] == [16 * s for s in saved]
    assert (tmp_path / "7" / "about" / "layout.json").is_file()


def events(folder):
    """Returns the scalars of TensorBoard's event files, parsed by hand."""
    from tensorboardX.proto.event_pb2 import Event

    found = []
    for path in sorted(folder.glob("events.out.*")):
        data = path.read_bytes()
        while data:
            (size,) = struct.unpack("<Q", data[:8])
            event = Event.FromString(data[12 : 12 + size])
            found += [(event.step, v.tag, v.simple_value) for v in event.summary.value]
            data = data[16 + size :]
    return found


def refuse(constant):
    raise AssertionError(f"{constant} is no JSON")


def rows(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


def test_logs_evaluation_and_a_profile(tmp_path, capsys):
    recipe = sw.Recipe(
        model=SMALL.model,
        loss=lambda model, x: (SMALL.loss(model, x), {"mean": x.mean(), "many": x[:2, 0]}),
        optimizer=SMALL.optimizer,
        batch=SMALL.batch,
        clip=1.0,
    )
    more = {"evaluate": run.data(), "evaluate_every": 4, "evaluate_batches": 3, "profile": 5}
    fit_small(recipe=recipe, steps=10, logs=tmp_path, log_every=3, show=True, **more)
    found = rows(tmp_path)
    assert [row["step"] for row in found if "loss" in row] == [1, 3, 6, 9, 10]
    assert [row["step"] for row in found if "eval_loss" in row] == [4, 8]
    names = {"step", "time", "loss", "mean", "grad_norm", "step_seconds", "samples_per_second"}
    assert set(found[0]) == names
    board = events(tmp_path)
    for row in found:
        for name in set(row) - {"step", "time"}:
            (value,) = [v for step, tag, v in board if (step, tag) == (row["step"], name)]
            assert value == pytest.approx(row[name], rel=1e-5)
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))
    lines = capsys.readouterr().err.splitlines()
    begin, end = r"step {}/10  loss \S+  \S+ (?:s|ms|µs)", r"  \d+ B/device \(exact\)"
    compiling = rf"{begin} with compilation{end}"
    pattern = rf"{begin}  \S+ samples/s  ETA \d:\d\d{end}"
    steps = [line for line in lines if "loss" in line and "eval" not in line]
    for number, line in zip((1, 3, 6, 9, 10), steps, strict=True):
        wanted = compiling if number == 1 else pattern
        assert re.fullmatch(wanted.format(number), line), line
    assert sum("eval_loss" in line for line in lines) == 2


@pytest.mark.bitwise
def test_evaluation_is_of_the_same_batches_and_changes_nothing(tmp_path):
    frozen = sw.Recipe(
        model=SMALL.model, loss=SMALL.loss, optimizer=optax.sgd(0.0), batch=SMALL.batch
    )
    fit_small(recipe=frozen, logs=tmp_path, evaluate=run.data(), evaluate_every=1)
    assert len({row["eval_loss"] for row in rows(tmp_path) if "eval_loss" in row}) == 1
    plain = bits(fit_small())
    assert bits(fit_small(evaluate=run.data(), evaluate_every=1)) == plain


# --- not finite -----------------------------------------------------------------------------------

BAD = [BATCH] * 4 + [BATCH * np.nan] * 4


def test_a_loss_that_is_not_finite(tmp_path):
    checkpoints = sw.Checkpoints(tmp_path / "run", every=2)
    with pytest.raises(sw.NotFinite) as caught:
        fit_small(BAD, steps=8, checkpoints=checkpoints, logs=tmp_path / "logs", log_every=1)
    assert str(caught.value) == (
        f"the loss is nan at step 5; the last good checkpoint is step 4 in {tmp_path / 'run'}"
    )
    assert checkpoints.steps() == [2, 4]
    state = checkpoints.restore(SMALL, small_layout())
    assert all(np.isfinite(np.asarray(x)).all() for x in jax.tree.leaves(state))
    assert [row["step"] for row in rows(tmp_path / "logs")] == [1, 2, 3, 4, 5]


def test_a_loss_that_is_not_finite_with_nothing_saved(tmp_path):
    with pytest.raises(sw.NotFinite) as caught:
        fit_small(BAD, steps=8)
    assert str(caught.value) == (
        "the loss is nan at step 5; nothing was saved: give fit checkpoints="
    )
    with pytest.raises(sw.NotFinite) as caught:
        fit_small(BAD, steps=8, checkpoints=sw.Checkpoints(tmp_path))
    assert str(caught.value).startswith("the loss is nan at step 5; ")
    assert "has no earlier checkpoint" in str(caught.value) and str(tmp_path) in str(caught.value)


def test_a_state_that_is_not_finite_is_never_saved(tmp_path):
    rate = lambda count: jnp.where(count == 4, jnp.inf, 0.1)  # noqa: E731
    recipe = sw.Recipe(
        model=SMALL.model, loss=SMALL.loss, optimizer=optax.sgd(rate), batch=SMALL.batch
    )
    checkpoints = sw.Checkpoints(tmp_path, every=1)
    with pytest.raises(sw.NotFinite) as caught:
        fit_small(recipe=recipe, steps=8, checkpoints=checkpoints)
    assert str(caught.value) == (
        "bias and 1 more are not finite after step 5; "
        f"the last good checkpoint is step 4 in {tmp_path}"
    )
    assert checkpoints.steps()[-1] == 4


class Masked(nnx.Module):
    """A buffer that is intentionally infinite, like an attention mask."""

    def __init__(self):
        self.linear = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
        self.mask = nnx.Variable(jnp.where(jnp.tril(jnp.ones((8, 8), bool)), 0.0, -jnp.inf))

    def __call__(self, x):
        return self.linear(x @ jax.nn.softmax(self.mask[...]))


@pytest.mark.parametrize(
    ("model", "optimizer"),
    [
        (Masked, optax.sgd(0.1)),
        (
            SMALL.model,
            optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(accumulation_size=9)),
        ),
    ],
    ids=["a mask", "an optimizer's best value so far"],
)
def test_what_is_infinite_from_the_start_may_be_saved(tmp_path, model, optimizer):
    recipe = sw.Recipe(model=model, loss=SMALL.loss, optimizer=optimizer, batch=SMALL.batch)
    checkpoints = sw.Checkpoints(tmp_path)
    fit_small(recipe=recipe, checkpoints=checkpoints)
    assert checkpoints.steps() == [4]


def test_an_unwritable_directory_is_reported_before_the_first_step(tmp_path):
    (tmp_path / "file").write_text("")
    steps = []
    recipe = sw.Recipe(
        model=SMALL.model,
        loss=lambda model, x: steps.append(1) or SMALL.loss(model, x),
        optimizer=SMALL.optimizer,
        batch=SMALL.batch,
    )
    with pytest.raises(sw.CheckpointError) as caught:
        fit_small(recipe=recipe, checkpoints=sw.Checkpoints(tmp_path / "file" / "run"))
    place = tmp_path / "file" / "run"
    assert str(caught.value) == (
        f"checkpoints cannot be saved to {place}: part of the path is a file"
    )
    assert not steps


# --- wrong arguments, and data that ends ----------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"steps": 0}, "steps must be a positive integer, got 0"),
        ({"steps": 2.5}, "steps must be a positive integer, got 2.5"),
        ({"log_every": 0}, "log_every must be a positive integer, got 0"),
        (
            {"evaluate": run.data(), "evaluate_every": 0},
            "evaluate_every must be a positive integer, got 0",
        ),
        (
            {"evaluate": run.data()},
            "evaluate= and evaluate_every= must be given together",
        ),
        ({"evaluate": [BATCH], "evaluate_every": 1}, "evaluate has type list: give sw.data(…)"),
        ({"data": 5}, "the data has type int: give sw.data(…), or an iterable of batches"),
        (
            {"data": [BATCH[:8]]},
            "the batch does not match the recipe: batch is float32[8, 8], wanted float32[16, 8]",
        ),
        (
            {"data": [BATCH] * 3},
            "the data ended before step 4 of 4: give fewer steps, or data with more epochs "
            "(sw.data(…, epochs=None) never ends)",
        ),
        (
            {"data": run.data(epochs=1), "steps": 7},
            "the data ended before step 7 of 7: give fewer steps, or data with more epochs "
            "(sw.data(…, epochs=None) never ends)",
        ),
    ],
    ids=lambda x: str(x)[:40] if isinstance(x, str) else ",".join(x),
)
def test_wrong_arguments(more, message):
    with pytest.raises(ValueError) as caught:
        fit_small(**more)
    assert str(caught.value) == message


def test_a_save_in_progress_is_finished_when_the_data_ends(tmp_path):
    checkpoints = sw.Checkpoints(tmp_path, every=3)
    with pytest.raises(ValueError, match="^the data ended before step 4 of 9: "):
        fit_small([BATCH] * 3, steps=9, checkpoints=checkpoints)
    assert checkpoints.steps() == [3]


# --- signals, in real processes -------------------------------------------------------------------


def start(directory, steps, how, **more):
    kept = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
    command = [sys.executable, str(SCRIPT), str(directory), str(steps), how]
    env = kept | {"JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"}
    return Forked(command, env=env, **more)


def read_until(process, text):
    lines = []
    for line in process.stderr:
        lines.append(line)
        if text in line:
            return lines
    raise AssertionError("".join(lines))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)], ids=str)
def test_a_signal_stops_after_a_complete_step_and_saves_it(straight, tmp_path, number, code):
    place = tmp_path / "run"
    with start(place, 10_000, "slowly", stderr=subprocess.PIPE, text=True) as process:
        read_until(process, "step 3/")
        process.send_signal(signal.SIGUSR1)
        read_until(process, "step 12/")
        process.send_signal(number)
        rest = process.stderr.read()
        assert process.wait(60) == code
    stopped = re.search(r"^stopped after step (\d+), saved to (.*)$", rest, re.MULTILINE)
    step = int(stopped[1])
    checkpoints = sw.Checkpoints(place)
    assert stopped[2] == str(place) and checkpoints.steps() == [step]
    assert checkpoints.about()["position"] == 16 * step
    assert list(tmp_path.rglob("profile/**/*.xplane.pb"))
    if step < 25:
        fit_on = {"steps": 25, "checkpoints": checkpoints, "show": False}
        assert bits(sw.fit(run.RECIPE, run.layout_on(), run.data(), **fit_on)) == straight[1]


@pytest.mark.once
def test_a_second_interrupt_ends_at_once(tmp_path):
    with start(tmp_path / "run", 100, "stuck", stderr=subprocess.PIPE, text=True) as process:
        read_until(process, "step 3/")
        time.sleep(1.0)  # metrics are read late: by now the run is stuck
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert "KeyboardInterrupt" in process.stderr.read()
        assert process.wait(30) in (130, -signal.SIGINT)


@pytest.mark.once
def test_the_bar_of_a_terminal(tmp_path):
    ours, theirs = pty.openpty()
    with start(tmp_path / "run", 30, "slowly", stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        shown = b""
        while True:
            try:
                more = os.read(ours, 65536)
            except OSError:  # raised by a terminal when the other side is closed
                break
            shown += more
        assert process.wait(30) == 0
    os.close(ours)
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.decode())
    assert "step 30/30" in text and "compiling" in text and "done" in text
    for part in (r"loss \d", r"\d (s|ms|µs) ", r"samples/s", r"B/device \(exact\)", r"ETA \d"):
        assert re.search(part, text), part
    found = rows(tmp_path / "run-logs")
    assert [row["step"] for row in found] == list(range(1, 31))
    assert all(math.isfinite(row["loss"]) for row in found)


# --- logs that cannot be written ------------------------------------------------------------------


@pytest.fixture
def full_disk(tmp_path):
    """A full file system: a small one mounted for the test or, if not permitted, /dev/full."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(place)], capture_output=True
    ).returncode
    if mounted == 0:
        yield place
        subprocess.run(["umount", str(place)], check=True)
    else:
        (place / "metrics.jsonl").symlink_to("/dev/full")
        yield place


def test_a_full_disk_for_logs_does_not_stop_a_run(full_disk, capsys):
    state = fit_small(steps=120, logs=full_disk, log_every=1, profile=3)
    assert int(state.step) == 120
    lines = [line for line in capsys.readouterr().err.splitlines() if "cannot be written" in line]
    assert lines == [
        f"logs cannot be written to {full_disk}: No space left on device; training continues without them"
    ]


@pytest.mark.once
def test_sigterm_stops_a_run_whose_log_disk_is_full(full_disk, tmp_path):
    logs = tmp_path / "run-logs"
    logs.symlink_to(full_disk)
    command = [sys.executable, str(SCRIPT), str(tmp_path / "run"), "100000", "slowly"]
    with Forked(command, stderr=subprocess.PIPE, text=True) as process:
        lines = []
        for line in process.stderr:
            lines.append(line)
            if "cannot be written" in line:
                process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 143, "".join(lines)
    assert "stopped after step" in lines[-1]


@pytest.mark.parametrize("place", ["file", "file/below", "locked/logs"])
def test_unwritable_log_folders_are_refused_before_training(place, tmp_path):
    (tmp_path / "file").write_text("")
    if place.startswith("locked"):
        # Root can write anywhere else.
        logs = Path("/proc/shardwise-logs")
    else:
        logs = tmp_path / place
    with pytest.raises(ValueError, match=rf"^logs cannot be written to {logs}: [^:]+$"):
        fit_small(logs=logs)
