"""Tokenizers of both sources: ids equal to the reference, bytes and streams exact."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from outrider.errors import BadCheckpoint, InvalidRequest, UnsupportedModel
from outrider.load.checkpoint import Checkpoint
from outrider.load.tokenizer import PRE_TOKENIZERS, Tokenizer

from . import tiny

GOLDEN = json.loads((Path(__file__).parent / "data" / "smollm2_ids.json").read_text())["rows"]
TEXTS = [row["text"] for row in GOLDEN]


@pytest.fixture(scope="module")
def byte_level() -> Tokenizer:
    return Tokenizer.from_gguf(tiny.tokenizer_metadata())


def metaspace_backend(decoder: Any) -> tokenizers.Tokenizer:
    """Llama 2's and Mistral's way: '▁' for spaces, <0xNN> for what has no token."""
    words = ["▁", "▁he", "llo", "h", "e", "l", "o", "é", "▁w", "or", "ld"]
    vocab = {
        s: i for i, s in enumerate(["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *words])
    }
    merges = [("▁", "h"), ("l", "l")]
    vocab |= {"▁h": len(vocab), "ll": len(vocab) + 1}
    backend = tokenizers.Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoder
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


def llama2_decoder() -> Any:
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return decoders.Sequence(parts)


METASPACE = Tokenizer(metaspace_backend(llama2_decoder()), bos_id=1, eos_ids=(2,))


# ------------------------------------------------------------------------------------------------------- ids


@pytest.mark.model
def test_ids_of_the_built_in_model(smollm2_checkpoint: Checkpoint) -> None:
    tokenizer = smollm2_checkpoint.tokenizer
    for row in GOLDEN:
        ids = tokenizer.encode(row["text"], parse_special=True)
        assert ids == row["ids"], row["text"]
        assert tokenizer.decode(ids, skip_special=False) == row["text"]
    assert sum(row["as_transformers"] for row in GOLDEN) == 40  # the others have runs of space before digits
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_ids) == (49152, 1, (2,))
    assert [i for i in range(49152) if tokenizer.is_special(i)] == list(range(17))
    assert tokenizer.encode("<|im_start|>") != [1]
    assert tokenizer.decode(tokenizer.encode("<|im_start|>")) == "<|im_start|>"


def published_pre_tokenizer(name: str) -> Any:
    """As the models' own tokenizer.json files have them."""
    if name == "smollm":
        return pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    if name == "gpt-2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    llama3 = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    if name == "gpt-4o":
        words = [
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        ]
        llama3 = "|".join(
            [*words, r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"]
        )
    pattern = llama3 if name in ("llama-bpe", "gpt-4o") else llama3.replace("{1,3}", "")
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False),
        ]
    )


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_gguf_equals_tokenizers_and_transformers(pre: str) -> None:
    ours = Tokenizer.from_gguf(tiny.tokenizer_metadata(pre))
    backend = tiny.byte_level_backend()
    backend.pre_tokenizer = published_pre_tokenizer(pre)
    backend.model.ignore_merges = pre in ("llama-bpe", "gpt-4o")
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    reference = PreTrainedTokenizerFast(tokenizer_object=backend)
    for text in [
        *TEXTS,
        "CamelCase don'T it's/\n\n a//b HELLOWorld",
        "hello hello<tool>hello  12 123 1212",
        "<|start|>hello",
    ]:
        ids = ours.encode(text, parse_special=True)
        assert ids == reference.encode(text, add_special_tokens=False), text
        if pre != "qwen2":  # it normalises: the text may come back composed
            assert ours.decode(ids, skip_special=False) == text


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_strings_of_a_gguf_file_are_those_of_its_backend(pre: str) -> None:
    ours = Tokenizer.from_gguf(tiny.tokenizer_metadata(pre))
    twin = Tokenizer.from_json(ours.to_json(), ours.bos_id, ours.eos_ids, ours.add_bos)
    assert twin.strings() == ours.strings() and any(map(ours.is_special, range(ours.vocab_size)))


def test_pre_tokenizers_differ_where_they_should() -> None:
    """Else the test above would pass with one for all."""
    ids = {
        pre: tuple(Tokenizer.from_gguf(tiny.tokenizer_metadata(pre)).encode("  12")) for pre in PRE_TOKENIZERS
    }
    assert len({ids["smollm"], ids["gpt-2"], ids["qwen2"], ids["llama-bpe"]}) >= 3


def test_ignore_merges() -> None:
    """A whole word that is a token is that token, whatever the merges would make of it."""
    strings = [*tiny.vocabulary(), "world"]
    tables = {"tokenizer.ggml.tokens": strings, "tokenizer.ggml.token_type": [1] * len(strings)}
    llama = Tokenizer.from_gguf(tiny.tokenizer_metadata("llama-bpe") | tables)
    gpt2 = Tokenizer.from_gguf(tiny.tokenizer_metadata("gpt-2") | tables)
    assert llama.encode("world", special=False) == [len(strings) - 1]
    assert len(gpt2.encode("world", special=False)) == 5


@pytest.mark.parametrize("alias", ["llama3", "llama-v3"])
def test_aliases(alias: str) -> None:
    text = "hello 12345"
    plain = Tokenizer.from_gguf(tiny.tokenizer_metadata("llama-bpe"))
    assert Tokenizer.from_gguf(tiny.tokenizer_metadata(alias)).encode(text) == plain.encode(text)


def test_bos() -> None:
    wants = Tokenizer.from_gguf(tiny.tokenizer_metadata() | {"tokenizer.ggml.add_bos_token": True})
    assert wants.encode("hello")[0] == 1
    assert wants.encode("hello", special=False)[0] != 1
    assert wants.encode("") == [1]
    silent = tiny.tokenizer_metadata("llama-bpe")
    del silent["tokenizer.ggml.add_bos_token"]
    assert Tokenizer.from_gguf(silent).encode("hello")[0] == 1  # llama-bpe wants it unless told otherwise


def test_special_text_is_parsed_only_when_asked(byte_level: Tokenizer) -> None:
    text = "hello<|start|>hello"
    assert 1 in byte_level.encode(text, parse_special=True)
    plain = byte_level.encode(text)
    assert 1 not in plain
    assert byte_level.decode(plain) == text
    assert byte_level.encode("<tool>") == [len(tiny.vocabulary()) - 1]  # user-defined tokens are not special


def test_from_file_follows_its_post_processor_and_config(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    metaspace_backend(llama2_decoder()).save(str(file))
    names = {"bos_token": "<s>", "eos_token": {"content": "</s>"}}
    found = Tokenizer.from_file(file, names)
    assert (found.bos_id, found.eos_ids) == (1, (2,))
    assert found.encode("hello")[0] == 1
    assert found.encode("hello", special=False)[0] != 1
    assert Tokenizer.from_file(file, names | {"add_bos_token": False}).encode("hello")[0] != 1
    tiny.byte_level_backend().save(str(file))
    names = {"bos_token": "<|start|>"}
    assert Tokenizer.from_file(file, names).encode("hello")[0] != 1
    assert Tokenizer.from_file(file, names | {"add_bos_token": True}).encode("hello")[:2][0] == 1


def test_saved_truncation_and_padding_are_dropped(tmp_path: Path) -> None:
    backend = tiny.byte_level_backend()
    backend.enable_truncation(3)
    backend.enable_padding(length=20)
    backend.save(str(tmp_path / "tokenizer.json"))
    found = Tokenizer.from_file(tmp_path / "tokenizer.json")
    assert found.decode(found.encode("hello hello hello hello xyz")) == "hello hello hello hello xyz"


def test_surrogates_and_wrong_types(byte_level: Tokenizer) -> None:
    assert byte_level.decode(byte_level.encode("a\ud800b")) == "a\ufffdb"
    assert byte_level.decode(byte_level.encode("\ud83c\udf89")) == "🎉"
    with pytest.raises(InvalidRequest):
        byte_level.encode(b"bytes")  # type: ignore[arg-type]


def test_threads_share_one_tokenizer(byte_level: Tokenizer) -> None:
    texts = ["hello <|start|> x", "hello 12"] * 20
    expected = [byte_level.encode(t, parse_special=i % 3 == 0) for i, t in enumerate(texts)]
    wrong: list[int] = []

    def work() -> None:
        for i, text in enumerate(texts):
            if byte_level.encode(text, parse_special=i % 3 == 0) != expected[i]:
                wrong.append(i)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# ----------------------------------------------------------------------------------------------------- bytes


def test_token_bytes_of_byte_level(byte_level: Tokenizer) -> None:
    ids = {string: i for i, string in enumerate(byte_level.strings())}
    assert byte_level.token_bytes(ids["Ġhello"]) == b" hello"
    assert byte_level.token_bytes(ids["Ċ"]) == b"\n"
    assert byte_level.token_bytes(ids["<tool>"]) == b"<tool>"
    assert byte_level.token_bytes(ids["<|start|>"]) == b""
    assert byte_level.token_bytes(ids["<|start|>"], special=True) == b"<|start|>"
    single = {byte_level.token_bytes(ids[char]) for char in pre_tokenizers.ByteLevel.alphabet()}
    assert single == {bytes([byte]) for byte in range(256)}
    assert byte_level.token_string(ids["Ġhello"]) == "Ġhello"


@pytest.mark.parametrize("token", [-1, 10**6, "1", None, 3.5])
def test_ids_out_of_range_are_named(byte_level: Tokenizer, token: Any) -> None:
    with pytest.raises(InvalidRequest, match="not in the vocabulary"):
        byte_level.token_bytes(token)


def test_metaspace_bytes_and_text() -> None:
    ids = {string: i for i, string in enumerate(METASPACE.strings())}
    assert METASPACE.token_bytes(ids["▁he"]) == b" he"
    assert METASPACE.token_bytes(ids["<0xC3>"]) == b"\xc3"
    assert METASPACE.decode([ids["▁he"], ids["llo"], ids["▁he"]]) == "hello he"
    assert METASPACE.decode([ids["▁"], ids["▁he"]]) == " he"  # one leading space goes, no more
    assert METASPACE.decode([1, ids["▁he"]]) == "he"
    assert METASPACE.decode([1, ids["▁he"]], skip_special=False) == "<s> he"
    assert METASPACE.decode([ids["<0xC3>"], ids["<0xA9>"]]) == "é"


@pytest.mark.parametrize(
    "decoder",
    [
        llama2_decoder(),
        decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
        decoders.Metaspace(),
        decoders.Metaspace(prepend_scheme="never"),
    ],
    ids=["llama2", "gemma", "metaspace", "metaspace-never"],
)
def test_metaspace_text_equals_the_backends(decoder: Any) -> None:
    backend = metaspace_backend(decoder)
    tokenizer = Tokenizer(backend, bos_id=1)
    ids = {string: i for i, string in enumerate(tokenizer.strings())}
    samples = [
        ["▁he", "llo", "▁w", "or", "ld"],
        ["h", "e", "▁", "▁he"],
        ["▁", "▁", "o"],
        ["<s>", "▁he", "</s>"],
        ["é"],
    ]
    for words in samples:
        tokens = [ids[word] for word in words]
        assert tokenizer.decode(tokens) == backend.decode(tokens, skip_special_tokens=True), words


def test_other_decoders_are_named() -> None:
    for decoder, said in ((decoders.WordPiece(), "WordPiece"), (None, "none"), (decoders.CTC(), "CTC")):
        with pytest.raises(UnsupportedModel, match=said):
            Tokenizer(metaspace_backend(decoder))
    with pytest.raises(UnsupportedModel, match="replaces"):
        Tokenizer(metaspace_backend(decoders.Sequence([decoders.Replace("x", " "), decoders.Fuse()])))


# --------------------------------------------------------------------------------------------------- streams

BYTE_LEVEL = Tokenizer.from_gguf(tiny.tokenizer_metadata())


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, METASPACE], ids=["byte-level", "metaspace"])
@given(st.data())
@settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    database=None,
)
def test_a_stream_is_the_whole(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    skip = data.draw(st.booleans())
    stream = tokenizer.text_stream(skip)
    pieces = [*map(stream.feed, ids), stream.finish()]
    joined = b"".join(tokenizer.token_bytes(i, special=not skip) for i in ids)
    if tokenizer is METASPACE:
        joined = joined.removeprefix(b" ")
    assert "".join(pieces) == tokenizer.decode(ids, skip) == joined.decode(errors="replace")


@given(st.text(max_size=40))
@settings(max_examples=100, deadline=None, database=None)
def test_any_text_comes_back_and_streams_whole_characters(text: str) -> None:
    ids = BYTE_LEVEL.encode(text)
    assert BYTE_LEVEL.decode(ids) == text
    stream = BYTE_LEVEL.text_stream()
    pieces = [stream.feed(i) for i in ids]
    assert "".join(pieces) == text
    assert stream.finish() == ""


def test_a_broken_tail_is_marked() -> None:
    ids = BYTE_LEVEL.encode("é🎉")
    stream = BYTE_LEVEL.text_stream()
    assert [stream.feed(i) for i in ids[:-1]] == ["", "é", "", "", ""]
    assert stream.finish() == "\ufffd"


# ------------------------------------------------------------------------------------------------ bad tables


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tokenizer.ggml.model": "llama"}, "'llama' is not supported"),
        ({"tokenizer.ggml.model": None}, "None is not supported"),
        ({"tokenizer.ggml.pre": "default"}, "'default' is not supported; supported: smollm, gpt-2"),
        ({"tokenizer.ggml.pre": None}, "None is not supported"),
        ({"tokenizer.ggml.pre": ["qwen2"]}, "not supported"),
    ],
)
def test_unsupported_gguf_tokenizers_are_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedModel, match=said):
        Tokenizer.from_gguf(tiny.tokenizer_metadata() | changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"tokenizer.ggml.tokens": None},
        {"tokenizer.ggml.tokens": []},
        {"tokenizer.ggml.tokens": [1, 2]},
        {"tokenizer.ggml.tokens": ["a", "a"], "tokenizer.ggml.token_type": [1, 1]},
        {"tokenizer.ggml.token_type": [1]},
        {"tokenizer.ggml.token_type": "x"},
        {"tokenizer.ggml.merges": None},
        {"tokenizer.ggml.merges": [1]},
        {"tokenizer.ggml.merges": ["nospace"]},
        {"tokenizer.ggml.merges": ["not there"]},
    ],
)
def test_broken_gguf_tables(changes: dict[str, Any]) -> None:
    with pytest.raises(BadCheckpoint):
        Tokenizer.from_gguf(tiny.tokenizer_metadata() | changes)


@pytest.mark.parametrize(
    "content", ["", "{}", "[]", '{"version": "1.0"}', "\xff\xfe", '{"model": {"type": "BPE"}}']
)
def test_broken_tokenizer_json(tmp_path: Path, content: str) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_bytes(content.encode("latin-1"))
    with pytest.raises(BadCheckpoint, match=r"tokenizer\.json"):
        Tokenizer.from_file(file)
    with pytest.raises(BadCheckpoint, match="absent"):
        Tokenizer.from_file(tmp_path / "absent.json")


def test_strings_of_sparse_ids(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 3}, []))
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken("zz")])
    assert Tokenizer(backend).strings() in (["a", "", "zz", "b"], ["a", "", "", "b", "zz"])
    giant = tokenizers.Tokenizer(models.BPE({"a": 2**31}, []))
    giant.decoder = decoders.ByteLevel()
    with pytest.raises(BadCheckpoint, match="cannot be right"):
        Tokenizer(giant)
