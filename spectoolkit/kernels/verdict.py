"""What the kernels of every rule write: a verdict, and the status of each sequence that says whether it holds."""

from __future__ import annotations

import torch
from torch import Tensor

INVALID_TARGET, NOT_DRAWN, INVALID_DRAFT = 1, 2, 4
"""Bits of a sequence's status: a target row without a distribution, a drafted token of probability 0 under its law, a
row of draft logits without a distribution. 0 is a verdict to be used; the reference reports the others."""


def verdict_buffers(logits: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Emitted [B, K+1], judged alone [B, K] (int8), accepted [B], status [B]."""
    size, num_rows, _ = logits.shape
    emitted = torch.empty((size, num_rows), dtype=torch.int64, device=logits.device)
    judged = torch.zeros((size, num_rows - 1), dtype=torch.int8, device=logits.device)
    accepted = torch.empty(size, dtype=torch.int64, device=logits.device)
    return emitted, judged, accepted, int32(logits, size)


def int32(like: Tensor, *shape: int) -> Tensor:
    return like.new_empty(shape, dtype=torch.int32)
