"""Loads a checkpoint onto eight virtual CPU devices: against Orbax, `safe_open` slices and `device_put`.

    pip install safetensors
    python benchmarks/weights.py --gigabytes 1 --repeats 3
    python benchmarks/weights.py --headers

Writes a checkpoint of bfloat16 kernels and loads it split by rows and by columns, both as they are
stored and transposed, as a `torch.nn.Linear` is stored. Each load is the first of a process, as it is
for a user: a second one gets memory from the first that the kernel need not clear. `dd` and all
loaders take turns, so that all see the same machine; the checkpoint is in the page cache. Orbax and
safetensors are their own loaders with their defaults: Orbax's safetensors layout, slices of
`safe_open` given to `jax.make_array_from_callback`, and whole tensors given to `jax.device_put`; Orbax
does not transpose. Memory is the peak above what the process had before the load and the shards, with
the pages of files that it maps.
`--headers` lays out and checks a checkpoint of Llama 3.1 405B whose files have headers only (they are
sparse). All figures are measured, and times are both of a clock and of the processor.
"""

import argparse
import json
import mmap
import os
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WIDTH = 4096
LOADERS = ("shardwise", "whole", "slices", "orbax")
SMALL = "small"
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


def measure(folder, keys, split, name):
    """Loads thrice in this process, and prints the seconds and those of the processor.

    In between is the peak of the first load, above what the process had before and the shards.
    """
    import jax

    first = loaders(folder / SMALL, keys[:1], split)[name]
    jax.block_until_ready(first())  # what is imported and started at first is not counted
    load = loaders(folder, keys, split)[name]
    touch(sum(file.stat().st_size for file in folder.glob("*.safetensors")))
    Path("/proc/self/clear_refs").write_text("5")  # the peak is that from now on
    before = peak_bytes()
    times = []
    for number in range(3):
        wall, own = time.perf_counter(), time.process_time()
        arrays = load()
        jax.block_until_ready(arrays)
        times.append((time.perf_counter() - wall, time.process_time() - own))
        if number == 0:
            shards = sum(s.data.nbytes for x in arrays for s in x.addressable_shards)
            more = peak_bytes() - before - shards
        del arrays
    print(json.dumps([*times[0], *min(times[1:]), more]))


def touch(size):
    """Uses memory and gives it back to the kernel.

    A virtual machine may return free memory to its host within seconds, and getting it again costs up
    to 2 s of processor for each GiB, which has nothing to do with loading.
    """
    pages = mmap.mmap(-1, size + size // 4, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_HUGEPAGE)
    for place in range(0, len(pages), mmap.PAGESIZE):
        pages[place] = 1
    pages.close()


def compare(folder, splits, repeats, only):
    size = sum(f.stat().st_size for f in folder.glob("*.safetensors")) / 2**30
    read_all(folder)
    print(f"{size:.1f} GiB in the page cache, {cores()} cores, medians of {repeats} processes")
    print("times of a clock / of the processor; again: later loads of the same process")
    print(
        f"{'split':<19}{'loader':<11}{'GiB/s':>7}{'of dd':>7}{'s':>13}{'ours is':>15}"
        f"{'again: s':>15}{'ours is':>15}{'besides shards':>16}"
    )
    for split in splits:
        names = LOADERS[: 3 if split not in SPLITS[:2] else 4]
        rows = {name: [] for name in names if name in only}
        disk = []
        for _ in range(repeats):
            disk.append(read_all(folder))
            for name, found in rows.items():
                command = [sys.executable, __file__, "--measure", str(folder), split, name]
                made = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
                found.append(json.loads(made.stdout))
        middle = {
            n: [statistics.median(column) for column in zip(*r, strict=True)]
            for n, r in rows.items()
        }
        dd, used = (statistics.median(column) for column in zip(*disk, strict=True))
        print(f"{split:<19}{'dd':<11}{size / dd:>7.2f}{'':>7}{f'{dd:.2f}/{used:.2f}':>13}")
        ours = middle.get("shardwise")
        for name, found in middle.items():
            more = found[4]
            shown = [f"{found[0]:.2f}/{found[1]:.2f}", "", f"{found[2]:.2f}/{found[3]:.2f}", ""]
            if ours and name != "shardwise":
                times = [f"{its / own:.2f}x" for its, own in zip(found, ours, strict=True)]
                shown[1], shown[3] = " ".join(times[:2]), " ".join(times[2:4])
            print(
                f"{split:<19}{name:<11}{size / found[0]:>7.2f}{dd / found[0]:>7.0%}{shown[0]:>13}"
                f"{shown[1]:>15}{shown[2]:>15}{shown[3]:>15}{f'{more / 2**20:+,.0f} MiB':>16}",
                flush=True,
            )


def cores():
    return len(os.sched_getaffinity(0))


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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--splits", nargs="+", default=SPLITS, choices=SPLITS)
    parser.add_argument("--loaders", nargs="+", default=LOADERS, choices=LOADERS)
    parser.add_argument("--headers", action="store_true")
    parser.add_argument("--measure", nargs=3, metavar=("FOLDER", "SPLIT", "LOADER"))
    parser.add_argument("--in", dest="place", help="where the checkpoint is written")
    arguments = parser.parse_args()
    if arguments.measure or arguments.headers:
        import jax

        jax.config.update("jax_platforms", "cpu")
    if arguments.measure:
        jax.config.update("jax_num_cpu_devices", 8)
        folder, split, name = arguments.measure
        files = json.loads((Path(folder) / "model.safetensors.index.json").read_text())
        measure(Path(folder), list(files["weight_map"]), split, name)
        return
    with tempfile.TemporaryDirectory(dir=arguments.place) as place:
        folder = Path(place)
        if arguments.headers:
            headers(folder)
            return
        write(folder, arguments.gigabytes)
        (folder / SMALL).mkdir()
        write(folder / SMALL, 0)
        compare(folder, arguments.splits, arguments.repeats, arguments.loaders)


if __name__ == "__main__":
    main()
