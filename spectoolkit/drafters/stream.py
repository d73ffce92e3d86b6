"""Draft logits from a language model with a cache of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from spectoolkit.errors import UsageError
from spectoolkit.functional.ragged import append_rows, keep_last, pad_rows, put_rows, row_lengths, widen
from spectoolkit.interfaces import Drafter, DraftStream, LanguageModel


@dataclass(frozen=True)
class ModelDraftState:
    """Where the draft model stands in B sequences.

    Attributes:
        cache: the draft model's own state.
        num_cached: [B] tokens it holds: committed ones, and the drafts that were fed back.
        num_committed: [B].
        pending: [B, P] committed tokens that are not cached yet, padded; one, or two after full acceptance.
    """

    cache: Any
    num_cached: Tensor
    num_committed: Tensor
    pending: Tensor


@dataclass(frozen=True)
class ModelStream:
    """A `DraftStream` of a language model, which reads nothing of the target but its tokens.

    The cache follows the committed tokens: what was fed of accepted drafts stays. After full acceptance the last draft
    was never fed, so the next step feeds two tokens to such rows and one to the others. Ids that the model lacks are
    fed as its last id.
    """

    model: LanguageModel

    feature_layers = ()

    @property
    def vocab_size(self) -> int:
        return self.model.vocab_size

    @property
    def context_length(self) -> int:
        return self.model.context_length

    @property
    def device(self) -> torch.device:
        return self.model.device

    def start(self, prompts: Sequence[Sequence[int]], features: Tensor | None = None) -> ModelDraftState:
        last_id = self.model.vocab_size - 1
        cache = self.model.prefill([[min(token, last_id) for token in prompt[:-1]] for prompt in prompts])
        pending = pad_rows([prompt[-1:] for prompt in prompts], self.model.device)
        num_committed = torch.tensor([len(prompt) for prompt in prompts], device=pending.device)
        return ModelDraftState(cache, num_committed - 1, num_committed, pending)

    def first(self, state: ModelDraftState) -> tuple[Tensor, ModelDraftState]:
        """Feed the pending tokens; the logits behind the last of them."""
        logits, cache = self.model.score(state.cache, state.pending.clamp(0, self.model.vocab_size - 1))
        cache = self.model.rollback(cache, state.num_committed)  # drops what was fed as filling
        last = row_lengths(state.pending) - 1
        logits = logits[torch.arange(len(last), device=last.device), last][:, None]
        pending = state.pending[:, :0]
        return logits, replace(state, cache=cache, num_cached=state.num_committed, pending=pending)

    def next(self, state: ModelDraftState, tokens: Tensor) -> tuple[Tensor, ModelDraftState]:
        logits, cache = self.model.score(state.cache, tokens)
        return logits, replace(state, cache=cache, num_cached=state.num_cached + 1)

    def commit(self, state: ModelDraftState, emitted: Tensor, features: Tensor | None = None) -> ModelDraftState:
        num_committed = state.num_committed + row_lengths(emitted)
        # Emitted tokens begin with the accepted drafts, so what was fed of them stays; the last token is always fed.
        num_cached = torch.minimum(state.num_cached, num_committed - 1)
        num_pending = num_committed - num_cached
        pending = keep_last(append_rows(state.pending, emitted), num_pending, int(num_pending.max()))
        return ModelDraftState(self.model.rollback(state.cache, num_cached), num_cached, num_committed, pending)

    def select(self, state: ModelDraftState, rows: Sequence[int]) -> ModelDraftState:
        return ModelDraftState(
            self.model.select(state.cache, rows),
            *(t[list(rows)] for t in (state.num_cached, state.num_committed, state.pending)),
        )

    def insert(self, state: ModelDraftState, rows: Sequence[int], other: ModelDraftState) -> ModelDraftState:
        width = max(state.pending.shape[1], other.pending.shape[1])
        return ModelDraftState(
            self.model.insert(state.cache, rows, other.cache),
            put_rows(state.num_cached, rows, other.num_cached),
            put_rows(state.num_committed, rows, other.num_committed),
            put_rows(widen(state.pending, width), rows, widen(other.pending, width)),
        )


def as_stream(draft_model: LanguageModel | DraftStream) -> DraftStream:
    """A draft model of either kind as a stream."""
    return ModelStream(draft_model) if hasattr(draft_model, "score") else draft_model  # type: ignore[arg-type]


def check_features(target: LanguageModel, drafter: Drafter) -> None:
    """Refuse a target that does not keep what the drafter reads of it.

    Raises:
        UsageError: names the layers on both sides.
    """
    kept = tuple(getattr(target, "feature_layers", ()))
    if drafter.feature_layers and kept != drafter.feature_layers:
        raise UsageError(
            f"target: expected {target.name} with the features of its layers {list(drafter.feature_layers)}, which the "
            f"draft head reads (target.with_features({list(drafter.feature_layers)})), got layers {list(kept)}"
        )
