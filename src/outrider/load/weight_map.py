"""Which tensor of a file, and which rows of it, a tensor of the decoder is.

The decoder knows Llama's names and two norms more (`self_attn.post_norm`, `mlp.post_norm`). Its matrices are apart, its
rotary pairs are half a head apart, its norms multiply by their weight. A family that stores them otherwise is changed
while it is read: matrices stored as one are cut, rows are reordered, and norms stored as w - 1 get their 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outrider.errors import BadCheckpoint, UnsupportedModel
from outrider.load.config import LayerSpec, ModelConfig
from outrider.load.families import FAMILIES
from outrider.load.quants import Blocks
from outrider.load.routing import BLOCKS, Routing

PREFIXES = ("model.", "model.language_model.", "language_model.model.")
GGUF_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
GGUF_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
}


# Of a layer with experts. Expert 3's matrices are `mlp.experts.3.gate_proj.weight` and so on, whatever the file has;
# `mlp.gate_proj` and its like are of the MLP that all rows share.
ROUTER, CORRECTION, SHARED_GATE = "mlp.gate", "e_score_correction_bias", "mlp.shared_expert_gate"
Places = Iterable[tuple[str, int | None]]  # a tensor's name in the file and its place in a stack


@dataclass(frozen=True, slots=True)
class Source:
    """Rows of a tensor of the file, or of one matrix of a stack of them, in an order, and what is added to them."""

    name: str
    shape: tuple[int, ...]  # that the config calls for
    first: int = 0  # row
    total: int = 0  # rows of the file's tensor
    order: Tensor | None = None
    shift: float = 0.0
    place: int | None = None  # in the stack
    count: int = 0  # of the stack
    turned: bool = False  # the stack's matrices are [inputs, outputs]
    step: int = 1  # rows that are taken are so far apart

    def shape_in(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """Its shape, if the file's tensor has the shape `stored`."""
        if self.place is not None:
            if stored[:1] != (self.count,):
                return stored
            stored = stored[:0:-1] if self.turned else stored[1:]
        return (self.shape[0], *stored[1:]) if stored[:1] == (self.total,) else stored

    def of(self, stored: Tensor | Blocks) -> Tensor | Blocks:
        if isinstance(stored, Blocks):
            return replace(stored, raw=self._rows(stored.raw).contiguous())
        return self.tensor(stored)

    def tensor(self, stored: Tensor, widen: Callable[[Tensor], Tensor] = lambda rows: rows) -> Tensor:
        """Of a tensor that is unpacked."""
        rows = widen(self._rows(stored))
        return rows + self.shift if self.shift else rows

    def _rows(self, rows: Tensor) -> Tensor:
        if self.place is not None:
            if len(rows) != self.count:
                raise BadCheckpoint(f"tensor {self.name!r} has {len(rows)} matrices, not {self.count}")
            rows = rows[self.place].T if self.turned and rows.dim() > 2 else rows[self.place]
        if self.step > 1:
            rows = rows[self.first :: self.step]
        elif self.total and self.total > self.shape[0]:
            rows = rows[self.first : self.first + self.shape[0]]
        if self.order is None:
            return rows
        if len(rows) != len(self.order):
            raise BadCheckpoint(f"tensor {self.name!r} has {len(rows)} rows, not {len(self.order)}")
        return rows[self.order.to(rows.device)]


def expected_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor of the decoder by its name."""
    c = config
    yield "model.embed_tokens.weight", (c.vocab, c.hidden)
    yield "model.norm.weight", (c.hidden,)
    if not c.tied:
        yield "lm_head.weight", (c.vocab, c.hidden)
    for index, spec in enumerate(c.specs):
        for name, shape in _layer_shapes(spec, c.hidden):
            yield f"model.layers.{index}.{name}", shape


def _layer_shapes(s: LayerSpec, hidden: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    q, kv, e = s.heads * s.head_dim, s.kv_heads * s.head_dim, s.experts
    matrices = [
        ("self_attn.q_proj", q, hidden, s.qkv_bias), ("self_attn.k_proj", kv, hidden, s.qkv_bias),
        ("self_attn.v_proj", kv, hidden, s.qkv_bias), ("self_attn.o_proj", hidden, q, s.out_bias),
        *(_mlp("mlp", s.intermediate, hidden, s.mlp_bias) if s.intermediate else ()),
    ]  # fmt: skip
    if e is not None:
        matrices.append((ROUTER, e.count, hidden, e.router_bias))
        if e.correction:
            yield f"{ROUTER}.{CORRECTION}", (e.count,)
        if e.shared_gate:
            matrices.append((SHARED_GATE, 1, hidden, False))
        for i in range(e.count):
            matrices += _mlp(f"mlp.experts.{i}", e.width, hidden, e.bias)
    for name, rows, columns, bias in matrices:
        yield f"{name}.weight", (rows, columns)
        if bias:
            yield f"{name}.bias", (rows,)
    for name, size, there in (
        ("input_layernorm", hidden, s.norm_before), ("post_attention_layernorm", hidden, s.norm_before),
        ("self_attn.post_norm", hidden, s.norm_after), ("mlp.post_norm", hidden, s.norm_after),
        ("self_attn.q_norm", q if s.qk_norm == "whole" else s.head_dim, s.qk_norm in ("head", "whole")),
        ("self_attn.k_norm", kv if s.qk_norm == "whole" else s.head_dim, s.qk_norm in ("head", "whole")),
    ):  # fmt: skip
        if there:
            yield f"{name}.weight", (size,)
    if s.sinks:
        yield "self_attn.sinks", (s.heads,)


def _mlp(name: str, inner: int, hidden: int, bias: bool) -> list[tuple[str, int, int, bool]]:
    return [
        (f"{name}.gate_proj", inner, hidden, bias), (f"{name}.up_proj", inner, hidden, bias),
        (f"{name}.down_proj", hidden, inner, bias),
    ]  # fmt: skip


def safetensors_map(config: ModelConfig, names: Iterable[str]) -> dict[str, Source]:
    """The decoder's tensors that the file has, by the decoder's names."""
    family, present = FAMILIES[config.family], set(names)
    prefix = next((p for p in PREFIXES if f"{p}embed_tokens.weight" in present), PREFIXES[0])
    head = "language_model.lm_head.weight" if prefix == PREFIXES[2] else "lm_head.weight"

    def theirs(index: int, part: str, kind: str) -> Places:
        found: Places = ()
        if config.specs[index].experts is not None and family.routing is not None:
            found = family.routing.places(part, kind)
        found = list(found) or [(f"{family.names.get(part, part)}.{kind}", None)]
        return [(f"{prefix}layers.{index}.{name}", place) for name, place in found]

    def top(name: str) -> str:
        return head if name == "lm_head.weight" else prefix + name.removeprefix("model.")

    return _map(config, present, theirs, top, family.pairs, family.norm_shift, family.routing)


def gguf_map(config: ModelConfig, names: Iterable[str], where: str, extra: int = 0) -> dict[str, Source]:
    """`extra` layers follow those of the config, and are not read."""
    family, present = FAMILIES[config.family], set(names)
    layer = GGUF_LAYER | dict(family.gguf_names)

    def theirs(index: int, part: str, kind: str) -> Places:
        place, name = None, "attn_sinks.weight" if kind == "sinks" else ""
        if part.startswith("mlp.experts."):
            number, matrix = part.removeprefix("mlp.experts.").split(".")
            place, name = int(number), f"ffn_{matrix.removesuffix('_proj')}_exps.{kind}"
        elif part.startswith("mlp.") and part != ROUTER and config.specs[index].experts is not None:
            name = f"{layer[part]}_shexp.{kind}"
        elif kind == CORRECTION:
            name = "exp_probs_b.bias"
        return [(f"blk.{index}.{name or f'{layer[part]}.{kind}'}", place)]

    found = _map(config, present, theirs, GGUF_TOP.__getitem__, family.gguf_pairs, 0.0)
    after = tuple(f"blk.{i}." for i in range(config.layers, config.layers + extra))
    if left := sorted(
        name for name in present - {source.name for source in found.values()} if not name.startswith(after)
    ):
        raise UnsupportedModel(f"{where} has a tensor {left[0]!r} that no {config.family} model has here")
    return found


def _map(
    config: ModelConfig,
    present: set[str],
    theirs: Callable[[int, str, str], Places],
    top: Callable[[str], str],
    pairs: bool,
    shift: float,
    routing: Routing | None = None,
) -> dict[str, Source]:
    made: dict[str, Source] = {}
    begun: dict[tuple[str, int | None], int] = {}  # rows of a matrix that are taken
    orders: dict[tuple[int, ...], Tensor | None] = {}
    for name, wanted in expected_shapes(config):
        part, order, count = name, None, 0
        places: Places = [(top(name), None)] if not name.startswith("model.layers.") else ()
        if name.startswith("model.layers."):
            number, _, part = name.removeprefix("model.layers.").partition(".")
            part, _, kind = part.rpartition(".")
            spec = config.specs[int(number)]
            places, order = theirs(int(number), part, kind), _order(spec, part, pairs, orders)
            count = spec.experts.count if spec.experts else 0
        for at in places:
            if at[0] in present:
                first, stored, place = begun.get(at, 0), *at
                begun[at] = first + wanted[0]
                added = shift if "norm" in part else 0.0
                made[name] = Source(stored, wanted, first, 0, order, added)
                if place is not None:
                    turned = routing is not None and routing.turned and not stored.endswith(BLOCKS)
                    made[name] = replace(made[name], place=place, count=count, turned=turned)
                    if routing is not None and routing.interleaved and ".down_proj." not in name:
                        made[name] = replace(made[name], first=first // wanted[0], step=2)
                break
    return {name: replace(source, total=begun[source.name, source.place]) for name, source in made.items()}


def _order(
    spec: LayerSpec, part: str, pairs: bool, known: dict[tuple[int, ...], Tensor | None]
) -> Tensor | None:
    """Of a head's rows, for queries and keys: the rotated ones become pairs half a head apart, others lie between."""
    if not part.startswith("self_attn."):
        return None
    heads = {
        "self_attn.q_proj": spec.heads, "self_attn.k_proj": spec.kv_heads,
        "self_attn.q_norm": 1 if spec.qk_norm == "head" else spec.heads,
        "self_attn.k_norm": 1 if spec.qk_norm == "head" else spec.kv_heads,
    }.get(part, 0)  # fmt: skip
    dim = spec.head_dim
    turned = dim if spec.rope is None else spec.rope.turned(dim)
    if not heads or (turned == dim and not pairs):
        return None
    key = (heads, dim, turned)
    if key not in known:
        at = torch.arange(turned).view(-1, 2).T if pairs else torch.arange(turned).view(2, -1)
        beside = torch.arange(turned, dim).view(2, -1)
        head = torch.cat([at, beside], 1).flatten()
        known[key] = (torch.arange(heads)[:, None] * dim + head).flatten()
    return known[key]
