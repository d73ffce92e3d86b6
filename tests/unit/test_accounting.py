"""The study of definitions: which strategies change places, on records small enough to count by hand."""

import math

import numpy as np
import pandas as pd
import pytest
from matplotlib.text import Text

from spectoolkit import config
from spectoolkit.errors import UsageError
from spectoolkit.metrics import paired_difference, summarise
from spectoolkit.report import accounting as figures
from spectoolkit.report.cells import CellResult
from spectoolkit.studies import accounting
from tests.helpers.fake_rows import row, simulate, step

TOY = ["experiment=accounting", "target=tabular", "draft_model=tabular", "prompts.limit=4", "max_new_tokens=8"]


def cell(rows: pd.DataFrame, drafter: str, k: int = 4) -> CellResult:
    settings = {"drafter.name": drafter, "verifier.name": "rejection", "num_draft_tokens": k}
    return CellResult(settings | {"verifier.is_lossless": True}, rows)


def of_steps(*steps: tuple[int, int], k: int = 4, num_prompts: int = 3) -> pd.DataFrame:
    """The same request, steps of (drafted, accepted), for every prompt: intervals without width."""
    return pd.DataFrame([row([step(d, v) for d, v in steps], k, cluster=f"p{i}") for i in range(num_prompts)])


@pytest.fixture
def cells() -> list[CellResult]:
    """A model that always proposes, and a lookup that proposes in one step of four and is then mostly right."""
    return [
        cell(of_steps((4, 1), (4, 2), (4, 1), (4, 2)), "model"),
        cell(of_steps((0, 0), (0, 0), (0, 0), (4, 3)), "lookup"),
        cell(of_steps((2, 1), (2, 1), (2, 1), (2, 1), k=2), "model_k2", 2),
    ]


def test_a_lookup_that_seldom_proposes_changes_places(cells):
    names = accounting.strategy_names(cells)
    assert names == ["model", "lookup", "model_k2, K = 2"]
    found = accounting.by_definition(cells, names).set_index(["metric", "strategy"])["value"]
    assert found["acceptance_length"].tolist() == [2.5, 1.75, 2.0]
    assert found["acceptance_length_proposing"].tolist() == [2.5, 4.0, 2.0]
    assert found["acceptance_rate"].tolist() == [6 / 16, 3 / 4, 1 / 2]
    assert found["acceptance_rate_slots"].tolist() == [6 / 16, 3 / 16, 1 / 2]
    assert math.isnan(found["accepted_at_3", "model_k2, K = 2"])

    flipped = accounting.flips(accounting.orders(cells, names)).set_index(["one", "other"])
    assert set(flipped.index) == {("model", "lookup"), ("model", "model_k2, K = 2"), ("lookup", "model_k2, K = 2")}
    ahead = flipped.loc[("model", "lookup"), "one_ahead"].split("; ")
    assert {"length, pooled", "rate of K slots", "system efficiency"} <= set(ahead)
    behind = flipped.loc[("model", "lookup"), "other_ahead"].split("; ")
    assert {"length, steps with a proposal", "rate of drafts, prefix", "position 2, conditional"} <= set(behind)


def test_a_change_of_places_needs_both_orders_to_be_certain():
    pairs = pd.DataFrame({"definition": ["x", "y", "z"], "difference": [1.0, -1.0, -0.1]})
    pairs = pairs.assign(one="a", other="b", excludes_zero=[True, False, False])
    assert not len(accounting.flips(pairs))
    assert "No pair of strategies changes places: of 1 pair, 1 has an order" in accounting._verdict(pairs, pairs[:0])
    (found,) = accounting.flips(pairs.assign(excludes_zero=[True, True, False])).to_dict("records")
    assert found == {"one": "a", "other": "b", "one_ahead": "x", "other_ahead": "y", "undecided": "z"}
    assert not len(accounting.flips(pairs.assign(difference=1.0, excludes_zero=True)))


def test_a_definition_that_no_strategy_has_a_value_of_is_an_empty_row():
    """Outputs of two tokens at K = 4 never reach positions 3 and 4."""
    made = [cell(of_steps((1, 1)), "a"), cell(of_steps((1, 0)), "b")]
    found, pairs = (of(made, ["a", "b"]) for of in (accounting.by_definition, accounting.orders))
    assert accounting.ranking(found, pairs, "position 4, conditional") == []
    shown = accounting.findings(found, pairs, accounting.flips(pairs), accounting.choices(made, ["a", "b"]), 0.95)
    (order,) = (line for line in shown[4].splitlines() if "position 4, conditional" in line)
    assert [part.strip() for part in order.split("|")[2:]] == ["–", ""]
    figures.accounting_figure(found, pairs).canvas.draw()


def test_numbers_of_pairs_are_said_in_the_singular_too(cells):
    pairs = accounting.orders(cells[:2], ["a", "b"])
    said = accounting._verdict(pairs, accounting.flips(pairs))
    assert said.startswith("1 of 1 pair of strategies changes places")
    assert "0 pairs have one order wherever the definitions give any, 0 have none" in said
    assert said.endswith("1 pair changes places.")


def test_orders_are_the_paired_differences():
    one, other = simulate(0.6, num_clusters=6), simulate(0.4, num_clusters=6, seed=1)
    pairs = accounting.orders([cell(one, "a"), cell(other, "b")], ["a", "b"], 0.9)
    for made in pairs.to_dict("records"):
        expected = paired_difference(one, other, made["metric"], confidence=0.9)
        assert (made["difference"], made["difference_low"], made["difference_high"]) == pytest.approx(tuple(expected))
        assert made["excludes_zero"] == expected.excludes_zero
    assert len(pairs) == 8 + 2 * 4


def test_what_one_choice_moves(cells):
    cut = of_steps((4, 4)).assign(emitted=2.0, accepted=2.0, judged_alone=4.0)
    cells.append(cell(cut, "cut"))
    moved = accounting.choices(cells, ["model", "lookup", "k2", "cut"]).set_index(["choice", "strategy"])
    difference, is_certain = moved["difference"], moved["excludes_zero"]
    assert difference["steps without a proposal left out"].tolist() == [0, 2.25, 0, 0]
    assert difference["tokens behind the end counted"].tolist() == [0, 0, 0, 3]
    assert difference["slots without a draft left out", "lookup"] == 3 / 4 - 3 / 16
    assert difference["drafts behind a rejection counted", "cut"] == 0.5
    assert not is_certain["requests weighted equally"].any()
    assert "+2.250, for 1 of 4 strategies" in accounting._moves_text(moved.reset_index())


def test_the_figure_has_a_line_per_strategy_through_its_ranks(cells):
    names = accounting.strategy_names(cells)
    found, pairs = accounting.by_definition(cells, names), accounting.orders(cells, names)
    figure = figures.accounting_figure(found, pairs)
    figure.canvas.draw()
    (ax,) = figure.axes
    lines = [line for line in ax.lines if line.get_marker() != "None"]
    ranks = found.pivot(index="definition", columns="strategy", values="rank")[names]
    ranks = ranks.loc[list(dict.fromkeys(found["definition"]))]
    drawn = np.array([line.get_xdata() for line in lines], dtype=float).T
    np.testing.assert_array_equal(drawn, ranks.to_numpy())
    bars = [line for line in ax.lines if line.get_marker() == "None"]
    neighbours = [
        not is_decided
        for definition in dict.fromkeys(found["definition"])
        for _, is_decided in accounting.ranking(found, pairs, definition)
    ]
    assert len(bars) == sum(neighbours) > 0
    assert all(np.diff(bar.get_xdata()) == 1 for bar in bars)


def test_names_and_rows_do_not_touch():
    made = [cell(simulate(0.3 + 0.06 * i, num_clusters=5, tokens=16), f"same_temperature_{i}") for i in range(7)]
    names = [f"same_temperature_{i}, block, K = {i}" for i in range(7)]
    found, pairs = accounting.by_definition(made, names), accounting.orders(made, names)
    figure = figures.accounting_figure(found, pairs)
    figure.canvas.draw()
    (ax,) = figure.axes
    shown = [*ax.texts, *ax.get_yticklabels(), *ax.get_xticklabels(), ax.xaxis.label]
    boxes = [Text.get_window_extent(text) for text in shown]
    assert all(not a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
    assert all(b.x0 >= 0 and b.y0 >= 0 and b.x1 <= figure.bbox.width and b.y1 <= figure.bbox.height for b in boxes)
    with pytest.raises(UsageError, match="strategies: expected at most as many as fit"):
        figures.accounting_figure(found, pairs, 3.3)


def test_the_study_says_which_pairs_change_places(tmp_path):
    overrides = [*TOY, f"folder={tmp_path}", "target.stop_ids=[0]", "draft_model.weight=0.3"]
    text = config.plan(overrides).run()
    found = pd.read_csv(tmp_path / "definitions.csv")
    assert found["definition"].nunique() == 16
    assert found["strategy"].nunique() == 7
    table = pd.read_csv(tmp_path / "table.csv").query("scope == 'overall'")
    pooled = found[found["metric"] == "acceptance_length"]
    assert pooled["value"].tolist() == pytest.approx(table["acceptance_length"].tolist())
    assert table["truncated"].sum() > 0
    assert "pairs of strategies" in text
    assert "≈" in text
    for name in ("orders.csv", "flips.csv", "choices.csv", "figure.png", "table.md", "manifest.json"):
        assert (tmp_path / name).stat().st_size > 0
    assert set(summarise(pd.DataFrame([row([step(4, 1)], 4)]))) >= set(accounting.DEFINITIONS)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["engine=auto"], "expected engine=live, since a replay knows neither"),
        (["cases=[{drafter: argmax, num_draft_tokens: 2}]"], "at least two strategies to rank, got 1"),
        (["cases=[{drafter: argmax}, {drafter: none}]"], "got drafter=none, which has no acceptance"),
        (["grid.sampling.temperature=[0.5,1.0]"], r"alone, not in sampling\.temperature"),
        (["cases=[{verifier: rejection}, {verifier: typical}]"], "lossless rules.* verifier=typical"),
        (["cases=[{drafter: argmax}, {drafter: wrong/top_p_on_draft_only}]"], "lossless rules.* drafter=wrong/top_p"),
        (["cases=[" + ", ".join(f"{{num_draft_tokens: {k}}}" for k in range(1, 11)) + "]"], "strategies: .* got 10"),
        (["cases=[{drafter: argmax}, {num_draft_tokens: 1000}]"], "num_draft_tokens: expected K .* 2008 definitions"),
        (["study.confidence=1.5"], r"study\.confidence: expected a number in \(0, 1\), got 1\.5"),
    ],
)
def test_what_has_no_place_in_the_ranking_is_refused_before_anything_runs(tmp_path, more, message):
    with pytest.raises(UsageError, match=message):
        config.plan([*TOY, f"folder={tmp_path}", *(f"+{m}" if m.startswith("grid.sampling") else m for m in more)])
    assert not list(tmp_path.iterdir())
