"""Tables as text for people: Markdown, LaTeX, console. The only place where numbers are rounded."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pandas as pd

from spectoolkit.errors import UsageError
from spectoolkit.report import standing

if TYPE_CHECKING:
    from spectoolkit.report.tables import Tables

UNDEFINED = "–"
LABELS = {
    "sampling.temperature": "temperature",
    "num_draft_tokens": "K",
    "drafter.name": "drafter",
    "verifier.name": "verifier",
    "target.name": "target",
    "draft_model.name": "draft model",
}
_LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "–": "--", "−": "$-$"}
_LATEX |= {character: "\\" + character for character in "&%$#_{}"}
_LATEX |= {"†": r"\textdagger{}", "Σ": r"$\Sigma$", "≥": r"$\geq$", "≤": r"$\leq$", "×": r"$\times$"}
_LATEX |= {
    "●": r"$\bullet$",
    "□": r"$\square$",
    "◇": r"$\Diamond$",
    "\N{NO-BREAK SPACE}": "~",
    "<": r"$<$",
    ">": r"$>$",
}
_BRIEF = {"temperature": "T"}
TIED_MARK = "†"

_COUNTS = ("requests", "clusters", "steps", "proposing_steps", "drafted", "accepted", "emitted", "truncated")


@dataclass(frozen=True)
class Column:
    """A column of a table for people.

    Attributes:
        key: the column of `Tables.overall`.
        heading: its name in Markdown.
        brief: its name in LaTeX.
        decimals: of a number; None for a setting or a flag, which stands as it is.
    """

    key: str
    heading: str
    brief: str
    decimals: int | None


def short(name: str) -> str:
    """A settings key as a word: its customary name, else its last part."""
    return LABELS.get(name, name.rpartition(".")[2].replace("_", " "))


def headings(axes: Sequence[str]) -> dict[str, str]:
    """Axis -> column heading, all different: "drafter temperature" where the last word alone would occur twice."""
    words = [short(axis) for axis in axes]
    return {
        axis: word if words.count(word) == 1 else axis.replace(".", " ").replace("_", " ")
        for axis, word in zip(axes, words, strict=True)
    }


def value_text(value: Any) -> str:
    """A setting as text: 0.7, argmax, yes; `UNDEFINED` when absent."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return UNDEFINED
    return f"{value:g}" if isinstance(value, float) else str(value)


def number(value: Any, decimals: int = 2) -> str:
    """A number with a fixed number of decimals and thousands separators; `UNDEFINED` for NaN."""
    return UNDEFINED if value is None or math.isnan(value) else f"{value:,.{decimals}f}"


def with_interval(row: Mapping[str, Any], name: str, decimals: int = 2, sign: str = "") -> str:
    """`2.95 [2.88, 3.02]`; the value alone where it has no interval."""
    value, low, high = (float(row[key]) for key in (name, f"{name}_low", f"{name}_high"))
    if math.isnan(value):
        return UNDEFINED
    if math.isnan(low):
        return f"{value:{sign}.{decimals}f}"
    return f"{value:{sign}.{decimals}f} [{low:{sign}.{decimals}f}, {high:{sign}.{decimals}f}]"


def markdown(tables: Tables, title: str, notes: Sequence[str], columns: Sequence[str] | None = None) -> str:
    """The whole of table.md; with `columns` (see `main_columns`) the main table alone."""
    shown = main_columns(tables, columns)
    parts = [f"# {title}", provenance(tables), *notes]
    parts += ["## Acceptance length", grid(_main(tables, shown))]
    if is_marked(tables, shown):
        parts += [rule(tables)]
    if columns is not None:
        return "\n\n".join(parts) + "\n"
    parts += ["## Acceptance by draft position", _position_text(), grid(_by_position(tables, ""))]
    parts += ["Conditional on reaching the position:", grid(_by_position(tables, "_conditional"))]
    if len(tables.differences):
        parts += ["## Differences from the baseline", _difference_text(tables), grid(_differences(tables))]
    if len(tables.by_category):
        pivot = "Pooled acceptance length, tokens per target forward:"
        parts += ["## By prompt category", pivot, grid(_by_category(tables))]
    return "\n\n".join(parts) + "\n"


def latex_escape(text: str) -> str:
    """`text` with every character that LaTeX would read as a command escaped."""
    return "".join(_LATEX.get(character, character) for character in text)


def console(row: Mapping[str, Any]) -> str:
    """A row of `Tables.overall` in a few lines."""
    names = list(row)
    head = names[: names.index("lossless")]
    # Settings below a labelled group ("drafter.name" beside "drafter") would say the same twice.
    shown = [name for name in head if name.partition(".")[0] not in head or "." not in name]
    where = "  ".join(f"{heading}={value_text(row[name])}" for name, heading in headings(shown).items())
    positions = position_names(names)
    at = " ".join(number(row[name]) for name in positions)
    lines = [
        f"{where}  {'lossless' if row['lossless'] else 'lossy'}",
        f"  acceptance length {with_interval(row, 'acceptance_length')} tokens per target forward (pooled), "
        f"{with_interval(row, 'acceptance_length_request_mean')} (mean over requests)",
        f"  acceptance rate {number(row['acceptance_rate'])} of {number(row['drafted'], 0)} draft tokens; "
        f"by position {at or UNDEFINED}",
        f"  {number(row['requests'], 0)} requests of {number(row['clusters'], 0)} prompts, "
        f"{number(row['emitted'], 0)} tokens in {number(row['steps'], 0)} target forwards",
    ]
    if not math.isnan(row["tokens_per_second"]):
        lines[-1] += f", {number(row['tokens_per_second'], 1)} tokens/s on this machine (noisy)"
    return "\n".join(lines)


def provenance(tables: Tables) -> str:
    """What the numbers of the tables are, in a paragraph."""
    overall = tables.overall

    def span(name: str) -> str:
        low, high = min(overall[name].tolist()), max(overall[name].tolist())
        return f"{low:,.0f}" if low == high else f"{low:,.0f} to {high:,.0f}"

    engines = {"live": "decoded live", "replay": "replayed (expected counts, exact given the sampled outputs)"}
    counts = overall["engine"].value_counts(sort=False).items()
    made = ", ".join(f"{count} {engines.get(str(name), str(name))}" for name, count in counts)
    few = " With fewer than about 20 prompts they are too narrow." if min(overall["clusters"].tolist()) < 20 else ""
    lossy = (
        ""
        if all(overall["lossless"].tolist())
        else " Rows that are not lossless sample another law than the target's: their acceptance length is not "
        "comparable with that of the others."
    )
    k = len(position_names(overall.columns))
    return (
        f"{len(overall)} cells: {made}; at most {k} draft tokens per step (K); {span('emitted')} output tokens and "
        f"{span('requests')} requests per cell. Brackets are {100 * tables.confidence:g} % intervals: percentile "
        f"cluster bootstrap over {span('clusters')} prompts, {tables.num_resamples:,} resamples, the same ones in "
        f"every cell.{few}{lossy} {UNDEFINED} marks a value that is undefined (nothing to divide by). Unrounded "
        "numbers and all other metrics: table.csv, table.parquet."
    )


def _axis_values(tables: Tables, row: Mapping[str, Any]) -> dict[str, str]:
    """The axes of a row, and the engine where the table mixes engines."""
    values = {heading: value_text(row[axis]) for axis, heading in headings(tables.axes).items()}
    if len(set(tables.overall["engine"])) > 1:
        values["engine"] = str(row["engine"])
    return values


def main_columns(tables: Tables, names: Sequence[str] | None = None) -> list[Column]:
    """The columns of the main table: the usual ones, or those of `Tables.overall` (axes and metrics) that are named.

    Raises:
        UsageError: a name that is none of them, or none at all.
    """
    if names is None:
        return [*_axis_columns(tables), *_usual_columns(tables)]
    known = [name for name in tables.overall.columns if not name.endswith(("_low", "_high"))]
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        got = ", ".join(unknown) or "none"
        raise UsageError(f"columns: expected some of {', '.join(known)}, got {got}")
    usual = {column.key: column for column in [*_axis_columns(tables), *_usual_columns(tables)]}
    return [usual.get(name) or _any_column(tables, name) for name in names]


def main_rows(tables: Tables, names: Sequence[str] | None = None) -> list[dict[str, str]]:
    """The main table, heading -> text per row, with marks in Markdown."""
    return _main(tables, main_columns(tables, names))


def _axis_columns(tables: Tables) -> list[Column]:
    names = headings(tables.axes).items()
    found = [Column(axis, heading, _BRIEF.get(heading, heading), None) for axis, heading in names]
    if len(set(tables.overall["engine"])) > 1:
        found.append(Column("engine", "engine", "engine", None))
    return [*found, Column("lossless", "lossless", "lossless", None)]


def _usual_columns(tables: Tables) -> list[Column]:
    found = [
        Column("acceptance_length", "acceptance length, pooled (Σ emitted / Σ steps)", "AL, pooled", 2),
        Column("acceptance_length_request_mean", "acceptance length, mean over requests", "AL, request mean", 2),
    ]
    # Both figures must be shown as soon as some steps had no proposal: they differ by as much as the skipped share.
    if any(row["proposing_steps"] < row["steps"] for row in tables.overall.to_dict("records")):
        proposing = "over proposing steps (Σ emitted in such steps / Σ such steps)"
        found.append(Column("acceptance_length_proposing", proposing, "AL, proposing steps", 2))
    return [
        *found,
        Column("acceptance_rate", "acceptance rate", "accept. rate", 2),
        Column("system_efficiency", "system efficiency", "efficiency", 2),
        Column("draft_bytes_per_token", "kept per draft token (bytes)", "B/draft", 0),
    ]


def _any_column(tables: Tables, name: str) -> Column:
    words = name.replace("_", " ") if "." not in name else short(name)
    values = tables.overall[name]
    if not pd.api.types.is_float_dtype(values) or "." in name or name in tables.axes:
        return Column(name, words, words, None)
    decimals = 0 if name in _COUNTS else 3 if name.startswith("accepted_at_") else 2
    return Column(name, words, words, decimals)


def position_names(columns: Iterable[str]) -> list[str]:
    """Those among `columns` that hold the joint acceptance at a position: accepted_at_1, accepted_at_2, ..."""
    return [name for name in columns if re.fullmatch(r"accepted_at_\d+", name)]


def cell_text(row: Mapping[str, Any], column: Column) -> str:
    """What stands in a cell of the main table, without a mark."""
    value = row[column.key]
    if column.decimals is None:
        return value_text(bool(value) if column.key == "lossless" else value)
    if f"{column.key}_low" in row:
        return with_interval(row, column.key, column.decimals)
    return number(value, column.decimals)


def is_marked(tables: Tables, columns: Sequence[Column]) -> bool:
    """Whether the table compares anything, and shows it."""
    shown = any(column.key == standing.METRIC for column in columns)
    # Tables that were written before there were standings have no such column.
    return shown and "standing" in tables.overall and standing.BEST in tables.overall["standing"].tolist()


def rule(tables: Tables, bold: str = "Bold") -> str:
    """What the marks mean."""
    equal = {
        axis: heading for axis, heading in headings(tables.axes).items() if axis in standing.conditions(tables.axes)
    }
    return standing.rule(equal, tables.confidence, tables.num_resamples, bold)


def _main(tables: Tables, columns: Sequence[Column]) -> list[dict[str, str]]:
    rows = []
    for row in tables.overall.to_dict("records"):
        shown = {column.heading: cell_text(row, column) for column in columns}
        for column in columns:
            if column.key == standing.METRIC:
                value = shown[column.heading]
                marked = {standing.BEST: f"**{value}**", standing.TIED: f"{value} {TIED_MARK}"}
                shown[column.heading] = marked.get(str(row.get("standing", "")), value)
        rows.append(shown)
    return rows


def _position_text() -> str:
    return "Share of steps in which at least i draft tokens were accepted and emitted (joint):"


def _by_position(tables: Tables, suffix: str) -> list[dict[str, str]]:
    positions = position_names(tables.overall.columns)
    return [
        _axis_values(tables, row)
        | {name.rpartition("_")[2]: number(row[name + suffix], 3) for name in positions}
        for row in tables.overall.to_dict("records")
    ]  # fmt: skip


def _difference_text(tables: Tables) -> str:
    return (
        f"Pooled acceptance length minus that of {tables.differences['baseline'].iloc[0]} at the same other settings, "
        f"tokens per target forward, paired by prompt. Each {100 * tables.confidence:g} % interval stands alone: among "
        f"many rows, about one in {1 / (1 - tables.confidence):.0f} excludes 0 by chance."
    )


def _differences(tables: Tables) -> list[dict[str, str]]:
    rows = []
    for row in tables.differences.to_dict("records"):
        absent = math.isnan(float(row["difference"]))
        verdict = UNDEFINED if absent else value_text(bool(row["excludes_zero"]))
        shown = {"difference": with_interval(row, "difference", sign="+"), "excludes 0": verdict}
        rows.append(_axis_values(tables, row) | shown)
    return rows


def _by_category(tables: Tables) -> list[dict[str, str]]:
    categories = list(dict.fromkeys(tables.by_category["category"]))
    rows: dict[tuple[str, ...], dict[str, str]] = {}
    for row in tables.by_category.to_dict("records"):
        axes = _axis_values(tables, row)
        shown = rows.setdefault(tuple(axes.values()), axes | dict.fromkeys(categories, UNDEFINED))
        shown[str(row["category"])] = with_interval(row, "acceptance_length")
    return list(rows.values())


def grid(rows: Sequence[Mapping[str, str]]) -> str:
    """A Markdown table, columns padded so that it also reads as plain text."""
    frame = pd.DataFrame([{k: v.replace("|", "\\|") for k, v in row.items()} for row in rows], dtype=object)
    widths = [max(len(str(name)), *(len(value) for value in frame[name])) for name in frame.columns]

    def line(values: Sequence[str]) -> str:
        return "| " + " | ".join(value.ljust(width) for value, width in zip(values, widths, strict=True)) + " |"

    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([line(list(frame.columns)), rule, *(line(list(row)) for row in frame.itertuples(index=False))])
