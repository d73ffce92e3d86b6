"""Noise of many steps made at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spectoolkit.functional.acceptance import take
from spectoolkit.functional.noise import step_noise
from spectoolkit.functional.ragged import places, to_device

_NUM_STARTS = 64
"""Starts made at once: some dozens of steps do without, and it is little to keep. On a GPU launches count and not the
numbers made, so every request has that many; on a CPU the work grows with the numbers, so requests share them, and a
large batch makes fewer ahead.
"""


@dataclass(frozen=True)
class NoiseAhead:
    """Noise of all steps that may begin at the S positions from `first` on, of B requests.

    One number costs as many operations as all of these, and a step advances by a few positions.

    Attributes:
        first: B positions.
        numbers: [B, S, 3, N], as `functional.noise.step_noise` gives it for each of the starts.
        keys: [B, S, N].
    """

    first: tuple[int, ...]
    numbers: Tensor
    keys: Tensor

    @staticmethod
    def of(states: Tensor, first: tuple[int, ...], num_positions: int) -> NoiseAhead:
        """For requests of these `functional.noise.request_states` [B]."""
        num_starts = _NUM_STARTS if states.device.type != "cpu" else max(1, _NUM_STARTS // len(first))
        starts = to_device(torch.tensor(first), states.device)[:, None] + places(num_starts, states.device)
        numbers, keys = step_noise(states.repeat_interleave(num_starts), starts.flatten(), num_positions)
        return NoiseAhead(first, numbers.unflatten(0, starts.shape), keys.unflatten(0, starts.shape))

    def at(self, starts: tuple[int, ...]) -> tuple[Tensor, Tensor] | None:
        """[B, 3, N] and [B, N] of the steps that begin at `starts`, B positions; None where one is not there."""
        offsets = [start - first for start, first in zip(starts, self.first, strict=True)]
        if max(offsets) >= self.keys.shape[1]:
            return None
        if min(offsets) == max(offsets):
            return self.numbers[:, offsets[0]], self.keys[:, offsets[0]]
        index = to_device(torch.tensor(offsets), self.keys.device)
        return take(self.numbers, index), take(self.keys, index)
