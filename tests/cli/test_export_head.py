"""`outrider pairs export`: what is written is the same head, and what cannot be done is said before anything is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outrider.cli.export_head import export
from outrider.errors import InvalidRequest
from outrider.load.checkpoint import open_checkpoint
from outrider.load.heads import HeadConfig, read_head, write_head
from tests.load.tiny import write_folder
from tests.tiny import head_tensors


@pytest.fixture
def target(tmp_path: Path) -> Path:
    folder = tmp_path / "target"
    folder.mkdir()
    write_folder(folder)
    return folder


def made_head(folder: Path, target: Path, **changes) -> HeadConfig:
    config = open_checkpoint(target).config
    head = HeadConfig(config.reshaped(1, window=0), 20, (2, 1), **changes)
    write_head(folder, head, head_tensors(head))
    return head


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("layout", ["eagle3", "speculators"])
def test_the_same_head_in_another_layout(tmp_path, target, capsys, layout, shared) -> None:
    made_head(tmp_path / "own", target, norm_output=True, shared_head=shared)
    out = tmp_path / "new" / "folder"
    export(str(tmp_path / "own"), str(out), layout, str(target))
    said = capsys.readouterr()
    assert said.out == f"{out}\n" and "vllm serve MODEL" in said.err
    checkpoint = open_checkpoint(target)
    (own, before), (config, after) = (read_head(f, checkpoint.config) for f in (tmp_path / "own", out))
    assert config.taps == (1, 2) and config.norm_output and not config.shared_head
    assert config.layer.heads == own.layer.heads
    if shared:
        name = "model.embed_tokens.weight" if checkpoint.config.tied else "lm_head.weight"
        rows = checkpoint.tensor(name)[torch.arange(20) + before["d2t"]].to(torch.bfloat16)
        assert torch.equal(after["lm_head.weight"], rows)
    else:
        assert torch.equal(after["lm_head.weight"], before["lm_head.weight"])
    h = own.layer.hidden
    assert torch.equal(after["fc.weight"][:, :h], before["fc.weight"][:, h:])


def test_what_cannot_be_exported_is_said_first(tmp_path, target) -> None:
    made_head(tmp_path / "own", target)
    with pytest.raises(InvalidRequest, match=r"no card\.json that names its target; give --target"):
        export(str(tmp_path / "own"), str(tmp_path / "out"))
    with pytest.raises(InvalidRequest, match="'gguf' is not one of"):
        export(str(tmp_path / "own"), str(tmp_path / "out"), "gguf", str(target))
    with pytest.raises(InvalidRequest, match="is there already"):
        export(str(tmp_path / "own"), str(tmp_path / "own"), "eagle3", str(target))
    assert not (tmp_path / "out").exists()
