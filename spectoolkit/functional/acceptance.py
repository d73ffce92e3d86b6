"""What verification rules share: overlaps, residuals, accepted prefixes and the emitted block.

p is the target's row, q the draft's, x a drafted token. Vocabularies may differ in size: an id that one side lacks has
probability 0 there. -1 stands for "no token".
"""

from __future__ import annotations

import torch
from torch import Tensor

from spectoolkit.functional.ragged import fit_vocabulary, places

TYPICAL_TOLERANCE = 1e-5
"""A probability that exceeds the typical threshold by no more than this, relatively, counts as equal to it: above the
rounding of the entropy of a float32 row over a large vocabulary."""

RELAXED_TOLERANCE = 1e-6
"""A probability that misses the relaxed threshold by no more than this counts as equal to it: the rounding of a float32
row."""


def overlap(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """Acceptance probability [...] float64 of a token drawn from q under rejection, of rows [..., V].

    sum_x min(p(x), q(x)) = 1 - TV(p, q)      (Leviathan et al., arXiv 2211.17192, theorem 3.5)
    """
    shared = min(target_probs.shape[-1], draft_probs.shape[-1])
    smaller = torch.minimum(target_probs[..., :shared], draft_probs[..., :shared])
    return smaller.sum(-1, dtype=torch.float64)


def coupled_overlap(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """Probability [...] float64 that p and q give the same token with the same Gumbel noise, of rows [..., V].

        sum_x 1 / sum_y max(p(y) / p(x), q(y) / q(x))  >=  (1 - TV) / (1 + TV)

    (Daliri et al., arXiv 2408.07978). With the tokens in the order of q / p, the inner maximum is p(y) / p(x) up to x
    and q(y) / q(x) behind it.
    """
    shared = min(target_probs.shape[-1], draft_probs.shape[-1])
    p, q = target_probs.to(torch.float64), draft_probs.to(torch.float64)
    p_beyond, q_beyond = p[..., shared:].sum(-1, keepdim=True), q[..., shared:].sum(-1, keepdim=True)
    p, q = p[..., :shared], q[..., :shared]
    order = (q / p).nan_to_num(0.0, torch.inf).argsort(-1)
    p, q = p.gather(-1, order), q.gather(-1, order)
    p_up_to, q_behind = p.cumsum(-1) + p_beyond, q.flip(-1).cumsum(-1).flip(-1) - q + q_beyond
    agree = p * q / (q * p_up_to + p * q_behind)
    return agree.nan_to_num(0.0).sum(-1)


def residual(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """Unnormalised law [..., V] of the token at a rejected position after a ratio test: (p - q)+.

    p itself where (p - q)+ is empty, as happens by rounding when p and q are equal but for their last digits.
    """
    difference = target_probs - fit_vocabulary(draft_probs, target_probs.shape[-1], 0.0)
    return _or_else(difference.clamp_(min=0), target_probs)


def point_mass_residual(target_probs: Tensor, tokens: Tensor) -> Tensor:
    """Unnormalised law [..., V] of the token at a rejected position when x was certain to be drafted: p without x.

    (p - q)+ with q the one-hot row of `tokens` [...]. p itself where nothing is left.
    """
    return _or_else(without(target_probs, tokens), target_probs)


def without(weights: Tensor, tokens: Tensor) -> Tensor:
    """Weights [..., V] with that of `tokens` [...] set to 0; -1 takes nothing away."""
    index = tokens.clamp(0, weights.shape[-1] - 1)[..., None]
    return weights.scatter(-1, index, torch.where(tokens[..., None] == index, 0, weights.gather(-1, index)))


def _or_else(weights: Tensor, otherwise: Tensor) -> Tensor:
    """`weights`, or `otherwise` in the rows where they sum to 0."""
    sums = weights.sum(-1, keepdim=True)
    if sums.is_cpu and all_positive(sums):  # most often so, and nothing waits
        return weights
    return torch.where(sums > 0, weights, otherwise)


def probs_of(probs: Tensor, tokens: Tensor) -> Tensor:
    """Probability [...] float64 of `tokens` [...] in `probs` [..., V]; 0 for -1 and for ids behind the rows' end."""
    index = tokens.clamp(0, probs.shape[-1] - 1)
    found = probs.gather(-1, index.unsqueeze(-1)).squeeze(-1).double()
    return found.masked_fill_(tokens != index, 0)


def both_probs_of(one: Tensor, other: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """`probs_of` two of rows [..., V] and [..., V'], in fewer operations where both are as wide."""
    if one.shape[-1] != other.shape[-1]:
        return probs_of(one, tokens), probs_of(other, tokens)
    index = tokens.clamp(0, one.shape[-1] - 1)
    at, is_outside = index.unsqueeze(-1), tokens != index
    p, q = one.gather(-1, at).squeeze(-1).double(), other.gather(-1, at).squeeze(-1).double()
    return p.masked_fill_(is_outside, 0), q.masked_fill_(is_outside, 0)


def sparse_probs_of(ids: Tensor, probs: Tensor, tokens: Tensor) -> Tensor:
    """Probability [...] float64 of `tokens` [...] in sparse rows `ids`, `probs` [..., m]; 0 for other ids."""
    return torch.where(ids == tokens[..., None], probs, 0).sum(-1, dtype=torch.float64)


def sparse_row(ids: Tensor, probs: Tensor, vocab_size: int) -> Tensor:
    """Sparse rows `ids`, `probs` [..., m] as [..., V]; ids behind the vocabulary are dropped."""
    index = ids.clamp(0, vocab_size - 1)
    row = probs.new_zeros(*probs.shape[:-1], vocab_size)
    return row.scatter_add_(-1, index, torch.where(ids == index, probs, 0))


def residual_mass(target_probs: Tensor, draft_probs: Tensor, scale: Tensor) -> Tensor:
    """Sum [...] float64 over x of (s p(x) - q(x))+ for rows [..., V] and `scale` s [...]."""
    scaled = target_probs * scale[..., None].to(target_probs.dtype)
    draft_probs = fit_vocabulary(draft_probs, target_probs.shape[-1], 0.0)
    return scaled.sub_(draft_probs).clamp_(min=0).sum(-1, dtype=torch.float64)


def sparse_residual_mass(target_probs: Tensor, ids: Tensor, probs: Tensor, scale: Tensor) -> Tensor:
    """As `residual_mass` for a sparse q, `ids` and `probs` [..., m]: s minus what the rows share, p being normalised.

    A point mass is m = 1 with probability 1.
    """
    index = ids.clamp(0, target_probs.shape[-1] - 1)
    found = torch.where(ids == index, target_probs.gather(-1, index), 0).to(torch.float64)
    return (scale - torch.minimum(scale[..., None] * found, probs.to(torch.float64)).sum(-1)).clamp(min=0)


def typical_threshold(target_probs: Tensor, epsilon: float, delta: float) -> Tensor:
    """Threshold [...] float64 of typical acceptance for rows [..., V]; H is the entropy in nats.

    min(epsilon, delta * exp(-H(p)))      (Cai et al., arXiv 2401.10774, section 2.3.1)
    """
    entropy = torch.special.entr(target_probs).sum(-1, dtype=torch.float64)
    return (delta * torch.exp(-entropy)).clamp(max=epsilon)


def relaxed_test(target_probs: Tensor, tokens: Tensor, top_n: int, delta: float) -> Tensor:
    """Which `tokens` [...] are among the N most probable of their rows [..., V] and near the first of them.

        rank(x) < N  and  p(x) >= max p - delta  and  p(x) > 0

    rank(x) counts the tokens before x in the order of falling probability, the lower id first on ties.
    """
    own = probs_of(target_probs, tokens)
    value = target_probs.gather(-1, tokens.clamp(0, target_probs.shape[-1] - 1)[..., None])
    ids = torch.arange(target_probs.shape[-1], device=tokens.device)
    is_before = (target_probs > value) | ((target_probs == value) & (ids < tokens[..., None]))
    is_near = own + RELAXED_TOLERANCE >= target_probs.amax(-1).to(torch.float64) - delta
    return (is_before.sum(-1) < top_n) & is_near & (own > 0)


def is_drafted(lengths: Tensor, num_draft_tokens: int) -> Tensor:
    """Which slots [B, K] hold a draft token, for proposals of `lengths` [B]."""
    return places(num_draft_tokens, lengths.device) < lengths[:, None]


def prefix_length(accepted: Tensor) -> Tensor:
    """Length [B] of the accepted prefix: True entries of `accepted` [B, K], False past the lengths, before a False."""
    return accepted.cumprod(-1).sum(-1)


def matched_block(sampled: Tensor, tokens: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Accept drafts that equal the target's own tokens `sampled` [B, K+1]: emit those up to the first difference.

    Returns:
        Accepted prefix [B], emitted block [B, K+1], and which of `tokens` [B, K] match [B, K].
    """
    matched = is_drafted(lengths, tokens.shape[1]) & (tokens == sampled[:, :-1])
    num_accepted = prefix_length(matched)
    position = places(sampled.shape[1], sampled.device)
    return num_accepted, torch.where(position <= num_accepted[:, None], sampled, -1), matched


def take(rows: Tensor, index: Tensor) -> Tensor:
    """`rows[b, index[b]]` for every b: one row of [B, N, ...] per sequence. Not to be written to."""
    if index.is_cpu and len(index) == 1:  # a view, for the price of none of an index's kernels
        return rows[:, int(index)]
    return rows[places(len(index), index.device), index]


def all_positive(values: Tensor) -> bool:
    """Whether all of `values` are > 0, which NaN is not; this waits for a device."""
    return values.numel() == 0 or float(values.min()) > 0


def emitted_block(tokens: Tensor, num_accepted: Tensor, last: Tensor) -> Tensor:
    """The block [B, K+1] that a step emits: the first `num_accepted` [B] of `tokens` [B, K], then `last` [B], then -1.

    `last` is -1 where the rule emits nothing behind the accepted prefix.
    """
    end = num_accepted[:, None]
    last = last[:, None]
    block = torch.cat([tokens, last], dim=1).scatter_(1, end, last)
    return block.masked_fill_(places(tokens.shape[1] + 1, tokens.device) > end, -1)
