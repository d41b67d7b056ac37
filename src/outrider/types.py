"""The words of Outrider. Read this first; every other file speaks them.

A user's `Request` becomes one `Sequence` per choice. Each step gives every picked sequence some known
tokens and a `Draft` of zero or more draft tokens; the runner packs them into one flat `Batch`; the target
turns it into logits; verify turns those into one `Verdict` a sequence; a `StepRecord` says what it cost.

No torch here: a `Batch` holds tensors but only the model and verify look inside.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from outrider.sampling_params import MAX_NODES as MAX_NODES
from outrider.sampling_params import SamplingParams as SamplingParams
from outrider.sampling_params import Speculation as Speculation

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
    from torch import Tensor


class TreeShape(NamedTuple):
    """Of a draft tree. As many nodes as levels are a chain; a wider tree has the nodes most likely to be accepted."""

    depth: int
    nodes: int

    @property
    def is_chain(self) -> bool:
        return self.depth == self.nodes


NO_TREE = TreeShape(0, 0)
FinishReason = Literal["stop", "length", "abort", "error"]
Origin = Literal["plain", "accepted", "recovered", "bonus"]


@dataclass(frozen=True, slots=True)
class Request:
    """One call. `seed` is settled here; choice `i` derives its own from `(seed, i)`."""

    id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    owner: str = ""  # whose cache entries this request may reuse (an API key's digest)
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    stop_ids: frozenset[int] = frozenset()  # end-of-text ids (unless ignored) and the user's own
    prediction_ids: tuple[int, ...] = ()
    grammar: Any = field(default=None, compare=False)  # compiled; each choice moves a copy of it along
    background: bool = False  # pauses while any other request runs or waits

    @property
    def edits_logits(self) -> bool:
        """True when penalties, bias, bad words, a minimum length or a grammar change the target's logits."""
        p = self.params
        return bool(
            p.penalised or p.logit_bias or self.bad_word_ids or p.min_tokens or self.grammar is not None
        )


@dataclass(frozen=True, slots=True)
class Draft:
    """Draft tokens as a parent array: `parents[i] < i`, and -1 hangs node i from the last known token."""

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    # [n, vocab] the distribution each node's token was drawn from, the same for siblings; None: a plain choice
    log_q: Tensor | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.parents) or len(self.tokens) > MAX_NODES:
            raise ValueError(f"a draft has one parent a token and at most {MAX_NODES} nodes")
        if any(not -1 <= parent < i for i, parent in enumerate(self.parents)):
            raise ValueError("parents must come before their children")

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def chain(cls, tokens: tuple[int, ...] | list[int]) -> Draft:
        return cls(tuple(tokens), tuple(range(-1, len(tokens) - 1)))

    @property
    def depths(self) -> list[int]:
        """1 for a child of the last known token, and one more a generation."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return depths

    @property
    def ancestors(self) -> list[int]:
        """For each node the set of nodes on its path, itself included, as bits."""
        masks: list[int] = []
        for node, parent in enumerate(self.parents):
            masks.append((masks[parent] if parent >= 0 else 0) | 1 << node)
        return masks

    def rank(self, node: int) -> int:
        """Which choice it is of its parent's: how many siblings come before it."""
        return self.parents[:node].count(self.parents[node])

    def path(self, node: int) -> list[int]:
        """Nodes from the root's child down to `node`, itself included."""
        nodes = []
        while node >= 0:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]


NO_DRAFT = Draft()


class References(NamedTuple):
    """What lookup searches beside a sequence's own tokens: past answers, then the user's prediction."""

    tokens: NDArray[Any] | tuple[()] = ()  # each text is followed by -1
    answers: int = 0  # tokens of past answers


NO_REFERENCES = References()


@dataclass(slots=True, eq=False)
class Sequence:
    """A request while it lives: one of its choices, the tokens so far, and how many of them are cached."""

    request: Request
    choice: int
    seed: int  # signed 64-bit
    tokens: list[int]  # prompt, then output
    row: int = -1  # of the slot table; -1 while waiting
    cached: int = 0  # tokens whose keys and values are in their slots
    launched: int = 0  # known tokens in flight whose outcome the host must know before the next are fed
    coming: int = 0  # tokens that steps in flight emit at least
    released: int = 0  # times it gave its row and slots back
    reused: int = 0  # of the prompt, found in the cache when first admitted
    finish_reason: FinishReason | None = None
    stop: str | None = None  # the stop string that ended it
    logprobs: list[TokenLogprob] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)
    steps: int = 0  # passes of the target that emitted tokens
    drafted: int = 0
    accepted: int = 0
    grammar: Any = None  # where this choice stands in its grammar
    references: References = NO_REFERENCES
    # Nodes and accepted tokens of every step that drafted for it.
    draft_counts: list[tuple[int, int]] = field(default_factory=list)
    deepest: int = 0  # the longest path drafted
    details: list[StepDetail] = field(default_factory=list)  # of every step that emitted, where asked for
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)  # the first token has none
    problem: str | None = None  # what went wrong, when the finish reason is an error
    arrived: float = 0.0  # times of the clock that counts up: handed in, first moved, first token, last token
    started: float = 0.0
    first: float = 0.0
    ended: float = 0.0

    prompt_len: int = field(init=False)
    limit: int = field(init=False)  # tokens, prompt and all, at which it ends

    def __post_init__(self) -> None:
        self.prompt_len = len(self.request.prompt_ids)
        self.limit = self.request.params.max_tokens + self.prompt_len

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_len :]

    @property
    def pending(self) -> int:
        """Known tokens still to be fed; one while decoding."""
        return len(self.tokens) - self.cached - self.launched

    @property
    def remaining(self) -> int:
        """Tokens it may still emit, at most."""
        return self.limit - len(self.tokens)


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """What may be drafted for one sequence this step: with which drafter, how many nodes, how deep, in which shape."""

    drafter: str = "none"
    nodes: int = 0
    depth: int = 0
    tree: tuple[int, ...] | None = None  # a fixed shape; None with nodes > depth: grown best first


NO_DRAFT_PLAN = DraftPlan()


class Reason(NamedTuple):
    """Why a sequence has its draft plan, with the numbers that decided. Reasons are made every step and formatted only
    when read; sequences with the same reason share one.
    """

    kind: str
    depth: int = 0  # of the draft; 0: none
    facts: tuple[tuple[Any, ...], ...] = ()  # names and numbers; a third one is the bound that was crossed

    def __str__(self) -> str:
        shown = [
            f"{name} {_shown(value)}".rstrip() + "".join(f" > {_shown(bound)}" for bound in bounds)
            for name, value, *bounds in self.facts
        ]
        words = shown if shown and self.kind in SAID_BY_FACTS else [self.kind, *shown]
        return f"{f'depth {self.depth}' if self.depth else 'off'}: {', '.join(words)}"


class StepDetail(NamedTuple):
    """What a step drafted for a sequence, what the target accepted, and why. Kept for requests that ask for it."""

    drafter: str  # "none": a plain step
    tokens: tuple[int, ...]  # of the draft
    parents: tuple[int, ...]
    accepted: tuple[int, ...]  # nodes of the accepted path
    origins: tuple[Origin, ...]  # of the emitted tokens
    reason: Reason


# Kinds whose facts say it all: "off: batch 23 > 16".
SAID_BY_FACTS = frozenset(("pays", "below break-even", "batch", "temperature"))


def _shown(value: Any) -> str:
    """Rates to two places, counts whole, names as they are."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


@dataclass(frozen=True, slots=True)
class Plan:
    """What a step drafts, and why. The runner executes it as it is."""

    draft_plans: tuple[DraftPlan, ...]  # one for each piece of work; `NO_DRAFT_PLAN` is plain decoding
    reasons: tuple[Reason, ...] = ()
    tree: TreeShape = NO_TREE  # of the persistent batch: each of its sequences has rows for it
    drafters: tuple[str, ...] = ()  # that propose there: the lead first, then model-free ones
    prefills: tuple[int, ...] = ()  # work whose tokens the lead prefills before it drafts
    resident: tuple[bool, ...] = ()  # for each piece of work, whether it runs in the persistent batch
    cached: bool = False  # kept from an earlier step


@dataclass(slots=True)
class Work:
    """A sequence that moves in a step, and how many of its known tokens are fed. Their slots end its table row."""

    sequence: Sequence
    known: int  # a chunk of its prompt, or the last token
    drafted: int = 0  # slots behind those: of draft nodes, or of further plain passes
    # Whether the step reaches the end of what is known, so that a new token follows.
    emits: bool = field(init=False)
    start: int = field(init=False)  # tokens fed before these
    released: int = field(init=False)
    waits: int = 0  # tokens of `sequence.launched` that are this step's
    comes: int = 0  # tokens of `sequence.coming` that are this step's

    def __post_init__(self) -> None:
        sequence = self.sequence
        self.emits = self.known == sequence.pending
        self.start = sequence.cached + sequence.launched
        self.released = sequence.released

    def launch(self, tokens: int, wait: bool) -> None:
        """The step is in flight and will emit at least `tokens`. `wait`: the sequence moves on only once it settles."""
        self.waits, self.comes = self.known if wait else 0, tokens if self.emits else 0
        self.sequence.launched += self.waits
        self.sequence.coming += self.comes

    def settle(self) -> None:
        """The step is no longer in flight."""
        self.sequence.launched -= self.waits
        self.sequence.coming -= self.comes

    @property
    def alive(self) -> bool:
        """Whether the sequence still is what it was when this was scheduled: not ended, not preempted."""
        return self.sequence.finish_reason is None and self.sequence.released == self.released

    @property
    def decodes(self) -> bool:
        """Whether, before it is launched, it feeds the last token alone. The last chunk of a prompt may be one token,
        too, with the chunk before it in flight.
        """
        return self.emits and self.known == 1 and self.sequence.launched == 0

    @property
    def prompt_rows(self) -> int:
        """Rows of a prompt chunk; none where the sequence decodes."""
        return self.known if self.start < self.sequence.prompt_len else 0

    @property
    def scored(self) -> int:
        """How many of the known tokens predict a token of the prompt whose log-probability is wanted."""
        sequence = self.sequence
        if sequence.request.params.prompt_logprobs is None or sequence.choice:
            return 0
        return max(0, min(self.known, sequence.prompt_len - 1 - self.start))


@dataclass(frozen=True, slots=True)
class Options:
    """What the runner can do with the work of a step: what the planner chooses from.

    Sequences of the persistent batch share one draft tree. Host-packed rows may have any draft.
    """

    size: int = 0  # sequences that the persistent batch has rows for, padding included; 0: there is none
    resident: tuple[bool, ...] = ()  # for each piece of work, whether it is in the persistent batch
    decodes: tuple[bool, ...] = ()  # whether it could be, if the host drafts nothing for it
    trees: Mapping[str, tuple[TreeShape, ...]] = field(default_factory=dict)  # of that batch, by lead drafter
    # Chains that requests may ask for there.
    chains: Mapping[str, tuple[TreeShape, ...]] = field(default_factory=dict)
    model_free: tuple[
        str, ...
    ] = ()  # drafters without passes; in a chain step they may draft beside the lead
    branching: frozenset[str] = frozenset()  # drafters whose host-packed drafts may branch
    # By drafter and work: tokens that the drafter must prefill before it can draft, and whether steps in flight keep
    # it from drafting now.
    lag: Mapping[str, Seq[int]] = field(default_factory=dict)
    blocked: Mapping[str, Seq[bool]] = field(default_factory=dict)
    max_prefill: int = 1 << 20  # tokens that drafters may prefill in this step
    # By model-free drafter and work: draft tokens it has for a host-packed sequence.
    available: Mapping[str, Seq[int]] = field(default_factory=dict)
    after_prompts: bool = True  # whether the last chunk of a prompt may be followed by a draft
    waiting: int = 0  # prompts of which nothing was prefilled yet


@dataclass(slots=True)
class TokenLogprob:
    """The target's own log-probability of a token it emitted, and of the likeliest alternatives."""

    token: int
    logprob: float
    alternatives: list[tuple[int, float]]


@dataclass(slots=True)
class Verdict:
    """What the target said of one sequence: `accepted` draft nodes in path order, then `tokens[-1]`.

    `tokens` are all tokens emitted this step (the accepted ones and the one after; of several plain passes in one
    step, all); empty while a prompt is still being read. `logprobs` runs parallel to `tokens` when asked for.
    """

    tokens: list[int]
    accepted: list[int]
    logprobs: list[TokenLogprob] | None = None


class Event(NamedTuple):
    """What one step added to one choice of a request. The last has a finish_reason."""

    request_id: str
    choice: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    detail: StepDetail | None = None  # where asked for


@dataclass(slots=True)
class Batch:
    """The model's input, flat. R rows over S sequences; every tensor is on the model's device.

    Row r sits at `positions[r]` and sees the first `prefix[r]` entries of its sequence's slot table, plus
    the entry `prefix[r] + i` for every set bit i of `ancestors[r]`. A known token is prefix alone (its own
    slot is the last entry); a draft node sees all known tokens and its path, itself included.
    """

    ids: Tensor  # [R] int64
    positions: Tensor  # [R] int32
    slots: Tensor  # [R] int32, where this row's keys and values go
    table_rows: Tensor  # [R] int32, the row of `table` that belongs to this row's sequence
    prefix: Tensor  # [R] int32
    ancestors: Tensor  # [R] int64
    table: Tensor  # [sequences, context] int32, slot of every token
    logit_rows: Tensor  # [L] int64, rows whose logits are wanted

    @property
    def rows(self) -> int:
        return len(self.ids)

    def to(self, device: torch.device) -> Batch:
        """The same batch on a device."""
        return Batch(**{f.name: getattr(self, f.name).to(device, non_blocking=True) for f in fields(self)})


class Outcome(NamedTuple):
    """What became of one sequence's draft plan in one step."""

    sequence: Sequence
    draft_plan: DraftPlan
    drafted: int  # nodes
    deepest: int  # the longest path drafted
    accepted: int
    top1_accepted: int  # of the accepted, those before the first that was not the drafter's first choice


class CapturedShape(NamedTuple):
    """What the time of a captured step depends on."""

    drafter: str  # the lead; "none": a plain step
    tree: TreeShape
    size: int  # sequences that it was planned for, rounded up


class DrafterPrefill(NamedTuple):
    """A drafter prefilled tokens of sequences before it drafted for them."""

    drafter: str
    tokens: int
    seconds: float


@dataclass(slots=True)
class StepRecord:
    """What a step cost and bought. The only source for planner, metrics, dashboard and bench."""

    rows: int = 0  # of one pass
    sequences: int = 0
    known: int = 0  # prompt and already emitted tokens fed
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    plan_s: float = 0.0
    draft_s: float = 0.0
    target_s: float = 0.0
    verify_s: float = 0.0
    total_s: float = 0.0
    outcomes: list[Outcome] = field(default_factory=list)  # empty if no sequence could draft
    reasons: tuple[Reason, ...] = ()  # why the planner decided as it did, one for each piece of work
    # Seconds that plain steps would have taken for the same tokens; 0: unknown, or no sequence waited for a token.
    plain_s: float = 0.0
    captured: CapturedShape | None = None  # of the persistent batch, if there was one
    passes: int = 1  # plain ones, one after the other
    prompt_rows: int = 0  # of the rows, those of prompt chunks
    drafter_prefill: DrafterPrefill | None = None
    # Of one drafting sequence now and then: its drafter, tokens it emitted, and the sum of the probabilities that the
    # target gave them.
    predicted: list[tuple[str, int, float]] = field(default_factory=list)
    # Made since the last step was settled, while a request waited.
    graphs_captured: int = 0
    kernels_compiled: int = 0
    # Of model-free drafters where they did not draft. Those of captured steps are known to the planner already.
    shadow: list[Outcome] = field(default_factory=list)
    plan_cached: bool = False  # the plan was kept from an earlier step
    # Part of the total in which the host waited for the device; 0 where the device waited for the host.
    waited_s: float = 0.0
    # Distinct experts that a pass read, averaged over the layers that have any; 0: none has.
    experts: float = 0.0
    # A device that captures steps launched it operation by operation: its time says nothing of the next one like it.
    uncaptured: bool = False
    # Decoding sequences that are not in it: their first token was in flight when it was launched.
    waiting: int = 0

    @property
    def decoding(self) -> int:
        """Sequences in it that decode."""
        return min(self.known - self.prompt_rows, self.sequences)

    @property
    def answering(self) -> int:
        """Sequences that wait for their next token. In a drafting step only its own sequences are counted."""
        return self.decoding + (0 if self.drafted else self.waiting)

    @property
    def decodes_only(self) -> bool:
        return self.known == self.sequences


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came of one step."""

    events: list[Event]
    record: StepRecord
