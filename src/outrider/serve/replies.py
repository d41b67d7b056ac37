"""The shapes of answers, for the OpenAPI document. The dialects (chat.py and others) write answers as dictionaries, and
tests hold those to the shapes here: every field, and no other.
"""

from __future__ import annotations

from typing import Any

from msgspec import UNSET, Struct, UnsetType

Json = dict[str, Any]


class TopLogprob(Struct, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]


class ScoredToken(TopLogprob, kw_only=True):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, kw_only=True):
    content: list[ScoredToken]
    refusal: None


class StepToken(Struct, kw_only=True):
    """A token that the step emitted. `predicted`: lookup copied it from the request's prediction."""

    id: int
    text: str
    origin: str  # plain, accepted, recovered or bonus
    predicted: bool


class StepDraft(Struct, kw_only=True):
    """The draft tree: `parents[i]` is the node before node i, -1 the last token before the step."""

    tokens: list[int]
    texts: list[str]
    parents: list[int]


class StepFact(Struct, kw_only=True):
    """A number that the planner's decision rests on, and the bound that it crossed, if one did."""

    name: str
    value: str | float | UnsetType = UNSET
    bound: float | UnsetType = UNSET


class StepReason(Struct, kw_only=True):
    kind: str
    depth: int
    text: str
    facts: list[StepFact]


class Step(Struct, kw_only=True):
    """One pass of the target over one choice. `accepted`: the nodes of the accepted path."""

    tokens: list[StepToken]
    drafter: str
    draft: StepDraft
    accepted: list[int]
    reason: StepReason


class SpeculationReport(Struct, kw_only=True):
    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int
    steps: int
    mode: str
    lossy: bool
    per_step_accepted: list[int] | UnsetType = UNSET
    per_step_drafted: list[int] | UnsetType = UNSET
    per_step_reasons: list[str] | UnsetType = UNSET


class AnswerMetrics(Struct, kw_only=True):
    time_to_first_token_ms: float | None
    queue_time_ms: float | None
    generation_time_ms: float | None
    mean_itl_ms: float | None
    tokens_per_second: float | None
    speculative_decoding: SpeculationReport | None
    lossy: bool


class Timings(Struct, kw_only=True):
    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float
    draft_n: int
    draft_n_accepted: int


class Reports(Struct, kw_only=True):
    """What every answer has at its root."""

    seed: int
    timings: Timings
    metrics: AnswerMetrics


class ChoiceReports(Struct, kw_only=True):
    """What a choice has on request: `return_token_ids`, and `stats` and `steps` of `speculative_decoding`."""

    token_ids: list[int] | UnsetType = UNSET
    token_origins: list[str] | UnsetType = UNSET
    steps: list[Step] | UnsetType = UNSET


class SingleReports(Reports, kw_only=True):
    """Where an answer has one choice, what the choice has is at the root, too."""

    token_ids: list[int] | UnsetType = UNSET
    token_origins: list[str] | UnsetType = UNSET
    steps: list[Step] | UnsetType = UNSET


class CachedTokens(Struct, kw_only=True):
    cached_tokens: int


class WrittenTokens(Struct, kw_only=True):
    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(Struct, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: WrittenTokens


class CalledFunction(Struct, kw_only=True):
    name: str
    arguments: str


class ToolCall(Struct, kw_only=True):
    id: str
    type: str
    function: CalledFunction


class ChatMessage(Struct, kw_only=True):
    role: str
    content: str | None
    refusal: None
    tool_calls: list[ToolCall] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET  # of models that think in a channel


class ChatChoice(ChoiceReports, kw_only=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    seed: int | UnsetType = UNSET


class AnswerHead(Reports, kw_only=True):
    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage


class ChatCompletion(AnswerHead, kw_only=True):
    """With `stream`: events, each with a part of this."""

    choices: list[ChatChoice]


class CompletionLogprobs(Struct, kw_only=True):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(ChoiceReports, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str
    seed: int | UnsetType = UNSET


class Completion(AnswerHead, kw_only=True):
    """With `stream`: events, each with a part of this."""

    choices: list[CompletionChoice]


class ResponseUsage(Struct, kw_only=True):
    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: WrittenTokens
    total_tokens: int


class ResponseReply(SingleReports, kw_only=True):
    """As OpenAI's Responses. With `stream`: named events, the last of which carries this."""

    id: str
    object: str
    created_at: int
    status: str
    model: str
    output: list[Json]
    error: None
    incomplete_details: dict[str, str] | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: None
    store: bool
    temperature: float
    top_p: float
    text: Json
    tool_choice: str | Json
    tools: list[Json]
    truncation: str
    usage: ResponseUsage


class MessageWrittenTokens(Struct, kw_only=True):
    thinking_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class MessageUsage(Struct, kw_only=True):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: MessageWrittenTokens


class MessageReply(SingleReports, kw_only=True):
    """As Anthropic's Messages. With `stream`: its events."""

    id: str
    type: str
    role: str
    model: str
    content: list[Json]
    stop_reason: str
    stop_sequence: str | None
    usage: MessageUsage


class InputTokens(Struct, kw_only=True):
    input_tokens: int


class TokenIds(Struct, kw_only=True):
    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | UnsetType = UNSET


class TokenText(Struct, kw_only=True):
    prompt: str


class DraftInUse(Struct, kw_only=True):
    object: str
    model: str
    drafter: str
    path: str
    since: float
    previous: str | None
    acceptance: float | None
    target_probability: float | None
    card: Json | None


class DraftList(Struct, kw_only=True):
    object: str
    data: list[DraftInUse]


class ModelCard(Struct, kw_only=True):
    """`drafters` are those that a request may name; `chat`: whether it has a chat template. `state` is ready, loading,
    unloading, unloaded, lost (being started again), failed or stopped; `progress` is the share of its weights that is
    read while it loads; `problem` says why it failed.
    """

    id: str
    object: str
    created: int
    owned_by: str
    max_model_len: int | None
    default_max_tokens: int | None
    drafter: str | None
    drafters: list[str]
    chat: bool
    state: str
    progress: float | None
    problem: str | None


class ModelList(Struct, kw_only=True):
    object: str
    data: list[ModelCard]


class Health(Struct, kw_only=True):
    status: str
    prepared: bool  # every loaded model
    models: dict[str, str] | UnsetType = UNSET  # states by name, where there are several
    drafts_that_do_not_pay: dict[str, int] | UnsetType = UNSET


class Version(Struct, kw_only=True):
    version: str


class Routes(Struct, kw_only=True):
    name: str
    version: str
    routes: list[str]


class FileObject(Struct, kw_only=True):
    id: str
    object: str
    bytes: int
    created_at: int
    filename: str
    purpose: str  # batch, or batch_output
    status: str
    expires_at: None


class DeletedFile(Struct, kw_only=True):
    id: str
    object: str
    deleted: bool


class Page(Struct, kw_only=True):
    object: str
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileList(Page, kw_only=True):
    data: list[FileObject]


class BatchCounts(Struct, kw_only=True):
    total: int
    completed: int
    failed: int


class BatchError(Struct, kw_only=True):
    code: str
    message: str
    line: int | None
    param: str | None


class BatchErrors(Struct, kw_only=True):
    object: str
    data: list[BatchError]


class BatchObject(Struct, kw_only=True):
    """`status`: validating, failed, in_progress, finalizing, completed, expired, cancelling or cancelled."""

    id: str
    object: str
    endpoint: str
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: str
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: BatchCounts
    metadata: dict[str, str] | None


class BatchList(Page, kw_only=True):
    data: list[BatchObject]
