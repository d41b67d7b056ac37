"""The two kinds of draft while they learn: an EAGLE head and a small decoder, behind one face.

A student makes hidden states, step by step where it is unrolled; `head` turns those into logits of its `words`. What
a recipe leaves open is settled here from the target's shape and from the words of the answers.
"""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from outrider.distill.answers import Answers, TrainBatch
from outrider.distill.features import Features, TargetReader
from outrider.distill.head_net import HeadNet, Read, grow, head_name, start_from_target, wider
from outrider.distill.layers import plain_of
from outrider.distill.lm_net import LmNet, lm_shape, save_lm, start_lm
from outrider.distill.recipe import Recipe
from outrider.errors import BadCheckpoint, InvalidRequest
from outrider.load.checkpoint import Checkpoint, open_checkpoint
from outrider.load.config import ModelConfig
from outrider.load.heads import FREQUENT, HeadConfig, eagle_taps, read_head, write_head
from outrider.verify.rows import to_device

WHOLE_VOCABULARY, REDUCED_VOCABULARY = 1 << 16, 1 << 15  # words kept up to, and if there are more
MOST_FREQUENT = 1 << 15  # that a head names, if it knows more


class Student(Protocol):
    ahead: int  # states at i speak of token i + ahead
    taps: tuple[int, ...]  # of the target that it sees

    @property
    def net(self) -> nn.Module: ...

    @property
    def words(self) -> Tensor | None:
        """The target's ids of its words; None: all."""
        ...

    @property
    def head(self) -> Tensor: ...

    def states(
        self, batch: TrainBatch, features: Features, reader: TargetReader, steps: int, dtype: torch.dtype
    ) -> list[Tensor]:
        """Normed hidden states [B, T, hidden], of each step that is unrolled, with matmuls in `dtype`."""
        ...

    def save(self, folder: Path) -> None:
        """In the form that serving loads."""
        ...


class HeadStudent:
    ahead = 2

    def __init__(
        self, net: HeadNet, target: ModelConfig, layout: str, target_name: str, frequent: Tensor | None = None
    ) -> None:
        """`frequent`: ids in falling order, for drafting with fewer words than the head knows."""
        self.net, self.target, self.layout, self.target_name = net, target, layout, target_name
        self.taps, self.frequent = net.config.taps, frequent

    @property
    def words(self) -> Tensor | None:
        return self.net.words

    @property
    def head(self) -> Tensor:
        return self.net.head

    def states(
        self, batch: TrainBatch, features: Features, reader: TargetReader, steps: int, dtype: torch.dtype
    ) -> list[Tensor]:
        after = batch.ids.roll(-1, 1)  # the last has none after it, and its states are never looked at
        return list(self.net(features.taps, reader.embed(after), steps, dtype))

    def save(self, folder: Path) -> None:
        tensors = {name: tensor.detach().cpu() for name, tensor in self.net.state_dict().items()}
        if self.net.config.shared_head and self.layout != "outrider":
            tensors["lm_head.weight"] = self.head.cpu()
        if self.frequent is not None:
            tensors[FREQUENT] = self.frequent.int()
        write_head(folder, self.net.config, tensors, self.layout, self.target, self.target_name)


class LmStudent:
    ahead = 1
    taps: tuple[int, ...] = ()

    def __init__(self, net: LmNet, checkpoint: Checkpoint) -> None:
        self.net, self.checkpoint = net, checkpoint

    @property
    def words(self) -> Tensor | None:
        return None

    @property
    def head(self) -> Tensor:
        return self.net.head

    def states(
        self, batch: TrainBatch, features: Features, reader: TargetReader, steps: int, dtype: torch.dtype
    ) -> list[Tensor]:
        return [self.net(to_device(batch.ids, features.last.device), dtype)]

    def save(self, folder: Path) -> None:
        save_lm(folder, self.net, self.checkpoint.tokenizer, self.checkpoint.chat_template)


def make_student(recipe: Recipe, checkpoint: Checkpoint, answers: Answers) -> HeadStudent | LmStudent:
    """As the recipe says, fresh or from a draft that is there. The same recipe gives the same weights."""
    torch.manual_seed(recipe.seed)
    if checkpoint.config is None:
        raise InvalidRequest(
            "this target runs through transformers, and its hidden states cannot be read: only targets of Outrider's "
            "own decoder can be distilled", "target",
        )  # fmt: skip
    if recipe.kind == "lm":
        return LmStudent(_make_lm(recipe, checkpoint, checkpoint.config), checkpoint)
    net = _make_head(recipe, checkpoint.tensor, checkpoint.config, answers)
    able = net.config.shared_head and net.config.whole and recipe.layout == "outrider"
    frequent = frequent_words(answers, MOST_FREQUENT, checkpoint.config) if able else None
    return HeadStudent(net, checkpoint.config, recipe.layout, recipe.target, frequent)


def _make_lm(recipe: Recipe, checkpoint: Checkpoint, target: ModelConfig) -> LmNet:
    if recipe.continue_from:
        before = open_checkpoint(Path(recipe.continue_from))
        if before.config is None or before.config.vocab != target.vocab or not before.config.tied:
            raise BadCheckpoint(
                f"{recipe.continue_from} is no draft that `distill --kind lm` made for this target"
            )
        for name in ("layers", "hidden", "heads", "kv_heads", "intermediate"):
            asked, has = getattr(recipe, name), getattr(before.config, name)
            if asked not in (0, has):
                raise InvalidRequest(
                    f"the draft in {recipe.continue_from} has {name} {has}, and only heads grow: leave that option "
                    "out, or train a fresh one",
                    name,
                )
        net = LmNet(before.config)
        net.load_state_dict({name: before.tensor(name) for name in net.state_dict()})
        return net
    r = recipe
    net = LmNet(lm_shape(target, r.size, r.hidden, r.layers, r.heads, r.kv_heads, r.intermediate))
    start_lm(net, checkpoint.tensor)
    return net


def _make_head(recipe: Recipe, read: Read, target: ModelConfig, answers: Answers) -> HeadNet:
    known = 0  # layers that a draft to go on from has
    if recipe.continue_from:
        config, tensors = read_head(Path(recipe.continue_from), target)
        tensors.pop(FREQUENT, None)  # the answers of now say which
        known = config.layers
        config = _continued(recipe, config)
    else:
        config, tensors = head_shape(recipe, target), {}
    words = None
    if not config.whole:
        places = torch.arange(config.draft_vocab)
        words = (
            tensors["d2t"].long() + places
            if tensors
            else frequent_words(answers, config.draft_vocab, target).sort().values
        )
    net = HeadNet(config, words, read(head_name(target)) if config.shared_head else None)
    if tensors:
        grow(net, known, read, target)
        fresh = net.state_dict()
        net.load_state_dict(fresh | {name: wider(t, fresh[name], name) for name, t in tensors.items()})
    else:
        start_from_target(net, read, target)
    return net


def _continued(recipe: Recipe, head: HeadConfig) -> HeadConfig:
    """A head as it will be when training goes on from it. It can have more layers and wider MLPs; everything else
    stays.
    """
    fixed = {
        "taps": head.taps, "tap_norms": head.tap_norms, "norm_output": head.norm_output,
        "shared_head": head.shared_head, "vocabulary": head.draft_vocab, "heads": head.layer.heads,
        "kv_heads": head.layer.kv_heads,
    }  # fmt: skip
    usual = {one.name: one.default for one in fields(recipe)}
    for name, has in fixed.items():
        asked = getattr(recipe, name)
        if asked not in (usual[name], has):
            raise InvalidRequest(
                f"the head in {recipe.continue_from} has {name} {_shown(has)}, which cannot become {_shown(asked)}: "
                "leave that option out, or train a fresh head",
                name,
            )
    grown = {"layers": head.layers, "intermediate": head.layer.intermediate}
    for name, has in grown.items():
        if 0 < getattr(recipe, name) < has:
            raise InvalidRequest(
                f"the head in {recipe.continue_from} has {name} {has}, and training can add some but takes none away: "
                f"ask for {has} or more, or train a fresh head",
                name,
            )
        grown[name] = getattr(recipe, name) or has
    return replace(
        head, layers=grown["layers"], layer=head.layer.reshaped(intermediate=grown["intermediate"])
    )


def _shown(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def head_shape(recipe: Recipe, target: ModelConfig) -> HeadConfig:
    r, t = recipe, target
    plain = plain_of(t, family="llama", tied=False)
    layer = plain.reshaped(
        heads=r.heads or t.heads, kv_heads=r.kv_heads or (r.heads or t.kv_heads),
        intermediate=r.intermediate or plain.intermediate,
    )  # fmt: skip
    most = t.vocab if t.vocab <= WHOLE_VOCABULARY else REDUCED_VOCABULARY
    return HeadConfig(
        layer,
        min(r.vocabulary or most, t.vocab),
        r.taps or default_taps(t.layers, r.layout),
        layers=r.layers or 1,
        tap_norms=r.tap_norms,
        norm_output=r.norm_output,
        shared_head=r.shared_head,
    )


def default_taps(layers: int, layout: str) -> tuple[int, ...]:
    """Where published heads look; our own layout can have what leaves the last layer, too."""
    taps = dict.fromkeys(eagle_taps(layers))  # a shallow target has some of them twice
    return (*taps, layers) if layout == "outrider" else tuple(taps)


def frequent_words(answers: Answers, count: int, target: ModelConfig) -> Tensor:
    """The ids that the target writes most, those that end a text first."""
    counts = np.zeros(target.vocab, np.int64)
    for row in answers.rows():
        one = answers[row]
        counts += np.bincount(one.ids[one.answered], minlength=target.vocab)
    counts[list(target.eos_ids)] = counts.max() + 1
    return torch.from_numpy(np.lexsort((np.arange(target.vocab), -counts))[:count].copy())
