"""The header of a `.safetensors` file, validated: it is untrusted input.

A file is eight bytes with the length of the header (little-endian), the header (JSON: each tensor's
dtype, shape and range of bytes), and the tensors, one after the other and without gaps.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import stat
import struct
from typing import Any

import ml_dtypes
import numpy as np

# The limit of the format's own reader.
MAX_HEADER_BYTES = 100_000_000
_MAX_DIMS = 32  # NumPy's limit, before version 2
_MAX_KEY = 4096

DTYPES: dict[str, np.dtype] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "C64": np.dtype(np.complex64),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}
# Known to the format, but with several elements to a byte: found, and never read.
_PACKED_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}


class FileFault(ValueError):
    """A weights file is missing, damaged or has changed.

    Attributes:
        code: the code of the finding.
        path: the file, or the key in it.
        fact: what is wrong.
        help: what to do.
    """

    def __init__(self, code: str, path: str, fact: str, help: str) -> None:
        super().__init__(f"{path}: {fact} (help: {help})")
        self.code, self.path, self.fact, self.help = code, path, fact, help


def damaged(path: str, fact: str, help: str = "download or write the file again") -> FileFault:
    """Returns the fault of a damaged file."""
    return FileFault("SW607", path, fact, help)


@dataclasses.dataclass(frozen=True, slots=True)
class File:
    """A file as it was when its header was read.

    Attributes:
        path: where it is.
        size: its bytes.
        stamp: what changes when it is written again: the modification time and the inode.
    """

    path: str
    size: int
    stamp: tuple[int, int]

    def require_unchanged(self, fd: int) -> None:
        """Raises if the open file is not what it was.

        Raises:
            FileFault: it has changed.
        """
        now = _file_of(self.path, os.fstat(fd))
        if now != self:
            size = f" from {self.size} to {now.size} bytes" if now.size != self.size else ""
            raise damaged(
                self.path,
                f"the file changed{size} while it was read",
                "load again once nothing writes to it",
            )


@dataclasses.dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor in a file.

    Attributes:
        key: its name.
        dtype: the format's name of its dtype, such as `BF16`.
        shape: its shape.
        file: the file.
        start: its first byte in the file.
        nbytes: its bytes.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    file: File
    start: int
    nbytes: int

    @property
    def numpy_dtype(self) -> np.dtype | None:
        """The dtype as NumPy has it; None where elements do not fill bytes."""
        return DTYPES.get(self.dtype)

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


def dtype_name(dtype: Any) -> str | None:
    """Returns the format's name of a dtype, or None if it has none."""
    wanted = np.dtype(dtype)
    return next((name for name, known in DTYPES.items() if known == wanted), None)


def read_header(path: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Returns the tensors of a file, by key, and its metadata.

    Raises:
        FileFault: the file cannot be read, or its header is not valid.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise FileFault(
            "SW608", path, f"the file cannot be opened: {error.strerror}", "check the path"
        ) from error
    try:
        about = os.fstat(fd)
        if not stat.S_ISREG(about.st_mode):
            raise damaged(path, "this is not a regular file", "name a .safetensors file")
        file = _file_of(path, about)
        first = _read(fd, 8, 0, path)
        if len(first) < 8:
            raise damaged(path, f"the file has {file.size} bytes, fewer than the 8 of a length")
        (length,) = struct.unpack("<Q", first)
        if length > MAX_HEADER_BYTES:
            raise damaged(
                path,
                f"the header claims {length} bytes, above the format's limit of {MAX_HEADER_BYTES}",
                "this is not a .safetensors file, or it is damaged",
            )
        if 8 + length > file.size:
            raise damaged(
                path, f"the header claims {length} bytes, but the file has {file.size} in total"
            )
        text = _read(fd, length, 8, path)
    finally:
        os.close(fd)
    return parse_header(text, file)


def parse_header(text: bytes, file: File) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Returns the tensors and the metadata of a header.

    Args:
        text: the header, without its length.
        file: the file that it is from.

    Raises:
        FileFault: the header is not valid.
    """
    path = file.path
    table = parse_json(text, path, "the header")
    metadata = table.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise damaged(path, "__metadata__ in the header is not a table of strings")
    data = 8 + len(text)
    tensors = {key: _tensor(key, row, file, data) for key, row in table.items()}
    place = data
    for tensor in sorted(tensors.values(), key=lambda t: (t.start, t.nbytes)):
        if tensor.start != place:
            kind = "overlaps the tensor before it" if tensor.start < place else "follows a gap"
            raise damaged(
                path,
                f"{tensor.key} {kind}: it begins at byte {tensor.start - data} of the data, "
                f"not at {place - data}",
            )
        place += tensor.nbytes
    if place != file.size:
        fact = f"the tensors end at byte {place}, but the file has {file.size} bytes"
        raise damaged(path, f"the file is truncated: {fact}" if place > file.size else fact)
    return tensors, metadata


def parse_json(text: bytes, path: str, what: str) -> dict[str, Any]:
    """Returns a JSON object from a file, without duplicate keys.

    Raises:
        FileFault: it is not one.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) != len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))
            raise damaged(path, f"{what} has {twice!r} twice")
        return table

    def refuse(word: str) -> Any:
        raise ValueError(f"{word} is not JSON")

    try:
        table = json.loads(text.decode("utf-8"), object_pairs_hook=unique, parse_constant=refuse)
    except FileFault:
        raise
    except (ValueError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise damaged(path, f"{what} is not JSON: {why}") from error
    if not isinstance(table, dict):
        raise damaged(path, f"{what} is not a JSON object")
    return table


def _tensor(key: str, row: Any, file: File, data: int) -> Tensor:
    def fault(fact: str) -> FileFault:
        return damaged(file.path, f"{key!r:.200} in the header {fact}")

    if not 0 < len(key) <= _MAX_KEY or not key.isprintable():
        raise fault("is not the name of a tensor")
    if not isinstance(row, dict) or set(row) != {"dtype", "shape", "data_offsets"}:
        raise fault("does not have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = row["dtype"], row["shape"], row["data_offsets"]
    if not isinstance(dtype, str) or not (dtype in DTYPES or dtype in _PACKED_BITS):
        raise fault(f"has the unknown dtype {dtype!r:.50}")
    if not isinstance(shape, list) or len(shape) > _MAX_DIMS or not all(map(_is_size, shape)):
        raise fault("has a shape that is not a list of sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)):
        raise fault("has data_offsets that are not two positions")
    start, stop = offsets
    if not start <= stop <= file.size - data:
        raise fault(
            f"has the bytes {start} to {stop} of the data, which has {file.size - data}: "
            f"the file is truncated, or the header is damaged"
        )
    bits = math.prod(shape) * (_PACKED_BITS.get(dtype) or 8 * DTYPES[dtype].itemsize)
    if bits != 8 * (stop - start):
        raise fault(
            f"has {stop - start} bytes, but {dtype}{shape} takes {-(-bits // 8)}".replace("'", "")
        )
    return Tensor(key, dtype, tuple(shape), file, data + start, stop - start)


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _file_of(path: str, about: os.stat_result) -> File:
    return File(path, about.st_size, (about.st_mtime_ns, about.st_ino))


def _read(fd: int, size: int, offset: int, path: str) -> bytes:
    parts = []
    while size > 0:
        try:
            part = os.pread(fd, size, offset)
        except OSError as error:
            raise damaged(path, f"the file cannot be read: {error.strerror}") from error
        if not part:
            break
        parts.append(part)
        size, offset = size - len(part), offset + len(part)
    return b"".join(parts)
