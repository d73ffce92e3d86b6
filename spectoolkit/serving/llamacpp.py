"""llama.cpp: what llama-server prints per request and counts, and what the speculative examples print at their end.

- llama-server (tools/server/server-context.cpp), per request: "draft acceptance rate = r (a accepted / d generated)";
  since ggml-org/llama.cpp#24536 "draft acceptance = r (..), mean len = m" (at first "mean acceptance length"), m being
  1 + a / verifications, and the acceptance by position in the same line or in a trace line "acc per pos = (..)".
- llama-speculative, llama-speculative-simple, llama-lookup: n_predict, n_drafted, n_accept and "accept = ..%". Every
  target forward yields its accepted drafts and one token, so n_predict - n_accept of them were run.
- `llamacpp:spec_decode_num_drafts_total` and its companions on the metrics endpoint.

Its lines "statistics ..: #calls .." are cumulative, per way to draft, and count the same drafts again: not read.
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
    'lines with "draft acceptance rate = .. (.. accepted / .. generated)" or "draft acceptance = ..", the lines '
    '"n_drafted = ..", "n_accept = ..", "accept = ..%", or counters llamacpp:spec_decode_num_draft_tokens_total'
)

_REQUEST = re.compile(
    r"draft acceptance(?: rate)? = \d+\.\d+ \(\s*(\d+) accepted /\s*(\d+) generated\)"
    r"(?:, mean (?:acceptance length|len) =\s*(\d+\.\d\d)(?!\d)(?:, acceptance rate per position = \(([\d., ]*)\))?)?"
)
_RATES = re.compile(r"\bacc per pos = \(([\d., ]*)\)")
_EXAMPLE = re.compile(r"\b(n_predict|n_drafted|n_accept)\s*=\s*(\d+)\n")
_EXAMPLE_END = re.compile(r"\baccept\s+=\s*\S+%")
# Targets that cannot take back a part of a draft: rounds with a rejection are run again and never counted.
_WHOLE_DRAFTS_ONLY = "does not support partial sequence removal"
_LABELS = ("mean len", "draft acceptance", "acc per pos")

_EXAMPLE_DEFINITIONS = (
    Definition(
        key="length_all",
        label="n_predict / (n_predict - n_accept) (not printed)",
        words="tokens / target forwards, those without a draft included; what is behind an end is counted",
        ours="length, nominal",
        predicted=lambda row: 1 + definitions.verified(row) / row["steps"],
    ),
    Definition(
        key="rate",
        label="accept",
        words=f"n_accept / n_drafted, accepted prefixes; {definitions.UNCUT}",
        ours="rate of drafts, prefix, before the cut",
        predicted=definitions.rate,
    ),
)


def read(lines: Iterable[str], before: Iterable[str] | None = None) -> Served:
    """A log or a metrics dump of llama.cpp.

    Args:
        lines: of the file.
        before: a dump of the same server's metrics whose last scrape is subtracted.

    Raises:
        UsageError: no line of those that are looked for, lines of several kinds, or figures that do not fit together.
    """
    requests: list[tuple[str | None, str, int, int, float | None, list[float]]] = []
    runs: list[dict[str, int]] = []
    run: dict[str, int] = {}
    metrics = prometheus.Scrapes("llamacpp", prometheus.COUNTERS)
    notes = []
    for number, line in enumerate(lines, 1):
        where = f"log, line {number}"
        if match := _REQUEST.search(line):
            mean = float(match[3]) if match[3] else None
            accepted, drafted = count(match[1], number), count(match[2], number)
            check_part(accepted, drafted, ("accepted tokens", "generated tokens"), where)
            requests.append((time_of(line), where, accepted, drafted, mean, _numbers(match[4], where)))
        elif (match := _RATES.search(line)) and requests and not requests[-1][5]:
            requests[-1] = (*requests[-1][:5], _numbers(match[1], where))
        elif match := _EXAMPLE.search(line):
            run[match[1]] = count(match[2], number)
        elif _EXAMPLE_END.search(line):
            if {"n_drafted", "n_accept"} <= run.keys():
                check_part(run["n_accept"], run["n_drafted"], ("n_accept", "n_drafted"), where)
                runs.append(run)
            run = {}
        elif _WHOLE_DRAFTS_ONLY in line and not notes:
            notes.append(
                "The target cannot take back a part of a draft: llama.cpp runs steps with a rejection again and "
                "leaves them out of its counts, so that these figures are too high."
            )
        else:
            metrics.add(line, number)
    if sum(map(bool, (requests, runs, metrics.scrapes))) > 1:
        raise UsageError("log: expected lines of one kind, got several of: requests, runs of the examples, counters")
    if before is not None and not metrics.scrapes:
        raise UsageError("before: expected an earlier metrics dump beside a metrics dump, got one beside a log")
    if runs:
        readings = [Reading(_run_ratios(counts)) for counts in runs if counts["n_drafted"]]
        return Served(
            "llama.cpp, speculative example", "runs", _EXAMPLE_DEFINITIONS, tuple(readings), None, tuple(notes)
        )
    if requests:
        readings = [_request_reading(*request) for request in requests if request[3]]
        engine, unit = "llama.cpp server, log", "requests"
        without = sum("length" not in reading.ratios for reading in readings)
        if without:
            notes.append(
                f"{without} of {len(readings)} requests were logged without a mean length (older releases print none)."
            )
    else:
        metrics.check()
        readings = prometheus.readings(prometheus.since(metrics.scrapes, "llamacpp", before))
        engine, unit = "llama.cpp server, counters", "scrapes"
    described = definitions.counted(_LABELS, prometheus.num_positions(readings))
    return Served(engine, unit, described, tuple(readings), None, tuple(notes))


def _request_reading(
    time: str | None, where: str, accepted: int, drafted: int, mean: float | None, rates: Sequence[float]
) -> Reading:
    if mean is None:
        return Reading(counted_ratios(None, drafted, accepted, []), time)
    drafts, at = recover_drafts(accepted, drafted, mean - 1, rates, where=where)
    return Reading(counted_ratios(drafts, drafted, accepted, at), time)


def _run_ratios(counts: dict[str, int]) -> dict[str, Ratio]:
    accepted, tokens = counts["n_accept"], counts.get("n_predict", 0)
    ratios = {"rate": Ratio(exact(accepted), exact(counts["n_drafted"]))}
    if tokens > accepted:
        ratios["length_all"] = Ratio(exact(tokens), exact(tokens - accepted))
    return ratios


def _numbers(text: str | None, where: str) -> list[float]:
    try:
        return [float(part) for part in (text or "").split(",") if part.strip()]
    except ValueError as error:
        raise UsageError(f"{where}: expected rates by position, got {text}") from error
