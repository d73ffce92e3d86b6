"""Noise of many steps made at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from spectoolkit.functional.acceptance import take
from spectoolkit.functional.noise import Role, step_noise
from spectoolkit.functional.ragged import ints, places

_NUM_STARTS = 64
"""Starts made at once: some dozens of steps do without, and it is little to keep. On a GPU launches count and not the
numbers made, so every request has that many; on a CPU the work grows with the numbers, so requests share them, and a
large batch makes fewer ahead.
"""


class StepNoise(NamedTuple):
    """The noise of a step of K draft tokens.

    Attributes:
        draft, accept: [B, K] uniforms, one per draft token.
        emit: [B, K+1] uniforms, one per position at which a target token may be drawn.
        keys: [B, K+1] of shared noise.
    """

    draft: Tensor
    accept: Tensor
    emit: Tensor
    keys: Tensor


@dataclass(frozen=True)
class NoiseAhead:
    """Noise of all steps that may begin at the S positions from `first` on, of B requests.

    One number costs as many operations as all of these, and a step advances by a few positions.

    Attributes:
        first: B positions.
        noise: that of each of the starts, [B, S, K] and [B, S, K+1].
    """

    first: tuple[int, ...]
    noise: StepNoise

    @staticmethod
    def of(states: Tensor, first: tuple[int, ...], num_draft_tokens: int) -> NoiseAhead:
        """For requests of these `functional.noise.request_states` [B]."""
        num_starts = _NUM_STARTS if states.device.type != "cpu" else max(1, _NUM_STARTS // len(first))
        starts = ints(first, states.device)[:, None] + places(num_starts, states.device)
        numbers, keys = step_noise(states.repeat_interleave(num_starts), starts.flatten(), num_draft_tokens + 1)
        by_role = numbers.unflatten(0, starts.shape).unbind(2)
        noise = StepNoise(
            draft=by_role[Role.DRAFT][..., :num_draft_tokens],
            accept=by_role[Role.ACCEPT][..., :num_draft_tokens],
            emit=by_role[Role.EMIT],
            keys=keys.unflatten(0, starts.shape),
        )
        return NoiseAhead(first, noise)

    def at(self, starts: tuple[int, ...]) -> StepNoise | None:
        """That of the steps that begin at `starts`, B positions; None where one is not there."""
        offsets = [start - first for start, first in zip(starts, self.first, strict=True)]
        if max(offsets) >= self.noise.keys.shape[1]:
            return None
        if min(offsets) == max(offsets):
            return StepNoise._make(part.select(1, offsets[0]) for part in self.noise)
        index = ints(offsets, self.noise.keys.device)
        return StepNoise._make(take(part, index) for part in self.noise)
