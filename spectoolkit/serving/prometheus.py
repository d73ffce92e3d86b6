"""Counters of one or several scrapes of a metrics endpoint, in Prometheus' text format."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from spectoolkit.errors import UsageError
from spectoolkit.serving.counts import Ratio, Reading, counted_ratios, exact

_LABEL = re.compile(r'([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"')
_POSITION = "position"

Series = tuple[str, frozenset[tuple[str, str]]]
Scrape = Mapping[Series, float]

COUNTERS = (
    "spec_decode_num_drafts",
    "spec_decode_num_draft_tokens",
    "spec_decode_num_accepted_tokens",
    "spec_decode_num_accepted_tokens_per_pos",
    "spec_decode_num_emitted_tokens",
)
"""Names that vLLM and llama.cpp share, behind `vllm:` and `llamacpp:`; `_total` may follow."""


class Scrapes:
    """Collects samples line by line; a series that comes again begins the next scrape."""

    def __init__(self, prefix: str, names: Sequence[str]) -> None:
        alternatives = "|".join(names)
        # A last line without its end may be cut within the number.
        self._sample = re.compile(rf"{prefix}:({alternatives})(?:_total)?(\{{.*\}})?[ \t]+([^\s]+)(?: [^\n]*)?\n")
        self.scrapes: list[dict[Series, float]] = []

    def add(self, line: str) -> None:
        """Take a sample from the line, if it is one."""
        found = self._sample.fullmatch(line)
        if not found:
            return
        series = (found[1], frozenset(_LABEL.findall(found[2] or "")))
        if not self.scrapes or series in self.scrapes[-1]:
            self.scrapes.append({})
        self.scrapes[-1][series] = float(found[3])


def increments(counters: Sequence[Scrape]) -> list[dict[Series, float]]:
    """What each scrape adds to the one before; the first adds all that it has.

    A counter that went down was started again, and with it every counter of its process: all that they show is new.
    """
    found: list[dict[Series, float]] = []
    for i, scrape in enumerate(counters):
        before = counters[i - 1] if i else {}
        restarted = {_process(series) for series, value in scrape.items() if value < before.get(series, 0.0)}
        found.append(
            {s: value - (0.0 if _process(s) in restarted else before.get(s, 0.0)) for s, value in scrape.items()}
        )
    return found


def since(scrapes: Sequence[Scrape], prefix: str, before: Iterable[str] | None) -> list[dict[Series, float]]:
    """The increments of `scrapes`; those of the last scrape in the lines `before`, where given, are subtracted.

    Raises:
        UsageError: `before` holds no counter.
    """
    if before is None:
        return increments(scrapes)
    earlier = Scrapes(prefix, COUNTERS)
    for line in before:
        earlier.add(line)
    if not earlier.scrapes:
        raise UsageError(f"before: expected counters {prefix}:{COUNTERS[1]} and others, found none")
    return increments([earlier.scrapes[-1], *scrapes])[1:]


def total(increment: Scrape, name: str) -> float | None:
    """A counter summed over processes; None where there is none of the name."""
    values = [value for series, value in increment.items() if series[0] == name]
    return sum(values) if values else None


def by_position(increment: Scrape) -> list[float]:
    """Accepted tokens at positions 1, 2, .. (labelled 0, 1, ..), summed over processes."""
    sums: dict[int, float] = {}
    for (name, labels), value in increment.items():
        if name == COUNTERS[3]:
            i = int(dict(labels)[_POSITION])
            sums[i] = sums.get(i, 0.0) + value
    return [sums.get(i, 0.0) for i in range(max(sums, default=-1) + 1)]


def readings(counters: Iterable[Scrape]) -> list[Reading]:
    """The increments as readings of `definitions.counted`; those in which nothing was drafted are left out."""
    found = []
    for increment in counters:
        drafts, drafted, accepted = (total(increment, name) for name in COUNTERS[:3])
        if not drafted or accepted is None:
            continue
        at = [Ratio(exact(n), exact(drafts)) for n in by_position(increment)] if drafts else []
        found.append(Reading(counted_ratios(exact(drafts) if drafts else None, drafted, accepted, at)))
    return found


def num_positions(found: Sequence[Reading]) -> int:
    """The largest number of positions among readings."""
    return max((sum(key.startswith("position_") for key in reading.ratios) for reading in found), default=0)


def _process(series: Series) -> frozenset[tuple[str, str]]:
    return frozenset(label for label in series[1] if label[0] != _POSITION)
