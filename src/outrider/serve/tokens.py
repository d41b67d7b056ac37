"""`/tokenize` and `/detokenize`: text to token ids and back."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from outrider.errors import InvalidRequest
from outrider.serve.chat import chat_ids
from outrider.serve.model import CUT
from outrider.serve.replies import TokenIds, TokenText
from outrider.serve.request import Reply, Request
from outrider.serve.routes import post
from outrider.serve.tools import ToolRequest
from outrider.serve.wire import ChatRequest, DetokenizeRequest, TokenizeRequest, check_messages


async def tokenize(request: Request) -> Response:
    asked = await request.read(TokenizeRequest)
    model = request.chosen.model
    if (asked.prompt is None) == (asked.messages is None):
        raise InvalidRequest("give a prompt or messages", "prompt")
    if asked.prompt is not None:
        ids = await request.in_pool(model.text_ids, asked.prompt, cut=True, special=asked.add_special_tokens)
    else:
        check_messages(asked.messages or (), "messages")
        chat = ChatRequest(
            messages=asked.messages or [],
            add_generation_prompt=asked.add_generation_prompt,
            truncate_prompt_tokens=1,
        )
        ids = await request.in_pool(chat_ids, model, chat, ToolRequest("none"))
    body: dict[str, Any] = {"tokens": ids, "count": len(ids), "max_model_len": model.longest}
    if asked.return_token_strs:
        body["token_strs"] = await request.in_pool(list, map(model.tokenizer.token_string, ids))
    return Reply(body)


async def detokenize(request: Request) -> Response:
    asked = await request.read(DetokenizeRequest)
    model = request.chosen.model
    if len(asked.tokens) > CUT * model.longest:
        raise InvalidRequest(
            f"tokens: {len(asked.tokens)} given, at most {CUT * model.longest} are read", "tokens"
        )
    try:
        return Reply(
            {"prompt": await request.in_pool(model.tokenizer.decode, asked.tokens, skip_special=False)}
        )
    except InvalidRequest as error:
        raise InvalidRequest(str(error), "tokens") from None


ROUTES = (
    post("/tokenize", tokenize, TokenizeRequest, "Text to token ids.", TokenIds),
    post("/detokenize", detokenize, DetokenizeRequest, "Token ids to text.", TokenText),
)
