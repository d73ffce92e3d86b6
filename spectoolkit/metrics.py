"""Request rows (`records.request_row`) to numbers with intervals. Pure functions; the denominators are in `summarise`.

Every metric is a ratio of two sums over requests, so the rows may come from either engine: counts of a live run or
expected, non-integer counts of a replay.

Intervals are percentile cluster bootstraps (Efron & Tibshirani, An Introduction to the Bootstrap, 1993, chapter 13).
The steps and requests of one prompt are dependent, so whole prompts (`cluster`) are drawn with replacement and every
metric is recomputed from the drawn prompts' sums. The draws depend on `seed` and on the number of prompts only: cells
of one study that hold the same prompts share their resamples. With few prompts (below about 20) percentile intervals
are too narrow; with one prompt there is none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from spectoolkit.errors import UsageError

COUNTS = ("requests", "clusters", "steps", "proposing_steps", "drafted", "accepted", "emitted", "truncated")

_SUMS = ("steps", "proposing_steps", "drafted", "verified", "accepted", "emitted", "judged_alone", "truncated")
_POSITIONS = ("accepted_at", "reached_at")
_TIMES = ("draft_s", "target_s", "verify_s")
_COLUMNS = ("cluster", "num_draft_tokens", "draft_bytes_per_token", *_SUMS, *_POSITIONS, *_TIMES)
_BLOCK = 256  # resamples held in memory at once


class Interval(NamedTuple):
    """A confidence interval; both ends are NaN where there is none."""

    low: float
    high: float


class Difference(NamedTuple):
    """A paired difference a − b with its interval."""

    estimate: float
    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        """Whether 0 lies outside the interval; False where there is none."""
        return self.low > 0 or self.high < 0


class Resamples(NamedTuple):
    """A metric of several cells over the same drawn prompts.

    Attributes:
        estimates: [cells] from all prompts.
        samples: [num_resamples, cells]; a row holds the cells' values over one draw of prompts, so that whatever is
            computed from a row is paired by prompt. NaN where a denominator is zero, and with fewer than two prompts.
    """

    estimates: np.ndarray
    samples: np.ndarray


class _Ratio(NamedTuple):
    """A metric as Σ numerator / Σ denominator over requests: one number per request in both."""

    numerator: np.ndarray
    denominator: np.ndarray


def summarise(rows: pd.DataFrame) -> dict[str, float]:
    """Every metric of `rows`; Σ runs over requests, K is `num_draft_tokens`.

    | name | definition |
    |---|---|
    | acceptance_length | Σ emitted / Σ steps, tokens per target forward (pooled) |
    | acceptance_length_request_mean | mean of emitted / steps over the requests with at least one step |
    | acceptance_length_nominal | 1 + Σ verified / Σ steps: the serving-log figure, blind to EOS and length limits |
    | acceptance_length_proposing | Σ (emitted − steps without a proposal) / Σ proposing_steps: a step without a \
proposal emits exactly one token |
    | acceptance_rate | Σ accepted / Σ drafted, accepted prefixes only |
    | acceptance_rate_unmasked | Σ judged_alone / Σ drafted, each draft token judged whatever came before it |
    | acceptance_rate_slots | Σ accepted / Σ K·steps: a step without a proposal counts as K rejections |
    | accepted_at_i | Σ accepted_at[i] / Σ steps, i = 1..K: at least i drafts accepted and emitted (joint) |
    | accepted_at_i_conditional | Σ accepted_at[i] / Σ reached_at[i]: position i drafted, i−1 accepted, block not cut |
    | system_efficiency | Σ emitted / Σ (K+1)·steps |
    | tokens_per_second | Σ emitted / Σ (draft_s + target_s + verify_s): one machine's wall clock, a noisy figure |
    | draft_bytes_per_token | largest over requests, bytes kept per draft token between drafting and verification |
    | requests, clusters | rows and distinct prompts |
    | steps, proposing_steps, drafted, accepted, emitted, truncated | sums; truncated: steps whose block was cut |

    Requests of different K are allowed: a position beyond a request's K counts as not accepted and not reached.
    A zero denominator gives NaN (see `undefined`). Raises `UsageError` when a column is missing.
    """
    check_rows(rows)
    values = {name: _divide(r.numerator.sum(), r.denominator.sum()) for name, r in _ratios(rows).items()}
    values["draft_bytes_per_token"] = float(_column(rows, "draft_bytes_per_token").max()) if len(rows) else math.nan
    counts = {"requests": float(len(rows)), "clusters": float(len(set(rows["cluster"])))}
    return values | {name: counts[name] if name in counts else float(_column(rows, name).sum()) for name in COUNTS}


def undefined(summary: Mapping[str, float]) -> tuple[str, ...]:
    """Names of the metrics of `summary` whose denominator was zero (or that the engine does not measure): the NaNs."""
    return tuple(name for name, value in summary.items() if math.isnan(value))


def bootstrap(
    rows: pd.DataFrame,
    metrics: Sequence[str],
    num_resamples: int = 2000,
    confidence: float = 0.95,
    seed: int = 0,
) -> dict[str, Interval]:
    """Percentile cluster bootstrap of `metrics` (any ratio of `summarise`; counts have no interval).

    A resample draws as many prompts as there are, with replacement, and takes all their requests; the interval is the
    (1 ± confidence)/2 quantiles of the metric over resamples. Resamples in which a metric's denominator is zero say
    nothing about it and are left out. NaN with fewer than two prompts or where the metric itself is NaN.
    Equal `seed` and prompts give equal resamples, in every cell.

    Raises:
        UsageError: an unknown metric, a missing column, or a parameter out of range.
    """
    check_rows(rows)
    ratios = _select(_ratios(rows), metrics)
    codes, clusters = pd.factorize(rows["cluster"], sort=True)
    estimates = [_divide(r.numerator.sum(), r.denominator.sum()) for r in ratios.values()]
    samples = _resample(list(ratios.values()), codes, len(clusters), num_resamples, seed)
    return {
        name: interval(samples[:, i], confidence) if math.isfinite(estimates[i]) else Interval(math.nan, math.nan)
        for i, name in enumerate(ratios)
    }


def ratio_interval(
    numerators: Sequence[float],
    denominators: Sequence[float],
    clusters: Sequence[str],
    num_resamples: int = 2000,
    confidence: float = 0.95,
    seed: int = 0,
) -> tuple[float, Interval]:
    """Σ numerators / Σ denominators of any sums per request, with the interval of `bootstrap`.

    For what is measured per token and is no metric of a request row, such as a distance or an overlap.
    """
    estimate, samples = resample_ratio(numerators, denominators, clusters, num_resamples, seed)
    return estimate, interval(samples, confidence)


def resample_ratio(
    numerators: Sequence[float],
    denominators: Sequence[float],
    clusters: Sequence[str],
    num_resamples: int = 2000,
    seed: int = 0,
) -> tuple[float, np.ndarray]:
    """Σ numerators / Σ denominators, and its values [num_resamples] over the draws of prompts that `resample` makes."""
    ratio = _Ratio(np.asarray(numerators, dtype=np.float64), np.asarray(denominators, dtype=np.float64))
    codes, names = pd.factorize(np.asarray(clusters), sort=True)
    samples = _resample([ratio], codes, len(names), num_resamples, seed)[:, 0]
    return _divide(ratio.numerator.sum(), ratio.denominator.sum()), samples


def paired_difference(
    rows_a: pd.DataFrame,
    rows_b: pd.DataFrame,
    metric: str,
    num_resamples: int = 2000,
    confidence: float = 0.95,
    seed: int = 0,
) -> Difference:
    """metric(a) − metric(b) with a percentile cluster bootstrap in which both sides keep the same drawn prompts.

    What makes a prompt easy is easy for both sides and cancels, so the interval is narrower than one from two
    independent bootstraps.

    Raises:
        UsageError: the two hold different prompts, or as for `bootstrap`.
    """
    (estimate_a, estimate_b), samples = resample([rows_a, rows_b], metric, num_resamples, seed)
    return difference(estimate_a - estimate_b, samples[:, 0] - samples[:, 1], confidence)


def resample(cells: Sequence[pd.DataFrame], metric: str, num_resamples: int = 2000, seed: int = 0) -> Resamples:
    """`metric` of every cell's rows over the same draws of prompts: the bootstrap behind every paired interval.

    For what is not a difference of two cells: which of many is best, or a share of a difference.

    Raises:
        UsageError: cells that hold different prompts, or as for `bootstrap`.
    """
    estimates, samples = [], []
    expected: set[object] | None = None
    for rows in cells:
        check_rows(rows)
        found = set(rows["cluster"])
        expected = found if expected is None else expected
        if found != expected:
            odd = sorted(map(str, found ^ expected))
            raise UsageError(
                f"{metric}, paired by prompt: expected the same clusters in all cells, got {len(expected)} and "
                f"{len(found)}; {len(odd)} on one side only, e.g. {odd[:3]}"
            )
        ratio = _select(_ratios(rows), [metric])[metric]
        codes, clusters = pd.factorize(rows["cluster"], sort=True)
        samples.append(_resample([ratio], codes, len(clusters), num_resamples, seed)[:, 0])
        estimates.append(_divide(ratio.numerator.sum(), ratio.denominator.sum()))
    return Resamples(np.array(estimates), np.stack(samples, axis=1))


def difference(estimate: float, samples: np.ndarray, confidence: float = 0.95) -> Difference:
    """`estimate` with the interval of its resamples; NaN throughout where the estimate is undefined."""
    found = interval(samples, confidence)
    if not math.isfinite(estimate):
        return Difference(math.nan, math.nan, math.nan)
    return Difference(float(estimate), *found)


def with_ends(name: str, value: Sequence[float]) -> dict[str, float]:
    """Columns `name`, `name_low` and `name_high` of a (value, low, high)."""
    return dict(zip((name, f"{name}_low", f"{name}_high"), value, strict=True))


def interval(samples: np.ndarray, confidence: float = 0.95) -> Interval:
    """The (1 ± confidence)/2 quantiles of the samples that are defined; NaN where none is.

    Raises:
        UsageError: `confidence` outside (0, 1).
    """
    if not 0 < confidence < 1:
        raise UsageError(f"confidence: expected a number in (0, 1), got {confidence!r}")
    defined = samples[np.isfinite(samples)]
    if not len(defined):
        return Interval(math.nan, math.nan)
    low, high = np.quantile(defined, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(float(low), float(high))


def check_rows(rows: pd.DataFrame) -> None:
    """Refuse what is not a table of request rows (`records`).

    Raises:
        UsageError: missing columns or clusters.
    """
    missing = [name for name in _COLUMNS if name not in rows.columns]
    if missing:
        raise UsageError(f"rows: expected the columns of request rows, {', '.join(missing)} missing")
    if bool(pd.isna(rows["cluster"].to_numpy()).any()):
        raise UsageError("rows: expected a cluster for every request, got a missing value")


def _select(ratios: Mapping[str, _Ratio], metrics: Sequence[str]) -> dict[str, _Ratio]:
    unknown = [name for name in metrics if name not in ratios]
    if unknown:
        raise UsageError(f"metrics: expected some of {', '.join(ratios)}, got {', '.join(unknown)}")
    return {name: ratios[name] for name in metrics}


def _ratios(rows: pd.DataFrame) -> dict[str, _Ratio]:
    """Every metric that is a ratio of sums; the only place where numerators and denominators are written down."""
    column = {name: _column(rows, name) for name in _SUMS}
    steps, proposing, emitted = column["steps"], column["proposing_steps"], column["emitted"]
    drafted, accepted, verified = column["drafted"], column["accepted"], column["verified"]
    num_draft_tokens = _column(rows, "num_draft_tokens")
    seconds = np.sum([_column(rows, name) for name in _TIMES], axis=0)
    accepted_at, reached_at = (_positions(rows[name].tolist()) for name in _POSITIONS)

    has_steps = steps > 0
    per_request = np.divide(emitted, steps, out=np.zeros_like(steps), where=has_steps)
    return {
        "acceptance_length": _Ratio(emitted, steps),
        "acceptance_length_request_mean": _Ratio(per_request, has_steps.astype(np.float64)),
        "acceptance_length_nominal": _Ratio(steps + verified, steps),
        "acceptance_length_proposing": _Ratio(emitted - (steps - proposing), proposing),
        "acceptance_rate": _Ratio(accepted, drafted),
        "acceptance_rate_unmasked": _Ratio(column["judged_alone"], drafted),
        "acceptance_rate_slots": _Ratio(accepted, num_draft_tokens * steps),
        **{f"accepted_at_{i}": _Ratio(at, steps) for i, at in enumerate(accepted_at.T, 1)},
        **{
            f"accepted_at_{i}_conditional": _Ratio(at, reached)
            for i, (at, reached) in enumerate(zip(accepted_at.T, reached_at.T, strict=True), 1)
        },
        "system_efficiency": _Ratio(emitted, (num_draft_tokens + 1) * steps),
        "tokens_per_second": _Ratio(emitted, seconds),
    }


def _column(rows: pd.DataFrame, name: str) -> np.ndarray:
    return rows[name].to_numpy(dtype=np.float64)


def _positions(values: Sequence[Sequence[float]]) -> np.ndarray:
    """[requests, largest K] from lists of per-request length K, zeros where a request has no such position."""
    lists = [np.asarray(value, dtype=np.float64) for value in values]
    longest = max((len(value) for value in lists), default=0)
    return np.array([np.pad(value, (0, longest - len(value))) for value in lists]).reshape(len(lists), longest)


def _divide(numerator: float, denominator: float) -> float:
    return float(numerator / denominator) if denominator != 0 else math.nan


def _resample(
    ratios: Sequence[_Ratio],
    codes: np.ndarray,
    num_clusters: int,
    num_resamples: int,
    seed: int,
) -> np.ndarray:
    """[num_resamples, metrics] values of `ratios` over drawn clusters; all NaN with fewer than two clusters."""
    if num_resamples < 1:
        raise UsageError(f"num_resamples: expected an integer >= 1, got {num_resamples!r}")
    if seed < 0:
        raise UsageError(f"seed: expected an integer >= 0, got {seed!r}")
    if num_clusters < 2:
        return np.full((num_resamples, len(ratios)), np.nan)

    def cluster_sums(per_request: np.ndarray) -> np.ndarray:
        return np.bincount(codes, weights=per_request, minlength=num_clusters)

    numerators = np.stack([cluster_sums(r.numerator) for r in ratios], axis=1)
    denominators = np.stack([cluster_sums(r.denominator) for r in ratios], axis=1)
    blocks = []
    for weights in _weights(num_clusters, num_resamples, seed):
        numerator, denominator = weights @ numerators, weights @ denominators
        out = np.full_like(numerator, np.nan)
        blocks.append(np.divide(numerator, denominator, out=out, where=denominator != 0))
    return np.concatenate(blocks)


def _weights(num_clusters: int, num_resamples: int, seed: int) -> Iterator[np.ndarray]:
    """Blocks of multinomial weights: how often each cluster occurs in each resample."""
    generator = np.random.default_rng(seed)
    for start in range(0, num_resamples, _BLOCK):
        size = min(_BLOCK, num_resamples - start)
        drawn = generator.integers(num_clusters, size=(size, num_clusters))
        flat = drawn + num_clusters * np.arange(size)[:, None]
        yield np.bincount(flat.ravel(), minlength=size * num_clusters).reshape(size, num_clusters).astype(np.float64)
