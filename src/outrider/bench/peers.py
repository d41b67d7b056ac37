"""Other engines on the same prompts, through their public APIs alone: transformers' `generate` and vLLM's `LLM`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from outrider.bench.compare import differing
from outrider.errors import OutriderError, install
from outrider.load.checkpoint import Checkpoint


@dataclass(slots=True)
class Run:
    """Prompts answered together: the tokens of each, the time until all had one, and the whole time."""

    answers: list[list[int]]
    first_s: float
    total_s: float
    there: int  # tokens of all that were there by `first_s`

    @property
    def tokens(self) -> list[int]:
        """Of the first answer, which is the only one in a batch of one."""
        return self.answers[0]

    @property
    def decode_rate(self) -> float:
        """Tokens a second of all together after the first ones; if there are none, over everything."""
        whole = sum(map(len, self.answers))
        if whole == self.there:
            return whole / self.total_s
        return (whole - self.there) / (self.total_s - self.first_s)

    def differing(self, other: Run) -> int:
        """Tokens that are not the other's, from the first one in each answer on."""
        return sum(differing(a, b) for a, b in zip(self.answers, other.answers, strict=True))


class _FirstToken:
    """A transformers streamer that only notes when the first new tokens came, and how many of them."""

    def __init__(self) -> None:
        self.calls = 0
        self.at = 0.0
        self.count = 0

    def put(self, tokens: Any) -> None:
        self.calls += 1
        if self.calls == 2:  # the first call hands over the prompt
            self.at, self.count = time.perf_counter(), tokens.numel()

    def end(self) -> None:
        pass


class Transformers:
    """A model of transformers. The methods of `generate` are options of its calls."""

    name = "transformers"

    def __init__(self, model: Any) -> None:
        self.model = model.eval()
        self.version = _transformers().__version__

    @classmethod
    def open(cls, path: Path, threads: int) -> Transformers:
        """A model's own files, in float32 on the CPU."""
        transformers = _transformers()
        torch.set_num_threads(threads)
        place = (path.parent, {"gguf_file": path.name}) if path.suffix == ".gguf" else (path, {})
        return cls(
            transformers.AutoModelForCausalLM.from_pretrained(place[0], dtype=torch.float32, **place[1])
        )

    @classmethod
    def of(cls, checkpoint: Checkpoint, device: str) -> Transformers:
        """A checkpoint's tensors in a model of transformers' own: as they come, in bfloat16 on a GPU."""
        transformers = _transformers()
        raw = dict(checkpoint.raw_config)
        config = transformers.AutoConfig.for_model(raw.pop("model_type"), **raw)
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        with torch.device(device):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
        own = dict(model.named_parameters())
        with torch.no_grad():
            for name in checkpoint.names():
                own.pop(name).copy_(checkpoint.tensor(name))
        if own:
            raise OutriderError(
                f"transformers' model has a tensor {next(iter(own))!r} that the checkpoint lacks"
            )
        return cls(model)

    def greedy(self, prompts: Sequence[int] | Sequence[list[int]], tokens: int, **options: Any) -> Run:
        """Exactly `tokens` greedy tokens for one prompt or many together, end-of-text ignored."""
        many: list[list[int]] = [list(prompts)] if isinstance(prompts[0], int) else [*map(list, prompts)]  # type: ignore[arg-type]
        longest = max(map(len, many))
        pads = [longest - len(ids) for ids in many]  # on the left, so that all answers begin at one place
        ids = torch.tensor(
            [[0] * pad + ids for pad, ids in zip(pads, many, strict=True)], device=self.model.device
        )
        mask = torch.tensor([[0] * pad + [1] * (longest - pad) for pad in pads], device=self.model.device)
        first = _FirstToken()
        begin = time.perf_counter()
        with torch.inference_mode():
            out = self.model.generate(
                ids, attention_mask=mask, do_sample=False, max_new_tokens=tokens, eos_token_id=None, pad_token_id=0,
                streamer=first, **options,
            )  # fmt: skip
        answers = out[:, longest:].tolist()  # waits for the device
        return Run(answers, first.at - begin, time.perf_counter() - begin, first.count)

    def top_two_gap(self, text: list[int]) -> float:
        """How far apart the two likeliest next tokens are, in logits: the room rounding has."""
        with torch.inference_mode():
            top = self.model(torch.tensor([text], device=self.model.device)).logits[0, -1].topk(2).values
        return float(top[0] - top[1])

    def save(self, folder: Path) -> Path:
        """The model as a folder that other engines load."""
        self.model.save_pretrained(folder)
        return folder


def _transformers() -> Any:
    try:
        import transformers  # an extra, and slow to import
    except ImportError:
        raise OutriderError(f"this comparison needs transformers; {install('hf')}") from None
    transformers.logging.set_verbosity_error()
    return transformers


class Vllm:
    """vLLM's offline engine over a folder. It says nothing of the first token's time: that is measured by asking for
    no more than one.
    """

    name = "vllm"

    def __init__(
        self, folder: Path, share: float, context: int, most: int, speculative: dict[str, Any] | None
    ) -> None:
        """`share` of the GPU's memory is its own; `speculative` is its `speculative_config`."""
        import vllm

        self.version = vllm.__version__
        options: dict[str, Any] = {} if speculative is None else {"speculative_config": speculative}
        self.llm = vllm.LLM(
            model=str(folder), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=context, max_num_seqs=most,
            gpu_memory_utilization=share, **options,
        )  # fmt: skip

    def greedy(self, prompts: Sequence[list[int]], tokens: int) -> Run:
        """Exactly `tokens` greedy tokens for each, end-of-text ignored. Its prefix cache serves both calls."""
        self._ask(prompts, 1)
        first, _ = self._ask(prompts, 1)
        total, answers = self._ask(prompts, tokens)
        return Run(answers, first, total, len(answers))

    def _ask(self, prompts: Sequence[list[int]], tokens: int) -> tuple[float, list[list[int]]]:
        from vllm import SamplingParams

        asked = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        begin = time.perf_counter()
        outs = self.llm.generate([{"prompt_token_ids": list(ids)} for ids in prompts], asked, use_tqdm=False)
        return time.perf_counter() - begin, [list(out.outputs[0].token_ids) for out in outs]
