"""How probable acceptance was, given the output: what a replay needs to know of each position.

If a verifier is lossless, the token x that an output has at a position follows the target's row p whatever was drafted.
Given x, a draft from q was accepted there with the probability below. Shapes: probs [B, Q, V], tokens [B, Q] (-1 where
there is none, which gives 0); results [B, Q].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from spectoolkit.functional.acceptance import probs_of


@dataclass(frozen=True, slots=True)
class GivenOutput:
    """How a lossless verifier's acceptance follows from rows and output.

    Attributes:
        reduce: (target_probs, draft_probs, tokens) -> one number per position [B, Q].
        combine: these numbers by step start and depth [..., N, K] -> probability of at least 1 .. K accepted drafts.
    """

    reduce: Callable[[Tensor, Tensor, Tensor], Tensor]
    combine: Callable[[Tensor], Tensor]


def ratio(target_probs: Tensor, draft_probs: Tensor, tokens: Tensor) -> Tensor:
    """r = q(x) / p(x).

    The output holds only tokens with p(x) > 0, so a 0 comes from rounding: the pass that emitted x and the one that
    scores it differ in their last bits, and a near tie at temperature 0 flips. There the row that x was drawn from was
    one-hot at x, so p(x) counts as 1.
    """
    target, draft = probs_of(target_probs, tokens), probs_of(draft_probs, tokens)
    return torch.where(target > 0, draft / target, draft)


def given_rejection(target_probs: Tensor, draft_probs: Tensor, tokens: Tensor) -> Tensor:
    """min(1, q(x) / p(x)): of the mass p(x), min(p(x), q(x)) comes from accepted drafts.

    (Leviathan et al., arXiv 2211.17192, theorem 3.5 and appendix A.1, conditioned on x.)
    """
    return ratio(target_probs, draft_probs, tokens).clamp(max=1)


def given_match(target_probs: Tensor, draft_probs: Tensor, tokens: Tensor) -> Tensor:
    """q(x): the draft is drawn independently of the target's token. For a point mass q this is rejection, too."""
    return probs_of(draft_probs, tokens)


def given_coupled(target_probs: Tensor, draft_probs: Tensor, tokens: Tensor) -> Tensor:
    """1 / sum_y max(p(y), q(y) p(x) / q(x)): both sides take the argmax of log-probability plus the same Gumbel noise.

    (Maddison et al., arXiv 1411.0030, and Daliri et al., arXiv 2408.07978, conditioned on x; p(x) = 0 as in `ratio`.)
    """
    target, draft = probs_of(target_probs, tokens), probs_of(draft_probs, tokens)
    # Clamped, since q(x) may be so small that the ratio overflows, and infinity times q(y) = 0 is not a number.
    scale = torch.where(draft > 0, target / draft, 0).clamp(max=torch.finfo(draft_probs.dtype).max)
    wide = draft_probs * scale[..., None].to(draft_probs.dtype)
    accepted = 1 / torch.maximum(target_probs, wide).sum(-1, dtype=torch.float64)
    return torch.where((draft > 0) & (target > 0), accepted, draft)
