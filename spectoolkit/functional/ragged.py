"""Rows of different lengths in one tensor: [B, N] ids, left-aligned, -1 behind the end of each row.

And rows of different vocabularies; numbers of the host on a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache

import torch
from torch import Tensor

PAD = -1

_HOST = torch.device("cpu")


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """`values`, of the host, on `device`, without waiting for what runs there."""
    if values.device == device:
        return values
    if device.type != "cuda" or values.device.type != "cpu":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


@cache
def places(count: int, device: torch.device) -> Tensor:
    """0 .. count - 1 on `device`: one tensor for all who ask, not to be written to."""
    with torch.inference_mode(False):
        return torch.arange(count, device=device)


@lru_cache(1024)
def filled(count: int, value: int, device: torch.device) -> Tensor:
    """[count] times `value` on `device`: one tensor for all who ask, not to be written to."""
    with torch.inference_mode(False):
        return torch.full((count,), value, device=device)


def ints(values: Sequence[int] | Sequence[Sequence[int]], device: torch.device = _HOST) -> Tensor:
    """Numbers of the host [B] or [B, N], int64, on `device`, without waiting for what runs there."""
    return to_device(torch.tensor(values, dtype=torch.int64), device)


def few_ints(values: Sequence[int], device: torch.device) -> Tensor:
    """As `ints`, for numbers [B] that are small and often all the same; not to be written to."""
    return filled(len(values), values[0], device) if len(set(values)) == 1 else ints(values, device)


def pad_rows(rows: Sequence[Sequence[int]], device: torch.device = _HOST) -> Tensor:
    """Stack B lists of ids as [B, N], N the longest length."""
    width = max((len(row) for row in rows), default=0)
    return ints([[*row, *[PAD] * (width - len(row))] for row in rows], device).reshape(len(rows), width)


def unpad_rows(rows: Tensor) -> list[list[int]]:
    """The ids of each row of [B, N] without padding; this waits for a device."""
    return [[token for token in row if token != PAD] for row in rows.tolist()]


def row_lengths(rows: Tensor) -> Tensor:
    """[B] number of ids in each row of [B, N]."""
    return (rows != PAD).sum(-1)


def fit_vocabulary(rows: Tensor, vocab_size: int, missing: float) -> Tensor:
    """Rows [..., V'] as [..., V]: ids that they lack get the number `missing`, ids behind V are cut off."""
    num_missing = vocab_size - rows.shape[-1]
    if num_missing > 0:
        return torch.nn.functional.pad(rows, (0, num_missing), value=missing)
    return rows if num_missing == 0 else rows[..., :vocab_size]


def repeated(num_rows: int, times: int) -> list[int]:
    """Each of B rows C = `times` times, one behind the other: what to select for a state of [B * C] rows."""
    return [row for row in range(num_rows) for _ in range(times)]


def put_rows(into: Tensor, at: Sequence[int], rows: Tensor) -> Tensor:
    """A copy of [B, ...] whose rows `at` are `rows`."""
    return into.index_copy(0, ints(at, into.device), rows)
