"""The weights of a network that drafts, read and replaced where they lie.

Captured steps and the C kernels hold addresses, so another draft's numbers are copied into the tensors that are there:
graphs, draft KV stores and packed layouts all stay valid. Both networks must be packed alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass

from torch import Tensor

from outrider.errors import BadCheckpoint
from outrider.model.weights import named_tensors

Weights = dict[str, Tensor]
BESIDE = frozenset({"raw", "eos_ids", "bos_id"})  # in a config, no part of a network's shape


def weights_of(network: object) -> Weights:
    """Every tensor of numbers that a network was packed into, by where it stands; not those that are its target's."""
    target = (tensor.data_ptr() for _, tensor in named_tensors("", getattr(network, "target", None)))
    borrowed = set(target)
    return {name: tensor for name, tensor in named_tensors("", network) if tensor.data_ptr() not in borrowed}


def copy_of(network: object) -> Weights:
    """The same, copied to the host: to put back later."""
    return {name: tensor.cpu().clone() for name, tensor in weights_of(network).items()}


def put_weights(network: object, weights: Mapping[str, Tensor]) -> None:
    """Copy weights over those of a network, all or none."""
    own = weights_of(network)
    if own.keys() != weights.keys():
        [name, *_] = sorted(own.keys() ^ weights.keys())
        raise BadCheckpoint(f"the draft is packed differently from the one in use: {name}")
    for name, tensor in own.items():
        other = weights[name]
        if (other.shape, other.dtype) != (tensor.shape, tensor.dtype):
            raise BadCheckpoint(
                f"the draft is packed differently from the one in use: {name} is {tuple(other.shape)} "
                f"{other.dtype}, not {tuple(tensor.shape)} {tensor.dtype}"
            )
    for name, tensor in own.items():
        tensor.copy_(weights[name])


def first_difference(one: object, other: object, name: str = "") -> str:
    """Where two configurations differ, in words; "" if they do not. What their files say beside that is no part."""
    if type(one) is type(other) and is_dataclass(one):
        names = [field.name for field in fields(one) if field.name not in BESIDE]
        parts = [(part, getattr(one, part), getattr(other, part)) for part in names]
    elif isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        parts = [(str(i), *pair) for i, pair in enumerate(zip(one, other, strict=True))]
    else:
        return "" if one == other else f"{name} is {one!r}, not {other!r}"
    said = (first_difference(a, b, f"{name}.{part}".lstrip(".")) for part, a, b in parts)
    return next(filter(None, said), "")
