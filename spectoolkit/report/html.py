"""The main table as HTML, for notebooks: readable on light and dark pages, and without any style."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

from spectoolkit.report import standing, text

if TYPE_CHECKING:
    from spectoolkit.report.tables import Tables

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
    columns = text.main_columns(tables)
    numbers = {column.key: column.decimals is not None for column in columns}
    head = "".join(_cell("th", column.heading, not numbers[column.key]) for column in columns)
    lines = []
    for row in tables.overall.to_dict("records"):
        cells = []
        for column in columns:
            state = row.get("standing", standing.NOT_COMPARED) if column.key == standing.METRIC else ""
            mark = f" {text.TIED_MARK}" if state == standing.TIED else ""
            shown = text.cell_text(row, column) + mark
            cells.append(_cell("td", shown, not numbers[column.key], state == standing.BEST))
        lines.append(f"<tr>{''.join(cells)}</tr>")
    body = "\n".join(lines)
    notes = [text.rule(tables)] if text.is_marked(tables, columns) else []
    notes.append(text.provenance(tables))
    below = "".join(f"<p>{html.escape(note)}</p>" for note in notes)
    return (
        f'{_STYLE}<div class="st-table"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table>'
        f"{below}</div>"
    )


def _cell(element: str, value: str, is_left: bool, is_best: bool = False) -> str:
    classes = " ".join(["axis"] * is_left + ["best"] * is_best)
    content = f"<b>{html.escape(value)}</b>" if is_best else html.escape(value)
    return f"<{element}{f' class={chr(34)}{classes}{chr(34)}' if classes else ''}>{content}</{element}>"
