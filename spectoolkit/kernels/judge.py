"""The verdict on a step from its logits, by a kernel or by the reference (`switch` says where which runs)."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from spectoolkit.chains import proposal_probs, proposal_rows
from spectoolkit.datatypes import Chains, Dense, Judged, PointMass, Proposal, Uniforms, Verdict
from spectoolkit.interfaces import Verifier
from spectoolkit.kernels.switch import DTYPES, is_plain, note_kernels, reason_for_reference
from spectoolkit.sampling import SamplingState, are_faults
from spectoolkit.verifiers import Block, Coupled, Rejection
from spectoolkit.verifiers.draft_law import KNOWN_LAWS, draft_prob, foreign, foreign_in_chains, foreign_token


@dataclass(frozen=True)
class Judge:
    """Gives the verdicts of a run.

    Attributes:
        verifier: the rule.
        device: the target's; the first verdict for which there is a kernel asks whether kernels run there.
        keeps_rows: whether a verdict comes with the target's rows, which only the reference makes.
    """

    verifier: Verifier
    device: torch.device
    keeps_rows: bool = False
    _noted: set[str] = field(default_factory=set, init=False, repr=False, compare=False)

    def __call__(self, sampling: SamplingState, logits: Tensor, proposal: Proposal, uniforms: Uniforms) -> Judged:
        """The verdict on a proposal from the logits of `chains.score_proposal`; nothing is read back from the device.

        Raises:
            InvalidLogitsError, ContractError: as `SamplingState.probs` and the verifier, on a CPU; elsewhere by way of
                `Judged.again`.
        """
        arguments = (self.verifier, sampling, logits, proposal, uniforms)
        kernel = None if self.keeps_rows else kernel_for(*arguments)
        reason = self._reason_for_reference if kernel else "reference"
        if kernel is None or reason:
            self._note(reason)
            return _judged_by_reference(*arguments)
        self._note(f"{kernel} (self-check passed)")
        verdict, status = _fused_verdict(kernel, sampling, logits, proposal, uniforms)

        def by_reference() -> Verdict:
            self._note("reference")
            judged = _judged_by_reference(*arguments)
            return judged.verdict if judged.faults is None or not judged.faults.any() else judged.again()

        return Judged(verdict, None, status[:, None], by_reference)

    @cached_property
    def _reason_for_reference(self) -> str:
        return reason_for_reference(self.device)

    def _note(self, what: str) -> None:
        if what not in self._noted:
            self._noted.add(what)
            note_kernels(self.device, what)


def _judged_by_reference(
    verifier: Verifier, sampling: SamplingState, logits: Tensor, proposal: Proposal, uniforms: Uniforms
) -> Judged:
    if logits.is_cpu:  # no rule, whoever wrote it, is given a row of NaN
        target_probs = proposal_probs(sampling, logits, proposal)
        verdict = verifier.verify(target_probs, proposal, uniforms)
        return Judged(verdict, target_probs, None, lambda: verdict)
    target_probs, marks = proposal_rows(sampling, logits, proposal)
    faults = are_faults(marks)
    verdict = verifier.verify(target_probs, proposal, uniforms)
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
    """The kernel that knows these rows, this rule and this law; None if none does."""
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
    """The kernel's verdict and its status [B] (`verdict`), 0 where it holds."""
    from spectoolkit.kernels.coupled import coupled
    from spectoolkit.kernels.rejection_and_block import block, rejection

    arguments = (logits, sampling.params.temperature, proposal.tokens, proposal.lengths)
    if kernel == "coupled":
        assert uniforms.shared is not None
        return coupled(*arguments, uniforms.shared)
    assert isinstance(proposal.law, (PointMass, Dense))
    return (rejection if kernel == "rejection" else block)(*arguments, proposal.law, uniforms)
