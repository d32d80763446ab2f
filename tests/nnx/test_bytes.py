"""Bytes of arrays with sub-byte elements, packed as compilers pack them."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax._src.interpreters import mlir
from jax.sharding import PartitionSpec as P

import shardwise as sw
from shardwise._chips.chips import parse_chips
from shardwise._compile.toolchain.run import compile_absent
from shardwise._nnx.leaf import array_bytes

DTYPES = ["int4", "uint4", "float4_e2m1fn", "int2", "uint2", "int8", "float8_e4m3fn", "bool"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(64, 128), (7, 3), (5,), ()])
def test_bytes_match_the_cpu_compiler(dtype, shape):
    compiled = jax.jit(lambda x: x + x if dtype != "bool" else ~x).lower(
        jax.ShapeDtypeStruct(shape, dtype)
    ).compile()  # fmt: skip
    taken = compiled.memory_analysis().argument_size_in_bytes
    assert array_bytes(shape, jnp.dtype(dtype)) == taken


@pytest.mark.parametrize("on", ["h100:1x1", "v5e:1x1"])
def test_bytes_match_the_compilers_for_absent_chips(on):
    dtypes = ["int4", "uint4", "int2", "int8"]
    # Multiples of a TPU's tiles: other sizes are padded.
    arrays = [jax.ShapeDtypeStruct((256, 256), dtype) for dtype in dtypes]
    target = parse_chips(on)
    platform = {"gpu": "cuda", "tpu": "tpu"}[target.platform]
    lowered = jax.jit(lambda xs: [x.astype("float32").sum() for x in xs]).trace(arrays)
    lowered = lowered.lower(lowering_platforms=(platform,))
    module = mlir.module_to_bytecode(lowered.compiler_ir("stablehlo"))
    program = compile_absent(module, target, {"data": 1}, {}, lowered.as_text(), show=False)
    expected = sum(array_bytes(x.shape, x.dtype) for x in arrays)
    assert program.stats["argument_size_in_bytes"] == expected


class Quantised(nnx.Module):
    """A kernel with 4 bits per element."""

    def __init__(self):
        self.kernel = nnx.Param(jnp.zeros((256, 64), jnp.int4))

    def __call__(self, x):
        return x @ self.kernel[...].astype(x.dtype)


def test_a_layout_and_a_compilation_agree():
    layout = sw.layout(Quantised, sw.mesh("model=4", on="cpu:4"), {"kernel": P(None, "model")})
    (leaf,) = layout.leaves
    assert (leaf.bytes, leaf.shard_bytes) == (256 * 64 // 2, 256 * 16 // 2)
    compiled = sw.compile(Quantised, layout, inputs=jax.ShapeDtypeStruct((8, 256), "float32"))
    assert compiled.memory.parameters == leaf.shard_bytes
    assert compiled.memory.arguments == compiled.memory.parameters + compiled.memory.batch
