"""A checkpoint of `.safetensors` files: one file, a folder with an index, or a folder of files."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..._base import count
from .header import FileFault, Tensor, damaged, parse_json, read_header

INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
_MAX_INDEX_BYTES = 256 * 2**20
_ABSENT = "copy the whole folder, or download the missing files"


@dataclasses.dataclass(frozen=True, slots=True)
class Folder:
    """The tensors of a checkpoint, from the headers of its files. No tensor is read.

    Attributes:
        path: the file or folder.
        tensors: the tensors, by key, in the order of files and bytes.
        config: what `config.json` beside them says; None if there is none.
        faults: what is wrong with its files.
    """

    path: str
    tensors: Mapping[str, Tensor]
    config: Mapping[str, Any] | None
    faults: tuple[FileFault, ...] = ()

    @property
    def total_bytes(self) -> int:
        """The bytes of all tensors (exact)."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def open_folder(path: str | os.PathLike[str]) -> Folder:
    """Returns the tensors of a checkpoint; what is wrong with its files is in `faults`."""
    place = os.fspath(path)
    if os.path.isdir(place):
        return _open_directory(place)
    if not os.path.exists(place):
        fault = FileFault("SW608", place, "there is no such file or folder", "check the path")
        return Folder(place, {}, None, (fault,))
    tensors, faults = _read_files([place])
    config, more = _read_config(os.path.join(os.path.dirname(place), CONFIG))
    return Folder(place, tensors, config, (*faults, *more))


def _open_directory(place: str) -> Folder:
    config, faults = _read_config(os.path.join(place, CONFIG))
    index = os.path.join(place, INDEX)
    if os.path.exists(index):
        try:
            listed = _read_index(index)
        except FileFault as fault:
            return Folder(place, {}, config, (*faults, fault))
        names = sorted(set(listed.values()))
        present = [name for name in names if os.path.exists(os.path.join(place, name))]
        for name in names:
            if name not in present:
                keys = [key for key, file in listed.items() if file == name]
                faults.append(
                    FileFault(
                        "SW608",
                        os.path.join(place, name),
                        f"the index names this file for {count(len(keys), 'tensor')}, such as "
                        f"{keys[0]}, but it is not there",
                        _ABSENT,
                    )
                )
        tensors, more = _read_files([os.path.join(place, name) for name in present])
        faults += more
        unread = {fault.path for fault in more}
        for key, name in listed.items():
            file = os.path.join(place, name)
            if name in present and file not in unread:
                found = tensors.get(key)
                if found is None or found.file.path != file:
                    faults.append(
                        FileFault("SW608", key, f"the index places it in {name}, which has no "
                                  f"such tensor", _ABSENT)
                    )  # fmt: skip
        return Folder(place, tensors, config, tuple(faults))
    files = sorted(str(file) for file in Path(place).glob("*.safetensors"))
    if not files:
        others = sorted(file.name for file in Path(place).glob("*") if file.suffix in _OTHERS)
        has = f"; it has {others[0]}" if others else ""
        faults.append(
            FileFault(
                "SW608",
                place,
                f"the folder has no .safetensors files{has}",
                "convert the checkpoint to safetensors first" if others else "check the path",
            )
        )
    tensors, more = _read_files(files)
    return Folder(place, tensors, config, (*faults, *more))


_OTHERS = (".bin", ".pt", ".pth", ".msgpack", ".h5", ".gguf", ".ckpt")


def _read_files(paths: Iterable[str]) -> tuple[dict[str, Tensor], list[FileFault]]:
    tensors: dict[str, Tensor] = {}
    faults = []
    for path in paths:
        try:
            found, _ = read_header(path)
        except FileFault as fault:
            faults.append(fault)
            continue
        for key, tensor in sorted(found.items(), key=lambda pair: pair[1].start):
            if key in tensors:
                faults.append(
                    FileFault(
                        "SW603",
                        key,
                        f"it is both in {tensors[key].file.path} and in {path}",
                        "keep one of the files, or add an index that says which holds it",
                    )
                )
            tensors.setdefault(key, tensor)
    return tensors, faults


def _read_index(path: str) -> dict[str, str]:
    """Returns the file of each key.

    Raises:
        FileFault: the index is not valid.
    """
    table = parse_json(_small_file(path), path, "the index")
    listed = table.get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise damaged(path, "the index has no weight_map")
    for key, name in listed.items():
        if not isinstance(name, str) or not _is_inside(name):
            raise damaged(
                path,
                f"the index places {key!r:.200} in {name!r:.200}, which is not a file of this folder",
                "an index may only name files beside it",
            )
    return listed


def _is_inside(name: str) -> bool:
    """Returns whether a name of the index stays inside of the folder, taken literally.

    What it links to may be elsewhere: download caches keep their files so.
    """
    steps = name.split("/")
    plain = all(step not in ("", ".", "..") for step in steps)
    return plain and name.isprintable() and "\\" not in name and name.endswith(".safetensors")


def _read_config(path: str) -> tuple[dict[str, Any] | None, list[FileFault]]:
    if not os.path.exists(path):
        return None, []
    try:
        return parse_json(_small_file(path), path, "the config"), []
    except FileFault as fault:
        return None, [fault]


def _small_file(path: str) -> bytes:
    if os.path.exists(path) and not os.path.isfile(path):
        raise damaged(path, "this is not a regular file", "remove it")  # a pipe would never end
    try:
        with open(path, "rb") as file:
            text = file.read(_MAX_INDEX_BYTES + 1)
    except OSError as error:
        raise FileFault(
            "SW608", path, f"the file cannot be opened: {error.strerror}", "check the path"
        ) from error
    if len(text) > _MAX_INDEX_BYTES:
        raise damaged(path, f"the file is larger than {_MAX_INDEX_BYTES} bytes")
    return text
