"""`lm`: its guesses are those of the draft model read from scratch, whatever was accepted, evicted or
paused.
"""

from __future__ import annotations

import pytest
import torch

from outrider.cache.store import KeyValueStore
from outrider.cache.table import SlotTable
from outrider.draft.feed import text_batch
from outrider.draft.lm import LmDrafter
from outrider.types import NO_DRAFT, Bet, Draft, Verdict
from tests.tiny import (
    VOCAB,
    Always,
    Watched,
    finish,
    lm_drafter,
    noised_model,
    prompt_of,
    request,
    sequence,
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
    store = KeyValueStore(c.layers, len(text), c.kv_heads, c.head_dim)
    table = SlotTable(len(text), 1, len(text), reuse=False)
    row, _ = table.open([])
    table.extend(row, len(text))
    return model.forward(text_batch(table, [row], [text], [0]), store)[0]


def naive_chain(model, text: list[int], depth: int) -> list[int]:
    out: list[int] = []
    for _ in range(depth):
        out.append(int(logits_after(model, text + out)[:VOCAB].argmax()))
    return out


def settle(drafter: LmDrafter, s, draft: Draft, accepted: list[int], after: int) -> None:
    """What the engine does with a verdict."""
    tokens = [*(draft.tokens[n] for n in accepted), after]
    s.tokens += tokens
    drafter.accept(s, draft, Verdict(tokens, accepted))
    drafter.table.check()
    assert drafter.states[s].valid <= len(s.tokens) - 1
    assert drafter.table.lengths[drafter.states[s].row] == drafter.states[s].valid


@pytest.mark.parametrize("accepted", [0, 1, 2, 3, 4])
def test_chains_after_every_accepted_length(small, accepted):
    drafter = lm_drafter(small)
    s = sequence(prompt_of(70, 1))
    for turn in range(4):
        (draft,) = drafter.propose([s], [Bet("lm", 4, 4)])
        assert list(draft.tokens) == naive_chain(small, s.tokens, 4)
        settle(drafter, s, draft, list(range(accepted)), (turn * 7) % VOCAB)


@pytest.mark.parametrize("bet", [Bet("lm", 9, 4), Bet("lm", 10, 3, (2, 2, 1)), Bet("lm", 40, 20)])
def test_trees_as_from_scratch(small, bet):
    drafter = lm_drafter(small)
    s = sequence(prompt_of(20, 2))
    for turn in range(3):
        (draft,) = drafter.propose([s], [bet])
        assert len(draft) <= bet.nodes
        for node in range(-1, len(draft)):
            path = draft.path(node)
            children = [draft.tokens[n] for n in range(len(draft)) if draft.parents[n] == node]
            best = logits_after(small, s.tokens + [draft.tokens[n] for n in path]).topk(4).indices.tolist()
            assert set(children) <= set(best) and (not children or best[0] in children)
        deepest = max(range(len(draft)), key=lambda n: draft.depths[n])
        settle(drafter, s, draft, draft.path(deepest)[: 2 + turn], turn)


def test_a_guess_nobody_judged_is_forgotten(small):
    drafter = lm_drafter(small)
    s = sequence(prompt_of(12, 3))
    for _ in range(3):
        (draft,) = drafter.propose([s], [Bet("lm", 4, 4)])
        assert list(draft.tokens) == naive_chain(small, s.tokens, 4)
        s.tokens.append(5)
        drafter.table.check()


@pytest.mark.parametrize("rows, slots", [(2, 4000), (8, 140)])
def test_idle_states_give_way(small, rows, slots):
    drafter = lm_drafter(small, slots=slots, sequences=rows)
    several = [sequence(prompt_of(25 + i, i)) for i in range(6)]
    for turn in range(3):
        for pair in ((0, 1), (2, 3), (4, 5), (0, 3)):
            some = [several[i] for i in pair]
            for s, draft in zip(some, drafter.propose(some, [Bet("lm", 3, 3)] * 2), strict=True):
                assert list(draft.tokens) == naive_chain(small, s.tokens, 3)
                settle(drafter, s, draft, [0], turn)
    for s in several:
        drafter.stop(s)
    drafter.table.check()
    assert drafter.table.used == 0 and drafter.table.rows_left == rows and not drafter.states


def test_too_little_room_for_all_is_no_guess(small):
    drafter = lm_drafter(small, slots=40)
    some = [sequence(prompt_of(30, i)) for i in range(2)]
    assert drafter.propose(some, [Bet("lm", 3, 3)] * 2) == [NO_DRAFT] * 2
    drafter.table.check()
    for s in some:
        drafter.accept(s, NO_DRAFT, Verdict([1], []))
        s.tokens.append(1)
    (draft,) = drafter.propose(some[:1], [Bet("lm", 3, 3)])
    assert list(draft.tokens) == naive_chain(small, some[0].tokens, 3)


def test_a_vocabulary_padded_further():
    larger = tiny_model(seed=5, vocab=VOCAB + 32)
    drafter = lm_drafter(larger)
    s = sequence(prompt_of(10, 1), temperature=2.0)
    for turn in range(20):
        (draft,) = drafter.propose([s], [Bet("lm", 12, 3)])
        assert max(draft.tokens) < VOCAB
        settle(drafter, s, draft, [], turn)


def test_a_smaller_vocabulary():
    smaller = tiny_model(seed=5, vocab=48)
    drafter = lm_drafter(smaller)
    inside, outside = sequence(prompt_of(10, 1)), sequence([1, 50, 2])
    inside.tokens = [t % 48 for t in inside.tokens]
    drafts = drafter.propose([outside, inside], [Bet("lm", 12, 3)] * 2)
    assert drafts[0] == NO_DRAFT and len(drafts[1]) == 12 and max(drafts[1].tokens) < 48
    # Bans that leave next to nothing inside: what the draft does not know must never be fed to it.
    banned = dict.fromkeys(range(48), -100.0)
    for options in ({"top_k": 1, "temperature": 1.0}, {"logit_bias": banned}):
        s = sequence(inside.tokens, **options)
        (draft,) = drafter.propose([s], [Bet("lm", 12, 4)])
        assert all(t < 48 for t in draft.tokens)


def test_the_end_of_the_context(small):
    drafter = lm_drafter(small, context=40)
    s = sequence(prompt_of(30, 4))
    lengths = []
    while len(s.tokens) < 45:
        (draft,) = drafter.propose([s], [Bet("lm", 4, 4)])
        lengths.append((len(s.tokens), len(draft)))
        drafter.accept(s, draft, Verdict([1], []))
        s.tokens.append(1)
    assert all(bool(n) == (length + 4 < 40) for length, n in lengths)


@pytest.mark.parametrize("temperature", [0, 0.8])
@pytest.mark.parametrize("bet", [Bet("lm", 4, 4), Bet("lm", 6, 3, (2, 1, 1))])
def test_a_draft_that_is_the_target_is_always_right(temperature, bet):
    drafter = LmDrafter(tiny_model(vocab=60), 2000, 32, 256, 60)  # all of its tokens take part in a draw
    engine = tiny_engine(tiny_model(vocab=60))
    engine.use_drafters({"lm": drafter}, Always(bet))
    prompt = [t % 60 for t in prompt_of(9, 1)]
    (s,) = engine.add(request("a", prompt, temperature=temperature, max_tokens=(bet.depth + 1) * 12))
    finish(engine)
    assert s.steps == 12 and s.accepted == 12 * bet.depth
    assert drafter.table.used == 0


def test_guesses_after_a_pause_are_those_without_one():
    """Off for 200 tokens, then on: the same tokens are drafted at the same places as without the pause."""

    def run(paused: bool):
        watched = Watched(lm_drafter(noised_model(context=700), context=700))
        engine = tiny_engine(tiny_model(context=700))
        on = (lambda s: not 100 <= len(s.output) < 300) if paused else (lambda s: True)
        engine.use_drafters({"lm": watched}, Always(Bet("lm", 4, 4), on))
        (s,) = engine.add(request("a", prompt_of(9, 1), temperature=0.8, max_tokens=500))
        out = tokens_of(finish(engine)["a", 0])
        return out, watched.seen, s.accepted

    (out, always, accepted), (same, paused, _) = run(False), run(True)
    assert out == same and len(out) == 500 and 100 < accepted < 400
    after = {key: draft for key, draft in paused.items() if key[1] >= 9 + 300}
    shared = {key: draft for key, draft in after.items() if key in always}
    assert shared and shared == {key: always[key] for key in shared}
    # Steps may start at other places; from the first they share, every place is the same.
    first = min(key[1] for key in shared)
    assert {k: d for k, d in after.items() if k[1] >= first} == {
        k: d for k, d in always.items() if k[1] >= first
    }
    assert first < 9 + 300 + 30
