"""What compilers print is withheld and kept; what the user's code prints reaches the user."""

import os
import subprocess
import sys

import forked
import pytest

CAPTURE = """
import logging, os, sys, threading, warnings
logging.basicConfig(format="%(message)s")  # its handler holds this very stream
held = sys.stderr
from shardwise._compile.toolchain.noise import compiler_noise

with compiler_noise() as noise:
    os.write(2, b"E0000 compiler.cc:1] told by C++\\n")
    print("printed", file=sys.stderr)
    held.write("written\\n")
    logging.warning("logged")
    thread = threading.Thread(target=lambda: print("from a thread", file=sys.stderr))
    thread.start(); thread.join()
    os.write(2, b"[SPMD] more\\n")
assert noise() == "E0000 compiler.cc:1] told by C++\\n[SPMD] more\\n", noise()
assert held is sys.stderr and (sys.stderr.fileno(), sys.stderr.name) == (2, "<stderr>")
try:
    with compiler_noise():
        raise KeyError
except KeyError:
    os.write(2, b"after\\n")
print("and after", file=sys.stderr)
"""


@pytest.mark.parametrize("unbuffered", [[], ["-u"]], ids=["buffered", "unbuffered"])
def test_only_what_is_written_past_python_is_withheld(unbuffered):
    done = subprocess.run(
        [sys.executable, *unbuffered, "-c", CAPTURE], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    lines = ["printed", "written", "logged", "from a thread", "after", "and after"]
    assert done.stderr.splitlines() == lines


def test_a_closed_stderr_is_no_obstacle():
    code = "\n".join(
        [
            "from shardwise._compile.toolchain.noise import compiler_noise, start_backends",
            "with compiler_noise() as noise: pass",
            "assert noise() == '' and start_backends() == ''",
            "print('done')",
        ]
    )
    done = subprocess.run(
        f'exec {sys.executable} -c "{code}" 2>&-',
        shell=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert (done.returncode, done.stdout) == (0, "done\n")


TRACED = """
import sys, warnings, jax, optax, shardwise as sw
from flax import nnx

def loss(model, x):
    print("the user's print", file=sys.stderr)
    warnings.warn("the user's warning")
    return model(x).mean()

make = lambda: nnx.Linear(64, 64, use_bias=False, rngs=nnx.Rngs(0))
recipe = sw.Recipe(model=make, loss=loss, optimizer=optax.sgd(0.1),
                   batch=jax.ShapeDtypeStruct((64, 64), "float32"))
sw.compile(recipe, sw.layout(make, sw.mesh("data=4", on="v5e:2x2"), "dp"), show=False)
"""


def test_what_the_loss_prints_while_it_is_traced_reaches_the_user(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"}
    done = forked.run(
        [sys.executable, "-c", TRACED],
        env={**environment, "SHARDWISE_CACHE": str(tmp_path)},
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    # And not a line of what JAX prints about accelerators that are not here.
    told = done.stderr.splitlines()
    assert told[0] == "the user's print" and told[1].endswith("UserWarning: the user's warning")
    assert [line for line in told[2:] if "the user's" not in line] == [], told
