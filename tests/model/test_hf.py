"""Models of other families behind transformers: the same passes, trees and bits; and refusals by name."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers.utils import logging

from outrider import LLM, SamplingParams
from outrider.engine.build import load_model
from outrider.errors import BadCheckpoint, InvalidRequest, UnsupportedModel
from outrider.load.checkpoint import Checkpoint, open_checkpoint
from outrider.model import hf
from outrider.model.hf import HfModel, load_hf
from outrider.settings import Settings
from outrider.types import Draft
from tests.model.batches import Part, Reader, furthest, random_ids, stir
from tests.model.families import logits_of

VOCAB = 300
TOLERANCE = 2e-5
TREE = Draft((5, 6, 7, 8, 9, 10, 11, 12), (-1, 0, 0, -1, 2, 4, 5, 6))
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
SIZES = {**COMMON, "intermediate_size": 112, "num_key_value_heads": 2}
WINDOWED = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", COMMON),
    "gpt2-odd": (
        "GPT2",
        {**COMMON, "scale_attn_by_inverse_layer_idx": True, "activation_function": "silu", "n_inner": 50},
    ),
    "gemma": ("Gemma", {**SIZES, "num_key_value_heads": 1, "head_dim": 32}),
    "phi": ("Phi", {**SIZES, "partial_rotary_factor": 0.5, "qk_layernorm": True}),
    "starcoder2-window": ("Starcoder2", {**SIZES, "sliding_window": 4, "intermediate_size": 50}),
    "ministral-window": ("Ministral", {**SIZES, **WINDOWED, "head_dim": 32}),
}


@pytest.fixture(autouse=True)
def no_bars() -> None:
    logging.disable_progress_bar()


def make_model(family: str, options: dict[str, Any]) -> Any:
    config = getattr(transformers, family + "Config")(**options)
    config._attn_implementation = "eager"
    kinds = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING
    return stir(kinds[type(config)](config))


def save_tokenizer(folder: Path) -> None:
    """A toy byte-level BPE."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=["<p>", "<s>", "</s>"], initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator(["one path, one batch, one pass: the outrider rides ahead"] * 9, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))


Saved = tuple[Any, Checkpoint]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Saved]:
    """A case as transformers made it, and its files opened."""
    made: dict[str, Saved] = {}

    def get(case: str) -> Saved:
        if case not in made:
            folder = tmp_path_factory.mktemp(case)
            model = make_model(*CASES[case])
            model.save_pretrained(folder)
            save_tokenizer(folder)
            made[case] = model, open_checkpoint(folder)
        return made[case]

    return get


Loaded = Callable[[str, str], tuple[Any, HfModel]]


@pytest.fixture(scope="module")
def loaded(saved: Callable[[str], Saved], kernel_folder: Path) -> Loaded:
    made: dict[tuple[str, str], HfModel] = {}

    def get(case: str, kernels: str) -> tuple[Any, HfModel]:
        theirs, checkpoint = saved(case)
        if (case, kernels) not in made:
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # a row that depends on others would be a warning
                made[case, kernels] = load_hf(checkpoint, 2, kernel_folder, kernels)
        return theirs, made[case, kernels]

    return get


def their_logits(model: Any, ids: list[int]) -> Tensor:
    return logits_of(model, tuple(ids))


@pytest.mark.parametrize("case", CASES)
def test_prefill_chunks_and_decode_equal_transformers(loaded: Loaded, case: str, kernels: str) -> None:
    theirs, model = loaded(case, kernels)
    ids = random_ids(VOCAB, 24)
    whole = Reader(model.config).read(model, ids)
    assert furthest(whole, their_logits(theirs, ids)) < TOLERANCE
    assert whole.dtype == torch.float32 and whole.is_contiguous()
    for chunk in (1, 7):
        assert torch.equal(Reader(model.config).read(model, ids, chunk), whole), chunk


@pytest.mark.parametrize("case", CASES)
def test_a_tree_beside_other_texts_equals_its_paths(loaded: Loaded, case: str, kernels: str) -> None:
    theirs, model = loaded(case, kernels)
    ids, other = random_ids(VOCAB, 11), random_ids(VOCAB, 6, seed=1)
    reader = Reader(model.config, texts=3)
    reader.feed(model, Part(0, ids[:-1]), Part(2, other[:3]))
    logits = reader.feed(model, Part(1, other), Part(0, ids[-1:], TREE), Part(2, other[3:]))
    assert furthest(logits[:6], their_logits(theirs, other)) < TOLERANCE
    assert torch.equal(logits[-3:], logits[3:6])
    for node in range(len(TREE)):
        path = ids + [TREE.tokens[i] for i in TREE.path(node)]
        assert furthest(logits[7 + node], their_logits(theirs, path)[-1]) < TOLERANCE, node
        if kernels == "c":  # the twin's chains are checked for the decoder, and slow
            assert torch.equal(logits[7 + node], Reader(model.config).read(model, path)[-1]), node


@pytest.mark.parametrize("case", CASES)
def test_a_row_alone_equals_a_row_among_others(loaded: Loaded, case: str) -> None:
    _, model = loaded(case, "c")
    most = 33 if case == "gpt2-odd" else 9
    prompts = [random_ids(VOCAB, 2 + i % 5, seed=i) for i in range(most)]
    alone = []
    for i, prompt in enumerate(prompts):
        reader = Reader(model.config, seed=i)
        reader.feed(model, Part(0, prompt))
        alone.append(reader.feed(model, Part(0, [i])))
    for count in {2, 3, 4, 5, 8, 9, most}:
        reader = Reader(model.config, texts=count)
        reader.feed(model, *(Part(i, prompts[i]) for i in range(count)))
        together = reader.feed(model, *(Part(i, [i]) for i in range(count)))
        assert torch.equal(together, torch.cat(alone[:count])), count


def test_the_config_says_what_was_found(loaded: Loaded) -> None:
    _, model = loaded("ministral-window", "c")
    c = model.config
    assert (c.family, c.layers, c.heads, c.kv_heads, c.head_dim) == ("ministral", 2, 4, 2, 32)
    assert (c.vocab, c.hidden, c.context, c.windows) == (VOCAB, 64, 64, (4, 0))
    assert c.eos_ids == (2,) and c.bos_id == 1


def test_only_the_wanted_rows_get_logits(loaded: Loaded, kernels: str) -> None:
    _, model = loaded("gpt2", kernels)
    reader, ids = Reader(model.config), random_ids(VOCAB, 9)
    everything = model.forward(reader.batch(Part(0, ids)), reader.store)
    for wanted in ([], [8], [5, 2]):
        batch = reader.batch(Part(0, ids))
        batch.logit_rows = torch.tensor(wanted, dtype=torch.int64)
        assert torch.equal(model.forward(batch, reader.store), everything[wanted])


def test_guesses_may_stick_out_of_the_context(loaded: Loaded) -> None:
    """Known tokens may not; a guess past the end is never used, and must not disturb the rows before it."""
    theirs, model = loaded("gpt2", "c")
    ids = random_ids(VOCAB, 64)
    reader = Reader(model.config)
    reader.feed(model, Part(0, ids[:62]))
    logits = reader.feed(model, Part(0, ids[62:63], Draft.chain([ids[63], 4, 5])))
    assert furthest(logits[:2], their_logits(theirs, ids)[62:]) < TOLERANCE
    with pytest.raises(InvalidRequest, match="gpt2 reads at most 64 tokens"):
        reader.feed(model, Part(0, ids[:3]))


def test_text_from_a_folder(saved: Callable[[str], Saved], kernel_folder: Path, monkeypatch: Any) -> None:
    """Through the front door: the tokens transformers would give."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(kernel_folder.parent))
    theirs, checkpoint = saved("gpt2")
    with LLM(checkpoint.path, threads=2) as llm:
        [out] = llm.generate("the path", SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    ids = list(out.prompt_ids)
    for _ in range(12):
        ids.append(int(their_logits(theirs, ids)[-1].argmax()))
    assert out.token_ids == ids[-12:]


# -------------------------------------------------------------------------------------------------- refusals


def test_weights_in_fewer_bits_are_refused(saved: Callable[[str], Saved]) -> None:
    with pytest.raises(UnsupportedModel, match="held as float32; leave --weights out"):
        load_model(saved("gpt2")[1], Settings(weights="bfloat16", device="cpu"))


def refusal(folder: Path, family: str, options: dict[str, Any], kernel_folder: Path) -> str:
    make_model(family, options).save_pretrained(folder)
    with pytest.raises(UnsupportedModel) as refused:
        load_hf(open_checkpoint(folder), 2, kernel_folder, "auto")
    return str(refused.value)


REFUSED = {
    "vaultgemma": ("VaultGemma", {**SIZES, "head_dim": 32}, "soft-capped"),
    "granite_swa": ("GraniteSWA", SIZES, "attention sinks"),
    "bloom": (
        "Bloom",
        {"vocab_size": VOCAB, "hidden_size": 64, "n_layer": 2, "n_head": 4},
        "attention interface",
    ),
    "mamba": (
        "Mamba",
        {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8},
        "recurrent state",
    ),
    "lfm2": ("Lfm2", {**SIZES, "layer_types": ["conv", "full_attention"]}, "layers of type conv"),
    "bert": ("Bert", {**COMMON, "intermediate_size": 64}, "not causal"),
    "deepseek_v3": (
        "DeepseekV3",
        {
            **SIZES, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 16,
            "qk_nope_head_dim": 16, "v_head_dim": 16, "first_k_dense_replace": 2, "n_routed_experts": 4,
            "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1,
        },
        "differ in size",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_what_it_cannot_do_is_refused_by_name(kind: str, tmp_path: Path, kernel_folder: Path) -> None:
    family, options, reason = REFUSED[kind]
    message = refusal(tmp_path, family, options, kernel_folder)
    assert repr(kind) in message and reason in message


class Bare(Checkpoint):
    """A checkpoint of a config alone: refused before any tensor is read."""

    def __init__(self, raw: dict[str, Any]) -> None:
        self.path, self.config, self.raw_config = Path("bare"), None, raw

    def names(self) -> list[str]:
        pytest.fail("tensors were asked for")

    def shape(self, name: str) -> tuple[int, ...]:
        raise NotImplementedError

    tensor = tokenizer = chat_template = total_bytes = sampling = shape  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        ({"model_type": "t5"}, "'t5' is an encoder-decoder"),
        ({"model_type": "gemma3"}, "'gemma3' is multimodal"),
        ({"model_type": "vit"}, "'vit' is not a causal language model"),
        ({"model_type": "no-such"}, "'no-such' is not known"),
        ({}, "None is not known"),
        ({"model_type": "mine", "auto_map": {"AutoModel": "x.Y"}}, "'mine' needs code of its own"),
        ({"model_type": "gpt2", "add_cross_attention": True}, "cross-attention"),
        ({"model_type": "gpt2", "quantization_config": {"quant_method": "awq"}}, "quantised"),
        ({"model_type": "qwen3_next"}, "'qwen3_next': it keeps a recurrent state"),
        ({"model_type": "gemma3n_text"}, "share keys and values|attention interface"),
        ({"model_type": "gpt2", "n_layer": "many"}, "'gpt2'"),
    ],
)
def test_a_config_alone_can_be_reason_enough(raw: dict[str, Any], reason: str, kernel_folder: Path) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        load_hf(Bare(raw), 1, kernel_folder, "torch")


def test_without_transformers_it_says_how_to_get_it(monkeypatch: Any, kernel_folder: Path) -> None:
    monkeypatch.setattr(hf, "transformers", None)
    with pytest.raises(UnsupportedModel, match=r"'gpt2' needs transformers; .*pip install 'transformers"):
        load_hf(Bare({"model_type": "gpt2"}), 1, kernel_folder, "torch")


class Altered(Bare):
    """A sound checkpoint with some tensors renamed, dropped or reshaped."""

    def __init__(self, sound: Checkpoint, tensors: Callable[[dict[str, Tensor]], object]) -> None:
        super().__init__(sound.raw_config)
        self.path = sound.path
        self.tensors = {name: sound.tensor(name) for name in sound.names()}
        tensors(self.tensors)

    def names(self) -> list[str]:
        return list(self.tensors)

    def tensor(self, name: str) -> Tensor:  # type: ignore[override]
        return self.tensors[name]


NORM = "transformer.ln_f.weight"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t: t.pop(NORM), f"has no tensor '{NORM}'"),
        (lambda t: t.update({"transformer.ln_g.weight": t[NORM]}), "does not use, 'transformer.ln_g.weight'"),
        (lambda t: t.update({NORM: torch.ones(3)}), f"wrong shape, '{NORM}'"),
    ],
)
def test_tensors_that_do_not_fit_are_named(saved: Any, kernel_folder: Path, change: Any, reason: str) -> None:
    with pytest.raises(BadCheckpoint, match=reason):
        load_hf(Altered(saved("gpt2")[1], change), 1, kernel_folder, "torch")


def test_names_and_buffers_of_old_checkpoints_are_understood(saved: Any, kernel_folder: Path) -> None:
    def age(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors["h.0.attn.bias"] = torch.ones(1, 1, 64, 64)

    theirs, checkpoint = saved("gpt2")
    model = load_hf(Altered(checkpoint, age), 2, kernel_folder, "auto")
    ids = random_ids(VOCAB, 8)
    assert furthest(Reader(model.config).read(model, ids), their_logits(theirs, ids)) < TOLERANCE


def test_a_native_model_type_never_runs_the_code_beside_it(saved: Any, kernel_folder: Path) -> None:
    _, checkpoint = saved("gpt2")
    altered = Altered(checkpoint, lambda tensors: None)
    altered.raw_config = {**checkpoint.raw_config, "auto_map": {"AutoModelForCausalLM": "evil.Model"}}
    assert load_hf(altered, 1, kernel_folder, "torch").config.family == "gpt2"


@pytest.mark.parametrize("mistake", ["scale", "tree", "window"])
def test_the_trial_at_load_catches_a_wrong_attention(
    mistake: str, saved: Any, kernel_folder: Path, monkeypatch: Any
) -> None:
    right = hf.SlotPass.attend

    def wrong(self: Any, layer: int, q: Any, k: Any, v: Any, window: int, scale: float) -> Tensor:
        if mistake == "tree":
            self.batch.ancestors[:] = self.batch.ancestors & -self.batch.ancestors
        return right(
            self, layer, q, k, v, 0 if mistake == "window" else window, scale * (1 + (mistake == "scale"))
        )

    monkeypatch.setattr(hf.SlotPass, "attend", wrong)
    with pytest.raises(UnsupportedModel, match="differ from transformers' own"):
        load_hf(saved("starcoder2-window")[1], 2, kernel_folder, "auto")


def test_windows_that_do_not_reach_the_attention_are_refused(
    saved: Any, kernel_folder: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(hf, "_declared_windows", lambda *_: (4, 4))
    with pytest.raises(UnsupportedModel, match="'gpt2': its sliding windows do not reach"):
        load_hf(saved("gpt2")[1], 1, kernel_folder, "torch")


def test_rows_that_depend_on_each_other_run_one_at_a_time(tmp_path: Path, kernel_folder: Path) -> None:
    """Experts take the rows routed to them together, and torch rounds by how many there are."""
    sizes = {"num_experts": 4, "hidden_size": 128, "moe_intermediate_size": 64}
    theirs = make_model("Qwen2Moe", {**SIZES, **sizes, "shared_expert_intermediate_size": 64})
    theirs.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="'qwen2_moe' depend on the rows beside them"):
        model = load_hf(open_checkpoint(tmp_path), 2, kernel_folder, "auto")
    ids = random_ids(VOCAB, 20)
    whole = Reader(model.config).read(model, ids)
    assert furthest(whole, their_logits(theirs, ids)) < TOLERANCE
    assert torch.equal(Reader(model.config).read(model, ids, chunk=3), whole)
    batch = Reader(model.config).batch(Part(0, ids))
    batch.logit_rows = torch.tensor([7, 3])
    assert torch.equal(model.forward(batch, Reader(model.config).store), whole[[7, 3]])
    batch.logit_rows = torch.tensor([], dtype=torch.int64)
    assert model.forward(batch, Reader(model.config).store).shape == (0, VOCAB)


def test_long_rope_stops_where_it_would_look_at_other_rows(tmp_path: Path, kernel_folder: Path) -> None:
    """Its frequencies change for a whole pass once one row is past the trained length."""
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "original_max_position_embeddings": 32}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0, **factors}
    options = {**SIZES, "rope_parameters": rope, "original_max_position_embeddings": 32}
    make_model("Starcoder2", options).save_pretrained(tmp_path)
    assert load_hf(open_checkpoint(tmp_path), 1, kernel_folder, "torch").config.context == 32


def test_the_files_hold_no_pickle(saved: Any) -> None:
    folder = saved("gpt2")[1].path
    assert {file.suffix for file in folder.iterdir()} <= {".json", ".safetensors"}
    assert json.loads((folder / "config.json").read_text())["model_type"] == "gpt2"
