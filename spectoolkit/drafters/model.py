"""Drafting with a model of its own: argmax, the target's temperature, or another one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from spectoolkit.datatypes import (
    LARGEST,
    PAD,
    Dense,
    DraftLaw,
    DraftNoise,
    PointMass,
    Proposal,
    SampledLaw,
    SamplingParams,
)
from spectoolkit.drafters.stream import as_stream
from spectoolkit.errors import UsageError
from spectoolkit.functional.draw import draw
from spectoolkit.functional.ragged import few_ints, fit_vocabulary, places
from spectoolkit.interfaces import DraftStream, LanguageModel
from spectoolkit.sampling import SamplingState, are_faults


class Drawn(NamedTuple):
    """What a model drafter drew.

    Attributes:
        tokens: [B, K], `PAD` behind a proposal's end.
        fields: what `sampled_law` keeps of them, nothing of an argmax.
        faults: [B, K] bool, as in `Proposal`.
    """

    tokens: Tensor
    fields: tuple[Tensor, ...]
    faults: Tensor | None


@dataclass(frozen=True)
class ModelDrafter:
    """x_i ~ q_i = warp(draft logits, the request's own sampling parameters at the draft temperature), i = 1..K.

    The draft temperature is `constant`, or `ratio` times the target's (exactly one of them is given). A constant of 0
    is argmax drafting: a point mass, of which nothing is kept. Every other choice keeps the rows that were drawn from.

    Drafting costs one forward of the draft model per token.

    Attributes:
        draft_model: a language model, or a head on the target (`interfaces.DraftStream`). Its vocabulary may be padded
            to another length than the target's: ids that it lacks get probability 0, ids that the target lacks are
            never drawn.
        vocab_size: V of the target.
        ratio: draft temperature over the request's temperature.
        constant: draft temperature.
        top_k, top_p, min_p: filters of the draft rows in the place of the request's; None is the request's own.
        repetition_penalty: of the draft rows, likewise.

    Raises:
        UsageError: not exactly one of `ratio` and `constant`, a negative one, or a parameter outside its range.
    """

    draft_model: LanguageModel | DraftStream
    vocab_size: int
    ratio: float | None = None
    constant: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    sampled_law: ClassVar[type[SampledLaw]] = Dense
    draws_pads: ClassVar[bool] = False
    """Whether `sample` may give `PAD`, behind which a row has no draft."""

    def __post_init__(self) -> None:
        given = [value for value in (self.ratio, self.constant) if value is not None]
        if len(given) != 1 or not 0 <= given[0] <= LARGEST:
            raise UsageError(
                f"drafter: expected exactly one of ratio and constant, as a number from 0 to {LARGEST:g}, "
                f"got ratio={self.ratio!r}, constant={self.constant!r}"
            )
        try:
            own = {**self._filters(), "repetition_penalty": self.repetition_penalty}
            SamplingParams(**{name: value for name, value in own.items() if value is not None})
        except UsageError as error:
            raise UsageError(str(error).replace("sampling.", "drafter.")) from error

    @property
    def laws(self) -> tuple[type[DraftLaw], ...]:
        return (PointMass,) if self.is_argmax else (self.sampled_law,)

    @property
    def is_argmax(self) -> bool:
        return self.constant == 0 or self.ratio == 0

    @property
    def reads_histories(self) -> bool:
        """Whether it has a penalty of its own (`interfaces.Drafter`)."""
        return self.repetition_penalty not in (None, 1)

    def draft_probs(self, logits: Tensor, sampling: SamplingState, appended: Tensor) -> Tensor:
        """q [B, Q, V] of draft logits [B, Q, V'] behind the tokens `appended` (see `SamplingState.probs`).

        `sampling` holds the requests' own parameters.
        """
        logits = fit_vocabulary(logits, self.vocab_size, -torch.inf)
        return self.draft_sampling(sampling).probs(logits, appended, "draft")

    def draft_sampling(self, sampling: SamplingState) -> SamplingState:
        """The parameters of the draft rows, given the requests' own."""
        if self.constant is not None:
            temperature = torch.full_like(sampling.params.temperature, self.constant)
            sampling = sampling.with_temperature(temperature, self.is_argmax)
        elif self.ratio != 1:
            temperature = sampling.params.temperature * (self.ratio or 0.0)
            sampling = sampling.with_temperature(temperature, self.is_argmax or sampling.params.is_greedy)
        filters = {name: value for name, value in self._filters().items() if value is not None}
        if filters:
            sampling = sampling.with_filters(**filters)
        return sampling.with_repetition_penalty(self.repetition_penalty)

    def law_probs(self, probs: Tensor) -> Tensor:
        """The rows [..., V] that tokens are drawn from, of q's rows `probs` [..., V]: here these themselves."""
        return probs

    def bytes_per_token(self, vocab_size: int) -> int:
        """What the drafter's law keeps per draft token, in bytes at bf16."""
        if self.is_argmax:
            return PointMass().bytes_per_token(vocab_size)
        noise = DraftNoise(torch.zeros((1, 1), dtype=torch.float64), torch.zeros((1, 1), dtype=torch.int64))
        _, kept = self.sample(torch.full((1, vocab_size), 1 / vocab_size), noise, 0)
        return self.sampled_law(*(part[:, None] for part in kept)).bytes_per_token(vocab_size)

    def sample(self, probs: Tensor, noise: DraftNoise, index: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Draft tokens [B] of q's rows `probs` [B, V] at draft position `index`, and what `sampled_law` keeps of them.

        Each kept tensor [B, ...] is a field of the law, stacked over the positions.
        """
        return draw(probs, noise.uniforms[:, index]), (probs,)

    @cached_property
    def stream(self) -> DraftStream:
        """Where the draft logits come from."""
        return as_stream(self.draft_model)

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return self.stream.feature_layers

    def start(self, prompts: Sequence[Sequence[int]], features: Tensor | None = None) -> Any:
        return self.stream.start(prompts, features)

    def propose(
        self, state: Any, sampling: SamplingState, max_tokens: Sequence[int], noise: DraftNoise
    ) -> tuple[Proposal, Any]:
        num_rows, num_draft_tokens = noise.uniforms.shape
        if num_draft_tokens == 0:
            tokens = torch.empty((num_rows, 0), dtype=torch.int64, device=noise.uniforms.device)
            return Proposal(tokens, few_ints(max_tokens, tokens.device), PointMass()), state
        logits, state = self.stream.first(state)
        drawn, state = self.draw_tokens(logits, state, sampling, max_tokens, noise)
        law = PointMass() if self.is_argmax else self.sampled_law(*drawn.fields)
        return Proposal(drawn.tokens, few_ints(max_tokens, drawn.tokens.device), law, drawn.faults), state

    def draw_tokens(
        self, logits: Tensor, state: Any, sampling: SamplingState, max_tokens: Sequence[int], noise: DraftNoise
    ) -> tuple[Drawn, Any]:
        """Tokens from the logits [B, 1, V'] of the first ones on, and the stream's state, which was given with them.

        `sampling` holds the requests' own parameters.

        Raises:
            InvalidLogitsError: no distribution follows from a row, on a CPU; elsewhere the loop finds out.
        """
        num_draft_tokens, device = noise.uniforms.shape[1], logits.device
        beyond = None
        if min(max_tokens) < num_draft_tokens:
            beyond = places(num_draft_tokens, device) >= few_ints(max_tokens, device)[:, None]
        stream, own, is_argmax = self.stream, self.draft_sampling(sampling), self.is_argmax
        # A row with NaN, not refused yet, may give an id that a smaller vocabulary lacks.
        is_fed_as_it_is = not self.draws_pads and stream.vocab_size >= self.vocab_size
        tokens: list[Tensor] = []
        marks: list[Tensor] = []
        kept: list[tuple[Tensor, ...]] = []
        looks_back = own.penalties is not None or self._has_own_rows
        appended = logits.new_empty((len(logits), 0), dtype=torch.int64) if looks_back else None
        for i in range(num_draft_tokens):
            if i > 0:
                fed = tokens[-1][:, None]
                logits, state = stream.next(state, fed if is_fed_as_it_is else fed.clamp(0, stream.vocab_size - 1))
                if looks_back:
                    appended = torch.stack(tokens, 1)
            if beyond is not None:  # rows behind the end of their proposal belong to no token and may hold anything
                logits = logits.masked_fill(beyond[:, i, None, None], 0)
            logits = fit_vocabulary(logits, self.vocab_size, -torch.inf)
            if is_argmax and not self._has_own_rows:
                best, mark = own.largest(logits, appended)
                drawn, fields = best[:, 0], ()
            else:
                probs, mark = self._rows(logits, own, sampling, appended)
                drawn, fields = self.sample(probs[:, 0], noise, i)
            kept.append(() if is_argmax else fields)
            if self.draws_pads and i > 0:
                drawn = drawn.masked_fill(tokens[-1] == PAD, PAD)
            tokens.append(drawn)
            marks.append(mark)
        found = torch.stack(tokens, 1)
        found = found if beyond is None else found.masked_fill(beyond, PAD)
        fields = tuple(torch.stack(parts, dim=1) for parts in zip(*kept, strict=True))
        all_marks = torch.cat(marks, 1)
        if device.type != "cpu":
            return Drawn(found, fields, are_faults(all_marks)), state
        own.check(all_marks, found[:, :-1], "draft")
        return Drawn(found, fields, faults=None), state

    def _rows(
        self, logits: Tensor, own: SamplingState, sampling: SamplingState, appended: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """q [B, 1, V] and marks as in `SamplingState.rows`: by `draft_probs` where a drafter has its own."""
        if not self._has_own_rows:
            return own.rows(logits, appended)
        assert appended is not None
        probs = self.draft_probs(logits, sampling, appended)
        return probs, probs[..., 0]

    @cached_property
    def _has_own_rows(self) -> bool:
        return type(self).draft_probs is not ModelDrafter.draft_probs

    def commit(self, state: Any, emitted: Sequence[Sequence[int]], features: Tensor | None = None) -> Any:
        return self.stream.commit(state, emitted, features)

    def select(self, state: Any, rows: Sequence[int]) -> Any:
        return self.stream.select(state, rows)

    def insert(self, state: Any, rows: Sequence[int], other: Any) -> Any:
        return self.stream.insert(state, rows, other)

    def _filters(self) -> dict[str, Any]:
        return {"top_k": self.top_k, "top_p": self.top_p, "min_p": self.min_p}
