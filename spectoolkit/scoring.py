"""Ways to score a batch of drafts besides the usual one (`chains.score_proposal`: one forward over K+1 slots per row).

All give the same logits where there is a token, the last one or a draft. They differ in what they compute for rows with
fewer than K drafts, and in what they read:

* batch expansion: every token becomes a sequence of one token behind its prefix, as serving engines did that had
  attention for single queries only. No slot is computed for nothing, but each token reads its row's cache anew.
* one forward per length: rows with equally many drafts are scored together. No slot is computed for nothing, but the
  weights are read once per length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from spectoolkit.datatypes import Proposal
from spectoolkit.errors import ContractError
from spectoolkit.interfaces import LanguageModel, Part, PartsModel

Scorer = Callable[[LanguageModel, Any, Tensor, Proposal], tuple[Tensor, Any]]
"""(target, state, last tokens [B, 1], proposal) -> logits [B, K+1, V] and the state, longer by K+1 tokens per row."""


def score_expanded(target: LanguageModel, state: Any, last_tokens: Tensor, proposal: Proposal) -> tuple[Tensor, Any]:
    """Batch expansion; logits behind a row's last draft are 0.

    Raises:
        ContractError: a proposal of chains.
    """
    tokens = _tokens(last_tokens, proposal)
    rows, offsets = _is_token(proposal).nonzero(as_tuple=True)
    return _score(target, state, tokens, [Part(rows, offsets, tokens[rows, offsets][:, None])])


def score_by_length(target: LanguageModel, state: Any, last_tokens: Tensor, proposal: Proposal) -> tuple[Tensor, Any]:
    """One forward per number of drafts; logits behind a row's last draft are 0.

    Raises:
        ContractError: a proposal of chains.
    """
    tokens = _tokens(last_tokens, proposal)
    parts = []
    for length in proposal.lengths.unique().tolist():
        rows = (proposal.lengths == length).nonzero(as_tuple=True)[0]
        parts.append(Part(rows, torch.zeros_like(rows), tokens[rows, : length + 1]))
    return _score(target, state, tokens, parts)


def _tokens(last_tokens: Tensor, proposal: Proposal) -> Tensor:
    if proposal.num_chains is not None:
        raise ContractError(f"proposal: expected one chain of drafts, got {proposal.num_chains}")
    return torch.cat([last_tokens, proposal.tokens], dim=1)


def _is_token(proposal: Proposal) -> Tensor:
    """[B, K+1], whether a slot holds the last token or a draft."""
    slots = torch.arange(proposal.tokens.shape[-1] + 1, device=proposal.lengths.device)
    return slots <= proposal.lengths[:, None]


def _score(target: LanguageModel, state: Any, tokens: Tensor, parts: Sequence[Part]) -> tuple[Tensor, Any]:
    scored, state = cast(PartsModel, target).score_parts(state, parts, tokens.shape[1])
    logits = scored[0].new_zeros(*tokens.shape, target.vocab_size)
    for part, values in zip(parts, scored, strict=True):
        slots = part.offsets[:, None] + torch.arange(values.shape[1], device=values.device)
        logits[part.rows[:, None], slots] = values
    return logits, state
