"""Drafts of an EAGLE head in one C call, against the single kernels that grow them for other kinds of drafts."""

from __future__ import annotations

import pytest

from outrider.draft import eagle_head
from outrider.draft.eagle import READ_ROWS, EagleDrafter, is_slim
from outrider.draft.eagle_head import load_eagle
from outrider.draft.reading import text_batch
from outrider.load.heads import write_head
from outrider.model.decoder import make_store
from outrider.types import NO_DRAFT, DraftPlan, Speculation
from tests.draft.rows import Rows
from tests.draft.test_eagle import KINDS, SHAPE
from tests.tiny import VOCAB, head_tensors, prompt_of, sequence, tiny_model

PLANS = {
    "chains": [DraftPlan("eagle", depth, depth) for depth in (4, 1, 6, 3)],
    "trees": [DraftPlan("eagle", *shape) for shape in ((8, 4), (2, 1), (7, 5), (4, 2))],
}


@pytest.fixture(scope="module")
def model():
    return tiny_model(threads=2, **SHAPE)


def drafter_of(folder, model, one_call: bool) -> tuple[EagleDrafter, Rows]:
    rows, store = Rows(), make_store(model, 4000)
    drafter = EagleDrafter(load_eagle(folder, model, 256), store, rows.table)
    assert drafter.head.draft is not None
    if not one_call:
        drafter.head._native = None
    return drafter, rows


def drafts(folder, model, one_call: bool, plans, asked, lengths=(9, 23, 14, 2)) -> list:
    """What is drafted at first, and after tokens that were accepted."""
    drafter, rows = drafter_of(folder, model, one_call)
    some = [rows.add(prompt_of(n, n), **params) for n, params in zip(lengths, asked, strict=True)]
    found = []
    for _ in range(3):
        for s in some:
            model.forward(text_batch(rows.table, [s.row], [s.tokens[:-1]], [0]), drafter.target_store)
        made = rows.propose(drafter, some, plans)
        found.append(made)
        for s, draft in zip(some, made, strict=True):
            rows.settle(drafter, s, draft, draft.path(len(draft) - 1)[:2], 7)
    return found


ASKED = {
    "greedy": [{}] * 4,
    "sampled": [{"temperature": 0.7, "seed": i} for i in range(4)],
    "mixed": [{}, {"temperature": 1.3, "top_k": 9}, {"temperature": 0.9, "top_p": 0.8, "min_p": 0.02}, {}],
}


@pytest.mark.parametrize("shape", PLANS)
@pytest.mark.parametrize("kind", KINDS)
def test_it_drafts_what_single_kernels_draft(tmp_path, model, monkeypatch, kind, shape):
    monkeypatch.setattr(eagle_head, "FREQUENT", 1)
    write_head(tmp_path, KINDS[kind], head_tensors(KINDS[kind]))
    for params in ASKED.values():
        one = drafts(tmp_path, model, True, PLANS[shape], params)
        assert one == drafts(tmp_path, model, False, PLANS[shape], params)
        assert [len(draft) for draft in one[0]] == [plan.nodes for plan in PLANS[shape]]


def test_a_long_text_is_read_before(tmp_path, monkeypatch):
    model = tiny_model(context=700, **SHAPE)
    monkeypatch.setattr(eagle_head, "FREQUENT", 1)
    write_head(tmp_path, KINDS["norm output"], head_tensors(KINDS["norm output"]))
    found = []
    for one_call in (True, False):
        rows, store = Rows(context=700), make_store(model, 4000)
        drafter = EagleDrafter(load_eagle(tmp_path, model, 700), store, rows.table)
        drafter.head._native = drafter.head._native if one_call else None
        s = rows.add(prompt_of(READ_ROWS[-1] + 40, 1))
        model.forward(text_batch(rows.table, [s.row], [s.tokens[:-1]], [0]), store)
        found.append(rows.propose(drafter, [s], [DraftPlan("eagle", 4, 4)]))
    assert found[0] == found[1] != [NO_DRAFT]


def test_rare_tokens_are_drafted_where_the_text_has_them(tmp_path, model):
    """The first third of the vocabulary, unless the text is of other tokens."""
    kind = KINDS["shared head, all words"]
    write_head(tmp_path, kind, head_tensors(kind))
    drafter, _ = drafter_of(tmp_path, model, True)
    few = VOCAB // 3
    often, rarely = sequence([5] * 70), sequence([5] * 40 + [few + 1] * 20)
    assert drafter.head.words_for([often]) == few
    assert drafter.head.words_for([often, rarely]) == VOCAB
    found = drafts(tmp_path, model, True, [DraftPlan("eagle", 6, 6)] * 4, ASKED["greedy"])
    assert any(token >= few for made in found for draft in made for token in draft.tokens)


def test_other_drafts_are_not_made_in_one_call(model):
    chain = DraftPlan("eagle", 4, 4)
    plain = sequence([1, 2, 3])
    assert is_slim(plain, chain) and is_slim(plain, DraftPlan("eagle", 8, 4))
    assert not is_slim(plain, DraftPlan("eagle", 9, 4)) and not is_slim(
        plain, DraftPlan("eagle", 6, 2, (2, 2))
    )
    for params in ({"repetition_penalty": 1.2}, {"temperature": 1.0, "mode": "rejection"}):
        assert not is_slim(asked(**params), chain)


def asked(mode: str = "coupled", **params):
    return sequence([1, 2, 3], speculation=Speculation(mode=mode), **params)
