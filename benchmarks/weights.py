"""Loads a checkpoint onto eight virtual CPU devices: against Orbax, `safe_open` slices and `device_put`.

    pip install safetensors
    python benchmarks/weights.py --gigabytes 1 --repeats 3
    python benchmarks/weights.py --headers

Writes a checkpoint of bfloat16 kernels and loads it split by rows and by columns, and by rows of the
transposed kernels, as a `torch.nn.Linear` is stored. All loaders take turns, so that all see the same
machine; the checkpoint is in the page cache. Orbax and safetensors are their own loaders with their
defaults: Orbax's safetensors layout, slices of `safe_open` given to `jax.make_array_from_callback`,
and whole tensors given to `jax.device_put`; the transposed kernels are only for Shardwise and the
last two. Memory is the peak of a process of its own, above what it had before the load.
`--headers` lays out and checks a checkpoint of Llama 3.1 405B whose files have headers only (they are
sparse). All figures are measured, and times are both of a clock and of the processor.
"""

import argparse
import json
import os
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WIDTH = 4096
SPLITS = ("rows", "columns", "transposed rows", "transposed columns")


def write(folder, gigabytes):
    """Writes a checkpoint in files of up to 1 GiB, and returns its keys."""
    kernels = max(1, round(gigabytes * 2**30 / (2 * WIDTH * WIDTH)))
    size = 2 * WIDTH * WIDTH
    noise = os.urandom(size)
    listed = {}
    for first in range(0, kernels, 32):
        keys = [f"layers.{n}.kernel" for n in range(first, min(first + 32, kernels))]
        name = f"model-{first // 32 + 1:05}.safetensors"
        write_file(folder / name, {key: ("BF16", [WIDTH, WIDTH]) for key in keys}, noise)
        listed.update(dict.fromkeys(keys, name))
    index = {"metadata": {}, "weight_map": listed}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return list(listed)


def write_file(path, tensors, data=None):
    header, place = {}, 0
    for key, (dtype, shape) in tensors.items():
        size = 2
        for dim in shape:
            size *= dim
        header[key] = {"dtype": dtype, "shape": shape, "data_offsets": [place, place + size]}
        place += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        if data is not None:
            for _ in tensors:
                file.write(data)
        file.truncate(8 + len(text) + place)


def loaders(folder, keys, split):
    """Returns each loader as a function that loads everything, by name."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import orbax.checkpoint.experimental.v1 as ocp
    from flax import nnx
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P
    from safetensors import safe_open

    import shardwise as sw

    mesh = sw.mesh("x=8", on="cpu:8")
    spec = P("x", None) if split.endswith("rows") else P(None, "x")
    turned = split.startswith("transposed")
    sharding = NamedSharding(mesh, spec)
    files = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]

    class Kernel(nnx.Module):
        def __init__(self):
            self.kernel = nnx.Param(jnp.zeros((WIDTH, WIDTH), "bfloat16"))

    class Stack(nnx.Module):
        def __init__(self):
            self.layers = nnx.List([Kernel() for _ in keys])

    layout = sw.layout(Stack, mesh, {"**.kernel": spec})
    names = {r"(.*)": sw.Name(r"\1", permute=(1, 0) if turned else None)}

    def ours():
        return jax.tree.leaves(nnx.state(sw.load(Stack, layout, folder, names=names)))

    def orbax():
        abstract = {
            key: jax.ShapeDtypeStruct((WIDTH, WIDTH), "bfloat16", sharding=sharding) for key in keys
        }
        with ocp.Context(checkpoint_layout=ocp.options.CheckpointLayout.SAFETENSORS):
            return list(ocp.load(folder, abstract).values())

    def opened():
        return {
            name: safe_open(folder / name, framework="numpy")
            for name in sorted(set(files.values()))
        }

    def slices():
        found, handles = [], opened()
        for key in keys:
            part = handles[files[key]].get_slice(key)
            if turned:
                made = jax.make_array_from_callback(
                    (WIDTH, WIDTH),
                    sharding,
                    lambda i, part=part: np.ascontiguousarray(part[i[1], i[0]].T),
                )
            else:
                made = jax.make_array_from_callback(
                    (WIDTH, WIDTH), sharding, lambda i, part=part: part[i]
                )
            found.append(made)
        return found

    def whole():
        found, handles = [], opened()
        for key in keys:
            tensor = handles[files[key]].get_tensor(key)
            found.append(jax.device_put(tensor.T if turned else tensor, sharding))
        return found

    found = {"shardwise": ours, "orbax": orbax, "slices": slices, "whole": whole}
    if turned:
        del found["orbax"]
    return found


def timed(load):
    import jax

    wall, own = time.perf_counter(), time.process_time()
    jax.block_until_ready(load())
    return time.perf_counter() - wall, time.process_time() - own


def compare(folder, keys, repeats):
    size = sum(f.stat().st_size for f in folder.glob("*.safetensors")) / 2**30
    wall, own = read_all(folder)
    print(
        f"{size:.1f} GiB in the page cache; dd reads {size / wall:.2f} GiB/s ({own:.2f} s of processor)"
    )
    print(f"{'split':<19}{'loader':<11}{'GiB/s':>8}{'of dd':>8}{'processor s':>13}{'ours is':>14}")
    for split in SPLITS:
        found = loaders(folder, keys, split)
        times = {name: [] for name in found}
        for _ in range(repeats):
            for name, load in found.items():
                times[name].append(timed(load))
        best = {
            name: (statistics.median(w for w, _ in rows), statistics.median(c for _, c in rows))
            for name, rows in times.items()
        }
        for name, (clock, processor) in best.items():
            ratio = f"{clock / best['shardwise'][0]:.1f}x, {processor / best['shardwise'][1]:.1f}x"
            print(
                f"{split:<19}{name:<11}{size / clock:>8.2f}{wall / clock:>8.0%}{processor:>13.2f}"
                f"{'' if name == 'shardwise' else ratio:>14}",
                flush=True,
            )


def read_all(folder):
    """Returns the seconds, and those of the processor, in which `dd` reads all files."""
    wall, before = time.perf_counter(), os.times()
    for file in sorted(folder.glob("*.safetensors")):
        subprocess.run(
            ["dd", f"if={file}", "of=/dev/null", "bs=16M"], capture_output=True, check=True
        )
    after = os.times()
    used = after.children_user + after.children_system
    return time.perf_counter() - wall, used - before.children_user - before.children_system


def peak_bytes():
    text = Path("/proc/self/status").read_text()
    return 1024 * int(next(s for s in text.splitlines() if s.startswith("VmHWM")).split()[1])


def memory(folder, keys, split, name):
    """Prints the peak of loading, above what the process had before and the shards themselves."""
    load = loaders(folder, keys, split)[name]
    Path("/proc/self/clear_refs").write_text("5")  # the peak is that from now on
    before = peak_bytes()
    arrays = load()
    shards = sum(s.data.nbytes for x in arrays for s in x.addressable_shards)
    more = peak_bytes() - before - shards
    print(f"{split:<19}{name:<11}shards {shards / 2**20:,.0f} MiB, peak {more / 2**20:+,.0f} MiB")


def headers(folder):
    """Lays out and checks a checkpoint of 405B parameters."""
    from flax import nnx

    import shardwise as sw
    from shardwise import models

    config = models.CONFIGS["llama3-405b"]
    width, hidden, depth = config.width, config.hidden, config.head_depth
    layer = {
        "self_attn.q_proj.weight": [config.heads * depth, width],
        "self_attn.k_proj.weight": [config.key_heads * depth, width],
        "self_attn.v_proj.weight": [config.key_heads * depth, width],
        "self_attn.o_proj.weight": [width, config.heads * depth],
        "mlp.gate_proj.weight": [hidden, width],
        "mlp.up_proj.weight": [hidden, width],
        "mlp.down_proj.weight": [width, hidden],
        "input_layernorm.weight": [width],
        "post_attention_layernorm.weight": [width],
    }
    tensors = {"model.embed_tokens.weight": [config.vocab, width]}
    for n in range(config.layers):
        tensors |= {f"model.layers.{n}.{key}": shape for key, shape in layer.items()}
    tensors |= {"model.norm.weight": [width], "lm_head.weight": [config.vocab, width]}
    keys, listed = list(tensors), {}
    for first in range(0, len(keys), 6):  # 191 files, as published
        name = f"model-{first // 6 + 1:05}-of-00191.safetensors"
        part = {key: ("BF16", tensors[key]) for key in keys[first : first + 6]}
        write_file(folder / name, part)
        listed.update(dict.fromkeys(part, name))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))
    up = {"permute": (1, 0)}
    block = r"model\.layers\.(\d+)\."
    names = {
        r"model\.embed_tokens\.weight": "embed",
        r"model\.norm\.weight": "norm.scale",
        r"lm_head\.weight": ("head", ((1, 0), None)),
        rf"{block}input_layernorm\.weight": sw.Name("blocks.0.norm1.scale", stack=1),
        rf"{block}post_attention_layernorm\.weight": sw.Name("blocks.0.norm2.scale", stack=1),
        rf"{block}mlp\.gate_proj\.weight": sw.Name("blocks.0.up", **up, stack=1, at=(None, 0)),
        rf"{block}mlp\.up_proj\.weight": sw.Name("blocks.0.up", **up, stack=1, at=(None, 1)),
        rf"{block}mlp\.down_proj\.weight": sw.Name("blocks.0.down", **up, stack=1),
        rf"{block}self_attn\.o_proj\.weight": sw.Name(
            "blocks.0.attention.out", **up, reshape=(config.heads, depth, width), stack=1
        ),
    }
    for letter, heads in (("q", config.heads), ("k", config.key_heads), ("v", config.key_heads)):
        names[rf"{block}self_attn\.{letter}_proj\.weight"] = sw.Name(
            f"blocks.0.attention.{letter}", **up, reshape=(width, heads, depth), stack=1
        )

    def make():
        return models.Decoder(config, rngs=nnx.Rngs(0))

    before = Path("/proc/self/io").read_text()
    wall, own = time.perf_counter(), time.process_time()
    layout = sw.layout(make, sw.mesh("data=128,model=8", on="h200:128x8"), "fsdp+tensor")
    laid_out = time.process_time() - own
    found = sw.check_weights(make, layout, folder, names=names)
    print(found)
    read = [
        int(t.split("rchar: ")[1].split()[0]) for t in (before, Path("/proc/self/io").read_text())
    ]
    print(
        f"laid out and checked in {time.perf_counter() - wall:.1f} s, {time.process_time() - own:.1f} s "
        f"of processor ({laid_out:.1f} s of it the layout); {(read[1] - read[0]) / 2**20:.1f} MiB read"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--headers", action="store_true")
    parser.add_argument("--memory", nargs=3, metavar=("FOLDER", "SPLIT", "LOADER"))
    arguments = parser.parse_args()
    import jax

    jax.config.update("jax_platforms", "cpu")
    if not arguments.headers:
        jax.config.update("jax_num_cpu_devices", 8)
    if arguments.memory:
        folder, split, name = arguments.memory
        files = json.loads((Path(folder) / "model.safetensors.index.json").read_text())
        memory(Path(folder), list(files["weight_map"]), split, name)
        return
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        if arguments.headers:
            headers(folder)
            return
        keys = write(folder, arguments.gigabytes)
        compare(folder, keys, arguments.repeats)
        for split in SPLITS:
            for name in ("shardwise", "orbax", "slices", "whole")[
                : 4 if split in SPLITS[:2] else 1
            ]:
                command = [sys.executable, __file__, "--memory", place, split, name]
                subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
