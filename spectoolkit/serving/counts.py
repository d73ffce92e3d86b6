"""Acceptance as an engine reports it: ratios of two sums, each known exactly or up to the rounding of the log."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from spectoolkit import metrics
from spectoolkit.errors import UsageError

MIN_READINGS = 10  # fewer give no interval
_EPSILON = 1e-9  # of comparisons with a rounded decimal
_MAX_CANDIDATES = 1_000_000  # numbers of drafts, times positions, that are tried one by one
_MAX_DIGITS = 15  # such counts are floats exactly


@dataclass(frozen=True)
class Bounded:
    """A number between `low` and `high`, both included; exact where they are equal."""

    value: float
    low: float
    high: float

    @property
    def is_exact(self) -> bool:
        """Whether nothing about it was rounded away."""
        return self.low == self.high


def exact(value: float) -> Bounded:
    """A number that was counted."""
    return Bounded(value, value, value)


def rounded(value: float, half: float, weight: float = 1.0) -> Bounded:
    """`weight` times a number that was printed as `value`, rounded by at most `half`."""
    return Bounded(value * weight, (value - half) * weight, (value + half) * weight)


@dataclass(frozen=True)
class Ratio:
    """What one reading adds to a figure: both sides of the fraction."""

    numerator: Bounded
    denominator: Bounded


@dataclass(frozen=True)
class Definition:
    """One figure of an engine.

    Attributes:
        key: which figure; `Reading.ratios` are named by it.
        label: what the engine calls it.
        words: what is divided by what.
        ours: which definition of `studies.accounting` it is, with what sets it apart.
        predicted: the same figure of a row of a study's table.csv; NaN where it does not follow from the row.
        offset: added to the ratio: 1 where the target's own token is counted.
        obtained: says how it was obtained where neither "counts" nor "rounded ratios" would be true.
    """

    key: str
    label: str
    words: str
    ours: str
    predicted: Callable[[Mapping[str, float]], float]
    offset: float = 0.0
    obtained: str | None = None


@dataclass(frozen=True)
class Reading:
    """What was counted in one interval of a log, by one request, or between two scrapes.

    Attributes:
        ratios: definition's key -> what the reading adds to it.
        time: its timestamp as it stands in the log, or None.
    """

    ratios: Mapping[str, Ratio]
    time: str | None = None


@dataclass(frozen=True)
class Served:
    """What a log or a metrics dump says of acceptance.

    Attributes:
        engine: name and kind of source.
        unit: what a reading is, in the plural: "log intervals", "requests", "scrapes".
        definitions: of its figures.
        readings: in the order of the source.
        num_draft_tokens: K where it is known and every step drafted at most K tokens in a chain, else None.
        notes: sentences that a reader of the figures needs.
    """

    engine: str
    unit: str
    definitions: tuple[Definition, ...]
    readings: tuple[Reading, ...]
    num_draft_tokens: int | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Figure:
    """A definition pooled over all readings: offset + Σ numerators / Σ denominators.

    Attributes:
        definition: of the figure.
        value: NaN where there is nothing to divide by.
        low, high: between which rounding leaves the value; equal to it where everything was counted.
        interval: percentile bootstrap over readings; NaN with fewer than `MIN_READINGS`.
        obtained: "counts", "rounded ratios" or what the definition says.
        numerator, denominator: the two sums.
        num_readings: that have the figure.
    """

    definition: Definition
    value: float
    low: float
    high: float
    interval: metrics.Interval
    obtained: str
    numerator: float
    denominator: float
    num_readings: int


def pooled(served: Served) -> list[Figure]:
    """Every figure of `served`, in the order of its definitions; those that no reading has are left out."""
    figures = []
    for definition in served.definitions:
        ratios = [reading.ratios[definition.key] for reading in served.readings if definition.key in reading.ratios]
        if ratios:
            figures.append(_pool(definition, ratios))
    return figures


def _pool(definition: Definition, ratios: Sequence[Ratio]) -> Figure:
    numerators, denominators = [r.numerator for r in ratios], [r.denominator for r in ratios]
    above, below = sum(n.value for n in numerators), sum(d.value for d in denominators)
    interval = metrics.Interval(math.nan, math.nan)
    if len(ratios) >= MIN_READINGS:
        names = [str(i) for i in range(len(ratios))]
        _, found = metrics.ratio_interval([n.value for n in numerators], [d.value for d in denominators], names)
        interval = metrics.Interval(definition.offset + found.low, definition.offset + found.high)
    is_counted = all(side.is_exact for side in (*numerators, *denominators))
    return Figure(
        definition=definition,
        value=definition.offset + _divide(above, below),
        low=definition.offset + _divide(sum(n.low for n in numerators), sum(d.high for d in denominators)),
        high=definition.offset + _divide(sum(n.high for n in numerators), sum(d.low for d in denominators)),
        interval=interval,
        obtained=definition.obtained or ("counts" if is_counted else "rounded ratios"),
        numerator=above,
        denominator=below,
        num_readings=len(ratios),
    )


def count(digits: str, line: int) -> int:
    """The count that stands as `digits` in the log's line of that number.

    Raises:
        UsageError: more digits than any server counts to.
    """
    if len(digits) > _MAX_DIGITS:
        raise UsageError(f"log, line {line}: expected counts of at most {_MAX_DIGITS} digits, got {digits[:40]}")
    return int(digits)


def check_part(part: float, whole: float, words: tuple[str, str], where: str) -> None:
    """Refuse counts of which the part is larger than the whole.

    Args:
        part, whole: counts.
        words: what they count.
        where: source and line.

    Raises:
        UsageError: as said.
    """
    if part > whole:
        raise UsageError(
            f"{where}: expected at most as many {words[0]} as {words[1]}, got {part:.0f} {words[0]}, "
            f"{whole:.0f} {words[1]}"
        )


def counted_ratios(drafts: Bounded | None, drafted: float, accepted: float, at: Sequence[Ratio]) -> dict[str, Ratio]:
    """The ratios of `definitions.counted`; without `drafts` only the rate is known."""
    ratios = {"rate": Ratio(exact(accepted), exact(drafted))}
    if drafts is not None:
        ratios["length"] = Ratio(exact(accepted), drafts)
    return ratios | {f"position_{i}": ratio for i, ratio in enumerate(at, 1)}


def recover_drafts(
    accepted: int,
    drafted: int,
    mean: float,
    rates: Sequence[float],
    num_draft_tokens: int | None = None,
    where: str = "log",
) -> tuple[Bounded, list[Ratio]]:
    """How many drafts were verified, from figures that were divided by it and rounded.

    A number N of drafts is possible where accepted / N rounds to `mean` (two decimals) and there are whole numbers
    n_i = N rate_i, up to the rounding of the rates (three decimals), that can add up to `accepted`; drafts of at most
    K tokens need N >= drafted / K. Often one N is left. Otherwise the value is drafted / K if that is possible (all
    drafts full), else the middle one of the possible ones. With more than a million candidates, times positions, whole
    numbers are not looked for: N lies where the mean and the sum of the rates allow it.

    Args:
        accepted, drafted: tokens.
        mean: accepted tokens per draft, without the target's own token.
        rates: share of drafts of which at least i tokens were accepted; may be empty.
        num_draft_tokens: K; None where drafts may be longer than there are rates.
        where: source and line, for the error.

    Returns:
        The number of drafts, and per position what it adds to the rate there.

    Raises:
        UsageError: no number of drafts fits.
    """
    least = max(1, -(-drafted // num_draft_tokens)) if num_draft_tokens else 1
    if accepted == 0:
        low, high = least, max(least, drafted)  # a draft has a token
    else:
        low = max(least, math.floor(accepted / (mean + 0.005)))
        high = math.ceil(accepted / (mean - 0.005)) if mean > 0.005 else max(least, drafted)
    full = drafted / num_draft_tokens if num_draft_tokens else math.nan
    misfit = UsageError(
        f"{where}: expected figures that fit together, got {accepted} accepted of {drafted} draft tokens, "
        f"{mean:.2f} accepted per draft and the rates by position {', '.join(f'{rate:.3f}' for rate in rates)}"
    )
    if (high - low + 1) * max(1, len(rates)) > _MAX_CANDIDATES:
        low, high = _where_rates_add_up(low, high, accepted, rates)
        value = full if low <= full <= high and full.is_integer() else (low + high) // 2
        if low > high or abs(accepted / value - mean) > 0.005 + _EPSILON or max(rates, default=0.0) > 1:
            raise misfit
        at = [Ratio(rounded(rate, 0.0005, value), exact(value)) for rate in rates]
        return Bounded(float(value), float(low), float(high)), at
    possible = np.arange(low, high + 1)
    fits = np.abs(accepted / possible - mean) <= 0.005 + _EPSILON
    fewest = np.ceil(np.outer(possible, np.asarray(rates) - 0.0005) - _EPSILON).clip(min=0)
    most = np.floor(np.outer(possible, np.asarray(rates) + 0.0005) + _EPSILON).clip(max=possible[:, None])
    if len(rates):
        fits &= (fewest <= most).all(1) & (fewest.sum(1) <= accepted) & (accepted <= most.sum(1))
    possible = possible[fits]
    if not len(possible):
        raise misfit
    value = float(full if full in possible else possible[len(possible) // 2])
    if len(possible) > 1:
        at = [Ratio(rounded(rate, 0.0005, value), exact(value)) for rate in rates]
        return Bounded(value, float(possible[0]), float(possible[-1])), at
    at = [
        Ratio(Bounded(float(round(rate * value)), float(down), float(up)), exact(value))
        for rate, down, up in zip(rates, fewest[fits][0], most[fits][0], strict=True)
    ]
    return exact(value), at


def _where_rates_add_up(low: int, high: int, accepted: int, rates: Sequence[float]) -> tuple[int, int]:
    """The part of low..high in which N Σ rates is `accepted`, up to the rounding of the rates."""
    least, most = sum(max(0.0, rate - 0.0005) for rate in rates), sum(rate + 0.0005 for rate in rates)
    if rates:
        low = max(low, math.floor(accepted / most))
    return low, min(high, math.ceil(accepted / least)) if least else high


def _divide(numerator: float, denominator: float) -> float:
    return float(numerator / denominator) if denominator else math.nan
