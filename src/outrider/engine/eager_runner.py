"""Runs steps at once: the host packs all rows, and each sequence has a draft tree of its own."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace
from math import inf
from typing import Any

import torch

from outrider.cache.store import KeyValueStore
from outrider.control.experts import ExpertCosts
from outrider.control.planner import Planner
from outrider.draft.drafters import Drafters
from outrider.engine.kv_cache import KvCache
from outrider.engine.rows import PackedRows, Packer, Result, pack, padding
from outrider.engine.runner import InFlightStep, Preparation, Runner
from outrider.model.decoder import Model, make_store
from outrider.types import Batch, DrafterPrefill, DraftPlan, Options, Plan, StepRecord, Work

LONG_PREFILL = 8  # tokens: a drafter that lacks fewer drafts hardly later
# Passes are measured by rows up to five rows a sequence: kernels take rows in blocks, so that a few more may cost
# nothing or half a step. A pass beyond LONGEST_MEASURED seconds would keep a request waiting.
MEASURED_ROWS, ROWS_EACH = (1, 2, 3, 4, 5, 6, 8, 9, 12, 13, 16, 17, 24, 32, 48, 64, 96, 128), 5
MEASURED_TIMES, LONGEST_MEASURED = 2, 0.1


class EagerRunner(Runner):
    def __init__(self, model: Model, cache: KvCache, drafters: Drafters) -> None:
        self.model, self.store, self.table, self.drafters = model, cache.store, cache.table, drafters
        self.packer = Packer(model, cache.table, drafters)
        self.preparation = EagerPreparation(model, cache)

    def options(self, work: Seq[Work], members: Options, waiting: int) -> Options:
        return Options(waiting=waiting, **packed_options(self.drafters, work, [one.emits for one in work]))

    def launch(self, work: list[Work], plan: Plan) -> InFlightStep:
        begun = time.perf_counter()
        lag = self._lag(work, plan.draft_plans)
        rows = PackedRows(work, self.packer.propose(work, plan.draft_plans), plan.draft_plans)
        record = StepRecord(reasons=plan.reasons, plan_cached=plan.cached)
        step = InFlightStep(work, list(plan.draft_plans), rows, begun, record)
        for one in work:
            one.launch(1, wait=True)
        drafted = time.perf_counter()
        batch = pack(work, rows.drafts, self.table)
        rows.logits, record.rows = self.model.forward(batch, self.store), batch.rows
        record.experts = self.model.experts_read
        record.draft_s, record.target_s = drafted - begun, time.perf_counter() - drafted
        for name, tokens in lag.most_common(1):
            pairs = zip(rows.drafts, plan.draft_plans, strict=True)
            if tokens >= LONG_PREFILL and any(draft and one.drafter == name for draft, one in pairs):
                record.drafter_prefill = DrafterPrefill(name, tokens, record.draft_s)
        return step

    def _lag(self, work: Seq[Work], draft_plans: Seq[DraftPlan]) -> Counter[str]:
        """Tokens that drafters prefill before they draft."""
        lag = Counter[str]()
        for one, plan in zip(work, draft_plans, strict=True):
            if plan.nodes > 0 and one.emits and (drafter := self.drafters.resident(plan.drafter)):
                lag[plan.drafter] += drafter.tokens_behind(one.sequence)
        return lag

    def finish(self, step: InFlightStep) -> list[Result]:
        begun = time.perf_counter()
        results = self.packer.verify(step.packed)
        step.record.verify_s = time.perf_counter() - begun
        return results


def packed_options(drafters: Drafters, work: Seq[Work], drafting: Seq[bool]) -> dict[str, Any]:
    """What `Options` says of host-packed rows. `drafting`: which of the work may have a draft."""
    free, lag, branching = drafters.model_free, {}, set()
    for name in drafters.names:
        drafter = drafters.resident(name)
        if drafter is not None and name not in free:
            pairs = zip(work, drafting, strict=True)
            lag[name] = [drafter.tokens_behind(one.sequence) if here else 0 for one, here in pairs]
            branching |= {name} if drafter.trees else set()
    available = {
        name: [
            drafters.available(name, one.sequence) if here else 0
            for one, here in zip(work, drafting, strict=True)
        ]
        for name in free
    }
    return {"model_free": free, "lag": lag, "branching": frozenset(branching), "available": available}


class EagerPreparation(Preparation):
    """Measures passes by rows."""

    def __init__(self, model: Model, cache: KvCache) -> None:
        self.model, self.cache = model, cache

    def run(self, planner: Planner, sequences: int) -> Iterator[bool]:
        known, seconds = planner.costs.eager.curve, 0.0
        for rows in MEASURED_ROWS:
            if rows > ROWS_EACH * sequences or seconds > LONGEST_MEASURED:
                return
            if rows in known:
                seconds = known[rows]
                continue
            seconds = measure_pass(self.model, self.cache, planner.costs.eager.experts, rows)
            planner.costs.eager.learn_pass(rows, seconds)
            yield True


def measure_pass(model: Model, cache: KvCache, experts: ExpertCosts | None, rows: int) -> float:
    """Seconds of a pass over padding. Of a mixture of experts two passes are measured: rows of padding all choose the
    same experts, and tokens of a text choose others.
    """
    alike = _measure(model, cache.store, padding(rows, cache.store.slots))
    if experts is None or rows == 1:
        return alike
    apart = _measure(model, make_store(model, rows), _any_text(rows, model.config.vocab))
    return experts.learn_pass(rows, alike, apart, model.experts_read)


def _any_text(rows: int, vocab: int) -> Batch:
    """One sequence of different tokens. In the padding slot all would be first tokens, which are much alike."""
    batch, at = padding(rows, 0), torch.arange(rows, dtype=torch.int32)
    ids = torch.arange(rows) * max(vocab // rows, 1) % vocab
    return replace(batch, ids=ids, positions=at, slots=at, prefix=at + 1, table=at[None])


def _measure(model: Model, store: KeyValueStore, batch: Batch) -> float:
    """The least of a few."""
    seconds = inf
    model.forward(batch, store)  # warm-up
    for _ in range(MEASURED_TIMES):
        begun = time.perf_counter()
        model.forward(batch, store)
        seconds = min(seconds, time.perf_counter() - begun)
    return seconds
