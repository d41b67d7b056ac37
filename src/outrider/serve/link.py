"""Messages between the API process and the engine process.

Two processes, so that reading JSON, rendering templates and writing streams never hold up a step. They share
one socket pair; a message is a msgpack struct behind its length. No pickle: nothing that arrives can be code.

    API process            ->  Start, Submit, Abort, Swap
    engine process         ->  Loading, Ready | Failed, Prepared, Compiled, Accepted | Refused, Progress, Swapped

A third process tries new grammars before the engine sees them; the API process has a socket pair with it, too.

    API process            ->  Vocabulary, Grammar
    grammar process        ->  Tried
"""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any, TypeVar

import msgspec

from outrider.types import SamplingParams

_LENGTH = struct.Struct("!I")
MAX_MESSAGE = 1 << 30
COMPILERS = 2  # grammars that the engine compiles at once


class EventAddress(msgspec.Struct):
    """Where the KV cache's events are published."""

    publish: str
    replay: str | None
    topic: str


class Start(msgspec.Struct, tag=True):
    """What to load. `settings` are the fields of Settings."""

    model: str
    draft: str
    settings: dict[str, Any]
    logging: tuple[str, str]  # format and level
    events: EventAddress | None = None


class Submit(msgspec.Struct, tag=True):
    id: str
    prompt: list[int]
    params: SamplingParams
    owner: str
    background: bool = False  # pauses while any other request runs or waits


class Abort(msgspec.Struct, tag=True):
    id: str


class Swap(msgspec.Struct, tag=True):
    """Draft with the weights in this folder from the next step on; none: with those before the last swap."""

    number: int
    path: str | None


class ServedDraft(msgspec.Struct):
    """A draft with weights of its own, as it is in use."""

    drafter: str
    path: str
    since: float  # seconds since 1970
    previous: str | None  # what rolling back brings


class Swapped(msgspec.Struct, tag=True):
    number: int
    draft: ServedDraft | None
    problem: str = ""
    fault: bool = False  # ours, not the request's


class Loading(msgspec.Struct, tag=True):
    """Bytes of weights that were read, and those that there are."""

    done: int
    total: int


class Ready(msgspec.Struct, tag=True):
    """The engine is up. What the API process needs to know of the model, so that it loads nothing itself."""

    tokenizer: str
    bos_id: int | None
    eos_ids: list[int]
    add_bos: bool | None
    template: str | None
    family: str
    vocab: int
    context: int
    cache_tokens: int  # slots of the cache: no request can need more
    cache_block: int  # tokens that prefixes are cached in units of
    drafter: str
    plan: dict[str, Any]  # memory and speed, for people
    sampling: dict[str, int | float] = {}  # the model's own defaults
    special_tokens_in_text: bool = False
    drafts: list[ServedDraft] = []  # those with weights of their own
    drafters: list[str] = []  # that a request may name


class Failed(msgspec.Struct, tag=True):
    """The model could not be loaded; trying again will not help."""

    message: str


class Compiled(msgspec.Struct, tag=True):
    """A request's grammar is ready; the engine takes the request after the step in hand."""

    id: str


class Accepted(msgspec.Struct, tag=True):
    id: str
    seed: int


class Refused(msgspec.Struct, tag=True):
    id: str
    message: str
    param: str | None
    fault: bool = False  # ours, not the request's


class Score(msgspec.Struct, array_like=True):
    """A token's log-probability and those of its rivals."""

    token: int
    logprob: float
    rivals: list[tuple[int, float]]


class End(msgspec.Struct):
    """What a finished choice cost."""

    seed: int
    cached: int
    steps: int
    drafted: int
    accepted: int
    deepest: int
    draft_counts: list[tuple[int, int]]
    origins: list[str]
    queue_s: float
    prompt_s: float
    decode_s: float
    problem: str | None
    stop: str | None = None  # the stop string that ended it


class Detail(msgspec.Struct, array_like=True):
    """What a step drafted for one choice, what the target accepted, and the planner's reason."""

    drafter: str
    tokens: list[int]  # of the draft
    parents: list[int]
    accepted: list[int]  # nodes
    origins: list[str]  # of the emitted tokens
    reason: str
    kind: str
    depth: int
    facts: list[list[str | int | float]]  # a name, a number, and the bound that was crossed, if one was


class Piece(msgspec.Struct, array_like=True):
    """What a step added to one choice."""

    id: str
    choice: int
    token_ids: list[int]
    text: str
    finish_reason: str | None
    scores: list[Score] | None
    end: End | None
    prompt_scores: list[Score | None] | None = None  # with the first tokens, where asked for
    detail: Detail | None = None  # where asked for


class Drafted(msgspec.Struct, array_like=True):
    """What became of one drafter's drafts in a step."""

    drafts: int = 0
    first_accepted: int = 0  # drafts whose first choice for the first token was accepted
    predicted: int = 0  # tokens that were looked at more closely
    probability: float = 0.0  # the sum of what the target gave those
    reached: list[int] = []  # drafts with a token at depth 1, 2, ...
    accepted: list[int] = []  # and those of them in which it was accepted


class Step(msgspec.Struct):
    """What a step cost and bought; for the metrics."""

    rows: int
    sequences: int
    known: int
    answering: int  # sequences that wait for their next token
    drafts: int  # sequences that a draft was made for
    drafted: int
    positions: int  # depths of the drafts, summed: a tree has several tokens for one position
    accepted: int
    accepted_at: list[int]  # sequences with an accepted draft token at depth 1, 2, ...
    lossy: int  # tokens accepted by sequences in a mode that is not exact
    emitted: int
    plan_s: float
    draft_s: float
    target_s: float
    verify_s: float
    total_s: float
    passes: int  # of the target
    plain_s: float
    reasons: dict[str, int]
    graphs_captured: int = 0  # while a request waited
    kernels_compiled: int = 0
    drafters: dict[str, Drafted] = {}
    said: dict[str, str] = {}  # now and then: for each kind of reason, the latest with its numbers


class Gauges(msgspec.Struct):
    running: int
    cache_used: float
    preemptions: int
    prefix_queried: int
    prefix_found: int
    unpaid: dict[
        str, int
    ] = {}  # drafts that never paid, and how many tokens of cache their memory would hold


class Progress(msgspec.Struct, tag=True):
    """Everything one step has to tell, or, without a step, what an abort left behind."""

    pieces: list[Piece]
    started: list[str]  # requests that left the queue
    step: Step | None
    gauges: Gauges


class Vocabulary(msgspec.Struct, tag=True):
    """What grammars are compiled for, and how much each may take."""

    tokenizer: str
    vocab: int
    eos_ids: list[int]
    deepest: int  # levels
    stack: int  # bytes; less than the engine has for the same
    memory: int  # bytes beyond what the vocabulary takes


class Grammar(msgspec.Struct, tag=True):
    grammar: dict[str, Any]
    seconds: int  # of processor time


class Tried(msgspec.Struct, tag=True):
    problem: str | None


class Prepared(msgspec.Struct, tag=True):
    """Every step is captured and measured: nothing more is prepared while no request runs."""


class Ping(msgspec.Struct, tag=True):
    """Asks for a sign of life."""


class Pong(msgspec.Struct, tag=True):
    """The answer to it."""


ToEngine = Start | Submit | Abort | Swap | Ping
ToGrammars = Vocabulary | Grammar
FromEngine = Loading | Ready | Failed | Compiled | Accepted | Refused | Progress | Swapped | Prepared | Pong

_encoder = msgspec.msgpack.Encoder()
to_engine = msgspec.msgpack.Decoder(ToEngine)
from_engine = msgspec.msgpack.Decoder(FromEngine)
to_grammars = msgspec.msgpack.Decoder(ToGrammars)
from_grammars = msgspec.msgpack.Decoder(Tried)

T = TypeVar("T")


def pack(message: ToEngine | FromEngine | ToGrammars | Tried) -> bytes:
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


def receive(sock: socket.socket) -> ToEngine | None:
    return receive_as(to_engine, sock)


def receive_as(decoder: msgspec.msgpack.Decoder[T], sock: socket.socket) -> T | None:
    head = _exactly(sock, _LENGTH.size)
    if head is None:
        return None
    body = _exactly(sock, _size(head))
    return None if body is None else decoder.decode(body)


async def receive_event(reader: asyncio.StreamReader) -> FromEngine | None:
    return await receive_event_as(from_engine, reader)


async def receive_event_as(decoder: msgspec.msgpack.Decoder[T], reader: asyncio.StreamReader) -> T | None:
    try:
        body = await reader.readexactly(_size(await reader.readexactly(_LENGTH.size)))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    return decoder.decode(body)


def _size(head: bytes) -> int:
    (size,) = _LENGTH.unpack(head)
    if size > MAX_MESSAGE:
        raise ConnectionError(f"a message of {size} bytes cannot be right")
    return int(size)


def _exactly(sock: socket.socket, n: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < n:
        try:
            part = sock.recv(min(n - len(parts), 1 << 20))
        except (ConnectionError, OSError):
            return None
        if not part:
            return None
        parts += part
    return bytes(parts)
