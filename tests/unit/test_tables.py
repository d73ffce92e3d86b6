"""Cells to tables: what is refused, what is computed, what is written."""

import math
import re
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from spectoolkit.errors import UsageError
from spectoolkit.metrics import bootstrap, paired_difference, summarise
from spectoolkit.report import latex, tables, text
from spectoolkit.report.cells import CellResult, check_shared
from tests.helpers.fake_rows import cells, row, simulate, step

AXES = ("verifier.name", "drafter.name", "sampling.temperature")


@pytest.fixture(scope="module")
def grid() -> list[CellResult]:
    return cells((0.0, 0.7), num_clusters=6, tokens=24)


@pytest.fixture(scope="module")
def built(grid):
    return tables.build(grid, AXES, {"drafter.name": "argmax"}, num_resamples=200)


def changed(cell: CellResult, **settings: object) -> CellResult:
    return replace(cell, settings=dict(cell.settings) | {k.replace("__", "."): v for k, v in settings.items()})


def small(name: str = "argmax", rows: pd.DataFrame | None = None, **settings: object) -> CellResult:
    base = {"drafter.name": name, "verifier.name": "rejection", "verifier.is_lossless": True, "num_draft_tokens": 4}
    rows = simulate(0.6, num_clusters=4, tokens=12) if rows is None else rows
    return changed(CellResult(base, rows), **settings)


def test_cells_that_differ_outside_the_axes_are_refused_with_keys_and_values(grid):
    odd = [*grid[:-1], changed(grid[-1], num_draft_tokens=8, target__name="other")]
    with pytest.raises(UsageError) as caught:
        check_shared(odd, AXES)
    assert "num_draft_tokens: 4, 8" in str(caught.value)
    assert "target.name: smollm2, other" in str(caught.value)
    check_shared(odd, [*AXES, "target", "num_draft_tokens"])


def test_a_setting_that_only_some_cells_have_differs(grid):
    with pytest.raises(UsageError, match=r"sampling\.top_p: \(absent\), 0\.9"):
        check_shared([*grid[:-1], changed(grid[-1], sampling__top_p=0.9)], AXES)


def test_a_group_covers_the_settings_below_it_and_no_other():
    one, other = small(), small("model", drafter__temperature=0.3)
    check_shared([one, other], ["drafter"])
    with pytest.raises(UsageError, match=r"drafter\.temperature: \(absent\), 0\.3"):
        check_shared([one, other], ["drafter.name"])
    with pytest.raises(UsageError, match=r"drafters\.seed"):
        check_shared([small(drafters__seed=1), small("model", drafters__seed=2)], ["drafter"])


def test_two_cells_at_one_point_are_refused():
    with pytest.raises(UsageError, match=r"got two at drafter\.name=argmax"):
        check_shared([small(), small()], ["drafter.name"])
    with pytest.raises(UsageError, match=r"sampling\.temperature=1"):
        check_shared([small(sampling__temperature=1), small(sampling__temperature=1.0)], ["sampling.temperature"])


def test_bad_input_is_named():
    with pytest.raises(UsageError, match="at least one cell"):
        tables.build([], AXES)
    with pytest.raises(UsageError, match="got 'drafer'"):
        tables.build([small()], ["drafer"])
    without = {k: v for k, v in small().settings.items() if k != "verifier.is_lossless"}
    with pytest.raises(UsageError, match=r"verifier\.is_lossless"):
        tables.build([CellResult(without, small().rows)], ["drafter"])
    with pytest.raises(UsageError, match="a category for every request"):
        tables.build([small(rows=small().rows.assign(category=None))], ["drafter"], num_resamples=5)
    mixed = small().rows.assign(engine=["live", "replay"] * 4)
    with pytest.raises(UsageError, match="one engine in a cell, got live, replay"):
        tables.build([small(rows=mixed)], ["drafter"])


def test_overall_holds_one_cell_per_row_with_its_own_numbers(grid, built):
    overall = built.overall
    assert list(overall.columns[:5]) == [*AXES, "engine", "lossless"]
    assert len(overall) == len(grid)
    for cell, found in zip(grid, overall.to_dict("records"), strict=True):
        assert found["drafter.name"] == cell.settings["drafter.name"]
        assert found["lossless"] == (cell.settings["verifier.name"] == "rejection")
        assert {k: found[k] for k in summarise(cell.rows)} == pytest.approx(summarise(cell.rows), nan_ok=True)
        for name, interval in bootstrap(cell.rows, tables.INTERVAL_METRICS, 200).items():
            assert (found[f"{name}_low"], found[f"{name}_high"]) == interval


def test_categories_are_cells_of_their_own(grid, built):
    by_category = built.by_category
    assert len(by_category) == 3 * len(grid)
    code = grid[0].rows[grid[0].rows["category"] == "code"]
    found = by_category[by_category["category"] == "code"].iloc[0]
    assert found["acceptance_length"] == summarise(code)["acceptance_length"]
    assert found["clusters"] == 2


def test_differences_are_paired_with_the_baseline_at_the_same_point(grid, built):
    found = built.differences
    assert len(found) == 8
    assert set(found["drafter.name"]) == {"same_temperature", "ngram"}
    at = (found["verifier.name"] == "typical") & (found["drafter.name"] == "ngram")
    at &= found["sampling.temperature"] == 0.7
    settings = [
        (c.settings["verifier.name"], c.settings["drafter.name"], c.settings["sampling.temperature"]) for c in grid
    ]
    a, b = (grid[settings.index(("typical", name, 0.7))] for name in ("ngram", "argmax"))
    expected = paired_difference(a.rows, b.rows, "acceptance_length", 200)
    one = found[at].iloc[0]
    assert (one["difference"], one["difference_low"], one["difference_high"]) == expected
    assert one["excludes_zero"]
    # At temperature 0 drafting at the target's temperature is drafting by argmax.
    same = found[(found["drafter.name"] == "same_temperature") & (found["sampling.temperature"] == 0)]
    assert same["difference"].tolist() == [0, 0]
    assert not same["excludes_zero"].any()


def test_baseline_rules(grid):
    with pytest.raises(UsageError, match="no cell has them"):
        tables.build(grid, AXES, {"drafter.name": "eagle"}, num_resamples=5)
    with pytest.raises(UsageError, match=r"got 'target\.name'"):
        tables.build(grid, AXES, {"target.name": "smollm2"}, num_resamples=5)
    two = [small("model", drafter__temperature=t) for t in (0.3, 0.7)]
    with pytest.raises(UsageError, match="one cell per point, got two"):
        tables.build(two, ["drafter"], {"drafter.name": "model"}, num_resamples=5)
    others = small("model", rows=simulate(0.6, num_clusters=5, tokens=12))
    with pytest.raises(UsageError, match="same clusters"):
        tables.build([small(), others], ["drafter"], {"drafter.name": "argmax"}, num_resamples=5)
    # A point at which the baseline was not run has no difference, and says so.
    missing = [c for c in grid if (c.settings["drafter.name"], c.settings["sampling.temperature"]) != ("argmax", 0.7)]
    found = tables.build(missing, AXES, {"drafter.name": "argmax"}, num_resamples=5).differences
    assert found.loc[found["sampling.temperature"] == 0.7, "difference"].isna().all()
    assert len(tables.build(grid, AXES, num_resamples=5).differences) == 0


def test_groups_get_short_labels_that_tell_their_cells_apart():
    made = [small(), small("model", drafter__temperature=0.3), small("model", drafter__temperature=0.7)]
    overall = tables.build(made, ["drafter"], {"drafter.name": "argmax"}, num_resamples=5).overall
    assert overall["drafter"].tolist() == ["argmax", "model (temperature=0.3)", "model (temperature=0.7)"]
    assert overall["drafter.temperature"].tolist()[1:] == [0.3, 0.7]
    assert overall["drafter.name"].tolist() == ["argmax", "model", "model"]


def test_settings_of_mixed_kinds_can_be_stored(tmp_path):
    made = [small(drafter__window="all"), small(drafter__window=4), small(drafter__window=None)]
    built = tables.build(made, ["drafter.window"], {"drafter.window": 4}, num_resamples=5)
    assert built.differences["drafter.window"].tolist()[0] == "all"
    tables.write(built, tmp_path, "t")
    assert len(pd.read_parquet(tmp_path / "table.parquet")) == 3 * 4


def test_cells_of_different_length_of_draft_share_columns():
    made = [
        small(rows=pd.DataFrame([row([step(k, k)] * 3, k, cluster=c) for c in "ab"]), num_draft_tokens=k)
        for k in (2, 4)
    ]
    overall = tables.build(made, ["num_draft_tokens"], num_resamples=5).overall
    positions = [c for c in overall.columns if re.fullmatch(r"accepted_at_\d+", c)]
    assert positions == [f"accepted_at_{i}" for i in (1, 2, 3, 4)]
    assert math.isnan(overall["accepted_at_3"].iloc[0])
    assert overall["accepted_at_3"].iloc[1] == 1


def test_nothing_drafted_is_undefined_and_flagged(tmp_path):
    rows = pd.DataFrame([row([step(0, 0)] * 3, 2, cluster=c) for c in "ab"])
    built = tables.build([small(rows=rows)], ["drafter"], num_resamples=5)
    assert "acceptance_rate" in built.overall["undefined"].iloc[0].split()
    assert "acceptance_length" not in built.overall["undefined"].iloc[0].split()
    tables.write(built, tmp_path, "t")
    cells_of_row = [
        c.strip() for c in (tmp_path / "table.md").read_text().split("| argmax")[1].split("\n")[0].split("|")
    ]
    assert text.UNDEFINED in cells_of_row
    assert "1.00 [1.00, 1.00]" in cells_of_row


def test_files_hold_unrounded_numbers_and_round_for_people(grid, built, tmp_path):
    tables.write(built, tmp_path, "A title", ["A note."], caption="50% & more", label="tab:sweep")
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"table.md", "table.csv", "table.parquet", "table.tex", "differences.csv"}  # no temporary files
    stored, typed = pd.read_csv(tmp_path / "table.csv"), pd.read_parquet(tmp_path / "table.parquet")
    assert stored["acceptance_length"].tolist() == typed["acceptance_length"].tolist()
    assert stored["scope"].tolist() == ["overall"] * 12 + ["category"] * 36
    assert stored["acceptance_length"].tolist()[:12] == built.overall["acceptance_length"].tolist()
    differences = pd.read_csv(tmp_path / "differences.csv")
    assert differences["difference"].tolist() == built.differences["difference"].tolist()

    first = built.overall.iloc[0]
    shown = "{acceptance_length:.2f} [{acceptance_length_low:.2f}, {acceptance_length_high:.2f}]".format(**first)
    page = (tmp_path / "table.md").read_text()
    assert page.startswith("# A title\n\n12 cells: 12 decoded live; ")
    assert "\n\nA note.\n\n## Acceptance length" in page
    for part in (shown, "pooled", "mean over requests", "cluster bootstrap over 6 prompts", "over proposing steps"):
        assert part in page
    # Every table of the page is rectangular.
    for block in re.findall(r"(?:^\|.*\n)+", page, flags=re.MULTILINE):
        assert len({line.count("|") for line in block.splitlines()}) == 1

    tex = (tmp_path / "table.tex").read_text()
    assert "{acceptance_length:.2f} & ".format(**first) in tex
    assert r"\caption{50\% \& more Bold: " in tex
    assert r"\label{tab:sweep}" in tex
    assert r"same\_temperature" in tex
    for environment in ("table", "tabular"):
        assert tex.count(rf"\begin{{{environment}}}") == tex.count(rf"\end{{{environment}}}") == 1


def test_writing_twice_gives_equal_bytes(built, tmp_path):
    for folder in ("a", "b"):
        tables.write(built, tmp_path / folder, "t")
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes(), path.name


def test_latex_without_a_caption_is_a_bare_tabular_and_text_is_escaped():
    built = tables.build([small("a_b & 50% #1 ~^\\ {x}")], ["drafter"], num_resamples=5)
    tex = latex.table(built)
    assert tex.splitlines()[1].startswith(r"\begin{tabular}")
    assert r"a\_b \& 50\% \#1 \textasciitilde{}\textasciicircum{}\textbackslash{} \{x\}" in tex
    # A row that begins with a bracket would be taken for the argument of the line break before it.
    assert "{}[1, 2] & " in latex.table(tables.build([small("[1, 2]")], ["drafter"], num_resamples=5))


def test_markdown_escapes_bars():
    assert r"a\|b" in text.markdown(tables.build([small("a|b")], ["drafter"], num_resamples=5), "t", [])


def test_equal_last_words_get_full_headings():
    assert text.headings(["sampling.temperature", "drafter.temperature", "num_draft_tokens"]) == {
        "sampling.temperature": "sampling temperature",
        "drafter.temperature": "drafter temperature",
        "num_draft_tokens": "K",
    }
    assert text.headings(["a.size", "b.size"]) == {"a.size": "a size", "b.size": "b size"}


def test_console_row_says_which_cell_and_what_was_measured(built):
    shown = tables.format_row(built.overall.iloc[1])
    for part in (
        "verifier=rejection",
        "drafter=argmax",
        "temperature=0.7",
        "lossless",
        "pooled",
        "12 requests",
        "6 prompts",
    ):
        assert part in shown
    assert "{acceptance_length:.2f} [".format(**built.overall.iloc[1]) in shown


def test_a_failing_writer_leaves_the_old_file(built, tmp_path, monkeypatch):
    tables.write(built, tmp_path, "t")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def fails(frame, path, **options):
        path.write_text("half a file")
        raise OSError("disk full")

    monkeypatch.setattr(pd.DataFrame, "to_parquet", fails)
    with pytest.raises((OSError, RuntimeError), match="disk full"):
        tables.write(built, tmp_path, "t")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_reader_of_an_old_file_never_sees_a_part_of_the_new_one(built, tmp_path):
    tables.write(built, tmp_path, "old")
    with (tmp_path / "table.md").open() as reader:
        tables.write(built, tmp_path, "new")
        assert reader.read().startswith("# old")  # the name moved to a new file, the old one was not written to
    assert (tmp_path / "table.md").read_text().startswith("# new")


def test_what_was_written_is_read_back(grid, tmp_path):
    built = tables.build(grid, AXES, {"drafter.name": "argmax"}, num_resamples=50)
    tables.write(built, tmp_path, "Title")
    for without in ((), ("table.parquet",), ("differences.csv",)):
        for name in without:
            (tmp_path / name).unlink()
        found = tables.read(tmp_path, num_resamples=50)
        assert found.axes == built.axes
        for name in ("overall", "by_category", "differences")[: 2 if without == ("differences.csv",) else 3]:
            expected = getattr(built, name)
            pd.testing.assert_frame_equal(getattr(found, name)[list(expected)], expected, check_dtype=False)
        assert latex.table(found) == latex.table(built)
    assert not len(found.differences)


def test_a_study_without_differences_has_their_columns_and_is_read_back(grid, tmp_path):
    tables.write(tables.build(grid, AXES, num_resamples=5), tmp_path, "Title")
    differences = tmp_path / "differences.csv"
    with_baseline = tables.build(grid, AXES, {"drafter.name": "argmax"}, num_resamples=5).differences
    assert list(pd.read_csv(differences)) == list(with_baseline)
    for content in (differences.read_text(), "\n"):  # as it was written once
        differences.write_text(content)
        found = tables.read(tmp_path)
        assert not len(found.differences)
        assert "Differences" not in text.markdown(found, "Title", [])
        assert len(found.query("`sampling.temperature` > 0").overall) == 6


def test_a_recorded_study_is_read_with_its_axes():
    recorded = Path(__file__).parents[2] / "experiments"
    assert tables.read(recorded / "temperature_sweep").axes == ("sampling.temperature", "drafter", "verifier")
    assert tables.read(recorded / "draft_temperature").axes == ("sampling.temperature", "drafter.constant")


def test_a_folder_without_such_tables_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"folder: expected a study with table\.csv or table\.parquet"):
        tables.read(tmp_path)
    (tmp_path / "table.csv").write_text("drafter,verdict\nargmax,proven\n")
    with pytest.raises(UsageError, match=r"folder: expected the table of a grid of cells in .*, got one without scope"):
        tables.read(tmp_path)


def test_query_keeps_the_rows_of_every_frame(grid):
    built = tables.build(grid, AXES, {"drafter.name": "argmax"}, num_resamples=10)
    warm = built.query("`sampling.temperature` > 0")
    assert set(warm.overall["sampling.temperature"]) == {0.7}
    assert 0 < len(warm.by_category) < len(built.by_category)
    assert 0 < len(warm.differences) < len(built.differences)
    assert "0.7" in latex.table(warm)
    with pytest.raises(UsageError, match="condition: expected one that a row fulfils"):
        built.query("`sampling.temperature` > 9")
    for condition in ("nope == 1", "drafter", "drafter ==", "sampling.temperature > 0", "lossless"):
        with pytest.raises(UsageError, match=rf"condition: expected one on .*sampling\.temp.*got '{condition}"):
            built.query(condition)


def test_a_notebook_shows_the_main_table_with_the_best_lossless_row_of_each_point(grid):
    built = tables.build(grid, AXES, num_resamples=10)
    num_best, num_tied = (int((built.overall["standing"] == standing).sum()) for standing in ("best", "tied"))
    assert num_best >= built.overall["sampling.temperature"].nunique()
    page = built._repr_html_()
    assert page.count('<td class="best"><b>') == num_best
    assert page.count(" †</td>") == num_tied
    assert page.count("<tr>") == len(built.overall) + 1
    assert "of the lossless rows at equal temperature" in page
    assert repr(built).count("\n") == len(built.overall) + 1


def test_tables_from_before_there_were_standings_are_shown_without_marks(grid):
    built = tables.build(grid, AXES, num_resamples=10)
    old = replace(
        built, overall=built.overall.drop(columns=["standing", "below_best", "below_best_low", "below_best_high"])
    )
    assert "Bold" not in old._repr_html_()
    assert "**" not in repr(old)


def test_names_are_escaped_in_html(grid):
    odd = [
        CellResult({**cell.settings, "drafter.name": f"<i>{cell.settings['drafter.name']}&"}, cell.rows)
        for cell in grid
    ]
    page = tables.build(odd, AXES, num_resamples=10)._repr_html_()
    assert "<i>" not in page
    assert "&lt;i&gt;argmax&amp;" in page
