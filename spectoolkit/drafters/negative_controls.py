"""Drafters that are wrong on purpose, each with one fault that was shipped somewhere: what a test must catch.

Each is `ModelDrafter` or `TopMDrafter` but for one part, and breaks what a lossless verifier relies on. They are no
research options: nothing exports them, and only the names `drafter=wrong/...` lead to them. The faults of verification
are in `verifiers.negative_controls`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from spectoolkit.datatypes import Dense, DraftNoise, Proposal, SampledLaw
from spectoolkit.drafters.model import ModelDrafter
from spectoolkit.drafters.top_m import TopMDrafter
from spectoolkit.errors import ContractError, UsageError
from spectoolkit.functional.draw import draw
from spectoolkit.functional.noise import position_uniforms
from spectoolkit.sampling import SamplingState


@dataclass(frozen=True)
class ArgmaxAsSampled(ModelDrafter):
    """Drafts argmax q and reports q, as if it had been drawn from it. The law of an argmax is a point mass.

    Rejection then accepts with probability min(1, p(x) / q(x)) at x = argmax q, and emits x that often.
    """

    is_negative_control: ClassVar[bool] = True

    def sample(self, probs: Tensor, noise: DraftNoise, index: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        return probs.argmax(-1), (probs,)


@dataclass(frozen=True)
class TopMReportedRaw(TopMDrafter):
    """Draws from q cut to its m most probable tokens and reports q as it was before the cut."""

    is_negative_control: ClassVar[bool] = True
    sampled_law: ClassVar[type[SampledLaw]] = Dense

    def sample(self, probs: Tensor, noise: DraftNoise, index: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        drawn, _ = super().sample(probs, noise, index)
        return drawn, (probs,)


@dataclass(frozen=True)
class TopPOnDraftOnly(ModelDrafter):
    """The top-p that was asked for reaches the draft rows alone.

    What was asked for is `top_p` here, and it is kept from the request, so that the target's row does not have it. The
    fault lies on the target's side, which has no place for it but the request's own parameters. The output follows
    the target's unfiltered law, with tokens that top-p excludes: judge it by the law with `top_p`, which the audit of
    pairs does not do (`is_judged_by_another_law`).

    Raises:
        UsageError: no `top_p` below 1, or a request that has a top-p of its own.
    """

    is_negative_control: ClassVar[bool] = True
    is_judged_by_another_law: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.top_p is None or self.top_p == 1:
            raise UsageError(f"drafter.top_p: expected a number below 1, got {self.top_p!r}")

    def propose(
        self, state: Any, sampling: SamplingState, max_tokens: Sequence[int], noise: DraftNoise
    ) -> tuple[Proposal, Any]:
        if sampling.params.top_p is not None:
            raise UsageError("sampling.top_p: expected 1, as this drafter keeps top-p from the target")
        return super().propose(state, sampling, max_tokens, noise)


@dataclass(frozen=True)
class NoiseByPosition(ModelDrafter):
    """Draws with a number that belongs to the position alone, and comes back when the position is drafted again.

    Block verification looks at later drafts when it rejects an earlier one: what is drafted there again, with the same
    number, no longer follows q. Under rejection, which never looks behind the first rejected draft, it does no harm,
    unless the recovered token is drawn with the number too (`verifiers.negative_controls.RecoveredWithDraftNoise`).
    """

    is_negative_control: ClassVar[bool] = True

    def sample(self, probs: Tensor, noise: DraftNoise, index: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        if noise.shared is None:
            raise ContractError("noise.shared: expected the keys of the shared noise, got None")
        return draw(probs, position_uniforms(noise.shared[:, index])), (probs,)
