"""Meshes by name, and the errors for those that do not fit."""

import subprocess
import sys

import forked
import jax
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh

import shardwise as sw


@pytest.mark.parametrize(
    "axes,on,sizes",
    [
        ("data=2,model=4", None, {"data": 2, "model": 4}),
        ({"data": 2, "model": 4}, None, {"data": 2, "model": 4}),
        (" data = 2 , model = 4 ", "cpu:8", {"data": 2, "model": 4}),
        ("data=-1,model=4", None, {"data": 2, "model": 4}),
        ("data=-1", "cpu:4", {"data": 4}),
        ("a=1,b=2,c=2,d=2", "cpu:8", {"a": 1, "b": 2, "c": 2, "d": 2}),
    ],
)
def test_meshes_of_devices(axes, on, sizes):
    mesh = sw.mesh(axes, on)
    assert isinstance(mesh, Mesh) and dict(mesh.shape) == sizes
    assert set(mesh.axis_types) == {AxisType.Auto}


@pytest.mark.parametrize(
    "axes,on,size",
    [
        ("data=64,model=64", "none", 4096),
        ("data=64,model=4", "v5p:4x8x8", 256),
        ("data=-1,model=4", "v5e:4x4", 16),
        ("data=16", "tpu7x:2x2x2", 16),
        ("data=8,model=8", "h200:8x8", 64),
        ("data=8", "H100:8", 8),
    ],
)
def test_meshes_of_absent_chips(axes, on, size):
    mesh = sw.mesh(axes, on)
    assert isinstance(mesh, AbstractMesh) and mesh.size == size


def test_devices_by_hand():
    mesh = sw.mesh("data=2", on=jax.devices()[2:4])
    assert list(mesh.devices) == jax.devices()[2:4]


def test_explicit_axes():
    assert sw.mesh("data=2,model=4", explicit=True).axis_types == (AxisType.Explicit,) * 2
    mixed = sw.mesh("data=2,model=4", explicit=("model",))
    assert mixed.axis_types == (AxisType.Auto, AxisType.Explicit)
    assert sw.mesh("data=2", "none", explicit="data").axis_types == (AxisType.Explicit,)


BAD = {
    "product": (
        ("data=3,model=4", None),
        {},
        "mesh data=3,model=4 needs 12 devices, but the cpu backend has 8: these fit 8: data=2,model=4; data=4,model=2; data=1,model=8; data=8,model=1; or on='cpu:12' for 12 virtual CPU devices",
    ),
    "too few": (
        ("data=4", None),
        {},
        "mesh data=4 needs 4 devices, but the cpu backend has 8: these fit 8: data=8; or on='cpu:4' for 4 of them",
    ),
    "inferred": (
        ("data=-1,model=3", "cpu:8"),
        {},
        "mesh data=-1,model=3 needs a multiple of 3 devices, but on='cpu:8' has 8: these fit 8: data=2,model=4; data=4,model=2; data=1,model=8; data=8,model=1",
    ),
    "inferred without devices": (
        ("data=-1", "none"),
        {},
        "data=-1 leaves a size to be inferred, but on='none' has no devices to infer it from: give every size",
    ),
    "two inferred": (
        ("data=-1,model=-1", None),
        {},
        "mesh data=-1,model=-1 has more than one size -1: only one can be inferred",
    ),
    "syntax": (
        ("data:2", None),
        {},
        "mesh 'data:2' has 'data:2' where an axis is expected: write axes as 'data=2,model=4' or {'data': 2, 'model': 4}",
    ),
    "empty": (
        ("", None),
        {},
        "mesh '' has '' where an axis is expected: write axes as 'data=2,model=4' or {'data': 2, 'model': 4}",
    ),
    "no axes": (
        ({}, None),
        {},
        "the mesh has no axes: write axes as 'data=2,model=4' or {'data': 2, 'model': 4}",
    ),
    "name": (
        ("2=data", None),
        {},
        "mesh '2=data' has '2=data' where an axis is expected: write axes as 'data=2,model=4' or {'data': 2, 'model': 4}",
    ),
    "bad name": (
        ("a b=2", None),
        {},
        "mesh axis 'a b' is not a name: write axes as 'data=2,model=4' or {'data': 2, 'model': 4}",
    ),
    "duplicate": (
        ("data=2,data=4", None),
        {},
        "mesh axis 'data' appears twice in 'data=2,data=4': give each axis once",
    ),
    "zero": (
        ("data=0", None),
        {},
        "mesh axis 'data' has size 0: give a positive integer, or -1 to infer it",
    ),
    "float": (
        ({"data": 2.0}, None),
        {},
        "mesh axis 'data' has size 2.0: give a positive integer, or -1 to infer it",
    ),
    "type": (
        (8, None),
        {},
        "mesh axes are an int: write axes as 'data=2,model=4' or {'data': 2, 'model': 4}",
    ),
    "chip": (
        ("data=8", "v9:2x4"),
        {},
        "on='v9:2x4' does not name a known chip: use None (the devices of this machine), 'cpu:N', 'none', or one of v4, v5e, v5p, v6e, tpu7x, a100, h100, h200, b200, gb200 with its topology, such as 'v5p:4x8x8'",
    ),
    "topology": (
        ("data=8", "v5p"),
        {},
        "on='v5p' does not say how many chips: v5p takes 3 torus sizes, such as 'v5p:4x4x4'",
    ),
    "torus": (
        ("data=8", "v5p:2x4"),
        {},
        "on='v5p:2x4' has 2 sizes, but the topology of v5p has 3, such as 'v5p:4x4x4'",
    ),
    "chips product": (
        ("data=8", "h200:8x8"),
        {},
        "mesh data=8 needs 8 devices, but on='h200:8x8' has 64: these fit 64: data=64",
    ),
    "no slice": (
        ("data=105", "v5p:3x5x7"),
        {},
        "on='v5p:3x5x7' is not a slice that v5p comes in: the nearest are 'v5p:4x4x8', 'v5p:4x4x12', 'v5p:4x8x8'",
    ),
    "slice turned": (
        ("data=8", "v5e:4x2"),
        {},
        "on='v5e:4x2' is not a slice that v5e comes in: the nearest are 'v5e:2x2', 'v5e:2x4', 'v5e:4x4'",
    ),
    "more than a pod": (
        ("data=1000000", "v5e:1000x1000"),
        {},
        "on='v5e:1000x1000' has 1,000,000 chips, but one slice of v5e has at most 256: the nearest are 'v5e:8x8', 'v5e:8x16', 'v5e:16x16'; '4xv5e:16x16' is four slices",
    ),
    "no slices": (
        ("data=4", "0xv5e:2x2"),
        {},
        "on='0xv5e:2x2' has no slices: write 2xv5e:2x2 for two",
    ),
    "slices of GPUs": (
        ("data=32", "2xh100:2x8"),
        {},
        "on='2xh100:2x8' counts slices, but h100 has hosts: write all of them, 'h100:4x8'",
    ),
    "too many slices": (
        ("data=4", "99999999999xv5e:2x2"),
        {},
        "on='99999999999xv5e:2x2' names more devices than the limit of 2,147,483,648",
    ),
    "slices that axes do not divide": (
        ("data=4,fsdp=6", "6xv5e:2x2"),
        {},
        "on='6xv5e:2x2' has 6 slices, which the outermost axes cannot be divided over: the first axis has size 4; make it 6, or a multiple or a divisor of that",
    ),
    "host of nine": (
        ("data=9", "h100:1x9"),
        {},
        "on='h100:1x9' has 9 GPUs per host, but a host of h100 has at most 8: write hosts x GPUs, such as 'h100:2x8'",
    ),
    "too many devices": (
        ("data=100000000000000000000", "none"),
        {},
        "mesh 'data=100000000000000000000' has more devices than the limit of 2,147,483,648",
    ),
    "too many GPUs": (
        ("data=8", "h100:99999999999x8"),
        {},
        "on='h100:99999999999x8' names more devices than the limit of 2,147,483,648",
    ),
    "cpu": (("data=8", "cpu"), {}, "on='cpu' does not say how many CPU devices: write 'cpu:8'"),
    "started": (
        ("data=16", "cpu:16"),
        {},
        "on='cpu:16' needs 16 CPU devices, but JAX has already started with 8: call sw.mesh, or jax.config.update('jax_num_cpu_devices', 16), before the first line that makes an array or asks for devices, such as nnx.Rngs(0), jnp.ones(2) or jax.devices()",
    ),
    "explicit": (
        ("data=8", None),
        {"explicit": ("model",)},
        "explicit=('model',) names 'model', which is not an axis of this mesh: its axes are data",
    ),
    "devices": (
        ("data=8", [1, 2]),
        {},
        "on=[1, 2] is not a sequence of devices: give jax.devices() or some of them",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_meshes(case):
    args, kwargs, message = BAD[case]
    with pytest.raises(ValueError) as caught:
        sw.mesh(*args, **kwargs)
    assert str(caught.value) == message


def run(code):
    return forked.run([sys.executable, "-c", code], timeout=120)


def test_virtual_devices_start_on_demand():
    done = run("import shardwise as sw; print(sw.mesh('data=-1', on='cpu:6').size)")
    assert done.stdout.strip() == "6", done.stderr


def test_a_backend_that_started_with_one_device():
    done = run("import jax, shardwise as sw; jax.devices(); sw.mesh('data=8', on='cpu:8')")
    assert "JAX has already started with 1: call sw.mesh" in done.stderr


def test_importing_starts_nothing_and_touches_no_environment():
    # Started by Python: a fork has imported everything.
    code = """
import os, jax, optax, rich.console, rich.table, flax.nnx, flax.core.spmd
touched = []
class Watched(dict):
    def __getitem__(self, key): touched.append(key); return super().__getitem__(key)
    def get(self, key, default=None): touched.append(key); return super().get(key, default)
    def __setitem__(self, key, value): touched.append(key); super().__setitem__(key, value)
    def __contains__(self, key): touched.append(key); return super().__contains__(key)
before = dict(os.environ)
os.environ = Watched(before)
os.getenv = lambda key, default=None: touched.append(key)
import shardwise
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized(), 'a backend was started'
assert not touched, touched
assert dict(os.environ) == before
print('clean')
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "clean", done.stderr
