"""Suffix decoding: what most often followed the longest repeated suffix of the sequence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from spectoolkit.datatypes import DraftLaw, DraftNoise, PointMass, Proposal
from spectoolkit.drafters.suffix_automaton import SuffixAutomaton
from spectoolkit.errors import UsageError
from spectoolkit.functional.ragged import ints, pad_rows
from spectoolkit.sampling import SamplingState

TOLERANCE = 1e-9


@dataclass(frozen=True)
class SuffixDrafter:
    """Proposes the most frequent continuation of the longest suffix of the sequence that occurred before.

    Let s be the longest suffix of prompt and output, of m <= `max_match` tokens, that occurred earlier (occurrences may
    overlap). Draft i + 1 is the token that followed s d_1 .. d_i most often, of equally frequent ones the one seen
    last, with the estimated probability

        P_{i+1} = P_i * (times it followed s d_1 .. d_i) / (times anything did),    P_0 = 1.

    The proposal ends before a token with P_i < `min_probability` (within 1e-9), after `max_spec_factor` * m tokens,
    at the budget, or where nothing ever followed. No occurrence: no proposal. Deterministic, so its law is a point
    mass; a smaller budget only cuts the proposal.

    (Oliaro et al., "SuffixDecoding", 2024, arXiv 2411.04975, with the request's own tree alone. The published
    implementation tries every length of suffix and keeps the draft with the best score; here the longest decides. It
    also counts the end of the sequence as an occurrence that nothing followed; here it is none.)

    Attributes:
        max_match: the longest suffix that is looked up, >= 1.
        max_spec_factor: most draft tokens per matched token, > 0; their number is rounded down.
        min_probability: in [0, 1]; 1 drafts only what nothing else has ever stood in the place of.

    Raises:
        UsageError: parameters outside these ranges.
    """

    max_match: int = 24
    max_spec_factor: float = 1.0
    min_probability: float = 0.1
    laws: tuple[type[DraftLaw], ...] = field(default=(PointMass,), init=False)
    feature_layers: tuple[int, ...] = field(default=(), init=False)

    def __post_init__(self) -> None:
        if self.max_match < 1:
            raise UsageError(f"drafter.max_match: expected an integer >= 1, got {self.max_match!r}")
        if not 0 < self.max_spec_factor < math.inf:
            raise UsageError(f"drafter.max_spec_factor: expected a finite number > 0, got {self.max_spec_factor!r}")
        if not 0 <= self.min_probability <= 1:
            raise UsageError(f"drafter.min_probability: expected a number in [0, 1], got {self.min_probability!r}")

    def start(self, prompts: Sequence[Sequence[int]], features: Tensor | None = None) -> list[SuffixAutomaton]:
        max_context = self.max_match + self._most_drafts(self.max_match)
        state = [SuffixAutomaton(max_context) for _ in prompts]
        for sequence, prompt in zip(state, prompts, strict=True):
            for token in prompt:
                sequence.append(token)
        return state

    def propose(
        self, state: list[SuffixAutomaton], sampling: SamplingState, max_tokens: Sequence[int], noise: DraftNoise
    ) -> tuple[Proposal, list[SuffixAutomaton]]:
        drafts = [self._continue(sequence, budget) for sequence, budget in zip(state, max_tokens, strict=True)]
        return Proposal(pad_rows(drafts), ints(list(map(len, drafts))), PointMass()), state

    def commit(
        self, state: list[SuffixAutomaton], emitted: Sequence[Sequence[int]], features: Tensor | None = None
    ) -> list[SuffixAutomaton]:
        for sequence, block in zip(state, emitted, strict=True):
            for token in block:
                sequence.append(token)
        return state

    def select(self, state: list[SuffixAutomaton], rows: Sequence[int]) -> list[SuffixAutomaton]:
        return [state[row] for row in rows]

    def insert(
        self, state: list[SuffixAutomaton], rows: Sequence[int], other: list[SuffixAutomaton]
    ) -> list[SuffixAutomaton]:
        state = list(state)
        for row, sequence in zip(rows, other, strict=True):
            state[row] = sequence
        return state

    def _most_drafts(self, match: int) -> int:
        return int(match * self.max_spec_factor + TOLERANCE)

    def _continue(self, sequence: SuffixAutomaton, budget: int) -> list[int]:
        match, node = sequence.repeated_suffix(self.max_match)
        most = min(budget, self._most_drafts(match))
        drafts: list[int] = []
        probability = 1.0
        while len(drafts) < most and node.followed > 0:
            probability *= node.times[node.likeliest] / node.followed
            if probability < self.min_probability - TOLERANCE:
                break
            drafts.append(node.likeliest)
            node = sequence.nodes[node.next[node.likeliest]]
        return drafts
