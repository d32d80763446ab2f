"""What is found out before the first step, and what a directory of steps may also contain."""

import functools
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import forked
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import shardwise as sw

DTYPES = ("uint2", "uint4", "float8_e4m3", "int4", "float32")


class Odd(nnx.Module):
    """Has arrays of dtypes that TensorStore does not know, and one without elements."""

    def __init__(self):
        self.kernel = nnx.Param(jnp.ones((8, 4)))
        for dtype in DTYPES:
            values = jnp.arange(8).reshape(4, 2) % 4
            setattr(self, dtype, nnx.Variable(values.astype(dtype)))
        self.empty = nnx.Variable(jnp.zeros((0, 4)))

    def __call__(self, x):
        return x @ self.kernel


RECIPE = sw.Recipe(
    model=Odd,
    loss=lambda model, x: model(x).mean(),
    optimizer=optax.sgd(0.1),
    batch=jax.ShapeDtypeStruct((8, 8), "float32"),
)
DATA = np.ones((16, 8), "float32")


@functools.cache
def layout(axes="data=2"):
    rules = {"empty": P("data"), "uint4": P("data"), "float8_e4m3": P(None, "data")}
    return sw.layout(Odd, sw.mesh(axes, on=f"cpu:{axes[-1]}"), rules)


def fit(directory, steps, **options):
    checkpoints = sw.Checkpoints(directory, **options)
    return sw.fit(RECIPE, layout(), sw.data(DATA), steps=steps, checkpoints=checkpoints, show=False)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    directory = tmp_path_factory.mktemp("start") / "run"
    return directory, fit(directory, 2, every=1)


@pytest.fixture
def run(pristine, tmp_path):
    shutil.copytree(pristine[0], tmp_path / "run")
    return tmp_path / "run"


def test_every_dtype_is_restored_bitwise_on_another_mesh(pristine):
    directory, state = pristine
    restored = sw.Checkpoints(directory).restore(RECIPE, layout("data=1"))
    for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    rows = sw.Checkpoints(directory).about()["arrays"]
    assert [rows[f"model.{dtype}"]["dtype"] for dtype in DTYPES] == list(DTYPES)


@pytest.mark.parametrize("what", ["folder", "file", "link"])
def test_what_has_the_name_of_a_step_to_come(run, what):
    place = run / "4"
    place.mkdir() if what == "folder" else place.symlink_to(
        "x"
    ) if what == "link" else place.touch()
    with pytest.raises(sw.CheckpointError) as caught:
        fit(run, 5)
    assert str(caught.value) == (
        f"checkpoints cannot be saved to {run}: 4 there has the name of a step, but is not a "
        f"checkpoint: remove it, or use another directory"
    )
    assert int(fit(run, 3).step) == 3, "a shorter run does not need that name"


def test_a_copied_step_knows_its_number(run):
    shutil.copytree(run / "1", run / "10")
    with pytest.raises(sw.CheckpointError, match="its directory is named 10, but holds step 1"):
        fit(run, 12)


def test_only_what_is_ours_is_removed(run):
    ours = ("3.orbax-checkpoint-tmp", ".deleted-1", f".shared-{'0' * 16}")
    others = ("mine.orbax-checkpoint-tmp", "3.orbax-checkpoint-tmp.txt", ".deleted-mine", "010")
    for name in (*ours[:2], *others):
        (run / name).mkdir()
    (run / ours[2]).touch()
    fit(run, 3)
    assert sorted(p.name for p in run.iterdir()) == sorted(["1", "2", "3", *others])


AS_NOBODY = """
    import os, sys
    import jax
    import shardwise as sw
    checkpoints = sw.Checkpoints(sys.argv[1])
    checkpoints.about(2)  # everything is imported now
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
    print(checkpoints.steps(), checkpoints.about(2)["step"])
    try:
        checkpoints.about(1)
    except sw.CheckpointError as error:
        print(error)
"""


@pytest.mark.once
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a user without permissions")
def test_an_unreadable_step_is_named_and_the_others_are_used(pristine):
    directory = Path("/dev/shm") / f"shardwise-start-{os.getpid()}"
    shutil.copytree(pristine[0], directory)
    try:
        (directory / "1").chmod(0)
        command = [sys.executable, "-c", textwrap.dedent(AS_NOBODY), str(directory)]
        done = forked.run(command, timeout=120, env=os.environ | {"HOME": "/tmp"})
    finally:
        shutil.rmtree(directory)
    assert done.stdout.splitlines() == [
        "[1, 2] 2",
        f"step 1 in {directory} cannot be read: permission denied; remove it to continue from "
        f"another step: 2",
    ], done.stderr


@pytest.mark.once
def test_a_disk_that_is_full_from_the_start(tmp_path):
    script = """
        import pathlib, subprocess, sys
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", sys.argv[1]], check=True)
        import jax
        jax.config.update("jax_num_cpu_devices", 2)
        from test_start import fit, sw
        with open(sys.argv[1] + "/fill", "wb", 0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                pass
        try:
            fit(sys.argv[1] + "/run", 1)
        except sw.CheckpointError as error:
            print(error)
    """
    command = ["unshare", "--map-root-user", "--mount", sys.executable, "-c"]
    here = Path(__file__).parent
    folders = (here, here.parent / "support", *os.environ.get("PYTHONPATH", "").split(os.pathsep))
    done = subprocess.run(
        [*command, textwrap.dedent(script), str(tmp_path)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(str(folder) for folder in folders)},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    told = f"checkpoints cannot be saved to {tmp_path}/run: the disk is full\n"
    assert done.stdout == told, done.stderr


@pytest.mark.parametrize("words", [{"reduced": {"data"}}, {"unreduced": {"data"}}], ids=str)
def test_a_spec_for_values_inside_a_step(words):
    spec, mesh = P(None, **words), sw.mesh("data=2", on="cpu:2")
    said = f"gave a spec with {next(iter(words))}={{'data'}}: that is for values inside a step"

    def annotated():
        init = nnx.with_partitioning(nnx.initializers.ones, spec)
        return nnx.Linear(8, 4, kernel_init=init, rngs=nnx.Rngs(0))

    with pytest.raises(ValueError, match=f"pattern 'kernel' {said}"):
        sw.layout(Odd, mesh, {"kernel": spec})
    with pytest.raises(ValueError, match=rf"rule '.*' at 'empty' {said}"):
        sw.layout(Odd, mesh, lambda leaf: spec if leaf.path == "empty" else None)
    with pytest.raises(ValueError, match=f"(annotation|sharding) of kernel {said}"):
        sw.layout(annotated, mesh)
