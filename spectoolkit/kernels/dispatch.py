"""Whether a kernel or the reference does a step's verification or a replay's reduction.

With `SPECTOOLKIT_KERNELS=auto`, which holds where nothing is said, kernels run on CUDA tensors where triton is
installed, for the plain rows that most work is made of: logits in float32, float16 or bfloat16, no filter, penalty or
bias, and a rule and law that `verify` and `reduce` know. Everything else, and every batch with something to report
(NaN, a broken contract), goes through the reference, whose errors count. Top-k, top-p and min-p rows do too: they are
sorted there, and a kernel would have to break ties exactly so.

Before a device's first kernel `self_check` compares all of them with the reference there; where they differ or fail,
one warning says so and the process keeps to the reference on this device. It is not asked, and no kernel is compiled,
for work that has none. What was done is noted as it is done, and `provenance` says it.

`off` is the reference everywhere. `interpret` takes kernels for CPU tensors as well, through Triton's interpreter (with
TRITON_INTERPRET=1), which is for tests.

A verdict or a number of a kernel is the reference's up to rounding, as those of another device or another number of
threads are. Like these, kernels are no part of a cell's identity: a folder begun on one machine is finished on another,
and every cell's provenance says what computed it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib.util import find_spec

import torch
from torch import Tensor

from spectoolkit.chains import proposal_probs, proposal_rows
from spectoolkit.datatypes import Chains, Dense, Judged, PointMass, Proposal, Uniforms, Verdict
from spectoolkit.drafters.model import ModelDrafter
from spectoolkit.errors import UsageError
from spectoolkit.functional.conditional import given_coupled, given_match, given_rejection, ratio
from spectoolkit.functional.warp import Penalties
from spectoolkit.interfaces import Verifier
from spectoolkit.provenance import note
from spectoolkit.sampling import SamplingState, are_faults
from spectoolkit.verifiers import Block, Coupled, Rejection
from spectoolkit.verifiers.draft_law import KNOWN_LAWS, draft_prob, foreign, foreign_in_chains, foreign_token

SWITCH = "SPECTOOLKIT_KERNELS"

DTYPES = (torch.float32, torch.float16, torch.bfloat16)

Reduce = Callable[[Tensor, Tensor, Tensor], Tensor]
"""As `functional.conditional.GivenOutput.reduce`."""

Strategy = tuple[ModelDrafter, Reduce]

_NUM_TOGETHER = 1 << 18
"""Numbers per thread that the reference reduces at once on a CPU, for all draft temperatures: 1 MiB of float32,
which stays in its cache, and which the allocator hands out again where it would return more to the system."""

_NEEDS_SUMS: Mapping[object, bool] = {ratio: False, given_rejection: False, given_match: False, given_coupled: True}


def parse_switch() -> str:
    """What SPECTOOLKIT_KERNELS says; a run asks before its first forward.

    Raises:
        UsageError: it is something else than auto, off or interpret.
    """
    switch = os.environ.get(SWITCH, "auto")
    if switch not in ("auto", "off", "interpret"):
        raise UsageError(f"{SWITCH}: expected auto, off or interpret, got {switch!r}")
    return switch


def reason_for_reference(device: torch.device) -> str:
    """Why no kernel runs on this device, "" if they do; the first time there they have to pass its `self_check`.

    Raises:
        UsageError: see `parse_switch`.
    """
    switch = parse_switch()
    if switch == "off":
        return f"reference, because {SWITCH}=off"
    if device.type != "cuda" and switch != "interpret":
        return "reference, because it is no CUDA device"
    if find_spec("triton") is None:
        return "reference, because triton is not installed"
    from spectoolkit.kernels.self_check import failure

    found = failure(device)
    return f"reference, because the self-check failed: {found}" if found else ""


def is_plain(sampling: SamplingState) -> bool:
    """Whether rows are softmax(logits / T) alone."""
    filters = (sampling.params.top_k, sampling.params.top_p, sampling.params.min_p)
    return all(values is None for values in filters) and not _changes_logits(sampling.penalties)


def _changes_logits(penalties: Penalties | None) -> bool:
    if penalties is None:
        return False
    columns = (penalties.repetition, penalties.frequency, penalties.presence, penalties.bias_rows)
    return any(values is not None for values in columns)


def judge(
    verifier: Verifier,
    sampling: SamplingState,
    logits: Tensor,
    proposal: Proposal,
    uniforms: Uniforms,
    *,
    keeps_rows: bool = False,
) -> Judged:
    """The verdict on a proposal from the logits of `chains.score_proposal`; nothing is read back from the device.

    `keeps_rows` asks for the target's rows, which only the reference makes.

    Raises:
        InvalidLogitsError, ContractError: as `SamplingState.probs` and the verifier, on a CPU; elsewhere by way of
            `Judged.again`.
    """
    kernel = None if keeps_rows else kernel_for(verifier, sampling, logits, proposal, uniforms)
    reason = reason_for_reference(logits.device) if kernel else ""
    if kernel is None or reason:
        _note(logits, reason or "reference")
        return _judged_by_reference(verifier, sampling, logits, proposal, uniforms)
    _note(logits, f"{kernel} (self-check passed)")
    verdict, status = _fused_verdict(kernel, sampling, logits, proposal, uniforms)

    def by_reference() -> Verdict:
        _note(logits, "reference")
        judged = _judged_by_reference(verifier, sampling, logits, proposal, uniforms)
        return judged.verdict if judged.faults is None or not judged.faults.any() else judged.again()

    return Judged(verdict, None, status[:, None], by_reference)


def _note(logits: Tensor, what: str) -> None:
    note("kernels", f"{logits.device}: {what}")


def _judged_by_reference(
    verifier: Verifier, sampling: SamplingState, logits: Tensor, proposal: Proposal, uniforms: Uniforms
) -> Judged:
    if logits.device.type == "cpu":  # no rule, whoever wrote it, is given a row of NaN
        target_probs = proposal_probs(sampling, logits, proposal)
        verdict = verifier.verify(target_probs, proposal, uniforms)
        return Judged(verdict, target_probs, None, lambda: verdict)
    target_probs, marks = proposal_rows(sampling, logits, proposal)
    verdict, faults = verifier.verify(target_probs, proposal, uniforms), are_faults(marks)
    not_drawn = None
    if verifier.keeps_law:
        if isinstance(proposal.law, Chains):
            not_drawn = foreign_in_chains(proposal.law, proposal)
        elif isinstance(proposal.law, KNOWN_LAWS):
            not_drawn = foreign(draft_prob(proposal), proposal)

    def again() -> Verdict:
        if faults.any():
            sampling.repeat(proposal.num_chains or 1).refuse(faults, proposal.tokens.flatten(0, -2), "target")
        if not_drawn is not None and not_drawn.any():
            raise foreign_token()
        return verdict

    wrong = faults if proposal.num_chains is None else faults.unflatten(0, (-1, proposal.num_chains))
    wrong = wrong if not_drawn is None else wrong | torch.nn.functional.pad(not_drawn, (0, 1))
    return Judged(verdict, target_probs, wrong, again)


def kernel_for(
    verifier: Verifier, sampling: SamplingState, logits: Tensor, proposal: Proposal, uniforms: Uniforms
) -> str | None:
    """The kernel of `verify` that knows these rows, this rule and this law; None if none does."""
    if proposal.num_chains is not None or not is_plain(sampling) or logits.dtype not in DTYPES:
        return None
    law, rule = proposal.law, type(verifier)  # a rule made from one of these may do anything
    if rule is Coupled and uniforms.shared is not None:
        return "coupled"
    if rule in (Rejection, Block) and isinstance(law, (PointMass, Dense)) and _is_float32(law):
        return "rejection" if rule is Rejection else "block"
    return None


def _is_float32(law: PointMass | Dense) -> bool:
    return isinstance(law, PointMass) or law.probs.dtype == torch.float32


def _fused_verdict(
    kernel: str, sampling: SamplingState, logits: Tensor, proposal: Proposal, uniforms: Uniforms
) -> tuple[Verdict, Tensor]:
    """The kernel's verdict and its status [B] (`verify`), 0 where it holds."""
    from spectoolkit.kernels import verify

    arguments = (logits, sampling.params.temperature, proposal.tokens, proposal.lengths)
    if kernel == "coupled":
        assert uniforms.shared is not None
        return verify.coupled(*arguments, uniforms.shared)
    assert isinstance(proposal.law, (PointMass, Dense))
    return (verify.rejection if kernel == "rejection" else verify.block)(*arguments, proposal.law, uniforms)


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
            _note(draft_logits, "a replay's reduction (self-check passed)")
        if reason:
            _note(draft_logits, reason)
        if rest.keys() - (known.keys() if reason else ()):
            _note(draft_logits, "reference")
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

        temperatures = [drafter.draft_sampling(self._sampling).temperature for drafter, _ in strategies.values()]
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
