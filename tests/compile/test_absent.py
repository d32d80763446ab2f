"""Compiling for chips that are not here, by their real compilers."""

import dataclasses
import functools
import os
import re
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from forked import Forked
from jax._src.interpreters import mlir
from test_compile import (
    FSDP,
    HIDDEN,
    KERNEL,
    SHARD,
    WIDTH,
    counted,
    layout_of,
    recipe,
    ring,
)

import shardwise as sw
from shardwise._chips import chips
from shardwise._chips.chips import CHIPS, parse_chips
from shardwise._compile.toolchain import installed
from shardwise._compile.toolchain.gpu import target_config
from shardwise._compile.toolchain.run import absent_mesh, compile_absent
from shardwise._compile.toolchain.worker import known_fields, lifetimes_of
from shardwise._hlo.flops import work_of
from shardwise._hlo.program import parse_hlo
from shardwise._memory import compiled_lifetimes, largest_buffers, modelled_lifetimes

# --- collectives by hand, by the real compilers ---------------------------------------------------


@pytest.mark.usefixtures("fresh_compilers")
@pytest.mark.parametrize("on", ["h100:1x8", "v5e:2x4"])
def test_fsdp_gathers_kernels_and_scatters_gradients(on):
    compiled = sw.compile(recipe(), layout_of("data=8", FSDP, on=on))
    found = counted(compiled)
    narrow = 2 if on.startswith("v5e") else 1  # a TPU multiplies in bfloat16, and gathers so
    assert found["data", "all-gather"] == (2, 2 * 7 * SHARD // narrow)
    assert found["data", "reduce-scatter"][1] == 2 * 7 * SHARD
    assert sum(sent for (_, kind), (_, sent) in found.items() if kind == "all-reduce") == ring(4, 8)
    assert {axes for axes, _ in found} == {"data"}
    assert compiled.flops == (6 * 2 - 2) * WIDTH * HIDDEN * 4096 // 8
    assert compiled.fits is True and compiled.refused == ""
    assert compiled.memory.capacity == CHIPS[on.partition(":")[0]].capacity_bytes


@pytest.mark.parametrize(("on", "accumulate"), [("h100:1x8", 1), ("v5e:2x4", 1), ("h100:1x8", 4)])
def test_zero_scatters_gradients_and_gathers_weights(on, accumulate):
    """Together they send what one all-reduce sends; with zero2, gradients for each microbatch."""
    given = dataclasses.replace(recipe(), accumulate=accumulate, clip=1.0)
    for rule, times in ((sw.zero1, 1), (sw.zero2, accumulate)):
        compiled = sw.compile(given, layout_of("data=8", rule("data", min_bytes=0), on=on))
        found = counted(compiled)
        assert found["data", "all-gather"][1] == 2 * 7 * SHARD
        assert found["data", "reduce-scatter"][1] == times * 2 * 7 * SHARD
        rest = [sent for (_, kind), (_, sent) in found.items() if kind == "all-reduce"]
        assert sum(rest) <= (1 + accumulate) * ring(4, 8) and not compiled.findings


@pytest.mark.parametrize("on", ["h200:2x4", "v5p:2x2x2"])
def test_tensor_and_data_parallel(on):
    """Over model the activation is summed once; over data, the gradients and the loss."""
    compiled = sw.compile(recipe(), layout_of("data=2,model=4", sw.tensor("model"), on=on))
    found = counted(compiled)
    assert found["model", "all-reduce"] == (1, ring(2048 * WIDTH * 4, 4))
    rest = sum(sent for (axes, _), (_, sent) in found.items() if axes != "model")
    assert rest == pytest.approx(ring(2 * KERNEL // 4, 2), abs=16)
    (row,) = [row for row in compiled.collectives if row.axes == ("model",)]
    assert row.source.module == "down" and "test_compile.py:" in row.source.place
    # Devices are numbered host by host: `model` stays on one, `data` does not.
    spread = 2 if on.startswith("h200") else 1
    assert {(c.axes == ("model",), c.hosts) for c in compiled.collectives} == {
        (True, 1),
        (False, spread),
    }
    heads = [line for line in str(compiled).splitlines() if line.startswith("over ")]
    told = {line.split(":")[0]: line.rpartition(", ")[2] for line in heads}
    if on.startswith("h200"):
        assert told["over model"] == "inside hosts" and told["over data"] == "across 2 hosts"
    else:
        assert not any("across" in line or "inside" in line for line in heads)


POINTS = [
    ("v4:2x2x1", "data=4", FSDP),
    ("v6e:2x4", "data=2,model=4", [sw.tensor("model"), FSDP]),
    ("tpu7x:2x2x1", "data=8", FSDP),
    ("a100:1x8", "data=2,model=4", [sw.tensor("model"), FSDP]),
    ("b200:2x4", "data=8", "dp"),
]


@pytest.mark.parametrize(("on", "axes", "rules"), POINTS, ids=[on for on, _, _ in POINTS])
def test_state_bytes_are_the_compiler_s_arguments(on, axes, rules):
    make = functools.partial(wide, layers=2)
    given = recipe((512, 2048), model=make, optimizer=optax.adamw(1e-3))
    inputs = jax.ShapeDtypeStruct((512, 2048), "float32")
    memory = sw.compile(given, sw.layout(make, sw.mesh(axes, on=on), rules, inputs=inputs)).memory
    whole = memory.parameters + memory.optimizer + memory.batch
    assert whole <= memory.arguments <= whole * 1.005


# --- verdicts -------------------------------------------------------------------------------------


class Wide(nnx.Module):
    """Layers whose activations are kept for the backward pass."""

    def __init__(self, rngs, layers):
        self.layers = nnx.List([nnx.Linear(2048, 2048, rngs=rngs) for _ in range(layers)])

    def __call__(self, x):
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return x


def wide(layers=4):
    return Wide(nnx.Rngs(0), layers)


@pytest.mark.parametrize("on", ["v5e:2x2", "h100:1x4"])
def test_what_does_not_fit_is_a_finding_not_a_traceback(on):
    """Some 2 million rows of 8 KiB each."""
    given = recipe((2**23, 2048), model=wide)
    compiled = sw.compile(given, sw.layout(wide, sw.mesh("data=4", on=on), "dp"))
    assert compiled.fits is False and compiled.spare_bytes < 0
    assert compiled.verdict.startswith("does not fit: needs ")
    finding = next(f for f in compiled.findings if f.code == "SW301")
    assert finding.severity == "error" and finding.path == f"data=4 on {on}"
    assert "more than the" in finding.message and "accumulate" in finding.help
    assert re.search(
        r"largest temporaries: f32\[2097152,2048\].*test_absent\.py:\d+", finding.context
    )
    assert "Traceback" not in str(compiled)
    # The causes are the chip's own: what its compiler had assigned when it gave up.
    assert not compiled.stand_in and not compiled.note
    assert {row.label for row in compiled.buffers} == {"compiled"}
    assert ("custom-call" in compiled.hlo or "fusion" in compiled.hlo) and compiled.has_program


def test_what_is_too_much_counts_the_state_once():
    """The TPU compiler's total has the arguments in it: here, most of what does not fit."""
    make = lambda: nnx.Linear(32768, 65536, use_bias=False, rngs=nnx.Rngs(0))  # noqa: E731
    given = recipe((8, 32768), model=make, optimizer=optax.sgd(0.1, momentum=0.9))
    compiled = sw.compile(given, sw.layout(make, sw.mesh("data=1", on="v5e:1x1"), "dp"))
    memory = compiled.memory
    assert compiled.refused and memory.arguments == pytest.approx(2 * 2**33, rel=0.001)
    shown = re.search(r"HLO temporaries \(([\d.]+)G|Used ([\d.]+)G of", compiled.refused)
    total = float(shown[1] or shown[2]) * 2**30
    assert memory.peak == pytest.approx(total, rel=0.001)
    assert compiled.spare_bytes == memory.capacity - memory.peak


def test_a_stand_in_is_marked_as_one():
    found = sw.compile(recipe(), layout_of("data=8", FSDP, on="v5e:2x4"))
    other = dataclasses.replace(found, refused="RESOURCE_EXHAUSTED", stand_in=True)
    assert "not of the chips" in other.note and other.note in str(other)
    assert other.to_dict()["stand_in"] is True and found.note == ""


# --- the process stays clean ----------------------------------------------------------------------

SCRIPT = """
import os, sys
before = dict(os.environ)
import jax, jax.numpy as jnp, optax, shardwise as sw
from flax import nnx
from jax._src.interpreters import mlir
make = lambda: nnx.Linear(64, 64, use_bias=False, rngs=nnx.Rngs(0))
recipe = sw.Recipe(model=make, loss=lambda m, x: m(x).mean(), optimizer=optax.sgd(0.1),
                   batch=jax.ShapeDtypeStruct((64, 64), "float32"))
for on in ("v5e:2x2", "h100:1x4"):
    compiled = sw.compile(recipe, sw.layout(make, sw.mesh("data=4", on=on), "dp"))
    assert compiled.fits, compiled
    print(on, len(compiled.collectives))
assert dict(os.environ) == before
assert jax.devices()[0].platform == "cpu"
print(float(jax.jit(lambda x: x @ x)(jnp.ones((8, 8)))[0, 0]))
"""


def test_two_kinds_of_chips_in_one_process_and_two_processes_at_once(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"}
    environment["SHARDWISE_CACHE"] = str(tmp_path)
    started = [
        Forked(
            [sys.executable, "-c", SCRIPT],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for process in started:
        out, err = process.communicate(timeout=240)
        assert process.returncode == 0, err
        assert out.splitlines() == ["v5e:2x2 1", "h100:1x4 1", "8.0"]
        assert err == ""


def test_what_was_compiled_before_is_not_compiled_again(tmp_path, monkeypatch):
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path))
    planned = layout_of("data=4", "dp", on="v5e:2x2", batch=512)
    first = sw.compile(recipe(batch=512), planned)

    def from_deeper(calls):
        return from_deeper(calls - 1) if calls else sw.compile(recipe(batch=512), planned)

    again = from_deeper(7)
    assert not first.cached and again.cached
    assert again.to_dict() | {"cached": False} == first.to_dict()
    other = sw.compile(recipe(batch=1024), planned)
    assert not other.cached


# --- what is alive at the peak --------------------------------------------------------------------


def _chain(x, kernels):
    for kernel in kernels:
        x = jnp.tanh(x @ kernel)
    return jnp.sum(x**2)


def _scanned(x, kernels):
    found, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, jnp.stack(kernels))
    return jnp.sum(found**2)


ROWS, WIDE, LAYERS = 65536, 1024, 4  # far more than fits on a TPU's chip


@pytest.mark.parametrize("on", [None, "h100:1x1", "v5e:1x1"])
@pytest.mark.parametrize("loss", [_chain, _scanned])
def test_what_is_alive_at_the_peak_is_what_the_compiler_assigned(on, loss):
    target = parse_chips(on) if on else None
    platform = {"gpu": "cuda", "tpu": "tpu"}[target.platform] if target else "cpu"
    arrays = [jax.ShapeDtypeStruct((ROWS, WIDE), "float32")]
    arrays.append([jax.ShapeDtypeStruct((WIDE, WIDE), "float32")] * LAYERS)
    lowered = jax.jit(jax.grad(loss, argnums=1)).trace(*arrays)
    lowered = lowered.lower(lowering_platforms=(platform,))
    module = mlir.module_to_bytecode(lowered.compiler_ir("stablehlo"))
    program = compile_absent(module, target, {"data": 1}, {}, lowered.as_text(), show=False)
    stats = program.stats
    total = stats["temp_size_in_bytes"]
    if on == "v5e:1x1":
        total = stats["peak_memory_in_bytes"] - stats["argument_size_in_bytes"]
        total -= stats["output_size_in_bytes"] - stats["alias_size_in_bytes"]
    assert program.lifetimes is not None
    lifetimes = compiled_lifetimes(program.lifetimes)
    assert 0.7 * total < lifetimes.peak()[0] <= total
    parsed = parse_hlo(program.hlo)
    rows = largest_buffers(parsed, [], lifetimes, total)
    assert sum(row.total_bytes for row in rows) == total
    # What the backward pass needs of each layer is alive, and named.
    kept = [row for row in rows if f"{ROWS},{WIDE}]" in row.shape]
    assert sum(row.total_bytes for row in kept) >= (LAYERS - 2) * ROWS * WIDE * 2
    assert loss is _scanned or "test_absent.py:" in kept[0].source.place
    modelled = largest_buffers(parsed, [], modelled_lifetimes(parsed), total)
    assert {row.label for row in modelled} == {"modelled"}
    assert sum(row.total_bytes for row in modelled) == total


# --- arithmetic -----------------------------------------------------------------------------------


def _convolve(x, kernel, strides=1, dilation=1, groups=1):
    return jax.lax.conv_general_dilated(
        x, kernel, (strides, strides), "VALID", rhs_dilation=(dilation, dilation),
        dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=groups,
    )  # fmt: skip


def _zoo(x, kernel, grouped, depthwise, q, kernel3, image3):
    """Returns one number of all that multiplies: convolutions of every kind, and attention."""
    made = [
        _convolve(x, kernel),
        _convolve(x, kernel, strides=2),
        _convolve(x, kernel, dilation=2),
        _convolve(x, kernel[:1, :1]),
        _convolve(x, grouped, groups=4),
        # Backward, compilers for CPUs and TPUs make it a dense one, with 64 times the work.
        jax.lax.stop_gradient(_convolve(x, depthwise, groups=64)),
        jax.lax.conv_general_dilated(
            image3, kernel3, (1,), "VALID", dimension_numbers=("NWC", "WIO", "NWC")
        ),
        jax.nn.dot_product_attention(q, q, q),
    ]
    return sum(jnp.sum(one.astype(jnp.float32) ** 2) for one in made)


ZOO = tuple(
    jax.ShapeDtypeStruct(shape, "float32")
    for shape in [
        (8, 18, 18, 64), (3, 3, 64, 64), (3, 3, 16, 64), (3, 3, 1, 64), (2, 64, 4, 32), (3, 32, 64),
        (8, 34, 32),
    ]
)  # fmt: skip


@pytest.mark.parametrize("on", [None, "h100:1x1", "v5e:1x1"])
def test_convolutions_are_counted_forward_and_backward(on):
    """As XLA counts the program before it is compiled, but for its additions and the like."""
    step = jax.jit(jax.value_and_grad(_zoo, argnums=tuple(range(len(ZOO)))))
    target = parse_chips(on) if on else None
    platform = {"gpu": "cuda", "tpu": "tpu"}[target.platform] if target else "cpu"
    lowered = step.trace(*ZOO).lower(lowering_platforms=(platform,))
    module = mlir.module_to_bytecode(lowered.compiler_ir("stablehlo"))
    program = compile_absent(module, target, {"data": 1}, {}, lowered.as_text(), show=False)
    work = work_of(parse_hlo(program.hlo))
    assert work.not_counted == {}
    expected = step.lower(*ZOO).cost_analysis()["flops"]
    assert work.flops == pytest.approx(expected, rel=0.04)


@pytest.mark.parametrize(
    ("on", "name"), [(None, "lapack_spotrf_ffi"), ("h100:1x1", "cusolver_potrf_ffi")]
)
def test_kernels_that_cannot_be_counted_are_named(on, name):
    target = parse_chips(on) if on else None

    def solve(a):
        found = jax.lax.fori_loop(0, 3, lambda _, x: jnp.linalg.cholesky(x), a)
        chosen, _ = jax.lax.top_k(jnp.sort(found), 2)
        return chosen, jnp.fft.fft(found)

    shape = jax.ShapeDtypeStruct((64, 64), "float32")
    lowered = jax.jit(solve).trace(shape).lower(lowering_platforms=("cuda" if on else "cpu",))
    module = mlir.module_to_bytecode(lowered.compiler_ir("stablehlo"))
    program = compile_absent(module, target, {"data": 1}, {}, lowered.as_text(), show=False)
    assert work_of(parse_hlo(program.hlo)).not_counted == {"fft": 1, name: 3}


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("on", "axes", "told"),
    [
        (
            "v5p:3x5x7",
            "data=105",
            "on='v5p:3x5x7' is not a topology that the compiler of v5p knows",
        ),
        ("v5e:16x32", "data=512", "the compiler for on='v5e:16x32' was killed by signal 6"),
    ],
)
@pytest.mark.usefixtures("fresh_compilers")
def test_an_impossible_topology(on, axes, told, monkeypatch):
    """`sw.mesh` refuses those that are known; of others the compiler's own words are told."""
    monkeypatch.setattr(chips, "_require_topology", lambda *_: None)
    batch = 105 * 8 if "105" in axes else 512
    with pytest.raises(sw.CompileError, match=re.escape(told)):
        sw.compile(recipe(batch=batch), layout_of(axes, "dp", on=on))


def test_a_compiler_that_is_not_installed(monkeypatch):
    real = installed.version_of
    planned = layout_of("data=4", "dp", on="v5e:2x2")
    monkeypatch.setattr(installed, "version_of", lambda n: None if n == "libtpu" else real(n))
    with pytest.raises(ValueError, match=r'not installed: pip install "shardwise\[tpu\]"$'):
        sw.compile(recipe(), planned)
    monkeypatch.setattr(installed, "version_of", lambda n: "0.0.1" if n == "libtpu" else real(n))
    with pytest.raises(ValueError, match=r'but 0\.0\.1 is installed: pip install "jax\[tpu\]==\d'):
        sw.compile(recipe(), planned)
    planned = layout_of("data=4", "dp", on="h100:1x4")
    monkeypatch.setattr(installed, "version_of", lambda n: None if "cuda" in n else real(n))
    with pytest.raises(ValueError, match=r'not installed: pip install "shardwise\[gpu\]"$'):
        sw.compile(recipe(), planned)
    monkeypatch.setattr(installed, "version_of", lambda n: "0.1" if "pjrt" in n else real(n))
    with pytest.raises(
        ValueError, match=r"jax-cuda13-pjrt .*, the version of jaxlib, but it is 0\.1"
    ):
        sw.compile(recipe(), planned)


def test_fields_that_a_version_does_not_know_are_left_out():
    absent_mesh(parse_chips("h100:1x1"), sw.mesh("data=1", on="h100:1x1"))  # finds the plugin
    config = target_config(parse_chips("h100:1x1"))
    odd = config.replace("  core_count:", "  no_such_field: 7\n  core_count:")
    kept = known_fields(odd, "1x1x1")
    assert "no_such_field" not in kept and "core_count: 132" in kept
    assert known_fields(kept, "1x1x1") == kept


def test_programs_partitioned_by_python_functions():
    """As cuDNN's attention is: they cannot leave the process, and are compiled in it."""
    from jax.experimental.custom_partitioning import custom_partitioning

    @custom_partitioning
    def double(x):
        return x * 2

    def partition(mesh, args, result):
        sharding = args[0].sharding
        return mesh, lambda x: x * 2, sharding, (sharding,)

    double.def_partition(
        partition=partition,
        infer_sharding_from_operands=lambda mesh, args, result: args[0].sharding,
        sharding_rule="i j -> i j",
    )
    planned = layout_of("data=4", "dp", on="h100:1x4")
    compiled = sw.compile(recipe(batch=512, loss=lambda m, x: jnp.mean(
        jax.lax.stop_gradient(double(x)) * m(x))), planned)  # fmt: skip
    assert compiled.fits and compiled.chips == "h100:1x4"
    assert {row.axes for row in compiled.collectives} == {("data",)}


def test_a_worker_ends_with_the_process_that_asked(tmp_path):
    code = SCRIPT.replace("for on in", "print('ready', flush=True)\nfor on in")
    environment = {**os.environ, "SHARDWISE_CACHE": str(tmp_path)}
    process = subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    done = threading.Event()
    for _ in range(300):
        workers = _children(process.pid)
        if workers or done.wait(0.1):
            break
    assert workers
    process.kill()
    process.wait()
    process.stdout.close()
    for _ in range(100):
        if not any(os.path.exists(f"/proc/{pid}") for pid in workers):
            break
        done.wait(0.1)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in workers)


def _children(pid):
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            return [int(child) for child in file.read().split()]
    except OSError:
        return []


def test_a_mesh_that_no_torus_axes_make_up():
    """data=2,model=8 of 4x4 cannot be had without splitting a physical axis."""
    planned = layout_of("data=2,model=8", sw.tensor("model"), on="v5p:2x2x4")
    compiled = sw.compile(recipe(batch=512), planned)
    assert compiled.mesh == {"data": 2, "model": 8}


def test_what_a_loop_carries_is_alive_while_it_runs():
    """The dump of a TPU's compiler calls it a phi; only the loop's own range says how long."""
    assignment = (
        "allocation 0: size 96, preallocated-temp:\n"
        " value: <1 stack @0> (size=64,offset=0): f32[16]{0}\n"
        " value: <2 while.1{0} (phi) @0> (size=64,offset=0): f32[16]{0}\n"
        " value: <3 inner @0> (size=32,offset=64): f32[8]{0}"
    )
    ranges = "    stack{}:1-2\n    while.1{0}:2-9\n    inner{}:4-5"
    lifetimes = compiled_lifetimes(lifetimes_of(assignment, ranges))
    most, place = lifetimes.peak()
    assert most == 96
    alive = [(value.name, value.bytes) for value in lifetimes.alive(place)]
    assert alive == [("while.1", 64), ("inner", 32)]
