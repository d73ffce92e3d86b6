"""Scoring proposals of one or several chains: while chains are judged, the target's state has a row for each of them.

This costs the target C times the rows of an ordinary step, and a copy of its cache per chain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from spectoolkit.datatypes import Proposal
from spectoolkit.errors import ContractError
from spectoolkit.functional.ragged import repeated, to_device
from spectoolkit.interfaces import LanguageModel
from spectoolkit.sampling import SamplingState


def score_proposal(target: LanguageModel, state: Any, last_tokens: Tensor, proposal: Proposal) -> tuple[Tensor, Any]:
    """Logits [B * C, K+1, V] behind the last tokens [B, 1] and behind each draft, and the state of these B * C rows.

    C is 1 where the proposal has no chains.
    """
    num_chains = proposal.num_chains or 1
    if num_chains > 1:
        state = target.select(state, repeated(len(last_tokens), num_chains))
        last_tokens = last_tokens.repeat_interleave(num_chains, 0)
    drafts = proposal.tokens.flatten(0, -2)
    return target.score(state, torch.cat([last_tokens, drafts], dim=1).clamp_(min=0))


def on_device(proposal: Proposal, device: torch.device) -> Proposal:
    """The proposal with tokens and lengths on the target's device; drafters that look up text make them on the host."""
    if proposal.tokens.device == device == proposal.lengths.device:
        return proposal
    faults = None if proposal.faults is None else to_device(proposal.faults, device)
    tokens, lengths = to_device(proposal.tokens, device), to_device(proposal.lengths, device)
    return replace(proposal, tokens=tokens, lengths=lengths, faults=faults)


def proposal_rows(sampling: SamplingState, logits: Tensor, proposal: Proposal) -> tuple[Tensor, Tensor]:
    """Target rows [B, K+1, V], or [B, C, K+1, V] of chains, of the logits of `score_proposal`.

    And marks [B * C, K+1] as in `SamplingState.rows`.
    """
    num_chains = proposal.num_chains
    probs, marks = sampling.repeat(num_chains or 1).rows(logits, proposal.tokens.flatten(0, -2))
    return probs if num_chains is None else probs.unflatten(0, (-1, num_chains)), marks


def proposal_probs(sampling: SamplingState, logits: Tensor, proposal: Proposal) -> Tensor:
    """The rows of `proposal_rows`.

    Raises:
        InvalidLogitsError: as `SamplingState.probs`.
    """
    probs, marks = proposal_rows(sampling, logits, proposal)
    sampling.repeat(proposal.num_chains or 1).check(marks, proposal.tokens.flatten(0, -2), "target")
    return probs


def keep_chain(target: LanguageModel, state: Any, proposal: Proposal, chains: Sequence[int] | None) -> Any:
    """The state of B rows again: of each sequence the chain that the verdict names.

    Raises:
        ContractError: the verdict on several chains names none.
    """
    num_chains = proposal.num_chains or 1
    if num_chains == 1:
        return state
    if chains is None:
        raise ContractError(f"verdict.chain: expected one of {num_chains} chains for each sequence, got None")
    return target.select(state, [row * num_chains + chain for row, chain in enumerate(chains)])
