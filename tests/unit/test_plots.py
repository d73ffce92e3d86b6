"""Figures: what is drawn is what the table says, labels never touch, files are reproducible."""

import subprocess
import sys
from itertools import pairwise
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Annotation, Text

from spectoolkit.errors import UsageError
from spectoolkit.report import plots, style, tables
from spectoolkit.report.labels import spread
from tests.helpers.fake_rows import cells


@pytest.fixture(scope="module")
def overall() -> pd.DataFrame:
    axes = ["verifier.name", "drafter.name", "sampling.temperature"]
    return tables.build(cells((0.0, 0.7, 1.0), num_clusters=6, tokens=24), axes, num_resamples=100).overall


def fan(num_lines: int) -> pd.DataFrame:
    """Lines that all but end in one point."""
    rows = []
    for i in range(num_lines):
        for t in (0.0, 0.6, 0.7, 0.8, 1.0):
            y = 2 + 0.1 * i * (1 - t) + 0.001 * i
            rows.append({"sampling.temperature": t, "drafter.name": f"drafter_{i}", "verifier.name": "rejection"})
            rows[-1] |= {"acceptance_length": y, "acceptance_length_low": y - 0.1, "acceptance_length_high": y + 0.1}
    return pd.DataFrame(rows)


def labels_of(ax: Axes) -> list[Annotation]:
    return [t for t in ax.texts if isinstance(t, Annotation)]


def text_boxes(fig: Figure) -> list[Any]:
    """The extents of every piece of text that is drawn, without the leader lines."""
    found = []
    for ax in fig.axes:
        shown = [ax.xaxis.label, ax.yaxis.label, *labels_of(ax)]
        for axis in (ax.xaxis, ax.yaxis):
            low, high = axis.get_view_interval()
            ticks = [tick for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
            shown += [tick.label1 for tick in ticks if tick.label1.get_visible()]
        found += [Text.get_window_extent(t) for t in shown if t.get_text()]
        # The left title has no public handle; it is the only one in use.
        found += [t.get_window_extent() for t in ax.get_children() if type(t) is Text and t.get_text()]
    return found


def assert_tidy(fig: Figure) -> None:
    fig.canvas.draw()
    found = text_boxes(fig)
    assert len(found) > 8
    for i, one in enumerate(found):
        for other in found[i + 1 :]:
            assert not one.overlaps(other)
        assert one.x0 >= 0
        assert one.y0 >= 0
        assert one.x1 <= fig.bbox.width
        assert one.y1 <= fig.bbox.height


def test_lines_are_the_rows_of_the_table(overall):
    rows = overall[overall["verifier.name"] == "rejection"].sample(frac=1, random_state=1)
    ax = plots.acceptance_length_sweep(Figure().add_subplot(), rows)
    for line, name in zip(ax.lines, dict.fromkeys(rows["drafter.name"]), strict=True):
        expected = rows[rows["drafter.name"] == name].sort_values("sampling.temperature")
        assert line.get_xdata() == pytest.approx(expected["sampling.temperature"].to_numpy())
        assert line.get_ydata() == pytest.approx(expected["acceptance_length"].to_numpy())
    assert len(ax.collections) == 3
    band = np.asarray(ax.collections[0].get_paths()[0].vertices)[:, 1]
    first = rows[rows["drafter.name"] == rows["drafter.name"].iloc[0]]
    assert band.max() == pytest.approx(first["acceptance_length_high"].max())
    assert band.min() == pytest.approx(first["acceptance_length_low"].min())
    assert "tokens per target forward" in ax.get_ylabel()
    assert {t.get_text() for t in labels_of(ax)} == {"argmax", "same temperature", "ngram"}


def test_panels_share_the_scale_and_the_looks(overall):
    fig = plots.sweep_figure(overall, reference={"no drafting": 1.0})
    left, right = fig.axes
    assert left.get_ylim() == right.get_ylim()
    assert left.get_ylim()[0] < 1 < overall["acceptance_length_high"].max() < left.get_ylim()[1]
    assert left.get_yticks() == pytest.approx(right.get_yticks())
    assert [line.get_color() for line in left.lines] == [line.get_color() for line in right.lines]
    assert (left.get_title(loc="left"), right.get_title(loc="left")) == ("rejection", "typical (lossy)")
    assert fig.get_suptitle() == ""
    assert fig.get_figwidth() == style.PAGE_IN


def test_panels_share_the_scale_whichever_holds_the_extremes(overall):
    for rows in (overall, overall.iloc[::-1]):
        one, other = plots.sweep_figure(rows).axes
        assert one.get_ylim() == other.get_ylim()
        assert one.get_ylim()[1] > overall["acceptance_length_high"].max()
        assert one.get_ylim()[0] < overall["acceptance_length_low"].min()


def test_tick_labels_give_way_to_each_other_and_the_outermost_stay():
    rows = fan(2).replace({"drafter_0": "at the temperature of the target"})
    fig = plots.sweep_figure(rows, panel=None, width_in=style.COLUMN_IN)
    assert_tidy(fig)
    shown = [t.get_text() for t in fig.axes[0].get_xticklabels()]
    assert len(shown) == 5
    assert (shown[0], shown[-1]) == ("0", "1")
    assert "" in shown


@pytest.mark.parametrize("width", [style.PAGE_IN, style.COLUMN_IN])
def test_no_text_touches_other_text_or_leaves_the_page(overall, width):
    panel = "verifier.name" if width == style.PAGE_IN else None
    rows = overall if panel else overall[overall["verifier.name"] == "rejection"]
    assert_tidy(plots.sweep_figure(rows, panel=panel, width_in=width, reference={"no drafting": 1.0}))


@pytest.mark.parametrize("num_lines", [2, 5, 9])
def test_labels_of_lines_that_end_together_are_kept_apart(num_lines):
    fig = plots.sweep_figure(fan(num_lines), panel=None, width_in=style.COLUMN_IN)
    assert_tidy(fig)
    order = sorted(labels_of(fig.axes[0]), key=lambda t: t.get_window_extent().y0)
    assert [t.get_text() for t in order] == [f"drafter {i}" for i in range(num_lines)]


def test_fonts_are_legible_at_print_size(overall):
    fig = plots.sweep_figure(overall)
    sizes = [t.get_fontsize() for ax in fig.axes for t in [*ax.texts, *ax.get_xticklabels(), ax.xaxis.label]]
    assert min(map(float, sizes)) >= 7


def test_lines_that_coincide_both_stay_visible():
    first, second = list(style.line_styles(["argmax", "same_temperature"]).values())
    assert second["markerfacecolor"] == "none"
    assert second["markersize"] > first["markersize"] + 1
    looks = list(style.line_styles(range(12)).values())
    assert len({(x["color"], x["marker"], str(x["linestyle"])) for x in looks}) == 12
    assert len({(x["marker"], str(x["linestyle"])) for x in looks}) == 12  # without colour as well


def test_acceptance_by_position(overall):
    rows = overall[(overall["verifier.name"] == "rejection") & (overall["sampling.temperature"] == 0.7)]
    ax = plots.acceptance_by_position(Figure().add_subplot(), rows)
    assert ax.lines[0].get_ydata() == pytest.approx(
        rows.iloc[0][[f"accepted_at_{i}" for i in (1, 2, 3, 4)]].astype(float)
    )
    assert ax.get_ylim() == (0, 1)
    given_reached = plots.acceptance_by_position(Figure().add_subplot(), rows, conditional=True)
    expected = rows.iloc[0][[f"accepted_at_{i}_conditional" for i in (1, 2, 3, 4)]].astype(float)
    assert given_reached.lines[0].get_ydata() == pytest.approx(expected)
    with pytest.raises(UsageError, match=r"one row per drafter\.name"):
        plots.acceptance_by_position(Figure().add_subplot(), overall)


def test_undefined_points_are_gaps():
    rows = fan(2)
    rows.loc[rows.index[-1], ["acceptance_length", "acceptance_length_low", "acceptance_length_high"]] = np.nan
    ax = plots.sweep_figure(rows, panel=None).axes[0]
    assert np.isnan(np.asarray(ax.lines[1].get_ydata(), dtype=float)[-1])
    assert [t.xy[0] for t in labels_of(ax)] == [1.0, 0.8]  # the label moves to the last point there is


def test_ambiguous_rows_are_refused_not_averaged(overall):
    with pytest.raises(UsageError, match="got several at"):
        plots.acceptance_length_sweep(Figure().add_subplot(), overall)
    with pytest.raises(UsageError, match="numeric"):
        plots.acceptance_length_sweep(Figure().add_subplot(), overall.iloc[:1], x="drafter.name", line="verifier.name")
    with pytest.raises(UsageError, match="drafter missing"):
        plots.sweep_figure(overall, line="drafter")
    with pytest.raises(UsageError, match="panels"):
        plots.sweep_figure(overall, panel="sampling.temperature", x="acceptance_length", width_in=2.0)


def test_files_are_reproducible(overall, tmp_path):
    for folder in ("a", "b"):
        plots.save(plots.sweep_figure(overall), tmp_path / folder)
    assert {p.name for p in (tmp_path / "a").iterdir()} == {"figure.png", "figure.pdf"}
    for name in ("figure.png", "figure.pdf"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert b"CreationDate" not in (tmp_path / "a" / "figure.pdf").read_bytes()
    header = (tmp_path / "a" / "figure.png").read_bytes()[16:20]
    assert int.from_bytes(header, "big") == round(style.PAGE_IN * 300)


def test_a_callers_settings_stay_and_pyplot_is_not_loaded(overall):
    before = dict(mpl.rcParams)
    plots.sweep_figure(overall)
    assert dict(mpl.rcParams) == before
    code = "import sys, spectoolkit.report.plots; sys.exit('matplotlib.pyplot' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@settings(deadline=None)
@given(st.lists(st.floats(-50, 150), min_size=1, max_size=12))
def test_spread_keeps_gaps_order_and_bounds(positions):
    found = spread(positions, gap=9.0, low=0.0, high=100.0)
    order = sorted(range(len(positions)), key=lambda i: positions[i])
    gaps = [found[b] - found[a] for a, b in pairwise(order)]
    assert all(gap >= 9.0 - 1e-6 for gap in gaps)
    if len(positions) <= 12 and 9.0 * (len(positions) - 1) <= 100:
        assert min(found) >= -1e-6
        assert max(found) <= 100 + 1e-6


def test_spread_moves_as_little_as_it_can():
    assert spread([10, 50], 9, 0, 100) == [10, 50]
    assert spread([50, 50], 10, 0, 100) == [45, 55]
    assert spread([1, 1], 10, 0, 100) == [0, 10]
    assert spread([5, 5, 5], 10, 0, 10) == [-5, 5, 15]  # too many: apart and out at both ends
    assert spread([], 10, 0, 10) == []
