"""How often a guess holds, by rule and temperature: greedy drafts, coupled, the ratio test, coupled trees.

    python bench/acceptance.py smollm2-135m DRAFT --prompts FILE.jsonl --limit 24 --tokens 96

The target answers each prompt at the temperature; at every position of its answers both models' distributions are
compared:

    greedy   the draft's likeliest token is the one the target draws        p(argmax q)
    coupled  both draw with the same noise and agree                        sum_x 1 / sum_y max(p_y/p_x, q_y/q_x)
    ratio    the ratio test accepts                                         sum_x min(p, q)
    tree k   the target's draw is among the draft's k best with that noise  by drawing
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from outrider import LLM, SamplingParams
from outrider.cache.store import KeyValueStore
from outrider.cache.table import SlotTable
from outrider.draft.feed import text_batch
from outrider.engine.build import load_model
from outrider.load.checkpoint import open_checkpoint
from outrider.load.find import find
from outrider.model.decoder import Model
from outrider.settings import cache_folder
from outrider.verify.noise import gumbel

TREES = (2, 4)


def logits_over(model: Model, text: list[int]) -> torch.Tensor:
    """[len(text), vocab] the model's logits after each token."""
    c = model.config
    store = KeyValueStore(c.layers, len(text), c.kv_heads, c.head_dim)
    table = SlotTable(len(text), 1, len(text), reuse=False)
    row, _ = table.open([])
    table.extend(row, len(text))
    return model.forward(text_batch(table, [row], [text], [0], last_only=False), store)


def coupled_match(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """The chance that two draws with shared noise agree, exactly, over the tokens that matter: [R, V] ->
    [R].
    """
    p, q = p.double(), q.double()
    top = (p + q).topk(min(400, p.shape[1])).indices
    p, q = p.gather(1, top), q.gather(1, top)
    ratio = torch.maximum(p[:, None, :] / p[:, :, None], q[:, None, :] / q[:, :, None])
    return (1 / ratio.sum(-1)).nan_to_num(0).sum(-1)


def measure(
    target: Model, draft: Model, text: list[int], start: int, temperature: float, seed: int
) -> list[list[float]]:
    lp, lq = (logits_over(m, text)[start - 1 : -1] for m in (target, draft))
    if temperature == 0:
        best = lp.argmax(-1, keepdim=True)
        ranks = lq.topk(max(TREES)).indices == best
        first = ranks[:, :1].any(-1).double()
        return torch.stack([first, first, first, *(ranks[:, :k].any(-1).double() for k in TREES)], 1).tolist()
    lp, lq = lp / temperature, lq / temperature
    p, q = lp.softmax(-1), lq.softmax(-1)
    greedy = p.gather(1, q.argmax(-1, keepdim=True))[:, 0]
    noise = gumbel(torch.full((len(p),), seed), torch.arange(start, start + len(p)), p.shape[1])
    drawn = (lp + noise).argmax(-1, keepdim=True)
    ranks = (lq + noise).topk(max(TREES)).indices == drawn
    columns = [
        greedy,
        coupled_match(p, q),
        torch.minimum(p, q).sum(-1),
        *(ranks[:, :k].any(-1) for k in TREES),
    ]
    return torch.stack([c.double() for c in columns], 1).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target")
    parser.add_argument("draft")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--temperatures", default="0,0.7,1")
    given = parser.parse_args()
    with LLM(given.target, draft="none") as llm, torch.no_grad():
        draft = load_model(open_checkpoint(find(given.draft, cache_folder())), llm.settings)
        rows = [json.loads(line) for line in given.prompts.read_text().splitlines()]
        chosen = rows[:: max(1, len(rows) // given.limit)][: given.limit]
        prompts = [llm.chat_ids([{"role": "user", "content": row["turns"][0]}]) for row in chosen]
        prompts = [p for p in prompts if len(p) < 600]
        print(
            f"| T | positions | greedy | coupled | ratio test | {' | '.join(f'tree of {k}' for k in TREES)} |"
        )
        print("|---" * (5 + len(TREES)) + "|")
        for temperature in map(float, given.temperatures.split(",")):
            params = SamplingParams(temperature=temperature, max_tokens=given.tokens, seed=1)
            found = []
            for out in llm.generate(prompts, params):
                if out.token_ids:
                    text = out.prompt_ids + out.token_ids
                    found += measure(llm.model, draft, text, len(out.prompt_ids), temperature, seed=9)
            means = torch.tensor(found).mean(0).tolist()
            print(
                f"| {temperature:g} | {len(found)} | " + " | ".join(f"{m:.3f}" for m in means) + " |",
                flush=True,
            )


if __name__ == "__main__":
    main()
