"""The front door in Python: `LLM(model).generate(...)`, `.chat(...)`, `.stream(...)`, `.abort(...)`."""

from __future__ import annotations

import contextlib
import itertools
import queue
import secrets
import time
import warnings
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import torch

from outrider.control.planner import Planner
from outrider.draft.custom import load_source
from outrider.draft.drafters import Drafters
from outrider.draft.head_layouts import read_head
from outrider.draft.names import Part, check_parts, parse_draft, settle_auto
from outrider.draft.table import DrafterSources, make_drafters
from outrider.engine.draft_room import draft_room
from outrider.engine.driver import Driver
from outrider.engine.engine import Engine
from outrider.engine.graph_runner import make_graph_runner
from outrider.engine.kept_costs import recall_costs
from outrider.engine.kv_cache import KvCache, make_kv_cache
from outrider.engine.live_draft import LiveDraft
from outrider.engine.memory import GpuMeter, check_room, wake_gpu, working_memory
from outrider.engine.output import Output, make_output
from outrider.engine.placement import DRAFT_TOKENS, Memory, place, share_of_all, within_share
from outrider.engine.planning import expect_score, guards_of, watch_draft
from outrider.engine.prompts import Message, Prompt, as_list, check_messages, plain_list
from outrider.engine.runner import EagerRunner, Runner
from outrider.engine.stream import Stream
from outrider.errors import InvalidRequest, OutOfMemory, OutriderError, UnsupportedModel, naming, stopped
from outrider.load.checkpoint import Checkpoint, check_shapes, open_checkpoint
from outrider.load.find import find, published_sampling
from outrider.load.literal import ChatEncoder
from outrider.load.pairs import Pair, find_pair
from outrider.load.sampling import GENERATION_CONFIGS, SamplingDefaults
from outrider.load.template import ChatTemplate
from outrider.model.decoder import Decoder, Model, kv_bytes, make_kernels
from outrider.settings import WEIGHT_BYTES, Settings, cache_folder, free_memory
from outrider.types import MAX_NODES, Event, Request, SamplingParams, Sequence, Speculation
from outrider.verify.grammar import GrammarCompiler

# What a drafter may be tried on before the first request, to choose its depth in the target.
SAMPLES = (
    "Here is how to make a simple vegetable soup. First, chop two onions, three carrots and a stick of celery, "
    "and fry them slowly in a little oil until they are soft. Add a litre of water, salt and pepper.",
    "def mean(values):\n    total = 0\n    for value in values:\n        total += value\n"
    "    return total / len(values)\n",
    "The train was late again, and Maria had read every poster on the platform twice. When it came at last, "
    "she found a seat by the window, put her bag on her knees and watched the fields go by.",
)

SMALL = 10**9  # numbers in a model that a GPU is done with before its kernels are started: it gets more rows
SEED_BITS = 53  # of a drawn seed: every language's JSON can hold it


class LLM:
    """A model and its engine. `model` is a folder, a .gguf file, an alias or a hub id; options are
    Settings'.

    `draft` is text as draft/names.py has it, or a drafter of one's own: an object with the four verbs of
    `outrider.Drafter`, or a class or function that makes one.
    """

    pair: Pair | None = None  # that `auto` found and could use

    def __init__(
        self,
        model: str | Path = "smollm2-135m",
        draft: Any = "auto",
        speculation: Any = "auto",
        settings: Settings | None = None,
        generation_config: str = "auto",
        **options: Any,
    ) -> None:
        """`generation_config`: "auto" takes sampling defaults from the model, "none" has SamplingParams' own."""
        if generation_config not in GENERATION_CONFIGS:
            raise InvalidRequest(
                f"generation_config must be {' or '.join(GENERATION_CONFIGS)}, got {generation_config!r}",
                "generation_config",
            )
        self.speculation = Speculation.of(speculation)
        if settings is not None and options:
            raise InvalidRequest("give settings or single options, not both", "settings")
        self.settings = settings or Settings.of(options)
        self.memory: Memory | None = None  # of the GPU, where there is one
        if runs_on_gpu(self.settings):
            wake_gpu()
        self.name = str(model)
        parts = parse_draft(draft)
        check_parts(parts, cache_folder())
        parts = tuple(load_source(part) if part.kind == "own" else part for part in parts)
        path = find(str(model), cache_folder())
        self.checkpoint = open_checkpoint(path)
        if any(part.kind == "auto" for part in parts):
            self.pair = find_pair(self.checkpoint, cache_folder())
        parts = settle_auto(parts, None if self.pair is None else self.pair.folder)
        self.sampling = SamplingDefaults()  # of the model; used where no params are given
        if generation_config == "auto":
            said = self.checkpoint.sampling
            self.sampling = said if said.values else published_sampling(path, cache_folder())
        # The engine's thread loads the weights while this one makes the tokenizer.
        self.driver = Driver(lambda: self._build(parts), wait=False)
        try:
            self.tokenizer = self.checkpoint.tokenizer
            self.template = ChatTemplate.for_tokenizer(self.checkpoint.chat_template, self.tokenizer)
            self._chats = ChatEncoder.of(self.template, self.tokenizer, self.settings.special_tokens_in_text)
            self.engine = self.driver.wait_until_built()
        except BaseException:
            self.driver.stop()
            raise
        self._numbers = itertools.count()

    def prepare(self, sequences: int | None = None, wait: bool | Literal["plain"] = True) -> None:
        """On a GPU: make and measure what up to so many sequences at once will need (by default as many as may run),
        which takes some seconds, and longer the first time, when kernels are compiled. Else it is done when it is first
        needed, while answers wait. On a CPU: measure passes by their rows, in a second or so. Without `wait` it is done
        as long as nobody is answered; "plain" waits for what it takes to answer without drafts.
        """
        most = min(sequences or self.settings.max_sequences, self.settings.max_sequences)

        def begin() -> None:
            self.driver.idle_work = self.engine.prepare(most)

        self.driver.run(begin)
        while wait and self.driver.run(lambda: self.driver.idle_work is not None):
            if wait == "plain" and self.engine.answerable:
                break
            time.sleep(0.01)

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        owner: str = "",
        **options: Any,
    ) -> list[Output]:
        """Answer one prompt or many together; parameters are one for all or one each, or given by name.

        What is given by name stands over the model's own defaults; `params` are taken as they are.

        `owner` says whose they are: cached prefixes and remembered answers are never shared between owners.
        """
        self.driver.check()
        ids = [self._prompt_ids(p) for p in as_list(prompts)]
        return self._collect(ids, self._params(params, options), owner)

    def chat(
        self,
        messages: str | Seq[Message] | Seq[Seq[Message]],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        owner: str = "",
        **options: Any,
    ) -> list[Output]:
        """Answer one conversation or many, through the model's own chat template. A text is one message of a user."""
        self.driver.check()
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        check_messages(messages)
        many = messages if messages and not isinstance(messages[0], Mapping) else [messages]
        ids = [self.chat_ids(m) for m in many]  # type: ignore[arg-type]
        return self._collect(ids, self._params(params, options), owner)

    def stream(
        self, prompt: Prompt | Seq[Message], params: SamplingParams | None = None, **options: Any
    ) -> Stream:
        """Events as they come, for a prompt or a conversation: with `for` or with `async for`. Leaving the loop aborts
        the request.
        """
        self.driver.check()
        is_chat = isinstance(prompt, (list, tuple)) and bool(prompt) and isinstance(prompt[0], Mapping)
        ids = self.chat_ids(prompt) if is_chat else self._prompt_ids(prompt, "prompt")  # type: ignore[arg-type]
        one = self._params(params, options)
        return Stream(self.driver, self.request(ids, one if isinstance(one, SamplingParams) else one[0]))

    def abort(self, request_id: str) -> None:
        """End a running request; what it has written so far is delivered with finish_reason 'abort'."""
        self.driver.abort(request_id)

    def close(self) -> None:
        self.driver.close()

    def __repr__(self) -> str:
        facts = {"device": self.model.device.type, "dtype": str(self.model.dtype).removeprefix("torch.")}
        if self.settings.weights not in ("auto", facts["dtype"]):
            facts["weights"] = self.settings.weights
        said = ", ".join(f"{name}={value!r}" for name, value in {**facts, "draft": self.drafter}.items())
        return f"LLM({self.name!r}, {said})"

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def default_params(self) -> SamplingParams:
        """What is used where no params are given: the model's own sampling, else SamplingParams'."""
        return SamplingParams.of(self.sampling.values)

    def _params(
        self, params: SamplingParams | Seq[SamplingParams] | None, options: Mapping[str, Any]
    ) -> SamplingParams | list[SamplingParams]:
        """Parameters given as such or by name; `speculation` may be given beside them and wins."""
        if params is None:
            return SamplingParams.of({**self.sampling.values, **options})
        if not isinstance(params, SamplingParams) and not (
            isinstance(params, (list, tuple)) and all(isinstance(one, SamplingParams) for one in params)
        ):
            raise InvalidRequest(
                f"params must be SamplingParams, or a list of them, one a prompt, not {type(params).__name__}; "
                "single options can be given by name",
                "params",
            )
        if others := set(options) - {"speculation"}:
            raise InvalidRequest(f"give params or single options, not both: {sorted(others)[0]}", "params")
        if not options:
            return params if isinstance(params, SamplingParams) else list(params)
        how = Speculation.of(options["speculation"])
        if isinstance(params, SamplingParams):
            return replace(params, speculation=how)
        return [replace(one, speculation=how) for one in params]

    def chat_ids(self, messages: Seq[Message]) -> list[int]:
        if self._chats is None:
            raise InvalidRequest(
                "this model has no chat template; use generate with a plain prompt", "messages"
            )
        check_messages(messages)
        return self._chats.encode(messages)

    def request(
        self, prompt_ids: Seq[int], params: SamplingParams, owner: str = "", name: str | None = None
    ) -> Request:
        """Settle everything a request leaves open: its id, its seed, its end ids, its words as tokens."""
        params = replace(params, speculation=self._speculation(params))
        ends = () if params.ignore_eos else self.model.config.eos_ids
        words = {self._words_ids(form) for word in params.bad_words for form in (word, f" {word}")}
        return Request(
            id=name or f"r{next(self._numbers)}",
            prompt_ids=tuple(prompt_ids),
            params=params,
            seed=secrets.randbits(SEED_BITS) if params.seed is None else params.seed,
            owner=owner,
            bad_word_ids=tuple(words - {()}),
            stop_ids=frozenset((*ends, *params.stop_token_ids)),
            grammar=None if params.grammar is None else self.compiler.compile(params.grammar),
            prediction_ids=self._words_ids(params.prediction or ""),
        )

    def _words_ids(self, text: str) -> tuple[int, ...]:
        """Nothing if the model lacks one of the ids: its tokenizer may know more than it does."""
        ids = self.tokenizer.encode(text, special=False)
        return tuple(ids) if max(ids, default=0) < self.model.config.vocab else ()

    def _speculation(self, params: SamplingParams) -> Speculation:
        """As asked, else as this LLM was set up; a prediction is followed by whoever can."""
        asked = params.speculation
        if replace(asked, explain=False) == Speculation():
            asked = replace(self.speculation, explain=asked.explain or self.speculation.explain)
        if params.prediction and asked.drafter is None and "lookup" not in self.drafter.split("+"):
            return replace(asked, drafter="lookup")
        return asked

    @cached_property
    def compiler(self) -> GrammarCompiler:
        config = self.model.config
        return GrammarCompiler(self.tokenizer.to_json(), config.vocab, config.eos_ids)

    def _build(self, parts: Seq[Part]) -> Engine:
        """Load the model and set the engine up; on the engine's own thread."""
        torch.set_num_threads(self.settings.threads)
        parts = self._with_room(parts)
        self.model = load_model(self.checkpoint, self.settings)
        asked, self.settings = self.settings, self._placed(parts)
        cache = make_kv_cache(self.model, self.settings)
        held = GpuMeter.held() if self.model.device.type == "cuda" else None
        sources = self._sources(cache)
        by_name, self.drafter = make_drafters(parts, sources)
        self.pair = self.pair if {"eagle", "lm"} & by_name.keys() else None
        if asked.draft_weights != "auto" and "lm" not in by_name:
            raise InvalidRequest(
                f"draft_weights is for a model that drafts, and there is none (draft: {self.drafter})",
                "draft_weights",
            )
        if isinstance(self.model, Decoder) and self.model.kernels.name == "c":
            # The kernels have threads of their own; torch's, woken by every large enough operation, spin beside them.
            torch.set_num_threads(1)
        drafters = Drafters(by_name, self.model.config.vocab)
        self.live_draft = LiveDraft(parts, drafters, sources)
        if self.model.device.type == "cuda":
            runner: Runner = make_graph_runner(
                self.model, cache, drafters, self.drafter, guards_of(self.settings).tree_batch
            )
        else:
            runner = EagerRunner(self.model, cache, drafters)
        # Lookup costs next to nothing, so that whoever names no drafter may get it, too.
        choices = dict.fromkeys((self.drafter, "lookup") if self.drafter != "none" else ())
        planner = Planner(self.drafter, choices=tuple(choices), guards=guards_of(self.settings))
        expect_score(planner, self.pair)
        if held is not None:
            slots, draft = cache.table.pool.total, GpuMeter.held() - held
            size, left = slots * kv_bytes(self.model), _free_memory(self.settings) or 0
            self.memory = Memory(self.model.weight_bytes(), draft, size, slots, left)
        room = draft_room(self._draft_checkpoints(parts))
        watch_draft(planner, drafters, room, cache, self.model, self.memory)
        costs = recall_costs(self.model, self.settings, parts, planner, runner)
        text = self.checkpoint.tokenizer.text_stream
        return Engine(self.model, cache, drafters, planner, runner, self.settings, text, costs)

    def _with_room(self, parts: Seq[Part]) -> Seq[Part]:
        """The parts, without a paired draft that there is no room for: nobody asked for it."""
        if runs_on_gpu(self.settings):
            self.settings = share_of_all(self.settings, *_gpu_memory())
        try:
            self._check_room(parts)
        except OutOfMemory as full:
            if self.pair is None:
                raise
            parts = tuple(Part("lookup", "auto") if part.paired else part for part in parts)
            self._check_room(parts)
            warnings.warn(
                f"the draft {self.pair.folder} is left out, lookup drafts instead: {full}", stacklevel=2
            )
        return parts

    def _check_room(self, parts: Seq[Part]) -> None:
        """What cannot be is said before anything is loaded."""
        on_gpu = _free_memory(self.settings)
        place(self.settings, on_gpu, total=None if on_gpu is None else _gpu_memory()[1])
        free, config = free_memory(), self.checkpoint.config
        if on_gpu is None and free is not None and config is not None:
            doubt = check_room(config, self.settings, free, draft_room(self._draft_checkpoints(parts)))
            if doubt is not None:
                warnings.warn(doubt, stacklevel=2)

    def _placed(self, parts: Seq[Part]) -> Settings:
        """The settings, the cache sized by what is free beside the weights once a draft to come has its part."""
        free = _free_memory(self.settings) if self.model.device.type == "cuda" else None
        if free is None:
            return place(self.settings, None)
        draft, own, total = draft_room(self._draft_checkpoints(parts)), self.model.config, _gpu_memory()[1]
        settled = place(self.settings, free, total=total)
        if not self.settings.step_rows and own.parameters <= SMALL:
            settled = replace(settled, step_rows=4 * settled.step_rows)
        weights = int(draft.weights * WEIGHT_BYTES[settled.draft_weights])
        beside = draft.cached / (2 * own.layers * own.kv_heads * own.head_dim)
        working = 0 if self.settings.cache_bytes else working_memory(self.model, settled, GpuMeter())
        free = _free_memory(self.settings)  # less: kernels that were loaded for it stay
        placed = place(self.settings, free, weights, beside, total, working)
        return replace(settled, cache_bytes=placed.cache_bytes)

    def _draft_checkpoints(self, parts: Seq[Part]) -> list[Checkpoint]:
        """The models that are to draft. What is wrong with one is for whoever loads it to say."""
        found = []
        for part in parts:
            if part.kind == "model":
                with contextlib.suppress(OutriderError):
                    found.append(self._draft_checkpoint(open_checkpoint(find(part.text, cache_folder()))))
        return found

    def _draft_checkpoint(self, checkpoint: Checkpoint) -> Checkpoint:
        """What is loaded for a draft that was found."""
        return checkpoint

    def _sources(self, cache: KvCache) -> DrafterSources:
        return DrafterSources(
            target=self.model,
            tokenizer=self.checkpoint.tokenizer,
            store=cache.store,
            table=cache.table,
            context=cache.context,
            find=lambda name: find(name, cache_folder()),
            load=self._load_draft,
            samples=lambda: [self.checkpoint.tokenizer.encode(text)[: cache.context] for text in SAMPLES],
            read_head=partial(read_head, words=DRAFT_TOKENS[self.settings.device]),
        )

    def _load_draft(self, checkpoint: Checkpoint) -> Model:
        return load_model(self._draft_checkpoint(checkpoint), self.settings, self.settings.draft_weights)

    def _prompt_ids(self, prompt: Prompt, name: str = "prompts") -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        ids = plain_list(prompt)
        if ids is None or not all(type(token) is int for token in ids):
            odd = "" if ids is None else " with " + next(type(t).__name__ for t in ids if type(t) is not int)
            raise InvalidRequest(
                f"{name}: a prompt is a text or a list of token ids, not {type(prompt).__name__}{odd}", name
            )
        return ids

    def _collect(
        self, prompts: list[list[int]], params: SamplingParams | list[SamplingParams], owner: str
    ) -> list[Output]:
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        if len(each) != len(prompts):
            raise InvalidRequest(f"{len(prompts)} prompts but {len(each)} sets of parameters", "params")
        received: queue.SimpleQueue[Event | BaseException] = queue.SimpleQueue()
        running: dict[str, tuple[Request, list[Sequence]]] = {}
        texts: dict[tuple[str, int], list[str]] = {}
        try:
            requests = [self.request(ids, one, owner) for ids, one in zip(prompts, each, strict=True)]
            started = self.driver.submit(requests, received.put)
            running = {request.id: (request, own) for request, own in zip(requests, started, strict=True)}
            left = sum(p.n for p in each)
            while left:
                event = received.get()
                if isinstance(event, BaseException):
                    raise stopped(event) from event
                texts.setdefault((event.request_id, event.choice), []).append(event.text)
                left -= event.finish_reason is not None
        except BaseException:
            for request_id in running:
                self.driver.abort(request_id)
            raise
        return [make_output(request, choices, texts) for request, choices in running.values()]


def load_model(checkpoint: Checkpoint, settings: Settings, weights: str | None = None) -> Model:
    """The decoder for the families it knows; any other causal model through transformers.

    `weights`: what they are stored as, if not as the settings say.
    """
    config, kind = checkpoint.config, weights or settings.weights
    if config is None:
        if settings.device == "cuda":
            raise UnsupportedModel("a model run through transformers runs on the CPU; use --device cpu")
        from outrider.model.hf import load_hf  # transformers is an extra and slow to import

        if kind == "bfloat16" and weights is None:
            raise UnsupportedModel("a model run through transformers is held as float32; leave --weights out")
        return load_hf(checkpoint, settings.threads, cache_folder() / "kernels", settings.kernels)
    check_shapes(checkpoint)
    positions = (settings.context or config.context) + MAX_NODES + 1
    if _free_memory(settings) is not None:
        from outrider.model.device import load_on_device  # Triton comes with it

        model = load_on_device(config, checkpoint.tensor, positions, "bfloat16" if kind == "auto" else kind)
        if weights is None:
            model.use_library(within_share(settings, *_gpu_memory()))
        return model
    folder = cache_folder() / "kernels"
    with naming(checkpoint.path):
        kernels = make_kernels(
            config, positions, settings.threads, folder, settings.kernels, bfloat16=kind == "bfloat16"
        )
    return Decoder(config, checkpoint.tensor, kernels)


def runs_on_gpu(settings: Settings) -> bool:
    return settings.device != "cpu" and settings.dtype != "float32" and torch.cuda.is_available()


def _free_memory(settings: Settings) -> int | None:
    """Of the GPU to be used; None where the CPU does the work."""
    if not runs_on_gpu(settings):
        return None
    torch.cuda.empty_cache()  # what torch keeps for later is free
    return _gpu_memory()[0]


def _gpu_memory() -> tuple[int, int]:
    """Free and in all."""
    free, total = torch.cuda.mem_get_info()
    return int(free), int(total)
