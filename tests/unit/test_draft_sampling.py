"""Ways to draw drafts: how strategies are named, compared and chosen, on cells small enough to do by hand."""

import pandas as pd
import pytest

from spectoolkit import config
from spectoolkit.errors import UsageError
from spectoolkit.report import draft_sampling as figures
from spectoolkit.report.cells import CellResult
from spectoolkit.studies import draft_sampling as study
from tests.helpers.fake_rows import row, step

T, K = study.TEMPERATURE, study.TOP_K
DRAFTS = {
    "argmax": {"drafter.name": "argmax", "drafter.constant": 0.0},
    "same temperature": {"drafter.name": "same_temperature", "drafter.ratio": 1.0},
    "squared temperature": {"drafter.name": "temperature", "drafter.ratio": 0.5},
    "temperature alone": {"drafter.name": "temperature", "drafter.ratio": 1.0, "drafter.top_k": 0},
    "constant 0.3": {"drafter.name": "temperature", "drafter.constant": 0.3},
    "constant 0.9": {"drafter.name": "temperature", "drafter.constant": 0.9},
    "top-4": {"drafter.name": "top_m", "drafter.ratio": 1.0, "drafter.keep": 4},
    "coupled": {"drafter.name": "coupled", "drafter.ratio": 1.0, "verifier.name": "coupled"},
}


def cell(drafts: str, *lengths: int, kept: int = 0, **settings: object) -> CellResult:
    """One request of one step per prompt, which emits so many tokens."""
    made = [row([step(4, n - 1)], 4, cluster=f"p{i}", stored_bytes=kept) for i, n in enumerate(lengths)]
    base = {"verifier.name": "rejection", "verifier.is_lossless": True, T: 0.5, K: 0}
    return CellResult(
        base | DRAFTS[drafts] | {k.replace("__", "."): v for k, v in settings.items()}, pd.DataFrame(made)
    )


@pytest.mark.parametrize("name", DRAFTS)
def test_a_strategy_is_named_by_how_its_drafts_are_drawn_and_judged(name):
    assert study.strategy(cell(name, 1).settings) == name
    assert study.strategy(cell(name, 1, verifier__name="block").settings) == f"{name}, block"


@pytest.mark.parametrize(
    "settings",
    [
        {"drafter.name": "ngram"},
        {"drafter.name": "temperature", "drafter.ratio": 0.7},  # neither T nor 1
        {"drafter.name": "temperature", "drafter.ratio": 1.0, "drafter.top_k": 3},
        {"drafter.name": "temperature", "drafter.constant": 0.7, "drafter.top_k": 3},
        {"drafter.name": "temperature", "drafter.constant": 0.7, "drafter.repetition_penalty": 1.3},
        {"drafter.name": "temperature", "drafter.ratio": 0.5, "drafter.repetition_penalty": 1.3},
        {"drafter.name": "temperature", "drafter.ratio": 1.0, "sampling.top_k": 3},  # by another name same_temperature
        {"drafter.name": "same_temperature", "drafter.ratio": 0.7},
        {"drafter.name": "top_m", "drafter.keep": 4, "drafter.ratio": 0.7},
    ],
)
def test_drafts_without_a_name_are_refused(settings):
    with pytest.raises(UsageError, match="expected drafts of argmax, same_temperature, coupled, top_m, or temperature"):
        study.strategy({"verifier.name": "rejection", T: 0.5} | settings)


def named_at_1(*others: CellResult, **settings: object) -> list[str]:
    """Names at T = 1 of a drafter whose ratio is 1 there, beside cells at other temperatures."""
    ratio_1 = {"drafter.name": "temperature", "drafter.ratio": 1.0, "verifier.name": "rejection", T: 1.0, K: 0}
    cells = [CellResult(ratio_1 | {k.replace("__", "."): v for k, v in settings.items()}, pd.DataFrame()), *others]
    return [name for at, name in study._places(cells, T) if at == 1]


def test_a_ratio_of_1_at_temperature_1_is_what_it_is_at_other_temperatures():
    constant = cell("squared temperature", 1, drafter__ratio=1.0)
    assert named_at_1(cell("squared temperature", 1)) == ["squared temperature"]
    assert named_at_1(constant) == ["temperature alone"]
    assert study._places([constant], T) == {(0.5, "temperature alone"): 0}
    assert named_at_1(cell("squared temperature", 1, verifier__name="block"), constant) == ["temperature alone"]
    assert named_at_1() == ["temperature alone"]
    assert named_at_1(sampling__top_k=3) == ["squared temperature"]  # with the request's filter


def test_only_the_rows_of_a_table_are_explained():
    shown = {}
    for name in ("argmax", "squared temperature", "temperature alone"):
        found = study.compared([cell(name, 2, 3), cell("same temperature", 2, 2)], T)
        shown[name] = study._strategy_section(found, T)[2]
    assert ["*Squared temperature*" in part for part in shown.values()] == [False, True, False]
    assert ["*Temperature alone*" in part for part in shown.values()] == [False, False, True]


def test_the_best_is_chosen_on_other_prompts_than_those_it_is_measured_on():
    """The first is best on prompts 0 and 2, the second on 1 and 3: each half gets what the other one chose."""
    first, second = cell("argmax", 5, 1, 5, 1).rows, cell("argmax", 1, 5, 1, 4).rows
    rows, chosen = study.chosen_on_the_other_half([first, second])
    assert chosen == (1, 0)
    assert rows.set_index("cluster")["emitted"].to_dict() == {"p0": 1, "p2": 1, "p1": 1, "p3": 1}
    _, of_equals = study.chosen_on_the_other_half([first, first])
    assert of_equals == (0, 0)


def test_every_strategy_over_same_temperature_drafts():
    cells = [
        cell("argmax", 1, 2),
        cell("constant 0.3", 2, 3, kept=8),
        cell("constant 0.9", 1, 2, kept=8),
        cell("constant 0.3", 4, 4, kept=8, verifier__name="block"),
        cell("same temperature", 2, 4, kept=8),
    ]
    found = study.compared(cells, T, {"argmax": "proven", "constant 0.3": "holds", "constant 0.9": "other"})
    found = found.set_index("strategy")
    assert set(found.index) == {"argmax", "same temperature", "best constant", "best constant, block"}
    assert found["ratio"].to_dict() == pytest.approx(
        {"argmax": 0.5, "same temperature": 1, "best constant": 5 / 6, "best constant, block": 4 / 3}
    )
    assert found.loc["argmax", ["ratio_low", "ratio_high"]].tolist() == pytest.approx([0.5, 0.5])  # paired: 1/2, 2/4
    assert found.loc["argmax", ["difference", "difference_low", "difference_high"]].tolist() == [-1.5, -2, -1]
    assert found["constants"].to_dict()["best constant"] == "0.3"
    assert found["draft_bytes_per_token"].tolist() == [0, 8, 8, 8]
    assert found.loc[["argmax", "best constant"], "exactness"].tolist() == ["proven", "holds"]


def test_published_ratios_stand_beside_ours():
    published = study.PUBLIC[T]
    assert [round(published.ratio("argmax", t, t), 3) for t in (0.0, 0.6, 0.7, 0.8)] == [1.0, 0.894, 0.889, 0.855]
    assert [round(study.PUBLIC[K].ratio(study.ALONE, k, 1.0), 3) for k in (1, 20, 0)] == [0.842, 0.967, 1.008]
    cells = [cell(name, 2, 3, sampling__temperature=t) for t in (0.5, 0.6) for name in ("argmax", "same temperature")]
    found = study.compared(cells, T).set_index([T, "strategy"])["public_ratio"]
    assert found[0.6, "argmax"] == pytest.approx(2.95 / 3.30)
    assert found.drop((0.6, "argmax"))[0.5].isna().all()
    top_k = {k: (2, 3) for k in (1, 20)}
    assert study.compared(narrowed(top_k, top_k), K)["public_ratio"].notna().all()
    elsewhere = [cell("argmax", 2), cell("same temperature", 2)]  # at T = 0.5, and theirs are of T = 1
    assert study.compared(elsewhere, K)["public_ratio"].isna().all()


def narrowed(argmax: dict[int, tuple[int, ...]], alone: dict[int, tuple[int, ...]]) -> list[CellResult]:
    at = {"sampling__temperature": 1.0}
    cells = [cell("argmax", *lengths, sampling__top_k=k, **at) for k, lengths in argmax.items()]
    cells += [cell("temperature alone", *lengths, sampling__top_k=k, **at) for k, lengths in alone.items()]
    return cells + [cell("same temperature", *lengths, sampling__top_k=k, **at) for k, lengths in argmax.items()]


def test_who_is_ahead_follows_from_the_interval_and_the_crossover_from_who_is_ahead():
    cells = narrowed({0: (1, 1), 1: (3, 3), 5: (2, 3)}, {0: (2, 2), 1: (2, 2), 5: (3, 2)})
    against = study.argmax_against(cells, K)
    of_alone = pd.DataFrame(against[against["random"] == study.ALONE])
    assert of_alone[K].tolist() == [1, 5, 0]  # 0 keeps all tokens: the widest
    assert of_alone["ahead"].tolist() == ["argmax", "open", "random"]
    assert (
        study.crossover(of_alone, K)
        == "argmax is ahead up to top k 1 and behind from all on: the crossover lies between"
    )
    of_same = pd.DataFrame(against[against["random"] == study.SAME])
    assert of_same["ahead"].tolist() == ["equal"] * 3
    assert study.crossover(of_same, K) == "argmax is ahead nowhere, not behind anywhere"
    first = of_alone.assign(ahead=["random", "argmax", "argmax"])
    assert "no single crossover" in study.crossover(first, K)
    assert study.crossover(of_alone.iloc[:2], K) == "argmax is ahead up to top k 1, and behind nowhere"


def test_the_figure_shows_what_the_table_says():
    cells = narrowed({0: (1, 1), 1: (3, 3), 20: (2, 3)}, {0: (2, 2), 1: (2, 2), 20: (3, 2)})
    lengths, ratios = figures.draft_sampling_figure(study.compared(cells, K), K).axes
    assert [t.get_text() for t in lengths.get_xticklabels()] == ["1", "20", "all"]
    drawn = [list(line.get_ydata()) for line in ratios.lines]
    assert pytest.approx([1, 1, 1]) in drawn  # argmax, equal to same temperature here
    assert pytest.approx([2 / 3, 1, 2]) in drawn
    assert pytest.approx([2.46 / 2.92, 2.65 / 2.74, 2.64 / 2.62]) in drawn  # published
    cells = [cell("argmax", 1, 1), cell("top-4", 2, 3, kept=24), cell("same temperature", 2, 2, kept=8)]
    nothing, kept = figures.draft_sampling_figure(study.compared(cells, T), T).axes
    labels = [{t.get_text() for t in ax.texts} for ax in (nothing, kept)]
    assert labels == [{"argmax", "same temperature"}, {"top-4", "same temperature"}]


TOY = ["target=tabular", "draft_model=tabular", "prompts.limit=4", "max_new_tokens=6"]


def test_the_draft_temperature_of_the_squared_row_is_the_square_of_the_cells_own():
    plan = config.plan(["experiment=draft_sampling", *TOY])
    squared = [plan.cells[i].settings for (_, name), i in study._places(plan.cells, T).items() if name == study.SQUARED]
    assert [(s[T], s["drafter.ratio"]) for s in squared] == [(t, t) for t in (0, 0.2, 0.4, 0.6, 0.7, 0.8, 1.0, 1.2)]


def test_a_narrow_top_k_costs_unfiltered_drafts_and_one_token_makes_argmax_of_all(tmp_path):
    overrides = ["experiment=draft_sampling_top_k", *TOY, "prompts.limit=12", "target.vocab_size=30"]
    shown = config.plan(
        [*overrides, "target.concentration=0.3", f"folder={tmp_path}", "grid.sampling.top_k=[1,0]"]
    ).run()
    found = pd.read_csv(tmp_path / "strategies.csv").set_index([K, "strategy"])
    assert found.loc[(1, "argmax"), "ratio"] == pytest.approx(1)
    assert found.loc[(1, "temperature alone"), "ratio_high"] < 1
    assert found.loc[(0, "temperature alone"), "ratio"] == pytest.approx(1)
    assert found.loc[(0, "argmax"), "ratio_high"] < 1
    assert set(found["exactness"]) == {"proven"}
    assert pd.read_csv(tmp_path / "argmax.csv")["ahead"].tolist() == ["equal", "random", "argmax", "random"]
    assert "Against temperature alone drafts argmax is ahead up to top k 1 and behind from all on" in shown


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["grid.sampling.temperature=[0.5]", "cases=[{drafter: ngram}, {drafter: argmax}]"], r"got ngram"),
        (["cases=[{drafter: argmax}]"], "and no same temperature"),
        (["cases=[{drafter: same_temperature}, {drafter: top_m}]"], "and no argmax"),
        (["prompts.limit=1"], "at least 2 prompts, since the best constant is chosen on one half"),
        (["study.x=sampling.top_p"], r"study\.x: expected one of sampling\.temperature, sampling\.top_k, got"),
        (["+grid.seed=[0,1]", "grid.sampling.temperature=[0.5]"], "no place for axes other than"),
    ],
)
def test_what_it_has_no_row_for_is_refused_before_anything_runs(more, message):
    with pytest.raises(UsageError, match=message):
        config.plan(["experiment=draft_sampling", *TOY, *more])


def test_a_strategy_that_is_absent_at_some_value_is_refused():
    cells = [cell("argmax", 1), cell("same temperature", 1), cell("argmax", 1, sampling__temperature=0.6)]
    with pytest.raises(UsageError, match=r"got no same temperature at sampling\.temperature=0\.6"):
        study.check(cells, [])  # type: ignore[arg-type]
