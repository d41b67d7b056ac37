"""The routes, and what every request passes on its way to one: host, key, limits, errors, headers, log."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from outrider import __version__
from outrider.errors import InvalidRequest
from outrider.serve.asgi import Ask, ClientGone, Events, Receive, Reply, Send
from outrider.serve.backend import Backend, Stream
from outrider.serve.call import Call, Dialect, Options
from outrider.serve.chat import Chat
from outrider.serve.completions import Completions, read_prompts
from outrider.serve.errors import ApiError, from_invalid
from outrider.serve.keys import Keyring, Limiter
from outrider.serve.limits import check_schema, read_json
from outrider.serve.metrics import PREFIX, Metrics
from outrider.serve.model import ServedModel, shown_name
from outrider.serve.openapi import document
from outrider.serve.responses import Responses, as_chat
from outrider.serve.settings import ServeSettings
from outrider.serve.tools import ToolRequest, check_tools, with_tools
from outrider.serve.tools import grammar_of as tool_grammar
from outrider.serve.wire import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    ResponsesRequest,
    Sampling,
    StreamOptions,
    T,
    TokenizeRequest,
    grammar_of,
    read_request,
    sampling_params,
    sent_as,
    wants_stats,
)
from outrider.types import SamplingParams

log = logging.getLogger(__name__)

R = TypeVar("R")
Route = Callable[["App", Ask], Awaitable[Reply | Events]]
OPEN = frozenset({"/health", "/ping"})  # no key needed: whoever watches the server has none


class App:
    """An ASGI application."""

    def __init__(
        self,
        backend: Backend,
        settings: ServeSettings,
        defaults: SamplingParams,
        keys: Keyring,
        metrics: Metrics,
        length: int | None = None,
        given: Collection[str] = (),
    ) -> None:
        """`length`: how long an answer may become that no length was asked for; None: as long as there is room.

        `given`: which of `defaults` the operator set; the others yield to the model's own.
        """
        self.backend, self.settings, self.length = backend, settings, length
        self._defaults, self._given = defaults, given
        self.keys, self.metrics = keys, metrics
        self.limiter = Limiter()
        self.draining = False
        self.begun = time.time()

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        ask = Ask(scope, receive)
        started = False

        async def tell(message: Any) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        status = 499  # the client was gone before an answer began
        try:
            answer = await self._answer(ask)
            status = answer.status
            writing = answer.write(tell, self._headers(ask))
            await (writing if isinstance(answer, Reply) else while_there(ask, writing))
        except ClientGone:
            self.metrics.count("client_disconnects")
        except Exception:
            status = 500
            log.exception("a request failed", extra={"facts": {"id": ask.id, "path": ask.path}})
            if not started:
                await Reply(_unexpected().body(), 500).write(tell, self._headers(ask))
        finally:
            self._settle(ask)
            self._record(ask, status)

    async def _answer(self, ask: Ask) -> Reply | Events:
        """The route's answer, or the error to tell."""
        try:
            if reply := self._stop_at_door(ask):
                return reply
            methods = ROUTES.get(ask.path) or (ONE_MODEL if ask.path.startswith("/v1/models/") else None)
            if methods is None:
                raise ApiError(404, f"there is no {ask.path}", code="not_found")
            method = "GET" if ask.method == "HEAD" else ask.method
            if method not in methods:
                known = ", ".join(methods)
                wrong = ApiError(405, f"{ask.path} takes {known}", code="method_not_allowed")
                return Reply(wrong.body(), 405, {**wrong.headers(), "allow": known})
            return await methods[method](self, ask)
        except InvalidRequest as error:
            return _refusal(from_invalid(error))
        except ApiError as error:
            return _refusal(error)

    # ---------------------------------------------------------------------------------------- at the door

    def _stop_at_door(self, ask: Ask) -> Reply | None:
        if not self.settings.accepts_host(ask.headers.get("host")):
            raise ApiError(403, "this host name is not served here", code="host_not_allowed")
        if ask.method == "OPTIONS" and "origin" in ask.headers:
            return Reply(b"", 204)
        if not self._accepts_origin(ask):
            raise ApiError(403, "pages of this origin are not served", code="origin_not_allowed")
        if ask.path not in OPEN and not self.keys.open:
            ask.key = self.keys.check(ask.headers.get("authorization"))
            if ask.key is None:
                raise ApiError(401, "a valid API key is needed", code="invalid_api_key")
        return None

    def _accepts_origin(self, ask: Ask) -> bool:
        """A browser says which page asks. Another site's page could not read the answer, but it could have a
        local server without keys work for nothing.
        """
        origin = ask.headers.get("origin")
        if origin is None or ask.method in ("GET", "HEAD") or self._allows(origin):
            return True
        return (
            origin.partition("://")[2] == ask.headers.get("host")
            or ask.headers.get("authorization") is not None
        )

    def _allows(self, origin: str) -> bool:
        return origin in self.settings.cors_origins or "*" in self.settings.cors_origins

    def _headers(self, ask: Ask) -> dict[str, str]:
        headers = {"x-request-id": ask.id, "x-content-type-options": "nosniff"}
        origin = ask.headers.get("origin")
        if origin and self._allows(origin):
            headers |= {
                "access-control-allow-origin": origin,
                "access-control-allow-methods": "GET, POST, OPTIONS",
                "access-control-allow-headers": "authorization, content-type, x-request-id",
                "access-control-expose-headers": "x-request-id, retry-after",
                "vary": "origin",
            }
        return headers

    def _record(self, ask: Ask, status: int) -> None:
        known = ask.path in ROUTES
        self.metrics.count("http_requests", route=ask.path if known else "other", status=str(status))
        facts = {
            "method": ask.method,
            "path": ask.path[:200],
            "status": status,
            "ms": round(1000 * (time.perf_counter() - ask.arrived), 1),
            "id": ask.id,
            **({"key": ask.key.name} if ask.key else {}),
            **ask.facts,
        }
        log.log(logging.DEBUG if ask.path in OPEN else logging.INFO, "request", extra={"facts": facts})

    # -------------------------------------------------------------------------------------------- answering

    async def _read(self, ask: Ask, kind: type[T]) -> T:
        media = ask.headers.get("content-type", JSON).partition(";")[0].strip().lower()
        if media != JSON:
            raise ApiError(415, f"the body must be sent as {JSON}", code="unsupported_media_type")
        body = await ask.body(self.settings.max_body_bytes, self.settings.body_timeout)
        if len(body) > LONG_BODY:
            value = await asyncio.to_thread(read_json, body, self.settings.max_depth)
        else:
            value = read_json(body, self.settings.max_depth)
        asked = read_request(value, kind)
        name = getattr(asked, "model", None)
        if name is not None and name not in self.names:
            raise ApiError(
                404, f"the model {name!r} is not served here; {self.names[0]!r} is", param="model",
                code="model_not_found",
            )  # fmt: skip
        if self.draining:
            raise ApiError(503, "the server is shutting down", code="draining", after=5)
        return asked

    @property
    def names(self) -> list[str]:
        """What the model may be called, first the name it is shown by."""
        own = self.backend.start.model
        return list(dict.fromkeys(filter(None, (self.settings.served_name, shown_name(own), own))))

    @property
    def defaults(self) -> SamplingParams:
        """Of requests that leave something open."""
        return self.model.sampling.under(self._defaults, self._given)

    @property
    def model(self) -> ServedModel:
        if self.backend.model is None or self.backend.state != "ready":
            raise ApiError(503, "the model is still being loaded", code="loading", after=2)
        return self.backend.model

    async def answer(
        self,
        ask: Ask,
        asked: Sampling | ResponsesRequest,
        prompts: list[tuple[list[int], SamplingParams]],
        prefix: str,
        make: Callable[[Call], Dialect],
    ) -> Reply | Events:
        """Run the prompts and write what comes in the dialect that `make` makes."""
        _check_scores(prompts)
        self._admit(ask, sum(len(prompt) + params.n * params.max_tokens for prompt, params in prompts))
        deadline = asyncio.get_running_loop().time() + self.settings.request_timeout
        try:
            owner = self._owner(ask, getattr(asked, "cache_salt", None))
            ask.stream = await while_there(ask, self.backend.open(prompts, owner, deadline))
        except ApiError as error:
            error.param = sent_as(error.param, asked)
            raise
        name = prefix + hashlib.sha256(f"{ask.id} {ask.stream.jobs[0].id}".encode()).hexdigest()[:24]
        options = self._options(asked)
        ask.call = Call(name, self.model, self.names[0], ask.stream.jobs, options, self.metrics, ask.arrived)
        dialect = make(ask.call)
        if asked.stream:
            return Events(dialect, ask.stream, self.settings, deadline)
        return Reply(await while_there(ask, self._whole(dialect, ask.stream, deadline)))

    async def _whole(self, dialect: Dialect, stream: Stream, deadline: float) -> dict[str, Any]:
        async for batch in stream.batches(deadline, 0.0):
            for index, piece in batch:
                dialect.feed(index, piece)
        return dialect.body()

    def _admit(self, ask: Ask, tokens: int) -> None:
        if ask.key is None:
            return
        refusal = self.limiter.admit(ask.key, tokens)
        if refusal is not None:
            self.metrics.count("admission_rejections", reason="key_limit")
            status, after = (400, None) if refusal.final else (429, refusal.seconds)
            raise ApiError(status, refusal.reason, code="rate_limit_exceeded", after=after)
        ask.reserved = tokens

    def _settle(self, ask: Ask) -> None:
        """Give back what a request held, however it ended."""
        if ask.stream is not None:
            ask.stream.close()
        used = 0
        if ask.call is not None:
            usage = ask.call.usage()
            used = usage["total_tokens"]
            ask.facts |= {name: usage[name] for name in ("prompt_tokens", "completion_tokens")}
            if self.settings.log_prompts:
                ask.facts |= ask.call.said()
        if ask.key is not None and ask.reserved is not None:
            self.limiter.done(ask.key, max(0, ask.reserved - used))

    def _owner(self, ask: Ask, salt: str | None) -> str:
        """Whose cache entries a request may use: its key's, and of those only the ones with the same salt."""
        owner = ask.key.owner if ask.key else ""
        return f"{owner}:{hashlib.sha256(salt.encode()).hexdigest()}" if salt else owner

    def _options(self, asked: Sampling | ResponsesRequest) -> Options:
        how = asked.stream_options or StreamOptions()
        padding = self.settings.stream_padding if how.include_obfuscation is None else how.include_obfuscation
        return Options(
            usage=bool(how.include_usage or how.continuous_usage_stats),
            running_usage=bool(how.continuous_usage_stats),
            padding=padding,
            stats=wants_stats(asked.speculative_decoding),
            token_ids=bool(getattr(asked, "return_token_ids", None)),
        )

    def _fitted(
        self,
        asked: Sampling | ResponsesRequest,
        prompt: list[int],
        params: SamplingParams,
        length: int | None,
    ) -> tuple[list[int], SamplingParams]:
        """A prompt and its parameters, once both fit the model: `length` tokens, or as many as there is room for."""
        cut, least = getattr(asked, "truncate_prompt_tokens", None), getattr(asked, "min_tokens", None)
        prompt = prompt[-cut:] if cut else prompt
        longest = self.model.longest
        room = longest - len(prompt)
        wanted = length if length is not None else max(1, min(room, self.length or room))
        if room < 1 or wanted > room:
            raise ApiError(
                400,
                f"this model's maximum context length is {longest} tokens, but {len(prompt) + wanted} were asked "
                f"for: {len(prompt)} in the prompt and {wanted} for the answer; shorten one of them",
                param=sent_as("prompt" if room < 1 else "max_tokens", asked),
                code="context_length_exceeded",
            )
        if wanted < 1 and not getattr(asked, "echo", None):
            name = sent_as("max_tokens", asked)
            hint = ", or 0 together with echo" if hasattr(asked, "echo") else ""
            raise InvalidRequest(f"{name} must be at least 1{hint}", name)
        least = min(params.min_tokens, wanted) if least is None else least
        return prompt, replace(params, max_tokens=max(1, wanted), min_tokens=least)

    # ------------------------------------------------------------------------------------------- completions

    async def chat(self, ask: Ask) -> Reply | Events:
        asked = await self._read(ask, ChatRequest)
        if len(asked.messages) > self.settings.max_messages:
            raise InvalidRequest(f"at most {self.settings.max_messages} messages are allowed", "messages")
        tools = check_tools(asked.tools, asked.tool_choice, asked.parallel_tool_calls)
        params = sampling_params(asked, self.defaults, self.settings, self._tool_grammar(asked, tools))
        if asked.logprobs:
            params = replace(params, logprobs=asked.top_logprobs or 0)
        elif asked.top_logprobs:
            raise InvalidRequest("top_logprobs needs logprobs to be true", "top_logprobs")
        prompt = await asyncio.to_thread(self._chat_ids, asked, tools)
        length = asked.max_tokens if asked.max_completion_tokens is None else asked.max_completion_tokens
        fitted = self._fitted(asked, prompt, params, length)
        return await self.answer(
            ask, asked, [fitted], "chatcmpl-", lambda call: Chat(call, tools, bool(asked.logprobs))
        )

    def _chat_ids(self, asked: ChatRequest, tools: ToolRequest) -> list[int]:
        """On a thread: a template may take its time."""
        model = self.model
        source = "" if model.template is None else model.template.source
        messages = asked.messages
        if "developer" not in source:  # OpenAI's later name for the system's role
            messages = [{**m, "role": "system"} if m.get("role") == "developer" else m for m in messages]
        messages, shown = with_tools(messages, tools.shown, model.tool_format, source)
        return model.chat_ids(
            messages,
            shown,
            asked.chat_template_kwargs,
            ask=asked.add_generation_prompt is not False,
            go_on=asked.continue_final_message is True,
        )

    def _tool_grammar(self, asked: ChatRequest, tools: ToolRequest) -> dict[str, str] | None:
        forced = tool_grammar(tools, self.model.tool_format, self.model.tokens) if tools.allowed else None
        if forced is not None:
            self._check_tool_schemas(tools, forced["lark"])
        if tools.allowed and grammar_of(asked, self.settings) is not None:
            raise InvalidRequest(
                "a form for the answer leaves no room for tool calls; set tool_choice to 'none'",
                "response_format",
            )
        return forced

    def _check_tool_schemas(self, tools: ToolRequest, grammar: str) -> None:
        """What is compiled for tools has the limits of what is compiled for answers."""
        most, deepest = self.settings.max_schema_bytes, self.settings.max_depth
        for function in tools.allowed:
            check_schema(function.parameters or {}, most, deepest, f"tools.{function.name}.parameters")
        if len(grammar) > most:
            raise InvalidRequest(f"together the tools have more than {most} bytes to be held to", "tools")

    async def completions(self, ask: Ask) -> Reply | Events:
        asked = await self._read(ask, CompletionRequest)
        params = sampling_params(asked, self.defaults, self.settings, None)
        echo, scored = bool(asked.echo), asked.logprobs is not None
        if scored:
            params = replace(
                params, logprobs=asked.logprobs, prompt_logprobs=asked.logprobs if echo else None
            )
        model, most = self.model, self.settings.max_prompts
        prompts = await asyncio.to_thread(read_prompts, asked.prompt, model, most)
        if len(prompts) * params.n > MOST_ANSWERS:
            raise InvalidRequest(f"n times the number of prompts may be at most {MOST_ANSWERS}", "n")
        length = self.length or COMPLETION_LENGTH if asked.max_tokens is None else asked.max_tokens
        fitted = [self._fitted(asked, prompt, params, length) for prompt in prompts]
        return await self.answer(
            ask, asked, fitted, "cmpl-", lambda call: Completions(call, echo, scored, silent=length == 0)
        )

    async def responses(self, ask: Ask) -> Reply | Events:
        asked = await self._read(ask, ResponsesRequest)
        chat = as_chat(asked)
        if len(chat.messages) > self.settings.max_messages:
            raise InvalidRequest(f"at most {self.settings.max_messages} input items are allowed", "input")
        wanted = check_tools(chat.tools, chat.tool_choice, chat.parallel_tool_calls)
        params = sampling_params(chat, self.defaults, self.settings, self._tool_grammar(chat, wanted))
        scored = "message.output_text.logprobs" in (asked.include or ()) or bool(asked.top_logprobs)
        if scored:
            params = replace(params, logprobs=asked.top_logprobs or 0)
        prompt = await asyncio.to_thread(self._chat_ids, chat, wanted)
        fitted = self._fitted(asked, prompt, params, asked.max_output_tokens)
        return await self.answer(
            ask, asked, [fitted], "resp_", lambda call: Responses(call, asked, wanted, scored)
        )

    # --------------------------------------------------------------------------------------- the small routes

    async def tokenize(self, ask: Ask) -> Reply:
        asked = await self._read(ask, TokenizeRequest)
        model = self.model
        if (asked.prompt is None) == (asked.messages is None):
            raise InvalidRequest("give a prompt or messages", "prompt")
        if asked.prompt is not None:
            ids = await asyncio.to_thread(model.tokenizer.encode, asked.prompt, asked.add_special_tokens)
        else:
            chat = ChatRequest(
                messages=asked.messages or [], add_generation_prompt=asked.add_generation_prompt
            )
            ids = await asyncio.to_thread(self._chat_ids, chat, ToolRequest("none"))
        body: dict[str, Any] = {"tokens": ids, "count": len(ids), "max_model_len": model.longest}
        if asked.return_token_strs:
            body["token_strs"] = await asyncio.to_thread(list, map(model.tokenizer.token_string, ids))
        return Reply(body)

    async def detokenize(self, ask: Ask) -> Reply:
        asked = await self._read(ask, DetokenizeRequest)
        try:
            decode = self.model.tokenizer.decode
            return Reply({"prompt": await asyncio.to_thread(decode, asked.tokens, skip_special=False)})
        except InvalidRequest as error:
            raise InvalidRequest(str(error), "tokens") from None

    async def models(self, ask: Ask) -> Reply:
        """At once, also while the model is being loaded."""
        return Reply({"object": "list", "data": [self._model_card(name) for name in self._shown_names]})

    async def one_model(self, ask: Ask) -> Reply:
        name = ask.path.removeprefix("/v1/models/")
        if name not in self.names:
            raise ApiError(
                404, f"the model {name!r} is not served here", param="model", code="model_not_found"
            )
        return Reply(self._model_card(name))

    @property
    def _shown_names(self) -> list[str]:
        return self.names[:2] if self.settings.served_name else self.names[:1]

    def _model_card(self, name: str) -> dict[str, Any]:
        model = self.backend.model
        return {
            "id": name,
            "object": "model",
            "created": int(self.begun),
            "owned_by": "outrider",
            "max_model_len": model.longest if model else None,
            "drafter": model.drafter if model else None,
        }

    async def health(self, ask: Ask) -> Reply:
        if self.draining:
            return _unwell("draining")
        if not self.backend.well:
            return _unwell("stalled" if self.backend.state == "ready" else self.backend.state)
        return Reply({"status": "ok"})

    async def version(self, ask: Ask) -> Reply:
        return Reply({"version": __version__})

    async def show_metrics(self, ask: Ask) -> Reply:
        prefixes = (PREFIX, "vllm:") if self.settings.metrics_compat == "vllm" else (PREFIX,)
        text = self.metrics.text(self.names[0], prefixes)
        return Reply(text.encode(), media="text/plain; version=0.0.4; charset=utf-8")

    async def openapi(self, ask: Ask) -> Reply:
        return Reply(document())

    async def root(self, ask: Ask) -> Reply:
        return Reply({"name": "outrider", "version": __version__, "routes": sorted(ROUTES)})


JSON = "application/json"
MOST_ANSWERS = 1024  # of one call; each is looked at whenever another ends
MOST_SCORES = 2_000_000  # log-probabilities of one call; they take a few hundred megabytes
LONG_BODY = 256 << 10  # bytes; reading more than this would hold up other requests
COMPLETION_LENGTH = 16  # what OpenAI's older route writes unless told otherwise

ROUTES: dict[str, dict[str, Route]] = {
    "/v1/chat/completions": {"POST": App.chat},
    "/v1/completions": {"POST": App.completions},
    "/v1/responses": {"POST": App.responses},
    "/v1/models": {"GET": App.models},
    "/tokenize": {"POST": App.tokenize},
    "/detokenize": {"POST": App.detokenize},
    "/health": {"GET": App.health},
    "/ping": {"GET": App.health},
    "/version": {"GET": App.version},
    "/metrics": {"GET": App.show_metrics},
    "/openapi.json": {"GET": App.openapi},
    "/": {"GET": App.root},
}
ONE_MODEL: dict[str, Route] = {"GET": App.one_model}


def _check_scores(prompts: list[tuple[list[int], SamplingParams]]) -> None:
    """All log-probabilities of a call are held until it ends."""
    most = 0
    for prompt, params in prompts:
        if params.logprobs is not None:
            read = 0 if params.prompt_logprobs is None else len(prompt)
            most += (params.n * params.max_tokens + read) * (1 + params.logprobs)
    if most > MOST_SCORES:
        raise InvalidRequest(
            f"this could have {most} log-probabilities, and at most {MOST_SCORES} are given: ask for fewer prompts, "
            "tokens or alternatives",
            "logprobs",
        )


def _refusal(error: ApiError) -> Reply:
    return Reply(error.body(), error.status, error.headers())


def _unexpected() -> ApiError:
    return ApiError(500, "something went wrong here; the server's log has more", code="internal_error")


def _unwell(state: str) -> Reply:
    error = ApiError(503, f"not ready: {state}", code=state, after=1)
    return Reply({"status": state, **error.body()}, 503, error.headers())


async def while_there(ask: Ask, work: Coroutine[Any, Any, R]) -> R:
    """Do the work, but stop it at once when the client hangs up."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(ask.gone())
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
