"""Whether kernels give what the reference gives where they are about to run: small problems, solved by both.

A compiler, a driver or a device that nobody tried may refuse a kernel or get it wrong; a run then takes the reference.
Two problems, since triton compiles a kernel once for sizes that are multiples of 16 and once for others: float32 logits
over an odd vocabulary, bfloat16 logits over an even one, both longer than a chunk. Rows are masked, one of them for the
whole of its first chunk, proposals are ragged and a sequence is greedy. The noise is such that no verdict lies near a
threshold, so that equal ones are asked for; numbers are compared as the tests of the kernels do. A fault that the
device does not recover from, such as an access outside its memory, ends the run here as it would later.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from spectoolkit.datatypes import PAD, Dense, DraftLaw, PointMass, Proposal, Uniforms
from spectoolkit.functional.acceptance import overlap, probs_of
from spectoolkit.functional.conditional import given_coupled
from spectoolkit.functional.draw import draw, gumbel_max
from spectoolkit.functional.noise import Role, exponentials, position_keys, uniforms
from spectoolkit.functional.warp import warp
from spectoolkit.interfaces import Verifier
from spectoolkit.verifiers import Block, Coupled, Rejection

PROBLEMS = ((torch.float32, 5003), (torch.bfloat16, 4608))
SEED = 6
LENGTHS = (3, 2, 3, 0, 1)
TEMPERATURES = (0.7, 1.0, 0.0, 1.3, 0.4)
DRAFT_TEMPERATURES = (1.0, 0.6, 0.9, 0.5, 0.0)
TOLERANCES = {"overlap": (1e-5, 1e-7), "coupled": (3e-5, 1e-30)}
"""Relative and absolute, of sums over float32 rows; a number without a sum is closer."""


@dataclass(frozen=True)
class Problem:
    """A step of B sequences with up to K drafts, and a chunk of a replay.

    Attributes:
        target, draft: logits [B, K+1, V] and [B, K, V].
        temperature, draft_temperature: [B] float64.
        tokens, coupled_tokens: [B, K] drawn from the draft's rows, by inversion and with the shared noise.
        lengths: [B].
        uniforms: of the verification.
    """

    target: Tensor
    draft: Tensor
    temperature: Tensor
    draft_temperature: Tensor
    tokens: Tensor
    coupled_tokens: Tensor
    lengths: Tensor
    uniforms: Uniforms

    @staticmethod
    def of(dtype: torch.dtype, vocab_size: int, device: torch.device) -> Problem:
        """Made on the host, so that it is the same everywhere."""
        size, num_drafts = len(LENGTHS), max(LENGTHS)
        request = torch.arange(size)
        seeds, starts = torch.full_like(request, SEED), torch.ones_like(request)
        shared = position_keys(seeds, request, starts, num_drafts + 1)
        # Logits with the tails of a language model's: a few tokens have most of the mass.
        target = -2.5 * exponentials(position_keys(seeds - 1, request, starts, num_drafts + 1), vocab_size).log()
        apart = exponentials(position_keys(seeds - 2, request, starts, num_drafts), vocab_size).log()
        draft = (target[:, :-1] - apart).to(dtype)
        target[1, :, 1::3] = -torch.inf
        target[4, :, :4096] = -torch.inf
        temperature = torch.tensor(TEMPERATURES, dtype=torch.float64)
        draft_temperature = torch.tensor(DRAFT_TEMPERATURES, dtype=torch.float64)
        lengths = torch.tensor(LENGTHS)
        draft_probs = warp(draft.float(), draft_temperature, None, None, None)
        beyond = torch.arange(num_drafts) >= lengths[:, None]
        drawn_with = uniforms(seeds, request, starts, num_drafts, Role.DRAFT)
        return Problem(
            target=target.to(dtype).to(device),
            draft=draft.to(device),
            temperature=temperature.to(device),
            draft_temperature=draft_temperature.to(device),
            tokens=draw(draft_probs, drawn_with).masked_fill(beyond, PAD).to(device),
            coupled_tokens=gumbel_max(draft_probs, shared[:, :-1]).masked_fill(beyond, PAD).to(device),
            lengths=lengths.to(device),
            uniforms=Uniforms(
                uniforms(seeds, request, starts, num_drafts, Role.ACCEPT).to(device),
                uniforms(seeds, request, starts, num_drafts + 1, Role.EMIT).to(device),
                shared.to(device),
            ),
        )

    @property
    def draft_probs(self) -> Tensor:
        """As a drafter makes them: [B, K, V] float32."""
        return warp(self.draft.float(), self.draft_temperature, None, None, None)


@cache
def failure(device: torch.device) -> str:
    """What went wrong with the kernels on this device, in words; "" if nothing did. Tried once in a process.

    A failure is also said in a warning.
    """
    found = _failure(device)
    if found:
        warnings.warn(f"kernels are not used on {device}, which takes the reference: {found}", RuntimeWarning, 2)
    return found


def _failure(device: torch.device) -> str:
    for dtype, vocab_size in PROBLEMS:
        one = Problem.of(dtype, vocab_size, device)
        for name, differs in CHECKS.items():
            try:
                found = differs(one)
            except Exception as error:  # whatever a compiler or a device has to say
                found = f"{type(error).__name__}: {error}".splitlines()[0]
            if found:
                return f"{name} ({str(dtype).removeprefix('torch.')} logits, V = {vocab_size:,}): {found}"
    return ""


def verification_differs(one: Problem, rule: Verifier, law: DraftLaw | None) -> str:
    """In what the kernels' verdict is not that of the reference in float64; `law` None is that of shared noise."""
    from spectoolkit.kernels.coupled import coupled
    from spectoolkit.kernels.rejection_and_block import block, rejection

    tokens = one.coupled_tokens if law is None else one.tokens
    given = (one.target, one.temperature, tokens, one.lengths)
    if law is None:
        assert one.uniforms.shared is not None
        found, status = coupled(*given, one.uniforms.shared)
    else:
        assert isinstance(law, (PointMass, Dense))
        judge = rejection if isinstance(rule, Rejection) else block
        found, status = judge(*given, law, one.uniforms)
    if status.any():
        return f"rows without fault have the status {status.tolist()}"
    expected = expected_verdict(one, rule, law)
    for name in ("num_accepted", "judged_alone", "emitted"):
        kernels, reference = getattr(found, name), getattr(expected, name)
        if not torch.equal(kernels, reference):
            return f"{name} is {kernels.tolist()}, and {reference.tolist()} by the reference"
    return ""


def expected_verdict(one: Problem, rule: Verifier, law: DraftLaw | None) -> Any:
    """The reference's verdict in float64."""
    target_probs = warp(one.target.double(), one.temperature, None, None, None)
    tokens = one.coupled_tokens if law is None else one.tokens
    return rule.verify(target_probs, Proposal(tokens, one.lengths, law or PointMass()), one.uniforms)


def reduction_differs(one: Problem) -> str:
    """In what the kernels' reduction of a row of each sequence, at all draft temperatures, is not the reference's."""
    from spectoolkit.kernels.reduce import reduce_rows

    target, draft, tokens = one.target[:, 0], one.draft[:, 0], one.tokens[:, 0]
    temperatures = one.draft_temperature.repeat(len(tokens), 1)
    found = reduce_rows(target, one.temperature, draft, temperatures, tokens)
    p = warp(target[:, None].double(), one.temperature, None, None, None)
    rows = [warp(draft[:, None].double(), t, None, None, None) for t in temperatures.unbind(1)]
    divisors = torch.where(temperatures == 0, 1, temperatures)[..., None]
    expected = {
        "target_argmax": target.argmax(-1),
        "draft_argmax": draft.argmax(-1),
        "target_prob": probs_of(p, tokens[:, None])[:, 0],
        "draft_prob": torch.cat([probs_of(q, tokens[:, None]) for q in rows], 1),
        "draft_logsumexp": (draft[:, None].double() / divisors).logsumexp(-1),
        "overlap": torch.cat([overlap(p, q) for q in rows], 1),
        "coupled": torch.cat([given_coupled(p, q, tokens[:, None]) for q in rows], 1),
    }
    for name, reference in expected.items():
        kernels, (rtol, atol) = getattr(found, name).to(reference.dtype), TOLERANCES.get(name, (1e-5, 1e-30))
        if not torch.allclose(kernels, reference, rtol=rtol, atol=atol):
            return f"{name} differs from the reference by up to {(kernels - reference).abs().max():.3g}"
    return ""


CHECKS: Mapping[str, Callable[[Problem], str]] = {
    "rejection of a point mass": lambda one: verification_differs(one, Rejection(), PointMass()),
    "rejection of whole rows": lambda one: verification_differs(one, Rejection(), Dense(one.draft_probs)),
    "block verification of a point mass": lambda one: verification_differs(one, Block(), PointMass()),
    "block verification of whole rows": lambda one: verification_differs(one, Block(), Dense(one.draft_probs)),
    "coupled verification": lambda one: verification_differs(one, Coupled(), None),
    "a replay's reduction": reduction_differs,
}
