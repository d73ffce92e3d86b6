"""Scoring proposals of one or several chains: while chains are judged, the target's state has a row for each of them.

This costs the target C times the rows of an ordinary step, and a copy of its cache per chain.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spectoolkit.datatypes import Proposal, Verdict
from spectoolkit.errors import ContractError
from spectoolkit.functional.ragged import repeated
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
    drafts = proposal.tokens.flatten(0, -2).clamp(min=0)
    return target.score(state, torch.cat([last_tokens, drafts], dim=1))


def proposal_probs(sampling: SamplingState, logits: Tensor, proposal: Proposal) -> Tensor:
    """Target rows [B, K+1, V], or [B, C, K+1, V] of chains, of the logits of `score_proposal`.

    Raises:
        InvalidLogitsError: as `SamplingState.probs`.
    """
    probs = sampling.repeat(proposal.num_chains or 1).probs(logits, proposal.tokens.flatten(0, -2), "target")
    return probs if proposal.num_chains is None else probs.unflatten(0, (-1, proposal.num_chains))


def keep_chain(target: LanguageModel, state: Any, proposal: Proposal, verdict: Verdict) -> Any:
    """The state of B rows again: of each sequence the chain that the verdict names.

    Raises:
        ContractError: the verdict on several chains names none.
    """
    num_chains = proposal.num_chains or 1
    if num_chains == 1:
        return state
    if verdict.chain is None:
        raise ContractError(f"verdict.chain: expected one of {num_chains} chains for each sequence, got None")
    first = torch.arange(len(verdict.chain), device=verdict.chain.device) * num_chains
    return target.select(state, (first + verdict.chain).tolist())
