"""A batch of requests' sampling parameters and token histories, as tensors: logits in, probabilities out.

The one path from logits to probabilities in torch, for target and draft rows alike: `functional.warp`, for which `rows`
takes a plain softmax where it is one. Greedy drafts need no probabilities: `largest`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from spectoolkit.datatypes import SamplingParams
from spectoolkit.errors import ContractError, InvalidLogitsError, UsageError
from spectoolkit.functional.ragged import pad_rows
from spectoolkit.functional.warp import SMALLEST_TEMPERATURE, Penalties, penalise, warp


@dataclass(frozen=True)
class RowParams:
    """The parameters of `functional.warp.warp` for B requests, the same in all their steps.

    Attributes:
        temperature: [B] float64.
        top_k, top_p, min_p: [B], or None where no request uses the filter.
        is_greedy: whether T = 0 in all rows (True) or in none (False); None: in some, or it is not known.
    """

    temperature: Tensor
    top_k: Tensor | None
    top_p: Tensor | None
    min_p: Tensor | None
    is_greedy: bool | None

    def repeat(self, times: int) -> RowParams:
        """Of [B * C] requests, C = `times` equal ones for each, one behind the other."""

        def repeated(values: Tensor | None) -> Tensor | None:
            return None if values is None else values.repeat_interleave(times, 0)

        temperature = self.temperature.repeat_interleave(times, 0)
        return RowParams(temperature, repeated(self.top_k), repeated(self.top_p), repeated(self.min_p), self.is_greedy)

    @cached_property
    def is_softmax(self) -> bool:
        """Whether every row is softmax(logits / T), T > 0."""
        return self.top_k is None and self.top_p is None and self.min_p is None and self.is_greedy is False

    @cached_property
    def divisor(self) -> Tensor:
        """T [B, 1, 1] float32, as `warp` divides by it."""
        return self.temperature.clamp(min=SMALLEST_TEMPERATURE).to(torch.float32)[:, None, None]


@dataclass(frozen=True)
class SamplingState:
    """Parameters and histories of B requests at the start of a step.

    Attributes:
        request_ids: B names, for error messages.
        num_tokens: B numbers of committed tokens (prompt and output), so the next token has this position.
        params: temperatures and filters.
        penalties: and token histories, or None where nobody asks for either.
    """

    request_ids: tuple[str, ...]
    num_tokens: tuple[int, ...]
    params: RowParams
    penalties: Penalties | None

    @staticmethod
    def of(
        request_ids: Sequence[str],
        params: Sequence[SamplingParams],
        prompts: Sequence[Sequence[int]],
        outputs: Sequence[Sequence[int]],
        vocab_size: int,
        device: torch.device | str = "cpu",
        *,
        keeps_histories: bool = False,
    ) -> SamplingState:
        """Stack the parameters of B requests and count their tokens; `keeps_histories` as for `Penalties.of`.

        Raises:
            UsageError: a logit bias names a token outside the vocabulary.
        """

        def column(name: str, off: float, dtype: torch.dtype) -> Tensor | None:
            values = [getattr(p, name) for p in params]
            return None if all(v == off for v in values) else torch.tensor(values, dtype=dtype, device=device)

        for request_id, p in zip(request_ids, params, strict=True):
            if p.logit_bias and max(p.logit_bias) >= vocab_size:
                raise UsageError(
                    f"sampling.logit_bias of request {request_id!r}: expected token ids below {vocab_size}, "
                    f"got {max(p.logit_bias)}"
                )
        return SamplingState(
            request_ids=tuple(request_ids),
            num_tokens=tuple(len(prompt) + len(output) for prompt, output in zip(prompts, outputs, strict=True)),
            params=RowParams(
                temperature=torch.tensor([p.temperature for p in params], dtype=torch.float64, device=device),
                top_k=column("top_k", 0, torch.int64),
                top_p=column("top_p", 1.0, torch.float64),
                min_p=column("min_p", 0.0, torch.float64),
                is_greedy={0: False, len(params): True}.get(sum(p.temperature == 0 for p in params)),
            ),
            penalties=Penalties.of(params, prompts, outputs, vocab_size, device, keeps_histories=keeps_histories),
        )

    def with_temperature(self, temperature: Tensor, is_greedy: bool | None = None) -> SamplingState:
        """The same requests at other temperatures [B]; `is_greedy` as in `RowParams`."""
        return replace(self, params=replace(self.params, temperature=temperature, is_greedy=is_greedy))

    def with_filters(
        self, top_k: int | None = None, top_p: float | None = None, min_p: float | None = None
    ) -> SamplingState:
        """The same requests with these filters in all of them; None leaves a filter as it is."""

        def column(value: float | None, current: Tensor | None, off: float, dtype: torch.dtype) -> Tensor | None:
            if value is None:
                return current
            return None if value == off else torch.full_like(self.params.temperature, value, dtype=dtype)

        params = replace(
            self.params,
            top_k=column(top_k, self.params.top_k, 0, torch.int64),
            top_p=column(top_p, self.params.top_p, 1.0, torch.float64),
            min_p=column(min_p, self.params.min_p, 0.0, torch.float64),
        )
        return replace(self, params=params)

    def repeat(self, times: int) -> SamplingState:
        """[B * C] rows, C = `times` equal ones for each request, one behind the other."""
        if times == 1:
            return self
        return SamplingState(
            request_ids=tuple(request_id for request_id in self.request_ids for _ in range(times)),
            num_tokens=tuple(number for number in self.num_tokens for _ in range(times)),
            params=self.params.repeat(times),
            penalties=None if self.penalties is None else self.penalties.repeat(times),
        )

    def with_repetition_penalty(self, value: float | None) -> SamplingState:
        """The same requests with this repetition penalty in all of them; None leaves it as it is.

        Raises:
            ContractError: a penalty, and no histories that it could look at (`keeps_histories`).
        """
        if value is None or (value == 1 and self.penalties is None):
            return self
        if self.penalties is None:
            raise ContractError(f"penalties: expected token histories for a repetition penalty of {value}, got None")
        column = None if value == 1 else torch.full_like(self.params.temperature, value)
        return replace(self, penalties=replace(self.penalties, repetition=column))

    def commit(self, emitted: Sequence[Sequence[int]]) -> SamplingState:
        """The state after the B rows `emitted` were added to the outputs."""
        num_tokens = tuple(number + len(block) for number, block in zip(self.num_tokens, emitted, strict=True))
        penalties = self.penalties
        if penalties is not None:
            penalties = penalties.extend(pad_rows(emitted, self.params.temperature.device))
        return SamplingState(self.request_ids, num_tokens, self.params, penalties)

    def probs(self, logits: Tensor, appended: Tensor, model: str) -> Tensor:
        """Probabilities [B, Q, V] of logits [B, Q, V] whose row i follows the tokens `appended[:, :A - Q + 1 + i]`.

        `appended` [B, A], A >= Q - 1, are draft tokens behind the committed ones, -1 where a row has none; they count
        in the penalties. float32, or float64 for float64 logits. `model` ("target" or "draft") is for error messages.

        Raises:
            InvalidLogitsError: NaN, +inf or no finite entry in a row that belongs to a token (see `check`).
        """
        probs, marks = self.rows(logits, appended)
        self.check(marks, appended, model)
        return probs

    def rows(self, logits: Tensor, appended: Tensor | None) -> tuple[Tensor, Tensor]:
        """As `probs`, with marks [B, Q] that are finite where a distribution follows: nothing is read back.

        `appended` may be None where there are no penalties.
        """
        params = self.params
        if params.is_softmax and self.penalties is None and logits.dtype != torch.float64:
            probs = torch.softmax(logits / params.divisor, -1)
        else:
            wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
            if self.penalties is not None:
                assert appended is not None
                wide = penalise(wide, self.penalties, appended)
            filters = (params.top_k, params.top_p, params.min_p)
            probs = warp(wide, params.temperature, *filters, is_greedy=params.is_greedy)
        # NaN, +inf, no finite entry, or an overflow (a tiny temperature and huge logits) make a softmax NaN throughout.
        marks = probs[..., 0]
        if params.is_greedy is not False:
            marks = marks + logits.amax(-1)  # amax propagates NaN; -inf: no entry is finite
        return probs, marks

    def largest(self, logits: Tensor, appended: Tensor | None) -> tuple[Tensor, Tensor]:
        """Where all rows are greedy: their tokens [B, Q], and marks as in `rows`, with `appended` as there."""
        top, tokens = logits.max(-1)  # of several largest ones the lowest id
        if self.penalties is not None:
            assert appended is not None
            tokens = penalise(logits, self.penalties, appended).argmax(-1)
        return tokens, top

    def check(self, marks: Tensor, appended: Tensor, model: str) -> None:
        """Refuse rows whose `marks` [B, Q] (`rows`) are not finite; this waits for the device.

        Raises:
            InvalidLogitsError: as `refuse`.
        """
        if not math.isfinite(marks.sum()):  # a sum may also overflow; then there is nothing to refuse
            self.refuse(are_faults(marks), appended, model)

    def refuse(self, faults: Tensor, appended: Tensor, model: str) -> None:
        """Raise for the first of the rows `faults` [B, Q] that belongs to a token; a row behind a -1 does not.

        Raises:
            InvalidLogitsError: names the request and the position.
        """
        num_before = appended.shape[1] - (faults.shape[1] - 1)
        preceded_by_pad = torch.nn.functional.pad(appended < 0, (1, 0))[:, num_before:]
        for row, offset in (faults & ~preceded_by_pad).nonzero().tolist():
            position = self.num_tokens[row] + num_before + offset
            raise InvalidLogitsError(model, self.request_ids[row], position)


def are_faults(marks: Tensor) -> Tensor:
    """Which `marks` [...] (`SamplingState.rows`) are not finite, in half the operations of `isfinite`."""
    return (marks - marks).bool()
