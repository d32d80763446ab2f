"""The arithmetic of a compiled program: the products of its dots and convolutions."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import numpy as np

from ._hlo import Instruction, Module, Shape

_GEMM = re.compile(r'custom_call_target="__cublas\$(?:lt\$matmul|gemm)(?:\$f8)?"')
_SPLASH = re.compile(r"splash_\w*?_(fwd|dq|dkv)")
# The products of each of its kernels: scores and values forward; scores, gradients of the
# probabilities and of one or two operands backward.
_SPLASH_PRODUCTS = {"fwd": 2, "dq": 3, "dkv": 4}
_FMHA = re.compile(r'custom_call_target="__cudnn\$fmha(\w*)"')


def flops(module: Module) -> int:
    """Returns the floating-point operations that one device does in a step.

    Two for each product of dots and convolutions, in loops as often as these run; attention
    kernels by what they declare, or by their shapes.
    """
    total = 0
    for computation, times, _ in module.runs():
        for instruction in module.computations.get(computation, ()):
            total += times * _flops(module, computation, instruction)
    return total


def bytes_accessed(module: Module) -> int:
    """Returns the bytes that one device reads and writes in main memory in a step.

    What a fusion keeps within itself does not count; what is read by several counts for each.
    """
    total = 0
    for computation, times, fused in module.runs():
        if fused:
            continue
        own = module.by_name.get(computation, {})
        for instruction in own.values():
            if instruction.opcode in _FREE or instruction.opcode.endswith("-done"):
                continue
            read = [s for name in instruction.operands if name in own for s in own[name].shapes]
            total += times * sum(s.nbytes for s in (*read, *instruction.shapes) if s.in_hbm)
    return total


_FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional",
    "call", "after-all", "partition-id", "replica-id", "optimization-barrier", "iota",
}  # fmt: skip


def _flops(module: Module, computation: str, instruction: Instruction) -> int:
    if instruction.opcode not in ("dot", "convolution", "custom-call", "ragged-dot"):
        return 0
    own = module.by_name[computation]
    shapes = [own[n].shapes[0] for n in instruction.operands if n in own and own[n].shapes]
    if instruction.opcode == "dot" and len(shapes) >= 2:
        contracted = _numbers(instruction.attribute("lhs_contracting_dims"))
        return _products(instruction.shapes[0], shapes[0], contracted)
    if instruction.opcode == "ragged-dot" and len(shapes) >= 2:
        return 2 * instruction.shapes[0].size * shapes[0].dims[-1]
    if instruction.opcode == "convolution" and len(shapes) >= 2:
        return _convolution(instruction, shapes[0], shapes[1])
    if instruction.opcode == "custom-call":
        return _custom(instruction, shapes)
    return 0


def _products(out: Shape, left: Shape, contracted: list[int]) -> int:
    return 2 * out.size * math.prod(left.dims[dim] for dim in contracted)


def _custom(instruction: Instruction, shapes: list[Shape]) -> int:
    if _GEMM.search(instruction.rest) and len(shapes) >= 2:
        found = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', instruction.rest)
        contracted = [int(n.strip('"')) for n in found[1].split(",") if n] if found else []
        return _products(instruction.shapes[0], shapes[0], contracted)
    declared = re.search(r'"cost_estimate":\s*(\{[^}]*\})', instruction.rest)
    if declared:
        return int(json.loads(declared[1]).get("flops", 0))
    splash = _SPLASH.search(instruction.op_name)
    if splash:
        q, k = [shape for shape in shapes if len(shape.dims) >= 3][:2]
        # Causal: half of the scores are computed.
        return 2 * q.size * k.dims[-2] * _SPLASH_PRODUCTS[splash[1]] // 2
    fmha = _FMHA.search(instruction.rest)
    if fmha and len(shapes) >= 2 and len(shapes[0].dims) == 4:
        # Two products forward, five backward, of which a causal mask leaves half.
        batch, length, heads, depth = shapes[0].dims
        each = 2 * batch * heads * length * shapes[1].dims[1] * depth
        products = 5 if "Backward" in fmha[1] else 2
        return each * products // (2 if "CAUSAL" in instruction.rest else 1)
    return 0


def _convolution(instruction: Instruction, left: Shape, kernel: Shape) -> int:
    """Returns the flops of a convolution, counting only places where there is an input.

    A TPU's products are convolutions; batched ones have windows that mostly fall on padding.
    """
    labels = re.match(r"(\w+)_(\w+)->(\w+)", instruction.attribute("dim_labels"))
    if labels is None:
        return 0
    lhs, rhs, out = labels.groups()
    window = _window(instruction.attribute("window"))
    result = instruction.shapes[0]
    total = 2 * result.dims[out.index("b")] * result.dims[out.index("f")]
    total *= kernel.dims[rhs.index("i")]
    for i, label in enumerate(c for c in out if c.isdigit()):
        sizes = (left.dims[lhs.index(label)], kernel.dims[rhs.index(label)])
        total *= _meetings(*sizes, result.dims[out.index(label)], window, i)
    return total


def _meetings(size: int, taps: int, outputs: int, window: dict[str, Any], dim: int) -> int:
    """Returns how many pairs of an output and a tap of the window meet an input, in one dim."""

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
