"""What clients may send, as structs, and how it becomes the engine's SamplingParams.

The structs are also where the OpenAPI document comes from. Nothing a client asked for is ignored:
unknown names are refused, and so are names of other servers, with the name they have here.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from outrider.errors import LONGEST_NAME, InvalidRequest, brief, invalid, suggest
from outrider.sampling_params import MAX_ALTERNATIVES, SamplingParams, Speculation
from outrider.serve.limits import MAX_BIAS, MAX_MESSAGES, MAX_N, MAX_STOP, check_schema, read_json
from outrider.serve.settings import ServeSettings

Number = Annotated[float, Meta(ge=-1e6, le=1e6)]
Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
PARTS = 4  # of a message's content, on average


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class SpeculativeDecoding(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """How this request wants speculation; what is left out the engine decides."""

    drafter: str | None = None
    depth: Count | None = None
    nodes: Count | None = None
    tree: list[Count] | str | None = None
    mode: str = "coupled"
    block: bool = True
    rule: str = "typical"
    threshold: float = 0.3
    delta: float = 0.09
    explain: bool = False
    stats: bool = False
    steps: bool = False


class Prediction(msgspec.Struct, kw_only=True):
    type: str
    content: str | list[dict[str, Any]]


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Exactly one of these."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class Sampling(msgspec.Struct, kw_only=True):
    """What every kind of completion takes."""

    model: str | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    frequency_penalty: Number | None = None
    presence_penalty: Number | None = None
    logit_bias: dict[str, Number] | None = None
    bad_words: list[str] | None = None
    seed: Seed | None = None
    n: Count | None = None
    max_tokens: Count | None = None
    min_tokens: Count | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: StructuredOutputs | None = None
    speculative_decoding: bool | int | str | SpeculativeDecoding | None = None
    prediction: Prediction | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    user: str | None = None


class ChatRequest(Sampling, kw_only=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_ALTERNATIVES)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class CompletionRequest(Sampling, kw_only=True):
    prompt: str | list[str | TokenId | list[TokenId]]
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_ALTERNATIVES)] | None = None


class ResponsesRequest(Sampling, kw_only=True):
    """The stateless part of OpenAI's Responses."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_ALTERNATIVES)] | None = None
    include: list[str] | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """A `prompt`, or `messages` as the chat template writes them."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    tokens: list[TokenId]


# Asked for by name and not to be had: (the value that asks for nothing, the way out). First what OpenAI has, then what
# vLLM and SGLang, llama.cpp and Ollama have.
REFUSED: dict[str, tuple[Any, str]] = {
    "functions": (None, "use tools"),
    "function_call": (None, "use tool_choice"),
    "audio": (None, "only text is read and written here"),
    "modalities": (["text"], "only text is read and written here"),
    "web_search_options": (None, "nothing is fetched for a request"),
    "best_of": (1, "use n and choose yourself"),
    "suffix": (None, "leave it out; text is only continued"),
    "truncation": ("disabled", "use truncate_prompt_tokens"),
    "max_tool_calls": (None, "leave it out; calls are the client's to make"),
    "previous_response_id": (None, "this server keeps no state; send the whole conversation"),
    "conversation": (None, "this server keeps no state; send the whole conversation"),
    "background": (False, "this server keeps no state; stream instead"),
    "use_beam_search": (False, "leave it out"),
    "length_penalty": (1.0, "leave it out; there is no beam search"),
    "allowed_token_ids": (None, "use logit_bias or structured_outputs"),
    "skip_special_tokens": (True, "leave it out"),
    "return_tokens_as_token_ids": (False, "use return_token_ids"),
    "prompt_logprobs": (None, "use echo and logprobs of /v1/completions"),
    "priority": (0, "requests are served in the order they come"),
    "logprobs_mode": (None, "log-probabilities are always the target's own"),
    "logits_processors": (None, "use logit_bias"),
    "chat_template": (None, "the template is the operator's to choose"),
    "container": (None, "this server runs no tools itself"),
    "mcp_servers": (None, "this server runs no tools itself"),
    "documents": (None, "write them into a message"),
    "guided_json": (None, "use structured_outputs.json or response_format"),
    "guided_regex": (None, "use structured_outputs.regex"),
    "guided_choice": (None, "use structured_outputs.choice"),
    "guided_grammar": (None, "use structured_outputs.grammar"),
    "guided_decoding_backend": (None, "leave it out"),
    "guided_whitespace_pattern": (None, "leave it out"),
    "regex": (None, "use structured_outputs.regex"),
    "ebnf": (None, "use structured_outputs.grammar"),
    "lora_path": (None, "no adapters are served"),
    "grammar": (None, "use structured_outputs.grammar, in Lark's form"),
    "json_schema": (None, "use response_format or structured_outputs.json"),
    "n_predict": (None, "use max_tokens"),
    "n_probs": (0, "use logprobs"),
    "n_keep": (0, "use truncate_prompt_tokens"),
    "cache_prompt": (True, "prompts are always cached; cache_salt keeps them apart"),
    "id_slot": (-1, "leave it out"),
    "repeat_penalty": (1.0, "use repetition_penalty"),
    "repeat_last_n": (None, "leave it out; penalties look at the whole text"),
    "samplers": (None, "leave it out; their order is fixed"),
    "mirostat": (0, "use temperature, top_p or min_p"),
    "typical_p": (1.0, "use top_p or min_p"),
    "tfs_z": (1.0, "use top_p or min_p"),
    "dynatemp_range": (0, "use temperature"),
    "xtc_probability": (0, "use top_p or min_p"),
    "dry_multiplier": (0, "use repetition_penalty"),
    "options": (
        None,
        "write its fields beside messages; num_predict is max_tokens, repeat_penalty repetition_penalty",
    ),
    "num_predict": (None, "use max_tokens"),
    "num_ctx": (None, "the context is the server's: --context when it is started"),
    "format": (None, "use response_format"),
    "template": (None, "the template is the operator's to choose"),
    "system": (None, "send a message with the role system, or instructions"),
    "raw": (False, "use /v1/completions"),
    "images": (None, "only text is read here"),
    "keep_alive": (None, "leave it out; the server decides when models are loaded"),
}
# What clients send that changes no answer of a server of one model.
HARMLESS = frozenset(
    (
        *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "verbosity"),
        *("prompt_cache_retention", "reasoning_effort", "reasoning", "spaces_between_special_tokens"),
        *("cache_control", "inference_geo", "speed", "diagnostics", "user_profile_id"),  # Anthropic's
        *(
            "request_id",
            "timeout",
            "extra_headers",
            "extra_query",
            "litellm_metadata",
            "session_id",
            "chat_id",
        ),
    )
)

T = TypeVar("T", bound=msgspec.Struct)


def read_request(body: Any, kind: type[T]) -> T:
    """The struct of a body, or an error that names the field."""
    if not isinstance(body, dict):
        raise InvalidRequest("the body must be a JSON object")
    body = _flat(body)
    known = set(kind.__struct_fields__)
    for name in body.keys() - known - HARMLESS:
        nothing, instead = REFUSED.get(name, (None, ""))
        if name in REFUSED and body[name] not in (None, nothing):
            raise invalid(name, f"is not supported: {instead}")
        if name not in REFUSED:
            shown = name[:LONGEST_NAME]
            raise InvalidRequest(f"{shown!r} is not a field of this request{_like(name, known)}", shown)
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as problem:
        what, _, where = str(problem).partition(" - at `")
        place = where.rstrip("`").removeprefix("$").removeprefix(".")
        param = ".".join(filter(None, (place, _missing(what)))) or None
        said = what.replace("`", "'") + _near(what, param)
        raise InvalidRequest(f"{param}: {said}" if param else said, param) from None


def _flat(body: dict[str, Any]) -> dict[str, Any]:
    """With the fields of `extra_body` beside the others, where OpenAI's Python client puts them itself."""
    more = body.get("extra_body")
    if more is None:
        return {name: value for name, value in body.items() if name != "extra_body"}
    if not isinstance(more, dict):
        raise invalid("extra_body", "must be an object")
    for name in more.keys() & body.keys():
        if more[name] != body[name]:
            shown = name[:LONGEST_NAME]
            raise InvalidRequest(
                f"{shown!r} is given twice, with another value in extra_body", f"extra_body.{shown}"
            )
    return {**{name: value for name, value in body.items() if name != "extra_body"}, **more}


def _like(name: str, known: set[str]) -> str:
    """A suggestion, or where the fields are listed: they are too many for a message."""
    near = suggest(name, known)
    return near if "did you mean" in near else "; /openapi.json lists those it has"


def _missing(what: str) -> str | None:
    return what.rpartition("required field `")[2].rstrip("`") if "required field" in what else None


def _near(what: str, param: str | None) -> str:
    """A suggestion for a misspelt name, in the objects where misspelling is an error."""
    kind = {"speculative_decoding": SpeculativeDecoding, "structured_outputs": StructuredOutputs}.get(
        param or ""
    )
    if kind is None or "unknown field" not in what:
        return ""
    return suggest(what.rpartition("unknown field `")[2].rstrip("`"), kind.__struct_fields__)


def check_messages(messages: Seq[Mapping[str, Any]], name: str) -> None:
    """Refuse more than MAX_MESSAGES messages, or more than PARTS times as many parts of contents."""
    _within(name, len(messages), MAX_MESSAGES)
    contents = (message.get("content") for message in messages)
    _within(f"{name}.content", sum(len(c) for c in contents if isinstance(c, list)), PARTS * MAX_MESSAGES)


def sampling_params(
    asked: Sampling, defaults: SamplingParams, limits: ServeSettings, grammar: Mapping[str, Any] | None
) -> SamplingParams:
    """The engine's parameters, all but the lengths and what one route alone knows."""
    _within("n", asked.n or 1, MAX_N)
    _within("stop", 1 if isinstance(asked.stop, str) else len(asked.stop or ()), MAX_STOP)
    _within("stop_token_ids", len(asked.stop_token_ids or ()), MAX_STOP)
    _within("logit_bias", len(asked.logit_bias or ()), MAX_BIAS)
    _within("bad_words", len(asked.bad_words or ()), MAX_BIAS)
    for name, words in (("stop", asked.stop), ("bad_words", asked.bad_words)):
        if sum(map(len, words or ())) > limits.max_schema_bytes:
            raise invalid(name, f"is longer than {limits.max_schema_bytes} characters")
    if asked.n == 0:
        raise invalid("n", "must be at least 1")
    given: dict[str, Any] = {
        "temperature": asked.temperature,
        "top_p": asked.top_p,
        "top_k": 0 if asked.top_k == -1 else asked.top_k,
        "min_p": asked.min_p,
        "repetition_penalty": asked.repetition_penalty,
        "frequency_penalty": asked.frequency_penalty,
        "presence_penalty": asked.presence_penalty,
        "logit_bias": _biases(asked.logit_bias),
        "bad_words": asked.bad_words,
        "seed": asked.seed,
        "n": asked.n,
        "stop": asked.stop or None,
        "stop_token_ids": asked.stop_token_ids,
        "include_stop": asked.include_stop_str_in_output,
        "ignore_eos": asked.ignore_eos,
        "speculation": speculation_of(asked.speculative_decoding),
        "prediction": predicted_text(asked.prediction),
        "grammar": grammar or grammar_of(asked, limits),
    }
    return replace(defaults, **{name: value for name, value in given.items() if value is not None})


# The engine's names, and the fields of requests they may have come from.
_SENT_AS = {
    "grammar": ("structured_outputs", "response_format", "text", "output_config", "tools"),
    "max_tokens": ("max_completion_tokens", "max_output_tokens", "max_tokens"),
    "prompt": ("messages", "input", "prompt"),
    "stop": ("stop_sequences", "stop"),
}


def sent_as(name: str | None, asked: Sampling | ResponsesRequest) -> str | None:
    """What to blame in an error: the client's word for one of the engine's."""
    if name == "drafter":
        return "speculative_decoding.drafter"
    fields = _SENT_AS.get(name or "", ())
    return next((field for field in fields if getattr(asked, field, None) is not None), name)


def _within(name: str, count: int, most: int) -> None:
    if count > most:
        raise InvalidRequest(f"{name}: {count} given, at most {most} are allowed", name)


def _biases(asked: Mapping[str, float] | None) -> dict[int, float] | None:
    """Token ids are written as texts there; whether the model has them is for the engine to say."""
    for name in asked or ():
        if not (name.isascii() and name.isdigit() and len(name) <= 10):
            raise InvalidRequest(f"logit_bias: {brief(name)} is not a token id", "logit_bias")
    return None if asked is None else {int(name): weight for name, weight in asked.items()}


def speculation_of(asked: bool | int | str | SpeculativeDecoding | None) -> Speculation | None:
    """In the words that Python and the command line have for it: true, "off", 4, "depth=4", or its fields."""
    if asked is None:
        return None
    given: Any = asked
    if isinstance(asked, SpeculativeDecoding):
        given = {f: getattr(asked, f) for f in asked.__struct_fields__ if f not in ("stats", "steps")}
        given["explain"] = asked.explain or asked.stats or asked.steps
    try:
        return Speculation.of(given)
    except InvalidRequest as problem:
        inside = "" if problem.param == "speculation" else f".{problem.param}"
        raise InvalidRequest(str(problem), f"speculative_decoding{inside}") from None


def wants(report: str, asked: bool | int | str | SpeculativeDecoding | None) -> bool:
    """Whether a report is asked for: `stats` or `steps`."""
    return isinstance(asked, SpeculativeDecoding) and getattr(asked, report)


def predicted_text(asked: Prediction | None) -> str | None:
    if asked is None:
        return None
    if asked.type != "content":
        raise invalid("prediction.type", f"must be 'content', not {brief(asked.type)}")
    return text_of(asked.content, "prediction.content")


def text_of(content: Any, where: str) -> str:
    """A text, or a list of text parts joined as they are."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(where, "must be a text or a list of text parts")
    parts = []
    for i, part in enumerate(content):
        fields = part if isinstance(part, Mapping) else {}
        kind, text = fields.get("type", "text"), fields.get("text")
        if kind not in ("text", "input_text", "output_text") or not isinstance(text, str):
            raise invalid(f"{where}[{i}]", "is not a text part; only text is supported")
        parts.append(text)
    return "".join(parts)


def grammar_of(asked: Sampling, limits: ServeSettings) -> dict[str, Any] | None:
    """One grammar from whichever field carries it."""
    by_format = format_grammar(asked.response_format, limits)
    extra = asked.structured_outputs
    if extra is None:
        return by_format
    given = {f: v for f in extra.__struct_fields__ if (v := getattr(extra, f)) not in (None, False)}
    if len(given) != 1 or by_format is not None:
        raise InvalidRequest("give exactly one form for the answer", "structured_outputs")
    ((kind, value),) = given.items()
    if kind == "json":
        return {"json_schema": _schema(value, limits, "structured_outputs.json")}
    if kind in ("regex", "grammar") and len(str(value)) > limits.max_schema_bytes:
        raise invalid(f"structured_outputs.{kind}", f"is longer than {limits.max_schema_bytes}")
    if kind == "choice" and sum(map(len, extra.choice or ())) > limits.max_schema_bytes:
        raise invalid("structured_outputs.choice", "is too long")
    return {"lark" if kind == "grammar" else kind: value}


def format_grammar(asked: Any, limits: ServeSettings) -> dict[str, Any] | None:
    """From `response_format`, or `text.format` of Responses, whose schema lies one level higher."""
    if asked is not None and not isinstance(asked, Mapping):
        raise invalid("response_format", "must be an object with a type")
    kind = None if asked is None else asked.get("type")
    if asked is None or kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    if kind == "json_schema":
        holder = asked.get("json_schema", asked)
        schema = holder.get("schema") if isinstance(holder, Mapping) else None
        return {"json_schema": _schema(schema, limits, "response_format.json_schema.schema")}
    raise invalid("response_format.type", f"must be text, json_object or json_schema, not {brief(kind)}")


def _schema(value: Any, limits: ServeSettings, where: str) -> str:
    """As JSON text: what carries it to the engine has no whole numbers of more than 64 bits."""
    if isinstance(value, str):
        try:
            value = read_json(value.encode())
        except InvalidRequest:
            raise invalid(where, "is not JSON") from None
    check_schema(value, limits.max_schema_bytes, where)
    return msgspec.json.encode(value).decode()
