"""One real step with one draft: drafter, warp and rule on a toy pair whose rows do not depend on the context."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spectoolkit.datatypes import DraftNoise, Proposal, SamplingParams, Uniforms, Verdict
from spectoolkit.drafters import ModelDrafter
from spectoolkit.interfaces import Drafter, Verifier
from spectoolkit.models.tabular import TabularModel
from spectoolkit.sampling import SamplingState

PLAIN = SamplingParams()


def same_row(row: Sequence[float]) -> TabularModel:
    """A model whose next-token law is `row` after every context."""
    return TabularModel(torch.tensor(row, dtype=torch.float64).expand(len(row), len(row)))


def propose(drafter: Drafter, noise: Tensor, vocab_size: int, params: SamplingParams = PLAIN) -> Proposal:
    """Drafts [B, K] for `noise` [B, K] of B requests with the prompt (0,); keys of shared noise are row numbers."""
    size, width = noise.shape
    prompts = [(0,)] * size
    keys = torch.arange(size * width).view(size, width)
    state = SamplingState.of([f"r{i}" for i in range(size)], [params] * size, prompts, [()] * size, vocab_size)
    return drafter.propose(drafter.start(prompts), state, [width] * size, DraftNoise(noise, keys))[0]


def target_probs(target: TabularModel, proposal: Proposal, params: SamplingParams = PLAIN) -> Tensor:
    """Rows [B, K+1, V] of the target along the drafts, as the loop makes them."""
    size = len(proposal.tokens)
    prompts = [(0,)] * size
    state = SamplingState.of([f"r{i}" for i in range(size)], [params] * size, prompts, [()] * size, target.vocab_size)
    tokens = torch.cat([torch.zeros(size, 1, dtype=torch.int64), proposal.tokens.clamp(min=0)], dim=1)
    logits, _ = target.score(target.prefill([()] * size), tokens)
    return state.probs(logits, proposal.tokens, "target")


def midpoints(size: int) -> Tensor:
    return (torch.arange(size, dtype=torch.float64) + 0.5) / size


def first_token(
    target_row: Sequence[float],
    drafter: Drafter,
    verifier: Verifier,
    grid: tuple[int, int, int],
    params: SamplingParams = PLAIN,
) -> tuple[float, list[float]]:
    """Acceptance of one draft and law of the first token, integrated over the uniforms that draft, accept and emit.

    Exact where every cut of a uniform is a multiple of 1 / its number in `grid`.
    """
    drafting, accepting, emitting = torch.cartesian_prod(*map(midpoints, grid)).T
    verdict = verdict_of(target_row, drafter, verifier, drafting, accepting, emitting, params)
    law = torch.bincount(verdict.emitted[:, 0], minlength=len(target_row)).double() / len(drafting)
    return verdict.num_accepted.double().mean().item(), law.tolist()


def verdict_of(
    target_row: Sequence[float],
    drafter: Drafter,
    verifier: Verifier,
    drafting: Tensor,
    accepting: Tensor,
    emitting: Tensor,
    params: SamplingParams = PLAIN,
) -> Verdict:
    """The verdicts of steps with one draft each for the uniforms [B]."""
    proposal = propose(drafter, drafting[:, None], len(target_row), params)
    keys = torch.arange(2 * len(drafting)).view(-1, 2)
    uniforms = Uniforms(accepting[:, None], torch.stack([emitting, emitting], -1), keys)
    return verifier.verify(target_probs(same_row(target_row), proposal, params), proposal, uniforms)


def sampler(draft_row: Sequence[float], vocab_size: int | None = None, **parameters: float) -> ModelDrafter:
    """Drafts from `draft_row`, at the request's temperature unless `parameters` say otherwise."""
    if not {"ratio", "constant"} & set(parameters):
        parameters["ratio"] = 1.0
    return ModelDrafter(same_row(draft_row), vocab_size or len(draft_row), **parameters)  # type: ignore[arg-type]
