"""Saves that are killed, damaged or cannot be written: a clear error, and older steps usable."""

import functools
import gc
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import forked
import jax
import numpy as np
import optax
import pytest
from flax import nnx
from forked import Forked

import shardwise as sw
from shardwise._checkpoint.step_files import sealed

HERE = Path(__file__).parents[1] / "scripts"
KILLS = 25  # by each of two processes


def environment():
    kept = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
    return kept | {"JAX_PLATFORMS": "cpu"}


def make():
    return nnx.Linear(64, 32, rngs=nnx.Rngs(0))


RECIPE = sw.Recipe(
    model=make,
    loss=lambda model, x: model(x).mean(),
    optimizer=optax.adam(1e-2),
    batch=jax.ShapeDtypeStruct((8, 64), "float32"),
)


@functools.cache
def layout():
    return sw.layout(make, sw.mesh("data=2", on="cpu:2"), sw.fsdp("data", min_bytes=0))


@functools.cache
def state():
    begun = sw.train_state(RECIPE, layout())
    filled = jax.tree.map(
        lambda x: jax.numpy.arange(x.size).reshape(x.shape).astype(x.dtype), begun
    )
    return jax.device_put(filled, jax.tree.map(lambda x: x.sharding, begun))


def save(checkpoints, step):
    checkpoints.save(step, state(), position=10 * step, layout=layout())
    checkpoints.close()


def is_intact(checkpoints, step):
    restored = checkpoints.restore(RECIPE, layout(), step=step)
    pairs = zip(jax.tree.leaves(restored), jax.tree.leaves(state()), strict=True)
    same = all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)
    return same and checkpoints.about(step)["position"] == 10 * step


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    checkpoints = sw.Checkpoints(tmp_path_factory.mktemp("pristine"))
    save(checkpoints, 1)
    save(checkpoints, 2)
    return checkpoints.directory


@pytest.fixture
def damaged(pristine, tmp_path):
    """A copy of two steps, the second of which will be damaged."""
    shutil.copytree(pristine, tmp_path / "run")
    return sw.Checkpoints(tmp_path / "run")


# --- killed ---------------------------------------------------------------------------------------


@pytest.mark.once
def test_sigkill_at_random_moments_of_a_save(tmp_path):
    """Two processes at once: every listed step is complete, bitwise, after every kill."""
    command = [sys.executable, str(HERE / "kill_save.py")]
    running = [
        Forked(
            [*command, str(tmp_path / str(seed)), str(KILLS), str(seed)],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for seed in (0, 1)
    ]
    outcomes = [process.communicate(timeout=300) for process in running]
    for (out, err), process in zip(outcomes, running, strict=True):
        assert process.returncode == 0, err[-3000:]
        found = json.loads(out)
        assert found["kills"] == KILLS
        # Each run resumes from the newest step, which never goes backwards.
        assert found["newest"] == sorted(found["newest"])
        assert found["half"] >= KILLS // 5, "too few kills hit a save"
        code, newest = found["last"]
        assert code == 0 and newest >= found["newest"][-1] + 1
        assert found["left"] == [str(newest + 1)], "leftovers are swept by the next run"


# --- two writers ----------------------------------------------------------------------------------

TRIES = 30


def start(script, *arguments):
    return Forked(
        [sys.executable, str(HERE / script), *map(str, arguments)],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.once
def test_two_processes_that_save_to_one_directory(tmp_path):
    """What `wait` reports as saved exists; the others are refused, with the holder named."""
    run = tmp_path / "run"
    racers = [start("write_race.py", run, 1000 * number, TRIES) for number in (1, 2)]
    for racer in racers:
        assert racer.stdout.readline() == "ready\n"
    outcomes = [racer.communicate("go\n", timeout=120) for racer in _released(racers)]
    found = [json.loads(out) for out, _ in outcomes]
    saved = sorted(step for one in found for step in one["saved"])
    refused = [message for one in found for message in one["refused"]]
    assert len(saved) + len(refused) == 2 * TRIES
    checkpoints = sw.Checkpoints(run)
    assert checkpoints.steps() == saved
    for step in saved[:2] + saved[-2:]:
        checkpoints.restore(RECIPE, layout(), step=step)
    assert sorted(path.name for path in run.iterdir()) == sorted(map(str, saved))
    pattern = (
        rf"checkpoints cannot be saved to {run}: (process \d+ on \S+ has been saving there since "
        r"[-\d]+ [:\d]+|another process is saving there); wait until it exits, or use "
        r"another directory"
    )
    assert all(re.fullmatch(pattern, message) for message in refused), refused[:3]


def _released(racers):
    for racer in racers:  # all of them, before waiting for the first
        racer.stdin.write("go\n")
        racer.stdin.flush()
    return racers


def test_a_directory_that_another_process_has(tmp_path):
    script = (
        "import sys, shardwise as sw; c = sw.Checkpoints(sys.argv[1]); c.require_writable(); "
        "print('has it', flush=True); sys.stdin.readline()"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with Forked(command, env=environment(), text=True, **pipes) as other:
        assert other.stdout.readline() == "has it\n"
        checkpoints = sw.Checkpoints(tmp_path)
        for action in (checkpoints.require_writable, lambda: save(checkpoints, 1)):
            with pytest.raises(sw.CheckpointError) as caught:
                action()
            assert f"{tmp_path}: process {other.pid} on " in str(caught.value)
        # A reader needs no lock, and the lock file is not listed.
        with pytest.raises(sw.CheckpointError, match="has no checkpoints: it is empty$"):
            checkpoints.about()
        other.kill()  # this releases the lock, but its file stays
        other.wait()
    assert (tmp_path / ".lock").exists()
    save(checkpoints, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["1"]
    assert is_intact(checkpoints, 1)


def test_two_writers_of_one_process(tmp_path):
    first, second = sw.Checkpoints(tmp_path), sw.Checkpoints(tmp_path)
    first.require_writable()
    second.require_writable()  # the first has saved nothing, so it does not block others
    second.save(1, state())
    with pytest.raises(sw.CheckpointError) as caught:
        first.save(2, state())
    assert str(caught.value) == (
        f"checkpoints cannot be saved to {tmp_path}: this process is already saving there: "
        f"close() the other Checkpoints first"
    )
    second.close()
    first.save(2, state())
    first.close()
    assert first.steps() == [1, 2]


def test_a_lock_is_not_kept_by_a_forked_child(tmp_path):
    checkpoints = sw.Checkpoints(tmp_path)
    checkpoints.require_writable()
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(writing)
        os.read(reading, 1)  # wait until the parent is done
        os._exit(0)
    checkpoints.close()
    other = sw.Checkpoints(tmp_path)
    other.require_writable()
    other.close()
    os.close(writing)
    os.close(reading)
    assert os.waitpid(child, 0)[1] == 0


def test_a_step_that_is_gone_when_its_save_is_done(tmp_path, monkeypatch):
    """As a cleanup program might: a save that no longer exists is not reported as done."""
    from shardwise._checkpoint import orbax

    wait = orbax.Writer.wait
    monkeypatch.setattr(
        orbax.Writer, "wait", lambda writer: (wait(writer), shutil.rmtree(tmp_path / "1"))
    )
    checkpoints = sw.Checkpoints(tmp_path)
    checkpoints.save(1, state())
    with pytest.raises(sw.CheckpointError) as caught:
        checkpoints.wait()
    assert str(caught.value) == (
        f"step 1 could not be saved to {tmp_path}: after the save, its file state/_METADATA is "
        f"missing"
    )
    monkeypatch.undo()
    checkpoints.close()


# --- damaged --------------------------------------------------------------------------------------


def flip(data, rng):
    place = rng.randrange(len(data))
    return data[:place] + bytes([data[place] ^ 1 << rng.randrange(8)]) + data[place + 1 :]


DAMAGES = {
    "truncated to nothing": lambda data, rng: b"",
    "truncated by half": lambda data, rng: data[: len(data) // 2],
    "truncated by a byte": lambda data, rng: data[:-1],
    "a bit flipped": flip,
    "another bit flipped": flip,
    "zeroed": lambda data, rng: bytes(len(data)),
    "gone": None,
}


# Orbax drops its other reads when one has failed, and Python warns about each.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_to_any_file_of_a_step_is_detected_or_harmless(damaged, damage):
    rng, found = random.Random(damage), set()
    step = damaged.directory / "2"
    files = sorted(path for path in step.rglob("*") if path.is_file())
    assert {path.name for path in files} >= {"_METADATA", "manifest.ocdbt", "about.json"}
    for path in files:
        data = path.read_bytes()
        if DAMAGES[damage] is None:
            path.unlink()
        else:
            path.write_bytes(DAMAGES[damage](data, rng))
        try:
            assert is_intact(damaged, 2), path
        except sw.CheckpointError as error:
            found.add(path.relative_to(step).parts[0])
            assert str(error).startswith(
                (f"step 2 in {damaged.directory} ", str(damaged.directory))
            )
        path.write_bytes(data)
    assert "state" in found, "no file that matters was damaged"
    assert is_intact(damaged, 1) and is_intact(damaged, 2)
    gc.collect()  # here rather than in another test


def test_a_flipped_bit_is_reported_with_the_name_of_the_array(damaged):
    arrays = sorted((damaged.directory / "2").rglob("d/*"), key=lambda path: path.stat().st_size)
    data = arrays[-1].read_bytes()
    place = data.find(np.arange(200, 210, dtype="float32").tobytes())
    assert place > 0
    arrays[-1].write_bytes(data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :])
    with pytest.raises(sw.CheckpointError) as caught:
        damaged.restore(RECIPE, layout())
    pattern = (
        rf"step 2 in {damaged.directory} is damaged: the values of \S+ are not those that were saved; "
        r"remove it to continue from another step: 1"
    )
    assert re.fullmatch(pattern, str(caught.value))
    assert is_intact(damaged, 1)


def find_kernel(checkpoints):
    """Returns the file with step 2's kernel, and the offset of the numbers 200 to 209 in it."""
    for path in (checkpoints.directory / "2").rglob("d/*"):
        place = path.read_bytes().find(np.arange(200, 210, dtype="float32").tobytes())
        if place > 0:
            return path, place
    raise AssertionError("no file has them")


def refuses(checkpoints, *meshes):
    """Asserts that restores on each mesh, and a run, refuse step 2; returns the message."""
    messages = set()
    for axes in meshes:
        count = int(axes.split("=")[1])
        here = sw.layout(make, sw.mesh(axes, on=f"cpu:{count}"), sw.fsdp("data", min_bytes=0))
        with pytest.raises(sw.CheckpointError) as caught:
            checkpoints.restore(RECIPE, here, step=2)
        messages.add(str(caught.value))
    data = sw.data(np.ones((16, 64), "float32"))
    with pytest.raises(sw.CheckpointError) as caught:
        sw.fit(RECIPE, layout(), data, steps=3, checkpoints=checkpoints, show=False)
    checkpoints.close()
    (message,) = messages | {str(caught.value)}
    return message


@pytest.mark.parametrize("count", [2, 4])
def test_an_even_number_of_flipped_signs_is_detected(damaged, count):
    """The sum of format 1 did not detect this: 2**31 twice is 0."""
    path, place = find_kernel(damaged)
    data = bytearray(path.read_bytes())
    for number in range(count):
        data[place + 4 * number + 3] ^= 0x80
    path.write_bytes(data)
    message = refuses(damaged, "data=1", "data=4")
    assert "is damaged: the values of" in message and message.startswith(
        f"step 2 in {damaged.directory}"
    )
    assert is_intact(damaged, 1)


def test_a_checkpoint_of_format_1(tmp_path):
    """Written by version 0.1: it is restored on any mesh, and damage to it is detected."""
    shutil.copytree(Path(__file__).with_name("format1"), tmp_path / "run")
    checkpoints = sw.Checkpoints(tmp_path / "run")

    def small():
        return nnx.Linear(8, 4, rngs=nnx.Rngs(0))

    recipe = sw.Recipe(
        model=small,
        loss=RECIPE.loss,
        optimizer=optax.adam(1e-2),
        batch=jax.ShapeDtypeStruct((8, 8), "float32"),
    )
    assert checkpoints.about()["format"] == 1
    for axes, count in (("data=2", 2), ("data=4", 4), ("data=1", 1)):
        here = sw.layout(small, sw.mesh(axes, on=f"cpu:{count}"), sw.fsdp("data", min_bytes=0))
        restored = checkpoints.restore(recipe, here)
        for x in jax.tree.leaves(restored):
            assert np.array_equal(np.asarray(x).reshape(-1), np.arange(x.size))
    about = tmp_path / "run/1/about/about.json"
    body = json.loads(about.read_text())
    del body["crc32"]
    body["arrays"]["model.kernel"]["digest"] ^= 1
    about.write_text(sealed(body))
    message = "is damaged: the values of kernel are not those that were saved$"
    with pytest.raises(sw.CheckpointError, match=message):
        checkpoints.restore(recipe, here)
    path = sorted((tmp_path / "run").rglob("d/*"))[0]
    path.write_bytes(b"")
    with pytest.raises(sw.CheckpointError, match=f"its file .*{path.name} is empty$"):
        checkpoints.preflight(recipe, here)


@pytest.mark.parametrize("size", [0, 10])
def test_a_truncated_file_is_reported_before_anything_is_read(damaged, size):
    step = damaged.directory / "2"
    for path in sorted(step.rglob("d/*")):
        data = path.read_bytes()
        path.write_bytes(data[:size])
        name = path.relative_to(step)
        message = (
            f"step 2 in {damaged.directory} is damaged: its file {name} has {size} bytes "
            f"instead of {len(data)}; remove it to continue from another step: 1"
        )
        for action in (damaged.preflight, damaged.restore):
            with pytest.raises(sw.CheckpointError) as caught:
                action(RECIPE, layout())
            assert str(caught.value) == message
        path.write_bytes(data)
    path.unlink()
    with pytest.raises(sw.CheckpointError, match=f"its file {name} is missing; remove"):
        damaged.preflight(RECIPE, layout())


def test_a_refused_restore_prints_nothing_else(damaged, tmp_path):
    """Files of the right size but with wrong contents, which TensorStore itself refuses."""
    for path in (damaged.directory / "2").rglob("d/*"):
        path.write_bytes(bytes(path.stat().st_size))
    script = """
import jax, sys
jax.config.update("jax_num_cpu_devices", 2)
import shardwise as sw
from test_faults import RECIPE, layout
try:
    sw.Checkpoints(sys.argv[1]).restore(RECIPE, layout())
except sw.CheckpointError as error:
    print(error)
"""
    done = forked.run(
        [sys.executable, "-c", script, str(damaged.directory)],
        env=environment() | {"PYTHONPATH": f"{Path(__file__).parent}:{HERE.parent / 'support'}"},
        timeout=120,
    )
    assert re.fullmatch(
        r"step 2 in \S+ could not be restored: one of its files is damaged.*\n", done.stdout
    )
    # Ignore what other libraries print while they are imported.
    assert (
        "asyncio" not in done.stderr and "Traceback" not in done.stderr.rpartition("installed?")[2]
    )
    assert "Task" not in done.stderr and "loop is closed" not in done.stderr


@pytest.mark.parametrize("file", ["state/_METADATA", "state/manifest.ocdbt"])
def test_a_missing_metadata_file(damaged, file):
    (damaged.directory / "2" / file).unlink()
    for action in (damaged.restore, damaged.preflight):
        with pytest.raises(sw.CheckpointError) as caught:
            action(RECIPE, layout())
        assert str(caught.value) == (
            f"step 2 in {damaged.directory} is damaged: its file {file} is missing; "
            f"remove it to continue from another step: 1"
        )
    assert is_intact(damaged, 1)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "cannot be read (it is empty)"),
        ("[]", "cannot be read (it is a list instead of an object)"),
        ("{}", "cannot be read (its contents have changed)"),
    ],
    ids=["empty", "a list", "an object of nothing"],
)
def test_a_damaged_about(damaged, text, reason):
    (damaged.directory / "2/about/about.json").write_text(text)
    with pytest.raises(sw.CheckpointError) as caught:
        damaged.about()
    assert str(caught.value) == (
        f"step 2 in {damaged.directory} is damaged: its file about/about.json {reason}; "
        f"remove it to continue from another step: 1"
    )
    assert is_intact(damaged, 1)


def test_an_about_of_another_format(damaged):
    path = damaged.directory / "2/about/about.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 9}))
    with pytest.raises(
        sw.CheckpointError, match="has format 9: this version reads format 2 and older$"
    ):
        damaged.restore(RECIPE, layout())


def test_a_flipped_bit_anywhere_in_about_is_a_clear_error(damaged):
    """It has the data position, digests and shapes: no change to it may go unnoticed."""
    path = damaged.directory / "2/about/about.json"
    data, raw, unseen = path.read_bytes(), [], []
    want = json.loads(data)
    for place in range(0, len(data), 7):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1 << place % 7]) + data[place + 1 :])
        try:
            about = damaged.about(2)
            assert not damaged.preflight(RECIPE, layout(), step=2).findings.errors
            unseen += [key for key in ("position", "arrays") if about.get(key) != want[key]]
        except (sw.CheckpointError, AssertionError):
            continue
        except Exception as error:
            raw.append(f"{place}: {type(error).__name__} {error}")
    assert not raw, raw[:5]
    assert not unseen


# --- not writable --------------------------------------------------------------------------------


def refusals(directory):
    """Returns the messages of a restore and a save, with the directory replaced."""
    checkpoints = sw.Checkpoints(directory)
    results = []
    for action in (lambda: checkpoints.restore(RECIPE, layout()), lambda: save(checkpoints, 1)):
        try:
            action()
            results.append("ok")
        except sw.CheckpointError as error:
            results.append(str(error).replace(str(directory), "DIR"))
    return results


def a_file(path):
    path.write_text("something else")
    return path


def something_else(path):
    for name in ("2024", "photos"):
        (path / name).mkdir(parents=True)
    a_file(path / "notes.txt")
    return path


@pytest.mark.parametrize(
    ("prepare", "restored", "saved"),
    [
        (lambda p: p, "DIR does not exist, so it has no checkpoints", "ok"),
        (lambda p: p.mkdir() or p, "DIR has no checkpoints: it is empty", "ok"),
        (something_else, "DIR has no checkpoints: it contains 2024, notes.txt, photos", "ok"),
        (
            a_file,
            "DIR is a file, so it has no checkpoints",
            "step 1 could not be saved to DIR: part of the path is a file",
        ),
        (
            lambda p: a_file(p) / "runs",
            "DIR does not exist, so it has no checkpoints",
            "step 1 could not be saved to DIR: part of the path is a file",
        ),
    ],
    ids=["absent", "empty", "something else", "a file", "below a file"],
)
def test_directories_that_hold_no_checkpoints(tmp_path, prepare, restored, saved):
    assert refusals(prepare(tmp_path / "place")) == [restored, saved]


def run_disk(mode, directory):
    command = [sys.executable, str(HERE / "kill_disk.py"), mode, str(directory)]
    began = time.time()
    # With the compiler's usual flags: digests of millions of elements take longer without.
    done = forked.run(command, env=environment() | {"XLA_FLAGS": ""}, timeout=30)
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(done.stdout)
    # A failed save leaves no thread that the process would wait for.
    assert time.time() - results.pop("ended_at") < 10, time.time() - began
    return results, done.stderr


@pytest.mark.once
def test_a_full_disk(tmp_path):
    results, _ = run_disk("full", tmp_path)
    full = "step {} could not be saved to DIR: the disk is full"
    assert results == {
        "first": "ok",
        "full": full.format(2),
        "full again": full.format(3),
        "steps": [1],
        "older": "ok",
        "with room": "ok",
        "left": ["1", "4"],  # a failed save leaves nothing behind that takes up space
    }


@pytest.mark.once
def test_a_read_only_directory(tmp_path):
    results, _ = run_disk("readonly", tmp_path)
    refused = "step {} could not be saved to DIR{}: the file system is read-only"
    assert results == {
        "first": "ok",
        "read-only": refused.format(2, ""),
        "new run": refused.format(3, ""),
        "below": refused.format(4, "/runs/a"),
        "steps": [1],
        "older": "ok",
    }


def test_preflight_says_what_is_read(tmp_path):
    """Equal to 1% if shards are complete chunks; chunks split the other way are read by each device."""
    results, _ = run_disk("read", tmp_path)
    for name, (planned, read) in results.items():
        assert planned > 64 * 2**20
        most = 8 if name in ("crosswise", "grid") else 1.01
        assert planned <= read <= most * planned, (name, read / planned)


HOOKS = """
import logging, pathlib, sys, tempfile, threading, time
import absl.logging, jax, optax, shardwise as sw
from flax import nnx

absl.logging.set_verbosity(absl.logging.INFO)
before = (sys.unraisablehook, [logging.getLogger(n).level for n in ("absl", "asyncio")])
def now():
    return (sys.unraisablehook, [logging.getLogger(n).level for n in ("absl", "asyncio")])

make = lambda: nnx.Linear(64, 64, rngs=nnx.Rngs(0))
recipe = sw.Recipe(model=make, loss=lambda model, x: model(x).mean(), optimizer=optax.adam(0.1),
                   batch=jax.ShapeDtypeStruct((8, 64), "float32"))
layout = sw.layout(make, sw.mesh("data=1", on="cpu:1"), "dp")
stop = threading.Event()
def log():
    number = 0
    while not stop.is_set():
        number += 1
        absl.logging.info("mine %d", number)
        time.sleep(0.002)
    print(number)
thread = threading.Thread(target=log); thread.start()
checkpoints = sw.Checkpoints(tempfile.mkdtemp())
checkpoints.save(0, sw.train_state(recipe, layout))
checkpoints.wait()
checkpoints.restore(recipe, layout)
assert now() == before, now()
stop.set(); thread.join()
for file in pathlib.Path(checkpoints.directory, "0", "state").rglob("d/*"):
    file.write_bytes(bytes(b ^ 255 for b in file.read_bytes()))
try:
    checkpoints.restore(recipe, layout)
except sw.CheckpointError as error:
    pass
else:
    raise SystemExit("nothing was damaged")
class Own:
    def __del__(self):
        raise RuntimeError("Event loop is closed")
Own()  # what the user's own code raises so is passed on
time.sleep(0.5)
"""


def test_saving_and_restoring_leave_the_users_logs_and_hooks_alone():
    done = subprocess.run(
        [sys.executable, "-c", HOOKS],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(":mine ") == int(done.stdout)  # not one of them is lost
    assert done.stderr.count("Exception ignored") == 1 and "Own.__del__" in done.stderr
