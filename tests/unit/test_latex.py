"""Tables as LaTeX: what siunitx and booktabs can read, which cells are marked, and that a document of it compiles."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from spectoolkit.report import latex, paper, plots, tables
from spectoolkit.report.cells import CellResult
from spectoolkit.report.text import latex_escape
from tests.helpers import figures
from tests.helpers.fake_rows import cells, simulate

NUMBER = re.compile(r"(\\bfseries )?-?\d+(\.\d+)?|\{--\}")
ENGINE = next((name for name in paper.ENGINES if shutil.which(name)), None)


@pytest.fixture(scope="module")
def built() -> tables.Tables:
    axes = ["sampling.temperature", "drafter", "verifier"]
    return tables.build(cells((0.0, 0.7), num_clusters=6, tokens=24), axes, num_resamples=200)


def check(source: str) -> list[list[str]]:
    """Refuse a table that TeX would refuse; returns its body, one list of columns per row."""
    for begin, name in re.findall(r"\\(begin|end)\{(\w+)\}", source):
        assert begin in ("begin", "end")
        assert source.count(rf"\begin{{{name}}}") == source.count(rf"\end{{{name}}}") == 1
    plain = re.sub(r"(?<!\\)%.*", "", source)
    assert re.sub(r"\\[{}]", "", plain).count("{") == re.sub(r"\\[{}]", "", plain).count("}")
    preamble = re.search(r"\\begin\{tabular\}\{@\{\}(.*)@\{\}\}\n", source)
    assert preamble is not None
    specs = re.findall(r"S\[[^]]*\]|@\{\\,\}l|l", preamble[1])
    assert "".join(specs) == preamble[1]
    head, body = source.split(r"\toprule")[1].split(r"\bottomrule")[0].split(r"\midrule")
    spans = [int(n) for n in re.findall(r"\\multicolumn\{(\d+)\}", head)]
    names = re.split(r"(?<!\\)&", head.strip().removesuffix(r"\\"))
    assert len(names) + sum(n - 1 for n in spans) == len(specs)
    body = body.replace("\\addlinespace\n", "")
    rows = [re.split(r" ?(?<!\\)& ?", line.removesuffix(r"\\").rstrip(" ")) for line in body.strip().splitlines()]
    assert all(line.endswith(r"\\") for line in body.strip().splitlines())
    for row in rows:
        assert len(row) == len(specs)
        for spec, value in zip(specs, row, strict=True):
            if spec.startswith("S"):
                assert NUMBER.fullmatch(value), value
                form = re.search(r"table-format=(-?)(\d+)\.(\d+)", spec)
                assert form is not None
                digits = value.removeprefix(r"\bfseries ")
                if digits != "{--}":
                    whole, _, decimals = digits.lstrip("-").partition(".")
                    assert len(whole) <= int(form[2])
                    assert len(decimals) <= int(form[3])
                    assert form[1] or not digits.startswith("-")
            assert "_" not in value.replace(r"\_", "")
    return rows


def test_numbers_stand_in_columns_that_siunitx_can_read(built):
    source = latex.table(built, caption="50% & more", label="tab:x")
    rows = check(source)
    assert len(rows) == 12
    assert r"\caption{50\% \& more Bold: the largest pooled" in source
    assert "98304" in source  # siunitx groups digits itself
    assert r"{T} & drafter & verifier & lossless & \multicolumn{2}{c}{\shortstack{AL,\\pooled}}" in source
    assert latex.table(built).startswith(latex.NEEDS + "\n% Bold: ")


def test_marks_are_those_of_the_standings_and_never_on_a_lossy_row(built):
    rows = check(latex.table(built))
    for shown, row in zip(rows, built.overall.to_dict("records"), strict=True):
        assert shown[4].startswith(r"\bfseries") == (row["standing"] == "best")
        assert shown[5].endswith(r"\textdagger") == (row["standing"] == "tied")
        if not row["lossless"]:
            assert row["standing"] == ""
    assert any(row["standing"] == "best" for row in built.overall.to_dict("records"))


def test_columns_can_be_chosen_and_odd_values_stay_readable(built):
    rows = check(latex.table(built, columns=["drafter", "acceptance_rate", "accepted_at_2", "requests"]))
    assert [len(row) for row in rows] == [5] * 12  # acceptance at a position has an interval
    odd = CellResult(
        {"drafter.name": "a_b & 50% #1", "verifier.name": "rejection", "verifier.is_lossless": True, "drafter.x": -1.5},
        simulate(0.6, num_clusters=4, tokens=12, proposes=0.0),
    )
    other = CellResult({**odd.settings, "drafter.x": 2}, odd.rows)
    found = tables.build([odd, other], ["drafter.x"], num_resamples=5)
    rows = check(latex.table(found))
    assert [row[0] for row in rows] == ["-1.5", "2"]
    assert "{--}" in rows[0]  # nothing drafted, so no acceptance rate
    assert latex_escape("Σ ≤ †") == r"$\Sigma$ $\leq$ \textdagger{}"


def test_the_paper_is_a_whole_document(built, tmp_path):
    source = paper.document("50% of a_b", "table", [("sweep", "Lengths & more")])
    assert source.count(r"\begin{figure}") == source.count(r"\end{figure}") == 1
    assert r"\title{50\% of a\_b}" in source
    for package in ("booktabs", "siunitx", "graphicx"):
        assert rf"\usepackage{{{package}}}" in source


@pytest.mark.skipif(ENGINE is None, reason="no TeX engine")
def test_it_compiles(built, tmp_path: Path):
    assert ENGINE is not None
    (tmp_path / "table.tex").write_text(latex.table(built, caption="A table.", label="tab:x"))
    plots.save(figures.FIGURES["sweep"](), tmp_path, "sweep", ("pdf", "pgf"))
    source = paper.document("Title", "table", [("sweep", "A sweep")])
    source = source.replace(r"\end{document}", "\\noindent\\input{sweep.pgf}\n\\end{document}")
    (tmp_path / "paper.tex").write_text(source.replace(r"\usepackage{graphicx}", r"\usepackage{graphicx,pgf}"))
    command = [ENGINE, "-interaction=nonstopmode", "-halt-on-error", "paper.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    assert (tmp_path / "paper.pdf").read_bytes().startswith(b"%PDF")
    assert "Overfull" not in done.stdout
