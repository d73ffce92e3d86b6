"""The law of the token that a position emits under each lossy rule, given the target's row and the draft's.

A step that reaches a position with a draft x ~ q emits x with the rule's acceptance probability a(x), else a recovered
token. With r_x the law of the recovered token after x was rejected, the position emits

    e(y) = q(y) a(y) + sum_x q(x) (1 - a(x)) r_x(y).

Shapes: rows p, q [..., V] (q = the one-hot row for a point mass), e [..., V]. All are exact; nothing is sampled.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spectoolkit.functional.acceptance import (
    RELAXED_TOLERANCE,
    TYPICAL_TOLERANCE,
    residual,
    typical_threshold,
)


def accept_else(draft_probs: Tensor, acceptance: Tensor, recovered: Tensor) -> Tensor:
    """e = q a + (1 - sum_x q(x) a(x)) r, where the recovered token has the law r whatever was rejected."""
    kept = draft_probs * acceptance
    return kept + (1 - kept.sum(-1, keepdim=True)).clamp(min=0) * recovered


def lenient_law(target_probs: Tensor, draft_probs: Tensor, lenience: float) -> Tensor:
    """a = min(1, p / (l q)), r = norm((p - q)+) (`verifiers.Lenient`)."""
    recovered = _normalised(residual(target_probs, draft_probs))
    kept = torch.minimum(target_probs / lenience, draft_probs)
    return kept + (1 - kept.sum(-1, keepdim=True)).clamp(min=0) * recovered


def mixture_law(target_probs: Tensor, draft_probs: Tensor, draft_weight: float) -> Tensor:
    """(1 - w) p + w q (`verifiers.Mixture`)."""
    return (1 - draft_weight) * target_probs + draft_weight * draft_probs


def typical_law(
    target_probs: Tensor, draft_probs: Tensor, epsilon: float, delta: float, recovers_argmax: bool
) -> Tensor:
    """a = [p > min(epsilon, delta exp(-H))], r = p or its argmax (`verifiers.Typical`)."""
    threshold = typical_threshold(target_probs, epsilon, delta)[..., None] * (1 + TYPICAL_TOLERANCE)
    acceptance = (target_probs > threshold).to(target_probs.dtype)
    return accept_else(draft_probs, acceptance, argmax_law(target_probs) if recovers_argmax else target_probs)


def relaxed_law(target_probs: Tensor, draft_probs: Tensor, top_n: int, delta: float) -> Tensor:
    """a = [x among the N most probable, p(x) >= max p - delta], r = argmax p (`verifiers.Relaxed`)."""
    order = target_probs.argsort(dim=-1, descending=True, stable=True)[..., :top_n]
    acceptance = torch.zeros_like(target_probs).scatter_(-1, order, 1.0)
    is_near = target_probs + RELAXED_TOLERANCE >= target_probs.amax(-1, keepdim=True) - delta
    acceptance = acceptance * (is_near & (target_probs > 0))
    return accept_else(draft_probs, acceptance, argmax_law(target_probs))


def threshold_law(target_probs: Tensor, draft_probs: Tensor, threshold_single: float, threshold_acc: float) -> Tensor:
    """a = 1 if p >= single, else min(1, p / acc); r_x = norm(p without x) (`verifiers.Threshold`)."""
    acceptance = (target_probs / threshold_acc).clamp(max=1)
    acceptance = torch.where(target_probs >= threshold_single, 1, acceptance)
    rejected = draft_probs * (1 - acceptance)
    # p(y) sum over x != y of rejected(x) / (1 - p(x)); where p(x) = 1 nothing is rejected.
    share = torch.where(rejected > 0, rejected / (1 - target_probs), 0)
    return draft_probs * acceptance + target_probs * (share.sum(-1, keepdim=True) - share)


def argmax_law(target_probs: Tensor) -> Tensor:
    """The one-hot row of the most probable token, the lowest id on ties."""
    best = target_probs.argmax(-1, keepdim=True)
    return torch.zeros_like(target_probs).scatter_(-1, best, 1.0)


def divergences(emitted_probs: Tensor, target_probs: Tensor) -> tuple[Tensor, Tensor]:
    """Total variation [...], and KL(e, p) [...] in nats, of rows e and p [..., V], in float64.

    TV = sum_x |e(x) - p(x)| / 2;  KL = sum_x e(x) log(e(x) / p(x)), infinite where e has what p lacks.
    """
    emitted, target = emitted_probs.to(torch.float64), target_probs.to(torch.float64)
    variation = (emitted - target).abs().sum(-1) / 2
    terms = torch.where(emitted > 0, emitted * (emitted.log() - target.log()), 0)
    return variation, terms.sum(-1).clamp(min=0)


def _normalised(weights: Tensor) -> Tensor:
    return weights / weights.sum(-1, keepdim=True)
