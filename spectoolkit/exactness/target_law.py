"""What the target itself would emit: the probability of whole continuations, by teacher forcing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spectoolkit.datatypes import Request
from spectoolkit.interfaces import LanguageModel
from spectoolkit.sampling import SamplingState

ROWS_TOGETHER = 256


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
