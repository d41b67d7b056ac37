"""Weights of the draft exchanged between two steps: no token changes, and drafts are at once those of the others."""

from __future__ import annotations

import itertools
import json
import os
import queue
import shutil
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider.draft.eagle import EagleDrafter
from outrider.draft.eagle_head import load_eagle
from outrider.draft.weights import Weights, copy_of, first_difference, put_weights, weights_of
from outrider.engine import build as build_module
from outrider.engine.driver import Driver
from outrider.engine.engine import Engine
from outrider.engine.llm import LLM
from outrider.errors import BadCheckpoint, InvalidRequest, OutriderError
from outrider.load.checkpoint import open_checkpoint
from outrider.types import DraftPlan, SamplingParams
from tests.serve.conftest import write_tiny
from tests.tiny import (
    VOCAB,
    Always,
    eagle_tensors,
    finish,
    lagging_runner,
    lm_drafter,
    noised_model,
    prompt_of,
    request,
    run_alone,
    tiny_config,
    tiny_engine,
    tiny_model,
    tokens_of,
    write_eagle,
)

SHAPE = {"layers": 4, "windows": (0,) * 4}
DEPTH = 3
Drafts = dict[tuple[str, int], tuple[int, ...]]


@pytest.fixture(scope="module")
def model():
    return tiny_model(**SHAPE)


@pytest.fixture(scope="module")
def heads(tmp_path_factory, model):
    folder = tmp_path_factory.mktemp("heads")
    return [
        write_eagle(folder / f"{s}", model.config, eagle_tensors(model.config, VOCAB, seed=s)) for s in (3, 4)
    ]


def requests():
    """Greedy and sampled, of several lengths."""
    return [
        request(f"r{i}", prompt_of(9 + 5 * i, i), max_tokens=21, temperature=0.8 * (i % 2)) for i in range(3)
    ]


def engine_of(model, make, lag, name) -> tuple[Engine, Drafts]:
    """An engine, and every draft that it verifies, by request and how much was known."""
    engine = tiny_engine(model, Always(DraftPlan(name, DEPTH, DEPTH)), drafters=make, lag=lag)
    seen: Drafts = {}
    accept = engine.drafters.accept

    def watch(drafter, sequence, draft, verdict) -> None:
        if draft:
            seen[sequence.request.id, len(sequence.tokens) - len(verdict.tokens)] = draft.tokens
        accept(drafter, sequence, draft, verdict)

    engine.drafters.accept = watch
    for one in requests():
        engine.add(one)
    return engine, seen


def drafter_of(kind: str, which: int, model, heads) -> Callable:
    if kind == "lm":
        return lambda cache: {"lm": lm_drafter(noised_model((0.7, 0.5)[which], **SHAPE), cache)}
    return lambda cache: {
        "eagle": EagleDrafter(load_eagle(heads[which], model, 256), cache.store, cache.table)
    }


def network_weights(make, model) -> Weights:
    engine = tiny_engine(model, Always(DraftPlan("none", 0, 0)), drafters=make)
    (name,) = engine.drafters.names
    return copy_of(engine.drafters[name].network)


@pytest.mark.parametrize(
    ("kind", "lag"), [("eagle", None), ("eagle", 0), ("eagle", 1), ("lm", None), ("lm", 1)]
)
def test_drafts_after_a_swap_are_those_of_the_other_draft(model, heads, kind, lag):
    first, second = (drafter_of(kind, which, model, heads) for which in (0, 1))
    engine, seen = engine_of(model, first, lag, kind)
    before = finish(engine)
    expected = {key: tokens_of(events) for key, events in before.items()}
    other, others = engine_of(model, second, lag, kind)
    finish(other)

    engine, swapped = engine_of(model, first, lag, kind)
    weights = network_weights(second, model)
    results = [result for _ in range(6) for result in engine.step()]
    if lag:
        assert engine.in_flight
    results += engine.drain()
    assert not engine.in_flight
    early = dict(swapped)
    kept = copy_of(engine.drafters[kind].network)
    engine.replace_weights(kind, weights)
    results += [result for _ in range(6) for result in engine.step()] + engine.drain()
    late = {key: draft for key, draft in swapped.items() if key not in early}
    engine.replace_weights(kind, kept)  # and back
    at_last = len(swapped)
    results += run_out(engine)

    said = {}
    for event in (event for result in results for event in result.events):
        said.setdefault((event.request_id, event.choice), []).extend(event.token_ids)
    assert said == expected  # not one token is another
    shared = late.keys() & others.keys()
    assert len(shared) > 5 and {k: late[k] for k in shared} == {k: others[k] for k in shared}
    assert any(late[k] != seen[k] for k in late.keys() & seen.keys())
    back = {key: swapped[key] for key in list(swapped)[at_last:] if key in seen}
    assert len(back) > 5 and back == {key: seen[key] for key in back}
    assert not engine.drafters.faults


def run_out(engine: Engine) -> list:
    results = []
    while not engine.idle:
        results += engine.step()
    return results


def test_work_that_wants_nothing_in_flight_finds_it_so(model, heads):
    make = drafter_of("lm", 0, model, heads)
    driver = Driver(lambda: tiny_engine(model, Always(DraftPlan("lm", DEPTH, DEPTH)), drafters=make, lag=1))
    one = request("a", prompt_of(9, 1), max_tokens=150)
    received: queue.SimpleQueue = queue.SimpleQueue()
    try:
        driver.submit([one], received.put)
        states = [(0, True)]
        while states[-1][1]:
            states.append(
                driver.run(lambda: (len(driver.engine.in_flight), bool(driver.engine.live)), settled=True)
            )
        assert len(states) > 9 and not any(in_flight for in_flight, _ in states)
        tokens = []
        while not (event := received.get(timeout=20)).finish_reason:
            tokens += event.token_ids
        assert [*tokens, *event.token_ids] == run_alone(model, one)
    finally:
        driver.close()


def test_a_head_has_read_where_it_could_draft(model, heads):
    """Not in the step that reads the prompt, which hands the hidden states over."""
    engine = tiny_engine(
        model,
        Always(DraftPlan("eagle", DEPTH, DEPTH)),
        drafters=drafter_of("eagle", 0, model, heads),
        step_rows=128,
    )
    engine.add(request("a", prompt_of(80, 1), max_tokens=6))
    records = [result.record for result in run_out(engine)]
    read = [record.drafter_prefill for record in records[:3]]
    assert [one and one[:2] for one in read] == [None, ("eagle", 80), None]


def test_only_its_own_weights_are_replaced(model, heads):
    head = load_eagle(heads[0], model, 256)
    own = {tensor.data_ptr() for tensor in weights_of(head).values()}
    assert own and not own & {tensor.data_ptr() for tensor in weights_of(model).values()}
    other = load_eagle(heads[1], model, 256)
    assert own == {tensor.data_ptr() for tensor in weights_of(head).values()}
    put_weights(head, weights_of(other))
    assert own == {tensor.data_ptr() for tensor in weights_of(head).values()}  # in place: graphs point there
    assert all(
        bool((a == b).all())
        for a, b in zip(weights_of(head).values(), weights_of(other).values(), strict=True)
    )


def test_weights_that_do_not_fit_change_nothing(model, heads):
    head = load_eagle(heads[0], model, 256)
    before, other = copy_of(head), copy_of(load_eagle(heads[1], model, 256))
    [*names] = other
    for wrong in ({**other, names[-1]: other[names[-1]][:-1]}, {n: other[n] for n in names[:-1]}):
        with pytest.raises(BadCheckpoint, match=names[-1].replace(".", r"\.")):
            put_weights(head, wrong)
        assert all(
            bool((a == b).all()) for a, b in zip(before.values(), weights_of(head).values(), strict=True)
        )


def test_the_first_difference_of_shapes_is_named():
    assert first_difference(tiny_config(), tiny_config()) == ""
    assert (
        first_difference(tiny_config(intermediate=64), tiny_config()) == "specs.0.intermediate is 64, not 48"
    )


# --------------------------------------------------------------------------------------------------- an LLM's


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    """A target and heads for it: two alike, one of another shape."""
    folder = tmp_path_factory.mktemp("live")
    write_tiny(folder / "target")
    config = open_checkpoint(folder / "target").config
    assert config is not None
    for name, words, seed in (("one", config.vocab, 3), ("two", config.vocab, 4), ("narrow", 50, 3)):
        write_eagle(folder / name, config, eagle_tensors(config, words, seed=seed))
    return folder


def test_a_draft_is_swapped_and_rolled_back(folders):
    asked = {"temperature": 0.7, "seed": 5, "max_tokens": 30, "ignore_eos": True}
    prompt = list(range(3, 12))
    with LLM(
        folders / "target", draft=str(folders / "one"), speculation={"depth": 3}, cache_bytes=1 << 20
    ) as llm:
        live, driver = llm.live_draft, llm.driver
        with pytest.raises(InvalidRequest, match="nothing to roll back"):
            live.roll_back(driver)
        first = copy_of(llm.engine.drafters["eagle"].network)
        [plain] = llm.generate(prompt, **asked, speculation="off")
        [before] = llm.generate(prompt, **asked)
        state = live.swap(driver, folders / "two")
        assert (state.path, state.previous) == (folders / "two", folders / "one")
        assert live.states["eagle"] == state
        [after] = llm.generate(prompt, **asked)
        with pytest.raises(BadCheckpoint, match=r"narrow has another shape.*draft_vocab is 50, not"):
            live.swap(driver, folders / "narrow")
        with pytest.raises(InvalidRequest, match="is a model, and none drafts here"):
            live.swap(driver, folders / "target")
        assert live.states["eagle"].path == folders / "two"
        state = live.roll_back(driver)
        assert (state.path, state.previous) == (folders / "one", folders / "two")
        back = weights_of(llm.engine.drafters["eagle"].network)
        assert all(bool((a == b).all()) for a, b in zip(first.values(), back.values(), strict=True))
        [again] = llm.generate(prompt, **asked)
        ids = [output.choices[0].token_ids for output in (plain, before, after, again)]
        assert ids == [ids[0]] * 4
        assert live.roll_back(driver).path == folders / "two"


def changed(change: Callable[[Tensor], Tensor]) -> Callable[[Path], None]:
    """Every weight of a draft, changed."""

    def write(folder: Path) -> None:
        file = folder / "model.safetensors"
        tensors = load_file(file)
        save_file(
            {n: change(t).contiguous() if t.is_floating_point() else t for n, t in tensors.items()}, file
        )

    return write


def set_config(**fields: object) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))

    return write


def replaced_by(name: str, make: Callable[[Path], object]) -> Callable[[Path], None]:
    return lambda folder: ((folder / name).unlink(), make(folder / name))[0]


REFUSED: dict[str, Callable[[Path], object]] = {
    "no numbers": changed(lambda t: torch.full_like(t, torch.nan)),
    "one infinite number": changed(lambda t: t.clone().index_fill_(0, torch.tensor([1]), torch.inf)),
    "whole numbers": changed(lambda t: t.to(torch.int8)),
    "complex numbers": changed(lambda t: t.to(torch.complex64)),
    "scalars": changed(lambda t: t.flatten()[0] if t.dim() == 1 else t),
    "other shapes": changed(lambda t: t.flatten()),
    "nothing in them": changed(lambda t: t[:0]),
    "a huge config": set_config(num_hidden_layers=10**6, hidden_size=1 << 27),
    "a config of text": set_config(hidden_size="32"),
    "architectures of a number": set_config(architectures=5, draft_vocab_size="x"),
    "odd taps": set_config(
        eagle_config=[1],
        eagle_aux_hidden_state_layer_ids=["x"],
        outrider_head={"taps": 3},
        draft_vocab_size=7,
    ),
    "a deep config": replaced_by("config.json", lambda file: file.write_text("[" * 200_000)),
    "a config that is a list": replaced_by("config.json", lambda file: file.write_text("[]")),
    "a pipe for a config": replaced_by("config.json", os.mkfifo),
    "a pipe for weights": replaced_by("model.safetensors", os.mkfifo),
    "an endless file": replaced_by("model.safetensors", lambda file: file.symlink_to("/dev/zero")),
    "weights that are another file": replaced_by("model.safetensors", lambda file: file.symlink_to(__file__)),
    "cut weights": lambda folder: os.truncate(folder / "model.safetensors", 3000),
    "no weights": lambda folder: (folder / "model.safetensors").unlink(),
}
HARMLESS: dict[str, Callable[[Path], object]] = {
    "huge numbers": changed(lambda t: torch.full_like(t, 3e38)),
    "zeros": changed(torch.zeros_like),
    "doubles": changed(Tensor.double),
}


@pytest.mark.parametrize("kind", ["eagle", "lm"])
def test_hostile_weights_are_refused_or_change_no_token(folders, tmp_path, kind):
    sound = folders / {"eagle": "one", "lm": "target"}[kind]
    asked = {"temperature": 0.7, "seed": 5, "max_tokens": 24, "ignore_eos": True}
    prompts = [list(range(3, 12)), [5, 6, 7] * 5]
    with LLM(folders / "target", draft=str(sound), speculation={"depth": 3}, cache_bytes=1 << 20) as llm:
        live, driver = llm.live_draft, llm.driver
        plain = [output.token_ids for output in llm.generate(prompts, **asked, speculation="off")]
        first = copy_of(llm.engine.drafters[kind].network)
        for number, (name, spoil) in enumerate({**REFUSED, **HARMLESS}.items()):
            folder = shutil.copytree(sound, tmp_path / f"d{number}")
            spoil(folder)
            if name in HARMLESS:
                live.swap(driver, folder)
                assert [output.token_ids for output in llm.generate(prompts, **asked)] == plain, name
                live.roll_back(driver)
                continue
            with pytest.raises(OutriderError, match=f"{folder}") as refusal:
                live.swap(driver, folder)
            assert "outrider-draft-" not in str(refusal.value), name
        kept = weights_of(llm.engine.drafters[kind].network)
        assert all(bool((a == b).all()) for a, b in zip(first.values(), kept.values(), strict=True))
        broken = {n: torch.full_like(t, torch.nan) if t.is_floating_point() else t for n, t in first.items()}
        driver.run(lambda: llm.engine.replace_weights(kind, broken), settled=True)  # unchecked
        assert [output.token_ids for output in llm.generate(prompts, **asked)] == plain


@pytest.mark.parametrize("kind", ["eagle", "lm"])
def test_files_that_are_cut_while_they_are_read_do_no_harm(folders, tmp_path, kind):
    """Weights are mapped, and reading beyond the end of a mapped file kills the process, so a swap reads a copy."""
    sound = folders / {"eagle": "two", "lm": "target"}[kind]
    draft = shutil.copytree(sound, tmp_path / "draft")
    with LLM(
        folders / "target", draft=str(folders / {"eagle": "one", "lm": "target"}[kind]), cache_bytes=1 << 20
    ) as llm:
        run = llm.driver.run

        def late(work, settled=False):
            assert str(draft) not in Path("/proc/self/maps").read_text()
            os.truncate(draft / "model.safetensors", 100)
            return run(work, settled)

        llm.driver.run = late
        assert llm.live_draft.swap(llm.driver, draft).path == draft
        with pytest.raises(BadCheckpoint, match=f"{draft}"):
            llm.live_draft.swap(llm.driver, draft)


STREAMS = 32


def exchange_at(llm: LLM, steps: set[int], running: Callable[[], int]) -> list[int]:
    """Have the engine wait at these steps for the next exchange of weights; how many run at each."""
    asked, count, seen = threading.Semaphore(0), itertools.count(), []
    step, run = llm.engine.step, llm.driver.run

    def waiting_step():
        assert next(count) not in steps or asked.acquire(timeout=60)
        return step()

    def noted_run(work, settled=False):
        if not settled:  # no exchange
            return run(work)
        asked.release()
        return run(lambda: (seen.append(running()), work())[1], settled)

    llm.engine.step, llm.driver.run = waiting_step, noted_run
    return seen


@pytest.mark.parametrize("lag", [None, 1])
def test_swaps_and_roll_backs_under_32_streams(folders, monkeypatch, lag):
    if lag is not None:  # steps as they are captured on a GPU, the host behind them
        monkeypatch.setattr(build_module, "EagerRunner", partial(lagging_runner, lag=lag, default="eagle"))
    options = {"speculation": {"depth": 3}, "cache_bytes": 1 << 22, "max_sequences": STREAMS}
    asked = [
        SamplingParams(temperature=0.9 * (i % 2), seed=i, max_tokens=56 + i % 5, ignore_eos=True)
        for i in range(STREAMS)
    ]
    prompts = [list(range(3, 8 + i % 7)) for i in range(STREAMS)]
    with LLM(folders / "target", draft=str(folders / "one"), **options) as llm:
        plain = llm.generate(prompts, asked, speculation="off")
        received: queue.SimpleQueue = queue.SimpleQueue()
        requests = [llm.request(ids, one) for ids, one in zip(prompts, asked, strict=True)]
        live: list = []
        running = exchange_at(llm, {3, 5, 7, 9}, lambda: sum(one.finish_reason is None for [one] in live))
        live += llm.driver.submit(requests, received.put)
        llm.live_draft.swap(llm.driver, folders / "two")
        for _ in range(3):
            llm.live_draft.roll_back(llm.driver)
        said: dict[str, list[int]] = {}
        ends: dict[str, str] = {}
        while len(ends) < STREAMS:
            event = received.get(timeout=20)
            said.setdefault(event.request_id, []).extend(event.token_ids)
            ends |= {event.request_id: event.finish_reason} if event.finish_reason else {}
        assert set(ends.values()) == {"length"} and running == [STREAMS] * 4
        assert [said[one.id] for one in requests] == [output.token_ids for output in plain]
        assert min(one.drafted for [one] in live) > 0 and not llm.engine.drafters.faults
