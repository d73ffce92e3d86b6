"""What the target itself would emit: the probability of whole continuations, by teacher forcing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spectoolkit.datatypes import Request, SamplingParams
from spectoolkit.functional.ragged import pad_rows
from spectoolkit.interfaces import LanguageModel
from spectoolkit.sampling import SamplingState

ROWS_TOGETHER = 256
OUTPUTS_TOGETHER = 8


@dataclass(frozen=True)
class Continuations:
    """Outputs of a request with their probabilities; all others together have what is left.

    Attributes:
        outputs: different ones, none of them the beginning of another.
        probs: [N] float64, of each.
    """

    outputs: tuple[tuple[int, ...], ...]
    probs: Tensor


def next_probs(target: LanguageModel, request: Request, outputs: Sequence[Sequence[int]]) -> Tensor:
    """[N, V] float64, the law of the token that follows each of `outputs` of `request`, all of one length."""
    found = []
    for begin in range(0, len(outputs), ROWS_TOGETHER):
        part = outputs[begin : begin + ROWS_TOGETHER]
        histories = [[*request.prompt, *output] for output in part]
        last = torch.tensor([history[-1:] for history in histories], device=target.device)
        logits, _ = target.score(target.prefill([history[:-1] for history in histories]), last)
        sampling = SamplingState.of(
            [request.id] * len(part), [request.params] * len(part), [request.prompt] * len(part), part,
            target.vocab_size, target.device,
        )  # fmt: skip
        none = torch.empty(len(part), 0, dtype=torch.int64, device=target.device)
        found.append(sampling.probs(logits, none, "target")[:, 0].to("cpu", torch.float64))
    return torch.cat(found)


@torch.inference_mode()
def law_variation(
    target: LanguageModel, requests: Sequence[Request], outputs: Sequence[Sequence[int]], asked: SamplingParams
) -> Tensor:
    """[R] float64, how far the law that each request was sampled with is from the one that was asked for.

        sum over the output's tokens of sum over v of |p(v) - p_asked(v)| / 2

    p is the target's row with the request's own parameters, p_asked the one with `asked`, both after the tokens of the
    output before. Every lossless rule emits p. One teacher-forced pass.
    """
    sums = torch.zeros(len(requests), dtype=torch.float64)
    order = sorted(range(len(requests)), key=lambda i: len(outputs[i]))
    for begin in range(0, len(order), OUTPUTS_TOGETHER):
        part = order[begin : begin + OUTPUTS_TOGETHER]
        chosen = [requests[i] for i in part]
        prompts = [request.prompt for request in chosen]
        tokens = pad_rows([outputs[i] for i in part], target.device)
        last = torch.tensor([prompt[-1:] for prompt in prompts], device=target.device)
        before = torch.cat([last, tokens[:, :-1].clamp(min=0)], dim=1)
        logits, _ = target.score(target.prefill([prompt[:-1] for prompt in prompts]), before)
        laws = []
        for params in ([request.params for request in chosen], [asked] * len(part)):
            ids, nothing = [request.id for request in chosen], [()] * len(part)
            sampling = SamplingState.of(ids, params, prompts, nothing, target.vocab_size, target.device)
            laws.append(sampling.probs(logits, tokens[:, :-1], "target"))
        variation = (laws[0] - laws[1]).abs().sum(-1, dtype=torch.float64) / 2
        sums[part] = variation.masked_fill(tokens < 0, 0.0).sum(-1).cpu()
    return sums


@torch.inference_mode()
def most_probable(target: LanguageModel, request: Request, most: int) -> Continuations:
    """The most probable outputs of `request`, at most `most`: those found when every length keeps its best prefixes.

    A prefix that ends with a stop id is an output. Outputs that a kept prefix does not lead to are not found, which
    costs detail and no correctness: they count among the others.
    """
    ended: list[tuple[float, tuple[int, ...]]] = []
    prefixes: list[tuple[float, tuple[int, ...]]] = [(1.0, ())]
    for _ in range(request.max_new_tokens):
        rows = next_probs(target, request, [tokens for _, tokens in prefixes])
        joint = rows * torch.tensor([prob for prob, _ in prefixes], dtype=torch.float64)[:, None]
        best = joint.flatten().topk(min(most, joint.numel()))
        found = [
            (prob, (*prefixes[at // rows.shape[1]][1], at % rows.shape[1]))
            for prob, at in zip(best.values.tolist(), best.indices.tolist(), strict=True)
            if prob > 0
        ]
        ended += [one for one in found if one[1][-1] in request.stop_ids]
        prefixes = [one for one in found if one[1][-1] not in request.stop_ids]
        if not prefixes:
            break
    kept = sorted([*ended, *prefixes], key=lambda one: (-one[0], one[1]))[:most]
    return Continuations(
        outputs=tuple(tokens for _, tokens in kept),
        probs=torch.tensor([prob for prob, _ in kept], dtype=torch.float64),
    )
