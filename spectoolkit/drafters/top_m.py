"""Drafting from the draft model's m most probable tokens, so that little has to be kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from spectoolkit.datatypes import DraftNoise, SampledLaw, TopM
from spectoolkit.drafters.model import ModelDrafter
from spectoolkit.errors import UsageError
from spectoolkit.functional.draw import draw


@dataclass(frozen=True)
class TopMDrafter(ModelDrafter):
    """x_i ~ q_i cut to its m most probable tokens and renormalised, q_i as `ModelDrafter` has it.

    The cut is made before the token is drawn and behind the request's own filters, so the m ids and probabilities are
    the whole law of the draft, and verification stays exact. A draft temperature of 0 is a point mass here too.

    Attributes:
        keep: m.

    Raises:
        UsageError: `keep` < 1, or what `ModelDrafter` refuses.
    """

    keep: int = 16

    sampled_law: ClassVar[type[SampledLaw]] = TopM

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keep < 1:
            raise UsageError(f"drafter.keep: expected an integer >= 1, got {self.keep!r}")

    def sample(self, probs: Tensor, noise: DraftNoise, index: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        ids, kept = self._most_probable(probs)
        drawn = draw(kept, noise.uniforms[:, index])
        return ids.gather(-1, drawn[:, None]).squeeze(-1), (ids, kept)

    def law_probs(self, probs: Tensor) -> Tensor:
        ids, kept = self._most_probable(probs)
        return torch.zeros_like(probs).scatter_(-1, ids, kept)

    def _most_probable(self, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Ids and renormalised probabilities [..., m]."""
        # In the order of the ids, so that a uniform gives much the same token as it would with the whole row.
        ids = probs.topk(min(self.keep, probs.shape[-1]), dim=-1).indices.sort(dim=-1).values
        kept = probs.gather(-1, ids)
        return ids, kept / kept.sum(-1, keepdim=True)
