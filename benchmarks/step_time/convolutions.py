"""Times convolutions and their gradients, kernel by kernel, several in each program.

    python benchmarks/step_time/convolutions.py convolutions.json [--seconds N]

Each case is a convolution with both of its gradients, of inputs that an elementwise kernel has just
written, as in a network. Six cases make a program. Kernels are read from the profiler, so that
launches do not count; kernels that the library adds to a convolution (to lay arrays out anew, to
sum partial results) carry its name, and count. Where `--seconds` are not enough to compile all
programs, the rest is left out; cases are shuffled.
"""

import argparse
import collections
import json
import os
import pathlib
import random
import re
import tempfile
import time

# In CUDA graphs, kernels lose the names of their instructions.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_enable_command_buffer="

import jax
import jax.numpy as jnp
from jax import lax

SPATIAL = {1: "W", 2: "HW", 3: "DHW"}


def case(dtype, batch, size, channels, out, window, stride=1, groups=1, **options):
    """Returns one case: `size`, `window` and `stride` are numbers or tuples, one for each dim."""
    size = size if isinstance(size, tuple) else (size, size)
    each = lambda n: n if isinstance(n, tuple) else (n,) * len(size)  # noqa: E731
    return {
        "dtype": dtype, "batch": batch, "size": size, "channels": channels, "out": out,
        "window": each(window), "stride": each(stride), "groups": groups, **options,
    }  # fmt: skip


def cases():
    found = []
    both = ("bf16", "f32")
    for dtype in both:
        add = lambda *args, dtype=dtype, **options: found.append(case(dtype, *args, **options))  # noqa: E731
        narrow = dtype == "bf16"
        # Windows of 3x3, of many widths.
        for batch, size, channels, out in (
            (64, 56, 64, 64), (128, 32, 160, 160), (256, 16, 320, 320), (256, 8, 640, 640),
            (32, 96, 48, 48), (64, 48, 96, 96), (64, 28, 192, 192), (32, 64, 72, 144),
            (64, 24, 288, 144), (48, 40, 80, 80), (128, 14, 256, 512), (96, 14, 384, 384),
            (32, 112, 32, 64), (64, 32, 128, 128), (256, 32, 32, 160), (64, 7, 512, 512),
            (16, 64, 100, 100), (48, 36, 36, 60), (64, 64, 24, 40), (128, 20, 224, 112),
            (8, 128, 128, 64), (512, 8, 128, 256),
        ):  # fmt: skip
            add(batch, size, channels, out, 3, bias=len(found) % 2)
        for batch, size, channels, out in (
            (64, 56, 64, 128), (256, 32, 160, 320), (32, 96, 48, 96), (64, 28, 256, 256),
            (64, 64, 40, 80), (128, 16, 320, 640), (32, 112, 72, 72),
        ):  # fmt: skip
            add(batch, size, channels, out, 3, 2, bias=len(found) % 2)
        for batch, size, channels, out in (
            (64, 56, 64, 256), (64, 56, 256, 64), (64, 28, 512, 128), (128, 14, 1024, 256),
            (56, 80, 40, 160), (56, 40, 320, 80), (64, 32, 144, 24), (32, 64, 96, 200),
            (128, 7, 960, 160), (64, 32, 72, 288), (256, 16, 384, 384), (32, 32, 1000, 120),
        ):  # fmt: skip
            add(batch, size, channels, out, 1, bias=len(found) % 2)
        for batch, size, channels, out in (
            (64, 56, 256, 512),
            (256, 32, 160, 320),
            (64, 48, 72, 96),
        ):
            add(batch, size, channels, out, 1, 2)
        for batch, size, channels, out, window in (
            (112, 48, 72, 144, 5), (112, 24, 144, 288, 5), (64, 28, 64, 64, 7), (64, 32, 128, 96, (1, 7)),
            (32, 48, 80, 160, 4),
        ):  # fmt: skip
            stride = 2 if window == 4 else 1
            add(batch, size, channels, out, window, stride, bias=len(found) % 2)
        # From images and to images.
        for batch, size, channels, out, window, stride in (
            (64, 128, 3, 64, 3, 1), (256, 32, 3, 32, 3, 1), (64, 160, 3, 40, 3, 2), (64, 224, 3, 64, 7, 2),
            (64, 224, 3, 192, 4, 4), (64, 224, 3, 384, 16, 16), (112, 96, 3, 72, 5, 1),
            (128, 64, 1, 48, 3, 1), (32, 128, 64, 3, 3, 1), (32, 96, 48, 3, 1, 1), (64, 64, 6, 96, 3, 2),
            (32, 96, 80, 1, 3, 1),
        ):  # fmt: skip
            add(batch, size, channels, out, window, stride, bias=len(found) % 2)
        # In groups.
        for batch, size, channels, window, stride in (
            (64, 56, 192, 7, 1), (56, 80, 160, 3, 1), (56, 80, 160, 3, 2), (64, 28, 384, 5, 1),
            (64, 14, 768, 7, 1), (128, 32, 144, 3, 2), (128, 14, 576, 3, 1), (64, 28, 240, 5, 2),
        ):  # fmt: skip
            add(batch, size, channels, channels, window, stride, channels, bias=len(found) % 2)
        for batch, size, channels, out, window, groups in (
            (64, 56, 128, 128, 3, 32), (64, 28, 256, 256, 3, 8), (64, 28, 240, 240, 3, 10), (64, 32, 96, 192, 1, 4),
        ):  # fmt: skip
            add(batch, size, channels, out, window, 1, groups)
        # Transposed, and with holes.
        for batch, size, channels, out, window in (
            (16, 32, 256, 128, 2), (16, 64, 128, 64, 2), (40, 24, 320, 160, 4), (32, 48, 96, 48, 4),
            (64, 16, 200, 100, 3),
        ):  # fmt: skip
            add(batch, size, channels, out, window, 2, transposed=True, bias=len(found) % 2)
        add(16, 64, 128, 128, 3, dilation=2)
        add(32, 32, 96, 160, 3, dilation=4)
        # Of sequences and of videos.
        for batch, size, channels, out, window, stride, groups in (
            (64, 4096, 64, 64, 7, 1, 1), (32, 2048, 128, 256, 3, 2, 1), (64, 1024, 256, 256, 3, 1, 1),
            (32, 16384, 1, 48, 15, 4, 1), (16, 1500, 384, 384, 5, 1, 1), (32, 3000, 80, 384, 3, 1, 1),
            (32, 1024, 512, 512, 31, 1, 512), (64, 2048, 96, 96, 3, 1, 96),
        ):  # fmt: skip
            add(batch, (size,), channels, out, window, stride, groups, bias=len(found) % 2)
        for batch, size, channels, out, window, stride, groups in (
            (8, (16, 56, 56), 64, 64, 3, 1, 1), (8, (16, 112, 112), 3, 48, 3, (1, 2, 2), 1),
            (16, (8, 28, 28), 128, 128, 3, 1, 1), (8, (8, 28, 28), 96, 192, 3, 2, 1),
            (8, (16, 56, 56), 48, 96, 1, 1, 1), (8, (16, 28, 28), 64, 96, (1, 3, 3), 1, 1),
            (8, (8, 28, 28), 128, 128, (3, 1, 1), 1, 1), (8, (8, 28, 28), 96, 96, 3, 1, 96),
        ):  # fmt: skip
            add(batch, size, channels, out, window, stride, groups, bias=len(found) % 2)
        if narrow:
            for batch, size, channels, out in (
                (48, 128, 64, 64), (48, 32, 256, 256), (48, 16, 512, 512), (112, 12, 288, 288),
                (32, 64, 56, 56), (64, 32, 112, 112), (64, 16, 416, 208),
            ):  # fmt: skip
                add(batch, size, channels, out, 3, bias=len(found) % 2)
    random.Random(0).shuffle(found)
    return found


def applied(spec, x, w, b):
    spatial = SPATIAL[len(spec["size"])]
    order = (f"N{spatial}C", f"{spatial}IO", f"N{spatial}C")
    if spec.get("transposed"):
        y = lax.conv_transpose(x, w, spec["stride"], "SAME", dimension_numbers=order)
    else:
        y = lax.conv_general_dilated(
            x, w, spec["stride"], "SAME", feature_group_count=spec["groups"],
            rhs_dilation=(spec.get("dilation", 1),) * len(spatial), dimension_numbers=order,
        )  # fmt: skip
    return y + b if spec.get("bias") else y


def program(specs):
    """Returns a function that runs several cases, each on parts of one long array."""

    def run(narrow, wide):
        outs = []
        for place, spec in enumerate(specs):
            random_numbers = narrow if spec["dtype"] == "bf16" else wide

            def part(shape, shift, given=random_numbers, place=place):
                n = 1
                for d in shape:
                    n *= d
                start = 4096 * place + 1024 * shift
                return jnp.maximum(given[start : start + n].reshape(shape), -1.5)

            x = part((spec["batch"], *spec["size"], spec["channels"]), 0)
            w = part((*spec["window"], spec["channels"] // spec["groups"], spec["out"]), 1)
            b = part((spec["out"],), 2)
            call = lambda x, w, b=b, spec=spec: applied(spec, x, w, b)  # noqa: E731
            y, back = jax.vjp(call, x, w)
            outs.append((y, back(part(y.shape, 3))))
        return outs

    return run


def kernels(runs, repeats):
    """Returns the microseconds of each kernel by module, instruction and name.

    A kernel may be launched before the one ahead of it has ended, and waits: it counts from there.
    """
    folder = tempfile.mkdtemp()
    with jax.profiler.trace(folder):
        for run in runs:
            for _ in range(repeats):
                out = run()
            jax.block_until_ready(out)
    (path,) = pathlib.Path(folder).rglob("*.xplane.pb")
    found, events, last = collections.defaultdict(list), [], 0
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        if "GPU:" not in plane.name:
            continue
        for line in plane.lines:
            if line.name.startswith("Stream"):
                for event in line.events:
                    stats = dict(event.stats)
                    key = (str(stats.get("hlo_module", "")), str(stats.get("hlo_op", "")))
                    end = event.start_ns + event.duration_ns
                    events.append((event.start_ns, end, key, event.name))
    for start, end, key, name in sorted(events):
        found[key, name].append(max(0, end - max(start, last)) / 1e3)
        last = max(last, end)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path")
    parser.add_argument("--seconds", type=float, default=1e9, help="time to compile at most")
    args = parser.parse_args()
    begin, repeats = time.perf_counter(), 3
    make = lambda dtype: jax.random.normal(jax.random.key(0), (160_000_000,), dtype)  # noqa: E731
    arrays = (
        jax.jit(make, static_argnums=0)("bfloat16"),
        jax.jit(make, static_argnums=0)("float32"),
    )
    programs, every = [], cases()
    for first in range(0, len(every), 6):
        if time.perf_counter() - begin > args.seconds:
            break
        specs = every[first : first + 6]
        function = program(specs)
        function.__name__ = f"cases_{first:03}"
        try:
            compiled = jax.jit(function).lower(*arrays).compile()
            jax.block_until_ready(compiled(*arrays))
        except Exception as error:  # the others are still worth their time
            print(function.__name__, str(error)[:500], flush=True)
            continue
        programs.append((function.__name__, specs, compiled))
        print(function.__name__, f"{time.perf_counter() - begin:.0f} s", flush=True)
    runs = [lambda c=compiled: c(*arrays) for _, _, compiled in programs]
    found = kernels(runs, repeats)
    rows = []
    for name, specs, compiled in programs:
        text = re.sub(r", metadata=\{[^}]*\}", "", compiled.as_text())
        own = [
            [op, kernel, len(us) / repeats, sorted(us)[len(us) // 2]]
            for ((module, op), kernel), us in found.items()
            if module == f"jit_{name}"
        ]
        rows.append({"name": name, "cases": specs, "hlo": text, "kernels": own})
    result = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "programs": rows}
    pathlib.Path(args.path).write_text(json.dumps(result))
    print(len(rows), "programs", f"{time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
