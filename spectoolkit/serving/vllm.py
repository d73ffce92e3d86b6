"""vLLM: the lines of its periodic log, in all forms so far, and the counters of its metrics endpoint.

- V1 (vllm/v1/spec_decode/metrics.py): "SpecDecoding metrics: ..", one line per logging interval, set back after each.
  Drafts are steps of a request that had a proposal; they are counted before stops are looked for. The first releases
  printed the rate and its two counts alone; until vllm-project/vllm#17908 the mean acceptance length was without the
  target's own token, which its rates by position reveal: they add up to it.
- V0 (vllm/spec_decode/metrics.py): "Speculative metrics: ..", counts since the server's start; every draft has K tokens
  and each is judged alone, so that "accepted" also counts those behind a rejection.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from spectoolkit.errors import UsageError
from spectoolkit.serving import definitions, prometheus
from spectoolkit.serving.counts import (
    Definition,
    Ratio,
    Reading,
    Served,
    check_part,
    count,
    counted_ratios,
    exact,
    recover_drafts,
)
from spectoolkit.serving.source import time_of

LOOKED_FOR = (
    'lines with "SpecDecoding metrics: .. Accepted: .. tokens, Drafted: .. tokens" or "Speculative metrics: Draft '
    'acceptance rate: ..", or counters vllm:spec_decode_num_draft_tokens and vllm:spec_decode_num_accepted_tokens'
)

_V1 = "SpecDecoding metrics: "
_ACCEPTED = re.compile(r"\bAccepted: (\d+) tokens")
_DRAFTED = re.compile(r"\bDrafted: (\d+) tokens")
_MEAN = re.compile(r"Mean acceptance length: (\d+\.\d\d),")
# The rates ended the line in early releases: not to be read where the log breaks off within them.
_RATES = re.compile(r"Per-position acceptance rate: \[?((?:\d\.\d{3}, )*\d\.\d{3})(?![\d.]|,(?! [A-Z])|\Z)")
_V0 = re.compile(
    r"Speculative metrics: Draft acceptance rate: \S+, System efficiency: \S+, Number of speculative tokens: (\d+), "
    r"Number of accepted tokens: (\d+), Number of draft tokens(?: tokens)?: (\d+), "
    r"Number of emitted tokens(?: tokens)?: (\d+)\."
)
_LABELS = ("Mean acceptance length", "Avg Draft acceptance rate", "Per-position acceptance rate")

_V0_DEFINITIONS = (
    Definition(
        key="length",
        label="emitted tokens / drafts (not printed)",
        words="emitted tokens / (draft tokens / K), before an end cuts the output; the bonus token is in it where the "
        "release drew one",
        ours="length, nominal, over steps with a proposal",
        predicted=definitions.length,
    ),
    Definition(
        key="rate_unmasked",
        label="Draft acceptance rate",
        words="accepted / drafted tokens, each draft token judged alone, whatever came before it",
        ours="rate of drafts, unmasked",
        predicted=definitions.column("acceptance_rate_unmasked"),
    ),
    Definition(
        key="efficiency",
        label="System efficiency",
        words="emitted tokens / (K + 1) per draft, before an end cuts the output",
        ours="system efficiency, over steps with a proposal",
        predicted=definitions.efficiency,
    ),
)


def read(lines: Iterable[str], before: Iterable[str] | None = None) -> Served:
    """A log or a metrics dump of vLLM.

    Args:
        lines: of the file.
        before: a dump of the same server's metrics whose last scrape is subtracted.

    Raises:
        UsageError: no line of those that are looked for, lines of several kinds, or figures that do not fit together.
    """
    v1: list[tuple[Reading, bool | None, int | None]] = []
    v0: list[tuple[str | None, list[int]]] = []
    metrics = prometheus.Scrapes("vllm", prometheus.COUNTERS)
    num_incomplete = 0
    for number, line in enumerate(lines, 1):
        if _V1 in line:
            found = _v1(line, number)
            if isinstance(found, tuple):
                v1.append(found)
            num_incomplete += found is None
        elif match := _V0.search(line):
            v0.append((time_of(line), _v0(match, number)))
        else:
            metrics.add(line, number)
    kinds = [bool(v1), bool(v0), any(_is_drafting(scrape) for scrape in metrics.scrapes)]
    if sum(kinds) > 1:
        raise UsageError(
            "log: expected lines of one kind, got several of: V1's log lines, V0's log lines, counters; they "
            "count the same steps, or by other definitions"
        )
    if before is not None and not kinds[2]:
        raise UsageError("before: expected an earlier metrics dump beside a metrics dump, got one beside a log")
    if v1:
        return _served_v1(v1, num_incomplete)
    if v0:
        return _served_v0(v0)
    metrics.check()
    return _served_counters(metrics.scrapes, before)


def _v0(match: re.Match[str], number: int) -> list[int]:
    """K, and accepted, drafted and emitted tokens since the start."""
    k, accepted, drafted, emitted = (count(group, number) for group in match.groups())
    where = f"log, line {number}"
    if drafted and not k:
        raise UsageError(f"{where}: expected a number of speculative tokens of at least 1, got 0")
    check_part(accepted, drafted, ("accepted tokens", "draft tokens"), where)
    check_part(emitted * k, drafted * (k + 1), ("emitted tokens times K", "draft tokens times K + 1"), where)
    return [k, accepted, drafted, emitted]


def _v1(line: str, number: int) -> tuple[Reading, bool | None, int | None] | bool | None:
    """A reading, whether its length has the bonus, and K; None for a line that breaks off, False where none drafted."""
    accepted, drafted = _ACCEPTED.search(line), _DRAFTED.search(line)
    if not accepted or not drafted:
        return None
    num_accepted, num_drafted, where = count(accepted[1], number), count(drafted[1], number), f"log, line {number}"
    check_part(num_accepted, num_drafted, ("accepted tokens", "drafted tokens"), where)
    if not num_drafted:
        return False
    if "acceptance length" not in line:
        return Reading(counted_ratios(None, num_drafted, num_accepted, []), time_of(line)), None, None
    mean, by_position = _MEAN.search(line), _RATES.search(line)
    if not mean or not by_position:
        return None
    rates = [float(rate) for rate in by_position[1].split(", ")]
    own = float(mean[1]) - sum(rates)
    has_bonus = abs(own - 1) <= abs(own)
    drafts, at = recover_drafts(num_accepted, num_drafted, float(mean[1]) - has_bonus, rates, len(rates), where)
    return Reading(counted_ratios(drafts, num_drafted, num_accepted, at), time_of(line)), has_bonus, len(rates)


def _served_v1(found: Sequence[tuple[Reading, bool | None, int | None]], num_incomplete: int) -> Served:
    has_bonus = {flag for _, flag, _ in found}
    lengths = {k for _, _, k in found}
    if len(has_bonus) > 1:
        raise UsageError(
            "log: expected lines of one release, got some whose mean acceptance length counts the target's own token "
            "and some in which it does not (or that do not print it)"
        )
    notes = []
    if num_incomplete:
        notes.append(f"{num_incomplete} of the engine's lines broke off and are left out.")
    if None in lengths:
        notes.append("This release did not log how many drafts there were: a length does not follow.")
    widest = max((k for k in lengths if k is not None), default=0)
    return Served(
        engine="vLLM, log",
        unit="log intervals",
        definitions=definitions.counted(_LABELS, widest, has_bonus != {False}),
        readings=tuple(reading for reading, _, _ in found),
        num_draft_tokens=widest if len(lengths) == 1 and widest else None,
        notes=tuple(notes),
    )


def _served_v0(found: Sequence[tuple[str | None, list[int]]]) -> Served:
    readings = []
    last = [0, 0, 0, 0]
    for time, (k, *counts) in found:
        # Counts since the start that went down: another start.
        is_new = k != last[0] or any(now < then for now, then in zip(counts, last[1:], strict=True))
        accepted, drafted, emitted = counts if is_new else [n - m for n, m in zip(counts, last[1:], strict=True)]
        last = [k, *counts]
        if drafted:
            drafts = drafted / k
            ratios = {"rate_unmasked": _ratio(accepted, drafted), "length": _ratio(emitted, drafts)}
            readings.append(Reading(ratios | {"efficiency": _ratio(emitted, drafts * (k + 1))}, time))
    lengths = {k for _, (k, *_) in found}
    return Served(
        engine="vLLM V0, log",
        unit="log intervals",
        definitions=_V0_DEFINITIONS,
        readings=tuple(readings),
        num_draft_tokens=lengths.pop() if len(lengths) == 1 else None,
    )


def _served_counters(scrapes: Sequence[prometheus.Scrape], before: Iterable[str] | None) -> Served:
    increments = prometheus.since(scrapes, "vllm", before)
    emitted = [prometheus.total(increment, prometheus.COUNTERS[4]) for increment in increments]
    if any(n is not None for n in emitted):  # V0 counted emitted tokens and no drafts
        pairs = [[prometheus.total(increment, name) for name in prometheus.COUNTERS[1:3]] for increment in increments]
        ratios = [{"rate_unmasked": _ratio(accepted or 0, drafted)} for drafted, accepted in pairs if drafted]
        readings, described = [Reading(ratio) for ratio in ratios], _V0_DEFINITIONS
        notes = ("Counters of V0: K is not among them, so that a length does not follow.",)
    else:
        readings = prometheus.readings(increments)
        described = definitions.counted(_LABELS, prometheus.num_positions(readings))
        has_drafts = any("length" in reading.ratios for reading in readings)
        notes = () if has_drafts else ("There is no counter of drafts: a length does not follow.",)
    return Served(
        engine="vLLM, counters",
        unit="scrapes",
        definitions=described,
        readings=tuple(readings),
        num_draft_tokens=prometheus.num_positions(readings) or None,
        notes=notes,
    )


def _is_drafting(scrape: prometheus.Scrape) -> bool:
    return prometheus.total(scrape, prometheus.COUNTERS[1]) is not None


def _ratio(numerator: float, denominator: float) -> Ratio:
    return Ratio(exact(numerator), exact(denominator))
