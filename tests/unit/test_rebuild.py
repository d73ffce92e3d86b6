"""`spectoolkit report`: tables and figures of a study from its stored cells, and what it says when some are gone."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from spectoolkit import cli, config, rebuild
from spectoolkit.errors import RunError, UsageError
from spectoolkit.report import chosen

TOY = ["target=tabular", "draft_model=tabular", "prompts.limit=4", "max_new_tokens=8", "batch_size=8"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("studies") / "sweep"
    grid = ["grid.sampling.temperature=[0.7,1.0]", "grid.drafter=[argmax,same_temperature]"]
    config.plan(["experiment=temperature_sweep", *TOY, *grid, f"folder={folder}"]).run()
    return folder


@pytest.fixture
def study(finished, tmp_path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "sweep"))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def flip(path: Path) -> None:
    """Change a byte of a file's data, none of which Parquet needs to find the rest."""
    data = bytearray(path.read_bytes())
    data[data.index(b"PAR1") + 40] ^= 255
    path.write_bytes(data)


def swap(one: Path, other: Path) -> None:
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)


def as_of_old(study: Path) -> None:
    """Without checksums, and without metadata that say whose rows a file holds."""
    for path in [*study.glob("cells/*"), *study.glob("steps/*")]:
        frame = pd.read_parquet(path)
        frame.attrs = {}
        frame.to_parquet(path)
    (study / "store.json").unlink()


def test_the_numbers_are_those_of_the_study_and_its_own_files_are_left_alone(study):
    before = contents(study)
    said = rebuild.run([f"study={study}"])
    assert {name: value for name, value in contents(study).items() if not name.startswith("report/")} == before
    mine, its = (pd.read_csv(folder / "table.csv") for folder in (study / "report", study))
    pd.testing.assert_frame_equal(mine, its)
    assert len(mine.query("scope == 'overall'")) == 8
    pd.testing.assert_frame_equal(
        pd.read_parquet(study / "report" / "table.parquet"), pd.read_parquet(study / "table.parquet")
    )
    made = {path.name for path in (study / "report").iterdir()}
    assert made >= {"table.md", "table.csv", "table.parquet", "table.tex", "paper.tex"}
    assert made >= {
        f"{name}.{form}" for name in ("sweep", "positions", "histogram", "contours") for form in ("png", "pdf", "pgf")
    }
    assert "8 of the 8 cells" in said
    assert "contours: argmax, rejection, same_temperature, rejection left out: only cells decoded live say" in said
    assert "tied with it" in (study / "report" / "table.md").read_text()
    source = (study / "report" / "paper.tex").read_text()
    assert r"\input{table}" in source
    assert r"\includegraphics{sweep.pdf}" in source


def test_no_model_is_needed_not_even_torch(study):
    code = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'hydra', 'omegaconf'): sys.modules[name] = None\n"  # not to be had
        "from spectoolkit import rebuild\n"
        f"print(rebuild.run(['study={study}', 'format=markdown,figures']))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "sweep.png" in done.stdout


def test_cells_that_are_gone_or_do_not_belong_are_reported(study):
    names = sorted(path.name for path in (study / "cells").iterdir())
    shutil.copy(study / "cells" / names[0], study / "cells" / "0123456789abcdef.parquet")
    (study / "cells" / names[1]).unlink()
    said = rebuild.run([f"study={study}", "format=markdown,csv"])
    assert "7 of the 8 cells" in said
    assert f"Missing: 1 cells without a file: {names[1]}." in said
    assert "Foreign: 1 files that the manifest does not name: 0123456789abcdef.parquet." in said
    page = (study / "report" / "table.md").read_text()
    assert f"Missing: 1 cells without a file: {names[1]}." in page
    assert len(pd.read_csv(study / "report" / "table.csv").query("scope == 'overall'")) == 7


def test_a_file_that_is_not_the_cell_it_is_called_is_an_error(study):
    cells = rebuild.read(study).cells
    engines = [str(cell.settings["engine"]) for cell in cells]
    files = [entry["file"] for entry in json.loads((study / "manifest.json").read_text())["cells"]]
    live, replayed = files[engines.index("live")], files[engines.index("replay")]
    shutil.copy(study / "cells" / live, study / "cells" / replayed)
    as_of_old(study)
    with pytest.raises(RunError, match="expected rows of engine=replay, got live"):
        rebuild.run([f"study={study}"])


def test_damaged_and_swapped_cells_are_listed_and_the_others_are_shown(study):
    entries = json.loads((study / "manifest.json").read_text())["cells"]
    torn, one, other, _ = sorted(entry["file"] for entry in entries if entry["settings"]["engine"] == "live")
    flip(study / "cells" / torn)
    swap(study / "cells" / one, study / "cells" / other)
    said = rebuild.run([f"study={study}", "format=markdown,csv"])
    assert "5 of the 8 cells" in said
    assert "Damaged: 3 files: " in said
    assert "the study's own command computes them again." in said
    assert f"cells/{torn} (its checksum does not fit)" in said
    assert f"cells/{one} (it holds the rows of cell {other.removesuffix('.parquet')})" in said
    assert f"cells/{torn} (its checksum does not fit)" in (study / "report" / "table.md").read_text()
    assert len(pd.read_csv(study / "report" / "table.csv").query("scope == 'overall'")) == 5
    for path in (study / "cells").iterdir():
        path.write_bytes(b"PAR1")
    with pytest.raises(UsageError, match="all 8 are missing or damaged"):
        rebuild.run([f"study={study}"])


def test_damaged_step_records_are_listed_and_not_counted(tmp_path):
    config.plan([*TOY, "drafter=argmax", f"folder={tmp_path}"]).run()
    (path,) = (tmp_path / "steps").iterdir()
    flip(path)
    said = rebuild.run([f"study={tmp_path}", "format=csv,figures"])
    assert "1 of the 1 cells" in said
    assert f"Damaged: 1 files: steps/{path.name} (its checksum does not fit)" in said
    assert "counts accepted" in said


def test_a_study_from_before_there_were_checksums_is_rebuilt(study):
    as_of_old(study)
    assert "8 of the 8 cells" in rebuild.run([f"study={study}", "format=csv"])


def test_rows_and_columns_are_selected(study):
    options = ["format=csv,markdown", "columns=drafter,acceptance_length,acceptance_rate"]
    said = rebuild.run([f"study={study}", "rows=sampling.temperature=0.70,verifier=rejection", *options])
    table = pd.read_csv(study / "report" / "table.csv").query("scope == 'overall'")
    assert list(table.columns) == [
        "scope", "category", "drafter", "acceptance_length", "acceptance_length_low", "acceptance_length_high",
        "acceptance_rate",
    ]  # fmt: skip
    assert table["drafter"].tolist() == ["argmax", "same_temperature"]
    page = (study / "report" / "table.md").read_text()
    assert "verifier rejection, temperature = 0.7" in page
    assert "2 of the 8 cells" in said
    columns = "columns=drafter,sampling.temperature,drafter.name,acceptance_length"
    rebuild.run([f"study={study}", "rows=sampling.temperature=0.7,drafter=argmax", columns])  # of one value each
    table = pd.read_csv(study / "report" / "table.csv").query("scope == 'overall'")
    assert table["drafter"].tolist() == table["drafter.name"].tolist() == ["argmax", "argmax"]
    assert table["sampling.temperature"].tolist() == [0.7, 0.7]
    both = rebuild.run(
        [f"study={study}", "rows=drafter=argmax,drafter=same_temperature,verifier=typical", "format=csv"]
    )
    assert "4 of the 8 cells" in both


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["format=csv"], "expected study=FOLDER, got none"),
        (["study=X", "foo=1"], "expected KEY=VALUE with a key among study, format, columns, rows, into, got 'foo=1'"),
        (["study=X", "study=X"], "expected study once"),
        (["study=X", "format=html"], "format: expected some of markdown, csv, latex, parquet, figures, got 'html'"),
        (["study=X", "columns=speed"], "columns: expected some of sampling.temperature, .*, got speed"),
        (["study=X", "rows=drafter=eagle"], "none fulfils 'drafter=eagle' .drafter.name: argmax, same_temperature"),
        (["study=X", "rows=drafter"], "rows: expected SETTING=VALUE"),
        (["study=/nowhere"], "expected a study's folder, with manifest.json, got /nowhere"),
    ],
)
def test_mistakes_are_named(finished, arguments, message):
    with pytest.raises(UsageError, match=message):
        rebuild.run([argument.replace("study=X", f"study={finished}") for argument in arguments])


def test_a_study_without_cells_says_so(study):
    (study / "manifest.json").write_text('{"config": {}}')
    with pytest.raises(UsageError, match="names none: studies that keep no cells"):
        rebuild.run([f"study={study}"])
    (study / "manifest.json").write_text("{")
    with pytest.raises(UsageError, match="to be JSON"):
        rebuild.run([f"study={study}"])


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        ({"cells": "abc"}, "expected a list as cells in manifest.json of .*, got 'abc'"),
        ({"cells": [{"x": 1}]}, r"expected a cell's file and settings as cells\[0\] in .*, got {'x': 1}"),
        ({"cells": ["x"]}, r"expected a cell's file and settings as cells\[0\]"),
        ({"cells": [{"file": "x", "settings": "y"}]}, r"expected a cell's file and settings as cells\[0\]"),
        ({"cells": [{"file": "x", "settings": {}}], "config": "abc"}, "expected settings as config in .*, got 'abc'"),
        ({"cells": [{"file": "x", "settings": {}}], "config": {"grid": [1]}}, r"as config\.grid in .*, got \[1\]"),
        ({"cells": [{"file": "x", "settings": {}}], "config": {"cases": "abc"}}, r"as config\.cases in .*, got 'abc'"),
    ],
)
def test_a_manifest_of_another_shape_is_refused(tmp_path, manifest, message):
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UsageError, match=message):
        rebuild.read(tmp_path)


def test_a_study_all_of_whose_cells_are_gone_is_refused(study):
    shutil.rmtree(study / "cells")
    with pytest.raises(UsageError, match="all 8 are missing"):
        rebuild.run([f"study={study}"])


def test_a_single_cell_can_be_rebuilt_and_its_steps_are_counted(tmp_path):
    config.plan([*TOY, "drafter=argmax", f"folder={tmp_path}"]).run()
    said = rebuild.run([f"study={tmp_path}", "format=csv,figures"])
    assert "1 of the 1 cells" in said
    assert "counts accepted" not in said  # live, so emitted tokens
    assert (tmp_path / "report" / "histogram.pgf").exists()


def test_cells_that_draft_nothing_are_not_blamed_for_being_replayed(tmp_path):
    config.plan([*TOY, "drafter=none", f"folder={tmp_path}"]).run()
    said = rebuild.run([f"study={tmp_path}", "format=figures"])
    assert "contours: not drawn: nothing was drafted" in said
    assert "decoded live" not in said


def test_figures_alone_none_of_which_can_be_drawn_are_an_error_with_the_reasons(study, monkeypatch):
    monkeypatch.setattr(chosen, "MAX_LINES", 0)
    with pytest.raises(UsageError, match=r"format: expected figures .*got none\n(.*\n)*positions: not drawn, rows: "):
        rebuild.run([f"study={study}", "format=figures", "into=nowhere"])


def test_the_console_script_knows_the_command(finished, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["spectoolkit", "report", f"study={finished}", "format=csv", f"into={tmp_path}"])
    cli.main()
    assert "8 of the 8 cells" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["spectoolkit", "report", "nothing"])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 2
    assert "expected KEY=VALUE" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["spectoolkit", "report"])
    cli.main()
    assert "study=FOLDER" in capsys.readouterr().out
