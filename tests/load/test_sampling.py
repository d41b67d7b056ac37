"""Sampling defaults of a model: read from its files, bad ones named and left out, the user's own always first."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from outrider import LLM, SamplingParams
from outrider.errors import InvalidRequest
from outrider.load.builtin import SMOLLM2
from outrider.load.checkpoint import open_checkpoint
from outrider.load.find import published_sampling
from outrider.load.sampling import SamplingDefaults, from_generation_config, from_gguf
from tests.load.tiny import model_metadata, tokenizer_metadata, write_folder, write_gguf


def read(**raw: object) -> dict[str, float]:
    return dict(from_generation_config(raw, "generation_config.json").values)


def test_what_a_generation_config_says_of_sampling_is_taken_and_nothing_else() -> None:
    said = read(
        temperature=0.6, top_p=0.95, top_k=20, min_p=0.1, repetition_penalty=1.05, do_sample=True,
        max_new_tokens=9, eos_token_id=[1], transformers_version="4",
    )  # fmt: skip
    assert said == {
        "temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.05,
    }  # fmt: skip
    assert read() == read(temperature=None, top_k=None) == {}


def test_do_sample_false_means_the_likeliest_token() -> None:
    assert read(do_sample=False, temperature=0.7, top_p=0.8, repetition_penalty=1.1) == {
        "temperature": 0.0,
        "repetition_penalty": 1.1,
    }
    assert read(do_sample="no", temperature=0.7) == {"temperature": 0.7}


def test_other_spellings_of_top_k() -> None:
    assert read(top_k=-1) == {"top_k": 0} and read(top_k=50.0) == {"top_k": 50}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", value) for value in ("hot", -1, True, [0.5], math.nan, math.inf, 1e9)),
        *(("top_k", value) for value in (-2, 1.5, "5", {})),
        *(("top_p", value) for value in (0, 1.5, "0.9")),
        ("repetition_penalty", 0),
    ],
)
def test_a_value_that_cannot_be_is_named_and_left_out(name: str, value: object) -> None:
    with pytest.warns(UserWarning, match=rf"^generation_config.json: {name} .* left out$"):
        assert read(**{name: value, "min_p": 0.25}) == {"min_p": 0.25}


def test_a_folder_and_a_gguf_file_say_it(tmp_path: Path) -> None:
    write_folder(tmp_path / "folder")
    (tmp_path / "folder" / "generation_config.json").write_text('{"temperature": 0.5, "top_k": 3}')
    assert open_checkpoint(tmp_path / "folder").sampling == SamplingDefaults(
        {"temperature": 0.5, "top_k": 3}, "generation_config.json"
    )
    said = {
        "general.sampling.temp": 0.9,
        "general.sampling.top_k": 40,
        "general.sampling.penalty_repeat": 1.1,
    }
    write_gguf(tmp_path / "said.gguf", model_metadata() | tokenizer_metadata() | said)
    found = open_checkpoint(tmp_path / "said.gguf").sampling
    assert found.values == {"temperature": 0.9, "top_k": 40, "repetition_penalty": 1.1}
    assert "said.gguf" in found.source


def test_a_bad_value_of_a_gguf_file_is_named() -> None:
    with pytest.warns(UserWarning, match="mine: temperature must be a number"):
        assert from_gguf({"general.sampling.temp": "warm"}, "mine").values == {}


def test_the_built_in_model_has_what_its_makers_publish(tmp_path: Path) -> None:
    assert published_sampling(SMOLLM2.place(tmp_path), tmp_path).values == {"temperature": 0.2, "top_p": 0.9}
    assert published_sampling(tmp_path / "other.gguf", tmp_path).values == {}


def test_what_was_given_stands_over_the_models_defaults() -> None:
    model = SamplingDefaults({"temperature": 0.2, "top_p": 0.9})
    params = SamplingParams(temperature=1.0, seed=3)
    assert model.under(params, {"temperature"}) == SamplingParams(temperature=1.0, top_p=0.9, seed=3)
    assert model.under(params, ("top_p", "temperature")) == params


def test_python_without_params_samples_as_the_model_says(tmp_path: Path) -> None:
    write_folder(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"do_sample": False, "temperature": 0.7}))
    with LLM(tmp_path) as llm:
        assert llm.default_params() == SamplingParams(temperature=0)
        greedy = llm.generate("hello", SamplingParams(temperature=0, max_tokens=24))[0].token_ids
        assert llm.generate("hello", max_tokens=24)[0].token_ids == greedy
        drawn = llm.generate("hello", max_tokens=24, temperature=1, seed=1)[0].token_ids
        fixed = llm.generate("hello", SamplingParams(max_tokens=24, seed=1))[0].token_ids
        assert drawn == fixed != greedy
    with LLM(tmp_path, generation_config="none") as llm:
        assert llm.default_params() == SamplingParams()
    with pytest.raises(InvalidRequest, match="generation_config must be auto or none, got 'vllm'"):
        LLM(tmp_path, generation_config="vllm")
