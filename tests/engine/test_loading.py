"""Weights of a GGUF file on a CPU: kept as they are stored, read with little memory, refused by name if corrupt."""

from __future__ import annotations

import logging
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outrider import LLM
from outrider.engine import build
from outrider.errors import BadCheckpoint, OutriderError
from outrider.load.checkpoint import open_checkpoint
from outrider.load.gguf import GgufFile
from outrider.load.quants import FORMATS
from outrider.model.decoder import Decoder
from outrider.model.weights import KERNEL_FORMATS, kept_formats
from outrider.settings import shown_size
from tests.load import tiny
from tests.model.families import NEEDS_COMPILER

WIDTH, HEADS = 256, 4
OPTIONS: dict[str, Any] = dict(draft="none", threads=1, cache_bytes=1 << 22, max_sequences=4)
SCALES = {"Q6_K": (208,), "Q2_K": (80, 82), "Q3_K": (108,)}
KINDS = {form.name: number for number, form in FORMATS.items()}


def blocks(kind: str, rows: int, columns: int, seed: int) -> np.ndarray:
    """Random blocks whose scales are small; of K formats the gguf package writes none."""
    form, random = FORMATS[KINDS[kind]], np.random.default_rng(seed)
    raw = random.integers(0, 256, (rows * columns // form.values, form.bytes), dtype=np.uint8)
    for at in SCALES.get(kind, (0, 2) if kind[-1] in "1K" else (0,)):
        scale = random.normal(0, 1e-3 if kind[-1] == "K" else 1e-2, (len(raw), 1)).astype(np.float16)
        raw[:, at : at + 2] = scale.view(np.uint8)
    if kind == "MXFP4":
        raw[:, 0] = random.integers(118, 122, len(raw))  # powers of two from 2 ** -9 on
    return raw.reshape(rows, -1)


def write_model(path: Path, kinds: tuple[str, ...]) -> None:
    """One layer; its matrices have the formats in turn."""
    shape = {"embedding_length": WIDTH, "feed_forward_length": WIDTH, "attention.head_count": HEADS}
    metadata = tiny.model_metadata(block_count=1, **shape, **{"attention.head_count_kv": 2})
    metadata |= tiny.tokenizer_metadata()
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        if key != "general.architecture":
            tiny._add(writer, key, value)
    rows = {"attn_q": WIDTH, "attn_k": WIDTH // 2, "attn_v": WIDTH // 2, "attn_output": WIDTH}
    rows |= {"ffn_gate": WIDTH, "ffn_up": WIDTH, "ffn_down": WIDTH}
    names = {f"blk.0.{name}.weight": count for name, count in rows.items()}
    names |= dict.fromkeys(("token_embd.weight", "output.weight"), len(tiny.vocabulary()))
    for i, (name, count) in enumerate(names.items()):
        kind = kinds[i % len(kinds)]
        number = gguf.GGMLQuantizationType(KINDS[kind])
        writer.add_tensor(name, blocks(kind, count, WIDTH, i), raw_dtype=number)
    for name in ("output_norm.weight", "blk.0.attn_norm.weight", "blk.0.ffn_norm.weight"):
        writer.add_tensor(name, np.ones(WIDTH, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A matrix in each format that has kernels; queries, keys and values differ."""
    path = tmp_path_factory.mktemp("mixed") / "mixed.gguf"
    write_model(path, ("Q4_K", "Q8_0", "Q6_K", "Q4_0", "Q5_K", "Q4_1", "Q5_0", "Q5_1", "MXFP4"))
    return path


def answer(path: Path, **options: Any) -> list[int]:
    with LLM(path, **OPTIONS | options) as llm:
        return list(llm.generate("hello 12", max_tokens=8, temperature=0, ignore_eos=True)[0].token_ids)


@NEEDS_COMPILER
def test_a_model_keeps_the_formats_of_its_file(mixed: Path) -> None:
    with LLM(mixed, **OPTIONS) as llm:
        model = llm.model
        assert isinstance(model, Decoder)
        assert model.formats.keys() == set(KERNEL_FORMATS)
        assert "Q4_K" in repr(llm)
        # Panels are of 16 outputs, and scales of Q4_K and Q5_K take a byte each.
        assert model.weight_bytes() <= 1.05 * sum(kept_formats(open_checkpoint(mixed), "stored").values())
    assert answer(mixed) == answer(mixed, kernels="torch") == answer(mixed, draft="lookup")


def test_stored_matrices_are_the_matrices(mixed: Path) -> None:
    checkpoint = open_checkpoint(mixed)
    for name in checkpoint.names():
        assert torch.equal(checkpoint.stored(name).float(), checkpoint.tensor(name)), name


@NEEDS_COMPILER
@pytest.mark.parametrize("weights", ["float32", "bfloat16", "int8", "int4"])
def test_another_format_may_be_asked_for(mixed: Path, weights: str) -> None:
    with LLM(mixed, weights=weights, **OPTIONS) as llm:
        assert isinstance(llm.model, Decoder)
        names = {"int8": {"Q8_0"}, "int4": {"Q8_0", "Q4_0"}}.get(
            weights, {weights}
        )  # embedding and head: 8 bits
        assert llm.model.formats.keys() == names
        size = sum(kept_formats(open_checkpoint(mixed), weights).values())
        assert size <= llm.model.weight_bytes() <= 1.05 * size + (1 << 14)


@NEEDS_COMPILER
def test_a_format_without_a_kernel_is_unpacked_and_named(tmp_path: Path) -> None:
    path = tmp_path / "few.gguf"
    write_model(path, ("Q2_K", "Q4_K", "Q3_K"))
    with (
        pytest.warns(UserWarning, match="few.gguf in Q2_K, Q3_K are unpacked to float32"),
        LLM(path, **OPTIONS) as llm,
    ):
        assert isinstance(llm.model, Decoder)
        assert llm.model.formats.keys() == {"float32", "Q4_K"}


def test_what_weights_take_is_said_before_they_are_read(
    mixed: Path, caplog: pytest.LogCaptureFixture
) -> None:
    said: list[Any] = []

    def watch(text: str, total: int) -> Any:
        said.append((text, total))
        return said.append

    with caplog.at_level(logging.INFO, "outrider.engine.build"), LLM(mixed, watch=watch, **OPTIONS):
        pass
    (text, total), *read = said
    assert text in caplog.text and f"take {shown_size(total)} in memory" in text and "Q4_K" in text
    assert read == sorted(read) and read[-1] == pytest.approx(total, rel=0.01)


@NEEDS_COMPILER
def test_the_file_is_released_while_it_is_read(mixed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what was read of it stays right: pages that are given back are read again."""
    expected, released, real = answer(mixed), [], GgufFile.release
    monkeypatch.setattr(build, "RELEASED", 1)
    monkeypatch.setattr(GgufFile, "release", lambda file: released.append(real(file)))
    assert answer(mixed) == expected
    assert len(released) > 7


def corrupted(path: Path, to: Path, edits: list[tuple[int, bytes]]) -> Path:
    content = bytearray(path.read_bytes())
    begin = min(tensor.offset for tensor in GgufFile(path).tensors.values())
    for at, piece in edits:
        at = begin + at % (len(content) - begin - len(piece))
        content[at : at + len(piece)] = piece
    to.write_bytes(content)
    return to


@NEEDS_COMPILER
@pytest.mark.parametrize("kernels", ["c", "torch"])
def test_a_scale_that_is_no_number_names_its_tensor(mixed: Path, tmp_path: Path, kernels: str) -> None:
    tensor = GgufFile(mixed).tensors["blk.0.ffn_down.weight"]
    begin = min(t.offset for t in GgufFile(mixed).tensors.values())
    bad = corrupted(mixed, tmp_path / "bad.gguf", [(tensor.offset - begin, struct.pack("<H", 0x7C00))])
    with pytest.raises(BadCheckpoint, match=r"blk\.0\.ffn_down\.weight.* is corrupt"):
        LLM(bad, kernels=kernels, **OPTIONS)


@NEEDS_COMPILER
@given(st.lists(st.tuples(st.integers(0, 2**24), st.binary(min_size=1, max_size=40)), min_size=1, max_size=8))
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], database=None
)
def test_corrupt_blocks_are_refused_or_answer(
    mixed: Path, tmp_path: Path, edits: list[tuple[int, bytes]]
) -> None:
    bad = corrupted(mixed, tmp_path / "bad.gguf", edits)
    try:
        assert len(answer(bad)) == 8
    except OutriderError as problem:
        assert str(problem)


@given(st.integers(1, 2**24))
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], database=None
)
def test_a_truncated_matrix_is_refused(mixed: Path, tmp_path: Path, cut: int) -> None:
    whole, path = mixed.read_bytes(), tmp_path / "cut.gguf"
    begin = min(tensor.offset for tensor in GgufFile(mixed).tensors.values())
    path.write_bytes(whole[: -1 - cut % (len(whole) - begin)])
    with pytest.raises(BadCheckpoint, match="cut short"):
        LLM(path, **OPTIONS)
