"""Drafting with the noise that the verifier will use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from spectoolkit.datatypes import DraftNoise, SampledLaw, SharedNoise
from spectoolkit.drafters.model import ModelDrafter
from spectoolkit.errors import ContractError
from spectoolkit.functional.draw import gumbel_max


@dataclass(frozen=True)
class CoupledDrafter(ModelDrafter):
    """x_i = argmax(log q_i + G_i), q_i as `ModelDrafter` has it, G_i the Gumbel noise of the position.

    x_i follows q_i, and it agrees often with a token that the target draws with the same noise (`verifiers.Coupled`).
    Nothing is kept, since the noise is a function of seed, request and position. A draft temperature of 0 is a point
    mass here too.

    Reference: Daliri et al., arXiv 2408.07978, "Coupling without communication and drafter-invariant speculative
    decoding".
    """

    sampled_law: ClassVar[type[SampledLaw]] = SharedNoise

    def sample(self, probs: Tensor, noise: DraftNoise, index: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        if noise.shared is None:
            raise ContractError("noise.shared: expected the keys of the shared noise, got None")
        return gumbel_max(probs, noise.shared[:, index]), ()
