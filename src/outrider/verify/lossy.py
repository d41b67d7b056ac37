"""`lossy`: draft tokens may be accepted though the target would have chosen others. Not exact; must be asked for by
name.

*typical*: a draft token is accepted if p(x) >= min(threshold, delta exp(-H(p))): the higher the target's entropy, the
lower the bound. *threshold*: a draft token is accepted if p(x) >= threshold. The longest accepted path is kept; the
law draws the token after it.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from outrider.verify.law import Draw, Result, choose, follow
from outrider.verify.rows import TreeRows


def lossy(processed: Tensor, rows: TreeRows, draw: Draw) -> list[Result]:
    chosen = choose(processed, rows, draw).numpy()
    log_p = processed.float().log_softmax(-1)
    token = torch.from_numpy(rows.token).clamp(min=0)
    p = log_p[torch.from_numpy(rows.parent)].gather(1, token[:, None])[:, 0].exp().numpy()
    stands = (p >= _bound(log_p, rows)[rows.parent]) & (p > 0)  # a token that is ruled out is never accepted
    return follow(stands | (chosen[rows.parent] == rows.token), chosen, rows)


def _bound(log_p: Tensor, rows: TreeRows) -> np.ndarray:
    """[R] minimum probability of an accepted child of each row."""
    asked = [s.request.params.speculation for s in rows.sequences]
    threshold = rows.spread([a.threshold for a in asked], np.float64)
    delta = rows.spread([a.delta for a in asked], np.float64)
    typical = rows.spread([a.rule == "typical" for a in asked], bool)
    entropy = -(log_p.exp() * log_p.clamp(min=-1e30)).sum(-1).double().numpy()
    return np.where(typical, np.minimum(threshold, delta * np.exp(-entropy)), threshold)
