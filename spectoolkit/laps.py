"""Times of the parts of a step."""

from __future__ import annotations

import itertools
import time
from functools import cached_property
from typing import Any

import torch


class Laps:
    """Times at the beginning of a step, behind drafting, behind the target's forward and at the end.

    On a GPU they are events in its queue, so that nobody waits for it; they are read when a completion asks for them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._marks: list[Any] = []

    def mark(self) -> None:
        """Note the present moment."""
        if self._is_cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    @cached_property
    def seconds(self) -> tuple[float, ...]:
        """Between one mark and the next: drafting, the target's forward, and verification with all else."""
        pairs = list(itertools.pairwise(self._marks))
        if not self._is_cuda:
            return tuple(end - begin for begin, end in pairs)
        self._marks[-1].synchronize()
        return tuple(begin.elapsed_time(end) / 1000 for begin, end in pairs)
