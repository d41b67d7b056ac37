"""One page of results: what was measured, beside what it should be and the command that measured it.

    python -m bench.report RESULTS.json... --out docs/gpu.html

The results are those of `outrider bench --json`, `outrider audit --json`, `bench/peers.py --json`,
`bench/mixed.py --json`, `bench/gpu/step.py --json` and `bench/gpu/captured.py --json`, any number of each. Every figure
on the page comes from them or is worked out from them as the goal says; a goal that nothing was measured for is shown
so, and a miss is shown as a miss.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from html import escape
from itertools import chain
from pathlib import Path
from typing import Any

from outrider.bench.page import document, number, table

Result = dict[str, Any]
ALL = (1, 4, 16, 32, 64)
HELD = (0.7, 0.49, 0.343, 0.24)  # chances that the first draft token is accepted, the first two, ...
CONTEXT = 512  # of steps that goals count, at least: a shorter one is cheaper


@dataclass(frozen=True, slots=True)
class Found:
    """A figure, what it is the figure of, and the command that made it."""

    value: float
    said: str
    command: str


Find = Callable[[list[Result]], Iterable[Found]]


@dataclass(frozen=True, slots=True)
class Goal:
    """A bound, and where its figures are found. All of them must keep it, and there must be so many `parts`."""

    what: str
    bound: float
    at_most: bool
    unit: str
    find: Find
    parts: int = 1

    def met(self, found: Found) -> bool:
        return found.value <= self.bound if self.at_most else found.value >= self.bound

    @property
    def wanted(self) -> str:
        return f"at {'most' if self.at_most else 'least'} {number(self.bound)}{self.unit}"


# ---------------------------------------------------------------------------------------------- where figures are


def of_kind(results: list[Result], kind: str) -> list[Result]:
    return [result for result in results if result["kind"] == kind]


def command(result: Result) -> str:
    return str(result["certificate"]["command"])


def step(context: int, rows: int, field: str) -> Find:
    """Of the 8B shape, one sequence."""

    def find(results: list[Result]) -> Iterator[Found]:
        for result in of_kind(results, "step"):
            for one in result["steps"]:
                same = (one["context"], one["rows"], one["sequences"]) == (context, rows, 1)
                if same and result["shape"] == "8b":
                    yield Found(one[field], f"context {context:,}", command(result))

    return find


def ways(results: list[Result]) -> Iterator[tuple[Result, str, int, str, dict[str, Any]]]:
    """Every way of every batch of every task that was measured as if 8B: result, task, batch, name, figures."""
    for result in of_kind(results, "bench"):
        if result.get("as_if", {}).get("shape") != "8b":
            continue
        for task, found in result.get("speculation", {}).items():
            for batch, one in found["batches"].items():
                for name, way in one["ways"].items():
                    yield result, task, int(batch), name, way


def way(
    field: str,
    names: tuple[str, ...],
    batches: tuple[int, ...],
    tasks: tuple[str, ...] = ("chat", "rewrite"),
    times: float = 1,
) -> Find:
    def find(results: list[Result]) -> Iterator[Found]:
        for result, task, batch, name, one in ways(results):
            if name in names and batch in batches and task in tasks and one.get(field) is not None:
                yield Found(times * one[field], f"{task}, {name}, batch {batch}", command(result))

    return find


def if_held(name: str, tokens: float, draft: str | None = None) -> Find:
    """Tokens a second of the measured step, if so many came of each; with a `draft`, of that shape only."""

    def find(results: list[Result]) -> Iterator[Found]:
        for result, task, batch, way_name, one in ways(results):
            if draft is not None and result["as_if"].get("draft", {}).get("shape") != draft:
                continue
            if batch == 1 and way_name == name and one.get("round_rows") == 5:
                said = f"{tokens:.2f} tokens in a step of {one['round_ms']:.2f} ms ({task})"
                yield Found(1e3 * tokens / one["round_ms"], said, command(result))

    return find


def in_round(drafter: str, size: int, tokens: float = 1.0) -> Find:
    """Tokens a second of `size` sequences of the 8B shape if each gets so many of a measured step, which is plain or
    has a chain of four draft tokens; a draft model is of the 1B shape.
    """

    def find(results: list[Result]) -> Iterator[Found]:
        form = [0, 0] if drafter == "none" else [4, 4]
        for result in of_kind(results, "rounds"):
            about = result["shape"] == "8b" and result["context"] >= CONTEXT
            if not about or (drafter == "lm" and result["draft"] != "1b"):
                continue
            for one in result["rounds"]:
                if (one["drafter"], one["size"], one["form"]) == (drafter, size, form):
                    said = (
                        f"{tokens:.2f} tokens in a step of {one['ms']:.2f} ms (context {result['context']:,})"
                    )
                    yield Found(1e3 * size * tokens / one["ms"], said, command(result))

    return find


def either(*finds: Find) -> Find:
    """A figure that more than one program measures; the worst counts, whoever found it."""
    return lambda results: chain.from_iterable(find(results) for find in finds)


def best(find: Find) -> Find:
    """Where one of several is enough: the best, if there is any."""
    return lambda results: sorted(find(results), key=lambda found: found.value)[-1:]


def differing(results: list[Result]) -> Iterator[Found]:
    """Whatever the way, the task and the batch."""
    for result, task, batch, name, one in ways(results):
        if name != "plain":
            yield Found(one["differing"], f"{task}, {name}, batch {batch}", command(result))


def audited(field: str) -> Find:
    def find(results: list[Result]) -> Iterator[Found]:
        for result in of_kind(results, "audit"):
            shape = f"as if {result['as_if']['shape']}" if "as_if" in result else "the model as it is"
            for part, where in (("identity", shape), ("arrivals", f"{shape}, with arrivals")):
                if part in result:
                    yield Found(result[part][field], where, command(result))

    return find


def mixed(results: list[Result]) -> Iterator[Found]:
    """Of batches in which every kind of request was."""
    for result in of_kind(results, "mixed"):
        if result.get("as_if", {}).get("shape") == "8b" and "rates" in result and not result["left_out"]:
            yield Found(result["rates"]["all"]["ratio"], f"batch {result['batch']}", command(result))


def offline(results: list[Result]) -> Iterator[Found]:
    for result in of_kind(results, "bench"):
        together = result.get("plain", {}).get("together", {})
        if "as_if" not in result and together.get("together") == 512:
            yield Found(together["all_tok_s"], f"{together['together']} prompts at once", command(result))


GOALS = (
    Goal("Plain step of the 8B shape, context 512", 3.85, True, " ms", step(512, 1, "ms")),
    Goal("Plain step of the 8B shape, context 8,192", 4.3, True, " ms", step(8192, 1, "ms")),
    Goal("Verifying 64 nodes against a plain step", 1.10, True, "x", step(512, 64, "of_plain")),
    Goal("Step outside the target's pass", 5, True, " %", way("outside_pass", ("plain", "lookup"), (1,), times=100)),
    Goal("Lookup, 4 of 4 draft tokens accepted, batch 1", 1080, False, " tok/s",
         either(if_held("lookup", 5.0), in_round("lookup", 1, 5.0))),
    Goal("1B-shaped draft, accepted .7/.49/.343/.24, batch 1", 345, False, " tok/s",
         either(if_held("lm", 1 + sum(HELD), "1b"), in_round("lm", 1, 1 + sum(HELD)))),
    Goal("Plain decoding, batch 16", 3126, False, " tok/s",
         either(way("tok_s", ("plain",), (16,), ("chat",)), in_round("none", 16))),
    Goal("Plain decoding, batch 32", 5583, False, " tok/s",
         either(way("tok_s", ("plain",), (32,), ("chat",)), in_round("none", 32))),
    Goal("Chat at T = 0.7 with the draft, its way or the planner's, batch 1", 2.0, False, "x plain",
         best(way("ratio", ("lm", "lm:auto", "auto"), (1,), ("chat",)))),
    Goal("Rewriting at T = 0 by lookup, its way or the planner's, batch 1", 2.5, False, "x plain",
         best(way("ratio", ("lookup", "lookup:auto"), (1,), ("rewrite",)))),
    Goal("auto against plain, batch 1 to 64", 0.99, False, "x plain", way("ratio", ("auto",), ALL), parts=10),
    Goal("Tokens that differ from plain ones, as timed", 0, True, "", differing),
    Goal("Identity: tokens compared", 1_000_000, False, "", best(audited("compared"))),
    Goal("Identity: tokens that differ", 0, True, "", audited("differing")),
    Goal("A batch with logprobs, grammar, penalties, prediction", 0.93, False, "x without them", mixed),
    Goal("Offline: the 135M model, 512 prompts at once", 100_000, False, " tok/s", offline),
)  # fmt: skip


# ---------------------------------------------------------------------------------------------------------- pieces


def bar(value: float, most: float, mark: float | None = None, label: str = "") -> str:
    """A bar out of `most`, with a line at `mark` if there is one to reach."""
    width = 180
    drawn = f'<rect class="bar" x="0" y="3" width="{width * value / most:.1f}" height="12" rx="2"/>'
    if mark is not None:
        at = width * mark / most
        drawn += f'<line class="mark" x1="{at:.1f}" x2="{at:.1f}" y1="0" y2="18"/>'
    return f'<svg width="{width + 2}" height="18" role="img" aria-label="{escape(label)}">{drawn}</svg>'


def by(result: Result) -> str:
    certificate = result["certificate"]
    where = " · ".join(escape(str(certificate[part])) for part in ("machine", "versions", "commit"))
    cut = "" if result.get("complete", True) else '<p class="missed">This run was cut short.</p>'
    return f'<pre>{escape(command(result))}</pre><p class="small">{where}</p>{cut}'


# -------------------------------------------------------------------------------------------------------- sections


def goals(results: list[Result]) -> str:
    rows = [_goal(goal, list(goal.find(results))) for goal in GOALS]
    return "<h2>Goals</h2>" + table(["Goal", "Wanted", "~Measured", "Of what", "Verdict", "Command"], rows)


def _goal(goal: Goal, found: list[Found]) -> list[str]:
    if not found:
        return [escape(goal.what), goal.wanted, "", "", '<span class="none">not measured</span>', ""]
    worst = max(found, key=lambda one: one.value if goal.at_most else -one.value)
    parts = len({one.said for one in found})
    kind, verdict = ("met", "✓ met") if goal.met(worst) else ("missed", "✗ missed")
    if kind == "met" and parts < goal.parts:
        verdict = f"✓ so far, {parts} of {goal.parts} measured"
    more = f"; the worst of {len(found)}" if len(found) > 1 else ""
    return [
        escape(goal.what),
        goal.wanted,
        f"<b>{number(worst.value)}{goal.unit}</b>",
        escape(worst.said + more),
        f'<span class="{kind}">{verdict}</span>',
        f"<code>{escape(worst.command)}</code>",
    ]


def steps(result: Result) -> str:
    most = max(one["ms"] for one in result["steps"])
    rows = []
    for one in result["steps"]:
        goal = next((goal.bound for goal in GOALS if _is_about(goal, result, one)), None)
        ratio = "" if one["of_plain"] is None else f"{one['of_plain']:.3f}x"
        rows.append([
            f"{one['context']:,}", str(one["sequences"]), str(one["rows"]), f"{one['ms']:.3f}", ratio,
            "" if goal is None else number(goal), bar(one["ms"], most, goal, f"{one['ms']:.3f} ms"),
        ])  # fmt: skip
    heads = ["~Context", "~Sequences", "~Rows", "~ms", "~Of plain", "~Goal, ms", ""]
    return f"<h2>One step, shape {escape(result['shape'])}, random weights</h2>{by(result)}" + table(
        heads, rows
    )


def _is_about(goal: Goal, result: Result, one: dict[str, Any]) -> bool:
    """Whether this goal is about this step's milliseconds."""
    return goal.unit == " ms" and any(True for _ in goal.find([result | {"steps": [one]}]))


def rounds(result: Result) -> str:
    rows = [
        [str(one["size"]), escape(one["drafter"]), _form(*one["form"]), f"{one['ms']:.3f}", f"{one['of_plain']:.3f}",
         "" if one["tok_s"] is None else number(one["tok_s"]),
         "" if one["tokens"] is None else f"{one['tokens']:.2f}"]
        for one in result["rounds"]
    ]  # fmt: skip
    title = f"One captured step, shape {result['shape']}, draft {result['draft']}, random weights"
    meaning = (
        "Tokens a step are given here, not measured: a step takes as long whatever is accepted. Tokens a second "
        f"are what the measured time makes of them, all sequences together. Context {result['context']:,}."
    )
    heads = ["~Sequences", "Drafter", "Draft tree", "~ms", "~x plain", "~tok/s", "~At tokens a step"]
    return f'<h2>{escape(title)}</h2><p class="as-if">{meaning}</p>{by(result)}' + table(heads, rows)


def _form(depth: int, nodes: int) -> str:
    if not nodes:
        return "no draft"
    return f"chain of {nodes}" if nodes == depth else f"tree of {nodes}, {depth} deep"


def bench(result: Result) -> str:
    made = [f"<h2>Whole answers{_as_if(result)}</h2>", _meaning(result), by(result)]
    for task, found in result.get("speculation", {}).items():
        made.append(f"<h3>{escape(task)}, T = {found['temperature']:g}, {found['max_tokens']} tokens</h3>")
        some = [one for batch in found["batches"].values() for one in batch["ways"].values()]
        most = max(1.0, *(one["ratio"] for one in some))
        rows = [
            _way(batch, name, one, most)
            for batch, b in found["batches"].items()
            for name, one in b["ways"].items()
        ]
        heads = [
            "~Batch",
            "Way",
            "~tok/s",
            "~x plain",
            "",
            "~Worst",
            "~Tokens a step",
            "~Accepted",
            "~Step, ms",
        ]
        made.append(table([*heads, "~Outside the pass", "~Differ"], rows))
    together = result.get("plain", {}).get("together")
    if together:
        made.append(
            f"<p>{together['together']} requests at once: <b>{number(together['all_tok_s'])} tok/s</b>; one alone: "
            f"{number(together['one_tok_s'])} tok/s.</p>"
        )
    return "".join(made)


def _way(batch: str, name: str, one: dict[str, Any], most: float) -> list[str]:
    def shown(field: str, form: str) -> str:
        return "" if one.get(field) is None else form.format(one[field])

    slow = ' class="missed"' if one["ratio"] < 0.99 else ""
    differ = f'<span class="missed">{one["differing"]:,}</span>' if one["differing"] else "0"
    return [
        batch, escape(name), number(one["tok_s"]), f"<span{slow}>{one['ratio']:.2f}</span>",
        bar(one["ratio"], most, 1.0, f"{one['ratio']:.2f} times plain"), f"{one['worst']:.2f}",
        f"{one['tokens_per_step']:.2f}", shown("held", "{:.2f}"), shown("round_ms", "{:.2f}"),
        shown("outside_pass", "{:.1%}"), f"{differ} of {one['compared']:,}",
    ]  # fmt: skip


def peers(result: Result) -> str:
    made = [f"<h2>Beside other engines{_as_if(result)}</h2>", _meaning(result), by(result)]
    made.append(f"<p>Greedy, {result['depth']} draft tokens a step where an engine drafts.</p>")
    for task, batches in result["tasks"].items():
        for batch, found in batches.items():
            made.append(f"<h3>{escape(task)}, batch {batch}</h3>")
            most = max(one["tok_s"] for one in found["engines"].values())
            rows = [
                [escape(name), number(one["tok_s"]), bar(one["tok_s"], most, None, f"{one['tok_s']:.0f} tok/s"),
                 f"{one['ratio']:.2f}", f"{1e3 * one['first_s']:.0f}", f"{one['agreed_tokens']:.0f}"]
                for name, one in found["engines"].items()
            ]  # fmt: skip
            heads = [
                "Engine",
                "~tok/s",
                "",
                "~x Outrider plain",
                "~First token, ms",
                "~Tokens that agree first",
            ]
            made.append(table(heads, rows))
    return "".join(made)


def audit(result: Result) -> str:
    if "arrivals" in result:
        return _arrivals(result)
    if "identity" not in result:
        return f"<h2>Audit of a distribution{_as_if(result)}</h2>{by(result)}"
    found = result["identity"]
    line = _compared(found)
    rows = [
        [escape(name), f"{count:,}", f"{found['drafted'].get(name.rpartition(' T=')[0], 0):,}"]
        for name, count in found["by_way_and_temperature"].items()
    ]
    sizes = ", ".join(f"{size}: {count:,}" for size, count in found["by_batch"].items())
    return (
        f"<h2>Identity{_as_if(result)}</h2>{_meaning(result)}{by(result)}<p>{line} By batch: {sizes}.</p>"
        f"<details><summary>By way and temperature</summary>"
        f"{table(['Way', '~Compared', '~Drafted by this way, all temperatures'], rows)}</details>"
    )


def _arrivals(result: Result) -> str:
    found = result["arrivals"]
    rows = [[escape(name), f"{count:,}"] for name, count in found["by_kind_and_temperature"].items()]
    requests = ", ".join(f"{number:,} {escape(kind)}" for kind, number in found["requests"].items())
    left_out = ", ".join(escape(kind) for kind in found["left_out"])
    return (
        f"<h2>Identity with arrivals{_as_if(result)}</h2>{_meaning(result)}{by(result)}<p>{_compared(found)} "
        f"{found['logprobs']:,} log-probabilities compared, {found['differing_logprobs']:,} differ. Requests: "
        f"{requests}; {found['aborted']:,} aborted.{f' Left out: {left_out}.' if left_out else ''}</p>"
        f"<details><summary>By kind and temperature</summary>{table(['Kind', '~Compared'], rows)}</details>"
    )


def mixed_batch(result: Result) -> str:
    rows = [
        [escape(name), number(one["without_tok_s"]), number(one["mixed_tok_s"]), f"{one['ratio']:.3f}",
         f"{one['worst']:.3f}"]
        for name, one in result["rates"].items()
    ]  # fmt: skip
    heads = ["Tokens a second of", "~Without them", "~Mixed", "~Ratio", "~Lowest"]
    return (
        f"<h2>Requests that ask for more, in a batch of {result['batch']}{_as_if(result)}</h2>{_meaning(result)}"
        f"{by(result)}{table(heads, rows)}<p>{_compared(result)}</p>"
    )


def _compared(found: Result) -> str:
    kind = "missed" if found["differing"] else "met"
    return f"<b>{found['compared']:,}</b> tokens compared, <b class={kind}>{found['differing']:,}</b> differ."


def _as_if(result: Result) -> str:
    if "as_if" not in result:
        return ""
    draft = result["as_if"].get("draft")
    more = ""
    if draft:
        weights = f" in {draft['weights']}" if "weights" in draft else ""
        more = f", draft as if {draft['shape']}{weights} with {draft['layers']} layers"
    return escape(f", as if {result['as_if']['shape']}{more}")


def _meaning(result: Result) -> str:
    return f'<p class="as-if">{escape(result["as_if"]["meaning"])}</p>' if "as_if" in result else ""


SECTIONS: dict[str, Callable[[Result], str]] = {
    "step": steps,
    "rounds": rounds,
    "bench": bench,
    "peers": peers,
    "mixed": mixed_batch,
    "audit": audit,
}


def page(results: list[Result]) -> str:
    parts = [SECTIONS[kind](result) for kind in SECTIONS for result in of_kind(results, kind)]
    intro = (
        "Each figure stands beside its goal and the command that made it. A line across a bar is the goal, or plain "
        "decoding where ratios are shown. A goal with several figures counts the worst of them."
    )
    return document("Outrider on a GPU", f"<p>{intro}</p>{goals(results)}{''.join(parts)}")


def read(file: Path) -> Result:
    result: Result = json.loads(file.read_text(encoding="utf-8"))
    if result.get("kind") not in SECTIONS:
        raise SystemExit(
            f"{file} holds no results of outrider bench, outrider audit, bench/peers.py, bench/gpu/step.py "
            "or bench/gpu/rounds.py"
        )
    if "certificate" not in result:
        raise SystemExit(f"{file} is of a run that ended before it measured anything; leave it out")
    return result


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args(argv)
    given.out.write_text(page([read(file) for file in given.results]), encoding="utf-8")
    print(f"written to {given.out}")


if __name__ == "__main__":
    main()
