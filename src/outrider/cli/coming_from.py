"""Flags and commands of other engines: what they are called here, or why there is none. docs/coming-from.md has tables.

Where a flag means the same it is taken as ours. Everything else is answered by name: nothing is dropped in silence.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from outrider.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Foreign:
    """What a flag of another engine is here: `ours` with the same value, `read` from its value, or an `answer`."""

    ours: str = ""
    answer: str = ""
    read: Callable[[str], list[str]] | None = None  # the value -> what to type here
    takes_value: bool = True
    model: bool = False  # its value is the MODEL argument


def _said(answer: str, takes_value: bool = True) -> Foreign:
    return Foreign(answer=answer, takes_value=takes_value)


def _table(*rows: tuple[str, Foreign]) -> dict[str, Foreign]:
    return {name: entry for names, entry in rows for name in names.split()}


def _one_gpu(value: str) -> list[str]:
    if value == "1":
        return []
    raise InvalidRequest("several GPUs share a model by --tensor-parallel only", "parallel")


def _layers(value: str) -> list[str]:
    if value == "0":
        return ["--device", "cpu"]
    if value in ("-1", "all", "auto") or (value.isdecimal() and int(value) >= 99):
        return ["--device", "auto" if value == "auto" else "cuda"]
    raise InvalidRequest(
        "a model runs on the CPU or the GPU as a whole: --device cpu or --device cuda", "device"
    )


def _weights(value: str) -> list[str]:
    if value in ("fp8", "int8", "int4"):
        return ["--weights", value]
    raise InvalidRequest(
        f"{value} is not a way to store weights here: --weights fp8, int8 or int4 rounds them while loading on a "
        "GPU; a GGUF file brings its own",
        "weights",
    )


def _cached(value: str) -> list[str]:
    ours = {"f32": "float32", "f16": "bfloat16", "bf16": "bfloat16", "q8_0": "int8"}
    if value in ours:
        return ["--kv-cache-dtype", ours[value]]
    raise InvalidRequest(f"keys and values are not kept as {value}: --kv-cache-dtype int8", "kv_cache_dtype")


def _origins(value: str) -> list[str]:
    try:
        origins = json.loads(value)
    except ValueError:
        origins = value.split(",")
    return [part for origin in origins for part in ("--cors-origin", str(origin))]


def read_speculative_config(text: str) -> list[str]:
    """vLLM's JSON: method, model, num_speculative_tokens."""
    try:
        asked = json.loads(text)
    except ValueError:
        asked = None
    if not isinstance(asked, dict):
        raise InvalidRequest('--speculative-config is a JSON object, such as {"method": "ngram"}', "draft")
    asked = dict(asked)
    method, model, tokens = (asked.pop(k, None) for k in ("method", "model", "num_speculative_tokens"))
    for name in ("prompt_lookup_max", "prompt_lookup_min", "draft_tensor_parallel_size"):
        if asked.get(name) in (None, 1) or name.startswith("prompt_lookup"):  # lookup takes the longest match
            asked.pop(name, None)
    if asked:
        raise InvalidRequest(
            f"--speculative-config: {next(iter(asked))!r} has no meaning here; leave it out", "draft"
        )
    flags = []
    if method in ("ngram", "suffix") or model in ("ngram", "[ngram]"):
        flags = ["--draft", "lookup"]
    elif model is not None:
        flags = ["--draft", str(model)]
    elif method is not None:
        raise InvalidRequest(
            f'--speculative-config: {method!r} needs a "model": a path, alias or hub id', "draft"
        )
    return flags + ([] if tokens is None else ["--speculate", str(tokens)])


_OWN_TEMPLATE = "the model's own chat template is used"
_ALWAYS = "that is always so here; leave it out"
_PLANNED = "LoRA adapters are planned, not here yet"

FLAGS = _table(
    ("-m --model --model-path -hf -hfr --hf-repo", Foreign(model=True)),
    ("-c --ctx-size --max-model-len --num-ctx --n-ctx --context-length", Foreign("--context")),
    ("-a --alias --served-model-name", Foreign("--served-name")),
    ("-md --model-draft --draft-model --speculative-model -hfd --hf-repo-draft", Foreign("--draft")),
    ("--draft-max --draft-n --num-speculative-tokens --num-draft-tokens", Foreign("--speculate")),
    ("-sc --speculative-config --speculative_config", Foreign(read=read_speculative_config)),
    ("--temp", Foreign("--temperature")),
    ("--n-predict --predict --num-predict --max-new-tokens --max-output-tokens", Foreign("--max-tokens")),
    ("--repeat-penalty", Foreign("--repetition-penalty")),
    ("--max-num-seqs --parallel -np --max-running-requests", Foreign("--max-sequences")),
    (
        "--max-num-batched-tokens --batch-size -b --ubatch-size -ub --chunked-prefill-size",
        Foreign("--step-rows"),
    ),
    ("-t --num-threads --num-thread", Foreign("--threads")),
    ("--kv-cache-memory-bytes", Foreign("--cache-bytes")),
    ("--system-prompt -sys", Foreign("--system")),
    ("--base-url", Foreign("--url")),
    ("--request-rate", Foreign("--rate")),
    ("--max-concurrency", Foreign("--concurrency")),
    ("--num-prompts", Foreign("--requests")),
    ("--random-input-len --input-len", Foreign("--input-tokens")),
    ("--random-output-len --output-len", Foreign("--output-tokens")),
    ("--reverse-prompt -r", Foreign("--stop")),
    ("-f --file", Foreign("--prompts")),
    ("--json-schema -j", Foreign(read=lambda value: ["--grammar", f"json_schema={value}"])),
    ("--enable-prefix-caching --cache-prompt", Foreign("--prefix-reuse", takes_value=False)),
    (
        "--no-enable-prefix-caching --no-cache-prompt --disable-radix-cache",
        Foreign("--no-prefix-reuse", takes_value=False),
    ),
    ("--disable-log-requests --no-enable-log-requests", Foreign("--no-log-prompts", takes_value=False)),
    ("--enable-log-requests --log-requests", Foreign("--log-prompts", takes_value=False)),
    ("--uvicorn-log-level", Foreign("--log-level")),
    ("--allowed-origins", Foreign(read=_origins)),
    ("--verbose", Foreign("--stats", takes_value=False)),
    ("-q --quantization", Foreign(read=_weights)),
    ("-ngl --gpu-layers --n-gpu-layers --num-gpu", Foreign(read=_layers)),
    ("-tp --tensor-parallel-size --tp-size", Foreign("--tensor-parallel")),
    ("-pp --pipeline-parallel-size -dp --data-parallel-size", Foreign(read=_one_gpu)),
    (
        "--mem-fraction-static",
        Foreign(
            answer="--gpu-memory-utilization F bounds weights, graphs and KV cache together, --cache-bytes SIZE "
            "the KV cache"
        ),
    ),
    ("--cache-type-k --cache-type-v -ctk -ctv", Foreign(read=_cached)),
    ("--dtype", _said("a CPU computes in float32, a GPU in bfloat16")),
    ("--tokenizer --tokenizer-mode", _said("a model is always run with its own tokenizer")),
    ("--trust-remote-code", _said("code that comes with a model is never run here", False)),
    ("--chat-template --chat-template-file", _said(_OWN_TEMPLATE)),
    ("--jinja", _said(f"{_OWN_TEMPLATE}; leave it out", False)),
    (
        "--tool-call-parser",
        _said("how a model writes tool calls is read off its chat template; leave it out"),
    ),
    ("--enable-auto-tool-choice", _said(_ALWAYS, False)),
    ("--reasoning-parser", _said("reasoning is not separated from the answer here")),
    ("--lora --lora-modules", _said(_PLANNED)),
    ("--enable-lora", _said(_PLANNED, False)),
    ("--mmproj", _said("models run on text alone here")),
    (
        "--embedding --embeddings --rerank --reranking",
        _said("embeddings and reranking are not done here", False),
    ),
    ("--runner --task", _said("text generation is the only task here; leave it out")),
    (
        "--enable-chunked-prefill -cb --cont-batching --metrics --mmap -fa --flash-attn --warmup",
        _said(_ALWAYS, False),
    ),
    (
        "--enforce-eager --mlock --no-mmap --no-warmup --disable-cuda-graph",
        _said("there is nothing of that kind to turn off here; leave it out", False),
    ),
    ("--grammar-file", _said("GBNF is not read here; --grammar lark=@FILE, regex= and json_schema= are")),
    ("--api-key-file", _said("keys are made by outrider keys and given with --key-file")),
    (
        "--ssl-keyfile --ssl-certfile --ssl-key-file --ssl-cert-file",
        _said("put TLS in front: deploy/ has an nginx configuration"),
    ),
)

COMMANDS = {
    "run": "outrider chat MODEL talks to a model, outrider generate MODEL PROMPT answers one prompt",
    "complete": "outrider generate MODEL PROMPT",
    "completion": "outrider generate MODEL PROMPT",
    "pull": "outrider models pull MODEL",
    "download": "outrider models pull MODEL",
    "list": "outrider models",
    "ls": "outrider models",
    "show": "outrider models show MODEL",
    "rm": "outrider models rm MODEL",
    "server": "outrider serve",
    "benchmark": "outrider bench",
    "ps": "a server has one model; /health says whether it runs",
    "stop": "Ctrl-C or SIGTERM ends a server once its requests are finished",
    "launch": "outrider serve",
}


def translated(args: Iterable[str], own: Mapping[str, bool], takes_model: bool) -> list[str]:
    """Arguments with foreign flags replaced. `own` are the command's flags: whether each takes a value."""
    out: list[str] = []
    first: list[str] = []  # the model comes before all other arguments
    left = iter(args)
    for arg in left:
        name, equals, value = arg.partition("=")
        if arg == "--":
            out += [arg, *left]
        elif name in own or name not in FLAGS or (FLAGS[name].model and not takes_model):
            out.append(arg)
            if own.get(name) and not equals:
                out += [v for v in [next(left, None)] if v is not None]
        else:
            entry = FLAGS[name]
            if entry.takes_value and not equals and not entry.answer:
                value = next(left, "")
            first += [value] if entry.model else []
            out += [] if entry.model else _ours(name, entry, value, own)
    return [*first, *out]


def _ours(name: str, entry: Foreign, value: str, own: Mapping[str, bool]) -> list[str]:
    if entry.answer:
        raise InvalidRequest(f"{name}: {entry.answer}", name.lstrip("-"))
    if entry.read is not None:
        try:
            typed = entry.read(value)
        except InvalidRequest as problem:
            raise InvalidRequest(f"{name}: {problem}", problem.param) from None
    else:
        typed = [entry.ours, value] if entry.takes_value else [entry.ours]
    for flag in typed[::2]:
        if flag not in own:
            raise InvalidRequest(f"{name} is {flag} here, which this command does not have", name.lstrip("-"))
    return typed


def key_answer(key: str) -> str | None:
    """For a key of a config file that is another engine's flag."""
    entry = FLAGS.get(f"--{key.replace('_', '-')}")
    if entry is None:
        return None
    if entry.model:
        return "write it as model, at the top"
    if entry.answer:
        return entry.answer
    fields: dict[str, Any] = {"--speculate": "speculation"}
    if entry.ours:
        name = fields.get(entry.ours, entry.ours.lstrip("-").removeprefix("no-").replace("-", "_"))
        return f"here that is {name}"
    return "a flag of another engine; the fields here are named like the flags of outrider serve --help-all"
