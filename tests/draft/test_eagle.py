"""`eagle` against an EAGLE-3 head written down a second time, in plain torch and without a cache."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from outrider.draft import eagle
from outrider.draft.eagle import EagleDrafter
from outrider.draft.eagle_head import load_eagle
from outrider.draft.reading import text_batch
from outrider.errors import BadCheckpoint
from outrider.load.heads import HeadConfig, eagle_taps, read_head, write_head
from outrider.model.decoder import make_store
from outrider.types import NO_DRAFT, DraftPlan
from tests.draft.rows import Rows
from tests.tiny import (
    VOCAB,
    Always,
    Watched,
    eagle_tensors,
    finish,
    head_tensors,
    prompt_of,
    random_tensors,
    request,
    run_alone,
    tiny_config,
    tiny_engine,
    tiny_model,
    tokens_of,
    write_eagle,
)  # fmt: skip

LAYERS = 6
HEAD_EPS = 0.05  # not the target's
SHAPE = {"layers": LAYERS, "windows": (0,) * LAYERS}


@pytest.fixture(scope="module")
def model():
    return tiny_model(**SHAPE)


@pytest.fixture(scope="module")
def tensors():
    return eagle_tensors(tiny_config(**SHAPE), 50)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tensors):
    return write_eagle(tmp_path_factory.mktemp("eagle"), tiny_config(**SHAPE), tensors)


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float = HEAD_EPS) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def turn(x: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of [n, heads, 16], positions 0..n-1, theta 10000."""
    angles = torch.outer(torch.arange(len(x)).float(), 10000.0 ** (-torch.arange(8) / 8))
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x[..., :8], x[..., 8:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """[n, heads, 16] causal, with fewer key heads than query heads."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = torch.einsum("ihd,jhd->hij", q, k) / 4
    scores = scores.masked_fill(torch.ones(len(q), len(q)).triu(1).bool(), float("-inf"))
    return torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).flatten(1)


def target_states(text: list[int], taps: tuple[int, ...]) -> torch.Tensor:
    """[n, taps, hidden]: what enters these layers of the target, and what leaves its last one."""
    config = tiny_config(**SHAPE)
    read = random_tensors(config)
    tiny_read_order(read, config)
    x = read("model.embed_tokens.weight")[text]
    states = []
    for i in range(LAYERS):
        states.append(x)
        w = lambda name, i=i: read(f"model.layers.{i}.{name}.weight")  # noqa: E731 - a name for a long name
        x = decoder_layer(x, norm(x, w("input_layernorm"), 1e-5), w, 1e-5)
    return torch.stack([[*states, x][tap] for tap in taps], 1)


def decoder_layer(x: torch.Tensor, inputs: torch.Tensor, w, eps: float) -> torch.Tensor:
    q, k, v = (F.linear(inputs, w(f"self_attn.{p}_proj")).view(len(x), -1, 16) for p in "qkv")
    x = x + F.linear(attend(turn(q), turn(k), v), w("self_attn.o_proj"))
    h = norm(x, w("post_attention_layernorm"), eps)
    act = F.silu(F.linear(h, w("mlp.gate_proj"))) * F.linear(h, w("mlp.up_proj"))
    return x + F.linear(act, w("mlp.down_proj"))


def tiny_read_order(read, config) -> None:
    """Random weights are made as they are read: read them in the decoder's order."""
    from outrider.model.decoder import Decoder
    from outrider.model.kernels.reference import ReferenceKernels
    from outrider.model.rope import rope_tables

    Decoder(config, read, ReferenceKernels(config, rope_tables(config, 8)))


def reference_logits(
    t: dict[str, torch.Tensor], text: list[int], drafted: list[int], config: HeadConfig | None = None
) -> torch.Tensor:
    """The head's logits [target vocab] after the text and a path of draft tokens."""
    c = config or HeadConfig(tiny_config(**SHAPE), 50, eagle_taps(LAYERS))
    embedding = embedding_of()
    # entry i: states at i, token i + 1
    states = target_states(text, c.taps)[:-1]
    if c.tap_norms:
        states = torch.stack([norm(states[:, j], t["tap_norms.weight"][j]) for j in range(len(c.taps))], 1)
    states = states.flatten(1)
    if c.joint_norm:
        states = norm(states, t["input_norm.weight"])
    features = F.linear(states, t["fc.weight"])
    tokens = [*text[1:], *drafted]
    hidden = torch.zeros(0)
    # one entry more a draft token, fed with the last entry's own output
    for n in range(len(text) - 1, len(tokens) + 1):
        inputs = torch.cat([features, *recursive(hidden, len(text) - 1, n)]) if n >= len(text) else features
        e = norm(embedding[tokens[:n]], t["midlayer.input_layernorm.weight"])
        normed = norm(inputs, t["midlayer.hidden_norm.weight"])
        x = normed if c.normed_residual else inputs
        both = torch.cat([e, normed], 1)
        x = decoder_layer(x, both, lambda name: t[f"midlayer.{name}.weight"], HEAD_EPS)
        for i in range(1, c.layers):
            w = lambda name, i=i: t[f"layers.{i}.{name}.weight"]  # noqa: E731 - a name for a long name
            x = decoder_layer(x, norm(x, w("input_layernorm")), w, HEAD_EPS)
        normed = norm(x, t["norm.weight"])
        hidden = normed if c.norm_output else x
    ids = torch.arange(c.draft_vocab) + t.get("d2t", torch.zeros(c.draft_vocab, dtype=torch.int64))
    # Copies of the target's rows are kept as bfloat16; where it is all of them, none are made.
    rows = embedding[ids] if c.whole else embedding[ids].bfloat16().float()
    head = rows if c.shared_head else t["lm_head.weight"]
    out = torch.full((VOCAB,), float("-inf"))
    out[ids] = F.linear(normed[-1:], head)[0]
    return out


def recursive(hidden: torch.Tensor, true: int, n: int) -> list[torch.Tensor]:
    return [hidden[i - 1 : i] for i in range(true, n)]


def embedding_of() -> torch.Tensor:
    config = tiny_config(**SHAPE)
    read = random_tensors(config)
    tiny_read_order(read, config)
    return read("model.embed_tokens.weight")


def eagle_engine(model, folder, planner, **settings):
    def make(cache):
        return {"eagle": Watched(EagleDrafter(load_eagle(folder, model, 256), cache.store, cache.table))}

    engine = tiny_engine(model, planner, drafters=make, **settings)
    watched = engine.drafters["eagle"]
    return engine, watched.inner, watched


def test_chains_are_the_references(model, folder, tensors):
    engine, _, watched = eagle_engine(model, folder, Always(DraftPlan("eagle", 4, 4)))
    prompt = prompt_of(11, 1)
    engine.add(request("a", prompt, max_tokens=9))
    text = prompt + tokens_of(finish(engine)["a", 0])
    assert text[11:] == run_alone(model, request("a", prompt, max_tokens=9))
    seen = {known: draft for (_, known), draft in watched.seen.items() if draft[0]}
    assert len(seen) >= 4
    for known, (tokens, parents) in seen.items():
        assert parents == (-1, 0, 1, 2)
        for depth in range(4):
            logits = reference_logits(tensors, text[:known], list(tokens[:depth]))
            assert logits[tokens[depth]] > logits.max() - 1e-3
    assert not engine.drafters.faults


LAYER = replace(tiny_config(**SHAPE).reshaped(1, heads=2, kv_heads=1, intermediate=40), norm_eps=HEAD_EPS)
KINDS = {
    "taps": HeadConfig(LAYER, 50, (1, 3, 4, 0)),
    "last state": HeadConfig(LAYER, 50, (2, LAYERS)),
    "layers": HeadConfig(LAYER, 50, (2, 3), layers=3),
    "tap norms": HeadConfig(LAYER, 50, (4, 1, 6), tap_norms=True),
    "joint norm": HeadConfig(LAYER, 50, (6, 1, 4), joint_norm=True),
    "norm output": HeadConfig(LAYER, 50, (1, 4), norm_output=True),
    "normed residual": HeadConfig(LAYER, 50, (1, 4), normed_residual=True),
    "shared head, some words": HeadConfig(LAYER, 40, (1, 4), shared_head=True),
    "shared head, all words": HeadConfig(LAYER, VOCAB, (1, 4), shared_head=True),
    "all of it": HeadConfig(LAYER, 60, (0, 3, 6), 2, True, True, True, normed_residual=True),
}


def random_head(folder, config: HeadConfig) -> tuple[HeadConfig, dict[str, torch.Tensor]]:
    """A head of that kind, written and read again."""
    write_head(folder, config, head_tensors(config))
    found, read = read_head(folder, tiny_config(**SHAPE))
    return found, {name: tensor if name == "d2t" else tensor.float() for name, tensor in read.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_head_is_the_references(tmp_path, model, kind):
    """Logits, not only tokens: a flag that is ignored must show."""
    config, tensors = random_head(tmp_path, KINDS[kind])
    assert replace(config, layer=LAYER) == KINDS[kind]
    rows, text, drafted = Rows(slots=40), prompt_of(9, 1), [5, 17, 80]
    store = make_store(model, 40)
    drafter = EagleDrafter(load_eagle(tmp_path, model, 256), store, rows.table)
    s = rows.add(text)
    model.forward(text_batch(rows.table, [s.row], [text[:-1]], [0]), store)
    hidden = drafter._read([s], [len(text)])
    rows.table.extend(s.row, 3)
    for depth in range(4):
        logits, wanted = (
            drafter.head.logits(hidden)[0],
            reference_logits(tensors, text, drafted[:depth], config),
        )
        assert torch.equal(logits.isinf(), wanted.isinf())
        finite = ~wanted.isinf()
        torch.testing.assert_close(logits[finite], wanted[finite], atol=2e-4, rtol=1e-4)
        if depth < 3:
            batch = text_batch(rows.table, [s.row], [[drafted[depth]]], [len(text) + depth], behind=1)
            hidden = drafter.head.forward(hidden, batch, drafter.store)


def test_trees_are_the_references(model, folder, tensors):
    engine, _, watched = eagle_engine(model, folder, Always(DraftPlan("eagle", 14, 3, (2, 2, 2))))
    prompt = prompt_of(8, 2)
    engine.add(request("a", prompt, max_tokens=3))
    text = prompt + tokens_of(finish(engine)["a", 0])
    (known, (tokens, parents)) = next((k, d) for (_, k), d in watched.seen.items() if d[0])
    from outrider.types import Draft

    draft = Draft(tokens, parents)
    for node in range(-1, 6):
        logits = reference_logits(tensors, text[:known], [tokens[n] for n in draft.path(node)])
        children = [tokens[n] for n in range(14) if parents[n] == node]
        assert len(children) == 2
        assert all(logits[c] >= logits.topk(2).values[-1] - 1e-3 for c in children)


def test_only_tokens_of_the_draft_vocabulary(model, folder, tensors):
    known = set((torch.arange(50) + tensors["d2t"]).tolist())
    engine, _, watched = eagle_engine(model, folder, Always(DraftPlan("eagle", 12, 4)))
    engine.add(request("a", prompt_of(9, 1), max_tokens=40, temperature=1.2))
    finish(engine)
    drafted = {t for tokens, _ in watched.seen.values() for t in tokens}
    assert len(drafted) > 10 and drafted <= known


@pytest.mark.parametrize("layers", [2, 3, 4, 6, 32])
def test_taps_exist(layers):
    assert all(0 <= t < layers for t in eagle_taps(layers))
    assert eagle_taps(32) == (2, 16, 29)


def test_a_shallow_target_taps_one_layer_twice(tmp_path):
    model = tiny_model()  # two layers
    head = write_eagle(tmp_path, model.config, eagle_tensors(model.config, 50))
    runs = []
    for filling in (0.0, 9.0):  # what memory happened to hold must not matter
        engine, drafter, watched = eagle_engine(model, head, Always(DraftPlan("eagle", 4, 4)))
        drafter.target_store.features.fill_(filling)
        engine.add(request("a", prompt_of(9, 1), max_tokens=12))
        finish(engine)
        runs.append(watched.seen)
    assert runs[0] == runs[1]


@pytest.mark.parametrize("how", ["rows", "preempted"])
def test_rows_given_back_change_no_draft(model, folder, how):
    """Drafts in a crowd, with too few rows or slots for all, are those made alone."""
    requests = [request(f"r{i}", prompt_of(9 + i, i), max_tokens=25, temperature=0.8) for i in range(6)]
    expected = {}
    for one in requests:
        engine, _, watched = eagle_engine(model, folder, Always(DraftPlan("eagle", 3, 3)))
        engine.add(one)
        finish(engine)
        expected |= watched.seen
    slots = {"rows": 90, "preempted": 110}[how]
    settings = {"max_sequences": 3} if how == "rows" else {}
    engine, drafter, watched = eagle_engine(
        model,
        folder,
        Always(DraftPlan("eagle", 3, 3)),
        cache_bytes=slots * model.config.kv_bytes_per_token,
        **settings,
    )
    for numbers in (*drafter.store.keys, *drafter.store.values):
        numbers.fill_(1e3)  # what was never written must not matter
    for one in requests:
        engine.add(one)
    finish(engine)
    assert how == "rows" or engine.scheduler.preemptions > 0
    shared = {k: d for k, d in watched.seen.items() if d[0] and expected.get(k, ((),))[0]}
    assert len(shared) > 20 and shared == {k: expected[k] for k in shared}
    engine.table.prefix.clear()
    assert engine.table.used == 0


def test_too_few_slots_to_borrow_are_no_draft(model, folder):
    rows = Rows(slots=23)
    store = make_store(model, 23)
    drafter = EagleDrafter(load_eagle(folder, model, 256), store, rows.table)
    s = rows.add(prompt_of(20, 1))
    model.forward(text_batch(rows.table, [s.row], [s.tokens[:-1]], [0]), store)
    assert drafter.propose([s], [DraftPlan("eagle", 6, 6)]) == [NO_DRAFT]
    assert rows.table.lengths[s.row] == 20
    (draft,) = rows.propose(drafter, [s], [DraftPlan("eagle", 3, 3)])
    assert len(draft) == 3


@pytest.mark.slow  # test_lm.py has the same for a model
def test_drafts_after_a_pause_are_those_without_one(tmp_path):
    model = tiny_model(context=700, **SHAPE)
    folder = write_eagle(tmp_path, model.config, eagle_tensors(model.config, 90), max_position_embeddings=700)

    def run(paused: bool):
        on = (lambda s: not 60 <= len(s.output) < 260) if paused else (lambda s: True)
        engine, _, watched = eagle_engine(model, folder, Always(DraftPlan("eagle", 4, 4), on))
        engine.add(request("a", prompt_of(9, 1), temperature=0.8, max_tokens=460))
        return tokens_of(finish(engine)["a", 0]), watched.seen

    (out, always), (same, paused) = run(False), run(True)
    assert out == same and len(out) == 460
    first = min(k[1] for k in paused if k[1] >= 269 and k in always)
    after = {k: d for k, d in paused.items() if k[1] >= first}
    assert first < 290 and len(after) > 100 and after == {k: d for k, d in always.items() if k[1] >= first}


def test_reading_in_pieces_changes_no_draft(model, folder, monkeypatch):
    seen = []
    for rows in (512, 7):
        monkeypatch.setattr(eagle, "READ_ROWS", rows)
        engine, _, watched = eagle_engine(model, folder, Always(DraftPlan("eagle", 4, 4)))
        for i in range(2):
            engine.add(request(f"r{i}", prompt_of(20 + i, i), max_tokens=6))
        finish(engine)
        seen.append(watched.seen)
    assert seen[0] == seen[1]


def test_other_names_and_no_map(tmp_path, model):
    """layers.0.* for the one layer; no d2t where the vocabularies are equal."""
    whole = eagle_tensors(model.config, VOCAB)
    write_eagle(tmp_path / "a", model.config, whole)
    renamed = {k.replace("midlayer.", "layers.0."): v for k, v in whole.items() if k not in ("d2t", "t2d")}
    write_eagle(tmp_path / "b", model.config, whole)
    save_file(renamed, tmp_path / "b" / "model.safetensors")
    seen = []
    for name in "ab":
        engine, _, watched = eagle_engine(model, tmp_path / name, Always(DraftPlan("eagle", 4, 4)))
        engine.add(request("a", prompt_of(9, 1), max_tokens=10))
        finish(engine)
        seen.append(watched.seen)
    assert seen[0] == seen[1]


def broken(change: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    t = dict(tensors)
    if change == "missing":
        del t["fc.weight"]
    elif change == "shape":
        t["norm.weight"] = torch.ones(5)
    elif change == "map":
        t["d2t"] = t["d2t"] + VOCAB
    return t


@pytest.mark.parametrize(
    "change, says",
    [("missing", "no tensor 'fc.weight'"), ("shape", "norm.weight has shape"), ("map", "d2t points outside")],
)
def test_wrong_tensors_are_named(tmp_path, model, tensors, change, says):
    write_eagle(tmp_path, model.config, tensors)
    save_file(broken(change, tensors), tmp_path / "model.safetensors")
    with pytest.raises(BadCheckpoint, match=says):
        load_eagle(tmp_path, model, 256)


def test_wrong_folders_are_named(tmp_path, model, tensors):
    with pytest.raises(BadCheckpoint, match=r"has no config\.json"):
        load_eagle(tmp_path, model, 256)
    write_eagle(tmp_path, model.config, tensors, vocab_size=77)
    with pytest.raises(BadCheckpoint, match=r"vocabulary 77; this target has 32 and 96"):
        load_eagle(tmp_path, model, 256)
    write_eagle(tmp_path, model.config, tensors, outrider_head={"version": 1, "taps": [1, 2, 40]})
    with pytest.raises(BadCheckpoint, match="taps must name layers from 0 to 6"):
        load_eagle(tmp_path, model, 256)
    write_eagle(tmp_path, model.config, tensors)
    (tmp_path / "model.safetensors").write_bytes(b"not a tensor file")
    with pytest.raises(BadCheckpoint, match="not a sound safetensors file"):
        load_eagle(tmp_path, model, 256)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(BadCheckpoint, match=r"no \.safetensors"):
        load_eagle(tmp_path, model, 256)
    assert json.loads((tmp_path / "config.json").read_text())["hidden_size"] == 32
