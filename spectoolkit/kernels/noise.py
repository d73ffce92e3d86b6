"""The noise of `functional.noise` as kernels make it: the same integers to the last bit.

The hash is int64 arithmetic modulo 2^64, and `uniforms` are exact multiples of 2^-53: both are the reference's to the
last bit on every device. `exponentials` take a float64 logarithm of an exact number; libraries round its last bits
differently (numpy, torch and CUDA's libdevice each promise about 1 ulp), so E agrees to a relative 2^-51, not bit for
bit, as the reference itself does between a CPU and a GPU.
"""

# What a launch takes beside a kernel's parameters, and what a kernel's own types are, is not in triton's annotations.
# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from spectoolkit.functional import noise as reference
from spectoolkit.kernels.launch import num_chunks, num_warps, on_device_of

_CHUNK = 1024

GAMMA = tl.constexpr(reference._GAMMA)
FIRST_FACTOR = tl.constexpr(reference._FIRST_FACTOR)
SECOND_FACTOR = tl.constexpr(reference._SECOND_FACTOR)


@triton.jit
def shift_right(words, by: tl.constexpr):
    """Logical shift of int64 words."""
    return (words >> by) & ((1 << (64 - by)) - 1)


@triton.jit
def mix(words):
    words = (words ^ shift_right(words, 30)) * FIRST_FACTOR
    words = (words ^ shift_right(words, 27)) * SECOND_FACTOR
    return words ^ shift_right(words, 31)


@triton.jit
def absorb(state, word):
    return mix(state + (word + 1) * GAMMA)


@triton.jit
def uniform_of(state):
    """The uniform of a state behind its last word."""
    return shift_right(mix(state), 11).to(tl.float64) * 1.1102230246251565e-16  # 2^-53


@triton.jit
def exponential_of(key, tokens):
    """Standard exponentials of an int64 key for int64 token ids."""
    leading = shift_right(mix(absorb(key, tokens)), 12).to(tl.float64)
    return -tl.log((leading + 0.5) * 2.220446049250313e-16)  # 2^-52


@triton.jit
def _uniforms(seeds, request_keys, starts, out, num_positions, role, CHUNK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    seed, request_key, start = tl.load(seeds + row), tl.load(request_keys + row), tl.load(starts + row)
    state = absorb(absorb(absorb(seed * 0, seed), request_key), 4 * start + role)
    numbers = uniform_of(absorb(state, start + column))
    tl.store(out + row.to(tl.int64) * num_positions + column, numbers, mask=column < num_positions)


@triton.jit
def _exponentials(keys, out, vocab_size, CHUNK: tl.constexpr):
    row = tl.program_id(0)
    token = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    numbers = exponential_of(tl.load(keys + row), token.to(tl.int64))
    tl.store(out + row.to(tl.int64) * vocab_size + token, numbers, mask=token < vocab_size)


def uniforms(
    seeds: Tensor, request_keys: Tensor, starts: Tensor, num_positions: int, role: int, chunk: int = _CHUNK
) -> Tensor:
    """As `functional.noise.uniforms`, [B, N] float64, to the last bit."""
    out = torch.empty((len(seeds), num_positions), dtype=torch.float64, device=seeds.device)
    grid = (len(seeds), num_chunks(num_positions, chunk))
    keys = (seeds.contiguous(), request_keys.contiguous(), starts.contiguous())
    with on_device_of(out):
        _uniforms[grid](*keys, out, num_positions, int(role), CHUNK=chunk, num_warps=num_warps(chunk))
    return out


def exponentials(keys: Tensor, vocab_size: int, chunk: int = _CHUNK) -> Tensor:
    """As `functional.noise.exponentials`, [..., V] float64, up to the last bits of the logarithm."""
    flat = keys.reshape(-1).contiguous()
    out = torch.empty((len(flat), vocab_size), dtype=torch.float64, device=keys.device)
    grid = (len(flat), num_chunks(vocab_size, chunk))
    with on_device_of(out):
        _exponentials[grid](flat, out, vocab_size, CHUNK=chunk, num_warps=num_warps(chunk))
    return out.view(*keys.shape, vocab_size)
