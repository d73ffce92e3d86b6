"""What a replay asks of target and draft rows, by kernels or by the reference (`switch` says where which runs)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from spectoolkit.drafters.model import ModelDrafter
from spectoolkit.functional.conditional import given_coupled, given_match, given_rejection, ratio
from spectoolkit.kernels.switch import DTYPES, is_plain, note_kernels, reason_for_reference
from spectoolkit.sampling import SamplingState

Reduce = Callable[[Tensor, Tensor, Tensor], Tensor]
"""As `functional.conditional.GivenOutput.reduce`."""

Strategy = tuple[ModelDrafter, Reduce]

_NUM_TOGETHER = 1 << 18
"""Numbers per thread that the reference reduces at once on a CPU, for all draft temperatures: 1 MiB of float32,
which stays in its cache, and which the allocator hands out again where it would return more to the system."""

_NEEDS_SUMS: Mapping[object, bool] = {ratio: False, given_rejection: False, given_match: False, given_coupled: True}


class Reducer:
    """Some target rows of a replay, against which draft rows are reduced to what verifiers ask of them.

    `tokens` [B, Q] are the output's at these rows, `appended` as for `SamplingState.probs`. The target's probabilities
    are made when a strategy asks for them.

    Raises:
        InvalidLogitsError: as `SamplingState.probs`.
    """

    def __init__(self, sampling: SamplingState, target_logits: Tensor, tokens: Tensor, appended: Tensor) -> None:
        self._sampling, self._target_logits = sampling, target_logits
        self._tokens, self._appended = tokens, appended
        self._target_probs: Tensor | None = None

    def reduce(self, strategies: Mapping[int, Strategy], draft_logits: Tensor) -> dict[int, Tensor]:
        """What each strategy's `GivenOutput.reduce` says [B, Q] of the target's rows and its own.

        Raises:
            InvalidLogitsError: as `SamplingState.probs`.
        """
        known = {i: s for i, s in strategies.items() if self._has_kernel(*s, draft_logits)}
        reason = reason_for_reference(draft_logits.device) if known else ""
        results = (self._fused(known, draft_logits) if known and not reason else None) or {}
        rest = {i: s for i, s in strategies.items() if i not in results}
        if results:
            note_kernels(draft_logits.device, "a replay's reduction (self-check passed)")
        if reason:
            note_kernels(draft_logits.device, reason)
        if rest.keys() - (known.keys() if reason else ()):
            note_kernels(draft_logits.device, "reference")
        return results | self._by_reference(rest, draft_logits) if rest else results

    def _by_reference(self, strategies: Mapping[int, Strategy], draft_logits: Tensor) -> dict[int, Tensor]:
        num_rows, num_positions = self._tokens.shape
        width = _num_positions_together(num_rows, draft_logits)
        parts = [
            self._of_positions(strategies, draft_logits, begin, min(begin + width, num_positions))
            for begin in range(0, num_positions, width)
        ]
        return {i: torch.cat([part[i] for part in parts], dim=1) for i in strategies}

    def _of_positions(
        self, strategies: Mapping[int, Strategy], draft_logits: Tensor, begin: int, end: int
    ) -> dict[int, Tensor]:
        target_probs, tokens = self._probs()[:, begin:end], self._tokens[:, begin:end]
        appended = self._appended[:, : self._appended.shape[1] - self._tokens.shape[1] + end]
        logits = draft_logits[:, begin:end]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))  # once for all of them
        results: dict[int, Tensor] = {}
        for i, (drafter, reduce) in strategies.items():
            draft_probs = drafter.law_probs(drafter.draft_probs(logits, self._sampling, appended))
            results[i] = reduce(target_probs, draft_probs, tokens)
        return results

    def _probs(self) -> Tensor:
        if self._target_probs is None:
            self._target_probs = self._sampling.probs(self._target_logits, self._appended, "target")
        return self._target_probs

    def _has_kernel(self, drafter: ModelDrafter, reduce: Reduce, draft_logits: Tensor) -> bool:
        own = type(drafter)  # a drafter made from this one may draw from anything
        is_softmax = own.draft_probs is ModelDrafter.draft_probs and own.law_probs is ModelDrafter.law_probs
        has_dtypes = self._target_logits.dtype in DTYPES and draft_logits.dtype in DTYPES
        is_known = reduce in _NEEDS_SUMS and is_softmax and has_dtypes and is_plain(self._sampling)
        return is_known and is_plain(drafter.draft_sampling(self._sampling))

    def _fused(self, strategies: Mapping[int, Strategy], draft_logits: Tensor) -> dict[int, Tensor] | None:
        """The kernels' numbers; None where a row that belongs to a token gives no distribution."""
        from spectoolkit.kernels.reduce import reduce_rows

        temperatures = [drafter.draft_sampling(self._sampling).params.temperature for drafter, _ in strategies.values()]
        num_rows = self._tokens.shape[1]
        tokens = self._tokens.flatten()
        found = reduce_rows(
            self._target_logits.flatten(0, 1),
            self._sampling.params.temperature.repeat_interleave(num_rows),
            draft_logits.flatten(0, 1),
            torch.stack(temperatures, dim=-1).repeat_interleave(num_rows, 0),
            tokens,
            sums=any(_NEEDS_SUMS[reduce] for _, reduce in strategies.values()),
        )
        before = self._appended.shape[1] - (num_rows - 1)
        belongs = torch.nn.functional.pad(self._appended >= 0, (1, 0), value=True)[:, before:].flatten()
        if (belongs[:, None] & ~found.is_valid).any():
            return None
        results: dict[int, Tensor] = {}
        for column, (i, (_, reduce)) in enumerate(strategies.items()):
            p, q = found.target_prob, found.draft_prob[:, column]
            if reduce is given_match:
                number = q
            elif reduce is given_coupled:
                assert found.coupled is not None
                number = found.coupled[:, column]
            else:
                number = torch.where(p > 0, q / p, q)
                number = number.clamp(max=1) if reduce is given_rejection else number
            results[i] = torch.where(tokens >= 0, number, 0).view_as(self._tokens)
        return results


def _num_positions_together(num_rows: int, logits: Tensor) -> int:
    """Positions of a replay [num_rows, Q, V] that the reference reduces at once: all of them but on a CPU."""
    if logits.device.type != "cpu":
        return logits.shape[1]
    return max(1, _NUM_TOGETHER * torch.get_num_threads() // (num_rows * logits.shape[-1]))
