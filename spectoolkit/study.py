"""A grid of cells, run once each and kept on disk: what is there is not computed again.

A study's folder holds `manifest.json` (how the numbers were made), `cells/FINGERPRINT.parquet` (one row per request),
`steps/FINGERPRINT.parquet` (one row per step of a live cell), `trajectories/` (the outputs that replays read), and the
tables and figures made from them. `store.json` says how these files are written. Every one of them has a checksum: a
file that was cut or changed, or that holds the rows of another cell, is moved to `damaged/`, and what it should hold is
computed again.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

import spectoolkit
from spectoolkit.datatypes import Completion, Request
from spectoolkit.errors import RunError, UsageError
from spectoolkit.files import replace_text, writing
from spectoolkit.frames import read_frame, write_frame
from spectoolkit.interfaces import Drafter, LanguageModel, Verifier
from spectoolkit.provenance import provenance
from spectoolkit.records import request_row, step_frame
from spectoolkit.report.cells import CellResult, read_rows

RECORDS_VERSION = 3
"""Raised when the same settings give other numbers than before, so that older stored cells are not taken for them."""

STORE_FORMAT = 2
"""How the files are written: 1 had no checksums (and no `store.json`); 2 has."""


@dataclass(frozen=True)
class Experiment:
    """What a cell decodes with: models loaded, parameters checked.

    Attributes:
        clusters: request id -> the prompt it came from.
        categories: request id -> category of that prompt.
        prompt_changes: what was changed in or left out of the prompt set -> how often; kept with the cell's rows.
    """

    target: LanguageModel
    drafter: Drafter
    verifier: Verifier
    requests: Sequence[Request]
    clusters: Mapping[str, str]
    categories: Mapping[str, str]
    num_draft_tokens: int
    batch_size: int
    prompt_changes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Cell:
    """One point of a study's grid.

    Attributes:
        settings: everything that identifies it, flat: {"sampling.temperature": 0.7, "drafter.name": "argmax", ...}.
        identity: the part of the settings that can change its numbers; its hash names the files.
        text_identity: the part of the settings that the law of an output of the target depends on.
        num_requests: at most; prompts that turn out to be too long may be left out (`Experiment.prompt_changes`).
        build: loads models and prompts; called only when the cell is not on disk.
        pair_on: (draft model, vocabulary size) -> its drafter with that draft model, and its verifier; loads nothing.
    """

    settings: Mapping[str, Any]
    identity: Mapping[str, Any]
    text_identity: Mapping[str, Any]
    num_requests: int
    build: Callable[[], Experiment]
    pair_on: Callable[[LanguageModel | None, int], tuple[Drafter, Verifier]]

    @property
    def fingerprint(self) -> str:
        return digest({"records": RECORDS_VERSION, **self.identity})

    @property
    def engine(self) -> str:
        """How its numbers are obtained: "live" or "replay"."""
        return str(self.settings["engine"])

    @property
    def label(self) -> str:
        return " ".join(str(self.settings[key]) for key in ("drafter.name", "verifier.name", "sampling.temperature"))


class Store:
    """The cells of one study folder. Every file appears whole or not at all, also with several runs at once.

    Args:
        waits: whether a run waits for cells that another process is computing, or leaves them to it.

    Raises:
        RunError: the folder cannot be written.
        UsageError: another version of the toolkit wrote it in a format that this one does not read.
    """

    def __init__(self, folder: str | os.PathLike[str], *, waits: bool = True) -> None:
        self.folder = Path(folder)
        self.waits = waits
        self._sound: dict[Path, tuple[int, int]] = {}  # size and time of files that were found whole
        with writing(self.folder):
            for name in ("cells", "steps", "trajectories"):
                (self.folder / name).mkdir(parents=True, exist_ok=True)
            probe = self.folder / f".probe-{secrets.token_hex(4)}.tmp"
            probe.write_text("")
            now_s = probe.stat().st_mtime
            probe.unlink()
            for left in (*self.folder.glob(".*.tmp*"), *self.folder.glob("*/.*.tmp*")):  # by runs that were killed
                with suppress(FileNotFoundError):
                    if now_s - left.stat().st_mtime > 3600:
                        left.unlink()
        self._is_sealed = _check_format(self.folder)

    @property
    def claims_folder(self) -> Path:
        """Where processes say what they are computing: where it appears."""
        return self.folder / "cells"

    def has(self, cell: Cell) -> bool:
        """Whether the cell is stored, and whole. Files that are not are set aside, with a line on standard error."""
        rows, steps = self._path("cells", cell), self._path("steps", cell)
        damaged = [path for path in (rows, steps) if path.exists() and self._damage(path)]
        for path in damaged:
            self._set_aside(rows)  # first, since it says that there is a whole cell
            self._set_aside(path)
        return not damaged and rows.exists()

    def has_trajectories(self, cell: Cell) -> bool:
        """Whether the outputs are stored that a replay of this cell reads, as `has`."""
        path = self.trajectories_path(cell)
        if path.exists() and self._damage(path):
            self._set_aside(path)
        return path.exists()

    def load(self, cell: Cell) -> CellResult:
        """The stored rows of a cell.

        Raises:
            RunError: the file cannot be read, is damaged, or is another cell's.
        """
        path = self._path("cells", cell)
        try:
            return CellResult(cell.settings, read_rows(path, is_sealed=self._is_sealed))
        except (OSError, ValueError) as error:
            raise RunError(f"{path} is not a readable cell ({error}); the same command computes it again") from error

    def cell_path(self, cell: Cell) -> Path:
        """The file of a cell's request rows."""
        return self._path("cells", cell)

    def describe(self, cells: Sequence[Cell]) -> list[dict[str, Any]]:
        """For a manifest: each cell's file, settings, and how and when it was computed."""
        rows = ((cell, self.load(cell).rows) for cell in cells)
        return [
            {
                "file": self.cell_path(cell).name,
                "settings": cell.settings,
                **{str(k): v for k, v in frame.attrs.items()},
            }
            for cell, frame in rows
        ]

    def save_live(self, cell: Cell, completions: Sequence[Completion], experiment: Experiment, wall_s: float) -> None:
        """Keep a decoded cell, its requests in their order; the file whose existence says so is written last."""
        ordered = {request.id: i for i, request in enumerate(experiment.requests)}
        completions = sorted(completions, key=lambda completion: ordered[completion.request.id])
        rows = [
            request_row(
                completion,
                experiment.num_draft_tokens,
                cluster=experiment.clusters[completion.request.id],
                category=experiment.categories[completion.request.id],
            )
            for completion in completions
        ]
        steps = step_frame(completions)
        write_frame(self._path("steps", cell), steps)
        how = {"wall_s": round(wall_s, 3), "prompt_changes": dict(experiment.prompt_changes)}
        self.save(cell, pd.DataFrame(rows), how)

    def save(self, cell: Cell, rows: pd.DataFrame, how: Mapping[str, Any]) -> None:
        """Keep the request rows of a finished cell, and how they were computed (in the file's metadata), where
        `how` has the last word."""
        rows.attrs = {"fingerprint": cell.fingerprint, **provenance(of_cell=True), **how}
        write_frame(self._path("cells", cell), rows)

    def trajectories_path(self, cell: Cell) -> Path:
        """Where the outputs are kept that a replay of this cell reads."""
        return self.folder / "trajectories" / f"{digest(cell.text_identity)}.parquet"

    def check_owner(self, config: Mapping[str, Any]) -> None:
        """Refuse to write over the tables of a study with other settings; its grid, cases and folder may differ.

        Raises:
            UsageError: names the settings that differ.
        """
        try:
            before = json.loads((self.folder / "manifest.json").read_text())["config"]
        except (OSError, ValueError, KeyError, TypeError):
            return  # no study yet, or one whose manifest cannot be read and is written anew
        now = json.loads(json.dumps(config, default=str))
        free = ("grid", "cases", "pairs", "folder", "study")
        differing = sorted(k for k in before.keys() | now.keys() if k not in free and before.get(k) != now.get(k))
        if differing:
            raise UsageError(
                f"folder: {self.folder} holds the tables of a study with other settings ({', '.join(differing)}); "
                "say folder=... for this one, or delete manifest.json there to have them replaced"
            )

    def write_manifest(self, manifest: Mapping[str, Any]) -> None:
        """Write `manifest.json`."""
        replace_text(self.folder / "manifest.json", json.dumps(manifest, indent=2, default=str) + "\n")

    def _path(self, kind: str, cell: Cell) -> Path:
        return self.folder / kind / f"{cell.fingerprint}.parquet"

    def _damage(self, path: Path) -> str:
        """What is wrong with a file, "" if nothing is; one that has not changed since is not read twice."""
        try:
            found = path.stat()
            if self._sound.get(path) == (found.st_size, found.st_mtime_ns):
                return ""
            (read_rows if path.parent.name == "cells" else read_frame)(path, is_sealed=self._is_sealed)
        except FileNotFoundError:
            return ""  # set aside by another process in the meantime
        except ValueError as error:
            print(f"spectoolkit: {path} is damaged ({error}): moved to damaged/, computed again", file=sys.stderr)
            return str(error)
        except OSError as error:
            raise RunError(f"cannot read {path}: {error.strerror or error}") from error
        self._sound[path] = (found.st_size, found.st_mtime_ns)
        return ""

    def _set_aside(self, path: Path) -> None:
        place = self.folder / "damaged" / f"{path.parent.name}-{path.name}"
        with writing(place):
            place.parent.mkdir(exist_ok=True)
            with suppress(FileNotFoundError):  # another process was faster
                os.replace(path, place)


def _check_format(folder: Path) -> bool:
    """Whether every file of the folder has a checksum.

    Raises:
        UsageError: it was written in a format that is unknown here.
    """
    path = folder / "store.json"
    mine = {"format": STORE_FORMAT, "records": RECORDS_VERSION}
    try:
        text = path.read_text()
    except FileNotFoundError:
        if any(folder.glob("*/*.parquet")):
            return False
        replace_text(path, json.dumps({**mine, "spectoolkit": spectoolkit.__version__}) + "\n")
        return True
    try:
        found = dict(json.loads(text))
    except (ValueError, TypeError):
        found = {}
    if any(found.get(key) != value for key, value in mine.items()):
        raise UsageError(
            f"folder: expected one whose {path} says {json.dumps(mine)}, got {text.strip()!r}, of another version of "
            "spectoolkit; say another folder=..., or use that version"
        )
    return True


def digest(settings: Mapping[str, Any]) -> str:
    """A short hash of plain settings, the order of whose keys does not matter."""
    text = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
