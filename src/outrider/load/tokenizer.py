"""Text to token ids and back, over the `tokenizers` library: from tokenizer.json or from GGUF metadata.

Decoding is by bytes: a token stands for fixed bytes, a text is those bytes joined, so a stream of tokens
gives the same text as all of them at once. What a chat looks like as text is for template.py.
"""

from __future__ import annotations

import codecs
import copy
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from outrider.errors import BadCheckpoint, InvalidRequest, UnsupportedModel, invalid, naming
from outrider.load.gguf_config import gguf_end_ids
from outrider.load.json_files import read_text

MAX_VOCAB = 1 << 22
MAX_FILE = 256 << 20
MAX_GROWTH = 64  # characters that a normaliser may make of one
PROBE = "Hello, wörld 12\n"  # that every tokenizer must be able to encode
# A noncharacter, which no text has: literal.py breaks control tokens with it, and a marked text has them between two.
MARK = "\ufdd0"
SPACE = "▁"  # what Metaspace writes for a space

# GGUF's token types
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


# Of o200k, gpt-oss's vocabulary: words by their case, each with an ending such as 'll.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BY_CASE = "".join(
    rf"[^\r\n\p{{L}}\p{{N}}]?{head}{tail}(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    for head, tail in ((f"{_UPPER}*", f"{_LOWER}+"), (f"{_UPPER}+", f"{_LOWER}*"))
)


def _smollm() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _by_regex(
    digits: str, words: str = _CONTRACTIONS, rest: str = _REST
) -> Callable[[], pre_tokenizers.PreTokenizer]:
    def build() -> pre_tokenizers.PreTokenizer:
        pattern = Regex(words + digits + rest)
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(pattern, "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )

    return build


# `tokenizer.ggml.pre`: how text is cut before merging.
PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "smollm": _smollm,
    "gpt-2": _gpt2,
    "llama-bpe": _by_regex(r"\p{N}{1,3}"),
    "qwen2": _by_regex(r"\p{N}"),
    "gpt-4o": _by_regex(r"\p{N}{1,3}", _BY_CASE, _REST.replace(r"[\r\n]*", r"[\r\n/]*", 1)),
}
WHOLE_WORDS = ("llama-bpe", "gpt-4o")  # a word that is a token is not merged
PRE_ALIASES = {"llama3": "llama-bpe", "llama-v3": "llama-bpe", "deepseek-r1-qwen": "qwen2"}


class Tokenizer:
    """One model's tokenizer. `bos_id` is prepended by `encode` when the model wants it."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        bos_id: int | None = None,
        eos_ids: Sequence[int] = (),
        add_bos: bool | None = None,
        strings: list[str] | None = None,
    ) -> None:
        """`add_bos` None leaves it to the backend's own post-processor. `strings` are the tokens' by id, where they are
        known: asking the backend takes as long as making it.
        """
        self._backend = backend
        _check_growth(backend)
        self._strings = _strings_by_id(backend) if strings is None else strings
        added = backend.get_added_tokens_decoder()
        self._added = {i: token.content for i, token in added.items()}
        self._special = frozenset(i for i, token in added.items() if token.special)
        self._byte_of, self._strips_space = _byte_rule(backend)
        self._bytes = tuple(_BytesOf(self, special) for special in (False, True))
        self.bos_id = bos_id
        self.eos_ids = tuple(i for i in dict.fromkeys(eos_ids) if 0 <= i < len(self._strings))
        self.add_bos = add_bos
        self._add_bos = add_bos and bos_id is not None
        self._backend_special = add_bos is None

    @classmethod
    def from_file(
        cls, file: Path, tokenizer_config: Mapping[str, Any] | None = None, eos_ids: Sequence[int] = ()
    ) -> Tokenizer:
        """From tokenizer.json. `tokenizer_config` names special tokens; `eos_ids` are the config's own."""
        config, text = tokenizer_config or {}, read_text(file, MAX_FILE)
        backend = _native(lambda: tokenizers.Tokenizer.from_str(text), str(file))
        backend.no_truncation()  # a saved tokenizer may carry training's limits
        backend.no_padding()
        bos, eos = (_id_of(backend, config.get(name)) for name in ("bos_token", "eos_token"))
        ends = [*eos_ids, *([eos] if eos is not None else [])]
        add_bos = config.get("add_bos_token")
        with naming(file):
            made = cls(backend, bos, ends, add_bos if isinstance(add_bos, bool) else None)
            made.encode(PROBE)
        return made

    @classmethod
    def from_json(
        cls, text: str, bos_id: int | None, eos_ids: Sequence[int], add_bos: bool | None
    ) -> Tokenizer:
        """The twin of a tokenizer elsewhere, from its `to_json` and its fields."""
        return cls(
            _native(lambda: tokenizers.Tokenizer.from_str(text), "a tokenizer"), bos_id, eos_ids, add_bos
        )

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        model = metadata.get("tokenizer.ggml.model")
        if model != "gpt2":
            raise UnsupportedModel(
                f"GGUF tokenizer {model!r} is not supported; supported: gpt2 (byte-level BPE)"
            )
        name = metadata.get("tokenizer.ggml.pre")
        pre = PRE_ALIASES.get(str(name), str(name))
        if pre not in PRE_TOKENIZERS:
            raise UnsupportedModel(
                f"GGUF pre-tokenizer {name!r} is not supported; supported: {', '.join(PRE_TOKENIZERS)}"
            )
        strings, types, merges = _gguf_tables(metadata)
        backend = _native(lambda: _build_bpe(strings, types, merges, pre), "the GGUF tokenizer")
        bos = metadata.get("tokenizer.ggml.bos_token_id")
        add_bos = metadata.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe")
        # add_eos_token is for training: an end after a prompt would end the answer too.
        bos_id = bos if _is_id(bos, strings) else None
        return cls(backend, bos_id, gguf_end_ids(metadata), add_bos is True, strings)

    @property
    def vocab_size(self) -> int:
        return len(self._strings)

    def strings(self) -> list[str]:
        """Every token's string by id ('' where an id has none), for comparing two tokenizers."""
        return list(self._strings)

    def to_json(self) -> str:
        """The whole tokenizer in tokenizer.json's form, for a library that reads its own."""
        return str(self._backend.to_str())

    def token_string(self, token: int) -> str:
        return self._strings[self._checked(token)]

    def added_tokens(self) -> list[AddedToken]:
        """Those that are found in a text before it is cut and merged, special ones and others."""
        return list(self._backend.get_added_tokens_decoder().values())

    def is_special(self, token: int) -> bool:
        return token in self._special

    def encode(self, text: str, special: bool = True, *, parse_special: bool = False) -> list[int]:
        """Token ids of `text`. `special` adds what the model wants around a text (its BOS).

        Only with `parse_special` does the text of a special token inside `text` become that token: a rendered
        chat needs it, a user's own words must not have it.
        """
        if not isinstance(text, str):
            raise InvalidRequest(f"a prompt must be a string, not {type(text).__name__}", "prompt")
        # Lone surrogates have no bytes.
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        backend = self._backend
        if not parse_special and self._special_pattern.search(text):
            backend = self._literal_backend
        # As a batch of one: only for batches does the library let other threads run meanwhile.
        special_too = special and self._backend_special
        ids: list[int] = _native(
            lambda: backend.encode_batch_fast([text], add_special_tokens=special_too)[0].ids,
            "a text with this model's tokenizer",
        )
        return [self.bos_id, *ids] if special and self._add_bos and self.bos_id is not None else ids

    @cached_property
    def _special_pattern(self) -> re.Pattern[str]:
        contents = [re.escape(self._added[i]) for i in self._special if self._added[i]]
        return re.compile("|".join(contents) if contents else r"(?!)")

    @cached_property
    def _literal_backend(self) -> tokenizers.Tokenizer:
        """A twin that reads special tokens' text as plain text. Made only when some text needs it."""
        twin = copy.deepcopy(self._backend)
        twin.encode_special_tokens = True
        return twin

    def token_bytes(self, token: int, special: bool = False) -> bytes:
        """The bytes a token stands for; a special token stands for none unless asked with `special`."""
        if token in self._special:
            return self._added[token].encode() if special else b""
        string = self._strings[self._checked(token)]
        return string.encode() if token in self._added else self._byte_of(string)

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        stream = self.text_stream(skip_special)
        return stream.feed(*map(self._checked, ids)) + stream.finish()

    def text_stream(self, skip_special: bool = True) -> TextStream:
        return TextStream(self._bytes[not skip_special], self._strips_space)

    def marked_stream(self) -> MarkedStream:
        return MarkedStream(self)

    def _checked(self, token: int) -> int:
        if type(token) is not int or not 0 <= token < len(self._strings):
            raise invalid("token id", f"{token!r} is not in the vocabulary of {len(self._strings)}")
        return token


class _BytesOf(dict[int, bytes]):
    """`token_bytes` by id, kept once asked for. An id that stands for nothing has none: models have more of them than
    their tokenizers.
    """

    def __init__(self, tokenizer: Tokenizer, special: bool) -> None:
        self._tokenizer, self._special = tokenizer, special

    def __missing__(self, token: int) -> bytes:
        known = token < self._tokenizer.vocab_size
        self[token] = found = self._tokenizer.token_bytes(token, self._special) if known else b""
        return found


class TextStream:
    """Text from tokens, some at a time. Feeds hold whole characters only; all of them joined are `decode`."""

    def __init__(self, bytes_of: Mapping[int, bytes], strip_space: bool) -> None:
        self._bytes = bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = False  # whether the decoder has the first bytes of a character
        self._strip = strip_space  # until the first byte of text has come

    def feed(self, *tokens: int) -> str:
        data = b"".join(map(self._bytes.__getitem__, tokens))
        if self._strip and data:
            self._strip = False
            data = data.removeprefix(b" ")
        if not self._held:
            try:
                return data.decode()  # whole characters, as nearly always: a fifth of the decoder's time
            except UnicodeDecodeError:
                pass
        text = self._decoder.decode(data)
        self._held = bool(self._decoder.getstate()[0])
        return text

    def finish(self) -> str:
        """What is still held back; a character cut short becomes U+FFFD."""
        return self._decoder.decode(b"", final=True)


class MarkedStream:
    """As a TextStream, with each special token between marks, which no other token can write."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._text = tokenizer, tokenizer.text_stream()

    def feed(self, *tokens: int) -> str:
        return "".join(map(self._one, tokens))

    def _one(self, token: int) -> str:
        if not self._tokenizer.is_special(token):
            return self._text.feed(token).replace(MARK, "\ufffd")
        return f"{self._text.finish()}{MARK}{self._tokenizer.token_string(token)}{MARK}"

    def finish(self) -> str:
        return self._text.finish()


def _native(build: Callable[[], Any], what: str) -> Any:
    """Run the tokenizers library on untrusted data: it raises bare exceptions, and panics below Exception."""
    try:
        return build()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as problem:
        raise BadCheckpoint(f"{what} cannot be read: {problem!s:.300}") from None


def _check_growth(backend: tokenizers.Tokenizer) -> None:
    """Replacements one after the other multiply: a few of them would make gigabytes of a sentence."""
    growth = 1
    for part in _parts(backend.normalizer, "normalizers"):
        growth *= max(1, len(part.get("content", "")))
    if growth > MAX_GROWTH:
        raise UnsupportedModel(
            f"the tokenizer's normaliser makes up to {growth} characters of one; at most {MAX_GROWTH} are read"
        )


def _strings_by_id(backend: tokenizers.Tokenizer) -> list[str]:
    own = backend.get_vocab(with_added_tokens=False)
    if len(set(own.values())) < len(own):
        raise BadCheckpoint("two tokens of the tokenizer have one id")
    vocab = backend.get_vocab(with_added_tokens=True)
    size = max(vocab.values(), default=-1) + 1
    if not 0 < size <= MAX_VOCAB:
        raise BadCheckpoint(f"a tokenizer with token ids up to {size - 1} cannot be right")
    strings = [""] * size
    for string, token in vocab.items():
        strings[token] = string
    return strings


def _id_of(backend: tokenizers.Tokenizer, token: Any) -> int | None:
    """Id of a special token as tokenizer_config.json names it: a string, or an object with `content`."""
    content = token.get("content") if isinstance(token, dict) else token
    if not isinstance(content, str) or re.search("[\ud800-\udfff]", content):  # half characters have no bytes
        return None
    return backend.token_to_id(content)


def _is_id(value: Any, strings: Sequence[str]) -> bool:
    return type(value) is int and 0 <= value < len(strings)


def _gguf_tables(metadata: Mapping[str, Any]) -> tuple[list[str], list[int], list[tuple[str, str]]]:
    strings = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(strings, list) or not strings or not isinstance(strings[0], str):
        raise BadCheckpoint("the GGUF metadata has no list of tokens")
    if len(strings) > MAX_VOCAB:
        raise BadCheckpoint(f"a tokenizer of {len(strings)} tokens cannot be right")
    types = metadata.get("tokenizer.ggml.token_type", [1] * len(strings))
    if not isinstance(types, list) or len(types) != len(strings):
        raise BadCheckpoint("the GGUF metadata's list of token types is not as long as its list of tokens")
    pairs = metadata.get("tokenizer.ggml.merges")
    if not isinstance(pairs, list) or (pairs and not isinstance(pairs[0], str)):
        raise BadCheckpoint("the GGUF metadata has no list of merges")
    merges = []
    for pair in pairs:
        left, space, right = pair.partition(" ")
        if not (left and space and right):
            raise BadCheckpoint(f"the merge {pair!r:.60} in the GGUF metadata is not a pair")
        merges.append((left, right))
    return strings, types, merges


def _build_bpe(
    strings: list[str], types: list[int], merges: list[tuple[str, str]], pre: str
) -> tokenizers.Tokenizer:
    vocab = {string: i for i, string in enumerate(strings)}
    if len(vocab) != len(strings):
        twice = next(s for i, s in enumerate(strings) if vocab[s] != i)
        raise BadCheckpoint(f"the token {twice!r:.60} appears twice in the GGUF vocabulary")
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=pre in WHOLE_WORDS))
    backend.pre_tokenizer = PRE_TOKENIZERS[pre]()
    backend.decoder = tokenizers.decoders.ByteLevel()
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    for special, kinds in ((True, (UNKNOWN, CONTROL)), (False, (USER_DEFINED,))):
        contents = [s for s, kind in zip(strings, types, strict=True) if kind in kinds and s]
        backend.add_tokens([AddedToken(s, special=special, normalized=False) for s in contents])
    return backend


def _byte_rule(backend: tokenizers.Tokenizer) -> tuple[Callable[[str], bytes], bool]:
    """How a token's string becomes bytes, and whether a text's first space is an artefact to drop."""
    decoder = _parts(backend.decoder, "decoders")
    kinds = [part["type"] for part in decoder]
    if kinds == ["ByteLevel"]:
        return _byte_level, False
    if not decoder or not set(kinds) <= {"Metaspace", "Replace", "ByteFallback", "Fuse", "Strip"}:
        raise UnsupportedModel(
            f"the tokenizer's decoder {kinds or 'none'} is not supported (ByteLevel or Metaspace)"
        )
    strips = False
    for part in decoder:
        if part["type"] == "Replace" and (part["pattern"], part["content"]) != ({"String": SPACE}, " "):
            raise UnsupportedModel(
                f"the tokenizer's decoder replaces {part['pattern']}; only {SPACE!r} is known"
            )
        if part["type"] == "Metaspace":
            strips = part.get("prepend_scheme", "always") != "never"
        if part["type"] == "Strip":
            strips = part["content"] == " " and part["start"] > 0
    return _metaspace_rule("ByteFallback" in kinds), strips


def _parts(component: Any, inside: str) -> list[dict[str, Any]]:
    """Parts of a tokenizer's component in order; `inside` is what a sequence calls those within it."""
    if component is None:
        return []
    # A component has no readable fields, but its pickled state is the JSON of tokenizer.json.
    waiting, found = [json.loads(component.__getstate__())], []
    while waiting:
        state = waiting.pop(0)
        if state["type"] == "Sequence":
            waiting[:0] = state[inside]
        else:
            found.append(state)
    return found


def _alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte: itself if printable in Latin-1, else from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTES = _alphabet()


def _byte_level(string: str) -> bytes:
    try:
        return bytes([_BYTES[char] for char in string])
    except KeyError:  # not spelt in the alphabet: it stands for itself
        return string.encode()


def _metaspace_rule(byte_fallback: bool) -> Callable[[str], bytes]:
    def rule(string: str) -> bytes:
        if byte_fallback and (match := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", string)):
            return bytes([int(match[1], 16)])
        return string.replace(SPACE, " ").encode()

    return rule
