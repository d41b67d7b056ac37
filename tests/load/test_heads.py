"""EAGLE heads on disk: what one layout says, the others say too, and what none can say is refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from outrider.draft.eagle_head import load_eagle
from outrider.draft.reading import text_batch
from outrider.errors import BadCheckpoint, InvalidRequest, OutriderError, UnsupportedModel
from outrider.load import heads
from outrider.load.heads import (
    FREQUENT,
    HeadConfig,
    eagle_taps,
    engines_that_load,
    head_shapes,
    read_head,
    write_head,
)
from tests.draft.rows import Rows
from tests.draft.test_eagle import KINDS, LAYER, LAYERS, SHAPE
from tests.tiny import (
    VOCAB,
    eagle_tensors,
    head_tensors,
    prompt_of,
    random_tensors,
    tiny_config,
    tiny_model,
    write_eagle,
)

TARGET = tiny_config(**SHAPE)
DEEP = tiny_config(layers=8, windows=(0,) * 8)  # deep enough for three different taps


@pytest.fixture(scope="module")
def model():
    return tiny_model(**SHAPE)


def head_rows(model, config: HeadConfig, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """The target's own rows for the head's words."""
    ids = torch.arange(config.draft_vocab) + tensors.get("d2t", 0)
    return model.kernels.embed(model.head, ids)


def some_logits(folder, model, words: int = 0) -> torch.Tensor:
    """What a head says of a text, known and drafted, with hidden states that belong to their layers."""
    head = load_eagle(folder, model, 256, read=partial(read_head, words=words))
    rows, text = Rows(slots=40), prompt_of(7, 1)
    every = torch.randn(6, LAYERS + 1, 32, generator=torch.Generator().manual_seed(2))
    s = rows.add(text)
    store = head.make_store(40)
    known = text_batch(rows.table, [s.row], [text[1:]], [1], behind=1)
    hidden = head.forward(head.fused(every[:, list(head.config.taps)]), known, store)
    rows.table.extend(s.row, 1)
    after = head.forward(hidden[-1:].clone(), text_batch(rows.table, [s.row], [[5]], [7], behind=1), store)
    return torch.cat([head.logits(hidden), head.logits(after)])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["eagle3", "speculators"])
def test_an_exported_head_is_the_same_head(tmp_path, model, kind, layout):
    config, tensors = KINDS[kind], head_tensors(KINDS[kind])
    write_head(tmp_path / "own", config, tensors)
    if config.shared_head:
        tensors["lm_head.weight"] = head_rows(model, config, tensors)
    write_head(tmp_path / "theirs", config, tensors, layout, TARGET)
    raw = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert "outrider_head" not in raw and ("transformer_layer_config" in raw) == (layout == "speculators")
    found, _ = read_head(tmp_path / "theirs", TARGET)
    assert replace(found, layer=LAYER) == replace(config, taps=tuple(sorted(config.taps)), shared_head=False)
    ours, theirs = some_logits(tmp_path / "own", model), some_logits(tmp_path / "theirs", model)
    assert torch.equal(ours.isinf(), theirs.isinf())
    known = ~ours.isinf()
    # A head of its own is rounded on disk, the target's is not.
    torch.testing.assert_close(
        theirs[known], ours[known], rtol=1e-4, atol=5e-2 if config.shared_head else 1e-4
    )


def test_names_are_those_that_other_engines_read(tmp_path):
    config = replace(KINDS["tap norms"], norm_output=True, layers=2)
    write_head(tmp_path / "eagle3", config, head_tensors(config), "eagle3", TARGET)
    raw = json.loads((tmp_path / "eagle3" / "config.json").read_text())
    assert raw["architectures"] == ["LlamaForCausalLMEagle3"] and raw["num_hidden_layers"] == 2
    assert raw["eagle_aux_hidden_state_layer_ids"] == [1, 4, 6] and raw["num_aux_hidden_states"] == 3
    assert raw["fc_norm"] is raw["norm_output"] is True
    assert raw["norm_before_fc"] is raw["norm_before_residual"] is False
    stored = load_file(tmp_path / "eagle3" / "model.safetensors")
    assert {"fc_norm.0.weight", "fc_norm.2.weight", "midlayer.hidden_norm.weight", "t2d", "d2t"} <= set(
        stored
    )
    assert "layers.1.self_attn.q_proj.weight" in stored and "tap_norms.weight" not in stored
    ids = torch.arange(50) + stored["d2t"]
    assert stored["t2d"].dtype == torch.bool and stored["t2d"].nonzero().flatten().tolist() == ids.tolist()
    write_head(tmp_path / "s", config, head_tensors(config), "speculators", TARGET, "some/model")
    raw = json.loads((tmp_path / "s" / "config.json").read_text())
    assert raw["speculators_model_type"] == "eagle3" and raw["fc_norm"] is True
    assert raw["speculators_config"]["verifier"]["name_or_path"] == "some/model"
    assert raw["speculators_config"]["proposal_methods"][0]["speculative_tokens"] > 0
    inner = raw["transformer_layer_config"]
    assert (
        inner["num_aux_hidden_states"] == 3 and inner["hidden_size"] == 32 and inner["model_type"] == "llama"
    )
    plain = HeadConfig(LAYER, VOCAB, eagle_taps(8))
    write_head(tmp_path / "plain", plain, head_tensors(plain), "eagle3", DEEP)
    assert "eagle_aux_hidden_state_layer_ids" not in json.loads((tmp_path / "plain/config.json").read_text())


def speculators_config(**changes) -> dict:
    inner = {
        "model_type": "llama", "hidden_size": 32, "vocab_size": VOCAB, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 40,
        "rms_norm_eps": 0.05, "max_position_embeddings": 256,
    }  # fmt: skip
    raw = {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "draft_vocab_size": 50,
        "norm_before_residual": False, "target_hidden_size": None, "eagle_aux_hidden_state_layer_ids": None,
        "transformer_layer_config": inner,
    }  # fmt: skip
    return {name: value for name, value in {**raw, **changes}.items() if value != "left out"}


def write_speculators(folder, tensors, **changes):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(speculators_config(**changes)))
    save_file(
        {k.replace("midlayer.", "layers.0."): v for k, v in tensors.items()}, folder / "model.safetensors"
    )
    return folder


def test_a_head_of_speculators_is_the_published_one(tmp_path, model):
    tensors = eagle_tensors(TARGET, 50)
    published = some_logits(write_eagle(tmp_path / "a", TARGET, tensors), model)
    assert torch.equal(some_logits(write_speculators(tmp_path / "b", tensors), model), published)
    # The default places, and others, by name.
    folder = write_speculators(tmp_path / "c", tensors, eagle_aux_hidden_state_layer_ids=[6, 1, 4])
    assert read_head(folder, TARGET)[0].taps == (1, 4, 6)
    assert not torch.equal(some_logits(folder, model), published)
    folder = write_speculators(tmp_path / "d", tensors, norm_before_residual=True)
    assert read_head(folder, TARGET)[0].normed_residual


def test_flags_may_lie_in_eagle_config(tmp_path):
    tensors = {**eagle_tensors(TARGET, 50), "input_norm.weight": torch.ones(96)}
    nested = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "norm_before_fc": True}
    config, _ = read_head(write_eagle(tmp_path, TARGET, tensors, eagle_config=nested), TARGET)
    assert config.taps == (0, 1, 2) and config.joint_norm


def test_a_published_head_without_its_last_matrix_has_the_targets(tmp_path, model):
    tensors = eagle_tensors(TARGET, VOCAB)
    write_eagle(tmp_path, TARGET, tensors)
    save_file({k: v for k, v in tensors.items() if k != "lm_head.weight"}, tmp_path / "model.safetensors")
    head = load_eagle(tmp_path, model, 256)
    hidden = torch.randn(3, TARGET.hidden, generator=torch.Generator().manual_seed(1))
    normed = model.kernels.norm(hidden, head.norm, head.config.layer.norm_eps)
    assert head.config.shared_head and torch.equal(head.logits(hidden), model.project(normed))


def test_a_small_vocabulary_makes_a_small_matmul(tmp_path, model):
    config = KINDS["shared head, some words"]
    write_head(tmp_path, config, head_tensors(config))
    assert load_eagle(tmp_path, model, 256).head.outputs == 40


def test_a_whole_head_may_keep_its_frequent_words(tmp_path):
    """Those that it names first, with the logits they had; a head without a list keeps all."""
    model = tiny_model(weights="bfloat16", **SHAPE)  # as copies of its rows are kept
    config = HeadConfig(LAYER, TARGET.vocab, (0, 1, 2), shared_head=True)
    tensors = head_tensors(config)
    frequent = torch.randperm(TARGET.vocab)[:40]
    write_head(tmp_path / "listed", config, {**tensors, FREQUENT: frequent.int()})
    write_head(tmp_path / "plain", config, tensors)
    whole, _ = read_head(tmp_path / "listed", TARGET)
    fewer, some = read_head(tmp_path / "listed", TARGET, words=16)
    assert (whole.whole, fewer.draft_vocab) == (True, 16) and FREQUENT not in some
    kept = frequent[:16].sort().values
    before, after = (some_logits(tmp_path / "listed", model, words) for words in (0, 16))
    torch.testing.assert_close(after[:, kept], before[:, kept])
    rest = torch.ones(TARGET.vocab, dtype=torch.bool).index_fill(0, kept, False)
    assert bool((after[:, rest] == float("-inf")).all())
    assert read_head(tmp_path / "plain", TARGET, words=16)[0].whole
    assert read_head(tmp_path / "listed", TARGET, words=40)[0].whole  # as many as it names are no choice


@pytest.mark.parametrize(
    ("ids", "said"),
    [([1, 1], "the same id"), ([1, TARGET.vocab], "outside"), ([0.5, 1.5], "no list of ids")],
)
def test_a_list_of_frequent_words_is_checked(tmp_path, ids, said):
    config = HeadConfig(LAYER, TARGET.vocab, (0, 1, 2), shared_head=True)
    write_head(tmp_path, config, {**head_tensors(config), FREQUENT: torch.tensor(ids)})
    with pytest.raises(BadCheckpoint, match=f"frequent.*{said}"):
        read_head(tmp_path, TARGET)


def test_copies_of_the_embedding_are_fine_and_others_are_not(tmp_path, model):
    tensors = eagle_tensors(TARGET, 50)
    write_eagle(tmp_path, TARGET, tensors)
    embedding = random_tensors(TARGET)
    copy = model.embed(torch.arange(VOCAB)).to(torch.bfloat16)
    save_file({**tensors, "embed_tokens.weight": copy}, tmp_path / "model.safetensors")
    load_eagle(tmp_path, model, 256)
    other = embedding("model.norm.weight") + torch.zeros(VOCAB, 1)
    save_file({**tensors, "embed_tokens.weight": other}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModel, match="an embedding of its own"):
        load_eagle(tmp_path, model, 256)


OWN = {"version": 1, "taps": [1, 4]}
REFUSED = {
    "kind": (dict(speculators_model_type="dflash"), "of speculators, only eagle3 is read"),
    "no layer": (dict(transformer_layer_config="left out"), "has no 'transformer_layer_config'"),
    "residual": (dict(norm_before_residual="left out"), "has no 'norm_before_residual'"),
    "biases": (dict(attention_bias=True), "biases"),
    "target": (dict(target_hidden_size=64), "hidden size 64; this one has 32"),
    "no fusion": (dict(eagle_config={"use_aux_hidden_state": False}), "without fusion"),
    "norms": (dict(fc_norm=True, norm_before_fc=True), "one by one and together"),
    "taps": (dict(eagle_aux_hidden_state_layer_ids=[1, 2, 7]), "from 0 to 6 of the target"),
    "flag": (dict(norm_output="yes"), "norm_output should be true or false"),
    "version": (dict(outrider_head={**OWN, "version": 2}), "should be of version 1"),
    "unknown": (dict(outrider_head={**OWN, "tricks": 1}), "should be of version 1"),
    "no taps": (dict(outrider_head={"version": 1}), r"not \(\)"),
    "wrong taps": (dict(outrider_head={**OWN, "taps": 3}), "not 3"),
    "layers": (dict(outrider_head={**OWN, "layers": 0}), "a head of 0 layers"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_read_is_refused_by_name(tmp_path, case):
    changes, says = REFUSED[case]
    with pytest.raises(OutriderError, match=says):
        read_head(write_speculators(tmp_path, eagle_tensors(TARGET, 50), **changes), TARGET)


def test_tensors_that_no_such_head_has_are_named(tmp_path):
    tensors = eagle_tensors(TARGET, 50)
    write_eagle(tmp_path, TARGET, tensors)
    save_file({**tensors, "midlayer.self_attn.q_norm.weight": torch.ones(16)}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=r"midlayer\.self_attn\.q_norm\.weight"):
        read_head(tmp_path, TARGET)
    twice = torch.zeros(50, dtype=torch.int64)
    twice[1] = -1
    save_file({**tensors, "d2t": twice}, tmp_path / "model.safetensors")
    with pytest.raises(BadCheckpoint, match="two words of the head the same id"):
        read_head(tmp_path, TARGET)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(
        BadCheckpoint, match=r"pytorch_model\.bin is in pickle form.*\n.*convert|weights_only"
    ):
        read_head(tmp_path, TARGET)


def test_shards_are_small_and_old_ones_go(tmp_path, monkeypatch):
    config = KINDS["layers"]
    tensors = head_tensors(config)
    monkeypatch.setattr(heads, "SHARD_BYTES", 6000)
    write_head(tmp_path, config, tensors)
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 3
    for shard in shards:
        with safe_open(shard, "pt") as opened:
            stored = [opened.get_tensor(name) for name in opened.keys()]  # noqa: SIM118 - not a dict
        assert len(stored) == 1 or sum(t.nbytes for t in stored) <= 6000
        assert all(t.dtype in (torch.bfloat16, torch.int64) for t in stored)
    found, read = read_head(tmp_path, TARGET)
    assert replace(found, layer=LAYER) == config and set(read) == dict(head_shapes(config)).keys()
    shards[1].rename(tmp_path / "elsewhere")
    with pytest.raises(BadCheckpoint, match="the download is incomplete"):
        read_head(tmp_path, TARGET)
    monkeypatch.setattr(heads, "SHARD_BYTES", 1 << 20)
    write_head(tmp_path, config, tensors)
    assert [file.name for file in tmp_path.glob("model*")] == ["model.safetensors"]
    read_head(tmp_path, TARGET)


def test_engines_and_what_cannot_be_exported(tmp_path):
    plain = HeadConfig(LAYER, 50, eagle_taps(8))
    assert engines_that_load(plain, DEEP) == ("outrider", "vllm", "sglang")
    assert engines_that_load(replace(plain, norm_output=True), DEEP) == ("outrider", "vllm")
    assert engines_that_load(KINDS["last state"], TARGET) == ("outrider", "vllm")
    twice = HeadConfig(LAYER, 50, (1, 1))
    assert engines_that_load(twice, TARGET) == ("outrider",)
    with pytest.raises(UnsupportedModel, match="only our own layout can name a tap twice"):
        write_head(tmp_path, twice, head_tensors(twice), "eagle3", TARGET)
    with pytest.raises(InvalidRequest, match="'eagle2' is not one of outrider, eagle3, speculators"):
        write_head(tmp_path, plain, head_tensors(plain), "eagle2", TARGET)
