"""The model as the API process knows it: its tokenizer, its chat template, its limits. No weights, no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from outrider.errors import InvalidRequest
from outrider.load.literal import ChatEncoder
from outrider.load.sampling import SamplingDefaults
from outrider.load.template import ChatTemplate, renderers
from outrider.load.tokenizer import Tokenizer
from outrider.serve.length import bytes_of_tokens, check_length
from outrider.serve.link import Ready
from outrider.serve.tools import choose_format

# What a template is given by the server itself: a request's own variables may not take these names.
RESERVED = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token", "tokenize", "self"}
)
CUT = 4  # contexts; the longest text that is tokenized only to be cut, or counted


class ServedModel:
    def __init__(self, name: str, ready: Ready) -> None:
        self.name = name
        self.tokenizer = Tokenizer.from_json(ready.tokenizer, ready.bos_id, ready.eos_ids, ready.add_bos)
        self.template = ChatTemplate.for_tokenizer(ready.template, self.tokenizer)
        if self.template is not None:
            renderers.prepare()  # the first conversation must not wait for it
        self._chats = ChatEncoder.of(self.template, self.tokenizer, ready.special_tokens_in_text)
        self.tokens = frozenset(self.tokenizer.strings())
        self.tool_format = choose_format(ready.template, ready.family)
        self.vocab, self.context = ready.vocab, ready.context
        self.longest = min(ready.context, ready.cache_tokens)  # prompt and answer together
        # No text of more fits.
        self.most_bytes = bytes_of_tokens(self.tokenizer, ready.tokenizer, self.longest)
        self.drafter, self.drafters, self.plan = ready.drafter, ready.drafters, ready.plan
        self.sampling = SamplingDefaults(ready.sampling)

    def chat_ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        variables: Mapping[str, Any] | None = None,
        ask: bool = True,
        go_on: bool = False,
        cut: bool = False,
    ) -> list[int]:
        """A conversation as token ids. `ask` opens the answer's turn; `go_on` continues the last message; `cut`: it
        need not fit, for it will be cut.
        """
        if self._chats is None:
            raise InvalidRequest("this model has no chat template; use /v1/completions", "messages")
        extra = dict(variables or {})
        if taken := RESERVED.intersection(extra):
            raise InvalidRequest(f"{min(taken)!r} cannot be set", "chat_template_kwargs")
        return self._chats.encode(
            messages, tools, extra, ask, go_on, lambda text: self.check_length(text, cut, "messages")
        )

    def check_length(self, text: str, cut: bool, param: str) -> None:
        """Before a text is tokenized: refuse it where it is certainly too long."""
        contexts = CUT if cut else 1
        most = None if self.most_bytes is None else contexts * self.most_bytes
        check_length(text, self.tokenizer, contexts * self.longest, most, param)

    def text_ids(self, text: str, cut: bool = False, special: bool = True) -> list[int]:
        self.check_length(text, cut, "prompt")
        return self.tokenizer.encode(text, special)

    def token_text(self, token: int) -> tuple[str, list[int]]:
        """How a token reads on its own, and its bytes; a model may have ids that stand for nothing."""
        known = token < self.tokenizer.vocab_size
        data = self.tokenizer.token_bytes(token, special=True) if known else b""
        return data.decode("utf-8", "replace"), list(data)
