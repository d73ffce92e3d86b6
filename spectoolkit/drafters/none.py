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
        self, state: Any, sampling: SamplingState, max_tokens: Tensor, noise: DraftNoise
    ) -> tuple[Proposal, None]:
        nothing = torch.empty((len(max_tokens), 0), dtype=torch.int64, device=max_tokens.device)
        return Proposal(nothing, torch.zeros_like(max_tokens), PointMass()), None

    def commit(self, state: Any, emitted: Tensor, features: Tensor | None = None) -> None:
        return None

    def select(self, state: Any, rows: Sequence[int]) -> None:
        return None

    def insert(self, state: Any, rows: Sequence[int], other: Any) -> None:
        return None
