"""Rejection sampling: speculative sampling as it was introduced."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spectoolkit.datatypes import Dense, PointMass, Proposal, Uniforms, Verdict
from spectoolkit.errors import ContractError
from spectoolkit.functional.acceptance import (
    emitted_block,
    is_drafted,
    point_mass_residual,
    prefix_length,
    probs_of,
    residual,
    take,
)
from spectoolkit.functional.draw import draw


@dataclass(frozen=True)
class Rejection:
    """Accept each draft with the probability that makes the output follow the target, recover from what is missing.

        accept x_i         while u_i < p_i(x_i) / q_i(x_i)
        recovered token    ~ norm((p_n - q_n)+)      at the first rejected position n
        bonus token        ~ p_n                     if all n drafts were accepted

    A point mass is the law q = one-hot of x: accepted while u_i < p_i(x_i), recovered from p_n without x_n. With
    one-hot target rows (temperature 0) this is exact match.

    Reference: Leviathan et al., arXiv 2211.17192, algorithm 1; Chen et al., arXiv 2302.01318, algorithm 2. We compare
    u * q(x) < p(x) in float64, which is the same test without a division: u = 0 does not accept p(x) = 0.
    Laws: PointMass, Dense. Lossless. `judged_alone` is the test of each position on its own.

    Noise: u_i is `accept[:, i]`; the token at position n is drawn with `emit[:, n]`.
    """

    laws = (PointMass, Dense)
    is_lossless = True

    def verify(self, target_probs: Tensor, proposal: Proposal, uniforms: Uniforms) -> Verdict:
        """See `interfaces.Verifier`.

        Raises:
            ContractError: a drafted token that its law gives no probability, or a law this rule cannot judge.
        """
        tokens, lengths = proposal.tokens, proposal.lengths
        drafted = is_drafted(lengths, tokens.shape[1])
        draft_prob = self._draft_prob(proposal)
        if ((draft_prob <= 0) | draft_prob.isnan()).logical_and_(drafted).any():
            raise ContractError(
                "proposal: expected tokens drawn from the law it reports, got a drafted token of probability 0 under it"
            )
        accepted = drafted & (uniforms.accept * draft_prob < probs_of(target_probs[:, :-1], tokens))
        num_accepted = prefix_length(accepted, lengths)

        target_row = take(target_probs, num_accepted)
        is_bonus = (num_accepted == lengths)[:, None]
        weights = torch.where(is_bonus, target_row, self._residual(target_row, proposal, num_accepted))
        last = draw(weights, take(uniforms.emit, num_accepted))
        return Verdict(num_accepted, emitted_block(tokens, num_accepted, last), judged_alone=accepted)

    @staticmethod
    def _draft_prob(proposal: Proposal) -> Tensor:
        """q_i(x_i) [B, K]."""
        match proposal.law:
            case PointMass():
                return (proposal.tokens >= 0).to(torch.float64)
            case Dense(probs):
                return probs_of(probs, proposal.tokens)
            case law:
                raise ContractError(f"proposal.law: rejection judges PointMass and Dense, got {type(law).__name__}")

    @staticmethod
    def _residual(target_row: Tensor, proposal: Proposal, position: Tensor) -> Tensor:
        """Law [B, V] of the recovered token at `position` [B]; any row where the position is behind the proposal."""
        num_draft_tokens = proposal.tokens.shape[1]
        if num_draft_tokens == 0:
            return target_row
        position = position.clamp(max=num_draft_tokens - 1)
        match proposal.law:
            case Dense(probs):
                return residual(target_row, take(probs, position))
            case PointMass():
                return point_mass_residual(target_row, take(proposal.tokens, position))
