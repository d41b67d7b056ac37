"""`lm`: its drafts are those of the draft model read from scratch, whatever was accepted, preempted or paused."""

from __future__ import annotations

import pytest
import torch

from outrider.cache.store import KeyValueStore
from outrider.cache.table import SlotTable
from outrider.draft.lm import LmDrafter
from outrider.draft.reading import text_batch
from outrider.types import NO_DRAFT, DraftPlan
from tests.draft.rows import Rows
from tests.tiny import (
    VOCAB,
    Always,
    Watched,
    finish,
    lm_drafter,
    noised_model,
    prompt_of,
    request,
    tiny_engine,
    tiny_model,
    tokens_of,
)  # fmt: skip


@pytest.fixture(scope="module")
def small():
    return tiny_model(seed=5, layers=1, windows=(0,))


def logits_after(model, text: list[int]) -> torch.Tensor:
    """A full forward over the text alone, with nothing kept."""
    c = model.config
    store = KeyValueStore(c.kv_shapes, len(text))
    table = SlotTable(len(text), 1, len(text), reuse=False)
    row, _ = table.open([])
    table.extend(row, len(text))
    return model.forward(text_batch(table, [row], [text], [0]), store)[0]


def naive_chain(model, text: list[int], depth: int) -> list[int]:
    out: list[int] = []
    for _ in range(depth):
        out.append(int(logits_after(model, text + out)[:VOCAB].argmax()))
    return out


def lm(model, slots: int = 4000, rows: int = 32, context: int = 256) -> tuple[LmDrafter, Rows]:
    made = Rows(slots, rows, context)
    return LmDrafter(model, made.table, VOCAB, context, step_rows=64), made


class Counted:
    """A model that counts the rows it is given."""

    def __init__(self, model) -> None:
        self.model, self.config, self.device, self.rows = model, model.config, model.device, 0
        self.dtype, self.kept = model.dtype, model.kept
        self.draw, self.group = model.draw, model.group

    def forward(self, batch, store):
        self.rows += batch.rows
        return self.model.forward(batch, store)


@pytest.mark.parametrize("accepted", [0, 1, 2, 3, 4])
def test_chains_after_every_accepted_length(small, accepted):
    drafter, rows = lm(small)
    s = rows.add(prompt_of(70, 1))
    for turn in range(4):
        (draft,) = rows.propose(drafter, [s], [DraftPlan("lm", 4, 4)])
        assert list(draft.tokens) == naive_chain(small, s.tokens, 4)
        rows.settle(drafter, s, draft, list(range(accepted)), (turn * 7) % VOCAB)


@pytest.mark.parametrize(
    "draft_plan", [DraftPlan("lm", 9, 4), DraftPlan("lm", 10, 3, (2, 2, 1)), DraftPlan("lm", 40, 20)]
)
def test_trees_as_from_scratch(small, draft_plan):
    drafter, rows = lm(small)
    s = rows.add(prompt_of(20, 2))
    for turn in range(3):
        (draft,) = rows.propose(drafter, [s], [draft_plan])
        assert len(draft) <= draft_plan.nodes
        for node in range(-1, len(draft)):
            path = draft.path(node)
            children = [draft.tokens[n] for n in range(len(draft)) if draft.parents[n] == node]
            best = logits_after(small, s.tokens + [draft.tokens[n] for n in path]).topk(4).indices.tolist()
            assert set(children) <= set(best) and (not children or best[0] in children)
        deepest = max(range(len(draft)), key=lambda n: draft.depths[n])
        rows.settle(drafter, s, draft, draft.path(deepest)[: 2 + turn], turn)


@pytest.mark.parametrize(
    "draft_plan", [DraftPlan("lm", 4, 4), DraftPlan("lm", 7, 2, (2, 2)), DraftPlan("lm", 12, 5)]
)
def test_nothing_is_read_twice(small, draft_plan):
    """An accepted node that the model ran is not read again; the last token of a path and what follows it are."""
    counted = Counted(small)
    drafter, rows = lm(counted)
    s = rows.add(prompt_of(30, 1))
    (draft,) = rows.propose(drafter, [s], [draft_plan])
    for turn in range(4):
        path = draft.path(max(range(len(draft)), key=lambda n: draft.depths[n]))
        rows.settle(drafter, s, draft, path, turn)
        assert drafter.progress.of(s) == len(s.tokens) - 2
        before = counted.rows
        rows.propose(drafter, [s], [DraftPlan("lm", 1, 1)])
        assert counted.rows - before == 2
        rows.settle(drafter, s, NO_DRAFT, [], turn)
        (draft,) = rows.propose(drafter, [s], [draft_plan])


def test_a_draft_nobody_judged_is_forgotten(small):
    drafter, rows = lm(small)
    s = rows.add(prompt_of(12, 3))
    for _ in range(3):
        (draft,) = rows.propose(drafter, [s], [DraftPlan("lm", 4, 4)])
        assert list(draft.tokens) == naive_chain(small, s.tokens, 4)
        rows.settle(None, s, draft, [], 5)


def test_a_row_given_back_is_read_again(small):
    """Preempted, with its row and slots taken by another; then back in the same row."""
    drafter, rows = lm(small, slots=90, rows=1)
    s = rows.add(prompt_of(25, 1))
    for turn in range(4):
        (draft,) = rows.propose(drafter, [s], [DraftPlan("lm", 3, 3)])
        assert list(draft.tokens) == naive_chain(small, s.tokens, 3)
        rows.settle(drafter, s, draft, [0], turn)
        rows.preempt(s)
        other = rows.add(prompt_of(31 + turn, 9))
        rows.propose(drafter, [other], [DraftPlan("lm", 3, 3)])
        rows.preempt(other)
        rows.resume(s)


def test_rows_that_share_slots_draft_for_themselves(small):
    drafter, rows = lm(small)
    s = rows.add(prompt_of(20, 1))
    rows.propose(drafter, [s], [DraftPlan("lm", 3, 3)])
    rows.settle(drafter, s, NO_DRAFT, [], 7)
    twin = rows.branch(s, 15)
    twin.tokens[-1] = 3
    for turn in range(3):
        for one, draft in zip(
            [s, twin], rows.propose(drafter, [s, twin], [DraftPlan("lm", 3, 3)] * 2), strict=True
        ):
            assert list(draft.tokens) == naive_chain(small, one.tokens, 3)
            rows.settle(drafter, one, draft, [0, 1], turn)


@pytest.mark.parametrize("draft_plan", [DraftPlan("lm", 3, 3), DraftPlan("lm", 20, 4)])
def test_too_few_slots_to_borrow_are_no_draft(small, draft_plan):
    drafter, rows = lm(small, slots=42)
    some = [rows.add(prompt_of(20, i)) for i in range(2)]
    held = rows.table.lengths.copy()
    assert drafter.propose(some, [draft_plan] * 2) == [NO_DRAFT] * 2
    rows.table.check()
    assert (rows.table.lengths == held).all()
    rows.settle(drafter, some[0], NO_DRAFT, [], 1)
    rows.preempt(some[1])
    (draft,) = rows.propose(drafter, some[:1], [DraftPlan("lm", 3, 3)])
    assert list(draft.tokens) == naive_chain(small, some[0].tokens, 3)


def test_a_model_that_fails_leaves_the_table_as_it_was(small):
    class Failing(Counted):
        def forward(self, batch, store):
            if self.rows:
                raise MemoryError
            return super().forward(batch, store)

    drafter, rows = lm(Failing(small))
    s = rows.add(prompt_of(12, 3))
    with pytest.raises(MemoryError):
        drafter.propose([s], [DraftPlan("lm", 4, 4)])
    rows.table.check()
    assert rows.table.lengths[s.row] == 12


def test_a_vocabulary_padded_further():
    drafter, rows = lm(tiny_model(seed=5, vocab=VOCAB + 32))
    s = rows.add(prompt_of(10, 1), temperature=2.0)
    for turn in range(20):
        (draft,) = rows.propose(drafter, [s], [DraftPlan("lm", 12, 3)])
        assert max(draft.tokens) < VOCAB
        rows.settle(drafter, s, draft, [], turn)


def test_a_smaller_vocabulary():
    drafter, rows = lm(tiny_model(seed=5, vocab=48))
    inside, outside = rows.add([t % 48 for t in prompt_of(10, 1)]), rows.add([1, 50, 2])
    drafts = rows.propose(drafter, [outside, inside], [DraftPlan("lm", 12, 3)] * 2)
    assert drafts[0] == NO_DRAFT and len(drafts[1]) == 12 and max(drafts[1].tokens) < 48
    # Bans that leave next to nothing inside: what the draft does not know must never be fed to it.
    banned = dict.fromkeys(range(48), -100.0)
    for options in ({"top_k": 1, "temperature": 1.0}, {"logit_bias": banned}):
        s = rows.add(inside.tokens, **options)
        (draft,) = rows.propose(drafter, [s], [DraftPlan("lm", 12, 4)])
        assert all(t < 48 for t in draft.tokens)


def test_the_end_of_the_context(small):
    drafter, rows = lm(small, context=40)
    s = rows.add(prompt_of(30, 4))
    lengths = []
    while len(s.tokens) < 45:
        (draft,) = rows.propose(drafter, [s], [DraftPlan("lm", 4, 4)])
        lengths.append((len(s.tokens), len(draft)))
        rows.settle(drafter, s, draft, [], 1)
    assert all(bool(n) == (length + 4 < 40) for length, n in lengths)


@pytest.mark.parametrize("temperature", [0, 0.8])
@pytest.mark.parametrize("draft_plan", [DraftPlan("lm", 4, 4), DraftPlan("lm", 6, 3, (2, 1, 1))])
def test_a_draft_that_is_the_target_is_always_right(temperature, draft_plan):
    draft = tiny_model(vocab=60)  # all of its tokens take part in a draw
    engine = tiny_engine(
        tiny_model(vocab=60),
        Always(draft_plan),
        drafters=lambda cache: {"lm": LmDrafter(draft, cache.table, 60, 256)},
    )
    prompt = [t % 60 for t in prompt_of(9, 1)]
    (s,) = engine.add(request("a", prompt, temperature=temperature, max_tokens=(draft_plan.depth + 1) * 12))
    finish(engine)
    assert s.steps == 12 and s.accepted == 12 * draft_plan.depth


def test_drafts_after_a_pause_are_those_without_one():
    """Off for 100 tokens, then on: the same tokens are drafted at the same places as without the pause."""

    def run(paused: bool):
        on = (lambda s: not 60 <= len(s.output) < 160) if paused else (lambda s: True)
        engine = tiny_engine(
            tiny_model(context=700),
            Always(DraftPlan("lm", 4, 4), on),
            drafters=lambda cache: {"lm": Watched(lm_drafter(noised_model(context=700), cache))},
        )
        watched = engine.drafters["lm"]
        (s,) = engine.add(request("a", prompt_of(9, 1), temperature=0.8, max_tokens=300))
        out = tokens_of(finish(engine)["a", 0])
        return out, watched.seen, s.accepted

    (out, always, accepted), (same, paused, _) = run(False), run(True)
    assert out == same and len(out) == 300 and 60 < accepted < 240
    after = {key: draft for key, draft in paused.items() if key[1] >= 9 + 160}
    shared = {key: draft for key, draft in after.items() if key in always}
    assert shared and shared == {key: always[key] for key in shared}
    # Steps may start at other places; from the first they share, every place is the same.
    first = min(key[1] for key in shared)
    assert {k: d for k, d in after.items() if k[1] >= first} == {
        k: d for k, d in always.items() if k[1] >= first
    }
    assert first < 9 + 160 + 30
