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

    def cut(self, num_draft_tokens: int) -> StepNoise:
        """That of fewer draft tokens."""
        k = num_draft_tokens
        if k == self.draft.shape[1]:
            return self
        return StepNoise(self.draft[:, :k], self.accept[:, :k], self.emit[:, : k + 1], self.keys[:, : k + 1])


@dataclass(frozen=True)
class NoiseAhead:
    """Noise of all steps that may begin at the S positions from `first` on, of B requests.

    One number costs as many operations as all of these, and a step advances by a few positions.

    Attributes:
        first: B positions.
        numbers: [B, S, 3, K+1], as `functional.noise.step_noise` gives it for each of the starts.
        keys: [B, S, K+1].
        by_role: views of both.
    """

    first: tuple[int, ...]
    numbers: Tensor
    keys: Tensor
    by_role: StepNoise

    @staticmethod
    def of(states: Tensor, first: tuple[int, ...], num_draft_tokens: int) -> NoiseAhead:
        """For requests of these `functional.noise.request_states` [B]."""
        num_starts = _NUM_STARTS if states.device.type != "cpu" else max(1, _NUM_STARTS // len(first))
        starts = ints(first, states.device)[:, None] + places(num_starts, states.device)
        numbers, keys = step_noise(states.repeat_interleave(num_starts), starts.flatten(), num_draft_tokens + 1)
        numbers, keys = numbers.unflatten(0, starts.shape), keys.unflatten(0, starts.shape)
        return NoiseAhead(first, numbers, keys, _by_role(numbers, keys))

    def at(self, starts: tuple[int, ...]) -> StepNoise | None:
        """That of the steps that begin at `starts`, B positions; None where one is not there."""
        offsets = [start - first for start, first in zip(starts, self.first, strict=True)]
        if max(offsets) >= self.keys.shape[1]:
            return None
        if min(offsets) == max(offsets):
            return StepNoise._make(part.select(1, offsets[0]) for part in self.by_role)
        index = ints(offsets, self.keys.device)
        return _by_role(take(self.numbers, index), take(self.keys, index))


def _by_role(numbers: Tensor, keys: Tensor) -> StepNoise:
    """Of `numbers` [..., 3, K+1] and `keys` [..., K+1]."""
    by_role = numbers.unbind(-2)
    return StepNoise(by_role[Role.DRAFT][..., :-1], by_role[Role.ACCEPT][..., :-1], by_role[Role.EMIT], keys)
