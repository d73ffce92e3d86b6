"""`spectoolkit report`: tables and figures of a finished study, from its stored cells and nothing else.

No model is loaded and nothing is decoded: `manifest.json` names the cells, their files hold the request rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from spectoolkit import files
from spectoolkit.errors import RunError, UsageError
from spectoolkit.frames import DamagedFile, read_frame
from spectoolkit.report import chosen, latex, paper, plots, tables, text
from spectoolkit.report.cells import CellResult, covers, read_rows, varying_axes

FORMATS = ("markdown", "csv", "latex", "parquet", "figures")
USAGE = """spectoolkit report study=FOLDER [KEY=VALUE ...]

  study=FOLDER      a study's folder: manifest.json and cells/
  format=NAMES      some of markdown, csv, latex, parquet, figures, with commas between; all by default
  columns=NAMES     axes and metrics to show, e.g. columns=drafter,sampling.temperature,acceptance_length
  rows=CONDITIONS   e.g. rows=sampling.temperature=0.7,sampling.temperature=1,drafter.name=argmax: one key,
                    either value; several keys, all of them. The best cell is then the best of these rows
  into=FOLDER       where the files go; FOLDER/report by default, so that the study's own are left alone"""
_NUMBERS = ("sampling.temperature", "num_draft_tokens")
KEYS = ("study", "format", "columns", "rows", "into")
CAPTIONS = {
    "sweep": "Acceptance length, with intervals over prompts.",
    "positions": "Share of steps that accept at least i draft tokens, with intervals over prompts.",
    "heatmap": "Acceptance length over draft temperature and target temperature.",
    "histogram": "Share of steps by their number of tokens, with intervals over prompts.",
    "contours": "Expected speed-up over plain decoding, and where the measured strategies lie.",
    "frontier": "Acceptance length against the distance from the target, with intervals over prompts.",
}


@dataclass(frozen=True)
class Stored:
    """What is left of a study on disk.

    Attributes:
        config: as composed for it.
        cells: in the order of the manifest, without the missing and the damaged ones.
        steps: index of a cell -> file of its step records, unless that is damaged.
        missing: files that the manifest names and that are not there.
        damaged: files in cells/ and steps/ that are not what was written -> what is wrong with them.
        foreign: files in cells/ that the manifest does not name.
    """

    folder: Path
    config: Mapping[str, Any]
    cells: Sequence[CellResult]
    steps: Mapping[int, Path]
    missing: Sequence[str]
    damaged: Mapping[str, str]
    foreign: Sequence[str]


def run(arguments: Sequence[str]) -> str:
    """Rebuild what `arguments` (KEY=VALUE, see `USAGE`) ask for; returns what to print.

    Raises:
        UsageError: an unknown key, format, column or setting, a folder without a manifest that names cells, conditions
            that no cell fulfils, a study none of whose cells is left, or figures alone and none that can be drawn.
        RunError: a file that is no cell of the study, or a folder that cannot be written.
    """
    if not arguments or any(argument in ("-h", "--help", "help") for argument in arguments):
        return USAGE
    given = _given(arguments)
    formats = _formats(given.get("format"))
    stored = read(Path(given["study"]))
    indices = _selected(stored.cells, given.get("rows"))
    cells = [stored.cells[i] for i in indices]
    axes = varying_axes(cells, _axes_first(stored.config)) or ["drafter", "verifier"]
    columns = None if given.get("columns") is None else [name.strip() for name in given["columns"].split(",")]
    # An axis that rows= narrows to one value can be asked for still.
    built = tables.build(cells, axes if columns is None else _all_axes(stored, cells, axes))
    text.main_columns(built, columns)

    remarks = [_remark(stored, len(cells)), *_absences(stored)]
    into = Path(given.get("into") or stored.folder / "report")
    title = str(_study(stored.config).get("title") or stored.config.get("name") or stored.folder.name)
    notes = [_fixed(cells, axes), *([" ".join(remarks)] if len(remarks) > 1 or len(cells) < len(stored.cells) else [])]
    written = _write_tables(built, into, formats, title, [note for note in notes if note], columns)
    drawn: list[str] = []
    if "figures" in formats:
        steps = {at: stored.steps[i] for at, i in enumerate(indices) if i in stored.steps}
        found = chosen.figures(cells, replace(built, axes=tuple(axes)), steps)
        frontier, why = _frontier(cells)
        made = {**found.figures, **frontier}
        for name, figure in made.items():
            written += plots.save(figure, into, name, ("png", "pdf", "pgf"))
        remarks += [*found.remarks, *why]
        drawn = list(made)
        if not written and not made:
            raise UsageError("\n".join(["format: expected figures that these cells allow, got none", *remarks]))
    if "latex" in formats:
        source = paper.document(title, "table", [(name, CAPTIONS[name]) for name in drawn])
        written.append(files.replace_text(into / "paper.tex", source))
    names = ", ".join(path.name for path in written)
    shown = f"{text.grid(text.main_rows(built, columns))}\n\n" if "markdown" in formats else ""
    return shown + "\n".join([*remarks, f"Written to {into}: {names}"])


def read(folder: Path) -> Stored:
    """The cells that the manifest in `folder` names, as they lie on disk.

    Raises:
        UsageError: no manifest that names cells, or none of the cells is there and whole.
        RunError: a file that cannot be read, or an older one that is not the cell that its name says.
    """
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"study: expected a study's folder, with manifest.json, got {folder} ({error.strerror})"
        ) from error
    except ValueError as error:
        raise UsageError(f"study: expected manifest.json to be JSON, that of {folder} is not ({error})") from error
    config, named = _checked(manifest, folder)
    is_sealed = (folder / "store.json").exists()  # files from before there were checksums have no store.json either
    cells, steps, missing, damaged = [], {}, [], {}
    for entry in named:
        name = Path(str(entry["file"])).name
        if not (folder / "cells" / name).exists():
            missing.append(name)
            continue
        try:
            cell = _cell(folder / "cells" / name, entry["settings"], is_sealed)
        except ValueError as error:
            damaged[f"cells/{name}"] = str(error)
            continue
        try:
            if (folder / "steps" / name).exists():
                read_frame(folder / "steps" / name, is_sealed=is_sealed)
                steps[len(cells)] = folder / "steps" / name
        except DamagedFile as error:
            damaged[f"steps/{name}"] = str(error)
        cells.append(cell)
    if not cells:
        what = "missing or damaged" if damaged else "missing"
        raise UsageError(
            f"study: expected the cells of manifest.json in {folder / 'cells'}, all {len(named)} are {what}"
        )
    known = {Path(str(entry["file"])).name for entry in named}
    foreign = sorted(path.name for path in (folder / "cells").glob("*.parquet") if path.name not in known)
    return Stored(folder, config, cells, steps, missing, damaged, foreign)


def _checked(manifest: Any, folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The configuration and the cells of a manifest, which another program or a hand may have changed.

    Raises:
        UsageError: no cells, or a part that is not of the kind that `study.Store` writes.
    """
    named = manifest.get("cells") if isinstance(manifest, dict) else None
    if not named:
        raise UsageError(
            f"study: expected a manifest.json that names cells, that of {folder} names none: studies that keep no "
            "cells, such as speed, cannot be rebuilt"
        )

    def check(name: str, value: Any, is_right: bool, expected: str) -> None:
        if not is_right:
            raise UsageError(f"study: expected {expected} as {name} in manifest.json of {folder}, got {value!r:.80}")

    check("cells", named, isinstance(named, list), "a list")
    for i, entry in enumerate(named):
        is_cell = isinstance(entry, dict) and "file" in entry and isinstance(entry.get("settings"), dict)
        check(f"cells[{i}]", entry, is_cell, "a cell's file and settings")
    config = manifest.get("config") or {}
    check("config", config, isinstance(config, dict), "settings")
    for key in ("study", "grid"):
        check(f"config.{key}", config.get(key), isinstance(config.get(key) or {}, dict), "settings")
    cases = config.get("cases") or []
    check("config.cases", cases, isinstance(cases, list) and all(isinstance(case, dict) for case in cases), "a list")
    return config, named


def _cell(path: Path, settings: Mapping[str, Any], is_sealed: bool) -> CellResult:
    try:
        rows = read_rows(path, is_sealed=is_sealed)
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror or error}") from error
    for key, column in (("engine", "engine"), ("num_draft_tokens", "num_draft_tokens")):
        held = {str(value) for value in rows[column]}
        if key in settings and held - {str(settings[key])}:
            raise RunError(
                f"{path} is another cell than manifest.json says: expected rows of {key}={settings[key]}, got "
                f"{', '.join(sorted(held))}"
            )
    return CellResult(settings, rows)


def _given(arguments: Sequence[str]) -> dict[str, str]:
    given: dict[str, str] = {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if key not in KEYS or not equals:
            raise UsageError(f"report: expected KEY=VALUE with a key among {', '.join(KEYS)}, got {argument!r}")
        if key in given:
            raise UsageError(f"report: expected {key} once, got it twice")
        given[key] = value
    if not given.get("study"):
        raise UsageError("report: expected study=FOLDER, got none")
    return given


def _formats(value: str | None) -> list[str]:
    names = [name.strip() for name in (",".join(FORMATS) if value is None else value).split(",")]
    if unknown := [name for name in names if name not in FORMATS]:
        raise UsageError(f"format: expected some of {', '.join(FORMATS)}, got {', '.join(map(repr, unknown))}")
    return names


def _selected(cells: Sequence[CellResult], rows: str | None) -> list[int]:
    """Indices of the cells that fulfil the conditions; one key's conditions are alternatives."""
    if rows is None:
        return list(range(len(cells)))
    wanted: dict[str, set[str]] = {}
    known = sorted({key for cell in cells for key in cell.settings})
    for part in rows.split(","):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        key = f"{key}.name" if f"{key}.name" in known else key
        if key not in known or not equals:
            raise UsageError(f"rows: expected SETTING=VALUE with a setting among {', '.join(known)}, got {part!r}")
        wanted.setdefault(key, set()).add(_same(value))
    kept = [
        i for i, cell in enumerate(cells)
        if all(_same(str(cell.settings.get(key))) in values for key, values in wanted.items())
    ]  # fmt: skip
    if not kept:
        held = {key: sorted({str(cell.settings.get(key)) for cell in cells}) for key in wanted}
        said = "; ".join(f"{key}: {', '.join(values)}" for key, values in held.items())
        raise UsageError(f"rows: expected conditions that a cell fulfils, none fulfils {rows!r} ({said})")
    return kept


def _same(value: str) -> str:
    """1 and 1.0 are one value."""
    try:
        return f"{float(value):g}"
    except ValueError:
        return value.lower() if value in ("True", "False", "true", "false") else value


def _study(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return config.get("study") or {}


def _all_axes(stored: Stored, cells: Sequence[CellResult], axes: Sequence[str]) -> list[str]:
    """`axes` and those of all stored cells that `cells` have."""
    keys = {key for cell in cells for key in cell.settings}
    others = varying_axes(stored.cells, _axes_first(stored.config))
    return list(dict.fromkeys([*axes, *(axis for axis in others if any(covers(axis, key) for key in keys))]))


def _axes_first(config: Mapping[str, Any]) -> list[str]:
    """The axes in the order in which the study's grid and cases name them."""
    named = [*_leaves(config.get("grid") or {}), *(key for case in config.get("cases") or [] for key in case)]
    return [axis for name in named for axis in (name, name.split(".")[0])]


def _leaves(grid: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in grid.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def _remark(stored: Stored, shown: int) -> str:
    total = len(stored.cells) + len(stored.missing) + sum(name.startswith("cells/") for name in stored.damaged)
    name = stored.config.get("name") or stored.folder.name
    return f"{shown} of the {total} cells of {name}."


def _absences(stored: Stored) -> list[str]:
    found = []
    if stored.missing:
        found.append(f"Missing: {len(stored.missing)} cells without a file: {', '.join(stored.missing)}.")
    if stored.damaged:
        said = ", ".join(f"{name} ({why})" for name, why in stored.damaged.items())
        found.append(f"Damaged: {len(stored.damaged)} files: {said}; the study's own command computes them again.")
    if stored.foreign:
        found.append(
            f"Foreign: {len(stored.foreign)} files that the manifest does not name: {', '.join(stored.foreign)}."
        )
    return found


def _fixed(cells: Sequence[CellResult], axes: Sequence[str]) -> str:
    """What is equal in all rows and a reader wants to know."""
    asked = ("target.name", "draft_model.name", "drafter.name", "verifier.name", *_NUMBERS)
    settings = cells[0].settings
    shown = [
        f"{text.short(key)} {'= ' if key in _NUMBERS else ''}{text.value_text(settings[key])}"
        for key in asked
        if key in settings and key not in axes and key.split(".")[0] not in axes
    ]
    return f"In all rows: {', '.join(shown)}." if shown else ""


def _write_tables(
    built: tables.Tables, into: Path, formats: Sequence[str], title: str, notes: list[str], columns: list[str] | None
) -> list[Path]:
    written = []
    if "markdown" in formats:
        written.append(files.replace_text(into / "table.md", text.markdown(built, title, notes, columns)))
    frame = tables.long(built)
    if columns is not None:
        ends = ("", "_low", "_high")
        kept = [name + end for name in columns for end in ends if name + end in frame.columns]
        frame = pd.DataFrame(frame, columns=list(dict.fromkeys(["scope", "category", *kept])))
    if "csv" in formats:
        written.append(files.replace_text(into / "table.csv", frame.to_csv(index=False, lineterminator="\n")))
    if "parquet" in formats:
        written.append(files.replace(into / "table.parquet", lambda path: frame.to_parquet(path, index=False)))
    if "latex" in formats:
        caption = " ".join([f"{title}.", *notes])
        source = latex.table(built, caption=caption, label="tab:acceptance", columns=columns)
        written.append(files.replace_text(into / "table.tex", source))
    return written


def _frontier(cells: Sequence[CellResult]) -> tuple[dict[str, Any], list[str]]:
    """The frontier of cells that say how far what they emit is from the target, and why there is none."""
    key = "sampling.temperature"
    if not all("distance_tokens" in cell.rows and key in cell.settings for cell in cells):
        return {}, []
    from spectoolkit.report.frontier import frontier_figure
    from spectoolkit.studies.lossy_frontier import table_of  # brings torch, which nothing else here needs

    def points(lossless: bool) -> set[tuple[Any, ...]]:
        of_kind = [cell.settings for cell in cells if bool(cell.settings["verifier.is_lossless"]) == lossless]
        return {(settings.get("drafter.name"), settings[key]) for settings in of_kind}

    if absent := points(False) - points(True):
        return {}, [
            f"frontier: not drawn, expected a lossless cell for every drafter and temperature, none at {absent}"
        ]
    table = table_of(cells, sorted({float(str(cell.settings[key])) for cell in cells}))
    return {"frontier": frontier_figure(table)}, []
