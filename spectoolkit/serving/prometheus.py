"""Counters of one or several scrapes of a metrics endpoint, in Prometheus' text format."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from spectoolkit.errors import UsageError
from spectoolkit.serving.counts import Ratio, Reading, check_part, counted_ratios, exact

_LABEL = re.compile(r'([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"')
_POSITION = "position"
_MAX_POSITIONS = 1024
_MAX_VALUE = 1e15

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

    def __init__(self, prefix: str, names: Sequence[str], source: str = "log") -> None:
        alternatives = "|".join(names)
        # A last line without its end may be cut within the number.
        self._sample = re.compile(rf"{prefix}:({alternatives})(?:_total)?(\{{.*\}})?[ \t]+([^\s]+)(?: [^\n]*)?\n")
        self._source = source
        self._last_lines: list[int] = []  # of each scrape
        self.scrapes: list[dict[Series, float]] = []

    def add(self, line: str, number: int) -> None:
        """Take a sample from the line of that number, if it is one.

        Raises:
            UsageError: a value that is no count, or a position that is none.
        """
        found = self._sample.fullmatch(line)
        if not found:
            return
        where = f"{self._source}, line {number}"
        series = (found[1], frozenset(_LABEL.findall(found[2] or "")))
        if found[1] == COUNTERS[3]:
            _check_position(dict(series[1]).get(_POSITION), where)
        value = _value(found[3], where)
        if not self.scrapes or series in self.scrapes[-1]:
            self.scrapes.append({})
            self._last_lines.append(number)
        self.scrapes[-1][series] = value
        self._last_lines[-1] = number

    def check(self) -> None:
        """Refuse counters that contradict each other.

        Raises:
            UsageError: more accepted than draft tokens, or more of them at a position than drafts.
        """
        for scrape, number in zip(self.scrapes, self._last_lines, strict=True):
            where = f"{self._source}, scrape up to line {number}"
            drafts, drafted, accepted = (total(scrape, name) for name in COUNTERS[:3])
            if drafted is not None and accepted is not None:
                check_part(accepted, drafted, ("accepted tokens", "draft tokens"), where)
            if drafts is not None:
                check_part(max(by_position(scrape), default=0.0), drafts, ("accepted at a position", "drafts"), where)


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
        UsageError: `before` holds no counter, or a damaged one.
    """
    if before is None:
        return increments(scrapes)
    earlier = Scrapes(prefix, COUNTERS, "before")
    for number, line in enumerate(before, 1):
        earlier.add(line, number)
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


def _value(shown: str, where: str) -> float:
    try:
        value = float(shown)
    except ValueError:
        value = -1.0
    if not 0 <= value <= _MAX_VALUE:  # not a number fails, too
        raise UsageError(f"{where}: expected a value between 0 and {_MAX_VALUE:g}, got {shown[:40]}")
    return value


def _check_position(shown: str | None, where: str) -> None:
    if shown is None or not re.fullmatch(r"[0-9]{1,4}", shown) or int(shown) >= _MAX_POSITIONS:
        got = "none" if shown is None else repr(shown[:40])
        raise UsageError(f"{where}: expected a label {_POSITION} of 0 to {_MAX_POSITIONS - 1}, got {got}")


def _process(series: Series) -> frozenset[tuple[str, str]]:
    return frozenset(label for label in series[1] if label[0] != _POSITION)
