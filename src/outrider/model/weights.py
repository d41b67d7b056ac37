"""One decoder layer's tensors under short names, laid out [outputs, inputs], before a kernel packs them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.load.config import ModelConfig


@dataclass(slots=True)
class LayerTensors:
    attn_norm: Tensor
    qkv: Tensor  # queries, keys and values stacked: one matmul
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    mlp_norm: Tensor
    gate: Tensor
    up: Tensor
    gate_bias: Tensor | None
    up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    window: int  # 0 = sees everything


def layer_tensors(read: Callable[[str], Tensor], config: ModelConfig, index: int) -> LayerTensors:
    """Reads layer `index` by its Hugging Face names."""
    prefix = f"model.layers.{index}."

    def get(name: str, wanted: bool = True) -> Tensor | None:
        return read(prefix + name) if wanted else None

    def need(name: str) -> Tensor:
        return read(prefix + name)

    qkv = [need(f"self_attn.{part}_proj.weight") for part in "qkv"]
    bias = [need(f"self_attn.{part}_proj.bias") for part in "qkv"] if config.qkv_bias else None
    return LayerTensors(
        attn_norm=need("input_layernorm.weight"),
        qkv=torch.cat(qkv),
        qkv_bias=torch.cat(bias) if bias else None,
        q_norm=get("self_attn.q_norm.weight", config.qk_norm),
        k_norm=get("self_attn.k_norm.weight", config.qk_norm),
        out=need("self_attn.o_proj.weight"),
        out_bias=get("self_attn.o_proj.bias", config.out_bias),
        mlp_norm=need("post_attention_layernorm.weight"),
        gate=need("mlp.gate_proj.weight"),
        up=need("mlp.up_proj.weight"),
        gate_bias=get("mlp.gate_proj.bias", config.mlp_bias),
        up_bias=get("mlp.up_proj.bias", config.mlp_bias),
        down=need("mlp.down_proj.weight"),
        down_bias=get("mlp.down_proj.bias", config.mlp_bias),
        window=config.windows[index],
    )


def read_ahead(read: Callable[[str], Tensor], config: ModelConfig) -> Iterator[LayerTensors]:
    """All layers in order. While the caller packs one layer, a second thread reads the next.

    That thread runs torch on one core: two layers at a time take half the processor time of one layer on two cores.
    """
    with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        coming = pool.submit(layer_tensors, read, config, 0)
        for i in range(1, config.layers + 1):
            tensors = coming.result()
            if i < config.layers:
                coming = pool.submit(layer_tensors, read, config, i)
            yield tensors
