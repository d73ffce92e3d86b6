"""No drafting: the baseline of one token per target forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from spectoolkit.datatypes import DraftLaw, DraftNoise, PointMass, Proposal
from spectoolkit.sampling import SamplingState


@dataclass(frozen=True)
class NoDrafter:
    """Proposes nothing, so that every step emits one token drawn from the target's row: plain decoding."""

    laws: tuple[type[DraftLaw], ...] = field(default=(PointMass,), init=False)
    feature_layers: tuple[int, ...] = field(default=(), init=False)

    def start(self, prompts: Sequence[Sequence[int]], features: Tensor | None = None) -> None:
        return None

    def propose(
        self, state: Any, sampling: SamplingState, max_tokens: Sequence[int], noise: DraftNoise
    ) -> tuple[Proposal, None]:
        num_rows = len(max_tokens)
        nothing = torch.empty((num_rows, 0), dtype=torch.int64)
        return Proposal(nothing, torch.zeros(num_rows, dtype=torch.int64), PointMass()), None

    def commit(self, state: Any, emitted: Sequence[Sequence[int]], features: Tensor | None = None) -> None:
        return None

    def select(self, state: Any, rows: Sequence[int]) -> None:
        return None

    def insert(self, state: Any, rows: Sequence[int], other: Any) -> None:
        return None
