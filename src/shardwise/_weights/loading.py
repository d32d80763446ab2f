"""Loading: a checkpoint straight into the shards of a layout."""

from __future__ import annotations

import collections
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import jax
from flax import nnx
from jax.sharding import NamedSharding

from .._base import public
from .._check import Allow, Findings, make_finding, matched
from .._layout import Layout
from .._nnx import AbstractModel, abstract_model, quantiser
from .._place import initialise_some, put_anywhere, require_devices
from .._processes import together
from .files import FileFault
from .naming import Names
from .portions import box_of
from .preflight import LoadPlan, WeightsError, plan_load
from .reading import Reader, Shard, empty_shards, reads_halves
from .regions import Box

Progress = Callable[[int, int], None]
"""Called with the bytes that were read, and those that are read in total."""

# On accelerators: the bytes of shards that wait in the host's memory, unless one shard is larger.
_WAITING_BYTES = 128 * 2**20
_PROGRESS_SECONDS = 0.1


@public
def load(
    make: Callable[[], nnx.Module] | nnx.Module,
    layout: Layout,
    path: str | os.PathLike[str],
    *,
    names: Names | str | os.PathLike[str] | None = None,
    dtype: Any = None,
    allow: Allow | None = None,
    progress: Progress | None = None,
) -> nnx.Module:
    """Returns the model with the weights of a checkpoint, each read straight into its shards.

    Every process reads only the bytes that its devices need. Transposes, splits, stacks and casts are
    ranges of bytes: no array larger than a shard is ever in memory.

    Adapters (LoRA) that the checkpoint does not have are initialised, and kernels that the model
    quantises (qwix) are read as they are stored, and quantised on the devices.

    Args:
        make: a function without arguments that returns the model; or a model, whose leaves that
            no key goes to are kept.
        layout: its layout, on a mesh of available devices.
        path: a `.safetensors` file, or a folder of them, such as one from Hugging Face.
        names: which key goes to which leaf: a map `{pattern: (path, (permute, reshape))}` or
            `{pattern: sw.Name(…)}`, a function of a key, or a TOML file with such a map. By default
            those that the model has itself; otherwise keys are the paths of leaves.
        dtype: the dtype of floating-point leaves; by default the model's own.
        allow: path patterns by code of findings that are intentional: a leaf for which SW602 is
            allowed is initialised as `sw.init` does.
        progress: called with the bytes that were read, and those that are read in total.

    Raises:
        WeightsError: the checkpoint does not fit the model, or a file is damaged; every reason is a
            finding.
        LayoutError: the layout has errors, or belongs to another model.

    Example:
        >>> import tempfile, shardwise as sw
        >>> from flax import nnx
        >>> make = lambda: nnx.Linear(16, 32, rngs=nnx.Rngs(0))
        >>> folder = tempfile.mkdtemp() + "/weights"
        >>> sw.save_weights(make(), folder)
        >>> layout = sw.layout(make, sw.mesh("data=8", on="cpu:8"), sw.fsdp("data", min_bytes=0))
        >>> model = sw.load(make, layout, folder)
        >>> model.kernel.addressable_shards[0].data.shape
        (16, 4)
    """
    mesh = require_devices(layout)
    abstract = abstract_model(make, mesh)
    own = matched(layout, abstract.state)
    with together(f"checking the weights in {os.fspath(path)}"):
        plan = plan_load(abstract, own, path, names=names, dtype=dtype, allow=allow)
        _raise(plan.preflight.findings)
    made = {part for parts in plan.quantised.values() for part in parts.values()}
    rest = [n for n, pieces in enumerate(plan.sources) if not pieces and n not in made]
    if isinstance(make, nnx.Module):
        arrays = _kept(make, own, rest)
    else:
        arrays = initialise_some(abstract, own, rest)
    with together(f"reading the weights in {os.fspath(path)}"):
        try:
            quantise = _Quantise(abstract, own, plan.quantised)
            # One process quantises each array as it is read. Of several, one may fail to read, while
            # the others wait for it to quantise an array that they share.
            at_once = quantise if jax.process_count() == 1 else None
            arrays |= _read(plan, own, progress, at_once)
        except FileFault as fault:
            finding = make_finding(fault.code, fault.path, fault.fact, fault.help)
            raise WeightsError(Findings((finding,))) from fault
    if at_once is None:
        for number in plan.quantised:
            arrays |= quantise(number, arrays.pop(number))
    leaves = [arrays[number] for number in range(len(own.leaves))]
    return nnx.merge(abstract.graphdef, jax.tree.unflatten(own.treedef, leaves))


def _raise(findings: Findings) -> None:
    if findings.errors:
        raise WeightsError(Findings(findings.errors))


def _kept(model: nnx.Module, layout: Layout, rest: Sequence[int]) -> dict[int, jax.Array]:
    """Returns the leaves of a model that no key goes to, placed."""
    arrays = jax.tree.leaves(nnx.split(model)[1])
    abstract = [n for n in rest if isinstance(arrays[n], jax.ShapeDtypeStruct)]
    if abstract:
        raise ValueError(
            f"{layout.leaves[abstract[0]].path} is abstract, and no key goes to it: give a function "
            f"that builds the model, so that it can be initialised"
        )
    return {
        n: put_anywhere(arrays[n], NamedSharding(layout.mesh, layout.leaves[n].spec)) for n in rest
    }


def _is_on_host(device: Any) -> bool:
    """Returns whether what is read is the shard itself."""
    return device.platform == "cpu"


class _Quantise:
    """Makes the parts of a quantised array of the array that a checkpoint has."""

    def __init__(
        self, model: AbstractModel, layout: Layout, parts: Mapping[int, Mapping[str, int]]
    ) -> None:
        """Takes the parts of each array, by role, by the number of its values."""
        self.model, self.layout, self.parts = model, layout, parts
        # One program for all arrays of one kind.
        self.programs: dict[Any, Any] = {}

    def __call__(self, number: int, array: jax.Array) -> dict[int, jax.Array]:
        """Returns the values, the scale and the zero point, by number."""
        roles = {"qvalue": number, **self.parts[number]}
        leaves = {role: self.layout.leaves[n] for role, n in roles.items()}
        found = quantiser(leaves["qvalue"], self.model)
        assert found is not None, "only arrays that can be quantised are planned so"
        how, quantised = found
        shardings = {r: NamedSharding(self.layout.mesh, leaf.spec) for r, leaf in leaves.items()}
        dtypes = {role: leaf.dtype for role, leaf in leaves.items()}

        def run(array: jax.Array) -> dict[str, jax.Array]:
            made = quantised(array)
            return {role: getattr(made, role).astype(dtype) for role, dtype in dtypes.items()}

        kind = (
            repr(how),
            array.shape,
            array.dtype,
            *map(str, shardings.values()),
            *dtypes.values(),
        )
        if kind not in self.programs:
            self.programs[kind] = jax.jit(run, out_shardings=shardings)
        made = self.programs[kind](array)
        return {n: made[role] for role, n in roles.items()}


class _Load:
    """A leaf that is being read: shards of this process, in batches that fit in memory."""

    def __init__(self, number: int, leaf: Any, sharding: NamedSharding, dtype: Any) -> None:
        indices = sharding.addressable_devices_indices_map(leaf.shape)
        self.number, self.shape, self.sharding, self.dtype = number, leaf.shape, sharding, dtype
        self.devices: dict[Box, list[Any]] = {}
        for device, index in indices.items():
            assert index is not None
            self.devices.setdefault(box_of(index, leaf.shape), []).append(device)
        self.order = list(indices)
        self.placed: dict[Any, jax.Array] = {}

    def batches(self) -> list[list[Box]]:
        """Returns the parts that are read at once."""
        boxes = list(self.devices)
        if not boxes or _is_on_host(self.order[0]):
            return [boxes]  # what is read is the shard: there is nothing to wait for
        size = math.prod(self.sharding.shard_shape(self.shape)) * self.dtype.itemsize
        many = max(1, _WAITING_BYTES // max(1, size))
        return [boxes[i : i + many] for i in range(0, len(boxes), many)]

    def put(self, shards: Sequence[Shard]) -> None:
        """Places shards that have been read on their devices."""
        for shard in shards:
            for device in self.devices[shard.box]:
                self.placed[device] = jax.device_put(shard.array, device)
        if not _is_on_host(self.order[0]):
            jax.block_until_ready(list(self.placed.values()))

    def array(self) -> jax.Array:
        """Returns the leaf, once all of it is placed."""
        arrays = [self.placed[device] for device in self.order]
        return jax.make_array_from_single_device_arrays(self.shape, self.sharding, arrays)


def _read(
    plan: LoadPlan, layout: Layout, progress: Progress | None, quantise: _Quantise | None
) -> dict[int, jax.Array]:
    """Returns the leaves that have sources, in the order of the files, by number."""
    numbers = [n for n, pieces in enumerate(plan.sources) if pieces]
    numbers.sort(
        key=lambda n: (plan.sources[n][0].tensor.file.path, plan.sources[n][0].tensor.start)
    )
    total = plan.preflight.read_bytes.get(jax.process_index(), 0)
    meter = _Meter(progress, total)
    waiting: collections.deque[tuple[_Load, list[Shard], list[Future[int]], bool]]
    waiting = collections.deque()
    arrays: dict[int, jax.Array] = {}
    held = 0

    def finish() -> None:
        nonlocal held
        work, shards, reads, is_last = waiting.popleft()
        for read in reads:
            meter.add(read.result())
        work.put(shards)
        held -= sum(shard.data.nbytes for shard in shards)
        if is_last and quantise is not None and work.number in plan.quantised:
            arrays.update(quantise(work.number, work.array()))
        elif is_last:
            arrays[work.number] = work.array()

    with Reader() as reader:
        for number in numbers:
            leaf, dtype = plan.leaves[number], plan.dtypes[number]
            work = _Load(number, leaf, NamedSharding(layout.mesh, leaf.spec), dtype)
            batches = work.batches()
            for place, boxes in enumerate(batches):
                size = sum(math.prod(b - a for a, b in box) for box in boxes) * dtype.itemsize
                while waiting and held + size > _WAITING_BYTES:
                    finish()
                sources = plan.sources[number]
                shards = empty_shards(boxes, dtype, zeros=reads_halves(sources, dtype))
                held += size
                reads = list(reader.fill(sources, shards))
                waiting.append((work, shards, reads, place == len(batches) - 1))
        while waiting:
            finish()
        reader.require_unchanged()
    meter.end()
    return arrays


class _Meter:
    """Counts bytes, and says so now and then."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self.progress, self.total, self.done, self.said = progress, total, 0, time.monotonic()

    def add(self, size: int) -> None:
        """Counts bytes that were read."""
        self.done += size
        now = time.monotonic()
        if self.progress is not None and now - self.said > _PROGRESS_SECONDS:
            self.said = now
            self.progress(self.done, self.total)

    def end(self) -> None:
        """Says what was read in the end."""
        if self.progress is not None:
            self.progress(self.done, self.total)
