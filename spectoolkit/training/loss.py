"""How well a head predicts the target's law, as a loss and as what verification will make of it.

Shapes: B outputs of N tokens, V target ids, V' draft ids. Depth j of position n is the draft of a step that began at
n - j; it exists where n >= j.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional


def is_counted(tokens: Tensor, depth: int) -> Tensor:
    """[B, N] whether a position of `tokens` (padded with -1) has a draft at this depth."""
    return (tokens >= 0) & (torch.arange(tokens.shape[1], device=tokens.device) >= depth)


class _CrossEntropy(torch.autograd.Function):
    """`cross_entropy` with the gradient q - p kept from the forward pass, in the dtype of the logits.

    Rows are long and there are many: the composed form reads and writes them four times as often.
    """

    @staticmethod
    def forward(ctx: Any, draft_logits: Tensor, target_probs: Tensor) -> Tensor:
        log_probs = functional.log_softmax(draft_logits, dim=-1, dtype=torch.float32)
        loss = -torch.linalg.vecdot(log_probs, target_probs.to(log_probs.dtype))
        ctx.save_for_backward(log_probs.exp_().sub_(target_probs).to(draft_logits.dtype))
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grads[0][..., None].to(gradient.dtype), None


def cross_entropy(draft_logits: Tensor, target_probs: Tensor) -> Tensor:
    """[...] -sum_x p(x) log q(x) of rows [..., V'], p renormalised over the draft ids.

    Its gradient is that of KL(p, q).
    """
    return cast(Tensor, _CrossEntropy.apply(draft_logits, target_probs))


def overlap(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """[...] sum_x min(p(x), q(x)) of rows [..., V]: the probability that rejection sampling accepts a draft x ~ q.

    (Leviathan et al., arXiv 2211.17192, theorem 3.5.)
    """
    return torch.minimum(target_probs, draft_probs).sum(-1)
