"""What holds for every figure: an Axes goes in and comes out, lines can be told apart, files need no TeX."""

import importlib
import inspect
import pkgutil
import re
from itertools import combinations

import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.text import Text

from spectoolkit import report
from spectoolkit.errors import UsageError
from spectoolkit.functional.theory import expected_speedup, speedup
from spectoolkit.report import chosen, contours, histogram, plots, style, tables
from tests.helpers import figures
from tests.helpers.fake_rows import cells, row, step
from tests.unit.test_plots import assert_tidy

# Machado, Oliveira & Fernandes (2009), severity 1; linear RGB.
DEFICIENCIES = {
    "none": np.eye(3),
    "protanopia": np.array([
        [0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998],
    ]),
    "deuteranopia": np.array([
        [0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881],
    ]),
    "tritanopia": np.array([
        [1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900],
    ]),
}  # fmt: skip


def lab(colour: str, seen_as: np.ndarray) -> np.ndarray:
    """CIE L*a*b* (D65) of a colour as it is seen."""
    rgb = np.array(to_rgb(colour))
    linear = np.clip(seen_as @ np.where(rgb > 0.04045, ((rgb + 0.055) / 1.055) ** 2.4, rgb / 12.92), 0, 1)
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ linear
    x, y, z = np.cbrt(np.maximum(xyz / [0.9505, 1.0, 1.089], 1e-6))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def nearest(colours: list[str]) -> float:
    """The smallest distance (Delta E 1976) of two of them to anyone."""
    return min(
        float(np.linalg.norm(lab(a, m) - lab(b, m))) for m in DEFICIENCIES.values() for a, b in combinations(colours, 2)
    )


def test_every_plotting_function_takes_an_axes_and_returns_it():
    found = []
    for module in pkgutil.iter_modules(report.__path__, "spectoolkit.report."):
        for name, function in inspect.getmembers(importlib.import_module(module.name), inspect.isfunction):
            if function.__module__ != module.name or name.startswith("_"):
                continue
            signature = inspect.signature(function)
            if "Axes" in [p.annotation for p in signature.parameters.values()]:
                found.append(name)
                first = next(iter(signature.parameters.values()))
                assert (first.name, first.annotation, signature.return_annotation) == ("ax", "Axes", "Axes"), name
    assert len(found) > 15


def test_colours_are_told_apart_by_people_who_see_fewer_of_them():
    colours = [str(look["color"]) for look in style.line_styles(range(6)).values()]
    assert nearest(colours) > 11
    assert (
        nearest(["#D62728", "#2CA02C", "#8C564B"]) < 11
    )  # red, green and brown: the test sees what is wrong with them


@pytest.mark.parametrize("name", figures.FIGURES)
def test_text_of_every_figure_is_legible_and_apart(name):
    fig = figures.FIGURES[name]()
    assert_tidy(fig)
    assert fig.get_figwidth() in (style.PAGE_IN, style.COLUMN_IN, style.COLUMN_IN + 1.4)
    sizes = [t.get_fontsize() for ax in fig.axes for t in [*ax.texts, *ax.get_xticklabels(), ax.xaxis.label]]
    assert min(map(float, sizes)) >= 7


def test_intervals_by_position_are_those_of_the_table():
    rows = tables.build(
        cells((0.7,), verifiers=("rejection",), num_clusters=6, tokens=24), ["drafter.name"], num_resamples=50
    )
    ax = plots.acceptance_by_position(Figure().add_subplot(), rows.overall)
    assert len(ax.collections) == len(ax.lines) == 3
    band = np.asarray(ax.collections[0].get_paths()[0].vertices)[:, 1]
    first = rows.overall.iloc[0]
    assert band.max() == pytest.approx(first["accepted_at_1_high"])
    assert band.min() == pytest.approx(first["accepted_at_4_low"])
    without = rows.overall.drop(columns=[c for c in rows.overall if re.search(r"accepted_at_.*_(low|high)$", c)])
    assert not plots.acceptance_by_position(
        Figure().add_subplot(), without
    ).collections  # a table of an earlier version


def one_request(*accepted: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Rows and step records of two equal prompts, K = 2, whose last step is cut after its drafts."""
    steps = [step(2, n) for n in accepted[:-1]]
    steps.append(step(2, accepted[-1], emitted=accepted[-1], accepted=accepted[-1], truncated=True))
    rows = pd.DataFrame([{**row(steps, 2, cluster=c), "request_id": c} for c in "ab"])
    frame = pd.DataFrame(
        [{name: getattr(s, name) for name in s.__slots__} | {"request_id": c} for c in "ab" for s in steps]
    )
    return rows, frame


def test_live_steps_are_counted_by_emitted_tokens_and_sums_by_accepted_ones():
    rows, steps = one_request(0, 2, 1, 0, 2)
    emitted = histogram.distribution(rows, steps)
    assert emitted["count"].tolist() == [1, 2, 3]
    assert emitted["share"].tolist() == [0.4, 0.4, 0.2]  # the cut step of two accepted drafts emitted two tokens
    assert (emitted["count"] * emitted["share"]).sum() == pytest.approx(rows["emitted"].sum() / rows["steps"].sum())
    accepted = histogram.distribution(rows)
    assert accepted["count"].tolist() == [0, 1, 2]
    assert accepted["share"].tolist() == pytest.approx([0.4, 0.2, 0.4])
    assert set(emitted["unit"]) == {histogram.EMITTED}
    assert set(accepted["unit"]) == {histogram.ACCEPTED}
    with pytest.raises(UsageError, match="expected the 10 step records"):
        histogram.distribution(rows, steps.iloc[1:])
    with pytest.raises(UsageError, match="of one unit"):
        histogram.histogram_figure(pd.concat([emitted, accepted]).assign(strategy=["a"] * 3 + ["b"] * 3))


def test_bars_are_the_distribution_and_the_mean_is_the_acceptance_length():
    rows, steps = one_request(0, 2, 1, 0, 2)
    ax = histogram.step_histogram(Figure().add_subplot(), histogram.distribution(rows, steps))
    assert [bar.get_height() for bar in ax.patches] == pytest.approx([0.4, 0.4, 0.2])
    assert ax.texts[0].get_text() == "1.80"
    assert ax.lines[0].get_xdata()[0] == pytest.approx(1.8)
    assert ax.get_xlabel() == "emitted tokens per step (dashed: mean)"


def test_contours_and_points_obey_the_formula():
    points = figures.contour_points().iloc[:3]
    ax = contours.speedup_contours(Figure(figsize=(3, 2)).add_subplot(), 4, points)
    lines = [c for c in ax.collections if hasattr(c, "levels") and not c.filled]
    for level, path in zip(lines[0].levels, lines[0].get_paths(), strict=True):
        for a, c in path.vertices[:: max(len(path.vertices) // 5, 1)]:
            assert expected_speedup(float(np.clip(a, 0, 1)), 4, float(c)) == pytest.approx(level, rel=0.01)
    for point, (top, loss) in zip(points.to_dict("records"), figures.DRAFTERS.values(), strict=True):
        measured = speedup(top - loss, 4, point["cost"])
        assert expected_speedup(point["rate"], 4, point["cost"]) == pytest.approx(measured, rel=1e-12)
    with pytest.raises(UsageError, match="points of K = 3, got K = 4"):
        contours.speedup_contours(Figure().add_subplot(), 3, points)


def test_pgf_is_written_without_tex_and_escapes_what_tex_would_read(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))  # no TeX engine is found there
    rows = figures.sweep_rows().replace({"argmax": "a_b & 50% #1 {x}", "rejection": "p ~ q^2"})
    fig = plots.sweep_figure(rows)
    for folder in ("a", "b"):
        plots.save(fig, tmp_path / folder, formats=("pgf",))
    source = (tmp_path / "a" / "figure.pgf").read_text()
    assert source == (tmp_path / "b" / "figure.pgf").read_text()
    assert source.count(r"\begin{pgfpicture}") == source.count(r"\end{pgfpicture}") == 1
    assert source.count(r"\begin{pgfscope}") == source.count(r"\end{pgfscope}") > 20
    assert "DejaVu" not in source
    assert "/" not in re.sub(r"%.*", "", source)  # no file of this machine
    assert r"a b \& 50\% \#1 \{x\}}}%" in source
    assert r"p \textasciitilde{} q\textasciicircum{}2}}%" in source
    for text in ("0.6", "3.0", "same temperature", "sampling temperature", "typical (lossy)"):
        assert f"{text}}}}}%" in source
    with pytest.raises(UsageError, match="expected some of png, pdf, pgf, got svg"):
        plots.save(fig, tmp_path, formats=("svg",))


def test_the_figures_of_a_grid_say_what_they_leave_out(tmp_path):
    grid = cells((0.0, 0.6, 0.8, 1.0), num_clusters=4, tokens=16)
    built = tables.build(grid, ["sampling.temperature", "drafter", "verifier"], num_resamples=20)
    drawn = chosen.figures(grid, built, {})
    assert set(drawn.figures) == {"sweep", "positions", "histogram", "contours"}
    assert len(drawn.figures["sweep"].axes) == 2
    positions = drawn.figures["positions"]
    assert len(positions.axes) == 3
    positions.canvas.draw()
    assert positions.legends[0].get_window_extent().x1 <= positions.bbox.x1
    remarks = "\n".join(drawn.remarks)
    assert "positions: shows sampling.temperature = 0, 0.8, 1 of 4 values" in remarks
    assert "histogram: counts accepted draft tokens" in remarks
    replayed = [type(c)(c.settings, c.rows.assign(draft_s=float("nan"))) for c in grid]
    assert "contours: not drawn: only cells decoded live" in "\n".join(chosen.figures(replayed, built, {}).remarks)


def test_a_strategy_names_its_rule_where_rules_differ_and_too_many_are_refused_with_a_way_out():
    grid = cells((0.7,), verifiers=("rejection", "typical", "block"), num_clusters=3, tokens=8)[:7]
    drawn = chosen.figures(grid, tables.build(grid, ["drafter", "verifier"], num_resamples=5), {})
    shown = {text.get_text() for text in drawn.figures["positions"].findobj(Text)}
    assert {"argmax, rejection", "argmax, typical", "argmax, block"} <= shown
    assert "argmax" not in shown
    (said,) = [remark for remark in drawn.remarks if remark.startswith("histogram: not drawn")]
    assert re.search(r"as many panels as fit .* in, got 7; choose some with rows=$", said)


def test_step_records_make_the_histogram_one_of_emitted_tokens(tmp_path):
    grid = cells((0.7,), ("argmax",), ("rejection",), num_clusters=3, tokens=8)
    rows, steps = one_request(0, 2, 1)
    grid = [type(grid[0])(grid[0].settings | {"num_draft_tokens": 2}, rows)]
    steps.to_parquet(tmp_path / "steps.parquet")
    built = tables.build(grid, ["drafter"], num_resamples=20)
    drawn = chosen.figures(grid, built, {0: tmp_path / "steps.parquet"})
    assert drawn.figures["histogram"].axes[0].get_xlabel() == ""
    assert any(histogram.EMITTED in text.get_text() for text in drawn.figures["histogram"].texts)
