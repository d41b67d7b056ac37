"""The drafters of an engine by name: what fails is counted, and who can take part in resident steps is known."""

from __future__ import annotations

import pytest

from outrider.draft.drafter import Drafter
from outrider.draft.drafters import MAX_FAULTS, Drafters
from outrider.draft.early_exit import EarlyExitDrafter
from outrider.draft.lm import LmDrafter
from outrider.draft.lookup import LookupDrafter
from outrider.draft.merged import MergedDrafter
from outrider.draft.weights import copy_of
from outrider.model.decoder import make_store
from outrider.types import NO_DRAFT, Draft, DraftPlan, Verdict
from tests.draft.rows import Rows
from tests.draft.test_lm import Counted
from tests.tiny import VOCAB, sequence, tiny_model


class Failing(Drafter):
    def __init__(self, verb: str) -> None:
        self.verb, self.called = verb, 0

    def start(self, sequence) -> None:
        self._call("start")

    def propose(self, sequences, draft_plans):
        self._call("propose")
        return [Draft.chain([1])] * len(sequences)

    def accept(self, sequence, draft, verdict) -> None:
        self._call("accept")

    def stop(self, sequence) -> None:
        self._call("stop")

    def _call(self, verb: str) -> None:
        self.called += 1
        if verb == self.verb:
            raise RuntimeError(verb)


@pytest.mark.parametrize("verb", ["start", "propose", "accept", "stop"])
def test_one_that_fails_is_left_alone_and_the_others_are_not(verb):
    failing, sound = Failing(verb), Failing("")
    drafters, s = Drafters({"failing": failing, "sound": sound}, VOCAB), sequence([1])
    for _ in range(MAX_FAULTS):
        drafters.start(s)
        drafters.propose("failing", [s], [DraftPlan("failing", 1, 1)])
        drafters.accept("failing", s, NO_DRAFT, Verdict([1], []))
        drafters.stop(s)
    assert drafters.faults == {"failing": MAX_FAULTS}
    before = failing.called
    assert drafters.propose("failing", [s], [DraftPlan("failing", 1, 1)]) == [NO_DRAFT]
    assert failing.called == before
    assert drafters.propose("sound", [s], [DraftPlan("sound", 1, 1)]) == [Draft.chain([1])]


def test_a_name_knows_who_drafts_under_it_and_other_weights_forgive_it():
    model, rows = tiny_model(), Rows()
    made = {"lm": LmDrafter(model, rows.table, VOCAB, 256), "lookup": LookupDrafter(), "own": Failing("")}
    drafters = Drafters(
        {**made, "pair": MergedDrafter({n: made[n] for n in ("lm", "lookup")}, rows.table)}, VOCAB
    )
    assert drafters.members("pair") == ("lm", "lookup") and drafters.members("own") == ("own",)
    drafters.faults = dict.fromkeys(("lm", "pair", "lookup", "own"), MAX_FAULTS)
    drafters.replace_weights("lm", copy_of(model))
    assert set(drafters.faults) == {"lookup", "own"}


def test_names():
    drafters = Drafters({"a": Failing(""), "b": Failing("")}, VOCAB)
    assert drafters.names == ("a", "b") and "a" in drafters and "none" not in drafters


def test_who_takes_part_in_resident_steps():
    model, rows = tiny_model(), Rows()
    lookup = LookupDrafter()
    made = {
        "lookup": lookup,
        "lm": LmDrafter(model, rows.table, VOCAB, 256),
        "other": LmDrafter(
            Counted(model), rows.table, VOCAB, 256
        ),  # a model that offers no passes over the device
        "early_exit": EarlyExitDrafter(model, make_store(model, 4000), rows.table, 1),
        "lookup+lm": MergedDrafter({"lookup": lookup}, rows.table),
        "own": Failing(""),
    }
    drafters = Drafters(made, VOCAB)
    assert [name for name in made if drafters.resident(name)] == ["lookup", "lm", "early_exit"]
    assert drafters.resident("none") is None
    assert drafters.resident("lm").trees and not drafters.resident("lookup").trees
