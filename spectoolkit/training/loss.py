"""How well a head predicts the target's law, as a loss and as what verification will make of it.

Shapes: B outputs of N tokens, V target ids, V' draft ids. Depth j of position n is the draft of a step that began at
n - j; it exists where n >= j.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def is_counted(tokens: Tensor, depth: int) -> Tensor:
    """[B, N] whether a position of `tokens` (padded with -1) has a draft at this depth."""
    return (tokens >= 0) & (torch.arange(tokens.shape[1], device=tokens.device) >= depth)


def cross_entropy(draft_logits: Tensor, target_probs: Tensor) -> Tensor:
    """[...] -sum_x p(x) log q(x) of rows [..., V'], p renormalised over the draft ids.

    Its gradient is that of KL(p, q).
    """
    return -(target_probs * functional.log_softmax(draft_logits.float(), dim=-1)).sum(-1)


def overlap(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """[...] sum_x min(p(x), q(x)) of rows [..., V]: the probability that rejection sampling accepts a draft x ~ q.

    (Leviathan et al., arXiv 2211.17192, theorem 3.5.)
    """
    return torch.minimum(target_probs, draft_probs).sum(-1)
