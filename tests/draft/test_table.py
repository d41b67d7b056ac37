"""From what the user wrote to drafters, and what is refused, by name and with the way out."""

from __future__ import annotations

import json

import pytest

from outrider.draft.lookup import LookupDrafter
from outrider.draft.names import label, parse_draft
from outrider.draft.table import DrafterSources, make_drafters, same_tokens
from outrider.engine.kv_cache import make_kv_cache
from outrider.errors import BadCheckpoint, InvalidRequest, ModelNotFound, OutriderError
from outrider.load.checkpoint import open_checkpoint
from outrider.settings import Settings
from outrider.types import SamplingParams, Speculation
from outrider.verify.grammar import GrammarCompiler
from tests.load.tiny import byte_level_backend, write_folder
from tests.tiny import request, tiny_engine, tiny_model


@pytest.fixture
def sources(tmp_path):
    from outrider.engine.build import load_model

    write_folder(tmp_path / "target")
    checkpoint = open_checkpoint(tmp_path / "target")
    model = load_model(checkpoint, Settings(threads=1, kernels="torch"))
    cache = make_kv_cache(model, Settings(max_sequences=4, cache_bytes=1 << 22))

    def find(name):
        if not (tmp_path / name).exists():
            raise ModelNotFound(f"no model {name!r}")
        return tmp_path / name

    return DrafterSources(
        model,
        checkpoint.tokenizer,
        cache.store,
        cache.table,
        cache.context,
        find,
        lambda c: load_model(c, Settings(threads=1, kernels="torch")),
    )


def test_names(sources):
    for asked, name in {
        "auto": ("lookup",),
        "lookup": ("lookup",),
        "none": (),
        "early_exit:1": ("early_exit",),
        "early_exit": ("early_exit",),
    }.items():
        assert make_drafters(parse_draft(asked), sources)[1] == name
    drafters, default = make_drafters(parse_draft("lookup+target"), sources)
    assert default == ("lookup", "lm") and label(default) == "lookup+lm" and label(()) == "none"
    assert set(drafters) == {"lookup", "lm", "lookup+lm"}


@pytest.mark.parametrize("layers", ["0", "2", "9", "x", "-1"])
def test_early_exit_out_of_range(sources, layers):
    with pytest.raises(InvalidRequest, match="early_exit takes 1 to 1 layers"):
        make_drafters(parse_draft(f"early_exit:{layers}"), sources)


def test_the_same_twice(sources):
    for twice in ("lookup+lookup", "target+target"):
        with pytest.raises(InvalidRequest, match="same drafter twice"):
            make_drafters(parse_draft(twice), sources)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "pytorch_model.bin is in pickle form.*safetensors"),
        ({"speculators_model_type": "dflash"}, "'dflash'; of speculators, only eagle3 is read"),
    ],
)
def test_heads_that_cannot_be_read_are_named(sources, tmp_path, config, says):
    raw = json.loads((tmp_path / "target" / "config.json").read_text())
    (tmp_path / "head").mkdir()
    (tmp_path / "head" / "config.json").write_text(json.dumps({**raw, **config}))
    (tmp_path / "head" / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(OutriderError, match=says):
        make_drafters(parse_draft("head"), sources)


def test_another_tokenizer_is_named_by_its_first_difference(sources, tmp_path):
    write_folder(tmp_path / "other")
    raw = json.loads((tmp_path / "other" / "tokenizer.json").read_text())
    vocab = raw["model"]["vocab"]
    by_id = {i: s for s, i in vocab.items()}
    vocab[by_id[7]], vocab[by_id[8]] = 8, 7
    (tmp_path / "other" / "tokenizer.json").write_text(json.dumps(raw))
    with pytest.raises(BadCheckpoint) as wrong:
        make_drafters(parse_draft("other"), sources)
    assert f"token 7 is {by_id[8]!r} there and {by_id[7]!r} here" in str(wrong.value)


def test_a_tokenizer_padded_further_is_the_same(sources):
    class Strings:
        def __init__(self, strings):
            self.made = strings

        def strings(self):
            return self.made

    ours = sources.tokenizer.strings()
    same_tokens(Strings(ours), Strings([*ours, "<pad>"]), "x")
    same_tokens(Strings([*ours, "<pad>"]), Strings(ours), "x")


def test_a_larger_draft_is_warned_of_with_numbers(sources):
    sources.target = tiny_model(kernels="torch", hidden=16, layers=1, windows=(0,))
    with pytest.warns(UserWarning, match=r"draft target has 0 million parameters, its target 0 million"):
        make_drafters(parse_draft("target"), sources)


@pytest.mark.parametrize(
    "options, says",
    [
        ({"depth": 64}, "depth must be between 0 and 63"), ({"nodes": -1}, "nodes must be between 0 and 63"),
        ({"depth": 1.5}, "depth must be a whole number"), ({"mode": "couple"}, "unknown mode 'couple'.*coupled"),
        ({"rule": "typicl"}, "unknown rule.*typical"), ({"dept": 4}, "unknown speculation option 'dept'.*depth"),
        ({"tree": [8, 8]}, "more than 63 nodes"), ({"tree": []}, "tree must be a list"),
    ],
)  # fmt: skip
def test_options_out_of_range(options, says):
    with pytest.raises(InvalidRequest, match=says):
        Speculation.of(options)


def test_unknown_drafter_of_a_request():
    engine = tiny_engine(tiny_model(), drafters=lambda cache: {"lookup": LookupDrafter()})
    with pytest.raises(InvalidRequest, match=r"unknown drafter 'lokup'.*lookup"):
        engine.add(request("a", [1], speculation={"drafter": "lokup"}))


def test_a_prediction_longer_than_the_context():
    engine = tiny_engine(tiny_model())
    with pytest.raises(InvalidRequest, match=r"prediction has 300 tokens.*256"):
        engine.add(request("a", [1], prediction=range(300)))
    assert engine.idle


BROKEN = [{"regex": "(["}, {"lark": "start: missing"}, {"json_schema": {"type": "nonsense"}}]


@pytest.mark.parametrize("grammar", BROKEN)
def test_a_grammar_that_does_not_compile(grammar):
    backend = byte_level_backend()
    compiler = GrammarCompiler(backend.to_str(), backend.get_vocab_size(), [0])
    with pytest.raises(InvalidRequest, match="grammar"):
        compiler.compile(grammar)


def test_a_grammar_of_no_known_kind():
    with pytest.raises(InvalidRequest, match=r"unknown grammar 'regx'.*regex"):
        SamplingParams(grammar={"regx": "a"})
