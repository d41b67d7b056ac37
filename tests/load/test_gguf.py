"""The GGUF reader on sound files, and on each way a file can lie."""

from __future__ import annotations

import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from outrider.errors import BadCheckpoint, UnsupportedModel
from outrider.load.gguf import MAX_VALUES, GgufFile

from . import tiny

U32, I32, F32, BOOL, STRING, ARRAY, U64 = 4, 5, 6, 7, 8, 9, 10


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def entry(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def info(name: str, shape: tuple[int, ...] = (8,), kind: int = 0, offset: int = 0) -> bytes:
    dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + dims + struct.pack("<IQ", kind, offset)


def build(entries: list[bytes], infos: list[bytes], data: int = 64, version: int = 3, **counts: int) -> bytes:
    head = b"GGUF" + struct.pack(
        "<IQQ", version, counts.get("said_tensors", len(infos)), counts.get("said_entries", len(entries))
    )
    body = head + b"".join(entries) + b"".join(infos)
    return body + b"\0" * (-len(body) % 32) + b"\1" * data


@pytest.fixture
def opened(tmp_path: Path) -> Callable[[bytes], GgufFile]:
    def write_and_open(content: bytes) -> GgufFile:
        path = tmp_path / "made.gguf"
        path.write_bytes(content)
        return GgufFile(path)

    return write_and_open


Opened = Callable[[bytes], GgufFile]


def test_reads_what_gguf_reads(tiny_gguf: Path) -> None:
    reader = gguf.GGUFReader(tiny_gguf)
    ours = GgufFile(tiny_gguf)
    expected = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert ours.metadata == expected
    assert list(ours.tensors) == [tensor.name for tensor in reader.tensors]
    for tensor in reader.tensors:
        assert ours.tensors[tensor.name].offset == tensor.data_offset
        assert ours.tensors[tensor.name].nbytes == tensor.n_bytes
        assert np.array_equal(ours.read(tensor.name).numpy(), tensor.data)


@pytest.mark.parametrize("version", [2, 3])
def test_every_value_type(opened: Opened, version: int) -> None:
    values: dict[str, tuple[int, bytes, Any]] = {
        "u8": (0, b"\xff", 255),
        "i8": (1, b"\xff", -1),
        "u16": (2, b"\xff\xff", 65535),
        "i16": (3, b"\xff\xff", -1),
        "u32": (U32, struct.pack("<I", 7), 7),
        "i32": (I32, struct.pack("<i", -7), -7),
        "f32": (F32, struct.pack("<f", 1.5), 1.5),
        "bool": (BOOL, b"\1", True),
        "text": (STRING, text("süß"), "süß"),
        "u64": (U64, struct.pack("<Q", 2**64 - 1), 2**64 - 1),
        "i64": (11, struct.pack("<q", -1), -1),
        "f64": (12, struct.pack("<d", 0.1), 0.1),
        "bools": (ARRAY, struct.pack("<IQ", BOOL, 2) + b"\0\1", [False, True]),
        "none": (ARRAY, struct.pack("<IQ", U32, 0), []),
        "texts": (ARRAY, struct.pack("<IQ", STRING, 2) + text("a") + text(""), ["a", ""]),
        "nested": (ARRAY, struct.pack("<IQ", ARRAY, 1) + struct.pack("<IQ2i", I32, 2, 1, -1), [[1, -1]]),
    }
    made = build(
        [entry(key, kind, raw) for key, (kind, raw, _) in values.items()], [info("t")], version=version
    )
    file = opened(made)
    assert file.metadata == {key: value for key, (_, _, value) in values.items()}
    assert {key: type(value) for key, value in file.metadata.items()} == {
        key: type(value) for key, (_, _, value) in values.items()
    }
    assert file.read("t").shape == (8,)


def test_shape_is_rows_first(opened: Opened) -> None:
    file = opened(build([], [info("t", (8, 3))], data=96))
    assert file.tensors["t"].shape == (3, 8)
    assert file.read("t").shape == (3, 8)


GIANT = 2**63 - 1
NEST = struct.pack("<IQ", ARRAY, 1) * 40 + struct.pack("<IQ", U32, 0)
LIES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "does not begin"),
    "magic only": (b"GGUF", "version"),
    "other magic": (b"GGML" + bytes(64), "does not begin"),
    "giant tensor count": (build([], [], said_tensors=GIANT), "tensors"),
    "giant entry count": (build([], [], said_entries=GIANT), "entries"),
    "giant key": (build([struct.pack("<Q", GIANT)], []), "past the end"),
    "giant string": (build([entry("k", STRING, struct.pack("<Q", GIANT))], []), "past the end"),
    "giant numbers": (build([entry("k", ARRAY, struct.pack("<IQ", U32, GIANT))], []), "metadata values"),
    "many numbers": (build([entry("k", ARRAY, struct.pack("<IQ", U32, 1000))], []), "only"),
    "many strings": (build([entry("k", ARRAY, struct.pack("<IQ", STRING, 1000))], []), "only"),
    "many arrays": (build([entry("k", ARRAY, struct.pack("<IQ", ARRAY, 1000))], []), "only"),
    "deep arrays": (build([entry("k", ARRAY, NEST)], []), "deep"),
    "value type": (build([entry("k", 99, b"")], []), "unknown value type 99"),
    "element type": (build([entry("k", ARRAY, struct.pack("<IQ", 99, 1))], []), "unknown element type 99"),
    "not a bool": (build([entry("k", BOOL, b"\2")], []), "truth value"),
    "not utf-8": (build([entry("k", STRING, struct.pack("<Q", 1) + b"\xff")], []), "not UTF-8"),
    "key twice": (build([entry("k", BOOL, b"\1")] * 2, []), "'k' appears twice"),
    "name twice": (build([], [info("t"), info("t", offset=32)]), "'t' appears twice"),
    "no dims": (build([], [info("t", ())], data=99), "0 dimensions"),
    "five dims": (build([], [info("t", (1,) * 5)]), "5 dimensions"),
    "zero dim": (build([], [info("t", (8, 0))]), "impossible shape"),
    "overflowing dims": (build([], [info("t", (2**62, 2**62, 2**62, 2**62))]), "ends at byte"),
    "part of a block": (build([], [info("t", (33,), kind=3)]), "impossible shape"),
    "unaligned": (build([], [info("t", offset=8)]), "not a multiple of 32"),
    "outside": (build([], [info("t", offset=64)]), "ends at byte"),
    "far outside": (build([], [info("t", offset=2**64 - 32)]), "ends at byte"),
    "overlapping": (build([], [info("a", (16,)), info("b", offset=32)]), "'b' overlaps 'a'"),
    "same place": (build([], [info("a"), info("b")]), "overlaps"),
    "alignment 0": (build([entry("general.alignment", U32, bytes(4))], []), "alignment"),
    "alignment 24": (build([entry("general.alignment", U32, struct.pack("<I", 24))], []), "alignment"),
    "alignment text": (build([entry("general.alignment", STRING, text("x"))], []), "alignment"),
    "alignment giant": (build([entry("general.alignment", U32, b"\0\0\0\x80")], []), "alignment"),
}


@pytest.mark.parametrize("case", LIES)
def test_a_lie_is_named(opened: Opened, case: str) -> None:
    content, expected = LIES[case]
    tracemalloc.start()
    started = time.thread_time()
    try:
        with pytest.raises(BadCheckpoint, match=r"made\.gguf") as caught:
            opened(content)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert expected in str(caught.value)
    assert time.thread_time() - started < 1
    assert peak < 4 << 20


def test_more_metadata_than_any_model_has(opened: Opened) -> None:
    with pytest.raises(BadCheckpoint, match="metadata values"):
        opened(build([entry("k", ARRAY, struct.pack("<IQ", 0, MAX_VALUES + 1) + bytes(MAX_VALUES + 1))], []))


@pytest.mark.parametrize(("version", "said"), [(1, "version 1"), (4, "version 4"), (3 << 24, "big-endian")])
def test_other_versions_are_named(opened: Opened, version: int, said: str) -> None:
    with pytest.raises(UnsupportedModel, match=said):
        opened(build([], [], version=version))


@pytest.mark.parametrize(
    ("kind", "said"), [(23, "IQ4_XS"), (40, "NVFP4"), (4, "number 4"), (4000, "number 4000")]
)
def test_other_types_are_named(opened: Opened, kind: int, said: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"'t' has the type {said}"):
        opened(build([], [info("t", (256,), kind=kind)], data=4096))


def test_split_models_are_refused(opened: Opened) -> None:
    with pytest.raises(UnsupportedModel, match="one of 3 parts"):
        opened(build([entry("split.count", 2, struct.pack("<H", 3))], []))


def test_no_such_tensor_and_no_such_file(tiny_gguf: Path, tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match="no tensor 'nothing'"):
        GgufFile(tiny_gguf).read("nothing")
    for path in (tmp_path, tmp_path / "absent.gguf"):
        with pytest.raises(BadCheckpoint, match="is not a file"):
            GgufFile(path)


def test_reading_leaves_the_file_alone(tiny_gguf: Path) -> None:
    before = tiny_gguf.read_bytes()
    file = GgufFile(tiny_gguf)
    name = next(iter(file.tensors))
    file.read(name).fill_(7)
    assert not (file.read(name) == 7).all()
    assert tiny_gguf.read_bytes() == before


@pytest.mark.model
def test_the_built_in_model_opens_fast(smollm2: Path) -> None:
    started = time.thread_time()
    file = GgufFile(smollm2)
    assert time.thread_time() - started < 1.0  # 0.08 s on an idle core
    assert len(file.tensors) == 272
    assert len(file.metadata["tokenizer.ggml.tokens"]) == 49152


def test_custom_alignment(tmp_path: Path) -> None:
    path = tmp_path / "aligned.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(256)
    weights = tiny.gguf_tensors(tiny.hf_weights())
    for name, array in weights.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GgufFile(path)
    for name, array in weights.items():
        assert np.array_equal(file.read(name).numpy(), array)
