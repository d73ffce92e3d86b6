"""Tables as LaTeX: booktabs rules, siunitx columns aligned at the decimal point, intervals beside them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any

from spectoolkit.report import standing
from spectoolkit.report.text import UNDEFINED, Column, is_marked, latex_escape, main_columns, rule, value_text

if TYPE_CHECKING:
    from spectoolkit.report.tables import Tables

Row = Mapping[str, Any]
NEEDS = r"% needs \usepackage{booktabs} and \usepackage{siunitx}"
# In an S column a weight in front of the number would be lost without it.
_WEIGHT = "detect-weight"


def table(
    tables: Tables, *, caption: str | None = None, label: str | None = None, columns: Sequence[str] | None = None
) -> str:
    """The main table for `\\input`: a bare tabular, or a floating table if it has a caption or a label.

    Numbers stand in siunitx `S` columns, an interval in a column of its own beside its number. The best cell is bold,
    and those tied with it carry a dagger; the rule follows the caption, or stands as a comment where there is none.

    Args:
        tables: `tables.build`.
        caption, label: of the floating table.
        columns: as for `text.main_columns`.
    """
    shown = main_columns(tables, columns)
    rows = tables.overall.to_dict("records")
    specs, heads = [], []
    for column in shown:
        spec, width = _spec(rows, column)
        specs.append(spec)
        head = _heading(column.brief)
        if spec != "l":
            head = rf"\multicolumn{{{width}}}{{c}}{{{head}}}" if width > 1 else f"{{{head}}}"
        heads.append(head)
    body = [rf"\begin{{tabular}}{{@{{}}{''.join(specs)}@{{}}}}", r"\toprule", _line(heads), r"\midrule"]
    for before, row in zip([None, *rows], rows, strict=False):
        if before is not None and _begins_group(rows, before, row, shown[0]):
            body.append(r"\addlinespace")
        body.append(
            _line([part for column, spec in zip(shown, specs, strict=True) for part in _cell(row, column, spec)])
        )
    body += [r"\bottomrule", r"\end{tabular}"]
    note = rule(tables) if is_marked(tables, shown) else ""
    if caption is None and label is None:
        return "\n".join([NEEDS, *([f"% {note}"] if note else []), *body]) + "\n"
    words = " ".join(part for part in (caption, note) if part).replace(" %", "\N{NO-BREAK SPACE}%")
    head = [NEEDS, r"\begin{table}", r"\centering"]
    head += [rf"\caption{{{latex_escape(words)}}}"] if words else []
    head += [rf"\label{{{label}}}"] if label is not None else []
    head += [r"\scriptsize" if len(shown) > 8 else r"\footnotesize", r"\setlength{\tabcolsep}{3pt}"]
    return "\n".join([*head, *body, r"\end{table}"]) + "\n"


def _begins_group(rows: Sequence[Row], before: Row, row: Row, first: Column) -> bool:
    """Whether the first column changes here, in a table whose rows are grouped by it."""
    values = [value_text(other[first.key]) for other in rows]
    changes = sum(one != other for one, other in itertools.pairwise(values))
    is_grouped = first.decimals is None and changes == len(set(values)) - 1 and len(rows) > 2 * changes
    return is_grouped and value_text(before[first.key]) != value_text(row[first.key])


def _heading(words: str) -> str:
    """In two lines of about equal length where there are several words, so that numbers decide how wide a column is."""
    parts = words.split(" ")
    if len(parts) == 1:
        return latex_escape(words)
    halves = [(" ".join(parts[:i]), " ".join(parts[i:])) for i in range(1, len(parts))]
    first, second = (latex_escape(half) for half in min(halves, key=lambda both: max(map(len, both))))
    return rf"\shortstack{{{first}\\{second}}}"


def _spec(rows: Sequence[Row], column: Column) -> tuple[str, int]:
    """The column's part of the preamble, and how many columns of the tabular it takes."""
    numbers = [_number(row, column) for row in rows]
    if not _is_numeric(rows, column):
        return "l", 1
    parts = [text.partition(".") for text in numbers if text is not None]
    whole = max((len(part[0].lstrip("-")) for part in parts), default=1)
    decimals = max((len(part[2]) for part in parts), default=0)
    sign = "-" if any(part[0].startswith("-") for part in parts) else ""
    weight = f", {_WEIGHT}" if column.key == standing.METRIC else ""
    spec = f"S[table-format={sign}{whole}.{decimals}{weight}]"
    return (f"{spec}@{{\\,}}l", 2) if _has_interval(rows, column) else (spec, 1)


def _is_numeric(rows: Sequence[Row], column: Column) -> bool:
    if column.decimals is not None:
        return True
    values = [row[column.key] for row in rows if value_text(row[column.key]) != UNDEFINED]
    return bool(values) and all(
        isinstance(value, Real) and not isinstance(value, bool) and re.fullmatch(r"-?\d+(\.\d+)?", value_text(value))
        for value in values
    )


def _has_interval(rows: Sequence[Row], column: Column) -> bool:
    return column.decimals is not None and any(f"{column.key}_low" in row for row in rows)


def _number(row: Row, column: Column) -> str | None:
    """A number as siunitx reads it: plain digits, no separators; None where there is none."""
    value = row[column.key]
    if value_text(value) == UNDEFINED:
        return None
    return value_text(value) if column.decimals is None else f"{value:.{column.decimals}f}"


def _cell(row: Row, column: Column, spec: str) -> list[str]:
    if spec == "l":
        value = row[column.key]
        return [latex_escape(value_text(bool(value) if column.key == "lossless" else value))]
    number = _number(row, column)
    mark = row.get("standing") if column.key == standing.METRIC else None
    weight = r"\bfseries " if mark == standing.BEST else ""
    parts = [f"{{{latex_escape(UNDEFINED)}}}" if number is None else weight + number]
    if spec.endswith("l"):
        low, high = (float(row[f"{column.key}_{end}"]) for end in ("low", "high"))
        known = number is not None and value_text(low) != UNDEFINED
        span = f"[{low:.{column.decimals}f}, {high:.{column.decimals}f}]".replace("-", "$-$") if known else ""
        tied = r"\textdagger" if mark == standing.TIED else ""
        parts.append((weight + span if span else "") + tied)
    return parts


def _line(values: Sequence[str]) -> str:
    # \\ would read a row that begins with a bracket or a star as its own argument.
    guard = "{}" if values and values[0].startswith(("[", "*")) else ""
    return guard + " & ".join(values) + r" \\"
