"""Other engines beside ours: the same tensors, the same tokens, and a script that runs to its end."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from bench.peers import main

from outrider import SamplingParams
from outrider.bench.as_if import AsIf
from outrider.bench.peers import Transformers
from outrider.load.checkpoint import open_checkpoint
from tests.bench.conftest import DRAFT, SHAPE, prompts

TOKENS = 8


@pytest.fixture(scope="module")
def theirs(wide: AsIf) -> Transformers:
    return Transformers.of(wide.checkpoint, "cpu")


def test_transformers_says_the_same_of_the_widened_model(wide: AsIf, theirs: Transformers) -> None:
    """Alone, and together with prompts of other lengths, which it pads."""
    texts = [prompts(1)[0], prompts(2)[1][:5], prompts(3)[2] * 2]
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    ours = [out.token_ids for out in wide.generate(texts, params, speculation=False)]
    run = theirs.greedy(texts, TOKENS)
    assert run.answers == ours
    assert run.there == 3
    assert theirs.greedy(texts[0], TOKENS).tokens == ours[0]


def test_ids_that_do_not_exist_are_far_below_all_others(wide: AsIf, theirs: Transformers) -> None:
    real = wide.tokenizer.vocab_size
    with torch.inference_mode():
        logits = theirs.model(torch.tensor(prompts(3))).logits
    assert logits.shape[-1] == 300 > real
    assert float(logits[..., real:].max()) < float(logits[..., :real].min()) - 1000


def test_what_is_saved_is_the_model(wide: AsIf, theirs: Transformers, tmp_path: Path) -> None:
    again = open_checkpoint(theirs.save(tmp_path))
    assert again.config is not None and again.raw_config["architectures"] == ["LlamaForCausalLM"]
    assert set(again.names()) - {"lm_head.weight"} == set(wide.checkpoint.names())
    assert all(
        torch.equal(again.tensor(name), wide.checkpoint.tensor(name)) for name in wide.checkpoint.names()
    )


def run_script(folder: Path, out: Path, *more: str) -> dict:
    asked = folder.parent / "asked.jsonl"
    asked.write_text(
        "".join(json.dumps({"task": "chat", "prompt": f"hello 12 hello {i}"}) + "\n" for i in range(4))
    )
    options = ["--tasks", "chat", "--groups", "1", "--tokens", "6", "--context", "128", "--cache-gib", "0.01"]
    main([str(folder), "--as-if", SHAPE, "--prompts", str(asked), *options, "--json", str(out), *more])
    return json.loads(out.read_text())


def test_the_script_runs_everything_that_is_here(folder: Path, tmp_path: Path, capsys) -> None:
    found = run_script(folder, tmp_path / "out.json", "--draft-as-if", DRAFT, "--batches", "1,2")
    said = capsys.readouterr().out
    assert "vllm is not installed; left out" in said
    assert "transformers compiles on a GPU only; left out" in said
    assert found["kind"] == "peers" and found["as_if"]["shape"] == SHAPE
    alone, pair = (found["tasks"]["chat"][size]["engines"] for size in "12")
    ours = {"outrider plain", "outrider lookup", "outrider lm"}
    assert set(pair) == ours | {"transformers plain"}
    assert set(alone) == set(pair) | {"transformers prompt lookup", "transformers assisted"}
    for engine in (*alone.values(), *pair.values()):  # float32: nothing to part over
        assert engine["agreed_tokens"] == 6
        assert engine["answers_equal"] == engine["answers"]
        assert engine["tok_s"] > 0


class StandIn:
    """vLLM's front door with transformers behind it: the folder it is given must hold the model. Drafts it refuses."""

    def __init__(self, model: str, speculative_config: dict | None = None, **options) -> None:
        if (speculative_config or {}).get("method") == "draft_model":
            raise NotImplementedError("no draft models")
        assert options["skip_tokenizer_init"] and options["max_model_len"] == 128
        self.peer = Transformers.open(Path(model), 1)

    def generate(self, asked: list[dict], params: SimpleNamespace, use_tqdm: bool) -> list:
        assert params.temperature == 0 and params.ignore_eos and not params.detokenize
        runs = self.peer.greedy([one["prompt_token_ids"] for one in asked], params.max_tokens)
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=tokens)]) for tokens in runs.answers]


def test_vllm_gets_the_same_model(folder: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    """vLLM itself cannot run here: this shows what it is handed, and that what it refuses is left out."""
    vllm = ModuleType("vllm")
    vllm.__dict__.update(
        __version__="0", LLM=StandIn, SamplingParams=SimpleNamespace, __spec__=SimpleNamespace()
    )
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    found = run_script(folder, tmp_path / "out.json", "--draft-as-if", DRAFT, "--engines", "vllm")
    assert "vllm draft: NotImplementedError: no draft models; left out" in capsys.readouterr().out
    engines = found["tasks"]["chat"]["1"]["engines"]
    assert set(engines) == {"outrider plain", "outrider lookup", "outrider lm", "vllm plain", "vllm n-gram"}
    assert engines["vllm plain"]["agreed_tokens"] == 6
