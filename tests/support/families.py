"""The checkpoints of tests/models/families, read with numpy; `make_families.py` writes them."""

import functools
import json
import re
import struct
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax import nnx

from shardwise import models

FOLDER = Path(__file__).parents[1] / "models" / "families"
FAMILIES = sorted(folder.name for folder in FOLDER.iterdir())


def tensors_of(family):
    """Returns the tensors of a checkpoint by their keys."""
    raw = (FOLDER / family / "model.safetensors").read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + size])
    header.pop("__metadata__", None)
    found = {}
    for key, row in header.items():
        start, stop = (8 + size + place for place in row["data_offsets"])
        found[key] = np.frombuffer(raw[start:stop], "float32").reshape(row["shape"])
    return found


def expected_of(family):
    return dict(np.load(FOLDER / family / "expected.npz"))


def fields_of(name):
    """Returns a name as a dict, whichever form it has."""
    if isinstance(name, str):
        return {"path": name}
    if isinstance(name, tuple):
        path, (permute, reshape) = name
        return {"path": path, "permute": permute, "reshape": reshape}
    return name


def leaves_of(tensors, names, shapes):
    """Returns the arrays of all leaves: each element written once, from one key.

    Args:
        tensors: the checkpoint.
        names: the map.
        shapes: the shape of each leaf, by its path.
    """
    leaves = {path: np.full(shape, np.nan, "float32") for path, shape in shapes.items()}
    written = {path: np.zeros(shape, int) for path, shape in shapes.items()}
    for key, tensor in tensors.items():
        matches = [(m, name) for p, name in names.items() if (m := re.fullmatch(p, key))]
        assert len(matches) == 1, (key, [name for _, name in matches])
        match, name = matches[0]
        if name is None:
            continue
        fields = fields_of(name)
        path = match.expand(fields["path"])
        value = tensor
        if fields.get("permute") is not None:
            value = value.transpose(fields["permute"])
        if fields.get("reshape") is not None:
            value = value.reshape(fields["reshape"])
        if fields.get("tie"):
            assert value.shape == shapes[path]
            continue
        stack = fields.get("stack", ())
        place = []
        for entry in stack if isinstance(stack, tuple) else (stack,):
            group, _, by = str(entry).partition("//")
            place.append(int(match[int(group)]) // int(by or 1))
        place += [slice(None) if at is None else at for at in fields.get("at", ())]
        assert leaves[path][tuple(place)].shape == value.shape, (key, path, place)
        leaves[path][tuple(place)] = value
        written[path][tuple(place)] += 1
    wrong = [path for path, times in written.items() if (times != 1).any()]
    assert not wrong, wrong
    return leaves


def load_family(config, family):
    """Returns a decoder with the weights of a checkpoint."""
    return nnx.merge(*_loaded(config, family))


@functools.cache
def _loaded(config, family):
    model = nnx.eval_shape(lambda: models.Decoder(config, rngs=nnx.Rngs(0)))
    variables = {
        ".".join(map(str, path)): variable for path, variable in nnx.to_flat_state(nnx.state(model))
    }
    shapes = {path: variable.shape for path, variable in variables.items()}
    leaves = leaves_of(tensors_of(family), models.weight_names(config), shapes)
    for path, variable in variables.items():
        variable.set_value(jnp.asarray(leaves[path]))
    return nnx.split(model)
