"""What a rule that knows the draft law reads from it: q(x), and what p has beyond q."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from spectoolkit.datatypes import Chains, Dense, PointMass, Proposal, TopM
from spectoolkit.errors import ContractError
from spectoolkit.functional.acceptance import (
    all_positive,
    both_probs_of,
    is_drafted,
    point_mass_residual,
    probs_of,
    residual,
    residual_mass,
    sparse_probs_of,
    sparse_residual_mass,
    sparse_row,
    take,
    without,
)

KNOWN_LAWS = (PointMass, Dense, TopM)


def draft_prob(proposal: Proposal) -> Tensor:
    """q_i(x_i) [B, K] float64 of the drafted tokens; anything past a proposal's length.

    Raises:
        ContractError: a drafted token that its law gives no probability, or a law that does not say q.
    """
    tokens = proposal.tokens
    match proposal.law:
        case PointMass():
            prob = (tokens >= 0).to(torch.float64)
        case Dense(probs):
            prob = probs_of(probs, tokens)
        case TopM(ids, probs):
            prob = sparse_probs_of(ids, probs, tokens)
        case law:
            raise _unknown(law)
    return _checked(prob, proposal)


def both_probs(target_probs: Tensor, proposal: Proposal) -> tuple[Tensor, Tensor]:
    """p_i(x_i) and q_i(x_i) [B, K] float64 of the drafted tokens; anything past a proposal's length.

    Raises:
        ContractError: as `draft_prob`.
    """
    rows = target_probs[:, :-1]
    if isinstance(proposal.law, Dense):
        p, q = both_probs_of(rows, proposal.law.probs, proposal.tokens)
        return p, _checked(q, proposal)
    return probs_of(rows, proposal.tokens), draft_prob(proposal)


def _checked(prob: Tensor, proposal: Proposal) -> Tensor:
    """q(x), which a drafted token must have."""
    # Elsewhere asking would wait for the device: there the loop asks, with the one copy of a step (`kernels.judge`).
    if prob.is_cpu and not all_positive(prob) and foreign(prob, proposal).any():
        raise foreign_token()
    return prob


def foreign(prob: Tensor, proposal: Proposal) -> Tensor:
    """[B, K] where a drafted token has probability `prob` 0, or NaN, under the law that it is said to be drawn from."""
    return is_drafted(proposal.lengths, proposal.tokens.shape[1]) > (prob > 0)


def foreign_token() -> ContractError:
    """A token was not drawn from the law that its proposal reports."""
    return ContractError(
        "proposal: expected tokens drawn from the law it reports, got a drafted token of probability 0 (or NaN) under "
        "it"
    )


def residual_at(target_row: Tensor, proposal: Proposal, position: Tensor) -> Tensor:
    """(w - q_n)+ [B, V], unnormalised, for weights w `target_row` [B, V] and n `position` [B]; w where that is empty.

    Any row where the position is behind the proposal.
    """
    num_draft_tokens = proposal.tokens.shape[1]
    if num_draft_tokens == 0:
        return target_row
    position = position.clamp(max=num_draft_tokens - 1)
    match proposal.law:
        case PointMass():
            return point_mass_residual(target_row, take(proposal.tokens, position))
        case Dense(probs):
            return residual(target_row, take(probs, position))
        case TopM(ids, probs):
            row = sparse_row(take(ids, position), take(probs, position), target_row.shape[-1])
            return residual(target_row, row)
        case law:
            raise _unknown(law)


def rest_without_draft(target_row: Tensor, proposal: Proposal, position: Tensor) -> Tensor:
    """w without the drafted token [B, V], unnormalised, arguments as in `residual_at`, whatever the law says of q."""
    return residual_at(target_row, replace(proposal, law=PointMass()), position)


def residual_masses(target_probs: Tensor, proposal: Proposal, scale: Tensor) -> Tensor:
    """sum_x (s_i p_i(x) - q_i(x))+ [B, K] float64 for `target_probs` [B, K, V] and `scale` s [B, K]."""
    match proposal.law:
        case PointMass():
            certain = scale.new_ones(*scale.shape, 1)
            return sparse_residual_mass(target_probs, proposal.tokens[..., None], certain, scale)
        case Dense(probs):
            return residual_mass(target_probs, probs, scale)
        case TopM(ids, probs):
            return sparse_residual_mass(target_probs, ids, probs, scale)
        case law:
            raise _unknown(law)


def check_chains(proposal: Proposal) -> Chains:
    """The law of a proposal of chains.

    Raises:
        ContractError: another law; a drafted token that its row gives no probability, or a chain that ends early; or
            first tokens that are equal though they were drawn without replacement.
    """
    law = proposal.law
    if not isinstance(law, Chains):
        raise ContractError(f"proposal.law: expected Chains, got {type(law).__name__}")
    if proposal.tokens.device.type == "cpu" and foreign_in_chains(law, proposal).any():  # as in `_checked`
        raise foreign_token()
    return law


def foreign_in_chains(law: Chains, proposal: Proposal) -> Tensor:
    """[B, C, K] where `check_chains` finds a token that was not drawn from `law`."""
    tokens = proposal.tokens
    num_chains, num_draft_tokens = tokens.shape[1:]
    first = tokens[:, :, :1]
    exists = (first >= 0) | (torch.arange(num_chains, device=tokens.device) == 0)[:, None]
    is_drawn = exists & is_drafted(proposal.lengths, num_draft_tokens)[:, None]
    is_wrong = is_drawn > (probs_of(law.probs, tokens) > 0)
    if not law.with_replacement and num_draft_tokens > 0:
        is_repeated = (first == first.transpose(1, 2)).sum(-1, keepdim=True) > 1
        is_wrong[..., :1] |= is_repeated & (first >= 0)
    return is_wrong


def candidate_probs(law: Chains, tokens: Tensor, chain: int, position: int) -> Tensor:
    """The row [B, V] float64 that `tokens[:, chain, position]` was drawn from, given those of the chains before it."""
    row = law.probs[:, chain, position].to(torch.float64)
    if law.with_replacement or position > 0 or chain == 0:
        return row
    for earlier in range(chain):
        row = without(row, tokens[:, earlier, position])
    return row / row.sum(-1, keepdim=True)


def _unknown(law: object) -> ContractError:
    return ContractError(
        f"proposal.law: expected one of {[known.__name__ for known in KNOWN_LAWS]}, got {type(law).__name__}"
    )
