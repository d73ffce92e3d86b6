"""Definitions that engines share, and the same figures from a row of a study's table.csv.

A study's row holds sums over steps (`metrics.summarise`). Engines count drafts, that is steps with a proposal, and most
of them count before a stop or a length limit cuts the output: Σ verified, which live cells have. Replayed cells do not;
their accepted tokens end with the output.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from spectoolkit.serving.counts import Definition

Row = Mapping[str, float]

UNCUT = "counted before an end or a length limit cuts the output"


def verified(row: Row) -> float:
    """Accepted draft tokens before the cut; of replayed cells those that were emitted."""
    nominal = row["acceptance_length_nominal"]
    return row["accepted"] if math.isnan(nominal) else (nominal - 1) * row["steps"]


def accepted_per_draft(row: Row) -> float:
    """Σ verified / Σ steps with a proposal."""
    return _divide(verified(row), row["proposing_steps"])


def length(row: Row) -> float:
    """1 + Σ verified / Σ steps with a proposal."""
    return 1 + accepted_per_draft(row)


def rate(row: Row) -> float:
    """Σ verified / Σ drafted."""
    return _divide(verified(row), row["drafted"])


def slots(row: Row) -> float:
    """Σ verified / Σ K over steps with a proposal."""
    return _divide(accepted_per_draft(row), row["num_draft_tokens"])


def efficiency(row: Row) -> float:
    """Σ (verified + 1) / Σ (K + 1) over steps with a proposal."""
    return _divide(length(row), row["num_draft_tokens"] + 1)


def position(i: int) -> Callable[[Row], float]:
    """Σ accepted_at[i] / Σ steps with a proposal; what is behind an end is not in it."""
    return lambda row: _divide(row.get(f"accepted_at_{i}", math.nan) * row["steps"], row["proposing_steps"])


def column(name: str) -> Callable[[Row], float]:
    """The column as it is."""
    return lambda row: row.get(name, math.nan)


def counted(labels: tuple[str, str, str], num_positions: int, has_bonus: bool = True) -> tuple[Definition, ...]:
    """Length, rate and rates by position of an engine that counts drafts, draft tokens and accepted tokens.

    Args:
        labels: what the engine calls the three.
        num_positions: how many positions there are.
        has_bonus: whether the engine's length counts the target's own token.
    """
    own = "the target's own token included" if has_bonus else "the target's own token left out"
    one = "1 + " if has_bonus else ""
    return (
        Definition(
            key="length",
            label=labels[0],
            words=f"{one}accepted draft tokens / drafts, {own}; a step without a proposal is no draft; {UNCUT}",
            ours=f"length, nominal{'' if has_bonus else ', less 1'}, over steps with a proposal",
            predicted=length if has_bonus else accepted_per_draft,
            offset=float(has_bonus),
        ),
        Definition(
            key="rate",
            label=labels[1],
            words=f"accepted / drafted tokens, those behind a rejection not accepted; {UNCUT}",
            ours="rate of drafts, prefix, before the cut",
            predicted=rate,
        ),
        *(
            Definition(
                key=f"position_{i}",
                label=f"{labels[2]}, {i}",
                words=f"drafts of which at least i tokens were accepted / drafts; {UNCUT}",
                ours="position i, joint, over steps with a proposal",
                predicted=position(i),
            )
            for i in range(1, num_positions + 1)
        ),
    )


def _divide(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else math.nan
