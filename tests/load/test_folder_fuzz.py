"""Hostile safetensors, tokenizer.json and config.json: each opens or raises an OutriderError that names the file."""

from __future__ import annotations

import copy
import json
import os
import random
import resource
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outrider.engine.build import load_model
from outrider.errors import BadCheckpoint, OutriderError
from outrider.load.checkpoint import open_checkpoint
from outrider.settings import Settings

from . import tiny

SECONDS = 4.0  # for one file; most take milliseconds, but the machine may be busy
GROWTH = 1 << 20  # KiB that the peak of memory may grow by, over a test
RUNS = int(os.environ.get("OUTRIDER_FUZZ", "150"))  # of each seeded loop
SETTINGS = Settings(threads=1, kernels="torch", device="cpu")
WEIGHTS, TOKENIZER, CONFIG = "model.safetensors", "tokenizer.json", "config.json"


def survives(folder: Path, names: tuple[str, ...]) -> bool:
    """Open and use the folder. True if it was taken for sound; an error names the folder or one of the files."""
    started = time.thread_time()
    try:
        checkpoint = open_checkpoint(folder)
        for name in checkpoint.names():
            checkpoint.tensor(name)
        if checkpoint.config is not None:  # else transformers reads it
            load_model(checkpoint, SETTINGS)
        tokenizer = checkpoint.tokenizer
        tokenizer.decode(tokenizer.encode("hello 12 wörld <|end|>"))
        return True
    except OutriderError as problem:
        assert any(name in str(problem) for name in (folder.name, *names)), problem
        assert len(str(problem)) < 2000
        return False
    finally:
        assert time.thread_time() - started < SECONDS


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny.write_folder(tmp_path / "fuzzed")
    return tmp_path / "fuzzed"


@pytest.fixture(autouse=True)
def memory_stays() -> Any:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < GROWTH


def split(data: bytes) -> tuple[dict[str, Any], bytes]:
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def joined(header: bytes, body: bytes, size: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if size is None else size) + header + body


def test_the_seed_is_sound(folder: Path) -> None:
    assert survives(folder, ())


# --------------------------------------------------------------------------------------------- safetensors


NORM, EMBED = "model.norm.weight", "model.embed_tokens.weight"


def lying(change: Callable[[dict[str, Any]], Any]) -> Callable[[bytes], bytes]:
    def build(data: bytes) -> bytes:
        header, body = split(data)
        change(header)
        return joined(json.dumps(header).encode(), body)

    return build


LIES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "cut in the length": lambda data: data[:5],
    "cut in the header": lambda data: data[:100],
    "cut in the body": lambda data: data[:-1],
    "more behind it": lambda data: data + b"\0" * 64,
    "a header of all bytes": lambda data: struct.pack("<Q", 2**64 - 1) + data[8:],
    "a header beyond the file": lambda data: struct.pack("<Q", len(data)) + data[8:],
    "a header of none": lambda data: struct.pack("<Q", 0) + data[8:],
    "a huge header": lambda data: joined(b"{" + b" " * (101 << 20), b""),
    "no JSON": lambda data: joined(b"\x80\x81{}", split(data)[1]),
    "a list": lambda data: joined(b"[]", split(data)[1]),
    "deep JSON": lambda data: joined(b'{"a":' + b"[" * 200_000, b""),
    "deep objects": lambda data: joined(b'{"a":' * 200_000, b""),
    "a name twice": lambda data: joined(json.dumps(split(data)[0]).encode()[:-1] + b', "model.norm.weight": '
                                        + json.dumps(split(data)[0][NORM]).encode() + b"}", split(data)[1]),
    "bytes that are no text": lambda data: data.replace(b"model.norm", b"model.n\xffrm"),
    "half a character": lambda data: data.replace(b"model.norm.weight", rb"model.n\ud800.xxt"),
    "another dtype": lying(lambda h: h[NORM].update(dtype="F64")),
    "a smaller dtype": lying(lambda h: h[NORM].update(dtype="U8")),
    "an unknown dtype": lying(lambda h: h[NORM].update(dtype="F1")),
    "a dtype of eight bits": lying(lambda h: h[NORM].update(dtype="F8_E4M3", shape=[128])),
    "a huge shape": lying(lambda h: h[NORM].update(shape=[2**62, 4])),
    "a shape that wraps": lying(lambda h: h[NORM].update(shape=[2**63, 2**63, 4])),
    "a negative shape": lying(lambda h: h[NORM].update(shape=[-32])),
    "two negatives": lying(lambda h: h[NORM].update(shape=[-4, -8])),
    "a broken number": lying(lambda h: h[NORM].update(shape=[32.5])),
    "a shape of text": lying(lambda h: h[NORM].update(shape="32")),
    "another shape": lying(lambda h: h[NORM].update(shape=[4, 8])),
    "no shape": lying(lambda h: h[NORM].pop("shape")),
    "many dimensions": lying(lambda h: h[NORM].update(shape=[1] * 100_000 + [32])),
    "offsets beyond the file": lying(lambda h: h[NORM].update(data_offsets=[2**40, 2**40 + 128])),
    "offsets backwards": lying(lambda h: h[NORM].update(data_offsets=h[NORM]["data_offsets"][::-1])),
    "negative offsets": lying(lambda h: h[NORM].update(data_offsets=[-128, 0])),
    "overlapping offsets": lying(lambda h: h[NORM].update(data_offsets=[0, 128])),
    "one offset": lying(lambda h: h[NORM].update(data_offsets=[0])),
    "swapped tensors": lying(lambda h: h.update({NORM: h[EMBED], EMBED: h[NORM]})),
    "a missing tensor": lying(lambda h: h.pop(NORM)),
    "metadata of numbers": lying(lambda h: h.update(__metadata__={"format": 1})),
    "a tensor of null": lying(lambda h: h.update({NORM: None})),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_headers_that_lie(folder: Path, lie: Callable[[bytes], bytes]) -> None:
    file = folder / WEIGHTS
    file.write_bytes(lie(file.read_bytes()))
    survives(folder, (WEIGHTS,))


def test_a_cut_file_is_not_read(folder: Path) -> None:
    data = (folder / WEIGHTS).read_bytes()
    for cut in sorted({*range(0, 2000, 97), *range(2000, len(data), len(data) // 40), len(data) - 1}):
        os.truncate(folder / WEIGHTS, cut)
        with pytest.raises(BadCheckpoint, match=WEIGHTS):
            open_checkpoint(folder)
        (folder / WEIGHTS).write_bytes(data)


def test_headers_with_random_edits(folder: Path) -> None:
    data, dice = (folder / WEIGHTS).read_bytes(), random.Random(31)
    header = 8 + int.from_bytes(data[:8], "little")
    taken = 0
    for _ in range(RUNS):
        (folder / WEIGHTS).write_bytes(edited(data, header, dice))
        taken += survives(folder, (WEIGHTS,))
    assert taken < RUNS


PIECES = b'0123456789-[]{}":,eE.\x00\xff\x80 nul'


def edited(data: bytes, end: int, dice: random.Random) -> bytes:
    """A few bytes before `end` replaced, put in or cut out."""
    made = bytearray(data)
    for _ in range(dice.randint(1, 4)):
        at, new = (
            dice.randrange(end),
            bytes(dice.choices(b'0123456789-[]{}":,eE.\x00\xff\x80 nul', k=dice.randint(0, 6))),
        )
        made[at : at + dice.choice((0, 1, len(new)))] = new
    return bytes(made)


# ------------------------------------------------------------------------- tokenizer.json and config.json


BAD_VALUES = [
    *(None, True, -1, 0, 1, 2**31, 2**32, 2**63, 2**64, 10**400, -(2**63), 0.5, 1e308, "", "x", "x" * 5000),
    *([], [[]], {}, {"type": "BPE"}, "BPE", "\ud800", "\x00", [1, 2], ["a", "b"], {"a": 1}),
]


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths to everything within. Of long lists and tables the first few."""
    inside = (
        list(value.items())[:12]
        if isinstance(value, dict)
        else list(enumerate(value))[:6]
        if isinstance(value, list)
        else []
    )
    return [path, *(place for key, one in inside for place in places(one, (*path, key)))]


def mutated(value: Any, dice: random.Random) -> Any:
    """A copy with one to three values replaced, dropped or repeated."""
    made = json.loads(json.dumps(value))
    for _ in range(dice.randint(1, 3)):
        *above, last = dice.choice([*places(made)[1:], ("new",)])
        at = made
        for key in above:
            at = at[key]
        what = dice.randrange(4)
        if what == 0 and last != "new":
            del at[last]
        elif what == 1 and isinstance(at, list):
            at.append(at[last])
        else:
            at[last] = copy.deepcopy(dice.choice(BAD_VALUES))
    return made


@pytest.mark.parametrize("name", [TOKENIZER, CONFIG, "tokenizer_config.json"])
def test_json_with_random_values(folder: Path, name: str) -> None:
    sound, dice, taken = json.loads((folder / name).read_text()), random.Random(7), 0
    for _ in range(RUNS):
        (folder / name).write_text(json.dumps(mutated(sound, dice)))
        taken += survives(folder, (name,))
    assert taken > 0


@pytest.mark.parametrize("name", [TOKENIZER, CONFIG])
def test_json_with_random_edits(folder: Path, name: str) -> None:
    sound, dice = (folder / name).read_bytes(), random.Random(9)
    for _ in range(RUNS):
        (folder / name).write_bytes(edited(sound, len(sound), dice))
        survives(folder, (name,))


TOKENIZERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "huge ids": lambda t: t["model"]["vocab"].update(h=2**32 - 1),
    "ids with a gap": lambda t: t["model"]["vocab"].update(h=2**22 - 2),
    "ids with a large gap": lambda t: t["model"]["vocab"].update(h=2**31),
    "an id twice": lambda t: t["model"]["vocab"].update(h=t["model"]["vocab"]["e"]),
    "no vocabulary": lambda t: t["model"].update(vocab={}),
    "no merges": lambda t: t["model"].pop("merges"),
    "merges of what is not there": lambda t: t["model"]["merges"].append(["zz", "yy"]),
    "a merge of three": lambda t: t["model"]["merges"].append(["a", "b", "c"]),
    "an added token of a huge id": lambda t: t["added_tokens"][0].update(id=2**32 - 1),
    "an added token of another's id": lambda t: t["added_tokens"][0].update(id=5),
    "an empty added token": lambda t: t["added_tokens"][0].update(content=""),
    "a bad pattern": lambda t: t.update(pre_tokenizer=by_pattern("(")),
    "a pattern that backtracks": lambda t: t.update(pre_tokenizer=by_pattern("(a+)+$")),
    "a pattern of nothing": lambda t: t.update(pre_tokenizer=by_pattern("")),
    "a deep pattern": lambda t: t.update(pre_tokenizer=by_pattern("(" * 20_000 + ")" * 20_000)),
    "a repeated pattern": lambda t: t.update(pre_tokenizer=by_pattern("(((((a{99}){99}){99}){99}){99})")),
    "a sequence in a sequence": lambda t: t.update(pre_tokenizer=nested(60)),
    "no decoder": lambda t: t.update(decoder=None),
    "a decoder without an end": lambda t: t.update(decoder=sequence("decoders")),
    "decoders in decoders": lambda t: t.update(
        decoder=sequence("decoders", sequence("decoders", t["decoder"]))
    ),
    "a normaliser by pattern": lambda t: t.update(normalizer=replacing({"Regex": "("}, "")),
    "a normaliser that grows": lambda t: t.update(
        normalizer=sequence("normalizers", *[replacing({"String": "l"}, "l" * 40)] * 4)
    ),
    "a post-processor of unknown tokens": lambda t: t.update(post_processor=TEMPLATE),
    "truncation": lambda t: t.update(
        truncation={"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 9}
    ),
    "a unigram": lambda t: t.update(model={"type": "Unigram", "unk_id": 7, "vocab": [["a", 0.0]]}),
    "words": lambda t: t.update(model={"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "none"}),
    "pieces of words": lambda t: t.update(model=PIECES_OF_WORDS),
}
TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "q", "type_id": 0}}],
    "pair": [],
    "special_tokens": {},
}
PIECES_OF_WORDS = {
    "type": "WordPiece",
    "vocab": {"a": 0},
    "unk_token": "none",
    "continuing_subword_prefix": "",
    "max_input_chars_per_word": 0,
}


def sequence(inside: str, *parts: Any) -> dict[str, Any]:
    return {"type": "Sequence", inside: list(parts)}


def replacing(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def by_pattern(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def nested(depth: int) -> dict[str, Any]:
    made: dict[str, Any] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    for _ in range(depth):
        made = {"type": "Sequence", "pretokenizers": [made]}
    return made


ROPES: dict[str, Any] = {
    "no factor": {"rope_type": "linear"},
    "a factor of text": {"rope_type": "yarn", "factor": "2"},
    "a factor of nothing": {"rope_type": "linear", "factor": 0},
    "half of llama3": {"rope_type": "llama3", "factor": 8.0},
    "a list": ["linear"],
    "a number": 3,
    "a kind that is a list": {"rope_type": ["linear"]},
    "no numbers": {"rope_type": "dynamic", "factor": float("nan")},
    "huge numbers": {"rope_type": "yarn", "factor": 10**400},
}
SHAPES: dict[str, dict[str, Any]] = {
    "a context for which no memory is enough": {"max_position_embeddings": 1 << 28},
    "a base of nothing": {"rope_theta": -1.0},
    "no number": {"rms_norm_eps": float("nan")},
    "too few windows": {"model_type": "mistral", "sliding_window": 8, "layer_types": ["sliding_attention"]},
    "a window of text": {"model_type": "mistral", "sliding_window": "8"},
    **{f"rope: {name}": {"rope_scaling": value} for name, value in ROPES.items()},
}


@pytest.mark.parametrize("change", SHAPES.values(), ids=SHAPES)
def test_configs_that_lie(folder: Path, change: dict[str, Any]) -> None:
    document = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**document, **change}))
    assert not survives(folder, (CONFIG,))


@pytest.mark.parametrize("change", TOKENIZERS.values(), ids=TOKENIZERS)
def test_tokenizers_that_lie(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    document = json.loads((folder / TOKENIZER).read_text())
    change(document)
    (folder / TOKENIZER).write_text(json.dumps(document))
    survives(folder, (TOKENIZER,))


OTHERS = {
    "empty": "",
    "cut": "{",
    "list": "[]",
    "null": "null",
    "deep": "[" * 200_000,
    "deep objects": '{"a":' * 200_000,
    "twice": '{"version": "1.0", "version": 2}',
    "mark": "\ufeff{}",
    "digits": "1" * 5000,
}
SMALL = ("tokenizer_config.json", "generation_config.json", "model.safetensors.index.json")


@pytest.mark.parametrize("text", OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("name", [TOKENIZER, CONFIG, *SMALL])
def test_files_that_are_something_else(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    assert not survives(folder, (name,)) or text.startswith('{"version"')


@pytest.mark.parametrize("name", [WEIGHTS, TOKENIZER, CONFIG, "tokenizer_config.json"])
@pytest.mark.parametrize("kind", ["folder", "pipe", "loop", "endless"])
def test_what_is_no_file_is_not_waited_for(folder: Path, name: str, kind: str) -> None:
    (folder / name).unlink()
    if kind == "folder":
        (folder / name).mkdir()
    elif kind == "pipe":
        os.mkfifo(folder / name)
    else:
        (folder / name).symlink_to({"loop": name, "endless": "/dev/zero"}[kind])
    optional = (
        kind == "loop" and name == "tokenizer_config.json"
    )  # a link to nothing: as if it were not there
    assert survives(folder, (name,)) is optional
