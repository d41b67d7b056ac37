"""Faults planted one at a time into a copy of the source, and whether the tests that every run takes notice them.

    make test-planted
    python -m tests.planted [--only WORDS] [--sample N] [--jobs N]

A fault that is not noticed, or whose place in the source is gone, fails the run: mend the test, or this table. Each was
a real mistake once, was planted by hand while its code was written, or was found not to be noticed.
"""

from __future__ import annotations

import argparse
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from outrider.settings import usable_cores

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("src", "tests", "bench", "pyproject.toml")
SECONDS = 280  # for the tests of one fault


@dataclass(frozen=True, slots=True)
class Fault:
    what: str
    file: str  # under src/outrider
    old: str
    new: str
    tests: str  # under tests


STEP, DRAW, ROWS = (f"model/kernels/gpu/{name}.py" for name in ("step_ops", "draw", "rows"))
ATTENTION, ROUTING, PRODUCTS = (
    f"model/kernels/gpu/{name}.py" for name in ("attention", "routing", "experts")
)
FEWER = "model/kernels/gpu/quantise.py"
PLANNER, EXPERTS = "control/planner.py", "control/experts.py"
RUNNER, PASSES = "engine/graph_runner.py", "(row == spare) | (commits == 0), length, length + passes"

MIXING = "model/kernels/experts.h"
GROWING = "engine/test_growing_batches.py"
EAGLE, ONE_CALL = "model/kernels/eagle.h", "draft/test_eagle_one_call.py"
FAULTS = [
    # The order of sums over an int8 cache, hidden states for a head, steps of several passes.
    Fault("numbers of 8 bits in the compiler's order", ATTENTION, "in_natural_order((found * scale[:, None]).to(HALF))",
          "(found * scale[:, None]).to(HALF)",
          "model/gpu/test_compile.py::test_numbers_of_a_row_are_added_in_one_order"),
    Fault("a tap of half the hidden states", ROWS, "tl.store(tapped + slot * tapped_stride + cols, h.to",
          "tl.store(tapped + slot * tapped_stride + cols, (0.5 * h).to", "model/gpu/test_drafters.py"),
    Fault("steps that stay long", "device/buckets.py", "*= 1 - FADING", "*= 1", "device/test_buckets.py"),
    Fault("longer steps after a single late one", "device/buckets.py", "+= SMOOTHING * (found", "+= (found",
          "device/test_buckets.py"),
    # Drafts of an EAGLE head in one call, and what drafting costs.
    Fault("the noise of the first level at every level", EAGLE, "d->at[i] = d->known[i] + level",
          "d->at[i] = d->known[i]", f"{ONE_CALL}::test_it_drafts_what_single_kernels_draft"),
    Fault("the target's state of the token itself", "model/kernels/native_eagle.py", "entries[row, start - 1 : prefix]",
          "entries[row, start:known]", f"{ONE_CALL}::test_it_drafts_what_single_kernels_draft"),
    Fault("the last state of the target not kept", "model/kernels/cpu.c", "keep_features(count, taps, places",
          "keep_features(-1, taps, places", "draft/test_eagle.py::test_every_kind_of_head_is_the_references"),
    Fault("a draft that costs only its levels", "control/costs.py", "min(max(slope, 0.0), height / mean)",
          "height / mean", "control/test_costs.py::test_a_draft_costs_something_whatever_its_depth"),
    # gpt-oss: sinks, experts in MXFP4, answers in channels.
    Fault("a node's second block in the split of its first", ATTENTION,
          "if _split_of(limit + BLOCK) == s:", "if s >= 0:",
          "model/gpu/test_kernels.py::test_a_chain_across_an_edge"),
    Fault("products that are rounded in some programs", ATTENTION,
          "m = tl.fma(m, tl.zeros_like(m) + scale, tl.zeros_like(m))",
          "m = tl.fma(m, tl.zeros_like(m) + scale, tl.zeros_like(m) + (m.shape[0] - 16) * 0.01)",
          "model/gpu/test_kernels.py::test_programs_of_any_height_give_the_same_bits_at_the_edges"),
    Fault("a sink to the wrong base", ATTENTION, "other=0.0) * 1.4426950408889634", "other=0.0)",
          "model/gpu/test_kernels.py::test_folding_in_registers_gives_the_same_bits"),
    Fault("rows of gate for those of up", "load/weight_map.py", "first=first // wanted[0], step=2", "first=0, step=2",
          "load/test_mxfp4.py::test_the_numbers_are_those_of_transformers"),
    Fault("halves of a byte in the other order", "load/mxfp4.py", "(own & 15, own >> 4)", "(own >> 4, own & 15)",
          "load/test_mxfp4.py::test_the_numbers_are_those_of_transformers"),
    Fault("thoughts said as words", "serve/harmony.py", "self._take = self._think", "self._take = self._say",
          "serve/test_harmony.py::test_thoughts_words_and_calls_are_told_apart"),
    Fault("a header that goes on after its end", "serve/harmony.py", "self._may_begin = BEGUN_BY_ROLE",
          "self._may_begin = BEGUN", "serve/test_harmony.py::test_thoughts_words_and_calls_are_told_apart"),
    # Families on a GPU.
    Fault("what a layer adds, normed without a weight", ROWS, " / width + eps) * scale_after", " / width + eps)",
          "model/gpu/test_families.py::test_what_is_added_is_normed_first"),
    Fault("keys normed with other heads' weights", ROWS, "head * DIM + d, (head - HEADS) * DIM + d",
          "head * DIM + d, head * DIM + d",
          "model/gpu/test_families.py::test_heads_normed_together_and_scaled_queries"),
    Fault("a gate that is clamped on one side of the other factor", "model/kernels/gpu/library.py",
          "tl.minimum(tl.maximum(up, -CLAMP), CLAMP)", "tl.minimum(up, CLAMP)",
          "model/gpu/test_families.py::test_gates"),
    Fault("a piece of an expert by its neighbour's scale", "model/kernels/gpu/mxfp4.py", "-0x7E7F7E80, four >> 24",
          "-0x7E7F7E80, four >> 16",
          "model/gpu/test_families.py::test_products_have_the_bits_of_the_dequantised_weight"),
    # Weights in fewer bits.
    Fault("a weight that is cut off, not rounded", FEWER, "(bits + 0x7FFF + ((bits >> 16) & 1)) & -65536",
          "bits & -65536", "model/gpu/test_quantise.py::test_products_have_the_bits_of_the_dequantised_weight"),
    Fault("ties of a weight rounded away from zero", FEWER, "0x7FFF + ((bits >> 16) & 1)", "0x8000",
          "model/gpu/test_quantise.py::test_products_have_the_bits_of_the_dequantised_weight"),
    Fault("signs of neighbours swapped", FEWER, "((words << 28) & -0x80000000) | (words >> 4) & 0x8000",
          "((words << 12) & -0x80000000) | (words << 12) & 0x8000",
          "model/gpu/test_quantise.py::test_products_have_the_bits_of_the_dequantised_weight"),
    Fault("the library reads what another weight left", "model/kernels/gpu/library.py", "            self.fill()\n",
          "            pass\n",
          "model/gpu/test_library.py::test_weights_in_fewer_bits_are_written_out_for_the_library"),
    Fault("a tile's scale for the whole output", "model/kernels/gpu/matmul.py",
          "(tile if GROUPED else tile // deep) * HIGH", "tile // deep * HIGH",
          "model/gpu/test_quantise.py::test_a_weight_is_written_out_as_what_it_stands_for"),
    # Mixtures of experts.
    Fault("rows of a sequence that share no experts", EXPERTS, "rows**self.chain.exponent", "rows",
          "control/test_experts.py::test_what_rows_share_is_learned_from_counts"),
    Fault("sequences that share no experts", EXPERTS, "** (self.batch.exponent - 1)", "** 0",
          "control/test_experts.py::test_sequences_of_one_topic_share_experts_too"),
    Fault("counts near all experts that say as much as others", EXPERTS, "(doublings * precision) ** 2",
          "doublings**2", "control/test_experts.py::test_a_pass_that_reads_nearly_all_experts_says_little_about_rows"),
    Fault("a step's time corrected for experts the wrong way", "control/costs.py",
          "seconds /= experts.ratio(rows, record.experts)", "seconds *= experts.ratio(rows, record.experts)",
          "control/test_experts.py::test_steps_with_few_and_with_many_experts_are_learned_as_one"),
    Fault("a captured step's time corrected the wrong way", "control/costs.py",
          "device += self._saved(shape, record.experts)", "device -= self._saved(shape, record.experts)",
          "control/test_experts.py::test_captured_steps_are_learned_by_their_experts"),
    Fault("an expert charged for launches", "control/costs.py", "/ more, by_bytes) if more > 0 else by_bytes",
          "/ more, by_bytes) * 0 + by_bytes",
          "control/test_experts.py::test_an_expert_is_not_charged_for_launches"),
    Fault("a prior that counts alike for all traffic", "control/acceptance.py",
          "weight = self._spread(band).prior_weight(prior.first)", "weight = PRIOR_WEIGHT",
          "control/test_acceptance.py::test_the_prior_counts_for_more_where_sequences_are_alike"),
    Fault("chance taken for a difference between sequences", "control/acceptance.py",
          "- mean * (1 - mean) / (drafts - 1)", "- 0 * mean",
          "control/test_acceptance.py::test_the_prior_counts_for_more_where_sequences_are_alike"),
    Fault("a first draft taken for one after a right draft", "control/acceptance.py",
          "own.after is not None and own.drafts else None", "own.after is not None else None",
          "control/test_acceptance.py::test_the_first_draft_of_a_sequence_is_expected_by_the_first_drafts_of_others"),
    Fault("prompts left out of the time until all answers end", "bench/tally.py", "append(done.run.total_s)",
          "append(done.run.total_s - done.run.first_s)", "bench/test_tally.py::test_what_a_way_comes_to"),
    Fault("a request beyond its bound slowed down further", PLANNER, "np.maximum(1 + least, self.guards.max_slowdown)",
          "(1 + least) * self.guards.max_slowdown",
          "control/test_planner.py::test_a_request_beyond_its_bound_drafts_as_far_as_its_own_tokens_pay"),
    Fault("prompts that are left out of what an accepted token saves", PLANNER, "1 + costs.prompts if", "1 if",
          "control/test_planner.py::test_where_most_steps_read_prompts_an_accepted_token_saves_more"),
    Fault("an accepted token that saves the whole step", PLANNER, "plain = costs.plain(batch) * (1 + costs.prompts if",
          "plain = costs.step_of(each) * (1 if", "control/test_planner.py::test_a_draft_must_pay_beside_the_prompt_rows"
          "_of_its_step"),
    Fault("a plan that goes on while a sequence copies", "control/history.py", "self.left = 0  # a sequence",
          "pass  # a sequence",
          "control/test_plan_cache.py::test_a_host_packed_plan_is_dropped_when_a_sequence_begins_to_copy"),
    Fault("scores that pass nothing over", "draft/drafters.py", " + min(wrong[name], patience)", "",
          "draft/test_scores.py::test_the_more_proposals_were_wrong_the_more_tokens_are_passed_over"),
    Fault("draft nodes priced as independent rows", "control/candidates.py", "target *= costs.shared(each)", "pass",
          "control/test_experts.py::test_routing_that_rows_share_allows_deeper_drafts"),
    Fault("a warm-up whose rows all choose the same experts", "engine/eager_runner.py", "replace(batch, ids=ids,",
          "replace(batch, ids=ids * 0,",
          "engine/test_expert_steps.py::test_warm_up_measures_rows_alike_and_apart"),
    Fault("experts of the last layer alone counted", "model/kernels/experts.h", "*w->read += tiles", "*w->read = tiles",
          "engine/test_expert_steps.py::test_experts_that_rows_share_are_counted_once"),
    # Steps on a device.
    Fault("a node that was not proposed", STEP, "(draft == sampled) & (node < proposed)", "(draft == sampled)",
          "model/gpu/test_step_ops.py::test_commit"),
    Fault("a slot of the path one off", STEP, "inputs_stride + 3 + held", "inputs_stride + 2 + held",
          "model/gpu/test_step_ops.py::test_commit"),
    Fault("the walk down the tree", STEP, "tl.where(held > 0, held - 1, nodes)", "tl.where(held > 0, held, nodes)",
          "model/gpu/test_step_ops.py::test_commit"),
    Fault("entries before a text's first", STEP, "entry = tl.maximum(length + entry, behind)",
          "entry = tl.maximum(length + entry, 0)", "model/gpu/test_step_ops.py::test_build_batch"),
    Fault("padding that grows", STEP, PASSES, PASSES.replace("(row == spare) | (commits == 0)", "commits < 0"),
          "model/gpu/test_step_ops.py::test_append_tokens"),
    Fault("plain tokens committed that the host verifies", STEP, PASSES, PASSES.replace(" | (commits == 0)", ""),
          "model/gpu/test_step_ops.py::test_append_tokens"),
    Fault("drafts committed that the host verifies", STEP, "(row == spare) | (commits == 0), length, length + accepted",
          "row == spare, length, length + accepted", "model/gpu/test_step_ops.py::test_commit"),
    Fault("a draft that writes for who wants none", STEP, "tl.where(wanted > 0, row, row * 0 + spare)",
          "tl.where(wanted >= 0, row, row * 0 + spare)", "model/gpu/test_step_ops.py::test_begin_step"),
    Fault("the position a draw is for", DRAW, "(tl.load(positions + at) + ahead)", "(tl.load(positions + at) + 1)",
          "model/gpu/test_step_ops.py::test_the_position_sampled_for_counts"),
    Fault("temperatures left out", DRAW, "            divisor = own\n",
          "            divisor = 1.0\n", "model/gpu/test_step_ops.py::test_draw"),
    Fault("choices in the wrong columns", DRAW, "columns + row % each * MOST + place", "columns + place",
          "model/gpu/test_step_ops.py::test_draw"),
    Fault("a tie that goes to the higher expert", ROUTING, "left & (scores == best), numbers, NONE), 1), 0)",
          "left & (scores == best), -numbers, NONE), 1), 0) * -1",
          "model/gpu/test_experts.py::test_equal_experts_go_to_the_lower_number"),
    Fault("padding that chooses experts", ROUTING, "| (among > 0)", "| (among >= 0)",
          "model/gpu/test_experts.py::test_rows_choose_what_torch_says"),
    Fault("an expert's tiles that are all its first", PRODUCTS, "tl.where(mine, ends - tiles, 0), 0)) * ROWS",
          "tl.where(mine, ends - tiles, 0), 0)) * 0", "model/gpu/test_experts.py::test_a_needle_among_63_others"),
    Fault("experts that are added by the weight of the first", ROWS, "tl.load(weights + pair)",
          "tl.load(weights + row * EACH)",
          "model/gpu/test_experts.py::test_experts_are_added_in_order_then_the_shared_one"),
    Fault("a step that counts the experts of all steps", "device/capture.py", "self.read.sub_(self.ops.touched)",
          "self.read.sub_(0)", "engine/test_mixtures.py::test_a_step_says_how_many_experts_its_pass_read"),
    Fault("a tie that goes to the higher id", DRAW, "better = other > score", "better = other >= score",
          "model/gpu/test_kernels.py::test_ties_go_to_the_lowest_id"),
    Fault("what a tree shares", ATTENTION,
          "known = tl.where(tl.load(ancestors + first) != 0, known // BLOCK * BLOCK, known)", "known = known + 0",
          "model/gpu/test_step_ops.py::test_what_rows_of_a_pass_share"),
    Fault("a path without its first node", ATTENTION, "rank = tl.cumsum(bit.to(tl.int32), 0) - 1",
          "rank = tl.cumsum(bit.to(tl.int32), 0)",
          "model/gpu/test_kernels.py::test_a_node_equals_the_same_token_as_known_text"),
    Fault("a window one too wide", ATTENTION, "tl.maximum(position + 1 - window, 0)",
          "tl.maximum(position - window, 0)", "model/gpu/test_kernels.py::test_attention"),
    Fault("a row of the embedding", ROWS, "weight + token * padded + c", "weight + (token ^ 1) * padded + c",
          "model/gpu/test_kernels.py::test_embedding_is_the_rows_as_they_were"),
    Fault("experts' rows rounded as if they met one matrix", "model/kernels/cpu.c",
          "while (in->starts && m == in->starts[group + 1]) group++;", "if (in->starts) group = 0;",
          "model/test_experts.py"),
    Fault("least values with the wrong sign", "model/kernels/blocks_avx.h", "EVERY_FLOAT(-1)", "EVERY_FLOAT(1)",
          "model/test_blocks.py::test_avx512_kernels_have_the_same_bits"),
    # A KV cache in fewer bits.
    Fault("keys and values rounded too far", "model/kernels/kv_formats.h", "inverse = 127.0f /", "inverse = 126.0f /",
          "model/test_kv_formats.py::test_a_pass_keeps_the_nearest_numbers"),
    Fault("keys and values rounded too far on a GPU", ROWS, "inverse = 127.0 /", "inverse = 126.0 /",
          "model/gpu/test_int8_cache.py"),
    Fault("the format of the KV cache ignored", "engine/build.py", 'kv_cache_dtype != "auto"', "device is None",
          "engine/test_build.py"),
    Fault("blocks after the first read from the first", "model/kernels/cpu.c", "from + block[j] * c->stride, c->",
          "from + slots[j] * c->stride, c->", "model/test_kv_formats.py::test_attention"),
    Fault("pointers of another KV cache", "model/kernels/native.py", "not all(map(is_, now, given))", "not given",
          "model/test_decoder.py::test_a_model_may_read_into_several_caches_in_turn"),
    Fault("layers with the keys of another store", "model/decoder.py", " or known[0] is not store", "",
          "model/test_decoder.py::test_a_model_may_read_into_several_caches_in_turn"),
    Fault("packed weights that lie upon others", "model/kernels/huge.py", "self._left[size:]", "self._left",
          "model/test_huge.py"),
    Fault("plain rows at the first position", "verify/rows.py", "return known if self.roots",
          "return self.depth if self.roots", "engine/test_identity.py"),
    Fault("a draft that reads another's text", "draft/lm.py", "[s.row for s in sequences]",
          "[sequences[0].row for s in sequences]", "draft/test_lm.py"),
    Fault("layers of two drafts compared as a whole", "draft/weights.py", "elif isinstance(one, tuple) and",
          "elif isinstance(one, list) and", "engine/test_live_draft.py::test_the_first_difference_of_shapes_is_named"),
    Fault("a draft node that nobody fed counted as read", "draft/reading.py", "len(path) - leaf)", "len(path))",
          "draft/test_lm.py draft/test_resident.py"),
    Fault("a node in another's slot", "draft/merged.py", "order[merged] = int(first) + node", "order[merged] = node",
          "draft/test_merged.py"),
    Fault("slots of a failed drafter", "draft/merged.py", "self.table.pool.drop(one)", "pass", "draft/test_merged.py"),
    Fault("a draft past the model's vocabulary", "draft/lm.py", "c.vocab >= self.vocab and", "True and",
          "draft/test_resident.py"),
    Fault("a row whose owner came back", "engine/scheduler.py", "sequence.released += 1", "sequence.released += 0",
          "engine/test_resident_drafts.py"),
    Fault("a prompt's last chunk taken for a decoding sequence", "types.py", " and self.sequence.launched == 0", "",
          "engine/test_identity.py control/test_planner.py"),
    Fault("a default drafter on the host that is never asked", RUNNER, "drafter = how.drafter or self.default",
          "drafter = how.drafter or 'none'", "engine/test_graph_runner.py engine/test_matrix.py"),
    Fault("an audit that drops who is in the persistent batch", "bench/audit.py",
          "replace(plan, draft_plans=tuple(draft_plans))", "Plan(tuple(draft_plans), plan.reasons)",
          "bench/test_audit.py"),
    Fault("a full prefix cache that leaves drafts one token", RUNNER, "self.table.make_room(len(rows) * largest)",
          "self.table.pool.free >= len(rows) * largest", "engine/test_graph_runner.py"),
    Fault("steps in flight that a prompt waits for", "engine/engine.py", "self.runner.lag if work else 0",
          "self.runner.lag if work and all(o.emits for o in work) else 0", "engine/test_in_flight.py"),
    # What is prepared, and when.
    Fault("a missing step launched one by one for ever", "device/capture.py", "return launches > 0 if usual else",
          "return False if usual else", GROWING),
    Fault("preparing that waits for a quiet moment", "engine/driver.py", "self._work_beside_requests()\n", "pass\n",
          GROWING),
    Fault("a piece of preparing in every step", "engine/driver.py", "* (1 / BUSY_SHARE - 1)", "* 0", GROWING),
    Fault("a launch taken for what a captured step costs", "control/costs.py", "if record.uncaptured:", "if False:",
          GROWING),
    Fault("chunks of any length beside more sequences", "engine/graph_shapes.py",
          "return replace(shape, size=beside, staged=room[0], wanted=room[1], filtered=True)", "return shape", GROWING),
    Fault("more prompt rows than a step has room for", "engine/warm_up.py", "if not (self.captures and decoding):",
          "if True:", GROWING),
    Fault("all compilers at once beside requests", "model/kernels/gpu/ahead.py",
          "len(self.jobs) > len(self._waiting) or", "", "model/gpu/test_ahead.py"),
    Fault("tokens of who was preempted, emitted twice", "types.py", "self.sequence.finish_reason is None and self.",
          "self.sequence.finish_reason is None or self.", "engine/test_identity.py engine/test_in_flight.py"),
    Fault("a drafter that takes a step with it", RUNNER, "self._without_drafts(step, inputs)", "inputs",
          "engine/test_in_flight.py"),
    Fault("probes made twice", PLANNER, "current.idle[lead] = 0.0  # now", "pass  # now", "control/test_planner.py"),
    Fault("no risk among several", "control/acceptance.py", "CAUTION * np.sqrt(", "0.0 * np.sqrt(",
          "control/test_acceptance.py control/test_candidates.py"),
    Fault("bytes of tokens lost", "load/tokenizer.py", "self[token] = found = self._tokenizer",
          "self[token] = b''\n        found = self._tokenizer", "load/test_tokenizer.py engine/test_text.py"),
    # The law, and what is drawn and accepted by it.
    Fault("randomness of a draft used again", "verify/noise.py", "LAW, DRAFT, ACCEPT, RESIDUAL = range(4)",
          "LAW, DRAFT, ACCEPT, RESIDUAL = 0, 1, 2, 1", "verify/test_rejection.py"),
    Fault("no residual after a rejection", "verify/rejection.py",
          "left = torch.where(rejected & (mass > 0), spent / mass.clamp(min=1e-300), left)", "left = left",
          "verify/test_rejection.py"),
    Fault("a block that survives by its last token alone", "verify/rejection.py", "(weight * ratio).clamp(max=1)",
          "ratio.clamp(max=1)", "verify/test_rejection.py"),
    Fault("a child tried twice", "verify/rejection.py", "tried |= rejected & (point > 0)", "tried |= tried",
          "verify/test_rejection.py"),
    Fault("a guess held against its own choice", "verify/law.py", "chosen[rows.parent] == rows.token",
          "chosen == rows.token", "verify/test_law.py"),
    Fault("a child that lives on without its parent", "verify/law.py", "alive = matches & alive[rows.parent]",
          "alive = matches", "verify/test_law.py engine/test_identity.py"),
    Fault("the same noise at every position", "verify/rows.py", "known[self.owner] + self.depth",
          "known[self.owner]", "verify/test_law.py"),
    Fault("nine rounds of the generator", "verify/noise.py", "ROUNDS = 10", "ROUNDS = 9", "verify/test_law.py"),
    Fault("top-p that keeps one too many", "verify/filters.py", "short = (running < need[:, None]).sum(-1)",
          "short = (running <= need[:, None]).sum(-1)", "verify/test_filters.py"),
    Fault("the offset of prompt log-probabilities", "verify/batch.py", "    at = 0\n    for one in work",
          "    at = 1\n    for one in work", "verify/test_batch.py"),
    Fault("prompts scored by another's rows", "verify/batch.py", "        at += count\n",
          "        at += 0\n", "verify/test_batch.py"),
    # The cache.
    Fault("a text that must be read afresh", "cache/table.py", "if not (reuse and self.reuse)",
          "if not (reuse or self.reuse)", "cache/test_table.py"),
    Fault("the last token taken from the cache", "cache/table.py", "tokens[: len(tokens) - 1], owner", "tokens, owner",
          "cache/test_table.py"),
    Fault("another owner's text", "cache/prefix.py", "parent: int | str = owner\n        for start in range(0",
          "parent: int | str = ''\n        for start in range(0", "cache/test_table.py"),
    Fault("a prompt scored from memory", "engine/scheduler.py",
          "reuse = sequence.request.params.prompt_logprobs is None",
          "reuse = True", "engine/test_prompt_logprobs.py"),
    # Drafters and the planner.
    Fault("the earliest of equally long matches", "draft/lookup.py", "len(size) - 1 - int(size[::-1].argmax())",
          "int(size.argmax())", "draft/test_lookup.py"),
    Fault("a draft that goes on into the next answer", "draft/lookup.py",
          "latest = np.array((*answer[1 - MAX_REFERENCES :], SEPARATOR), np.int32)",
          "latest = np.array(answer[-MAX_REFERENCES:], np.int32)", "draft/test_lookup.py"),
    Fault("another owner's answers", "draft/lookup.py", "self.past.get(sequence.request.owner, ",
          "self.past.get(next(iter(self.past), ''), ", "engine/test_graph_runner.py"),
    Fault("references of the row's last sequence", "device/state.py",
          " or self._referenced[row] or row in self._unreferenced", " or self._referenced[row]",
          "draft/test_lookup.py"),
    Fault("nodes by another's numbers", "draft/merged.py", "{merged: own for own", "{own: own for own",
          "draft/test_merged.py"),
    Fault("rows that others asked for", PLANNER, "one.known + f[0].nodes", "one.known - f[0].nodes",
          "control/test_planner.py"),
    Fault("a drafter's prefill that need not be earned", "control/candidates.py",
          "(accepted * steps * per_token > prefill)", "(accepted > 0)",
          "control/test_candidates.py control/test_planner.py"),
    Fault("delayed prompts that count for nothing", PLANNER, "reading + options.waiting if reading else 0", "0",
          "control/test_planner.py"),
    Fault("requests without drafts that count for nothing", PLANNER,
          "sum(why is not PREFILL for _, why in found) - len(places)", "0", "control/test_planner.py"),
    Fault("host time that the device cannot hide", "control/costs.py", "else device + exposed", "else device",
          "control/test_costs.py"),
    Fault("a tree other than the plan's", RUNNER, "replace(plain, tree=plan.tree, drafters=plan.drafters)",
          "self._drafting_shape(plain, plan.drafters[0], TreeShape(1, 1))", "engine/test_executed_plans.py"),
    # Text, and the server.
    Fault("a stop string shown in part", "engine/text.py", "    return longest\n", "    return 0\n",
          "engine/test_text.py"),
    Fault("a body counted anew", "serve/request.py", "scan.feed(chunk)", "scan.feed(bytes(parts))",
          "serve/test_every_shape.py::test_each_byte_of_a_body_is_looked_at_once"),
    Fault("a pair of backslashes cut", "serve/limits.py", "piece = self._escape + piece", "piece = piece",
          "serve/test_limits.py::test_a_body_in_pieces_has_the_strings_of_the_whole"),
    Fault("a tree multiplied to its end", "sampling_params.py", "if nodes > MAX_NODES:", "if False:",
          "test_speculation_words.py::test_a_tree_that_fits_no_step_is_refused_in_few_words"),
    Fault("small writes held back", "serve/server.py", "socket.SOCK_STREAM, socket.IPPROTO_TCP)",
          "socket.SOCK_STREAM, 0)", "serve/test_streams.py::test_small_writes_are_not_held_back"),
    Fault("remainders without end", "verify/grammar_source.py", "MOST_REMAINDERS = 100_000", "MOST_REMAINDERS = 10**18",
          "serve/test_cases_attacks.py::test_grammar_dos"),
    # Beyond one machine.
    Fault("prompts of keys published", "serve/kv_events.py", "if not owner:", "if owner is not None:",
          "serve/test_kv_events.py"),
    Fault("blocks published after an unknown parent", "serve/kv_events.py", "if above is None:", "if above == b'':",
          "serve/test_kv_events.py"),
    Fault("evicted blocks not published", "cache/prefix.py", "self.watch.removed([node.number for node in evicted])",
          "pass", "serve/test_kv_events.py"),
    Fault("a plan kept for other sequences", "control/history.py", "== (sequences, options.resident):",
          "== (self.latest[0], options.resident):", "control/test_plan_cache.py"),
    Fault("a step that reads past its segment", "model/kernels/gpu/matmul.py", "mine = mine & (start + c < last)",
          "mine = mine", "model/gpu/test_kernels.py"),
    Fault("an up with its gate's bias", "model/kernels/gpu/matmul.py", "bias + side * outputs + n", "bias + n",
          "model/gpu/test_kernels.py"),
    Fault("slots in common dropped once", "cache/pool.py", "if np.array_equal(self._order[slots], order):", "if True:",
          "cache/test_table.py"),
    Fault("messages out of order", "serve/outbox.py", "not self._left:\n                data",
          "True:\n                data", "serve/test_outbox.py"),
    Fault("long steps of batches", "engine/scheduler.py", "not pause and self._answers_others:", "pause:",
          "engine/test_scheduler.py"),
    Fault("a line lost on a full disk", "serve/batch_run.py",
          "time.monotonic() + HOLD\n            batch.lines.appendleft(line)", "time.monotonic() + HOLD",
          "serve/test_batch_run.py"),
    Fault("a batch that takes a busy model's memory", "serve/model_service.py", "if not background and self.pressed_at",
          "if self.pressed_at", "serve/test_batch_run.py"),
    Fault("a request behind a batch that waits for memory", "serve/model_table.py",
          "if model.pressed_at is None and any(", "if model.users and any(", "serve/test_batch_run.py"),
    Fault("a failed model that holds its memory", "serve/model_table.py", 'm.backend.state != "failed"', "m.spec",
          "serve/test_batch_run.py"),
    Fault("an endless line read whole", "serve/batch_store.py", "if len(data) > MAX_LINE_BYTES:", "if False:",
          "serve/test_batch_run.py"),
    Fault("a batch folder that replicas share", "serve/deploy_settings.py", '("batch_folder", ', "(",
          "cli/test_deploy.py"),
    # Experts.
    Fault("the last of equal experts", MIXING, "key[candidate] > key[old]", "key[candidate] >= key[old]",
          "model/test_experts.py::test_the_c_kernels_equal_their_twin"),
    Fault("the row of a pair of row and expert", MIXING, "w->sources[place] = p;", "w->sources[place] = place;",
          "model/test_experts.py::test_a_needle_among_rows_of_the_same_experts"),
    Fault("weights with the correction", "model/kernels/reference_experts.py", "weights = scores[chosen]",
          "weights = key[chosen]",
          "model/test_experts.py::test_a_correction_counts_for_the_choice_and_not_for_the_weight"),
    Fault("a chunk that is a window", "model/kernels/cpu.c", "/ s->chunk * s->chunk : 0", "+ 1 - s->chunk : 0",
          "model/test_decoder.py::test_decode_equals_transformers"),
    Fault("a rank's part of a router", "model/parallel.py", 'f".{ROUTER}." in name', "False",
          "model/test_parallel.py::test_every_family_has_the_bits_of_one_process"),
    Fault("what a captured call is given, as of its capture", "model/parallel.py",
          '"broadcast" if self._recording or any', '"broadcast" if any',
          "model/test_parallel.py::test_a_captured_graph_runs_on_all_ranks_with_what_rank_0_has_by_then"),
    Fault("copies of an MLP of which a row chooses parts", "bench/widen.py",
          "return rows.repeat_interleave(self.share, 0)", "return rows.repeat(self.share, 1)",
          "model/gpu/test_as_if.py::test_logits_are_the_small_models"),
    Fault("a head that starts from an MLP that is not there", "distill/head_net.py",
          "not target.specs[index].intermediate", "False",
          "distill/test_experts.py::test_a_head_starts_from_what_a_target_with_experts_has"),
    Fault("routers rounded with the experts", "model/weights.py", "name.endswith(ROUTING)",
          "name.endswith(ROUTING[1:])", "model/test_experts.py::test_routers_stay_whole"),
    # What the page shows.
    Fault("own processes counted as others", "settings.py", "family_seconds(one, root) for one in children",
          "0.0 for one in children", "test_settings.py::test_what_other_programs_used_is_all_but_what_a_family_used"),
    Fault("an empty column in a report", "bench/page.py", "if any(row[i] for row in rows)]", "if rows]",
          "bench/test_report_pages.py::test_a_draft_has_its_score"),
]  # fmt: skip


def copy(folder: Path) -> Path:
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            shutil.copy(source, folder / name)
    return folder


def plant(fault: Fault, root: Path) -> str:
    """Returns the text as it was."""
    file = root / "src" / "outrider" / fault.file
    text = file.read_text()
    assert text.count(fault.old) == 1, (
        f"{fault.what}: {fault.old!r} stands {text.count(fault.old)} times in {fault.file}"
    )
    file.write_text(text.replace(fault.old, fault.new))
    return text


def run_tests(root: Path, tests: str) -> int:
    """pytest's exit code: 0 all passed, 1 some failed."""
    options = "-x -q --no-header -p no:randomly -p no:xdist --hypothesis-profile unshrunk"
    command = [sys.executable, "-m", "pytest", *options.split()]
    command += [str(Path("tests", test)) for test in tests.split()]
    env = {**os.environ, "PYTHONPATH": str(root / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    process = subprocess.Popen(
        command, cwd=root, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT
    )
    try:
        code = process.wait(SECONDS)
        return 1 if code < 0 else code  # a fault that kills the process is noticed
    except subprocess.TimeoutExpired:
        return 1  # a fault that never ends is noticed
    finally:
        process.kill()
        process.wait()


def noticed(fault: Fault, root: Path) -> tuple[str, float]:
    begin = time.monotonic()
    try:
        before = plant(fault, root)
    except AssertionError as problem:
        return f"CANNOT BE PLANTED: {problem}", 0.0
    try:
        code = run_tests(root, fault.tests)
    finally:
        (root / "src" / "outrider" / fault.file).write_text(before)
    verdict = {0: "NOT NOTICED", 1: "noticed"}.get(code, f"THE TESTS DO NOT RUN (exit code {code})")
    return verdict, time.monotonic() - begin


def sample(faults: list[Fault], size: int | None) -> list[Fault]:
    """The next `size` faults, by the number of commits: a run for every commit plants each of them in turn."""
    if size is None or size >= len(faults):
        return faults
    counted = subprocess.run(["git", "rev-list", "--count", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    first = size * int(counted.stdout or 0)
    return [faults[(first + i) % len(faults)] for i in range(size)]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="faults with these words in their names")
    parser.add_argument("--sample", type=int, help="so many of them, others with every commit")
    parser.add_argument("--jobs", type=int, default=usable_cores())
    given = parser.parse_args()
    faults = sample([fault for fault in FAULTS if given.only in fault.what], given.sample)
    with tempfile.TemporaryDirectory(prefix="planted-") as folder, ThreadPoolExecutor(given.jobs) as pool:
        roots: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for number in range(given.jobs):
            (Path(folder) / str(number)).mkdir()
            roots.put(copy(Path(folder) / str(number)))

        def one(fault: Fault) -> tuple[str, float]:
            root = roots.get()
            try:
                return noticed(fault, root)
            finally:
                roots.put(root)

        verdicts = []
        for fault, (verdict, seconds) in zip(faults, pool.map(one, faults), strict=True):
            verdicts.append(verdict)
            print(f"{verdict:<12} {seconds:5.0f} s  {fault.what} ({fault.file})", flush=True)
    missed = sum(verdict != "noticed" for verdict in verdicts)
    print(f"{len(verdicts) - missed} of {len(verdicts)} noticed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
