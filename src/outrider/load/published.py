"""Matrices that were quantised before they were published: GPTQ, AWQ, compressed-tensors and FP8 in safetensors.

Such a checkpoint stores `X.weight` in parts: whole numbers in int32 words or float8 values, scales and, for some,
offsets. A `Scheme` reads the parts of one kind. Matrices of 4 bits, and of 8 bits around 0, become GGML's blocks with
the same numbers and scales, so that the kernels for those multiply with them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.errors import BadCheckpoint, UnsupportedModel
from outrider.load.quants import FORMATS, Blocks, Format

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # places in a word of eight columns that lie side by side
Q4_0, Q4_1, Q8_0 = FORMATS[2], FORMATS[3], FORMATS[8]
KEPT = {form.name: form for form in (Q4_0, Q4_1, Q8_0)}
BLOCK = 32  # values of each of these
CLOSE = 1e-3  # relative error of a scale in float16: more means that it is out of that format's range
READ = "GPTQ and AWQ of 4 or 8 bits, compressed-tensors (pack-quantized, float-quantized), and fp8"

Read = Callable[[str], Tensor]


@dataclass(frozen=True, slots=True)
class Grouped:
    """A matrix [outputs, inputs]: (numbers - offsets) * scales, by group of inputs."""

    numbers: Tensor  # uint8 [outputs, inputs]
    offsets: Tensor  # [outputs, groups]
    scales: Tensor  # float32 [outputs, groups]
    group_of: Tensor  # [inputs]

    def __post_init__(self) -> None:
        outputs, inputs = self.numbers.shape
        groups = self.scales.shape[1]
        if not self.scales.shape == self.offsets.shape == (outputs, groups):
            raise ValueError(
                f"offsets {list(self.offsets.shape)} and scales {list(self.scales.shape)} of {outputs} outputs"
            )
        if self.group_of.shape != (inputs,) or not 0 <= self.group_of.min() <= self.group_of.max() < groups:
            raise ValueError(f"its {inputs} inputs are not in {groups} groups")

    def float(self) -> Tensor:
        group = self.group_of.long()
        return (self.numbers.float() - self.offsets[:, group]) * self.scales[:, group]


class Scheme(ABC):
    """How the parts of a matrix are named, and what they mean."""

    numbers = "qweight"  # the part that every quantised matrix has, in place of `weight`
    others: tuple[str, ...] = ("qzeros", "scales", "g_idx")
    label = ""
    bits = 4

    @abstractmethod
    def shape(self, packed: tuple[int, ...], part: Read) -> tuple[int, ...]: ...

    @abstractmethod
    def read(self, part: Read) -> Tensor:
        """The matrix in float32."""

    def kernel_format(self, shape: tuple[int, ...], part: Read) -> str:
        """The blocks it can be kept in, or what it is called where there are none."""
        return self.label


class GroupedScheme(Scheme):
    group_size = 0  # 0: one group

    @abstractmethod
    def grouped(self, part: Read) -> Grouped: ...

    @abstractmethod
    def groups(self, part: Read) -> tuple[Tensor, Tensor]:
        """Offsets and scales, both [outputs, groups]."""

    def read(self, part: Read) -> Tensor:
        return self.grouped(part).float()

    def group_of(self, inputs: int, part: Read) -> Tensor:
        return torch.arange(inputs) // (self.group_size or inputs)

    def kernel_format(self, shape: tuple[int, ...], part: Read) -> str:
        offsets, scales = self.groups(part)
        runs = torch.equal(self.group_of(shape[1], part), GroupedScheme.group_of(self, shape[1], part))
        size = self.group_size or shape[1]
        if not runs or size % BLOCK or shape[1] % size or not _in_range(scales):
            return self.label
        if bool((offsets == 1 << (self.bits - 1)).all()):
            return Q8_0.name if self.bits == 8 else Q4_0.name
        return Q4_1.name if self.bits == 4 and _in_range(offsets * scales) else self.label

    def blocks(self, name: str, form: Format, part: Read) -> Blocks:
        """The matrix in the blocks that `kernel_format` names."""
        grouped = self.grouped(part)
        outputs, inputs = grouped.numbers.shape
        by_block = grouped.group_of[::BLOCK].long()
        scales, offsets = grouped.scales[:, by_block], grouped.offsets[:, by_block]
        parts = [scales.half()[:, :, None].view(torch.uint8)]
        if form is Q4_1:
            parts.append((-offsets * scales).half()[:, :, None].view(torch.uint8))
        numbers = grouped.numbers.view(outputs, -1, BLOCK)
        half = BLOCK // 2
        parts.append(numbers ^ 128 if form is Q8_0 else numbers[..., :half] | numbers[..., half:] << 4)
        return Blocks(name, form, torch.cat(parts, dim=2).flatten(1), inputs)


class Gptq(GroupedScheme):
    """Words along the inputs. The first version of the format stores offsets less one."""

    def __init__(self, config: dict[str, Any], path: Path) -> None:
        self.bits, self.group_size = (
            _bits(config.get("bits"), (4, 8), "GPTQ", path),
            _group_size(config, path),
        )
        version = config.get("checkpoint_format", "gptq")
        if version not in ("gptq", "gptq_v2"):
            raise _unread(path, f"GPTQ in the layout {version!r}")
        self.added = 1 if version == "gptq" else 0
        self.label = f"GPTQ of {self.bits} bits"

    def shape(self, packed: tuple[int, ...], part: Read) -> tuple[int, ...]:
        return packed[1], packed[0] * (32 // self.bits)

    def groups(self, part: Read) -> tuple[Tensor, Tensor]:
        offsets = _unpacked(part("qzeros"), self.bits).int() + self.added
        return (offsets & ((1 << self.bits) - 1)).T.float(), _matrix(part("scales")).T

    def group_of(self, inputs: int, part: Read) -> Tensor:
        try:
            return part("g_idx").long()
        except BadCheckpoint:  # not every checkpoint has one
            return super().group_of(inputs, part)

    def grouped(self, part: Read) -> Grouped:
        numbers = _unpacked(_turned(part("qweight")), self.bits)
        return Grouped(numbers, *self.groups(part), self.group_of(numbers.shape[1], part))


class Awq(GroupedScheme):
    """Words along the outputs, eight columns in an order of its own."""

    others = ("qzeros", "scales")

    def __init__(self, config: dict[str, Any], path: Path) -> None:
        self.bits, self.group_size = _bits(config.get("bits"), (4,), "AWQ", path), _group_size(config, path)
        version = str(config.get("version", "gemm")).lower()
        if version != "gemm":
            raise _unread(path, f"AWQ in the layout {version!r}")
        self.label = "AWQ of 4 bits"

    def shape(self, packed: tuple[int, ...], part: Read) -> tuple[int, ...]:
        return packed[1] * 8, packed[0]

    def groups(self, part: Read) -> tuple[Tensor, Tensor]:
        return _columns(part("qzeros")).T.float(), _matrix(part("scales")).T

    def grouped(self, part: Read) -> Grouped:
        numbers = _columns(part("qweight")).T.contiguous()
        return Grouped(numbers, *self.groups(part), self.group_of(numbers.shape[1], part))


class PackQuantized(GroupedScheme):
    """compressed-tensors: words along the inputs, offsets in words along the outputs where there are any."""

    numbers = "weight_packed"
    others = ("weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")

    def __init__(self, weights: dict[str, Any], path: Path) -> None:
        self.bits = _bits(weights.get("num_bits"), (4, 8), "compressed-tensors", path)
        self.group_size = _group_size(weights, path)
        self.symmetric = weights.get("symmetric", True) is True
        if weights.get("actorder") not in (None, "static", "weight"):
            raise _unread(path, f"compressed-tensors with actorder {weights['actorder']!r}")
        self.label = f"compressed-tensors of {self.bits} bits"

    def shape(self, packed: tuple[int, ...], part: Read) -> tuple[int, ...]:
        said = part("weight_shape").tolist()
        if len(said) != 2 or said[0] != packed[0] or not 0 <= packed[1] * (32 // self.bits) - said[1] < 32:
            raise BadCheckpoint(f"weight_shape says {said!s:.100}; its words are {list(packed)}")
        return int(said[0]), int(said[1])

    def groups(self, part: Read) -> tuple[Tensor, Tensor]:
        scales = _matrix(part("weight_scale"))
        if self.symmetric:
            return torch.full_like(scales, 1 << (self.bits - 1)), scales
        offsets = _unpacked(_turned(part("weight_zero_point")), self.bits).T.float()
        return offsets[: len(scales)], scales

    def grouped(self, part: Read) -> Grouped:
        packed = part("weight_packed")
        _, inputs = self.shape(tuple(packed.shape), part)
        numbers = _unpacked(packed, self.bits)[:, :inputs].contiguous()
        return Grouped(numbers, *self.groups(part), self.group_of(inputs, part))


class Float8(Scheme):
    """float8 values with a scale for the matrix, for each output, or for each square of `block`."""

    numbers = "weight"
    label, bits = "FP8", 8

    def __init__(self, scale: str, block: tuple[int, int] | None = None) -> None:
        self.scale, self.block, self.others = scale, block, (scale, "input_scale")

    def shape(self, packed: tuple[int, ...], part: Read) -> tuple[int, ...]:
        return packed

    def read(self, part: Read) -> Tensor:
        weight, scale = part("weight"), part(self.scale).float()
        if self.block is not None:
            expected = [-(-n // size) for n, size in zip(weight.shape, self.block, strict=True)]
            if list(scale.shape) != expected:
                raise BadCheckpoint(
                    f"{self.scale} has shape {list(scale.shape)}; its blocks call for {expected}"
                )
            scale = scale.repeat_interleave(self.block[0], 0).repeat_interleave(self.block[1], 1)
            scale = scale[: weight.shape[0], : weight.shape[1]]
        elif scale.numel() not in (1, len(weight)):
            raise BadCheckpoint(f"{self.scale} has {scale.numel()} values for {len(weight)} outputs")
        else:
            scale = scale.reshape(-1, 1)
        return weight.float() * scale


class PublishedWeights:
    """The quantised matrices of a checkpoint, by the names they would have unquantised."""

    def __init__(
        self,
        scheme: Scheme,
        stored: Iterable[str],
        shape: Callable[[str], tuple[int, ...]],
        read: Read,
        path: Path,
    ) -> None:
        self.scheme, self._shape, self._read, self.path = scheme, shape, read, path
        every, parts = set(stored), {f".{part}" for part in (scheme.numbers, *scheme.others)}
        marks = f".{scheme.numbers}", f".{scheme.others[0]}"  # a float8 `weight` is known by its scale
        self.prefixes = {
            name.removesuffix(marks[0])
            for name in every
            if name.endswith(marks[0]) and name.removesuffix(marks[0]) + marks[1] in every
        }
        self.plain = [
            name
            for name in every
            if not any(name.endswith(part) and name.removesuffix(part) in self.prefixes for part in parts)
        ]
        self.format = lru_cache(maxsize=None)(self._format)

    def names(self) -> list[str]:
        return sorted([*self.plain, *(f"{prefix}.weight" for prefix in self.prefixes)])

    def __contains__(self, name: str) -> bool:
        return name.endswith(".weight") and name.removesuffix(".weight") in self.prefixes

    def shape(self, name: str) -> tuple[int, ...]:
        return self._of(name, lambda part: self.scheme.shape(self._packed_shape(name), part))

    def tensor(self, name: str) -> Tensor:
        return self._of(name, self.scheme.read)

    def stored(self, name: str) -> Tensor | Blocks:
        scheme, form = self.scheme, KEPT.get(self.format(name))
        if form is None or not isinstance(scheme, GroupedScheme):
            return self.tensor(name)
        found: Blocks = self._of(name, lambda part: scheme.blocks(name, form, part))
        return found

    def _format(self, name: str) -> str:
        return self._of(name, lambda part: self.scheme.kernel_format(self.shape(name), part))

    def _packed_shape(self, name: str) -> tuple[int, ...]:
        found = self._shape(f"{name.removesuffix('.weight')}.{self.scheme.numbers}")
        if len(found) != 2:
            raise BadCheckpoint(f"its packed numbers have shape {list(found)}")
        return found

    def _of(self, name: str, work: Callable[[Read], Any]) -> Any:
        """Parts that do not fit together are an error that names the matrix."""
        prefix = name.removesuffix(".weight")
        try:
            return work(lambda part: self._read(f"{prefix}.{part}"))
        except (RuntimeError, ValueError, TypeError, IndexError, BadCheckpoint) as problem:
            raise BadCheckpoint(
                f"matrix {name!r} of {self.path} cannot be unpacked: {problem!s:.300}"
            ) from None


def scheme_of(config: dict[str, Any], path: Path) -> Scheme:
    """By the `quantization_config` of a config.json."""
    if not isinstance(config, dict):
        raise _unread(path, repr(config)[:100])
    method = config.get("quant_method")
    if method == "gptq":
        return Gptq(config, path)
    if method == "awq":
        return Awq(config, path)
    if method == "fp8":
        block = config.get("weight_block_size")
        if block is None:
            return Float8("weight_scale")
        if not (
            isinstance(block, list) and len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block)
        ):
            raise BadCheckpoint(f"{path / 'config.json'}: weight_block_size {block!r:.100} is not two sizes")
        return Float8("weight_scale_inv", (block[0], block[1]))
    if method == "compressed-tensors":
        return _compressed(config, path)
    raise _unread(path, str(method or "an unnamed method")[:100])


def _compressed(config: dict[str, Any], path: Path) -> Scheme:
    groups = config.get("config_groups")
    weights = [one.get("weights") for one in groups.values()] if isinstance(groups, dict) else []
    if not weights or not all(isinstance(one, dict) and one == weights[0] for one in weights):
        raise _unread(path, "compressed-tensors with several kinds of weights")
    layout = config.get("format")
    if layout == "pack-quantized":
        return PackQuantized(weights[0], path)
    if layout == "float-quantized":
        return Float8("weight_scale")
    raise _unread(path, f"compressed-tensors in the layout {layout!r:.60}")


def _unread(path: Path, what: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"the weights of {path} are quantised with {what}, which is not read; {READ} are. Use one of these, the "
        "unquantised model or a GGUF file"
    )


def _bits(found: object, known: tuple[int, ...], method: str, path: Path) -> int:
    if isinstance(found, int) and found in known:
        return found
    raise _unread(path, f"{method} of {found!r:.30} bits")


def _group_size(config: dict[str, Any], path: Path) -> int:
    size = config.get("group_size", config.get("q_group_size"))
    if size is None or size == -1:
        return 0
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise BadCheckpoint(f"{path / 'config.json'}: group_size {size!r:.60} is not a number of inputs")
    return size


def _turned(words: Tensor) -> Tensor:
    return words.T.contiguous() if words.dim() == 2 else words


def _matrix(scales: Tensor) -> Tensor:
    if scales.dim() != 2 or not scales.is_floating_point():
        raise ValueError(f"its scales are {scales.dtype} of shape {list(scales.shape)}")
    return scales.float()


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """int32 words [rows, n] -> uint8 [rows, n * 32 / bits], the lowest bits first."""
    if words.dtype is not torch.int32 or words.dim() != 2:
        raise ValueError(f"packed numbers are stored as {words.dtype} of shape {list(words.shape)}")
    bytes_ = words.contiguous().view(torch.uint8)
    return bytes_ if bits == 8 else torch.stack((bytes_ & 15, bytes_ >> 4), dim=-1).flatten(1)


def _columns(words: Tensor) -> Tensor:
    """AWQ's words, as columns side by side."""
    found = _unpacked(words, 4)
    return found.view(len(found), -1, 8)[:, :, list(AWQ_ORDER)].flatten(1)


def _in_range(scales: Tensor) -> bool:
    return torch.allclose(scales.half().float(), scales, rtol=CLOSE, atol=0.0)
