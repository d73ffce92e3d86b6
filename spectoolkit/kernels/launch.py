"""How work is cut into programs: rules of the vocabulary's size alone, so that a row never depends on its batch."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

LARGEST_CHUNK = 4096
"""Tokens that one program reads: 16 numbers for each of 256 threads, which stay in registers; at V = 262,144 a row has
64 chunks, so that a few rows fill a device."""

SMALLEST_CHUNK = 16

TOKENS_PER_WARP = 512
"""16 numbers per thread."""


def chunk_size(vocab_size: int) -> int:
    """Tokens per chunk: the vocabulary rounded up to a power of two, but no more than `LARGEST_CHUNK`."""
    return min(LARGEST_CHUNK, max(SMALLEST_CHUNK, power_of_two(vocab_size)))


def num_warps(chunk: int) -> int:
    """Warps of a program that reads a chunk: one for every `TOKENS_PER_WARP`, from 1 to 8."""
    return max(1, min(8, chunk // TOKENS_PER_WARP))


def num_chunks(vocab_size: int, chunk: int) -> int:
    return -(-vocab_size // chunk)


def power_of_two(size: int) -> int:
    """The smallest power of two that is >= `size`."""
    return 1 << max(0, size - 1).bit_length()


def padded(count: int) -> int:
    """Length of a vector of `count` partial results inside a kernel."""
    return max(SMALLEST_CHUNK, power_of_two(count))


@dataclass(frozen=True, slots=True)
class Cut:
    """How rows are cut: tokens per chunk, chunks, the length of a vector of all chunks, warps per chunk."""

    chunk: int
    num_chunks: int
    padded: int
    num_warps: int

    @staticmethod
    def of(vocab_size: int, chunk: int | None) -> Cut:
        chunk = chunk or chunk_size(vocab_size)
        num = num_chunks(vocab_size, chunk)
        return Cut(chunk, num, padded(num), num_warps(chunk))


def on_device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Launches inside go to the tensor's device, which need not be the current one."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def with_dense_rows(logits: Tensor) -> Tensor:
    """The same numbers with neighbouring tokens next to each other in memory; the other strides may be any."""
    return logits if logits.stride(-1) == 1 or logits.shape[-1] == 1 else logits.contiguous()
