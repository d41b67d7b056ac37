"""What people write stays text: nothing in a message, a role, a name or a tool becomes a control token.

A chat template writes control tokens by their strings, and the tokenizer finds them in the rendered text. So before
rendering, wherever such a string stands in what a client sent (or begins at its end, or ends at its start, where a
neighbour could complete it), a mark breaks it. The tokenizer then finds the template's own control tokens only, and
takes the marks out of the text between them. A conversation without such strings, which is nearly every one, gets no
mark and is rendered and tokenized as it always was.

An assistant's own words may hold the tokens that models write as text, such as `<think>` and `<tool_call>`: those are
not special. Special ones are text there, too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import tokenizers
from tokenizers import normalizers

from outrider.errors import InvalidRequest, TemplateFailed
from outrider.load.template import ChatTemplate
from outrider.load.tokenizer import MARK, Tokenizer

ASSISTANT = "assistant"
STAND_IN = "qvxjzkw"  # for words that are still to be written; in no text and no template


class ChatEncoder:
    """Conversations as token ids, for one model. `special_in_text`: control tokens may be written by anyone."""

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer, special_in_text: bool = False) -> None:
        self.template, self.tokenizer, self.special_in_text = template, tokenizer, special_in_text
        added = tokenizer.added_tokens()
        special = [token.content for token in added if token.special]
        # Of the others, those that mean something to the template: a model may have tokens for HTML's tags, too.
        named = [t.content for t in added if t.content in template.source or t.content.startswith("<|")]
        self._special, self._control = _Breaker(special), _Breaker({*special, *named})

    @classmethod
    def of(
        cls, template: ChatTemplate | None, tokenizer: Tokenizer, special_in_text: bool
    ) -> ChatEncoder | None:
        return None if template is None else cls(template, tokenizer, special_in_text)

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        variables: Mapping[str, Any] | None = None,
        ask: bool = True,
        go_on: bool = False,
        check: Callable[[str], None] | None = None,
    ) -> list[int]:
        """`ask` opens the answer's turn; `go_on` leaves the last message open instead; `check` may refuse the text
        before it is tokenized.
        """
        text, sent, marked = self._rendered(messages, tools, dict(variables or {}), ask and not go_on)
        if go_on:
            text = _up_to_last(text, sent)
        if check is not None:
            check(text)
        return self._encode_marked(text) if marked else self._encode_plain(text)

    def open_turn(self, messages: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """The conversation up to where the words of the user's next turn begin: a model goes on with such a turn."""
        stand_in = {"role": "user", "content": STAND_IN}
        text, _, marked = self._rendered([*messages, stand_in], None, {}, False)
        at = text.rfind(STAND_IN)
        if at < 0:
            raise InvalidRequest("the chat template does not show what users say as they say it", "messages")
        return self._encode_marked(text[:at]) if marked else self._encode_plain(text[:at])

    def _rendered(
        self, messages: Sequence[Mapping[str, Any]], tools: Any, extra: Mapping[str, Any], ask: bool
    ) -> tuple[str, Sequence[Mapping[str, Any]], bool]:
        """The text, the messages that are in it, and whether those have marks."""
        marked = False
        if not self.special_in_text:
            shown = [self._broken_message(m) for m in messages] if _is_list(messages) else messages
            sent = (shown, self._control.broken(tools), self._control.broken(extra))
            marked = sent != (messages, tools, extra)
            if marked:
                messages, tools, extra = sent
        try:
            text = self.template.render(messages, tools, add_generation_prompt=ask, **extra)
        except TemplateFailed as failed:
            raise TemplateFailed(str(failed).replace(MARK, ""), failed.param) from None
        return text, messages, marked

    def _encode_plain(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, special=False, parse_special=True)

    def _encode_marked(self, text: str) -> list[int]:
        return self._marked_tokenizer.encode(text, special=False, parse_special=True)

    def _broken_message(self, message: Any) -> Any:
        if not isinstance(message, Mapping):
            return message  # for the template's own check to refuse
        own = ("content", "reasoning_content", "thinking") if message.get("role") == ASSISTANT else ()
        return {
            self._control.broken(key): (self._special if key in own else self._control).broken(value)
            for key, value in message.items()
        }

    @cached_property
    def _marked_tokenizer(self) -> Tokenizer:
        """A twin that finds control tokens before it takes marks out, and none after. Made when a text needs it."""
        own = self.tokenizer
        raw = json.loads(own.to_json())
        for token in raw["added_tokens"]:
            token["normalized"] = False  # else it would be looked for in what the marks were taken out of
        backend = tokenizers.Tokenizer.from_str(json.dumps(raw))
        taken = normalizers.Replace(MARK, "")
        backend.normalizer = (
            taken if backend.normalizer is None else normalizers.Sequence([taken, backend.normalizer])
        )
        return Tokenizer(backend, own.bos_id, own.eos_ids, own.add_bos)


class _Breaker:
    """Marks some words wherever they stand, in any case: a template may change it."""

    def __init__(self, words: Iterable[str]) -> None:
        known = sorted({w for w in words if len(w) > 1 and not w.isspace()})
        starts = "".join(sorted({re.escape(c) for w in known for c in _cases(w[0])}))
        self._first = re.compile(f"[{starts}]" if known else "(?!)")
        self._word = re.compile(_trie(known), re.I)
        folded = [w.lower() for w in known]
        self._heads = frozenset(w[:i] for w in folded for i in range(1, len(w)))
        self._tails = frozenset(w[i:] for w in folded for i in range(1, len(w)))
        self._edge = max(map(len, folded), default=1) - 1
        self._ends = frozenset(part[-1] for part in self._heads)
        self._starts = frozenset(part[0] for part in self._tails)

    def broken(self, value: Any) -> Any:
        """The same with every text in it marked where it must be."""
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, Mapping):
            return {self.broken(key): self.broken(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.broken(item) for item in value]
        return value

    def _text(self, text: str) -> str:
        cuts = {at.start() + 1 for at in self._first.finditer(text) if self._word.match(text, at.start())}
        cuts |= self._edges(text)
        if not cuts:
            return text
        pieces, before = [], 0
        for cut in sorted(cuts):
            pieces.append(text[before:cut])
            before = cut
        return MARK.join([*pieces, text[before:]])

    def _edges(self, text: str) -> set[int]:
        """Where the text ends with the head of a word, or starts with the tail of one. Templates trim space."""
        cuts = set()
        end, start = len(text.rstrip()), len(text) - len(text.lstrip())
        if end and text[end - 1].lower() in self._ends:
            last = text[max(0, end - self._edge) : end].lower()
            if any(last[-n:] in self._heads for n in range(1, len(last) + 1)):
                cuts.add(end)
        if start < len(text) and text[start].lower() in self._starts:
            first = text[start : start + self._edge].lower()
            if any(first[:n] in self._tails for n in range(1, len(first) + 1)):
                cuts.add(start)
        return cuts


def _cases(char: str) -> set[str]:
    return {char, char.lower(), char.upper()}


def _trie(words: Sequence[str]) -> str:
    """An expression for any of the words that takes a step a character, however many there are."""
    tree: dict[str, Any] = {}
    for word in words:
        node = tree
        for char in word:
            node = node.setdefault(char, {})
        node[""] = {}
    return _branches(tree) if tree else "(?!)"


def _branches(node: dict[str, Any]) -> str:
    if "" in node:
        return ""  # a word ends here: whether a longer one follows does not matter
    parts = []
    for char, below in node.items():
        tail = re.escape(char)
        while len(below) == 1 and "" not in below:
            ((char, below),) = below.items()
            tail += re.escape(char)
        parts.append(tail + _branches(below))
    return parts[0] if len(parts) == 1 else f"(?:{'|'.join(parts)})"


def _is_list(messages: Any) -> bool:
    return isinstance(messages, (list, tuple))


def _up_to_last(text: str, messages: Sequence[Mapping[str, Any]]) -> str:
    """The rendered text without what the template puts after the last message's words."""
    content = messages[-1].get("content")
    words = content.strip() if isinstance(content, str) else ""
    end = text.rfind(words) if words else -1
    if end < 0:
        raise InvalidRequest("the last message has no text to continue", "continue_final_message")
    return text[: end + len(words)]
