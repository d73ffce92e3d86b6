"""SGLang: decode-batch lines of its log, finished requests in it, and the gauges of its metrics endpoint.

- "Decode batch. #running-req: .., accept len: .., accept rate: .., .." (scheduler_metrics_mixin.py): over the last
  decode steps (the same number for every line, `decode_log_interval`); counts of requests verified are not printed, so
  lines are weighted by their running requests. The length is (accepted drafts + verifications) / verifications. The
  rate was (accepted drafts + verifications) / (n verifications) at first and is accepted drafts / ((n - 1)
  verifications) now, n being `speculative_num_draft_tokens`; which of the two follows from the length beside it.
- "Finish: .." with `spec_verify_ct` and `completion_tokens` of each request, where requests are logged.
- `sglang:spec_accept_length`, `sglang:spec_accept_rate`: the last line's two figures.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from spectoolkit.errors import UsageError
from spectoolkit.serving import definitions, prometheus
from spectoolkit.serving.counts import Definition, Ratio, Reading, Served, count, exact, rounded
from spectoolkit.serving.source import time_of

LOOKED_FOR = (
    'lines with "Decode batch .. #running-req: .. accept len: ..", with "spec_verify_ct" and "completion_tokens" of '
    "finished requests, or gauges sglang:spec_accept_length"
)

_DECODE = re.compile(r"Decode batch.*?#running-req: (\d+),.*?\baccept len: (\d+\.\d\d),(?: accept rate: (\d+\.\d\d),)?")
_VERIFICATIONS = re.compile(r"[\"']spec_verify_ct[\"']: (\d+)(?=[,}])")
_COMPLETION = re.compile(r"[\"']completion_tokens[\"']: (\d+)(?=[,}])")
_NUM_DRAFT_TOKENS = re.compile(r"\bspeculative_num_draft_tokens=(\d+)")
_TOPK = re.compile(r"\bspeculative_eagle_topk=(\d+)")
_GAUGES = ("spec_accept_length", "spec_accept_rate")
_LARGEST = 64  # tokens of a verification that are tried where the log does not say

_WORDS = "(accepted draft tokens + verifications) / verifications, one per request and step"
_REQUESTS = (
    Definition(
        key="request_length",
        label="spec_accept_length, all requests",
        words="Σ completion_tokens / Σ spec_verify_ct of finished requests: nothing behind an end is counted, but the "
        "token that each prompt's forward yields is",
        ours="length, pooled, and one token more per request",
        predicted=definitions.column("acceptance_length"),
    ),
    Definition(
        key="request_mean",
        label="spec_accept_length, mean",
        words="mean over finished requests of completion_tokens / spec_verify_ct",
        ours="length, mean over requests, and one token more per request",
        predicted=definitions.column("acceptance_length_request_mean"),
    ),
)


def read(lines: Iterable[str], before: Iterable[str] | None = None) -> Served:
    """A log or a metrics dump of SGLang.

    Raises:
        UsageError: no line of those that are looked for, a damaged number, or `before`: gauges cannot be subtracted.
    """
    if before is not None:
        raise UsageError("before: SGLang has gauges, not counters; there is nothing to subtract")
    batches: list[tuple[str | None, int, float, float | None]] = []
    requests: list[tuple[str | None, int, int]] = []
    gauges = prometheus.Scrapes("sglang", _GAUGES)
    n: int | None = None
    is_chain = False
    for number, line in enumerate(lines, 1):
        if match := _DECODE.search(line):
            # A line may come when the last of its requests has just left.
            weight, rate = max(1, count(match[1], number)), match[3]
            batches.append((time_of(line), weight, float(match[2]), None if rate is None else float(rate)))
        elif (steps := _VERIFICATIONS.search(line)) and (tokens := _COMPLETION.search(line)):
            if num_steps := count(steps[1], number):
                requests.append((time_of(line), count(tokens[1], number), num_steps))
        elif match := _NUM_DRAFT_TOKENS.search(line):
            n = count(match[1], number)
            topk = _TOPK.search(line)
            is_chain = topk is not None and topk[1] == "1"
        else:
            gauges.add(line, number)
    if batches:
        half, pairs = 0.005, [(length, rate) for _, _, length, rate in batches if rate is not None]
    else:
        half, pairs = 1e-6, _gauge_pairs(gauges.scrapes)
    described = _described(pairs, n, half)
    if not batches and gauges.scrapes:
        described = tuple(_as_gauge(definition) for definition in described)
    readings = [Reading(_batch_ratios(weight, length, rate), time) for time, weight, length, rate in batches]
    readings += [_request_reading(*request) for request in requests]
    if not batches:
        readings += [_gauge_reading(scrape) for scrape in gauges.scrapes]
    units = (("log intervals", batches), ("requests", requests))
    notes = ()
    if batches:
        notes = (
            "SGLang prints no counts: every line covers the same number of decode steps and is weighted by the "
            "requests that ran when it was printed.",
        )
    elif gauges.scrapes:
        notes = ("A gauge holds the last logging interval alone; scrapes are weighted equally.",)
    return Served(
        engine="SGLang, log" if batches or requests else "SGLang, gauges",
        unit=" and ".join(name for name, has in units if has) or "scrapes",
        definitions=(*described, *_REQUESTS),
        readings=tuple(readings),
        num_draft_tokens=n - 1 if n and is_chain else None,
        notes=notes,
    )


def rate_counts_own_token(pairs: Sequence[tuple[float, float]], n: int | None, half: float) -> bool | None:
    """Whether the accept rate is length / n (the first form) and not (length - 1) / (n - 1); None if either fits.

    Args:
        pairs: lengths and rates, both rounded by at most `half`.
        n: tokens of a verification, where the log says it.
        half: of the last digit printed.
    """
    sizes = [n] if n else range(2, _LARGEST + 1)

    def fits(own: int) -> bool:
        return any(
            all(
                abs(rate - (length - own) / (size - own)) <= half * (1 + 1 / (size - own)) + 1e-9
                for length, rate in pairs
            )
            for size in sizes
            if size > own
        )

    first, now = fits(0), fits(1)
    return None if first == now else first


def _described(pairs: Sequence[tuple[float, float]], n: int | None, half: float) -> tuple[Definition, ...]:
    own = rate_counts_own_token(pairs, n, half) if pairs else None
    if own is None:
        words = "accepted / drafted tokens; whether both count the target's own token does not follow from the log"
        ours, predicted = "rate of K slots or system efficiency", lambda _: math.nan
    elif own:
        words = (
            "(accepted draft tokens + verifications) / (n verifications), n tokens in each: the target's own counted"
        )
        ours, predicted = "system efficiency, nominal", definitions.efficiency
    else:
        words = "accepted draft tokens / ((n - 1) verifications), n - 1 draft tokens in each"
        ours, predicted = "rate of K slots, before the cut", definitions.slots
    return (
        Definition(
            key="length",
            label="accept len",
            words=f"{_WORDS}: the target's own token included",
            ours="length, nominal, over steps with a proposal",
            predicted=definitions.length,
            offset=1.0,
        ),
        Definition(key="rate", label="accept rate", words=words, ours=ours, predicted=predicted),
    )


def _batch_ratios(weight: int, length: float, rate: float | None) -> dict[str, Ratio]:
    ratios = {"length": Ratio(rounded(length - 1, 0.005, weight), exact(weight))}
    return ratios if rate is None else ratios | {"rate": Ratio(rounded(rate, 0.005, weight), exact(weight))}


def _request_reading(time: str | None, tokens: int, steps: int) -> Reading:
    pooled, mean = Ratio(exact(tokens), exact(steps)), Ratio(exact(tokens / steps), exact(1))
    return Reading({"request_length": pooled, "request_mean": mean}, time)


def _gauge_pairs(scrapes: Sequence[prometheus.Scrape]) -> list[tuple[float, float]]:
    pairs = []
    for scrape in scrapes:
        lengths, rates = ({s[1]: v for s, v in scrape.items() if s[0] == name} for name in _GAUGES)
        pairs += [(length, rates[labels]) for labels, length in lengths.items() if length and labels in rates]
    return pairs


def _gauge_reading(scrape: prometheus.Scrape) -> Reading:
    ratios = {}
    for key, name, offset in (("length", _GAUGES[0], 1.0), ("rate", _GAUGES[1], 0.0)):
        # A server that has not decoded yet shows 0.
        values = [v for (found, _), v in scrape.items() if found == name and v > 0]
        if values:
            ratios[key] = Ratio(exact(sum(values) - offset * len(values)), exact(len(values)))
    return Reading(ratios)


def _as_gauge(definition: Definition) -> Definition:
    return replace(definition, obtained="gauge")
