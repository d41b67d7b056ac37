"""Checks prompts and messages from Python, and whole requests. Each refusal names the field that is wrong."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from typing import Any

from outrider.errors import InvalidRequest, suggest
from outrider.types import Request


def check_request(request: Request, vocab: int, context: int, slots: int, drafters: Iterable[str]) -> None:
    """`slots`: tokens that the KV cache holds."""
    prompt, params = len(request.prompt_ids), request.params
    if not prompt:
        raise InvalidRequest("the prompt is empty; give at least one token", "prompt")
    _check_ids(request, vocab)
    if prompt >= context:
        raise InvalidRequest(
            f"the prompt has {prompt} tokens; this model's maximum context length is {context} tokens",
            "prompt",
        )
    if prompt + params.max_tokens > context:
        raise InvalidRequest(
            f"max_tokens {params.max_tokens} and a prompt of {prompt} tokens together exceed this model's "
            f"maximum context length of {context} tokens; ask for at most {context - prompt}",
            "max_tokens",
        )
    if prompt + params.max_tokens > slots:
        raise InvalidRequest(
            f"the request may need {prompt + params.max_tokens} tokens of cache; there is room for "
            f"{slots}: raise cache_bytes or lower max_tokens",
            "max_tokens",
        )
    asked, known = params.speculation.drafter, list(drafters)
    if asked not in (None, "none", *known):
        raise InvalidRequest(f"unknown drafter {asked!r}{suggest(str(asked), known)}", "drafter")
    if len(request.prediction_ids) > context:
        raise InvalidRequest(
            f"the prediction has {len(request.prediction_ids)} tokens; this model's maximum context length is "
            f"{context} tokens",
            "prediction",
        )


def _check_ids(request: Request, vocab: int) -> None:
    params = request.params
    if bad := [t for t in request.prompt_ids if not 0 <= t < vocab]:
        raise InvalidRequest(f"token id {bad[0]} is outside the vocabulary of {vocab}", "prompt")
    for name, ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
        if bad := [t for t in ids if not 0 <= t < vocab]:
            raise InvalidRequest(f"{name}: token id {bad[0]} is outside the vocabulary of {vocab}", name)


Prompt = str | Seq[int]
Message = Mapping[str, Any]

BYTES = (bytes, bytearray, memoryview)


def as_list(prompts: Prompt | Seq[Prompt]) -> list[Prompt]:
    """One prompt (a string or token ids) or many -> many."""
    if isinstance(prompts, str):
        return [prompts]
    many = plain_list(prompts)
    if many is None:
        raise InvalidRequest(
            "prompts must be a text, a list of token ids, or a list of those, "
            f"not {type(prompts).__name__}{' (decode it first)' if isinstance(prompts, BYTES) else ''}",
            "prompts",
        )
    return [many] if many and isinstance(many[0], int) else many


def plain_list(value: Any) -> list[Any] | None:
    """A list of a list, tuple, range, array or tensor; None for anything else, bytes included."""
    if isinstance(value, (*BYTES, str, Mapping)):
        return None
    if hasattr(value, "tolist"):  # an array or tensor
        value = value.tolist()
    if not isinstance(value, Seq):
        return None
    return [item.tolist() if hasattr(item, "dtype") else item for item in value]


def check_messages(messages: Any) -> None:
    if not isinstance(messages, (list, tuple)):
        raise InvalidRequest(
            'messages must be a list such as [{"role": "user", "content": "..."}], or a list of those, '
            f"not {type(messages).__name__}",
            "messages",
        )
