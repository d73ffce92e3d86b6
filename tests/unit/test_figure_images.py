"""The look of every figure against a reference image (`tests.helpers.figures` says how they are made and compared).

Each figure is drawn as it should be, as another FreeType would lay it out, and wrong: without an interval, with the
colours of two lines swapped, with a point moved. The first two must pass and the others must not.
"""

import matplotlib as mpl
import pytest
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from spectoolkit.report import labels, plots
from tests.helpers import figures
from tests.helpers.figures import FIGURES, TOLERANCE, distance, drawing, reference


def drop_an_interval(fig: Figure) -> bool:
    kinds = (PolyCollection, LineCollection)
    found = [c for ax in fig.axes for c in ax.collections if isinstance(c, kinds) and c.get_zorder() > 1]
    for one in found[:1]:
        one.remove()
    return bool(found)


def swap_two_colours(fig: Figure) -> bool:
    for ax in fig.axes:
        lines = [line for line in ax.lines if line.get_marker() not in ("None", "none", "")]
        if len(lines) > 1:
            one, other = lines[:2]
            for get, put in (("get_color", "set_color"), ("get_markeredgecolor", "set_markeredgecolor")):
                first, second = getattr(one, get)(), getattr(other, get)()
                getattr(one, put)(second)
                getattr(other, put)(first)
            return True
    return False


def move_a_point(fig: Figure) -> bool:
    for ax in fig.axes:
        for line in ax.lines:
            if line.get_marker() not in ("None", "none", ""):
                y = list(line.get_ydata())
                low, high = ax.get_ylim()
                line.set_ydata([y[0] + 0.04 * (high - low), *y[1:]])
                return True
    return False


def change_a_bar(fig: Figure) -> bool:
    patches = [p for ax in fig.axes for p in ax.patches if isinstance(p, Rectangle)]
    for patch in patches[:1]:
        patch.set_height(0.9 * patch.get_height())
    return bool(patches)


WRONG = {
    "sweep": (drop_an_interval, swap_two_colours, move_a_point),
    "positions": (drop_an_interval, swap_two_colours, move_a_point),
    "frontier": (drop_an_interval, swap_two_colours, move_a_point),
    "contours": (drop_an_interval, swap_two_colours, move_a_point),
    "histogram": (drop_an_interval, change_a_bar),
    "heatmap": (change_a_bar,),
}


@pytest.mark.parametrize("name", FIGURES)
def test_the_figure_looks_as_it_did(name):
    assert distance(drawing(FIGURES[name]()), reference(name)) < TOLERANCE


@pytest.mark.parametrize("name", FIGURES)
def test_another_rendering_of_letters_changes_nothing(name, monkeypatch):
    width = labels.text_width_pt
    for module in (labels, plots):
        monkeypatch.setattr(module, "text_width_pt", lambda text, size: 1.002 * width(text, size))
    with mpl.rc_context({"text.hinting": "none", "text.antialiased": False}):
        assert distance(drawing(FIGURES[name]()), reference(name)) < TOLERANCE


@pytest.mark.parametrize(("name", "spoil"), [(name, spoil) for name, spoils in WRONG.items() for spoil in spoils])
def test_what_is_drawn_wrong_is_seen(name, spoil):
    fig = FIGURES[name]()
    assert spoil(fig)
    assert distance(drawing(fig), reference(name)) > 1.5 * TOLERANCE


def test_every_figure_has_its_image_and_every_image_its_figure():
    assert {path.stem for path in figures.IMAGES.glob("*.png")} == set(FIGURES) == set(WRONG)
