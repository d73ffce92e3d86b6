"""What the replay studies derive from their cells, on cells small enough to do by hand, and their figures."""

import math

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from spectoolkit import config
from spectoolkit.errors import UsageError
from spectoolkit.functional.memory import draft_law_bytes, key_value_bytes
from spectoolkit.functional.theory import speedup
from spectoolkit.metrics import paired_difference, resample
from spectoolkit.report import heatmap, speedups, storage, tables, truncation
from spectoolkit.report.cells import CellResult
from spectoolkit.studies import draft_length, draft_temperature, output
from spectoolkit.studies import storage as storage_study
from spectoolkit.studies import truncation as truncation_study
from tests.helpers.fake_rows import row, simulate, step


def rows(*lengths: int, k: int = 4, stored_bytes: int = 0) -> pd.DataFrame:
    """One request of one step per prompt, which emits so many tokens."""
    made = [row([step(k, n - 1)], k, cluster=f"p{i}", stored_bytes=stored_bytes) for i, n in enumerate(lengths)]
    return pd.DataFrame(made)


def cell(made: pd.DataFrame, **settings: object) -> CellResult:
    base = {"drafter.name": "temperature", "verifier.name": "rejection", "verifier.is_lossless": True}
    base |= {"num_draft_tokens": 4, "sampling.temperature": 0.7}
    return CellResult(base | {key.replace("__", "."): value for key, value in settings.items()}, made)


def drafted_at(target: float, lengths: dict[float, tuple[int, ...]]) -> list[CellResult]:
    return [cell(rows(*v), sampling__temperature=target, drafter__constant=d) for d, v in lengths.items()]


def test_resamples_are_those_of_the_paired_difference():
    one, other = simulate(0.6, num_clusters=6), simulate(0.4, num_clusters=6, seed=1)
    found = resample([one, other], "acceptance_length", 300)
    difference = paired_difference(one, other, "acceptance_length", 300)
    assert found.estimates[0] - found.estimates[1] == difference.estimate
    low, high = np.quantile(found.samples[:, 0] - found.samples[:, 1], (0.025, 0.975))
    assert (low, high) == pytest.approx((difference.low, difference.high))
    with pytest.raises(UsageError, match="expected the same clusters in all cells"):
        resample([one, simulate(0.6, num_clusters=5)], "acceptance_length")


def test_the_best_draft_temperature_and_what_others_lose():
    cells = drafted_at(0.5, {0.0: (1, 1), 0.5: (2, 4), 1.0: (5, 2)}) + drafted_at(1.0, {0.0: (2, 2), 1.0: (3, 3)})
    best = draft_temperature.best_draft_temperatures(cells)
    first, second = best.to_dict("records")
    assert (first["best"], first["best_low"], first["best_high"]) == (1.0, 0.5, 1.0)  # both of prompt 1: 4 against 2
    assert first["acceptance_length_best"] == 3.5
    assert (first["loss_same"], first["loss_argmax"]) == (0.5, 2.5)
    assert (first["loss_same_low"], first["loss_same_high"]) == (-2.0, 3.0)  # the best one stays fixed
    assert (second["best"], second["loss_same"], second["loss_argmax"]) == (1.0, 0.0, 1.0)
    text = "\n".join(draft_temperature.findings(best))
    assert "1.0 [0.5, 1.0]" in text


def test_one_prompt_gives_no_intervals_and_still_a_figure():
    cells = drafted_at(1.0, {0.0: (2,), 1.0: (3,)})
    best = draft_temperature.best_draft_temperatures(cells)
    assert math.isnan(best["best_low"].iloc[0])
    assert "| 1.0 [" not in draft_temperature.findings(best)[1]
    overall = tables.build(cells, ["drafter.constant"], num_resamples=20).overall.assign(
        **{"sampling.temperature": 1.0}
    )
    heatmap.draft_temperature_figure(overall, best).canvas.draw()


def test_a_grid_without_argmax_or_the_own_temperature_is_refused_before_anything_is_computed():
    with pytest.raises(UsageError, match=r"to hold 0 \(argmax\) and every sampling\.temperature, got no 0 and no 0\.5"):
        draft_temperature.best_draft_temperatures(drafted_at(0.5, {0.3: (1, 1)}))
    with pytest.raises(UsageError, match="no place for axes other than"):
        draft_temperature.place_of([{"sampling.temperature": 1.0, "drafter.constant": 0.0}] * 2)
    with pytest.raises(UsageError, match=r"no drafter\.constant"):
        output.places([{"sampling.temperature": 1.0}], ("sampling.temperature", "drafter.constant"))


def test_the_heat_map_shows_what_the_table_says():
    cells = drafted_at(0.5, {0.0: (1, 1), 0.5: (2, 4), 1.0: (5, 2)}) + drafted_at(1.0, {0.0: (2, 2), 1.0: (3, 3)})
    axes = ["sampling.temperature", "drafter.constant"]
    overall = tables.build(cells, axes, num_resamples=20).overall
    figure = heatmap.draft_temperature_figure(overall, draft_temperature.best_draft_temperatures(cells))
    heat, losses = figure.axes
    at = {(t.get_position()[1], t.get_text()) for t in heat.texts}
    assert at == {(0, "1.00"), (0, "3.00"), (0, "3.50"), (1, "2.00"), (1, "3.00"), (1, "–")}
    assert [t.get_text() for t in heat.get_xticklabels()] == ["argmax", "0.5", "1"]
    assert losses.lines[0].get_xdata() == pytest.approx([2.5, 1.0])
    assert min(float(t.get_fontsize()) for ax in figure.axes for t in [*ax.texts, *ax.get_xticklabels()]) >= 7
    with pytest.raises(UsageError, match="several at"):
        heatmap.heat_map(Figure().add_subplot(), pd.concat([overall, overall]))


def test_speedup_is_the_length_over_the_cost():
    assert speedup(3.0, 4, 0.25) == 1.5
    with pytest.raises(ValueError, match="num_draft_tokens"):
        speedup(3.0, -1, 0.1)
    cells = [cell(rows(2, 2, k=1), num_draft_tokens=1), cell(rows(2, 3, k=2), num_draft_tokens=2)]
    found = draft_length.expected_speedups(cells, [False, False], [0.0, 0.5])
    assert found["speedup"].tolist() == pytest.approx([2.0, 2.5, 2 / 1.5, 2.5 / 2])
    assert found["is_best"].tolist() == [False, True, True, False]
    assert found["best_low"].tolist() == [1, 1, 1, 1]  # a draw of prompt 0 alone is a tie: the smaller K
    assert found["best_high"].tolist() == [2, 2, 2, 2]
    free = draft_length.expected_speedups(cells, [True, True], [0.5])
    assert free["speedup"].tolist() == pytest.approx([2.0, 2.5])
    with pytest.raises(UsageError, match=r"study\.cost_ratios"):
        draft_length.run([], None, axes=[], config={}, cost_ratios=[-1])  # type: ignore[arg-type]


def test_the_speedup_panel_rings_the_best_length():
    cells = [cell(rows(2, 2, k=1), num_draft_tokens=1), cell(rows(2, 3, k=2), num_draft_tokens=2)]
    found = draft_length.expected_speedups(cells, [False, False], [0.0])
    ax = speedups.speedup_over_length(Figure().add_subplot(), found)
    assert [list(np.asarray(v).ravel()) for v in ax.lines[-1].get_data()] == [[2], [2.5]]
    overall = tables.build(cells, ["num_draft_tokens"], num_resamples=20).overall
    figure = speedups.draft_length_figure(overall.assign(strategy=output.strategies(cells)), found)
    assert len(figure.axes) == 2
    many = draft_length.expected_speedups(cells, [False, False], [0.01 * i for i in range(9)])
    with pytest.raises(UsageError, match="cost ratios"):
        speedups.draft_length_figure(overall.assign(strategy="a"), many)


def kept(stored_bytes: int, *lengths: int, drafter: str, verifier: str = "rejection", **settings: object) -> CellResult:
    made = rows(*lengths, stored_bytes=stored_bytes)
    return cell(made, drafter__name=drafter, verifier__name=verifier, **settings)


def test_the_share_that_is_won_back():
    cells = [
        kept(0, 1, 2, drafter="argmax"),
        kept(24, 2, 3, drafter="top_m", drafter__keep=4),
        kept(0, 3, 3, drafter="coupled", verifier="coupled"),
        kept(512, 3, 4, drafter="same_temperature"),
        kept(512, 4, 4, drafter="same_temperature", verifier="block"),
    ]
    found = storage_study.recovered(cells, "argmax", "same_temperature").set_index("strategy")
    assert found["share"].tolist() == pytest.approx([0, 0.5, 0.75, 1, 1.25])
    assert found.loc["coupled", ["share_low", "share_high"]].tolist() == pytest.approx([0.5, 1.0])
    assert found["kept"].tolist() == ["nothing", "part", "nothing", "whole row", "whole row"]
    assert found["label"].tolist() == ["argmax", "m = 4", "coupled", "whole row", "block"]
    (ax,) = storage.storage_figure(found.reset_index(), "same_temperature").axes
    assert {t.get_text() for t in ax.texts} == set(found["label"])
    dots = {tuple(xy) for line in ax.lines for xy in zip(*line.get_data(), strict=True)}
    assert {(0.0, 1.5), (24.0, 2.5), (0.0, 3.0), (512.0, 3.5), (512.0, 4.0)} <= dots
    with pytest.raises(UsageError, match=r"study\.upper: expected one of the strategies argmax, .*got 'dense'"):
        storage_study.recovered(cells, "argmax", "dense")


def test_equal_ends_leave_no_share():
    cells = [kept(0, 2, 2, drafter="argmax"), kept(16, 2, 2, drafter="same_temperature")]
    found = storage_study.recovered(cells, "argmax", "same_temperature")
    assert found["share"].isna().all()
    assert "–" in storage_study.findings(found, "argmax", "same_temperature")[1]
    storage.storage_figure(found).canvas.draw()


def test_a_verifier_that_reads_no_law_needs_nothing_kept(tmp_path):
    def stored(engine: str, verifier: str, drafter: str) -> int:
        overrides = ["target=tabular", "draft_model=tabular", "prompts.limit=2", "max_new_tokens=3"]
        overrides += [f"drafter={drafter}", f"verifier={verifier}", f"engine={engine}", f"folder={tmp_path}"]
        (one,) = config.plan(overrides).cells
        (result,) = output.compute([one], output.Store(tmp_path), config={})
        return int(result.rows["draft_bytes_per_token"].max())

    for engine in ("live", "replay"):
        assert stored(engine, "match", "same_temperature") == 0
        assert stored(engine, "rejection", "same_temperature") == 8 * 2
        assert stored(engine, "block", "top_m") == 8 * 6
    assert stored("live", "typical", "same_temperature") == 0


def test_server_memory():
    assert draft_law_bytes(2, 3, 10) == 60
    assert key_value_bytes(1, 1, num_layers=32, num_key_value_heads=8, head_dim=128) == 131_072
    with pytest.raises(ValueError, match="num_requests"):
        draft_law_bytes(-1, 3, 10)
    memory = storage_study.server_memory()
    assert len(memory) == 2 * 4
    first = memory.iloc[1]
    assert (first["num_requests"], first["vocab_size"]) == (64, 128_256)
    assert first["dense_bytes"] == 64 * 4 * 128_256 * 2
    assert first["top_16_bytes"] == 64 * 4 * 16 * 6
    assert first["key_value_70B_bytes"] == 64 * 4 * 2 * 80 * 8 * 128 * 2
    assert "65.67" in storage_study.memory_section(memory)[1]


@pytest.mark.parametrize(
    ("target", "draft", "expected"),
    [
        ({}, {}, ("", "neither")),
        ({"top_p": 0.9}, {}, ("top-p = 0.9", "both")),  # null is the request's own
        ({"top_p": 0.9}, {"top_p": 1.0}, ("top-p = 0.9", "target only")),
        ({}, {"top_k": 40}, ("top-k = 40", "draft only")),
    ],
)
def test_which_side_is_filtered(target, draft, expected):
    settings = {f"sampling.{k}": v for k, v in target.items()} | {f"drafter.{k}": v for k, v in draft.items()}
    assert truncation_study.side(settings) == expected


def test_different_filters_on_both_sides_are_refused():
    with pytest.raises(UsageError, match=r"got top-p = 0\.9 of the target and top-p = 0\.5 of the draft"):
        truncation_study.side({"sampling.top_p": 0.9, "drafter.top_p": 0.5})


def test_the_output_follows_the_row_of_the_target():
    cells = [
        cell(rows(2, 2)),
        cell(rows(3, 4), sampling__top_p=0.9, drafter__top_p=0.9),
        cell(rows(3, 3), sampling__top_p=0.9, drafter__top_p=1.0),
        cell(rows(1, 2), sampling__top_p=1.0, drafter__top_p=0.9),
    ]
    found = truncation_study.by_side(cells).set_index("side")
    assert found["follows_filter"].to_dict() == {
        "both": True, "target only": True, "draft only": False, "neither": False,
    }  # fmt: skip
    assert found.loc[["target only", "draft only"], "difference"].tolist() == [-0.5, -0.5]
    assert found.loc[["both", "neither"], "difference"].isna().all()
    shown = truncation_study.findings(found.reset_index())[1]
    assert shown.count("the filtered target") == 2
    ax = truncation.side_dots(Figure().add_subplot(), found.reset_index())
    assert [float(line.get_ydata()[0]) for line in ax.lines] == [3.5, 3.0, 1.5, 2.0]  # type: ignore[index]
    assert [line.get_markerfacecolor() == "#FFFFFF" for line in ax.lines] == [False, False, True, True]
    truncation.truncation_figure(found.reset_index()).canvas.draw()
    with pytest.raises(UsageError, match="side: expected both"):
        truncation.side_dots(Figure().add_subplot(), found.reset_index().assign(side=["a", "b", "c", "d"]))
