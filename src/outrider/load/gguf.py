"""A GGUF file: its metadata, its table of tensors, and their values as float32.

Versions 2 and 3, little endian, over mmap. The file is not trusted: every length, count and offset is checked
against the bytes that are really there before anything is allocated for it, and a file that lies is a
`BadCheckpoint` that says where. What the metadata means is for config.py and tokenizer.py.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from outrider.errors import BadCheckpoint, UnsupportedModel
from outrider.load.quants import FORMATS, OTHER_FORMATS, Blocks, Format, dequantize

MAGIC = b"GGUF"
MAX_VALUES = 1 << 23  # metadata values in all; the largest vocabularies need about a fifth of it
MAX_DEPTH = 4  # arrays within arrays
MAX_DIMS = 4
STRING, ARRAY, BOOL = 8, 9, 7
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", BOOL: "B", 10: "Q", 11: "q", 12: "d"}
SMALLEST_ENTRY = 8 + 4 + 1  # key length, type, one byte of value
SMALLEST_TENSOR = 8 + 4 + 8 + 4 + 8  # name length, dims, one dim, type, offset


@dataclass(frozen=True, slots=True)
class GgufTensor:
    name: str
    shape: tuple[int, ...]  # torch's order: rows first, the contiguous dimension last
    form: Format
    offset: int  # from the start of the file
    nbytes: int


class GgufFile:
    """An open GGUF file. Reading the table is eager and cheap; a tensor is read when it is asked for."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._map = _map_file(self.path)
        cursor = _Cursor(self._map, self.path.name)
        entries, tensors = _read_preamble(cursor)
        self.metadata = _read_metadata(cursor, entries)
        _refuse_split(self.metadata, self.path.name)
        self.tensors = _read_tensor_table(cursor, tensors, _alignment(cursor, self.metadata))

    @property
    def nbytes(self) -> int:
        return len(self._map)

    def read(self, name: str, device: torch.device | str = "cpu") -> torch.Tensor:
        """The tensor `name` as float32, in memory of its own on a device, which unpacks it."""
        tensor = self.tensors.get(name)
        if tensor is None:
            raise BadCheckpoint(f"{self.path.name} has no tensor {name!r}")
        return dequantize(self._raw(tensor).to(device), tensor.form).view(tensor.shape)

    def stored(self, name: str) -> torch.Tensor | Blocks:
        """The tensor as it is stored if it is a matrix in blocks or in bfloat16, else as `read` returns it. It may be a
        view of the file: do not write to it.
        """
        kind = self.stored_format(name)
        if kind == "float32":
            return self.read(name)
        tensor = self.tensors[name]
        raw, (rows, columns) = self._raw(tensor), tensor.shape
        if kind == "bfloat16":
            return raw.view(torch.bfloat16).view(tensor.shape)
        return Blocks(name, tensor.form, raw.view(rows, -1), columns)

    def stack(self, name: str) -> torch.Tensor | Blocks:
        """A stack of matrices or of vectors as it is stored: a view of the file."""
        tensor = self.tensors[name]
        raw, shape = self._raw(tensor), tensor.shape
        if tensor.form.values == 1:
            kind = {"F32": torch.float32, "F16": torch.float16}.get(tensor.form.name, torch.bfloat16)
            return raw.view(kind).view(shape)
        return Blocks(name, tensor.form, raw.view(*shape[:-1], -1), shape[-1])

    def stored_format(self, name: str) -> str:
        tensor = self.tensors.get(name)
        if tensor is None or len(tensor.shape) not in (2, 3) or tensor.form.name in ("F32", "F16"):
            return "float32"
        return "bfloat16" if tensor.form.name == "BF16" else tensor.form.name

    def release(self) -> None:
        """Gives back the memory of what was read. Views of the file stay valid: what they show is read again."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)

    def _raw(self, tensor: GgufTensor) -> torch.Tensor:
        return torch.frombuffer(self._map, dtype=torch.uint8, count=tensor.nbytes, offset=tensor.offset)


def _map_file(path: Path) -> mmap.mmap:
    try:
        if not path.is_file():
            raise BadCheckpoint(f"{path} is not a file")
        with path.open("rb") as file:
            if file.read(4) != MAGIC:
                raise BadCheckpoint(f"{path.name} is not a GGUF file: it does not begin with 'GGUF'")
            # A private, copy-on-write mapping: torch will not share a read-only buffer without a warning.
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except OSError as problem:
        raise BadCheckpoint(f"{path} cannot be read: {problem.strerror or problem}") from None


class _Cursor:
    """A position in the file that refuses to pass its end."""

    def __init__(self, data: mmap.mmap, name: str) -> None:
        self.data = data
        self.name = name
        self.at = 4  # after the magic
        self.end = len(data)
        self.values_left = MAX_VALUES

    def bad(self, what: str) -> BadCheckpoint:
        return BadCheckpoint(f"{self.name} is damaged: {what} (at byte {self.at})")

    def need(self, count: int, what: str) -> None:
        if count > self.end - self.at:
            raise self.bad(f"{what} needs {count} bytes, but only {self.end - self.at} are left")

    def spend(self, values: int) -> None:
        """Metadata is bounded as a whole, so that no file costs more than seconds to refuse."""
        self.values_left -= values
        if self.values_left < 0:
            raise self.bad(f"it holds more than {MAX_VALUES} metadata values")

    def number(self, code: str, what: str) -> Any:
        size = struct.calcsize(code)
        self.need(size, what)
        value = struct.unpack_from("<" + code, self.data, self.at)[0]
        self.at += size
        return value

    def string(self, what: str) -> str:
        return self.strings(1, what)[0]

    def strings(self, count: int, what: str) -> list[str]:
        """`count` strings in a row. The hot loop of opening a file: a vocabulary is 100,000 of them."""
        data, at, end = self.data, self.at, self.end
        length_at = struct.Struct("<Q").unpack_from
        found = []
        for _ in range(count):
            if at + 8 > end:
                raise self.bad(f"the file ends inside {what}")
            start = at + 8
            at = start + length_at(data, at)[0]
            if at > end:
                raise self.bad(f"a string in {what} is said to be {at - start} bytes long, past the end")
            try:
                found.append(data[start:at].decode())
            except UnicodeDecodeError:
                raise self.bad(f"a string in {what} is not UTF-8") from None
        self.at = at
        return found


def _read_preamble(cursor: _Cursor) -> tuple[int, int]:
    version = cursor.number("I", "the version")
    if version in (2 << 24, 3 << 24):
        raise UnsupportedModel(f"{cursor.name} is a big-endian GGUF file; convert it to little endian")
    if version not in (2, 3):
        raise UnsupportedModel(f"{cursor.name} is GGUF version {version}; versions 2 and 3 are supported")
    tensors = cursor.number("Q", "the number of tensors")
    entries = cursor.number("Q", "the number of metadata entries")
    cursor.need(
        tensors * SMALLEST_TENSOR + entries * SMALLEST_ENTRY, f"{tensors} tensors and {entries} entries"
    )
    return entries, tensors


def _read_metadata(cursor: _Cursor, entries: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for _ in range(entries):
        key = cursor.string("a metadata key")
        if key in metadata:
            raise cursor.bad(f"metadata key {key!r} appears twice")
        metadata[key] = _read_value(cursor, cursor.number("I", f"the type of {key!r}"), key, 0)
    return metadata


def _read_value(cursor: _Cursor, kind: int, key: str, depth: int) -> Any:
    cursor.spend(1)
    if kind == STRING:
        return cursor.string(repr(key))
    if kind == ARRAY:
        return _read_array(cursor, key, depth + 1)
    if kind not in SCALARS:
        raise cursor.bad(f"{key!r} has the unknown value type {kind}")
    value = cursor.number(SCALARS[kind], repr(key))
    return _as_bool(cursor, value, key) if kind == BOOL else value


def _read_array(cursor: _Cursor, key: str, depth: int) -> list[Any]:
    if depth > MAX_DEPTH:
        raise cursor.bad(f"{key!r} nests arrays more than {MAX_DEPTH} deep")
    kind = cursor.number("I", f"the element type of {key!r}")
    count = cursor.number("Q", f"the length of {key!r}")
    cursor.spend(count)
    if kind == STRING:
        cursor.need(count * 8, f"array {key!r} of {count} strings")
        return cursor.strings(count, repr(key))
    if kind == ARRAY:
        cursor.need(count * 12, f"array {key!r} of {count} arrays")
        return [_read_array(cursor, key, depth + 1) for _ in range(count)]
    if kind not in SCALARS:
        raise cursor.bad(f"array {key!r} has the unknown element type {kind}")
    code = SCALARS[kind]
    size = count * struct.calcsize(code)
    cursor.need(size, f"array {key!r} of {count} numbers")
    values = list(struct.unpack_from(f"<{count}{code}", cursor.data, cursor.at))
    cursor.at += size
    return [_as_bool(cursor, value, key) for value in values] if kind == BOOL else values


def _as_bool(cursor: _Cursor, value: int, key: str) -> bool:
    if value > 1:
        raise cursor.bad(f"{key!r} is a truth value, but holds {value}")
    return value == 1


def _refuse_split(metadata: dict[str, Any], name: str) -> None:
    parts = metadata.get("split.count", 0)
    if isinstance(parts, int) and parts > 1:
        raise UnsupportedModel(
            f"{name} is one of {parts} parts of a model; join them with llama-gguf-split --merge"
        )


def _alignment(cursor: _Cursor, metadata: dict[str, Any]) -> int:
    value = metadata.get("general.alignment", 32)
    if type(value) is not int or not 8 <= value <= 1 << 20 or value & (value - 1):
        raise cursor.bad(f"general.alignment is {value!r}, not a power of two from 8 to {1 << 20}")
    return value


def _read_tensor_table(cursor: _Cursor, count: int, alignment: int) -> dict[str, GgufTensor]:
    entries = []
    names = set()
    for _ in range(count):
        name = cursor.string("a tensor's name")
        if name in names:
            raise cursor.bad(f"tensor {name!r} appears twice")
        names.add(name)
        entries.append((name, *_read_tensor_entry(cursor, name, alignment)))
    base = -(-cursor.at // alignment) * alignment
    tensors = {
        name: GgufTensor(name, shape, form, base + offset, _nbytes(shape, form))
        for name, shape, form, offset in entries
    }
    _check_extents(cursor, tensors)
    return tensors


def _read_tensor_entry(cursor: _Cursor, name: str, alignment: int) -> tuple[tuple[int, ...], Format, int]:
    dims = cursor.number("I", f"the dimensions of {name!r}")
    if not 1 <= dims <= MAX_DIMS:
        raise cursor.bad(f"tensor {name!r} has {dims} dimensions")
    shape = tuple(cursor.number("Q", f"the shape of {name!r}") for _ in range(dims))[::-1]
    kind = cursor.number("I", f"the type of {name!r}")
    offset = cursor.number("Q", f"the offset of {name!r}")
    if kind not in FORMATS:
        what = OTHER_FORMATS.get(kind, f"number {kind}")
        known = ", ".join(form.name for form in FORMATS.values())
        raise UnsupportedModel(f"{cursor.name}: tensor {name!r} has the type {what}; supported: {known}")
    form = FORMATS[kind]
    if 0 in shape or shape[-1] % form.values:
        raise cursor.bad(f"tensor {name!r} has the impossible shape {list(shape)} for {form.name}")
    if offset % alignment:
        raise cursor.bad(f"tensor {name!r} is at offset {offset}, which is not a multiple of {alignment}")
    return shape, form, offset


def _nbytes(shape: tuple[int, ...], form: Format) -> int:
    return math.prod(shape) // form.values * form.bytes


def _check_extents(cursor: _Cursor, tensors: dict[str, GgufTensor]) -> None:
    """Every tensor lies inside the file and none touches another."""
    previous_end, previous = cursor.at, "the header"
    for tensor in sorted(tensors.values(), key=lambda t: t.offset):
        if tensor.offset + tensor.nbytes > cursor.end:
            raise cursor.bad(
                f"tensor {tensor.name!r} ends at byte {tensor.offset + tensor.nbytes}, but the file has only "
                f"{cursor.end}; the download was probably cut short"
            )
        if tensor.offset < previous_end:
            raise cursor.bad(f"tensor {tensor.name!r} overlaps {previous!r}")
        previous_end, previous = tensor.offset + tensor.nbytes, tensor.name
