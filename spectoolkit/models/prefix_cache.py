"""Prompts that a study decodes again and again are prefilled once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from spectoolkit.interfaces import LanguageModel, Part


class PrefixCache:
    """A language model that keeps the states of the prefixes it has prefilled, and copies them when they come again.

    The cells of a study decode the same prompts, and prefilling them can cost as much as a short output. Kept states
    are never handed out, only copied from.

    Attributes:
        model: the model itself.

    Args:
        max_tokens: how many tokens of prefixes are kept; further ones are prefilled every time.
    """

    def __init__(self, model: LanguageModel, max_tokens: int) -> None:
        self.model = model
        self._max_tokens = max_tokens
        self._states: dict[tuple[int, ...], Any] = {}
        self._num_tokens = 0
        self.name, self.vocab_size, self.context_length = model.name, model.vocab_size, model.context_length
        self.device, self.tokenizer = model.device, model.tokenizer
        self.feature_layers = getattr(model, "feature_layers", ())

    def prefill(self, prefixes: Sequence[Sequence[int]]) -> Any:
        keys = [tuple(prefix) for prefix in prefixes]
        new = list(dict.fromkeys(key for key in keys if key not in self._states))
        fresh = self.model.prefill(new) if new else None
        place = {key: row for row, key in enumerate(new)}
        if new == keys:
            self._keep(new, fresh)
            return fresh
        state = self.model.prefill([()] * len(keys))
        if fresh is not None:
            rows = [row for row, key in enumerate(keys) if key in place]
            state = self.model.insert(state, rows, self.model.select(fresh, [place[keys[row]] for row in rows]))
            self._keep(new, fresh)
        for row, key in enumerate(keys):
            if key not in place:
                state = self.model.insert(state, [row], self._states[key])
        return state

    def with_features(self, layers: Sequence[int]) -> PrefixCache:
        """The same model with features in its states, and a cache of its own."""
        return PrefixCache(self.model.with_features(layers), self._max_tokens)  # type: ignore[attr-defined]

    def features(self, state: Any, num_tokens: Sequence[int]) -> Tensor:
        return self.model.features(state, num_tokens)  # type: ignore[attr-defined]

    def score(self, state: Any, tokens: Tensor) -> tuple[Tensor, Any]:
        return self.model.score(state, tokens)

    def score_parts(self, state: Any, parts: Sequence[Part], num_tokens: int) -> tuple[list[Tensor], Any]:
        return self.model.score_parts(state, parts, num_tokens)  # type: ignore[attr-defined]

    def rollback(self, state: Any, lengths: Sequence[int]) -> Any:
        return self.model.rollback(state, lengths)

    def select(self, state: Any, rows: Sequence[int]) -> Any:
        return self.model.select(state, rows)

    def insert(self, state: Any, rows: Sequence[int], other: Any) -> Any:
        return self.model.insert(state, rows, other)

    def _keep(self, prefixes: Sequence[tuple[int, ...]], state: Any) -> None:
        for row, prefix in enumerate(prefixes):
            if self._num_tokens + len(prefix) <= self._max_tokens:
                self._num_tokens += len(prefix)
                # Inserted into an empty state, because a selection of all rows may be the state itself.
                empty = self.model.prefill([()])
                self._states[prefix] = self.model.insert(empty, [0], self.model.select(state, [row]))
