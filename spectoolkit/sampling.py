"""A batch of requests' sampling parameters and token histories, as tensors: logits in, probabilities out.

The one path from logits to probabilities, for target and draft rows alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from spectoolkit.datatypes import SamplingParams
from spectoolkit.errors import ContractError, InvalidLogitsError, UsageError
from spectoolkit.functional.warp import Penalties, penalise, warp


@dataclass(frozen=True)
class SamplingState:
    """Parameters and histories of B requests at the start of a step.

    Attributes:
        request_ids: B names, for error messages.
        num_tokens: [B] committed tokens (prompt and output), so the next token has this position.
        temperature: [B] float64.
        top_k, top_p, min_p: [B], or None where no request uses the filter.
        penalties: and token histories, or None where nobody asks for either.
    """

    request_ids: tuple[str, ...]
    num_tokens: Tensor
    temperature: Tensor
    top_k: Tensor | None
    top_p: Tensor | None
    min_p: Tensor | None
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
        num_tokens = [len(prompt) + len(output) for prompt, output in zip(prompts, outputs, strict=True)]
        return SamplingState(
            request_ids=tuple(request_ids),
            num_tokens=torch.tensor(num_tokens, dtype=torch.int64, device=device),
            temperature=torch.tensor([p.temperature for p in params], dtype=torch.float64, device=device),
            top_k=column("top_k", 0, torch.int64),
            top_p=column("top_p", 1.0, torch.float64),
            min_p=column("min_p", 0.0, torch.float64),
            penalties=Penalties.of(params, prompts, outputs, vocab_size, device, keeps_histories=keeps_histories),
        )

    def with_temperature(self, temperature: Tensor) -> SamplingState:
        """The same requests at other temperatures [B]."""
        return replace(self, temperature=temperature)

    def with_filters(
        self, top_k: int | None = None, top_p: float | None = None, min_p: float | None = None
    ) -> SamplingState:
        """The same requests with these filters in all of them; None leaves a filter as it is."""

        def column(value: float | None, current: Tensor | None, off: float, dtype: torch.dtype) -> Tensor | None:
            if value is None:
                return current
            return None if value == off else torch.full_like(self.temperature, value, dtype=dtype)

        return replace(
            self,
            top_k=column(top_k, self.top_k, 0, torch.int64),
            top_p=column(top_p, self.top_p, 1.0, torch.float64),
            min_p=column(min_p, self.min_p, 0.0, torch.float64),
        )

    def repeat(self, times: int) -> SamplingState:
        """[B * C] rows, C = `times` equal ones for each request, one behind the other."""
        if times == 1:
            return self

        def repeated(values: Tensor | None) -> Tensor | None:
            return None if values is None else values.repeat_interleave(times, 0)

        return SamplingState(
            request_ids=tuple(request_id for request_id in self.request_ids for _ in range(times)),
            num_tokens=self.num_tokens.repeat_interleave(times, 0),
            temperature=self.temperature.repeat_interleave(times, 0),
            top_k=repeated(self.top_k),
            top_p=repeated(self.top_p),
            min_p=repeated(self.min_p),
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
        column = None if value == 1 else torch.full_like(self.temperature, value)
        return replace(self, penalties=replace(self.penalties, repetition=column))

    def commit(self, emitted: Tensor) -> SamplingState:
        """The state after `emitted` [B, N] (padded with -1) was added to the outputs."""
        return replace(
            self,
            num_tokens=self.num_tokens + (emitted >= 0).sum(-1),
            penalties=None if self.penalties is None else self.penalties.extend(emitted),
        )

    def probs(self, logits: Tensor, appended: Tensor, model: str) -> Tensor:
        """Probabilities [B, Q, V] of logits [B, Q, V] whose row i follows the tokens `appended[:, :A - Q + 1 + i]`.

        `appended` [B, A], A >= Q - 1, are draft tokens behind the committed ones, -1 where a row has none; they count
        in the penalties. float32, or float64 for float64 logits. `model` ("target" or "draft") is for error messages.

        Raises:
            InvalidLogitsError: NaN, +inf or no finite entry in a row that belongs to a token (see `check`).
        """
        self.check(logits, appended, model)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.penalties is not None:
            logits = penalise(logits, self.penalties, appended)
        probs = warp(logits, self.temperature, self.top_k, self.top_p, self.min_p)
        # A softmax that overflows (a tiny temperature and huge logits) is NaN as a whole row.
        self._refuse(probs[..., 0].isnan(), appended, model)
        return probs

    def check(self, logits: Tensor, appended: Tensor, model: str) -> None:
        """Refuse rows from which no distribution follows, naming request and position.

        A row behind a -1 in `appended` belongs to no token and may hold anything.
        """
        self._refuse(~logits.amax(-1).isfinite(), appended, model)  # amax propagates NaN; -inf: no entry is finite

    def _refuse(self, bad: Tensor, appended: Tensor, model: str) -> None:
        """Raise for the first of the `bad` rows [B, Q] that belongs to a token."""
        num_before = appended.shape[1] - (bad.shape[1] - 1)
        if bad.any():
            preceded_by_pad = torch.nn.functional.pad(appended < 0, (1, 0))[:, num_before:]
            for row, offset in (bad & ~preceded_by_pad).nonzero().tolist():
                position = int(self.num_tokens[row]) + num_before + offset
                raise InvalidLogitsError(model, self.request_ids[row], position)
