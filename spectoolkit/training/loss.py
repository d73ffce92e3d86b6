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


class _DraftLoss(torch.autograd.Function):
    """`draft_loss` with its gradient kept from the forward pass, in the dtype of the logits.

    Rows are long and there are many, so they are read and written a few at a time, while they are in a cache.
    """

    @staticmethod
    def forward(ctx: Any, draft_logits: Tensor, target_probs: Tensor, acceptance_weight: float) -> Tensor:
        loss = target_probs.new_empty(draft_logits.shape[:-1])
        kept = torch.empty_like(draft_logits)
        num_ids = draft_logits.shape[-1]
        flat = (draft_logits.reshape(-1, num_ids), target_probs.reshape(-1, num_ids))
        parts = zip(*(part.split(_ROWS) for part in (*flat, loss.view(-1), kept.view(-1, num_ids))), strict=True)
        for logits, target, loss_of, gradient_of in parts:
            log_probs = functional.log_softmax(logits, dim=-1, dtype=torch.float32)
            loss_of.copy_(torch.linalg.vecdot(log_probs, target.to(log_probs.dtype)).neg_())
            probs = log_probs.exp_()
            gradient = probs - target
            if acceptance_weight > 0:
                accepted = torch.minimum(probs, target).sum(-1, keepdim=True).clamp(min=TINY)
                loss_of.sub_(accepted[..., 0].log(), alpha=acceptance_weight)
                # d accepted / d logit y = q(y) (1[q(y) < p(y)] - sum_x q(x) 1[q(x) < p(x)])
                below = probs.masked_fill(probs >= target, 0)
                of_accepted = below.addcmul(probs, below.sum(-1, keepdim=True), value=-1)
                gradient.addcdiv_(of_accepted, accepted, value=-acceptance_weight)
            gradient_of.copy_(gradient)
        ctx.save_for_backward(kept)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grads[0][..., None].to(gradient.dtype), None, None


_ROWS = 32
TINY = 1e-6


def draft_loss(draft_logits: Tensor, target_probs: Tensor, acceptance_weight: float) -> Tensor:
    """[...] of rows [..., V'], p renormalised over the draft ids:

        -sum_x p(x) log q(x)  -  w log sum_x min(p(x), q(x))

    The first term has the gradient of KL(p, q). The second is the negative log-probability that rejection sampling
    accepts a draft: with few parameters q cannot be p, and of all q that miss it those are wanted that overlap most.
    """
    return cast(Tensor, _DraftLoss.apply(draft_logits, target_probs, acceptance_weight))
