"""Which experts a row chooses: ties, groups, corrections; and that nothing of a row depends on another."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.load.checkpoint import open_checkpoint
from outrider.load.config import Experts
from outrider.load.find import find
from outrider.model.decoder import Decoder, make_kernels
from outrider.model.kernels.reference_experts import route
from outrider.model.weights import kept_as, kind_of
from outrider.settings import cache_folder
from tests.cut import cut_config, cut_reader
from tests.model.batches import Part, Reader, furthest, random_ids
from tests.model.families import NEEDS_COMPILER, POSITIONS, VOCAB, ours, tensors_of


def chosen(
    logits: list[float], e: Experts, correction: list[float] | None = None
) -> tuple[list[int], list[float]]:
    extra = None if correction is None else torch.tensor(correction)
    ids, weights = route(torch.tensor([logits]), e, extra)
    return ids[0].tolist(), [round(w, 6) for w in weights[0].tolist()]


def test_of_equal_experts_the_first_are_chosen_in_ascending_order() -> None:
    assert chosen([0.0] * 40, Experts(40, 3, 16)) == ([0, 1, 2], [0.333333] * 3)
    assert chosen([1.0, 2.0, 1.0, 2.0], Experts(4, 3, 16, normalise=False))[0] == [0, 1, 3]
    assert chosen([0.0, -0.0, 0.0], Experts(3, 1, 16))[0] == [0]


def test_large_logits_do_not_saturate_the_choice() -> None:
    """Both scores round to 1: the larger logit is chosen all the same."""
    assert chosen([40.0, 50.0, 45.0], Experts(3, 1, 16, score="sigmoid", normalise=False)) == ([1], [1.0])


def test_a_correction_counts_for_the_choice_and_not_for_the_weight() -> None:
    e = Experts(3, 1, 16, score="sigmoid", correction=True, normalise=False, scale=2.0)
    assert chosen([0.0, 0.0, 0.0], e, [0.0, 0.0, 0.5]) == ([2], [1.0])


def test_groups_are_ranked_by_their_two_best() -> None:
    e = Experts(6, 2, 16, score="sigmoid", groups=3, groups_kept=1, normalise=False)
    assert chosen([9.0, -9.0, 1.0, 1.0, 0.0, 0.0], e)[0] == [2, 3]
    assert chosen([0.0] * 6, Experts(6, 2, 16, score="sigmoid", groups=3, groups_kept=2))[0] == [0, 1]


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_a_row_chooses_alone_as_among_others(score: str) -> None:
    e = Experts(64, 6, 16, score=score, groups=8, groups_kept=3, correction=True, scale=1.7, floor=1e-20)
    generator = torch.Generator().manual_seed(1)
    logits, correction = torch.randn(33, 64, generator=generator), torch.randn(64, generator=generator)
    ids, weights = route(logits, e, correction)
    for row in range(33):
        one = route(logits[row : row + 1], e, correction)
        assert torch.equal(one[0][0], ids[row]) and torch.equal(one[1][0], weights[row])
    assert (ids[:, 1:] > ids[:, :-1]).all()


@cache
def built(case: str, kernels: str, kind: str, folder: Path, together: bool = False) -> Decoder:
    """With weights in a format; `together`: no row prefers an expert, so that all choose the same ones."""
    config = ours(case, "torch", folder).config
    tensors = tensors_of(case)

    def read(name: str) -> Any:
        tensor = tensors[name].clone()
        if together and name.endswith("mlp.gate.weight"):
            tensor.zero_()
        return kept_as(tensor, kind_of(name, kind))

    return Decoder(config, read, make_kernels(config, POSITIONS, 2, folder, kernels))


FORMATS = ["float32", "bfloat16", "int8", "int4"]


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("together", [False, True])
def test_a_needle_among_rows_of_the_same_experts(
    kind: str, together: bool, kernels: str, kernel_folder: Path
) -> None:
    """Groups of an expert's rows have every size on the way to 64."""
    if kernels == "torch" and (kind != "float32" or not together):
        pytest.skip("the twin goes row by row, and slowly")
    model = built("qwen3_moe", kernels, kind, kernel_folder, together)
    counts = (1, 2, 3, 5, 6, 7, 8, 13, 32, 64) if kernels == "c" else (1, 3, 5)
    reader = Reader(model.config, texts=max(counts), longest=16)
    prompts = [random_ids(VOCAB, 2 + i % 4, seed=i) for i in range(max(counts))]
    reader.feed(model, *(Part(i, prompt) for i, prompt in enumerate(prompts)))
    expected = model.forward(reader.batch(Part(0, [9])), reader.store)
    for count in counts:
        for place in {0, count // 2, count - 1}:
            order = [*range(1, place + 1), 0, *range(place + 1, count)]
            logits = model.forward(reader.batch(*(Part(i, [9]) for i in order)), reader.store)
            assert torch.equal(logits[place : place + 1], expected), (count, place)


@pytest.mark.parametrize("case", ["qwen3_moe", "glm4_moe-groups", "llama4", "mixtral-window"])
def test_any_chunk_size_gives_the_same_bits(case: str, kernels: str, kernel_folder: Path) -> None:
    model, ids = ours(case, kernels, kernel_folder), random_ids(VOCAB, 70 if kernels == "c" else 9)
    expected = Reader(model.config).read(model, ids)
    for chunk in (1, 7, 64) if kernels == "c" else (7,):
        assert torch.equal(Reader(model.config).read(model, ids, chunk), expected), chunk


@NEEDS_COMPILER
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("case", ["qwen3_moe-some", "glm4_moe-groups", "llama4-interleaved", "ties"])
def test_the_c_kernels_equal_their_twin(case: str, kind: str, kernel_folder: Path) -> None:
    """Equal logits of the router included."""
    ids, together = random_ids(VOCAB, 6), case == "ties"
    case = "qwen3_moe" if together else case
    here, twin = (built(case, which, kind, kernel_folder, together) for which in ("c", "torch"))
    assert furthest(Reader(here.config).read(here, ids), Reader(twin.config).read(twin, ids)) < {
        "float32": 2e-5,
        "bfloat16": 2e-5,
    }.get(kind, 0.05)


@pytest.mark.model
@NEEDS_COMPILER
@pytest.mark.parametrize(("count", "per_token", "share", "router"), [(8, 8, 0, 0.0), (8, 4, 2, 0.02)])
def test_a_dense_model_cut_into_experts_writes_its_text(
    count: int, per_token: int, share: int, router: float, kernel_folder: Path
) -> None:
    source = open_checkpoint(find("smollm2-135m", cache_folder()))
    assert source.config is not None
    whole = source.config.reshaped(layers=8)
    config = cut_config(whole, count, per_token, share)
    if not share:
        assert config.parameters == whole.parameters + 8 * 8 * 576  # its routers
    ids = list(source.tokenizer.encode("The three laws of motion are"))
    dense, cut = (
        Decoder(c, read, make_kernels(c, 64, 2, kernel_folder, "c"))
        for c, read in ((whole, source.tensor), (config, cut_reader(source, count, router, share)))
    )
    first, second = Reader(whole), Reader(config)
    fed = ids
    for _ in range(12):
        logits = [reader.read(model, fed)[-1:] for reader, model in ((first, dense), (second, cut))]
        assert furthest(logits[1], logits[0]) < 1e-4
        fed = [int(logits[0].argmax())]
        assert int(logits[1].argmax()) == fed[0]


@pytest.mark.parametrize("kind", ["bfloat16", "int8", "int4"])
def test_routers_stay_whole(kind: str) -> None:
    name = "model.layers.1.mlp.gate.weight"
    kept = kept_as(tensors_of("qwen3_moe")[name], kind_of(name, kind))
    assert isinstance(kept, torch.Tensor) and torch.equal(kept, tensors_of("qwen3_moe")[name])
