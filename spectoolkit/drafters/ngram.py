"""Prompt lookup: what followed the same n-gram earlier in the sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from spectoolkit.datatypes import DraftLaw, DraftNoise, PointMass, Proposal
from spectoolkit.errors import UsageError
from spectoolkit.functional.ragged import ints, pad_rows
from spectoolkit.sampling import SamplingState


@dataclass
class History:
    """The committed tokens of one sequence, and where the continuation of each of its n-grams begins."""

    tokens: list[int] = field(default_factory=list)
    continuation: dict[tuple[int, ...], int] = field(default_factory=dict)


@dataclass(frozen=True)
class NGramDrafter:
    """Proposes the continuation of an earlier occurrence of the sequence's last n tokens (prompt and output).

    The longest n in max_ngram .. min_ngram that occurred before decides; of several occurrences the `match` one
    ("latest" or "earliest") is taken, and the proposal ends where the sequence ends. No occurrence: no proposal.
    Deterministic, so its law is a point mass. (Saxena, "Prompt Lookup Decoding", 2023; the earliest-match policy and
    n from large to small are those of the widely used implementations.)

    Attributes:
        max_ngram, min_ngram: 1 <= min_ngram <= max_ngram.
        match: which of several occurrences counts.

    Raises:
        UsageError: parameters outside these ranges.
    """

    max_ngram: int = 3
    min_ngram: int = 1
    match: str = "latest"
    laws: tuple[type[DraftLaw], ...] = field(default=(PointMass,), init=False)
    feature_layers: tuple[int, ...] = field(default=(), init=False)

    def __post_init__(self) -> None:
        if not 1 <= self.min_ngram <= self.max_ngram:
            raise UsageError(
                "drafter: expected 1 <= min_ngram <= max_ngram, "
                f"got min_ngram={self.min_ngram!r}, max_ngram={self.max_ngram!r}"
            )
        if self.match not in ("latest", "earliest"):
            raise UsageError(f"drafter.match: expected 'latest' or 'earliest', got {self.match!r}")

    def start(self, prompts: Sequence[Sequence[int]], features: Tensor | None = None) -> list[History]:
        histories = [History() for _ in prompts]
        for history, prompt in zip(histories, prompts, strict=True):
            self._extend(history, prompt)
        return histories

    def propose(
        self, state: list[History], sampling: SamplingState, max_tokens: Sequence[int], noise: DraftNoise
    ) -> tuple[Proposal, list[History]]:
        found = [self._lookup(history, limit) for history, limit in zip(state, max_tokens, strict=True)]
        return Proposal(pad_rows(found), ints(list(map(len, found))), PointMass()), state

    def commit(
        self, state: list[History], emitted: Sequence[Sequence[int]], features: Tensor | None = None
    ) -> list[History]:
        for history, block in zip(state, emitted, strict=True):
            self._extend(history, block)
        return state

    def select(self, state: list[History], rows: Sequence[int]) -> list[History]:
        return [state[row] for row in rows]

    def insert(self, state: list[History], rows: Sequence[int], other: list[History]) -> list[History]:
        state = list(state)
        for row, history in zip(rows, other, strict=True):
            state[row] = history
        return state

    def _extend(self, history: History, tokens: Sequence[int]) -> None:
        for token in tokens:
            # Only now do n-grams that end at the previous token have a continuation: a suffix never finds itself.
            end = len(history.tokens)
            for n in range(self.min_ngram, min(self.max_ngram, end) + 1):
                ngram = tuple(history.tokens[end - n :])
                if self.match == "latest":
                    history.continuation[ngram] = end
                else:
                    history.continuation.setdefault(ngram, end)
            history.tokens.append(token)

    def _lookup(self, history: History, limit: int) -> list[int]:
        for n in range(min(self.max_ngram, len(history.tokens)), self.min_ngram - 1, -1):
            begin = history.continuation.get(tuple(history.tokens[-n:]))
            if begin is not None:
                return history.tokens[begin : begin + limit]
        return []
