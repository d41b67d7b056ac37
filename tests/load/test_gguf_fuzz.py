"""Hostile GGUF files: whatever the bytes, opening one succeeds or raises an OutriderError, and soon."""

from __future__ import annotations

import os
import struct
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outrider.errors import BadCheckpoint, OutriderError
from outrider.load.checkpoint import check_shapes, open_checkpoint
from outrider.load.gguf import GgufFile

from . import tiny

SECONDS = 2.0  # for one file; the slowest takes a few milliseconds, but the machine may be busy


def seed(path: Path) -> None:
    """The smallest file that goes all the way: one layer, eleven tokens, a header of some 1,500 bytes."""
    strings = ["<|end|>", "h", "e", "l", "o", "he", "ll", "Ġ", "1", "2", "<tool>"]
    shape = {"embedding_length": 8, "feed_forward_length": 8, "attention.head_count": 2}
    metadata = tiny.model_metadata(block_count=1, **shape, **{"attention.head_count_kv": 1})
    metadata |= tiny.tokenizer_metadata() | {
        "tokenizer.ggml.tokens": strings,
        "tokenizer.ggml.token_type": [3, *[1] * 9, 4],
        "tokenizer.ggml.merges": ["h e", "l l"],
    }
    layers = {"attn_q": (8, 8), "attn_k": (4, 8), "attn_v": (4, 8), "attn_output": (8, 8), "attn_norm": (8,)}
    layers |= {"ffn_gate": (8, 8), "ffn_up": (8, 8), "ffn_down": (8, 8), "ffn_norm": (8,)}
    shapes = {"token_embd.weight": (11, 8), "output_norm.weight": (8,)}
    shapes |= {f"blk.0.{name}.weight": shape for name, shape in layers.items()}
    tiny.write_gguf(path, metadata, {name: np.ones(shape, np.float32) for name, shape in shapes.items()})


def seed_experts(path: Path) -> None:
    """The same with a layer of two experts, and every entry of the metadata about them."""
    shape = {
        "embedding_length": 8,
        "feed_forward_length": 8,
        "attention.head_count": 2,
        "attention.head_count_kv": 1,
    }
    experts = {
        "expert_count": 2,
        "expert_used_count": 1,
        "expert_feed_forward_length": 8,
        "expert_shared_count": 1,
    }
    experts |= {"expert_gating_func": 2, "expert_group_count": 1, "expert_group_used_count": 1}
    experts |= {"leading_dense_block_count": 0, "nextn_predict_layers": 1, "expert_weights_norm": True}
    metadata = tiny.model_metadata("glm4moe", block_count=2, **shape, **experts) | tiny.tokenizer_metadata()
    metadata |= {"tokenizer.ggml.tokens": [*"abcd"], "tokenizer.ggml.token_type": [1] * 4}
    metadata |= {"tokenizer.ggml.merges": []}
    layers = {"attn_q": (8, 8), "attn_k": (4, 8), "attn_v": (4, 8), "attn_output": (8, 8), "attn_norm": (8,)}
    layers |= {"post_attention_norm": (8,), "ffn_gate_inp": (2, 8)}
    layers |= {f"ffn_{part}_{kind}": shape for part in ("gate", "up", "down")
               for kind, shape in (("exps", (2, 8, 8)), ("shexp", (8, 8)))}  # fmt: skip
    shapes = {"token_embd.weight": (4, 8), "output_norm.weight": (8,), "blk.0.exp_probs_b.bias": (2,)}
    shapes |= {f"blk.0.{name}.weight": shape for name, shape in layers.items()}
    tiny.write_gguf(path, metadata, {name: np.ones(shape, np.float32) for name, shape in shapes.items()})


def survives(path: Path) -> bool:
    """Open and use the file. True if it was taken for sound."""
    started = time.thread_time()
    try:
        checkpoint = open_checkpoint(path)
        check_shapes(checkpoint)
        for name in checkpoint.names():
            checkpoint.tensor(name)
        tokenizer = checkpoint.tokenizer
        tokenizer.decode(tokenizer.encode("hello 12 wörld"))
        return True
    except OutriderError as problem:
        assert str(problem)
        return False
    finally:
        assert time.thread_time() - started < SECONDS


def patch(path: Path, at: int, piece: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(piece)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("seed") / "seed.gguf"
    seed(path)
    return path.read_bytes()


@pytest.fixture
def path(tmp_path: Path, sound: bytes) -> Path:
    path = tmp_path / "fuzzed.gguf"
    path.write_bytes(sound)
    return path


@pytest.fixture
def header(path: Path) -> int:
    return min(tensor.offset for tensor in GgufFile(path).tensors.values())


def test_the_seed_is_sound(path: Path) -> None:
    assert survives(path)


def test_truncated_anywhere(path: Path, sound: bytes) -> None:
    for cut in range(len(sound) - 1, -1, -1):
        os.truncate(path, cut)
        with pytest.raises(BadCheckpoint):
            GgufFile(path)


@pytest.mark.parametrize("flip", [0x01, 0x80, 0xFF])
def test_every_header_byte_flipped(path: Path, sound: bytes, header: int, flip: int) -> None:
    taken = 0
    for at in range(header):
        patch(path, at, bytes([sound[at] ^ flip]))
        taken += survives(path)
        patch(path, at, sound[at : at + 1])
    assert 0 < taken < header  # some bytes are names, some are lengths: neither all nor none may matter


@pytest.mark.parametrize("value", [0, 1, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1, 2**64 - 32])
def test_every_header_word_lies(path: Path, sound: bytes, header: int, value: int) -> None:
    for at in range(4, header - 8, 2):
        patch(path, at, struct.pack("<Q", value))
        survives(path)
        patch(path, at, sound[at : at + 8])


@pytest.mark.parametrize("value", [0, 3, 4097, 2**31, 2**63, 2**64 - 1])
def test_entries_about_experts_lie(tmp_path: Path, value: int) -> None:
    path = tmp_path / "experts.gguf"
    seed_experts(path)
    sound = path.read_bytes()
    metadata = GgufFile(path).metadata
    assert metadata["glm4moe.expert_count"] == 2 and open_checkpoint(path).config.specs[0].experts is not None
    for name in (b"expert_", b"leading_dense", b"nextn_", b"_exps", b"_inp", b"exp_probs"):
        at = sound.find(name)
        while at >= 0:
            for behind in range(at, min(at + 56, len(sound) - 8), 3):
                patch(path, behind, struct.pack("<Q", value))
                survives(path)
                patch(path, behind, sound[behind : behind + 8])
            at = sound.find(name, at + 1)


def with_fuzz(examples: int) -> settings:
    return settings(
        max_examples=examples,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
        database=None,
    )


@given(st.binary(max_size=400))
@with_fuzz(300)
def test_random_bytes_after_the_magic(path: Path, noise: bytes) -> None:
    path.write_bytes(b"GGUF" + struct.pack("<I", 3) + noise)
    survives(path)


@given(st.lists(st.tuples(st.integers(0, 2**16), st.binary(min_size=1, max_size=9)), min_size=1, max_size=6))
@with_fuzz(300)
def test_several_edits(path: Path, sound: bytes, header: int, edits: list[tuple[int, bytes]]) -> None:
    content = bytearray(sound)
    for at, piece in edits:
        at %= header
        content[at : at + len(piece)] = piece
    path.write_bytes(content)
    survives(path)


@given(st.integers(4, 2**16), st.integers(0, 64), st.binary(max_size=64))
@with_fuzz(200)
def test_bytes_cut_out_and_put_in(
    path: Path, sound: bytes, header: int, at: int, cut: int, new: bytes
) -> None:
    at %= header
    path.write_bytes(sound[:at] + new + sound[at + cut :])
    survives(path)
