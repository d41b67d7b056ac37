"""The Python interface: `LLM(model).generate(...)`, `.chat(...)`, `.stream(...)`, `.abort(...)`. engine/build.py makes
the engine behind it.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import secrets
import time
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from outrider.draft.names import check_parts, load_source, parse_draft
from outrider.engine.admission import Message, Prompt, as_list, check_messages, plain_list
from outrider.engine.build import Built, Reshape, Watch, build_engine, settle_pair
from outrider.engine.driver import Driver, Stream
from outrider.engine.engine import Engine
from outrider.engine.memory import runs_on_gpu, wake_gpu
from outrider.engine.output import Output, make_output
from outrider.engine.ranks import OtherRanks
from outrider.errors import InvalidRequest, OutriderError, stopped
from outrider.load.checkpoint import open_checkpoint
from outrider.load.find import find, published_sampling
from outrider.load.literal import ChatEncoder
from outrider.load.sampling import GENERATION_CONFIGS, SamplingDefaults
from outrider.load.template import ChatTemplate
from outrider.model.decoder import Decoder
from outrider.settings import Settings, cache_folder
from outrider.types import Event, Request, SamplingParams, Sequence, Speculation
from outrider.verify.grammar import GrammarCompiler

SEED_BITS = 53  # of a drawn seed: JSON numbers of every language hold as many


class LLM:
    """A model and its engine. `model` is a folder, a .gguf file, an alias or a hub id; options are those of Settings.

    `draft` is a name as `--draft` takes it, or a drafter: an object with the four verbs of `outrider.Drafter`, or a
    class or function that makes one.
    """

    def __init__(
        self,
        model: str | Path = "smollm2-135m",
        draft: Any = "auto",
        speculation: Any = "auto",
        settings: Settings | None = None,
        generation_config: str = "auto",
        reshape: Reshape | None = None,
        watch: Watch | None = None,
        **options: Any,
    ) -> None:
        """`generation_config`: "auto" takes sampling defaults from the model, "none" those of SamplingParams.
        `reshape` changes checkpoints before they are loaded, for benchmarks; `watch` follows the loading.
        """
        if generation_config not in GENERATION_CONFIGS:
            raise InvalidRequest(
                f"generation_config must be {' or '.join(GENERATION_CONFIGS)}, got {generation_config!r}",
                "generation_config",
            )
        self.speculation = Speculation.of(speculation)
        if settings is not None and options:
            raise InvalidRequest("give settings or single options, not both", "settings")
        asked, reshape = settings or Settings.of(options), reshape or Reshape()
        if runs_on_gpu(asked):
            wake_gpu()
        self.name = str(model)
        parts = parse_draft(draft)
        check_parts(parts, cache_folder())
        parts = tuple(load_source(part) if part.kind == "own" else part for part in parts)
        path = find(str(model), cache_folder())
        found = open_checkpoint(path)
        parts, pair = settle_pair(parts, found)
        self.checkpoint = checkpoint = reshape.target(found)
        self.sampling = SamplingDefaults()  # the model's, for requests without params
        if generation_config == "auto":
            said = found.sampling
            self.sampling = said if said.values else published_sampling(path, cache_folder())
        made: list[Built] = []

        def build() -> Engine:
            made.append(build_engine(checkpoint, parts, pair, asked, reshape, watch))
            return made[0].engine

        # The engine's thread loads the weights while this one makes the tokenizer.
        self.driver = Driver(build, wait=False)
        try:
            self.tokenizer = checkpoint.tokenizer
            self.template = ChatTemplate.for_tokenizer(checkpoint.chat_template, self.tokenizer)
            self._chats = ChatEncoder.of(self.template, self.tokenizer, asked.special_tokens_in_text)
            self.engine = self.driver.wait_until_built()
        except BaseException:
            self.driver.stop()
            raise
        (built,) = made
        self.model, self.settings, self.memory = built.model, built.settings, built.memory
        self._watch_ranks(built.ranks)
        self.drafter, self.pair, self.live_draft = built.drafter, built.pair, built.live_draft
        self._follows_predictions, self._numbers = "lookup" in built.draft, itertools.count()

    def prepare(self, sequences: int | None = None, wait: bool | Literal["plain"] = True) -> None:
        """Captures and measures the steps of up to `sequences` sequences (by default `max_sequences`).

        On a GPU this takes some seconds, and longer the first time, when kernels are compiled; otherwise requests wait
        for it. On a CPU it measures passes by their rows, in about a second. Without `wait` it runs while the engine is
        idle, and now and then between steps; "plain" waits only for steps without drafts. If more sequences come, the
        first steps with more are slow, and those are prepared as well.
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
        """Answers one prompt or several together. `params` is one for all or one for each prompt, and is used as it is;
        options given by name override the model's own defaults.

        Cached prefixes and remembered answers are never shared between owners.
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
        """Answers one conversation or several with the model's chat template. A text is one message of a user."""
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
        """Events of a prompt or a conversation as they come, for `for` or `async for`. Leaving the loop aborts the
        request.
        """
        self.driver.check()
        is_chat = isinstance(prompt, (list, tuple)) and bool(prompt) and isinstance(prompt[0], Mapping)
        ids = self.chat_ids(prompt) if is_chat else self._prompt_ids(prompt, "prompt")  # type: ignore[arg-type]
        one = self._params(params, options)
        return Stream(self.driver, self.request(ids, one if isinstance(one, SamplingParams) else one[0]))

    def abort(self, request_id: str) -> None:
        """Ends a running request. Its text so far is delivered with finish_reason 'abort'."""
        self.driver.abort(request_id)

    def close(self) -> None:
        """Ends running requests with finish_reason 'abort' and stops the engine. Later calls raise."""
        self.driver.close()
        if self.ranks is not None:
            self.ranks.close()

    def _watch_ranks(self, ranks: OtherRanks | None) -> None:
        """Ends the engine when a rank is lost, even if it is idle."""
        self.ranks, driver = ranks, self.driver

        def lost(error: BaseException) -> None:
            def end() -> None:
                raise error

            with contextlib.suppress(OutriderError):  # it has ended
                driver.post(end)

        if ranks is not None:
            ranks.on_lost = lost

    def __repr__(self) -> str:
        facts = {"device": self.model.device.type, "dtype": str(self.model.dtype).removeprefix("torch.")}
        if self.weight_formats != facts["dtype"]:
            facts["weights"] = self.weight_formats
        said = ", ".join(f"{name}={value!r}" for name, value in {**facts, "draft": self.drafter}.items())
        return f"LLM({self.name!r}, {said})"

    @property
    def weight_formats(self) -> str:
        """The number formats of the model's matrices, the one that most numbers have first."""
        if isinstance(self.model, Decoder):
            return ", ".join(name for name, _ in self.model.formats.most_common())
        return self.settings.weights if self.model.device.type == "cuda" else "float32"

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def default_params(self) -> SamplingParams:
        """The parameters of a request without any: the model's sampling defaults, else those of SamplingParams."""
        return SamplingParams.of(self.sampling.values)

    def _params(
        self, params: SamplingParams | Seq[SamplingParams] | None, options: Mapping[str, Any]
    ) -> SamplingParams | list[SamplingParams]:
        """Parameters from `params` or from options. `speculation` may be given beside `params` and overrides it."""
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
        self,
        prompt_ids: Seq[int],
        params: SamplingParams,
        owner: str = "",
        name: str | None = None,
        background: bool = False,
    ) -> Request:
        """A complete request: with an id, a seed, end ids and the token ids of its words."""
        speculation = self._speculation(params)
        if speculation != params.speculation:
            params = replace(params, speculation=speculation)
        ends = () if params.ignore_eos else self.model.config.eos_ids
        words = {self._words_ids(form) for word in params.bad_words for form in (word, f" {word}")}
        return Request(
            id=name or f"r{next(self._numbers)}",
            prompt_ids=tuple(prompt_ids),
            params=params,
            seed=secrets.randbits(SEED_BITS) if params.seed is None else params.seed,
            owner=owner,
            background=background,
            bad_word_ids=tuple(words - {()}),
            stop_ids=frozenset((*ends, *params.stop_token_ids)),
            grammar=None if params.grammar is None else self.compiler.compile(params.grammar),
            prediction_ids=self._words_ids(params.prediction) if params.prediction else (),
        )

    def _words_ids(self, text: str) -> tuple[int, ...]:
        """Empty if the model lacks one of the ids: a tokenizer may have more tokens than its model."""
        ids = self.tokenizer.encode(text, special=False)
        return tuple(ids) if max(ids, default=0) < self.model.config.vocab else ()

    def _speculation(self, params: SamplingParams) -> Speculation:
        """The request's own, else this LLM's. A prediction selects lookup if that does not draft anyway."""
        asked = params.speculation
        if replace(asked, explain=False) == Speculation():
            asked = replace(self.speculation, explain=asked.explain or self.speculation.explain)
        if params.prediction and asked.drafter is None and not self._follows_predictions:
            return replace(asked, drafter="lookup")
        return asked

    @cached_property
    def compiler(self) -> GrammarCompiler:
        config = self.model.config
        return GrammarCompiler(self.tokenizer.to_json(), config.vocab, config.eos_ids)

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
