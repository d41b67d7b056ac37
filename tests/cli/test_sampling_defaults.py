"""The commands sample as the model says, unless a flag, a variable or a file says otherwise."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import save_file

from tests.load.tiny import hf_weights, write_gguf

from .conftest import Outrider

DRAWN = ("--max-tokens", 24, "--seed", 1)


@pytest.fixture(scope="module")
def greedy_folder(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("greedy") / "model"
    shutil.copytree(tiny_folder, folder)
    (folder / "generation_config.json").write_text('{"do_sample": false, "top_k": 0}')
    return folder


def test_generate_and_chat_take_the_models_sampling(
    outrider: Outrider, greedy_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def generate(*flags: object) -> str:
        ran = outrider("generate", greedy_folder, "hello", *DRAWN, *flags)
        assert (ran.code, ran.err) == (0, "")
        return ran.out

    greedy, drawn = generate("--temperature", 0), generate("--temperature", 1)
    assert greedy != drawn
    assert generate() == greedy
    assert generate("--generation-config", "none") == drawn
    assert outrider("chat", greedy_folder, *DRAWN, stdin="hello\n").out == greedy
    monkeypatch.setenv("OUTRIDER_TEMPERATURE", "1")
    assert generate() == drawn


def test_a_config_file_stands_over_the_model(outrider: Outrider, greedy_folder: Path, tmp_path: Path) -> None:
    def said(text: str) -> str:
        (tmp_path / "outrider.toml").write_text(text)
        return outrider(
            "generate", greedy_folder, "hello", *DRAWN, "--config", tmp_path / "outrider.toml"
        ).out

    greedy, drawn = said(""), said("[sampling]\ntemperature = 1\n")
    assert greedy != drawn == said('generation_config = "none"\n')


def test_an_unknown_generation_config_is_refused(outrider: Outrider, greedy_folder: Path) -> None:
    ran = outrider("generate", greedy_folder, "hello", "--generation-config", "vllm")
    assert ran.code == 2 and "'vllm' is not auto or none" in ran.err


def test_models_show_tells_what_a_model_is(outrider: Outrider, tmp_path: Path, greedy_folder: Path) -> None:
    ran = outrider("models", "show", greedy_folder)
    assert ran.code == 0
    told = dict(
        line.split(maxsplit=1) for line in ran.out.splitlines() if not line.startswith(("chat", "drafts"))
    )
    assert (
        told["path"] == str(greedy_folder) and told["family"] == "llama" and told["context"] == "128 tokens"
    )
    assert told["sampling"] == "temperature 0 (from generation_config.json)"
    [facts] = outrider("models", "show", greedy_folder, "--json").rows
    assert facts["sampling"] == {"temperature": 0.0} and facts["drafts"][:2] == ["lookup", "early_exit"]


def test_models_show_names_drafts_of_this_machine_that_fit(
    outrider: Outrider, empty_cache: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    (empty_cache / "models").mkdir(parents=True)
    write_gguf(empty_cache / "models" / "small.gguf")
    assert drafts(outrider, tiny_folder) == ["lookup", "early_exit"]  # as large as the target: it cannot pay
    shutil.copytree(tiny_folder, tmp_path / "big")
    config = json.loads((tmp_path / "big" / "config.json").read_text())
    layers, weights = config["num_hidden_layers"], hf_weights()
    more = {
        name.replace("layers.0.", f"layers.{layers}."): one.clone()
        for name, one in weights.items()
        if "layers.0." in name
    }
    (tmp_path / "big" / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers + 1}))
    save_file(weights | more, tmp_path / "big" / "model.safetensors")
    assert drafts(outrider, tmp_path / "big") == ["lookup", "early_exit", "small"]
    shutil.copytree(tmp_path / "big", tmp_path / "other")
    other = (tmp_path / "other" / "tokenizer.json").read_text().replace("<|end|>", "<|END|>")
    (tmp_path / "other" / "tokenizer.json").write_text(other)
    assert drafts(outrider, tmp_path / "other") == ["lookup", "early_exit"]


def drafts(outrider: Outrider, model: Path) -> list[str]:
    [facts] = outrider("models", "show", model, "--json").rows
    return facts["drafts"]


def test_models_show_fetches_nothing(outrider: Outrider, empty_cache: Path) -> None:
    ran = outrider("models", "show", "smollm2-135m")
    assert ran.code == 1 and "outrider models pull smollm2-135m" in ran.err
