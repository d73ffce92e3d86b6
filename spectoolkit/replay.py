"""The exact conditional expectation of every count, from one teacher-forced pass over outputs of the target.

A lossless verifier leaves the target's law of the output unchanged whatever is drafted. So outputs are sampled from the
target once, each model scores them once, and the randomness of drafting and verification is integrated out: one pass
serves every drafter, every K and every lossless verifier. Lossy verifiers change the law of the text and are refused.

Logits are reduced chunk by chunk and never kept. Peak memory beyond the models, the caches of `BATCH` rows and a few
numbers per token and strategy is that of some six [`ROWS`, V] tensors in float32, whatever the number of tokens,
strategies and K.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, cast

import torch
from torch import Tensor

from spectoolkit.datatypes import DraftNoise, PointMass
from spectoolkit.drafters.model import ModelDrafter
from spectoolkit.drafters.stream import check_features
from spectoolkit.errors import UsageError
from spectoolkit.functional import renewal
from spectoolkit.functional.conditional import GivenOutput
from spectoolkit.functional.ragged import pad_rows, unpad_rows
from spectoolkit.interfaces import (
    Drafter,
    DraftStream,
    FeatureModel,
    LanguageModel,
    UnrolledStream,
    Verifier,
    reads_histories,
)
from spectoolkit.kernels.replay_reduction import Reducer
from spectoolkit.kernels.switch import parse_switch
from spectoolkit.sampling import SamplingState
from spectoolkit.trajectories import Trajectories

BATCH = 16
ROWS = 128


@dataclass(frozen=True)
class Strategy:
    """A drafter and a lossless verifier, with the largest K that is asked for."""

    drafter: Drafter
    verifier: Verifier
    num_draft_tokens: int

    @property
    def given_output(self) -> GivenOutput:
        (law,) = self.drafter.laws
        return self.verifier.given_output(law)  # type: ignore[attr-defined]


def check_replayable(drafter: Drafter, verifier: Verifier, *, is_greedy: bool) -> None:
    """Refuse what a replay cannot compute exactly.

    Args:
        is_greedy: whether all requests have temperature 0, where some lossy rules are exact (`is_exact_when_greedy`).

    Raises:
        UsageError: a lossy verifier, one that does not say how its acceptance follows from the output, or a drafter
            that is wrong on purpose.
    """
    name = type(verifier).__name__
    if getattr(drafter, "is_negative_control", False):
        raise UsageError(
            f"engine=replay: {type(drafter).__name__} is wrong on purpose: its drafts do not follow the law that it "
            "reports, which a replay relies on; decode it with engine=live"
        )
    is_exact = verifier.is_lossless or (is_greedy and getattr(verifier, "is_exact_when_greedy", False))
    if not is_exact:
        raise UsageError(
            f"engine=replay: {name} is not lossless: its outputs do not follow the target's law, so that text sampled "
            "from the target says nothing about it; decode it with engine=live"
        )
    if not hasattr(verifier, "given_output"):
        raise UsageError(f"engine=replay: {name} has no given_output, so it can only be decoded with engine=live")
    if not isinstance(drafter, ModelDrafter) and drafter.laws != (PointMass,):
        raise UsageError(
            "engine=replay: expected a drafter with a draft model or with a point mass law, got "
            f"{type(drafter).__name__}"
        )


@torch.no_grad()
def replay(
    target: LanguageModel,
    strategies: Sequence[Strategy],
    trajectories: Trajectories,
    progress: Callable[[int], Any] = lambda num_requests: None,
) -> list[list[renewal.ExpectedCounts]]:
    """Expected counts of every strategy and every K.

    Args:
        target: the model that the trajectories were sampled from.
        strategies: all of them are evaluated in one pass over the logits of each draft model.
        trajectories: R outputs of the target.
        progress: called with the number of requests that were finished.

    Returns:
        For each strategy, for K = 1 .. its `num_draft_tokens`: counts [R, 1] (see `renewal.ExpectedCounts`).

    Raises:
        UsageError: what `check_replayable` refuses, or a value of SPECTOOLKIT_KERNELS that there is not.
        InvalidLogitsError: a model returned a row from which no distribution follows.
    """
    parse_switch()
    is_greedy = all(request.params.temperature == 0 for request in trajectories.requests)
    for strategy in strategies:
        check_replayable(strategy.drafter, strategy.verifier, is_greedy=is_greedy)
        check_features(target, strategy.drafter)
    keeps_histories = any(reads_histories(strategy.drafter) for strategy in strategies)
    parts: list[list[list[renewal.ExpectedCounts]]] = [[] for _ in strategies]
    order = sorted(range(len(trajectories.outputs)), key=lambda i: len(trajectories.outputs[i]))
    for begin in range(0, len(order), BATCH):
        group = _Group.of(trajectories, order[begin : begin + BATCH], target, keeps_histories=keeps_histories)
        by_position = _by_position(target, strategies, group)
        for i, strategy in enumerate(strategies):
            most = group.most(strategy)
            if i in by_position:
                numbers, drafted = by_position[i], group.budget.clamp(max=most)
            else:
                numbers, drafted = _by_start(strategy.drafter, most, group)
            at_least = strategy.given_output.combine(numbers)[:, None]
            counts = [
                renewal.expected_counts(at_least[..., :k], drafted[:, None].clamp(max=k), group.lengths)
                for k in range(1, most + 1)
            ]
            beyond = range(most + 1, strategy.num_draft_tokens + 1)
            parts[i].append([*counts, *(renewal.widen(counts[-1], k) for k in beyond)])
        progress(len(group.lengths))
    back = torch.tensor(order).argsort()
    return [[_join(list(of_k), back) for of_k in zip(*some, strict=True)] for some in parts]


@dataclass(frozen=True)
class _Group:
    """Some outputs, to be scored together.

    Attributes:
        prompts: B of them.
        sampling: their parameters and histories before the first output token.
        tokens: [B, N] outputs, padded.
        inputs: [B, N] the token before each.
        lengths: [B] on the host, like everything that the recursion needs.
        budget: [B, N] how many drafts a step that starts there may have: one less than may still be emitted.
    """

    prompts: list[tuple[int, ...]]
    sampling: SamplingState
    tokens: Tensor
    inputs: Tensor
    lengths: Tensor
    budget: Tensor

    @staticmethod
    def of(trajectories: Trajectories, rows: Sequence[int], target: LanguageModel, *, keeps_histories: bool) -> _Group:
        requests = [trajectories.requests[row] for row in rows]
        outputs = [trajectories.outputs[row] for row in rows]
        prompts = [request.prompt for request in requests]
        ids, params = [request.id for request in requests], [request.params for request in requests]
        no_output: list[tuple[int, ...]] = [() for _ in rows]
        tokens = pad_rows(outputs, target.device)
        before = torch.tensor([prompt[-1:] for prompt in prompts], device=target.device)
        limits = torch.tensor([request.max_new_tokens for request in requests])
        return _Group(
            prompts=prompts,
            sampling=SamplingState.of(
                ids, params, prompts, no_output, target.vocab_size, target.device, keeps_histories=keeps_histories
            ),
            tokens=tokens,
            inputs=torch.cat([before, tokens[:, :-1]], dim=1),
            lengths=torch.tensor([len(output) for output in outputs]),
            budget=(limits[:, None] - torch.arange(tokens.shape[1]) - 1).clamp(min=0),
        )

    def most(self, strategy: Strategy) -> int:
        """No step drafts more than the longest output leaves room for: a larger K gives the same counts."""
        return min(strategy.num_draft_tokens, max(1, int(self.budget.max())))


def _by_position(target: LanguageModel, strategies: Sequence[Strategy], group: _Group) -> dict[int, Tensor]:
    """Per strategy with a draft model, [B, N, K] what its verifier needs to know of the position s + i of a step.

    Entry (s, i) is that of draft i of a step which starts at s. For a language model it depends on s + i alone; a draft
    head was fed its own states since s.
    """
    drafters = {i: s.drafter for i, s in enumerate(strategies) if isinstance(s.drafter, ModelDrafter)}
    if not drafters:
        return {}
    num_rows, num_positions = group.tokens.shape
    most = {i: group.most(strategies[i]) for i in drafters}
    users: dict[int, list[int]] = {}  # by identity of the draft model, which several strategies may share
    for i, drafter in drafters.items():
        users.setdefault(id(drafter.draft_model), []).append(i)
    numbers = {i: torch.zeros(num_rows, num_positions, most[i], dtype=torch.float64) for i in drafters}
    target_scorer = _Scorer(target, group)
    scorers = {
        key: _scorer(drafters[some[0]].draft_model, group, max(most[i] for i in some), target_scorer)
        for key, some in users.items()
    }
    reductions = {i: (drafters[i], strategies[i].given_output.reduce) for i in drafters}
    width = max(1, ROWS // num_rows)
    for begin in range(0, num_positions, width):
        end = min(begin + width, num_positions)
        tokens, appended = group.tokens[:, begin:end], group.tokens[:, : end - 1]
        reducer = Reducer(group.sampling, target_scorer.logits(begin, end), tokens, appended)
        for key, some in users.items():
            for depth, logits in enumerate(scorers[key].by_depth(begin, end)):
                reduced = reducer.reduce({i: reductions[i] for i in some if depth < most[i]}, logits)
                before = max(0, depth - begin)  # rows before the depth have no step start
                for i, of_strategy in reduced.items():
                    numbers[i][:, begin + before - depth : end - depth, depth] = of_strategy.cpu()[:, before:]
    by_position = {i for key, some in users.items() if isinstance(scorers[key], _Scorer) for i in some}
    return {i: renewal.windows(n[..., 0], most[i]) if i in by_position else n for i, n in numbers.items()}


def _scorer(
    model: LanguageModel | DraftStream, group: _Group, num_depths: int, target: _Scorer
) -> _Scorer | _UnrolledScorer:
    if hasattr(model, "unroll"):
        return _UnrolledScorer(cast(UnrolledStream, model), group, num_depths, target)
    return _Scorer(cast(LanguageModel, model), group)


class _Scorer:
    """One model walking along the outputs of a group."""

    def __init__(self, model: LanguageModel, group: _Group) -> None:
        self._model, last_id = model, model.vocab_size - 1
        self._inputs = group.inputs.clamp(0, last_id)
        self._state = model.prefill([[min(token, last_id) for token in prompt[:-1]] for prompt in group.prompts])

    def logits(self, begin: int, end: int) -> Tensor:
        """[B, end - begin, V] of the output tokens at these positions; to be asked for in order."""
        logits, self._state = self._model.score(self._state, self._inputs[:, begin:end])
        return logits

    def by_depth(self, begin: int, end: int) -> Iterator[Tensor]:
        """The same for every depth of a step, so once."""
        yield self.logits(begin, end)

    def last_features(self, num_tokens: Sequence[int]) -> Tensor:
        """Features of the tokens scored last (`interfaces.FeatureModel`)."""
        return cast(FeatureModel, self._model).features(self._state, num_tokens)


class _UnrolledScorer:
    """A draft head walking along the outputs of a group behind the target, whose features it reads."""

    def __init__(self, model: UnrolledStream, group: _Group, num_depths: int, target: _Scorer) -> None:
        self._model, self._inputs, self._num_depths, self._target = model, group.inputs, num_depths, target
        num_cached = [len(prompt) - 1 for prompt in group.prompts]
        features = target.last_features(num_cached)
        self._past = model.unroll_start(group.prompts, features)
        # Of the first row: the token before the last of the prompt.
        last = torch.tensor([max(number - 1, 0) for number in num_cached], device=model.device)
        last = last[:, None, None].expand(-1, 1, features.shape[2])
        self._before = features.gather(1, last) if features.shape[1] else features.new_zeros(last.shape)

    def by_depth(self, begin: int, end: int) -> Iterator[Tensor]:
        """Per depth, [B, end - begin, V] of the output tokens at these positions, the target having scored them."""
        scored = self._target.last_features([end - begin] * len(self._inputs))
        features = torch.cat([self._before, scored[:, :-1]], dim=1)
        self._before = scored[:, -1:]
        states, self._past = self._model.unroll(self._past, self._inputs[:, begin:end], features, self._num_depths)
        for of_depth in states:
            yield self._model.wide_logits(of_depth)


def _by_start(drafter: Drafter, num_draft_tokens: int, group: _Group) -> tuple[Tensor, Tensor]:
    """For a drafter without a draft model, by proposing at every step start.

    Returns:
        [B, N, K] whether each proposed token is that of the output, and [B, N] how many were proposed.
    """
    tokens = group.tokens.cpu()
    num_rows, num_positions = tokens.shape
    following = renewal.windows((tokens + 1).to(torch.float64), num_draft_tokens).long() - 1  # [B, N, K], -1 behind
    equal = torch.zeros(num_rows, num_positions, num_draft_tokens, dtype=torch.float64)
    drafted = torch.zeros(num_rows, num_positions, dtype=torch.int64)
    noise = DraftNoise(torch.zeros(num_rows, num_draft_tokens, dtype=torch.float64))  # a point mass draws nothing
    state = drafter.start(group.prompts)
    for s in range(num_positions):
        max_tokens = group.budget[:, s].clamp(max=num_draft_tokens).tolist()
        proposal, state = drafter.propose(state, group.sampling, max_tokens, noise)
        proposed = proposal.tokens.cpu()
        width = proposed.shape[1]
        equal[:, s, :width] = ((proposed == following[:, s, :width]) & (proposed >= 0)).to(torch.float64)
        drafted[:, s] = proposal.lengths.cpu()
        state = drafter.commit(state, unpad_rows(tokens[:, s : s + 1]))
    return equal, drafted


def _join(parts: Sequence[renewal.ExpectedCounts], order: Tensor) -> renewal.ExpectedCounts:
    """The counts of all groups, in the order of the requests."""
    names = [field.name for field in fields(renewal.ExpectedCounts)]
    return renewal.ExpectedCounts(*(torch.cat([getattr(part, name) for part in parts])[order] for name in names))
