"""Signals: a command ends with 130 or 143 at any moment, and leaves nothing behind."""

import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import forked
import pytest

PLAN = ("plan", "shardwise.examples.decoder:make", "--mesh", "data=2,model=4", "--strategy")
PLAN = (*PLAN, "fsdp+tensor", "--inputs", "int32[8,128]")


def begin(*arguments, process=subprocess.Popen, **options):
    return process(
        [sys.executable, "-m", "shardwise", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def wait_until_ready(process):
    """Waits until the process handles SIGTERM, which is the first thing that a command sets up."""
    while process.poll() is None:
        with open(f"/proc/{process.pid}/status") as lines:
            (caught,) = [int(line.split()[1], 16) for line in lines if line.startswith("SigCgt")]
        if caught >> (signal.SIGTERM - 1) & 1:
            return
        time.sleep(0.001)


def stop(number, after, process):
    """Returns the status and stderr of a plan that receives a signal after some seconds."""
    process = begin(*PLAN, process=process)
    wait_until_ready(process)
    try:
        process.wait(timeout=after)
    except subprocess.TimeoutExpired:
        process.send_signal(number)
    _, err = process.communicate(timeout=60)
    return process.returncode, err


def seconds_of(process):
    """Returns how long a plan takes that receives no signal."""
    began = time.monotonic()
    done = begin(*PLAN, process=process)
    assert done.communicate()[1] == "" and done.returncode == 0
    return time.monotonic() - began


def test_a_signal_at_any_moment_ends_with_its_status():
    """In Python, in JAX's C++ and during imports; close to exit the status is -2 instead of 130."""
    forked.run([sys.executable, "-c", ""])  # from now on, all is imported
    started, imported = seconds_of(subprocess.Popen), seconds_of(forked.Forked)
    # One in each part of the run: as even as that, a few leave no longer gap than many at random.
    # While it imports, in processes that Python starts; after that, in those that begin there.
    moments = random.Random(0)
    tries = [
        (number, (part + moments.random()) / parts * span, process)
        for process, span, counts in (
            (subprocess.Popen, max(started - imported, 0.5 * started), (10, 2)),
            (forked.Forked, 0.9 * imported, (8, 3)),
        )
        for number, parts in zip((signal.SIGINT, signal.SIGTERM), counts, strict=True)
        for part in range(parts)
    ]
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda given: stop(*given), tries))
    words = {signal.SIGINT: "shardwise: interrupted\n", signal.SIGTERM: "shardwise: terminated\n"}
    ended = 0
    for (number, after, _), (status, err) in zip(tries, results, strict=True):
        if (status, err) == (0, ""):
            continue  # it had already finished
        ended += 1
        assert (status, err) in ((128 + number, words[number]), (-number, "")), after
    assert ended > 10


@pytest.mark.parametrize(
    "where",
    [
        "while True: pass",
        "import threading; threading.Event().wait()",
        "try:\n    while True: pass\nexcept BaseException: pass",
        "import jax, jax.numpy as jnp\njax.jit(lambda x: jax.lax.while_loop("
        "lambda c: c > 0, lambda c: c + 1.0, x))(1.0).block_until_ready()",
    ],
    ids=["loop", "wait", "swallows", "in C++"],
)
def test_a_target_that_hangs_is_ended(tmp_path, where):
    (tmp_path / "hangs.py").write_text(f"print('begun', flush=True)\n{where}\n")
    process = begin(
        *("plan", "hangs.py:make", "--mesh", "data=1"), cwd=tmp_path, process=forked.Forked
    )
    assert process.stderr.readline() == "begun\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "shardwise: interrupted\n")


def test_an_ignored_signal_stays_ignored(tmp_path):
    """As with `nohup`, or in a shell's background."""
    (tmp_path / "waits.py").write_text(
        "import os, signal\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
        "from shardwise.examples.decoder import make\n"
    )
    process = begin(
        *("plan", "waits.py:make", "--mesh", "data=1"),
        cwd=tmp_path,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    assert process.communicate(timeout=60)[1] == "" and process.returncode == 0


CLOSED = {"stdout": ">&-", "stderr": "2>&-", "both": ">&- 2>&-", "all": "<&- >&- 2>&-"}


@pytest.mark.parametrize("closed", CLOSED)
def test_closed_streams(tmp_path, closed):
    command = f"{sys.executable} -m shardwise plan shardwise.examples.decoder:make --mesh data=8"
    done = subprocess.run(
        f"{command} --save layout.json --format json {CLOSED[closed]}",
        shell=True,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and (tmp_path / "layout.json").stat().st_size > 0
    assert done.stderr == ("saved layout.json\n" if closed == "stdout" else "")


def test_a_result_is_saved_even_if_nobody_reads_the_output(tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "shardwise", *PLAN, "--save", "layout.json"]
    process = forked.run(command, stdout=writer, cwd=tmp_path)
    os.close(writer)
    assert (process.returncode, process.stderr) == (141, "saved layout.json\n")
    assert (tmp_path / "layout.json").stat().st_size > 0


@pytest.mark.parametrize("arguments", [PLAN, ("--help",)], ids=["plan", "help"])
def test_a_full_stdout_is_reported_in_one_sentence(arguments):
    with open("/dev/full", "w") as full:
        done = forked.run([sys.executable, "-m", "shardwise", *arguments], stdout=full)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.endswith("No space left on device\n")
