"""`early_exit`: drafts are those of the first layers and the head, and the KV cache is left as found."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outrider import LLM
from outrider.draft.early_exit import SAMPLES, EarlyExitDrafter, exit_agreement, find_exit
from outrider.types import MAX_NODES, DraftPlan
from tests.draft.test_lm import logits_after
from tests.load.tiny import write_folder
from tests.tiny import (
    Always,
    Watched,
    finish,
    prompt_of,
    random_tensors,
    request,
    run_alone,
    tiny_config,
    tiny_engine,
    tiny_model,
    tokens_of,
)

LAYERS = 4


@pytest.fixture(scope="module")
def model():
    return tiny_model(layers=LAYERS, windows=(0,) * LAYERS)


def first_layers(layers: int):
    """The same weights, cut off: a model of its own, read by nobody else."""
    from outrider.model.decoder import Decoder, make_kernels
    from outrider.settings import cache_folder

    whole = tiny_config(layers=LAYERS, windows=(0,) * LAYERS)
    read = random_tensors(whole)
    kernels = make_kernels(whole, whole.context + 64, 2, cache_folder() / "kernels", "auto")
    # random weights are made in the order they are read: as the whole model reads them
    for i in range(LAYERS):
        Decoder(tiny_config(layers=LAYERS, windows=(0,) * LAYERS), read, kernels) if i == 0 else None
    return Decoder(tiny_config(layers=layers, windows=(0,) * layers), read, kernels)


def exit_engine(model, layers: int, draft_plan: DraftPlan, **settings):
    def make(cache):
        return {"x": Watched(EarlyExitDrafter(model, cache.store, cache.table, layers))}

    engine = tiny_engine(model, Always(draft_plan), drafters=make, **settings)
    return engine, engine.drafters["x"]


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_drafts_are_the_first_layers(model, layers):
    engine, watched = exit_engine(model, layers, DraftPlan("x", 3, 3), step_rows=32)
    prompt = prompt_of(70, 1)
    engine.add(request("a", prompt, max_tokens=14))
    text = prompt + tokens_of(finish(engine)["a", 0])
    assert text[70:] == run_alone(model, request("a", prompt, max_tokens=14))
    short = first_layers(layers)
    assert len(watched.seen) > 3
    for (_, known), (tokens, parents) in watched.seen.items():
        expected: list[int] = []
        for _ in range(3):
            expected.append(int(logits_after(short, text[:known] + expected).argmax()))
        assert list(tokens) == expected and parents == (-1, 0, 1)


@pytest.mark.parametrize("draft_plan", [DraftPlan("x", 12, 4), DraftPlan("x", 40, 20)])
def test_borrowed_slots_are_given_back(model, draft_plan):
    class Checked(EarlyExitDrafter):
        def propose(self, sequences, draft_plans):
            before = self.table.lengths.copy()
            drafts = super().propose(sequences, draft_plans)
            assert (self.table.lengths == before).all()
            self.table.check()
            return drafts

    engine = tiny_engine(
        model, Always(draft_plan), drafters=lambda cache: {"x": Checked(model, cache.store, cache.table, 2)}
    )
    for i in range(5):
        engine.add(request(f"r{i}", prompt_of(10 + i, i), max_tokens=30, temperature=0.8))
    finish(engine)
    assert not engine.drafters.faults
    engine.table.prefix.clear()
    assert engine.table.used == 0


def test_no_room_to_borrow_is_no_draft(model):
    one = request("a", prompt_of(9, 1), max_tokens=50)
    engine, _ = exit_engine(model, 2, DraftPlan("x", 12, 4), cache_bytes=60 * model.config.kv_bytes_per_token)
    (s,) = engine.add(one)
    assert tokens_of(finish(engine)["a", 0]) == run_alone(model, one)
    assert s.drafted > 0


def test_agreement_and_the_exit_it_suggests(model):
    samples = [prompt_of(40, 1), prompt_of(30, 2)]
    agreement = exit_agreement(model, samples)
    assert set(agreement) == {1, 2, 3}
    for layers in agreement:
        short = first_layers(layers)
        same = sum(
            int(logits_after(short, text[:n]).argmax()) == int(logits_after(model, text[:n]).argmax())
            for text in samples
            for n in range(1, len(text) + 1)
        )
        assert agreement[layers] == pytest.approx(same / 70)
    assert find_exit(model, samples) in agreement


def test_layers_that_do_nothing_are_left_out():
    """Where the later layers change nothing, the first is as good as all of them."""
    config = tiny_config(layers=3, windows=(0, 0, 0))
    read = random_tensors(config)

    def silent(name: str) -> torch.Tensor:
        late = "layers.1." in name or "layers.2." in name
        return (
            torch.zeros_like(read(name)) if late and ("o_proj" in name or "down_proj" in name) else read(name)
        )

    from outrider.model.decoder import Decoder, make_kernels
    from outrider.settings import cache_folder

    model = Decoder(config, silent, make_kernels(config, 320, 2, cache_folder() / "kernels", "auto"))
    assert exit_agreement(model, [prompt_of(30, 1)])[1] == 1.0
    assert find_exit(model, [prompt_of(30, 1)]) == 1


def test_what_the_exit_is_searched_on_is_cut_to_the_context(tmp_path: Path) -> None:
    write_folder(tmp_path)
    with LLM(tmp_path, draft="early_exit", device="cpu", context=32) as llm:
        assert len(llm.tokenizer.encode(SAMPLES[0])) > 32 + MAX_NODES
        assert len(llm.generate("ab", temperature=0, max_tokens=4)[0].token_ids) == 4
