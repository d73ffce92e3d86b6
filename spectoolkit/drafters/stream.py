"""Draft logits from a language model with a cache of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spectoolkit.errors import UsageError
from spectoolkit.functional.acceptance import take
from spectoolkit.functional.ragged import few_ints, ints
from spectoolkit.interfaces import Drafter, DraftStream, LanguageModel

Row = tuple[int, ...]


class ModelDraftState(NamedTuple):
    """Where the draft model stands in B sequences; the numbers are the host's.

    Attributes:
        cache: the draft model's own state.
        num_cached: B numbers of committed tokens that it holds; the `num_fed` drafts behind them are not counted.
        num_committed: B.
        pending: B rows of committed tokens that are not cached yet: one, or two after full acceptance; none between
            `first` and `commit`.
        num_fed: drafts of each row fed back since the last commit, in one forward each.
    """

    cache: Any
    num_cached: Row
    num_committed: Row
    pending: tuple[Row, ...]
    num_fed: int = 0


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
        lengths = tuple(len(prompt) for prompt in prompts)
        pending = tuple(tuple(prompt[-1:]) for prompt in prompts)
        return ModelDraftState(cache, tuple(length - 1 for length in lengths), lengths, pending)

    def first(self, state: ModelDraftState) -> tuple[Tensor, ModelDraftState]:
        """Feed the pending tokens; the logits behind the last of them."""
        last_id = self.model.vocab_size - 1
        rows = [[min(token, last_id) for token in row] for row in state.pending]
        counts = [len(row) for row in rows]
        width = max(counts)
        tokens = ints([row + [0] * (width - len(row)) for row in rows], self.device)
        logits, cache = self.model.score(state.cache, tokens)
        if min(counts) < width:
            cache = self.model.rollback(cache, state.num_committed)  # drops what was fed as filling
            logits = take(logits, few_ints([count - 1 for count in counts], self.device))[:, None]
        elif width > 1:
            logits = logits[:, -1:]
        return logits, ModelDraftState(cache, state.num_committed, state.num_committed, ((),) * len(rows))

    def next(self, state: ModelDraftState, tokens: Tensor) -> tuple[Tensor, ModelDraftState]:
        logits, cache = self.model.score(state.cache, tokens)
        num_fed = state.num_fed + 1
        return logits, ModelDraftState(cache, state.num_cached, state.num_committed, state.pending, num_fed)

    def commit(
        self, state: ModelDraftState, emitted: Sequence[Sequence[int]], features: Tensor | None = None
    ) -> ModelDraftState:
        num_cached, num_committed, pending = [], [], []
        rows = zip(state.num_cached, state.num_committed, state.pending, emitted, strict=True)
        for cached, committed, waiting, block in rows:
            num_committed.append(committed + len(block))
            # Emitted tokens begin with the accepted drafts, so what was fed of them stays; the last is always fed.
            num_cached.append(min(cached + state.num_fed, num_committed[-1] - 1))
            pending.append((*waiting, *block)[num_cached[-1] - num_committed[-1] :])
        cache = self.model.rollback(state.cache, num_cached)
        return ModelDraftState(cache, tuple(num_cached), tuple(num_committed), tuple(pending))

    def select(self, state: ModelDraftState, rows: Sequence[int]) -> ModelDraftState:
        kept = [tuple(part[row] for row in rows) for part in (state.num_cached, state.num_committed, state.pending)]
        return ModelDraftState(self.model.select(state.cache, rows), *kept, state.num_fed)  # type: ignore[arg-type]

    def insert(self, state: ModelDraftState, rows: Sequence[int], other: ModelDraftState) -> ModelDraftState:
        """Between steps, when nothing is fed back."""
        return ModelDraftState(
            self.model.insert(state.cache, rows, other.cache),
            _put(state.num_cached, rows, other.num_cached),
            _put(state.num_committed, rows, other.num_committed),
            _put(state.pending, rows, other.pending),
        )


def _put(into: tuple[Any, ...], rows: Sequence[int], new: tuple[Any, ...]) -> tuple[Any, ...]:
    placed = dict(zip(rows, new, strict=True))
    return tuple(placed.get(i, value) for i, value in enumerate(into))


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
