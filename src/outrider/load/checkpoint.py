"""A checkpoint: config, tensors, tokenizer and chat template behind one face, whatever the files are.

Tensors have the names and the layout that the decoder knows, those of Llama, for both formats and all families
(weight_map.py); a family that the decoder does not know keeps its own. Nothing is read before it is asked for.
Weights in pickle form are refused; building a model from the tensors is for model/.
"""

from __future__ import annotations

import re
import shlex
import sys
from abc import ABC, abstractmethod
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from outrider.errors import BadCheckpoint, ModelNotFound, UnsupportedModel, naming
from outrider.load.config import ModelConfig, end_ids
from outrider.load.families import FAMILIES, config_from_json, is_known_family
from outrider.load.gguf import GgufFile
from outrider.load.gguf_config import ROPE_TENSORS, config_from_gguf, extra_layers
from outrider.load.json_files import read_json, read_text
from outrider.load.mxfp4 import MXFP4, SCALES, is_mxfp4, matrix_of, stack_shape
from outrider.load.published import PublishedWeights, scheme_of
from outrider.load.quants import Blocks
from outrider.load.routing import BLOCKS
from outrider.load.sampling import SamplingDefaults, from_generation_config, from_gguf
from outrider.load.tokenizer import Tokenizer
from outrider.load.weight_map import Source, expected_shapes, gguf_map, safetensors_map

GENERATION = "generation_config.json"
INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


class Checkpoint(ABC):
    """An open model. `config` is None when its family is not one the decoder knows."""

    path: Path
    config: ModelConfig | None
    raw_config: dict[str, Any]

    @abstractmethod
    def names(self) -> list[str]: ...

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]: ...

    @abstractmethod
    def tensor(self, name: str, device: torch.device | str = "cpu") -> torch.Tensor:
        """The tensor as float32. On the CPU it may be a view of the file: do not write to it."""

    def stored(self, name: str) -> torch.Tensor | Blocks:
        """A matrix in the format of the file if that is bfloat16 or blocks; any other tensor as float32. Do not write
        to it: it may be a view of the file.
        """
        return self.tensor(name)

    def stored_format(self, name: str) -> str:
        """The format of what `stored` returns: float32, bfloat16 or the name of a GGUF format."""
        return "float32"

    def has_mxfp4(self, name: str) -> bool:
        """Whether this is an expert's matrix in MXFP4."""
        return ".experts." in name and self.stored_format(name) == MXFP4.name

    def for_gpu(self, name: str, device: torch.device | str) -> torch.Tensor | Blocks:
        """An expert's matrix in MXFP4 as it is stored, anything else as float32."""
        if not self.has_mxfp4(name):
            return self.tensor(name, device)
        stored = self.stored(name)
        return replace(stored, raw=stored.raw.to(device)) if isinstance(stored, Blocks) else stored.to(device)

    def release(self) -> None:
        """Gives back memory that holds parts of the file. It is read again when it is needed."""
        return

    @property
    @abstractmethod
    def tokenizer(self) -> Tokenizer: ...

    @property
    @abstractmethod
    def chat_template(self) -> str | None: ...

    @property
    @abstractmethod
    def sampling(self) -> SamplingDefaults:
        """What its makers sample it with."""

    @property
    @abstractmethod
    def total_bytes(self) -> int:
        """Size of the weights on disk."""


def open_checkpoint(path: Path | str) -> Checkpoint:
    """Open a `.gguf` file, or a folder of safetensors or with one `.gguf` in it."""
    path = Path(path)
    if not path.exists():
        raise ModelNotFound(f"{path} does not exist")
    if not path.is_dir():
        if path.suffix in PICKLES:
            raise pickle_refused(path)
        if path.suffix == ".safetensors":
            raise BadCheckpoint(f"{path.name} alone is not a model: give the folder with its config.json")
        return GgufCheckpoint(path)
    if (path / INDEX).exists() or any(path.glob("*.safetensors")):
        return FolderCheckpoint(path)
    ggufs = sorted(path.glob("*.gguf"))
    if len(ggufs) == 1:
        return GgufCheckpoint(ggufs[0])
    if ggufs:
        raise BadCheckpoint(
            f"{path} holds {len(ggufs)} .gguf files; name one: {', '.join(f.name for f in ggufs)}"
        )
    for file in sorted(path.iterdir()):
        if file.suffix in PICKLES:
            raise pickle_refused(file)
    raise BadCheckpoint(f"{path} holds no weights: no .safetensors and no .gguf file")


def pickle_refused(file: Path) -> BadCheckpoint:
    """With a line for a shell that converts it, as far as that can be done without running what is in it."""
    made = file.with_name(f"{file.stem.replace('pytorch_model', 'model')}.safetensors")
    # Tensors may share their memory in a pickle (tied heads); safetensors wants each by itself.
    code = (
        "import sys, torch; from safetensors.torch import save_file; "
        "save_file({k: v.clone().contiguous() for k, v in torch.load(sys.argv[1], 'cpu', weights_only=True).items()}, "
        "sys.argv[2])"
    )
    return BadCheckpoint(
        f"{file.name} is in pickle form, which can run code when it is read. If you trust where it is from, convert "
        f"it to safetensors:\n  {shlex.quote(sys.executable)} -c {shlex.quote(code)} {shlex.quote(str(file))} "
        f"{shlex.quote(str(made))}"
    )


def check_shapes(checkpoint: Checkpoint) -> None:
    """Every tensor the config calls for is there, in its shape; the first that is not is named."""
    if checkpoint.config is None:
        return
    present, family = set(checkpoint.names()), checkpoint.config.family
    for name, shape in expected_shapes(checkpoint.config):
        if name not in present:
            raise BadCheckpoint(
                f"{checkpoint.path} has no tensor {name!r}, which its config ({family}) calls for"
                + _looked_for(name, family)
            )
        if (found := checkpoint.shape(name)) != shape:
            raise BadCheckpoint(
                f"tensor {name!r} of {checkpoint.path} has shape {list(found)!s:.200}; its config says {list(shape)}"
            )


def _looked_for(name: str, family: str) -> str:
    """Of an expert, the names under which safetensors may have it."""
    routing, (layer, found, rest) = FAMILIES[family].routing, name.partition(".mlp.experts.")
    if routing is None or not found:
        return ""
    part, _, kind = f"mlp.experts.{rest}".rpartition(".")
    places = [f"{layer}.{place}" for place, _ in routing.places(part, kind)]
    return f"; in safetensors it may be {' or '.join(places)}"


class FolderCheckpoint(Checkpoint):
    """A Hugging Face folder: config.json, tokenizer.json, and safetensors in one file or in shards."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.raw_config = read_json(path / "config.json")
        self._generation = read_json(path / GENERATION, optional=True)
        self._tokenizer_config = read_json(path / "tokenizer_config.json", optional=True)
        self.config = None
        quantised = self.raw_config.get("quantization_config")
        quantised = None if is_mxfp4(quantised) else quantised  # its tensors say so themselves
        scheme = scheme_of(quantised, path) if quantised and is_known_family(self.raw_config) else None
        if is_known_family(self.raw_config):
            with naming(path / "config.json"):
                self.config = config_from_json(self.raw_config, self._generation)
        self._files = {file: open_safetensors(path / file) for file in weight_files(path)}
        self._where = self._locate()
        self._quantised = None
        if scheme is not None:
            self._quantised = PublishedWeights(scheme, self._where, self._raw_shape, self._raw, path)
        self._map: dict[str, Source] | None = None
        # An EAGLE head calls itself a llama; its tensors keep the names of its file (heads.py).
        if self.config is not None and "fc.weight" not in self._where:
            self._map = safetensors_map(self.config, self._file_names())

    def _locate(self) -> dict[str, str]:
        """Which file holds each tensor. Two files that both claim one, or an index that lies, are refused."""
        where: dict[str, str] = {}
        for file, handle in self._files.items():
            for name in handle.keys():  # noqa: SIM118 - a safetensors handle is not a mapping
                if name in where:
                    raise BadCheckpoint(f"tensor {name!r} is in both {where[name]} and {file} of {self.path}")
                where[name] = file
        if (self.path / INDEX).exists():
            for name, file in _weight_map(self.path).items():
                if where.get(name) != file:
                    raise BadCheckpoint(f"{INDEX} says tensor {name!r} is in {file}, but it is not there")
        return where

    def _file_names(self) -> list[str]:
        return list(self._where) if self._quantised is None else self._quantised.names()

    def names(self) -> list[str]:
        return self._file_names() if self._map is None else list(self._map)

    def _source(self, name: str) -> Source:
        """Where a tensor is. One that is not the decoder's (of a drafter, of another family) has its own name."""
        return (self._map or {}).get(name) or Source(name, ())

    def _handle(self, name: str) -> Any:
        if name not in self._where:
            raise BadCheckpoint(f"{self.path} has no tensor {name!r}")
        return self._files[self._where[name]]

    def _raw_shape(self, name: str) -> tuple[int, ...]:
        found = tuple(self._handle(name).get_slice(name).get_shape())
        return stack_shape(found) if name.endswith(BLOCKS) else found

    def _raw(self, name: str) -> torch.Tensor:
        return tensor_of(self._handle(name), name, self.path)

    def shape(self, name: str) -> tuple[int, ...]:
        source = self._source(name)
        if self._quantised is not None and source.name in self._quantised:
            return source.shape_in(self._quantised.shape(source.name))
        return source.shape_in(self._raw_shape(source.name))

    def tensor(self, name: str, device: torch.device | str = "cpu") -> torch.Tensor:
        source = self._source(name)
        if self._quantised is not None and source.name in self._quantised:
            return source.tensor(self._quantised.tensor(source.name).to(device))
        if source.name.endswith(BLOCKS):
            blocks = self._blocks(source)
            return replace(blocks, raw=blocks.raw.to(device)).float()
        tensor = self._raw(source.name)
        check_float(tensor, name, self.path)
        return source.tensor(tensor, lambda rows: rows.to(device).float())

    def stored(self, name: str) -> torch.Tensor | Blocks:
        source = self._source(name)
        if self._quantised is not None and source.name in self._quantised:
            return source.of(self._quantised.stored(source.name))
        if source.name.endswith(BLOCKS):
            return self._blocks(source)
        tensor = self._raw(source.name)
        half = tensor.dtype is torch.bfloat16 and len(self.shape(name)) == 2
        return source.of(tensor) if half else self.tensor(name)

    def _blocks(self, source: Source) -> Blocks:
        """An expert's matrix in MXFP4."""
        scales = self._raw(source.name.removesuffix(BLOCKS) + SCALES)
        matrix = matrix_of(source.name, self._raw(source.name), scales, source.place or 0)
        found = replace(source, place=None).of(matrix)
        assert isinstance(found, Blocks)
        return found

    def stored_format(self, name: str) -> str:
        stored = self._source(name).name
        if stored.endswith(BLOCKS):
            return MXFP4.name
        if self._quantised is not None and stored in self._quantised:
            return self._quantised.format(stored)
        half = self._handle(stored).get_slice(stored).get_dtype() == "BF16"
        return "bfloat16" if half and len(self.shape(name)) == 2 else "float32"

    @cached_property
    def tokenizer(self) -> Tokenizer:
        file = self.path / "tokenizer.json"
        if not file.exists():
            raise UnsupportedModel(f"{self.path} has no tokenizer.json; other tokenizer formats are not read")
        return Tokenizer.from_file(file, self._tokenizer_config, end_ids(self.raw_config, self._generation))

    @property
    def chat_template(self) -> str | None:
        file = self.path / "chat_template.jinja"
        if file.exists():
            return read_text(file)
        found = self._tokenizer_config.get("chat_template")
        if found is None:
            found = read_json(self.path / "chat_template.json", optional=True).get("chat_template")
        if isinstance(found, list):
            found = _default_template(found)
        return found if isinstance(found, str) else None

    @cached_property
    def sampling(self) -> SamplingDefaults:
        return from_generation_config(self._generation, GENERATION)

    @property
    def total_bytes(self) -> int:
        return sum((self.path / file).stat().st_size for file in self._files)


def _default_template(templates: list[Any]) -> str | None:
    """Several named templates: the one called default, else the first."""
    named = {t.get("name"): t.get("template") for t in templates if isinstance(t, dict)}
    return named.get("default", next(iter(named.values()), None))


def weight_files(path: Path) -> list[str]:
    if (path / INDEX).exists():
        return sorted(set(_weight_map(path).values()))
    files = sorted(file.name for file in path.glob("*.safetensors"))
    if "model.safetensors" in files:
        return ["model.safetensors"]
    if len(files) > 1:
        raise BadCheckpoint(
            f"{path} holds {len(files)} .safetensors files but no {INDEX} to say what is where"
        )
    return files


def _weight_map(path: Path) -> dict[str, str]:
    found = read_json(path / INDEX).get("weight_map")
    if not isinstance(found, dict) or not found:
        raise BadCheckpoint(f"{path / INDEX} has no weight_map")
    for name, file in found.items():
        if not isinstance(file, str) or not re.fullmatch(r"[^/\\\0]+\.safetensors", file):
            raise BadCheckpoint(
                f"{INDEX} puts tensor {name!r} in {file!r}, which is not a file of this folder"
            )
        if not (path / file).is_file():
            raise BadCheckpoint(f"{path} lacks {file}, which {INDEX} names; the download is incomplete")
    return found


def tensor_of(opened: Any, name: str, place: Path) -> torch.Tensor:
    try:
        found: torch.Tensor = opened.get_tensor(name)
        return found
    except (SafetensorError, RuntimeError, ValueError) as problem:
        raise BadCheckpoint(f"tensor {name!r} of {place} cannot be read: {problem!s:.300}") from None


def check_float(tensor: torch.Tensor, name: str, place: Path) -> None:
    if tensor.dtype not in FLOATS:
        raise UnsupportedModel(f"tensor {name!r} of {place} is stored as {tensor.dtype}; not supported")


def open_safetensors(file: Path) -> Any:
    try:
        if not file.is_file():  # the library would wait for a pipe
            raise ValueError("it is no plain file")
        file.open("rb").close()  # the library calls every failure to open a missing file
        return safe_open(file, framework="pt", device="cpu")
    except PermissionError:
        raise BadCheckpoint(f"{file} cannot be read by this user: permission denied") from None
    except (SafetensorError, OSError, ValueError) as problem:
        raise BadCheckpoint(f"{file} is not a sound safetensors file: {problem!s:.300}") from None


class GgufCheckpoint(Checkpoint):
    """One GGUF file."""

    config: ModelConfig

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = GgufFile(path)
        tensors = self._file.tensors
        factors = {name: self._file.read(name).flatten().tolist() for name in ROPE_TENSORS if name in tensors}
        self.config = config_from_gguf(self._file.metadata, tensors, factors)
        self.raw_config = dict(self.config.raw)
        extra = extra_layers(self._file.metadata)
        self._map = gguf_map(self.config, tensors.keys() - set(ROPE_TENSORS), path.name, extra)

    def names(self) -> list[str]:
        return list(self._map)

    def _source(self, name: str) -> Source:
        if name not in self._map:
            raise BadCheckpoint(f"{self.path.name} has no tensor {name!r}")
        return self._map[name]

    def shape(self, name: str) -> tuple[int, ...]:
        source = self._source(name)
        return source.shape_in(self._file.tensors[source.name].shape)

    def tensor(self, name: str, device: torch.device | str = "cpu") -> torch.Tensor:
        source = self._source(name)
        if source.place is None:
            return source.tensor(self._file.read(source.name, device))
        one = source.of(self._file.stack(source.name))
        return (replace(one, raw=one.raw.to(device)) if isinstance(one, Blocks) else one.to(device)).float()

    def stored(self, name: str) -> torch.Tensor | Blocks:
        source = self._source(name)
        if source.place is None:
            return source.of(self._file.stored(source.name))
        return (
            self.tensor(name)
            if self.stored_format(name) == "float32"
            else source.of(self._file.stack(source.name))
        )

    def stored_format(self, name: str) -> str:
        return self._file.stored_format(self._source(name).name)

    def release(self) -> None:
        self._file.release()

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_gguf(self._file.metadata)

    @property
    def chat_template(self) -> str | None:
        found = self._file.metadata.get("tokenizer.chat_template")
        return found if isinstance(found, str) else None

    @cached_property
    def sampling(self) -> SamplingDefaults:
        return from_gguf(self._file.metadata, f"the metadata of {self.path.name}")

    @property
    def total_bytes(self) -> int:
        return self.path.stat().st_size
