"""The advice: which drafter, how deep, and why; what the rules of thumb say against it; and the settings to copy."""

from __future__ import annotations

import json
import shlex
import textwrap
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, field
from math import prod
from typing import Any

from outrider.bench.advise import FEWEST, Expected, Measured
from outrider.bench.compare import cut
from outrider.draft.what_if import priced

WIDTH = 80
MORE = 3  # times the seconds, where they were too few
CLEAR = 0.05  # of a speed-up or of tokens a step: a smaller difference counts as none
GAIN, SMALL_GAIN = 1.5, 1.2  # speed-ups that are much and little
LARGE_TARGET = 30e9
SIZES = (0.02, 0.10)  # 2-5 % of the target, or 10-20 times smaller
METHODS = {"eagle": "eagle3", "lm": "draft_model"}  # vLLM's name of a drafter
CODE, PROSE = ("code",), ("chat", "text", "creative", "summary", "summarise", "summarising")


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule of thumb, what was measured, and whether they agree; None: nothing to say."""

    rule: str
    measured: str
    agrees: bool | None


@dataclass(frozen=True, slots=True)
class Advice:
    draft: str  # "none": plain decoding; "": nothing can be advised yet
    depth: int
    why: list[str]
    command: str
    vllm: dict[str, Any] | None  # speculative_config
    vllm_note: str
    rules: list[Rule] = field(default_factory=list)
    more: str = ""  # the command to run where nothing can be advised yet

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def advise(target: str, parameters: int, measured: Seq[Measured], seconds: float = 60.0) -> Advice:
    """The candidate that brings most over all batches asked for; none, if no speed-up is to be expected at any. Nothing
    is advised from too few prompts, nor where a speed-up is likely and not certain.
    """
    best = max(measured, key=_score, default=None)
    rules = rules_of_thumb(parameters, best)
    if best is not None and (unsure := _unsure(best, measured)):
        more = shlex.join(["outrider", "advise", target, "--seconds", f"{MORE * seconds:g}"])
        return Advice("", 0, unsure, "", None, "", rules, more)
    if best is None or not any(one.pays for one in best.expected):
        why = [_why_not(one) for one in measured] or ["no candidate was given"]
        command = shlex.join(["outrider", "serve", target, "--draft", "none"])
        return Advice("none", 0, why, command, None, "leave out --speculative-config", rules)
    first = next(one for one in best.expected if one.pays)
    command = shlex.join(["outrider", "serve", target, "--draft", best.draft])
    config, note = speculative_config(best, first.depth)
    why = [*_why(best), *_others(best, measured)]
    return Advice(best.draft, first.depth, why, command, config, note, rules)


def _unsure(best: Measured, measured: Seq[Measured]) -> list[str]:
    """Why nothing can be advised; empty if something can."""
    fewest = min(one.prompts[0] for one in measured)
    if fewest < FEWEST:
        given = best.prompts[1]
        method = "measure for longer" if given >= FEWEST else "give more prompts"
        return [f"{fewest} of {given} prompts were measured, and {FEWEST} are needed at least: {method}"]
    likely = max(best.expected, key=lambda one: one.speedup)
    if any(one.pays for one in best.expected) or likely.speedup < 1 + CLEAR:
        return []
    return [
        f"{best.draft} may pay: {likely.speedup:.2f}x at batch {likely.batch}, between {likely.low:.2f} and "
        f"{likely.high:.2f}; {fewest} prompts are too few to be sure"
    ]


def _score(one: Measured) -> float:
    """Where a draft does not pay, the planner does without: the speed-up there is 1."""
    return prod(e.speedup if e.pays else 1.0 for e in one.expected) * (1 + 1e-6 * one.expected[0].speedup)


# ------------------------------------------------------------------------------------------------------ why


def _why(best: Measured) -> list[str]:
    first = next(one for one in best.expected if one.pays)
    cost = first.tokens_per_step / first.speedup
    why = [
        f"{best.draft} brings {first.tokens_per_step:.2f} tokens a step at batch {first.batch} with drafts of "
        f"{first.depth}, and such a step takes {cost:.2f} times as long as a plain one"
    ]
    losing = [one.batch for one in best.expected if not one.pays]
    if losing:
        last = next(one for one in best.expected if not one.pays)
        why.append(
            f"at batch {', '.join(map(str, losing))} it is not sure to pay ({last.speedup:.2f}x, "
            f"{last.low:.2f} to {last.high:.2f}): Outrider's planner drafts only where it does"
        )
    unmeasured = [one.batch for one in best.expected if not one.measured]
    if unmeasured:
        why.append(
            f"times at batch {', '.join(map(str, unmeasured))} are extrapolated from smaller ones: give --seconds"
        )
    return why


def _why_not(one: Measured) -> str:
    best = max(one.expected, key=lambda e: e.speedup)
    range_ = f"{best.speedup:.2f}x, {best.low:.2f} to {best.high:.2f}"
    if best.speedup > 1:
        return f"{one.draft} is not sure to pay: {range_} at best (batch {best.batch}, depth {best.depth})"
    cost = best.tokens_per_step / best.speedup
    return (
        f"{one.draft} does not pay: a step brings {best.tokens_per_step:.2f} tokens and takes {cost:.2f} times as long "
        f"as a plain one (batch {best.batch}, depth {best.depth}: {range_})"
    )


def _others(best: Measured, measured: Seq[Measured]) -> Iterator[str]:
    for one in measured:
        if one is best:
            continue
        better = [
            theirs.batch
            for theirs, ours in zip(one.expected, best.expected, strict=True)
            if theirs.pays and theirs.speedup > ours.speedup * (1 + CLEAR)
        ]
        if better:
            yield f"{one.draft} is better at batch {', '.join(map(str, better))}"
        elif not any(e.pays for e in one.expected):
            yield _why_not(one)


# ----------------------------------------------------------------------------------------------- other engines


def speculative_config(one: Measured, depth: int) -> tuple[dict[str, Any] | None, str]:
    """vLLM's words for the same, and a remark."""
    kind, model = one.facts.kind, one.facts.model
    if kind == "lookup":
        lookup = {"prompt_lookup_max": 4, "prompt_lookup_min": 2}
        return {"method": "ngram", "num_speculative_tokens": depth, **lookup}, "at this depth at every load"
    if kind in METHODS and "vllm" in one.facts.engines:
        config = {"method": METHODS[kind], "model": model, "num_speculative_tokens": depth}
        return config, "at this depth at every load"
    if kind in METHODS:
        loads = " and ".join(one.facts.engines)
        return None, f"only {loads} can load this draft; outrider pairs export writes heads in other layouts"
    return None, f"it has no drafter like {one.draft}"


# ------------------------------------------------------------------------------------------------ rules of thumb


def rules_of_thumb(parameters: int, best: Measured | None) -> list[Rule]:
    """Those that people know, against what was measured."""
    if best is None:
        return []
    gain = max(one.speedup for one in best.expected)
    found = [_large_targets(parameters, gain), _code_or_prose(best), _hot_sampling(best)]
    if best.facts.parameters:
        found = [_family(best, gain), _size(best, gain), *found]
    return found


def _family(best: Measured, gain: float) -> Rule:
    same = bool(best.facts.same_family)
    said = f"{'the same' if same else 'another'} family ({best.facts.family}), and {gain:.2f}x"
    return Rule("a draft of the target's own family", said, same == (gain > 1 + CLEAR))


def _size(best: Measured, gain: float) -> Rule:
    ratio = best.facts.parameter_ratio
    fits = SIZES[0] <= ratio <= SIZES[1]
    said = f"{100 * ratio:.0f} % ({1 / ratio:.1f} times smaller), and {gain:.2f}x"
    return Rule("a draft of 2-5 % of the target, or 10-20 times smaller", said, fits == (gain > 1 + CLEAR))


def _large_targets(parameters: int, gain: float) -> Rule:
    large = parameters > LARGE_TARGET
    agrees = gain > SMALL_GAIN if large else gain < GAIN
    return Rule("targets above 30B gain most", f"{parameters / 1e9:.2g}B, and {gain:.2f}x", agrees)


def _code_or_prose(best: Measured) -> Rule:
    rule = "code gains more than prose"
    code = [t["tokens_per_step"] for name, t in best.tasks.items() if name in CODE]
    prose = [t["tokens_per_step"] for name, t in best.tasks.items() if name in PROSE]
    if not code or not prose:
        return Rule(rule, "not measured: the prompts have no tasks code and chat", None)
    ours, theirs = sum(code) / len(code), sum(prose) / len(prose)
    return Rule(rule, f"{ours:.2f} and {theirs:.2f} tokens a step", ours > theirs * (1 - CLEAR))


def _hot_sampling(best: Measured) -> Rule:
    rule, other = "hot sampling gains least", best.other_temperature
    if other is None:
        return Rule(rule, "not measured", None)
    pairs = sorted([(other["temperature"], other["tokens_per_step"]), (other["other"], other["there"])])
    (cold, cool), (hot, warm) = pairs
    said = f"{cool:.2f} tokens a step at temperature {cold:g}, {warm:.2f} at {hot:g}"
    return Rule(rule, said, cool > warm * (1 - CLEAR))


# ---------------------------------------------------------------------------------------------------- for people


def prices(measured: Seq[Measured], price: float) -> list[dict[str, Any]]:
    """Of a million tokens, each draft and batch by its own rate."""
    return [
        {
            "draft": one.draft,
            "batch": e.batch,
            **priced(price, e.plain_tokens_per_second, e.tokens_per_second),
        }
        for one in measured
        for e in one.expected
    ]


def table(measured: Seq[Measured]) -> Iterator[str]:
    """Within 80 columns."""
    wide = min(14, max(len(cut(one.draft, 14)) for one in measured))
    titles = f"{'draft':{wide}} {'batch':>5} {'deep':>4} {'speed-up (90 %)':>18} {'tok/step':>8}"
    yield f"{titles} {'accept':>6} {'even':>5} {'p99':>5}"
    for one in measured:
        for e in one.expected:
            yield _line(cut(one.draft, wide), wide, e)
    yield "accept: the acceptance rate, equal at every depth, that brings as many tokens;"
    yield "even: that which breaks even; p99: the longest of 100 steps against a plain one"
    if any(not e.measured for one in measured for e in one.expected):
        yield "~: times at this batch are extrapolated from smaller ones"
    for one in measured:
        if one.prompts[0] < one.prompts[1]:
            yield f"{cut(one.draft, 20)}: time for {one.prompts[0]} of {one.prompts[1]} prompts; --seconds gives more"
        yield from textwrap.wrap(f"{one.draft}: {_facts(one)}", WIDTH - 1, subsequent_indent="  ")


def _line(name: str, wide: int, e: Expected) -> str:
    even = "never" if e.break_even is None else f"{e.break_even:.2f}"
    range_ = f"{'' if e.measured else '~'}{e.speedup:.2f}x {e.low:.2f}-{e.high:.2f}"
    line = f"{name:{wide}} {e.batch:5} {e.depth:4} {range_:>18} {e.tokens_per_step:8.2f}"
    return line + f" {e.acceptance:6.2f} {even:>5} {min(e.p99, 99.9):4.2f}x"


def _facts(one: Measured) -> str:
    f = one.facts
    said = [f"a draft token takes {100 * one.draft_ratio:.1f} % of a plain step"]
    if f.parameters:
        said.append(
            f"{f.parameters / 1e6:.0f} million parameters, {100 * f.parameter_ratio:.1f} % of the target"
        )
        said.append("the target's family" if f.same_family else f"another family, {f.family}")
        said.append("the same tokenizer")
        said.append(f"its memory would hold {f.memory_tokens} more tokens of cache")
    else:
        said.append("no weights of its own")
    return "; ".join(said)


def said(advice: Advice) -> Iterator[str]:
    """For people, within 80 columns where lines can be broken."""
    deep = f", drafts of {advice.depth}" if advice.depth else ""
    yield f"advice: {advice.draft}{deep}" if advice.draft else "no advice yet:"
    for reason in advice.why:
        yield from textwrap.wrap(f"- {reason}", WIDTH - 1, initial_indent="  ", subsequent_indent="    ")
    if advice.more:
        yield f"  measure more: {advice.more}"
        yield "  until then: --draft auto, the default, drafts only where it pays"
        return
    yield f"  Outrider: {advice.command}"
    if advice.vllm is None:
        text = f"vLLM: none ({advice.vllm_note})"
        yield from textwrap.wrap(text, WIDTH - 1, initial_indent="  ", subsequent_indent="    ")
    else:
        yield f"  vLLM: --speculative-config '{json.dumps(advice.vllm)}' ({advice.vllm_note})"
    if advice.rules:
        yield f"rules of thumb (a difference below {100 * CLEAR:g} % counts as none):"
    words = {True: "agrees", False: "DISAGREES", None: "-"}
    for rule in advice.rules:
        text = f"{words[rule.agrees]:9} {rule.rule}: {rule.measured}"
        yield from textwrap.wrap(text, WIDTH - 3, initial_indent="  ", subsequent_indent=" " * 12)
