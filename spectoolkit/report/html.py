"""The main table as HTML, for notebooks: readable on light and dark pages, and without any style."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from spectoolkit.report import text

if TYPE_CHECKING:
    from spectoolkit.report.tables import Tables

STRATEGY = ("drafter", "verifier", "draft_model")
"""Groups that a server chooses; values of all other axes are its circumstances, across which nothing is compared."""

# Text keeps the page's colour, and the mark lets the page shine through.
_STYLE = """<style>
.st-table table { border-collapse: collapse; }
.st-table th { vertical-align: bottom; max-width: 11em; }
.st-table td, .st-table th { text-align: right; padding: .25em .7em; white-space: normal; }
.st-table .axis { text-align: left; }
.st-table td { white-space: nowrap; font-variant-numeric: tabular-nums; }
.st-table td.best { background: rgba(0, 114, 178, .22); }
.st-table p { font-size: 85%; opacity: .75; max-width: 62em; }
</style>
"""


def table(tables: Tables) -> str:
    """The main table with intervals, the best cells in bold on a tinted ground, and what the numbers are below it."""
    rows = text.main_rows(tables)
    left = {"engine", "lossless", *text.headings(tables.axes).values()}
    marked = best(tables)
    head = "".join(_cell("th", name, name in left) for name in (rows[0] if rows else ()))
    body = "\n".join(
        "<tr>"
        + "".join(_cell("td", row[name], name in left, i in marked and name == text.POOLED) for name in row)
        + "</tr>"
        for i, row in enumerate(rows)
    )
    notes = [_explanation(tables)] if marked else []
    notes.append(text.provenance(tables))
    below = "".join(f"<p>{html.escape(note)}</p>" for note in notes)
    return (
        f'{_STYLE}<div class="st-table"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table>'
        f"{below}</div>"
    )


def best(tables: Tables) -> set[int]:
    """Numbers of the rows with the largest pooled acceptance length among the lossless ones of the same circumstances.

    Empty where nothing is to be compared: fewer than two strategies at a point, or lossy ones alone.
    """
    around = [axis for axis in tables.axes if axis.split(".")[0] not in STRATEGY]
    points: dict[tuple[str, ...], list[tuple[int, float]]] = {}
    for i, row in enumerate(tables.overall.to_dict("records")):
        if row["lossless"] and not math.isnan(row["acceptance_length"]):
            points.setdefault(_point(row, around), []).append((i, row["acceptance_length"]))
    return {
        i for rows in points.values() if len(rows) > 1 for i, value in rows if value == max(value for _, value in rows)
    }


def _point(row: Mapping[Any, Any], axes: list[str]) -> tuple[str, ...]:
    return tuple(text.value_text(row[axis]) for axis in axes)


def _explanation(tables: Tables) -> str:
    headings = text.headings(tables.axes)
    around = [headings[axis] for axis in tables.axes if axis.split(".")[0] not in STRATEGY]
    where = f" at the same {' and '.join(around)}" if around else ""
    return f"Bold: the largest estimate among lossless rows{where}, whether or not it leads by more than noise."


def _cell(element: str, value: str, is_left: bool, is_best: bool = False) -> str:
    classes = " ".join(["axis"] * is_left + ["best"] * is_best)
    content = f"<b>{html.escape(value)}</b>" if is_best else html.escape(value)
    return f"<{element}{f' class={chr(34)}{classes}{chr(34)}' if classes else ''}>{content}</{element}>"
