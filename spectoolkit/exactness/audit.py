"""What is claimed of a pair, what was found, and what follows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spectoolkit.exactness.proof import Proof
from spectoolkit.interfaces import Drafter, Verifier

CONTROL, LOSSLESS, LOSSY = "wrong on purpose", "lossless", "lossy"
PROVEN, HOLDS, CAUGHT, NOT_CAUGHT, OPEN, FAILS = "proven", "holds", "caught", "right here", "not shown", "FAILS"


@dataclass(frozen=True)
class Finding:
    """One pair.

    Attributes:
        drafter, verifier: their names.
        control: name of the side that is wrong on purpose, or of both; "" for an ordinary pair.
        claim: `CONTROL`, `LOSSLESS` or `LOSSY`.
        proof: by enumeration on toys.
        p_value: of its sampled outputs; None if none were sampled.
        smallest_detectable: total variation that this test would have detected; None likewise.
        level: p-values below it reject.
    """

    drafter: str
    verifier: str
    control: str
    claim: str
    proof: Proof
    p_value: float | None
    smallest_detectable: float | None
    level: float

    @property
    def is_rejected(self) -> bool:
        """Whether one of the two found another law than the target's."""
        is_off = self.proof.one_step is not None and not self.proof.is_exact
        return is_off or (self.p_value is not None and self.p_value < self.level)

    @property
    def verdict(self) -> str:
        """A word; for a lossy rule also its largest distance on the toys."""
        if self.claim == CONTROL:
            return CAUGHT if self.is_rejected else NOT_CAUGHT
        if self.claim == LOSSY:
            steps = [value for value in (self.proof.one_step, self.proof.two_steps) if value is not None]
            if not steps:
                return "lossy"
            return "lossy: exact here" if self.proof.is_exact else f"lossy: distance {max(steps):.3f}"
        if self.is_rejected:
            return FAILS
        if self.proof.is_exact:
            return PROVEN
        return OPEN if self.p_value is None else HOLDS


def claim_of(drafter: Drafter, verifier: Verifier) -> str:
    """What is claimed of a pair; a side that is wrong on purpose says `is_negative_control = True`."""
    if _is_control(drafter) or _is_control(verifier):
        return CONTROL
    return LOSSLESS if verifier.is_lossless else LOSSY


def control_of(drafter: Drafter, verifier: Verifier, drafter_name: str, verifier_name: str) -> str:
    """Name of what is wrong on purpose in a pair, "" if nothing is."""
    wrong = [(drafter, f"drafter={drafter_name}"), (verifier, f"verifier={verifier_name}")]
    return " ".join(name for side, name in wrong if _is_control(side))


def _is_control(side: object) -> bool:
    return bool(getattr(side, "is_negative_control", False))


def failures(findings: Sequence[Finding], *, judges_controls: bool = True) -> list[str]:
    """What contradicts its claim: a lossless pair with another law, and a control that no pair shows to be wrong.

    With a drafter that never proposes, or whose law happens to suit it, a wrong rule may be right; so a control has to
    be caught in one of its pairs; a pair of two controls counts for both, since some faults take two. Without
    `judges_controls` that is not asked.
    """
    found = [
        f"{one.drafter} + {one.verifier} claims to be lossless: total variation {_number(one.proof.one_step)} after "
        f"one step, {_number(one.proof.two_steps)} after two, p-value {_number(one.p_value)}"
        for one in findings
        if one.verdict == FAILS
    ]
    controls = dict.fromkeys(side for one in findings for side in one.control.split() if judges_controls)
    for control in controls:
        pairs = [one for one in findings if control in one.control.split()]
        if all(one.verdict == NOT_CAUGHT for one in pairs):
            with_ = ", ".join(f"{one.drafter} + {one.verifier}" for one in pairs)
            found.append(f"{control} is wrong on purpose and was not caught ({with_})")
    return found


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3g}"
