"""Expected step counts of speculative decoding along a given output, without tossing a coin.

Let an output x_0 .. x_{n-1} be given, and let G_s(i) be the probability, given that output, that a step which starts at
s accepts at least i drafts. The probability u_s that a step starts at s then obeys

    u_0 = 1,    u_{s+j+1} += u_s (G_s(j) - G_s(j+1)),    j = 0 .. k_s,

where k_s is the number of drafts of such a step, G_s(0) = 1 and G_s(k_s + 1) = 0. Every expected count is a sum over s
of u_s times something; steps = sum_s u_s.

Shapes: R outputs of at most N tokens, S strategies, K draft tokens at most.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


def windows(values: Tensor, num_draft_tokens: int) -> Tensor:
    """[..., N] per position as [..., N, K] per (step start, depth): entry (s, i) is that of position s + i; 0 behind N.

    For draft models whose law at a position does not depend on where the step began.
    """
    padded = torch.nn.functional.pad(values, (0, num_draft_tokens - 1))
    return padded.unfold(-1, num_draft_tokens, 1)


def product_of_factors(factors: Tensor) -> Tensor:
    """G [..., N, K] of rules that accept each draft with a probability of its own: G_s(i) = prod_{l <= i} a_{s,l}."""
    return factors.cumprod(-1)


def running_minimum(ratios: Tensor) -> Tensor:
    """G [..., N, K] of block verification from r_{s,l} = q/p at the output's tokens (0 where there is none).

    G_s(i) = min(1, min_{1 <= j <= i} prod_{l <= j} r_{s,l})
    """
    # A product that overflowed and then meets a 0 is 0.
    return ratios.cumprod(-1).nan_to_num(0.0, torch.inf).cummin(-1).values.clamp(max=1)


@dataclass(frozen=True, slots=True)
class ExpectedCounts:
    """Expected sums over the steps of each output, named as the columns of a request row (`records`).

    Attributes:
        steps, proposing_steps, drafted, accepted, truncated: [R, S].
        drafted_at, accepted_at, reached_at: [R, S, K].
    """

    steps: Tensor
    proposing_steps: Tensor
    drafted: Tensor
    accepted: Tensor
    truncated: Tensor
    drafted_at: Tensor
    accepted_at: Tensor
    reached_at: Tensor


def expected_counts(at_least: Tensor, drafted: Tensor, lengths: Tensor) -> ExpectedCounts:
    """Run the recursion over all step starts.

    A step that starts at s has m = n - s tokens of the output before it. Accepting m drafts ends the output inside the
    block (its last token is an end of sequence): the step emits m tokens and counts as truncated. What it might have
    accepted behind the end is not known, and not counted.

    Args:
        at_least: [R, S, N, K] G_s(i) for i = 1 .. K; entries behind the end of an output or of a proposal are ignored.
        drafted: [R, S, N] k_s <= K, drafts of a step that starts at s, those behind the end of the output included.
        lengths: [R] n, tokens of each output, at least 1.
    """
    num_outputs, num_strategies, num_positions, num_draft_tokens = at_least.shape
    depth = torch.arange(1, num_draft_tokens + 1, device=at_least.device)
    start = torch.arange(num_positions, device=at_least.device)
    left = (lengths[:, None] - start).clamp(min=0)  # [R, N], m
    is_drafted = depth <= drafted[..., None]  # [R, S, N, K]
    is_inside = is_drafted & (depth <= left[:, None, :, None])
    at_least = torch.where(is_inside, at_least, 0)
    ones = torch.ones_like(at_least[..., :1])
    exactly = torch.cat([ones, at_least], -1) - torch.cat([at_least, 0 * ones], -1)  # j = 0 .. K

    starts = torch.zeros((num_outputs, num_strategies, num_positions + num_draft_tokens + 1), dtype=at_least.dtype)
    starts = starts.to(at_least.device)
    starts[..., 0] = 1
    for s in range(num_positions):
        # Starts behind the end of an output stay 0 below, so what flows out of them does not matter.
        starts[..., s + 1 : s + num_draft_tokens + 2] += starts[..., s : s + 1] * exactly[..., s, :]
    begun = starts[..., :num_positions] * (left[:, None] > 0)  # [R, S, N], u

    def total(values: Tensor) -> Tensor:
        """Sum over step starts of u_s times `values` [R, S, N] or [R, S, N, K]."""
        weights = begun if values.dim() == begun.dim() else begun[..., None]
        return (weights * values).sum(2)

    ends_inside = at_least.gather(-1, (left[:, None, :, None] - 1).clamp(0, num_draft_tokens - 1).expand_as(ones))
    ends_inside = torch.where(left[:, None, :] <= num_draft_tokens, ends_inside[..., 0], 0)
    before = torch.cat([ones, at_least[..., :-1]], -1)
    return ExpectedCounts(
        steps=total(torch.ones_like(begun)),
        proposing_steps=total((drafted > 0).to(begun.dtype)),
        drafted=total(drafted.to(begun.dtype)),
        accepted=total(at_least.sum(-1)),
        truncated=total(ends_inside),
        drafted_at=total(is_drafted.to(begun.dtype)),
        accepted_at=total(at_least),
        reached_at=total(torch.where(is_inside, before, 0)),
    )


def widen(counts: ExpectedCounts, num_draft_tokens: int) -> ExpectedCounts:
    """The same counts with per-position columns for a larger K, whose further positions are never drafted."""
    missing = num_draft_tokens - counts.drafted_at.shape[-1]
    names = ("drafted_at", "accepted_at", "reached_at")
    return replace(counts, **{name: torch.nn.functional.pad(getattr(counts, name), (0, missing)) for name in names})
