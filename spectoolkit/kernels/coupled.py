"""Coupled verification from logits, of which each row is read once.

The target's own token is the one with the largest exp(x) / E, E being the noise that it shares with the draft. A first
kernel leaves the largest per chunk, a program per sequence takes those of its rows and compares them with the drafts.
Arithmetic as in `rejection_and_block`; scores are float64. A verdict is that of the reference but where two scores lie
within rounding of each other.
"""

# What a launch takes beside a kernel's parameters, and what a kernel's own types are, is not in triton's annotations.
# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from spectoolkit.datatypes import Verdict
from spectoolkit.kernels.launch import Cut, on_device_of, with_dense_rows
from spectoolkit.kernels.noise import exponential_of
from spectoolkit.kernels.rows import NO_INDEX, below, chunk_masses, divisor, is_fine, load_logits
from spectoolkit.kernels.verdict import int32, verdict_buffers


@triton.jit
def _coupled_parts(
    logits, temperature, lengths, keys, max_ptr, arg_ptr, score_ptr, best_ptr,
    num_rows, vocab_size, stride_b, stride_q, num_chunks,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """A chunk's largest logit with its id, and the largest of exp(x - largest) / E with its id."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    b, i = row // num_rows, row % num_rows
    if i <= tl.load(lengths + b):
        tokens = chunk * CHUNK + tl.arange(0, CHUNK)
        start = logits + b.to(tl.int64) * stride_b + i.to(tl.int64) * stride_q
        x = tl.div_rn(load_logits(start, tokens, vocab_size), divisor(tl.load(temperature + b)))
        top = tl.max(x, axis=0)
        scores = tl.exp(below(x, top)).to(tl.float64) / exponential_of(tl.load(keys + row), tokens.to(tl.int64))
        score = tl.max(scores, axis=0)
        at = row.to(tl.int64) * num_chunks + chunk
        tl.store(max_ptr + at, top)
        tl.store(arg_ptr + at, tl.min(tl.where(x == top, tokens, NO_INDEX), axis=0))
        tl.store(score_ptr + at, score)
        tl.store(best_ptr + at, tl.min(tl.where(scores == score, tokens, NO_INDEX), axis=0))


@triton.jit
def _coupled_verdict(
    temperature, tokens, lengths, max_ptr, arg_ptr, score_ptr, best_ptr, emitted, judged, accepted, status_ptr,
    num_drafts, num_chunks,
    CHUNKS: tl.constexpr,
):  # fmt: skip
    """The target's own token of every row, and the drafts that equal it."""
    b = tl.program_id(0).to(tl.int64)
    length, t = tl.load(lengths + b), tl.load(temperature + b)
    chunk = tl.arange(0, CHUNKS)
    inside = chunk < num_chunks
    num_accepted = length * 0
    alive = length >= 0
    status = (length * 0).to(tl.int32)
    for i in range(0, num_drafts + 1):
        row = b * (num_drafts + 1) + i
        sampled = length * 0 - 1
        if i <= length:
            at = row * num_chunks + chunk
            tops = tl.load(max_ptr + at, mask=inside, other=-float("inf"))
            top = tl.max(tops, axis=0)
            status |= tl.where(is_fine(top), 0, 1)
            scores = chunk_masses(tops, tl.load(score_ptr + at, mask=inside, other=0.0), top)
            ids = tl.load(best_ptr + at, mask=inside, other=NO_INDEX)
            drawn = tl.min(tl.where(scores == tl.max(scores, axis=0), ids, NO_INDEX), axis=0)
            first = tl.min(tl.where(tops == top, tl.load(arg_ptr + at, mask=inside, other=NO_INDEX), NO_INDEX), axis=0)
            sampled = tl.where(t == 0, first, drawn).to(tl.int64)
        tl.store(emitted + row, tl.where(alive, sampled, -1))
        if i < num_drafts:
            matched = (i < length) & (tl.load(tokens + b * num_drafts + i) == sampled)
            tl.store(judged + b * num_drafts + i, matched.to(tl.int8))
            alive = alive & matched
            num_accepted += alive.to(tl.int64)
    tl.store(accepted + b, num_accepted)
    tl.store(status_ptr + b, status)


def coupled(
    target_logits: Tensor,
    temperature: Tensor,
    tokens: Tensor,
    lengths: Tensor,
    keys: Tensor,
    chunk: int | None = None,
) -> tuple[Verdict, Tensor]:
    """`verifiers.Coupled` with the shared noise of `keys` [B, K+1] int64, else as `rejection_and_block.rejection`."""
    logits = with_dense_rows(target_logits)
    size, num_rows, vocab_size = logits.shape
    cut = Cut.of(vocab_size, chunk)
    num = cut.num_chunks
    top, arg = logits.new_empty((size * num_rows, num), dtype=torch.float32), int32(logits, size * num_rows, num)
    score, best = torch.empty_like(top, dtype=torch.float64), torch.empty_like(arg)
    emitted, judged, accepted, status = verdict_buffers(logits)
    tokens, lengths = tokens.to(torch.int64).contiguous(), lengths.to(torch.int64).contiguous()
    temperature = temperature.to(torch.float64).contiguous()
    with on_device_of(logits):
        _coupled_parts[(size * num_rows, num)](
            logits, temperature, lengths, keys.contiguous(), top, arg, score, best,
            num_rows, vocab_size, logits.stride(0), logits.stride(1), num,
            CHUNK=cut.chunk, num_warps=cut.num_warps,
        )  # fmt: skip
        _coupled_verdict[(size,)](
            temperature, tokens, lengths, top, arg, score, best, emitted, judged, accepted, status,
            num_rows - 1, num,
            CHUNKS=cut.padded, num_warps=1,
        )  # fmt: skip
    return Verdict(accepted, emitted, judged.to(torch.bool)), status
