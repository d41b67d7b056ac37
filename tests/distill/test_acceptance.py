"""What training says of acceptance: the noise given the token that came, and the walk that serving makes."""

from __future__ import annotations

import numpy as np
import torch

from outrider.distill.acceptance import Acceptance, posterior_noise, walk


def test_noise_given_a_token_draws_that_token() -> None:
    log_p, came = (3 * torch.randn(200, 7)).log_softmax(-1), torch.randint(0, 7, (200,))
    noise = posterior_noise(log_p, torch.arange(7) == came[:, None], torch.Generator().manual_seed(1))
    assert torch.equal((log_p + noise).argmax(-1), came)


def test_over_all_tokens_it_is_the_noise_of_the_law() -> None:
    """A token drawn by the law and noise given that token: another distribution, here of some of the words, draws with
    it what it would with fresh noise, and the two agree as often.
    """
    rows, generator = 40_000, torch.Generator().manual_seed(2)
    p, q, words = torch.tensor([2.0, 1.0, 0.0, -1.0]), torch.tensor([0.5, 1.5, 0.3]), torch.tensor([0, 1, 3])
    fresh = -torch.log(-torch.log(torch.rand(rows, 4, generator=generator).clamp(1e-20, 1 - 2**-24)))
    came = (p + fresh).argmax(-1)
    log_p = p.log_softmax(-1)[words].expand(rows, 3)
    given = posterior_noise(log_p, words == came[:, None], generator)
    by_law, by_given = words[(q + fresh[:, words]).argmax(-1)], words[(q + given).argmax(-1)]
    counts = [torch.bincount(one, minlength=4) / rows for one in (by_law, by_given)]
    assert (counts[0] - counts[1]).abs().max() < 0.02  # six standard deviations and more
    assert abs((by_law == came).float().mean() - (by_given == came).float().mean()) < 0.02


def test_the_walk_drafts_behind_what_it_was_brought() -> None:
    hits = np.zeros((2, 12), bool)
    hits[0, [5, 8, 9]] = True  # a first token of a draft that would be right at these places
    hits[1, [6, 9]] = True
    found = Acceptance([0, 0], [0, 0])
    walk(found, hits, [(4, 10)])
    # 4 comes of the prompt; 5 and 6 are accepted, 7 follows; 8 and 9 are accepted, and that is all there is.
    assert found.reached == [2, 2] and found.accepted == [2, 2] and found.steps == 2
    walk(found, hits, [(0, 4)])  # a head needs two tokens before it; 2 is wrong, and 3
    assert found.reached == [4, 2]
    assert found.rates[1] == 1.0 and found.tokens_per_step > 1
