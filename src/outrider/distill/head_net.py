"""The EAGLE head in torch with gradients: twin of draft/eagle_head.py, its parameters named as they lie on disk.

Training unrolls it as serving runs it: step 0 joins the target's features with the token after them, step k feeds on
its own output of step k - 1 one position before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.distill.layers import Layer, Past, RmsNorm, Turns, fresh_linear, shift
from outrider.load.config import ModelConfig
from outrider.load.heads import HeadConfig

Read = Callable[[str], Tensor]  # a tensor of the target by its Hugging Face name

FAINT = 0.1  # how much smaller fresh weights are beside those that come from the target


class HeadNet(nn.Module):
    """`words`: the target's ids of the head's vocabulary, rising; None where it is whole. `target_head`: the target's
    own head matrix, for a head that shares it; it stays as it is.
    """

    d2t: Tensor
    shared_rows: Tensor

    def __init__(
        self, config: HeadConfig, words: Tensor | None = None, target_head: Tensor | None = None
    ) -> None:
        super().__init__()
        c = config.layer
        self.config, self.turns = config, Turns(c)
        self.fc = fresh_linear(len(config.taps) * c.hidden, c.hidden)
        if config.tap_norms:
            self.tap_norms = RmsNorm((len(config.taps), c.hidden), c.norm_eps)
        if config.joint_norm:
            self.input_norm = RmsNorm((len(config.taps) * c.hidden,), c.norm_eps)
        self.midlayer = Layer(c, joined=True, normed_residual=config.normed_residual)
        if config.layers > 1:
            self.layers = nn.ModuleDict({str(i): Layer(c) for i in range(1, config.layers)})
        self.norm = RmsNorm((c.hidden,), c.norm_eps)
        if words is not None:
            self.register_buffer("d2t", words - torch.arange(len(words)))
        if config.shared_head:
            assert target_head is not None
            rows = target_head if words is None else target_head[words]
            self.register_buffer("shared_rows", rows.clone(), persistent=False)
        else:
            self.lm_head = fresh_linear(c.hidden, config.draft_vocab)

    @property
    def words(self) -> Tensor | None:
        """The target's ids of the head's words; None: all of them."""
        return (
            self.d2t + torch.arange(len(self.d2t), device=self.d2t.device) if hasattr(self, "d2t") else None
        )

    @property
    def head(self) -> Tensor:
        """The matrix from normed hidden states to logits."""
        return self.shared_rows if self.config.shared_head else self.lm_head.weight

    def fused(self, features: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """[B, T, taps, hidden] of the target -> [B, T, hidden]."""
        if self.config.tap_norms:
            features = self.tap_norms(features)
        seen = features.flatten(2)
        if self.config.joint_norm:
            seen = self.input_norm(seen)
        return F.linear(seen.to(dtype), self.fc.weight.to(dtype)).float()

    def forward(
        self, features: Tensor, embedded: Tensor, steps: int, dtype: torch.dtype = torch.float32
    ) -> Iterator[Tensor]:
        """The normed hidden states [B, T, hidden] of each unrolled step, with matmuls in `dtype`. At i, `features` are
        the target's at token i and `embedded` is the embedding of token i + 1; the states at i speak of token i + 2.
        """
        turn = self.turns.of(features.shape[1], features.device)
        hidden = self.fused(features, dtype)
        further = cast(Mapping[str, Layer], self.layers) if self.config.layers > 1 else {}
        layers = [self.midlayer, *(further[str(i)] for i in range(1, self.config.layers))]
        packed = [layer.packed(dtype) for layer in layers]
        beside = [self.midlayer.input_layernorm(embedded).to(dtype), *[None] * (self.config.layers - 1)]
        pasts: list[Past] = [[] for _ in layers]
        for _ in range(steps):
            for layer, matrices, past, seen in zip(layers, packed, pasts, beside, strict=True):
                hidden = layer(hidden, matrices, turn, past, seen)
            normed = self.norm(hidden)
            yield normed
            hidden = shift(normed if self.config.norm_output else hidden, 1)


@torch.no_grad()
def start_from_target(net: HeadNet, read: Read, target: ModelConfig) -> None:
    """Set a fresh head up from the target: the deepest tap passes through, the layers are the target's last ones as
    far as their shapes agree, and the norm and an own head matrix are the target's.
    """
    c, taps = net.config.layer, net.config.taps
    place = taps.index(max(taps))
    net.fc.weight.mul_(FAINT)
    net.fc.weight[:, place * c.hidden : (place + 1) * c.hidden] += torch.eye(c.hidden)
    for i in range(net.config.layers):
        layer = net.midlayer if i == 0 else net.layers[str(i)]
        _copy_layer(layer, read, target, target.layers - net.config.layers + i, joined=i == 0)
    net.norm.weight.copy_(read("model.norm.weight"))
    if not net.config.shared_head:
        rows = read(head_name(target))
        net.lm_head.weight.copy_(rows if net.words is None else rows[net.words.cpu()])


@torch.no_grad()
def grow(net: HeadNet, known: int, read: Read, target: ModelConfig) -> None:
    """Set up the layers behind the first `known` so that they change nothing yet: each reads what the target's last
    layer reads, as far as shapes agree, and adds zeros to the hidden state.
    """
    for i in range(known, net.config.layers):
        layer = net.layers[str(i)]
        _copy_layer(layer, read, target, target.layers - 1, joined=False)
        for name, parameter in layer.named_parameters():
            if name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
                parameter.zero_()


def wider(known: Tensor, fresh: Tensor, name: str) -> Tensor:
    """A matrix of a head to go on from, in the shape of a fresh one: an MLP may have got more places inside. Those read
    as fresh ones do and add zeros to the hidden state, so that they change nothing yet.
    """
    if not known.is_floating_point() or known.shape == fresh.shape:
        return known.to(fresh.dtype)
    made = fresh.new_zeros(fresh.shape) if name.endswith("down_proj.weight") else fresh.clone()
    made[: known.shape[0], : known.shape[1]] = known
    return made


def _copy_layer(layer: nn.Module, read: Read, target: ModelConfig, index: int, joined: bool) -> None:
    prefix = f"model.layers.{index}."
    for name, parameter in layer.named_parameters():
        if name == "input_layernorm.weight" and joined:
            continue  # of the embedding: the target's last layers know none
        if name.endswith("norm.weight") and not target.specs[index].norm_before:
            continue
        if name.startswith("mlp.") and not target.specs[index].intermediate:
            continue  # the layer has experts and no MLP that all rows share
        theirs = read(prefix + name.replace("hidden_norm", "input_layernorm"))
        if joined and name.split(".")[1] in ("q_proj", "k_proj", "v_proj"):
            width = parameter.shape[1] // 2
            if theirs.shape == (len(parameter), width):
                parameter[:, :width] *= FAINT
                parameter[:, width:] = theirs
        elif theirs.shape == parameter.shape:
            parameter.copy_(theirs)


def head_name(target: ModelConfig) -> str:
    """Of the tensor that is the target's head."""
    return "model.embed_tokens.weight" if target.tied else "lm_head.weight"
