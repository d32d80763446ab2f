"""The flops of a compiled program: those of its matrix products and convolutions."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from .access import access_of
from .program import Instruction, Module, Shape

_TARGET = re.compile(r'custom_call_target="((?:[^"\\]|\\.)*)"')
_GEMM = re.compile(r"__cublas\$(?:lt\$matmul|gemm)(?:\$\w+)?$")
_CONVOLUTION = re.compile(r"__cudnn\$conv(?!Maximum)")
_FMHA = re.compile(r"__cudnn\$fmha(\w*)")
_SPLASH = re.compile(r"splash_\w*?_(fwd|dq|dkv)")
# The matrix products in each of its kernels: scores and values in the forward pass; scores,
# gradients of the probabilities and of one or two operands in the backward pass.
_SPLASH_PRODUCTS = {"fwd": 2, "dq": 3, "dkv": 4}
_FLOATS = ("bf16", "f16", "f32")
# Kernels without matrix products: sorting, selecting, moving, random numbers, compiler annotations.
_NO_PRODUCTS = re.compile(
    r"__cub\$|__gpu\$TopK|TopK|topk|PartialReduce|ApproxTopK|AllocateBuffer|SliceId|ZeroCrop|Sharding$|"
    r"SPMDFullToShardShape|SPMDShardToFullShape|annotate_device_placement|MoveToHost|MoveToDevice|"
    r"AssumeGatherIndicesInBound|Pin$|Unpin$|LayoutConstraint|X64|GetCompleteFusion|"
    r"CreateBuffer|__cudnn\$norm|cu_threefry2x32|cu_lu_pivots_to_permutation|"
    r"lu_pivots_to_permutation|xla_python_cpu_callback|xla_ffi_python_cpu_callback|"
    r"xla_python_gpu_callback|xla_ffi_python_gpu_callback|BarrierStart|BarrierWait|"
    r"__\$\w*[Ss]ort|Sort|GlobalBarrier|InspectSharding|shape_assertion|ResizeNearest|"
    r"AsyncCollective(?:Start|Done)|LastUseAnnotation|NopReturnToken|nop$|Reinterpret|ConcatBitcast|GatherScatterIndices"
)
_ANYBODYS = ("tpu_custom_call", "__gpu$xla.gpu.triton", "mosaic_gpu", "triton_kernel_call")
# These have flops, but how many depends on the library.
_UNKNOWN = ("fft", "cholesky", "triangular-solve")


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """The floating-point operations of one device in a step.

    Attributes:
        flops: two per multiply-add of matrix products and convolutions, times the trip counts of
            loops; attention kernels count what they declare, or what their shapes imply.
        not_counted: kernels with an unknown number of flops, each with how many times a step runs
            it; and loops of unknown length.
    """

    flops: int
    not_counted: dict[str, int]


def work_of(module: Module) -> Work:
    """Returns the floating-point operations of one device in a step."""
    total, missing = 0, Counter()
    for computation, times, _ in module.runs():
        for instruction in module.computations.get(computation, ()):
            if instruction.opcode == "while" and module.trips(computation, instruction) is None:
                if _multiplies(module, instruction):
                    missing["all but one run of a loop of unknown length"] += times
                continue
            found = flops_of(module, computation, instruction)
            if found is None:
                missing[_name(instruction)] += times
            else:
                total += times * found
    return Work(total, dict(sorted(missing.items())))


def _multiplies(module: Module, loop: Instruction) -> bool:
    todo, seen = list(loop.called), set()
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        for instruction in module.computations.get(name, ()):
            if flops_of(module, name, instruction) != 0:
                return True
            todo += instruction.called
    return False


def _name(instruction: Instruction) -> str:
    """Returns a kernel's name in its library, with its caller if the library runs user kernels."""
    if instruction.opcode != "custom-call":
        return instruction.opcode
    target = _TARGET.search(instruction.rest)
    name = target[1] if target else "custom-call"
    caller = instruction.op_name.rpartition("/")[2]
    return f"{name} ({caller})" if name in _ANYBODYS and caller else name


def bytes_accessed(module: Module) -> int:
    """Returns the bytes that one device reads and writes in main memory in a step.

    Values inside a fusion do not count; a value counts once for each instruction that reads it,
    and only the part of it that is read.
    """
    return sum(
        times * access_of(module, computation, instruction).total
        for computation, times, fused in module.runs()
        if not fused
        for instruction in module.computations.get(computation, ())
    )


def flops_of(module: Module, computation: str, instruction: Instruction) -> int | None:
    """Returns the flops of one instruction; None if it may have some that are unknown."""
    if instruction.opcode in _UNKNOWN:
        return None
    if instruction.opcode not in ("dot", "convolution", "custom-call", "ragged-dot"):
        return 0
    own = module.by_name[computation]
    shapes = [own[n].shapes[0] for n in instruction.operands if n in own and own[n].shapes]
    if instruction.opcode == "custom-call":
        return _custom(instruction, shapes)
    if len(shapes) < 2:
        return None
    if instruction.opcode == "dot":
        contracted = _numbers(instruction.attribute("lhs_contracting_dims"))
        return _products(instruction.shapes[0], shapes[0], contracted)
    if instruction.opcode == "ragged-dot":
        return 2 * instruction.shapes[0].size * shapes[0].dims[-1]
    return convolution_flops(instruction, shapes[0], shapes[1], instruction.shapes[0])


def _products(out: Shape, left: Shape, contracted: list[int]) -> int:
    return 2 * out.size * math.prod(left.dims[dim] for dim in contracted)


def _custom(instruction: Instruction, shapes: list[Shape]) -> int | None:
    target = _name(instruction)
    if _NO_PRODUCTS.match(target):
        return 0
    if _GEMM.match(target) and len(shapes) >= 2:
        found = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', instruction.rest)
        if found is None:
            return None
        contracted = [int(n.strip('"')) for n in found[1].split(",") if n]
        return _products(instruction.shapes[0], shapes[0], contracted)
    if _CONVOLUTION.match(target) and len(shapes) >= 2 and instruction.shapes:
        # The labels are always those of the forward pass, whichever array is the result.
        first, second, result = *shapes[:2], instruction.shapes[0]
        if "BackwardInput" in target:
            return convolution_flops(instruction, result, second, first)
        if "BackwardFilter" in target:
            return convolution_flops(instruction, first, result, second)
        return convolution_flops(instruction, first, second, result)
    declared = re.search(r'"cost_estimate":\s*(\{[^}]*\})', instruction.rest)
    if declared:
        stated = json.loads(declared[1]).get("flops")
        return None if stated is None else int(stated)
    splash = splash_flops(instruction.op_name, shapes)
    if splash is not None:
        return splash
    fmha = _FMHA.match(target)
    if fmha and len(shapes) >= 2 and len(shapes[0].dims) == 4:
        # Two products forward, five backward, of the pairs that the mask leaves.
        batch, length, heads, depth = shapes[0].dims
        products = 5 if "Backward" in fmha[1] else 2
        pairs = _pairs(instruction, length, shapes[1].dims[1])
        return 2 * batch * heads * pairs * depth * products
    return None


def sliding_window_of(attention: Instruction) -> int:
    """Returns how many keys each query of cuDNN's attention sees; 0 where it sees all."""
    found = re.search(r'"sliding_window_length":\s*(\d+)', attention.rest)
    return int(found[1]) if found else 0


def _pairs(attention: Instruction, queries: int, keys: int) -> int:
    """Returns how many pairs of a query and a key a call of cuDNN's attention multiplies."""
    if "CAUSAL" not in attention.rest:
        return queries * keys
    nearest = sliding_window_of(attention)
    if 0 < nearest < queries:
        return nearest * (2 * queries - nearest) // 2
    return queries * keys // 2


def convolution_flops(
    instruction: Instruction, left: Shape, kernel: Shape, result: Shape
) -> int | None:
    """Returns the flops of a convolution, counting only places where there is an input.

    A TPU's products are convolutions; batched ones have windows that mostly fall on padding.
    """
    labels = re.match(r"(\w+)_(\w+)->(\w+)", instruction.attribute("dim_labels"))
    if labels is None:
        return None
    lhs, rhs, out = labels.groups()
    ranks = (len(left.dims), len(kernel.dims), len(result.dims))
    if ranks != (len(lhs), len(rhs), len(out)):
        return None
    window = _window(instruction.attribute("window"))
    total = 2 * result.dims[out.index("b")] * result.dims[out.index("f")]
    total *= kernel.dims[rhs.index("i")]
    for i, label in enumerate(sorted(c for c in out if c.isdigit())):
        sizes = (left.dims[lhs.index(label)], kernel.dims[rhs.index(label)])
        total *= _meetings(*sizes, result.dims[out.index(label)], window, i)
    return total


def _meetings(size: int, taps: int, outputs: int, window: dict[str, Any], dim: int) -> int:
    """Returns how many pairs of an output and a window tap read an input, in one dim."""

    def of(name: str, default: Any) -> Any:
        values = window.get(name)
        return values[dim] if values and dim < len(values) else default

    stride, low = of("stride", 1), of("pad", (0, 0))[0]
    left_step, right_step = of("lhs_dilate", 1), of("rhs_dilate", 1)
    if stride == left_step == right_step == 1 and low == 0 and outputs + taps - 1 == size:
        return outputs * taps
    at = np.arange(outputs)[:, None] * stride + np.arange(taps)[None, :] * right_step - low
    inside = (at >= 0) & (at < (size - 1) * left_step + 1) & (at % left_step == 0)
    return int(inside.sum())


def _window(text: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in re.findall(r"(\w+)=([^\s}]+)", text):
        parts = value.split("x")
        if name == "pad":
            found[name] = [tuple(int(n) for n in part.split("_")) for part in parts]
        elif name != "rhs_reversal":
            found[name] = [int(part) for part in parts]
    return found


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def splash_flops(name: str, shapes: Sequence[Shape]) -> int | None:
    """Returns the operations of one of a TPU's attention kernels; None if the name is not of one.

    Args:
        name: where it comes from, such as `splash_mha_fwd_residuals/pallas_call`.
        shapes: its operands.
    """
    kernel = _SPLASH.search(name)
    # Integers describe the blocks of the mask.
    attended = [shape for shape in shapes if len(shape.dims) >= 3 and shape.dtype in _FLOATS]
    if kernel is None or len(attended) < 2:
        return None
    q, k = attended[:2]
    # Causal: half of the scores are computed. Of a window's, the blocks that a table lists.
    blocks = next((s.dims[-2:] for s in shapes if len(s.dims) == 3 and s.dtype == "s8"), (1, 1))
    share = min(0.5, min(blocks) / max(blocks))
    return int(2 * q.size * k.dims[-2] * _SPLASH_PRODUCTS[kernel[1]] * share)


def is_attention(target: str, given: Sequence[Shape], made: Sequence[Shape]) -> bool:
    """Returns whether a call that its own function partitions is attention, by its shapes.

    JAX hands cuDNN's attention over so, without its name: queries, keys and values of four dims, a
    result as large as the queries, or their three gradients.
    """
    if "CustomSPMDPartitioning" not in target or len(given) < 3 or not made:
        return False
    q, k, v = (shape.dims for shape in given[:3])
    heads = len(q) == len(k) == len(v) == 4 and q[0] == k[0] == v[0] and k[1:3] == v[1:3]
    return heads and q[3] == k[3] and made[0].dims[:3] == q[:3]
