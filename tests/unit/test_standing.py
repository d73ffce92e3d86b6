"""Which cells are marked: best and tied by the paired bootstrap, at equal conditions, lossless ones only."""

import numpy as np
import pandas as pd

from spectoolkit.metrics import bootstrap, paired_difference
from spectoolkit.report import tables, text
from spectoolkit.report.cells import CellResult
from spectoolkit.report.standing import standings
from tests.helpers.fake_rows import row, step

OPTIONS = (400, 0.95, 0)


def cell(
    emitted: list[int], name: str = "a", lossless: bool = True, temperature: float = 0.7, k: int = 8
) -> CellResult:
    """One prompt per number: so many steps in ten emit 1 + `emitted` tokens as decimals would say."""
    rows = []
    for i, tenths in enumerate(emitted):
        steps = [step(k, 1 + (j < tenths % 10) + tenths // 10) for j in range(10)]
        rows.append({**row(steps, k, cluster=f"p{i}"), "request_id": f"r{i}"})
    settings = {"drafter.name": name, "verifier.name": "rejection" if lossless else "typical"}
    settings |= {"verifier.is_lossless": lossless, "sampling.temperature": temperature, "num_draft_tokens": k}
    return CellResult(settings, pd.DataFrame(rows))


EASE = [0, 40, 5, 33, 12, 28, 3, 37]  # prompts differ by far more than strategies
GOOD = cell([e + 3 for e in EASE], "good")
BEHIND = cell([e + 1 + i % 2 for i, e in enumerate(EASE)], "behind")  # a little less on every prompt
TIED = cell([e + 3 + (4 if i % 2 == 0 else -6) for i, e in enumerate(EASE)], "tied")  # less, but not on all


def of(*found: CellResult, points: list[object] | None = None) -> list[str]:
    rows = standings(list(found), points or ["p"] * len(found), OPTIONS)  # type: ignore[arg-type]
    return [r["standing"] for r in rows]


def test_a_small_loss_on_every_prompt_is_behind_although_the_intervals_overlap():
    spans = [bootstrap(c.rows, ["acceptance_length"], 400)["acceptance_length"] for c in (GOOD, BEHIND)]
    assert spans[1].high > spans[0].low + 1  # unpaired intervals could not tell them apart
    assert of(BEHIND, GOOD) == ["behind", "best"]
    assert of(TIED, GOOD) == ["tied", "best"]
    assert paired_difference(TIED.rows, GOOD.rows, "acceptance_length", 400).low < 0


def test_how_far_behind_is_the_paired_difference():
    found = standings([GOOD, BEHIND], ["p", "p"], OPTIONS)
    expected = paired_difference(BEHIND.rows, GOOD.rows, "acceptance_length", 400)
    assert tuple(found[1][n] for n in ("below_best", "below_best_low", "below_best_high")) == expected
    assert found[0]["below_best"] == 0


def test_only_what_is_comparable_is_compared():
    assert of(GOOD, BEHIND, points=["p", None]) == ["", ""]  # a lone cell is the best of nothing
    assert of(GOOD, BEHIND, points=["p", "q"]) == ["", ""]
    fewer = CellResult(BEHIND.settings, BEHIND.rows.iloc[:5])
    assert of(GOOD, BEHIND, fewer) == ["best", "behind", ""]  # other prompts
    assert of(GOOD, GOOD) == ["best", "best"]
    one = [CellResult(c.settings, c.rows.iloc[:1]) for c in (GOOD, BEHIND)]
    assert of(*one) == ["best", "tied"]  # one prompt tells nothing
    empty = [CellResult(c.settings, c.rows.iloc[:0]) for c in (GOOD, BEHIND)]
    assert of(*empty) == ["", ""]


def test_a_table_compares_at_equal_conditions_and_leaves_lossy_rows_out():
    better = cell([e + 9 for e in EASE], "good", lossless=False)
    hotter = [
        cell([e + 2 for e in EASE], "good", temperature=1.0),
        cell([e + 4 for e in EASE], "behind", temperature=1.0),
    ]
    longer = [cell([e + 8 for e in EASE], name, k=16) for name in ("good", "behind")]
    axes = ["sampling.temperature", "num_draft_tokens", "drafter", "verifier"]
    built = tables.build([GOOD, BEHIND, better, *hotter, *longer], axes, num_resamples=200)
    assert built.overall["standing"].tolist() == ["best", "behind", "", "behind", "best", "best", "best"]
    assert np.isnan(built.overall["below_best"].iloc[2])
    page = text.markdown(built, "t", [])
    first = built.overall.iloc[0]
    shown = "{acceptance_length:.2f} [{acceptance_length_low:.2f}, {acceptance_length_high:.2f}]".format(**first)
    assert f"**{shown}**" in page
    assert page.count("**") == 2 * 4
    assert "of the lossless rows at equal temperature and K. †: tied with it" in page
    lossy = next(line for line in page.splitlines() if "typical" in line)
    assert "**" not in lossy
    assert "†" not in lossy


def test_a_table_that_compares_nothing_says_nothing_of_marks():
    page = text.markdown(tables.build([GOOD], ["drafter"], num_resamples=20), "t", [])
    assert "Bold" not in page
    assert "**" not in page
    other_columns = text.markdown(
        tables.build([GOOD, BEHIND], ["drafter"], num_resamples=20), "t", [], ["drafter", "steps"]
    )
    assert "Bold" not in other_columns


def test_category_rows_have_no_standing():
    built = tables.build([GOOD, BEHIND], ["drafter"], num_resamples=20)
    table = tables.long(built)
    assert set(table.loc[table["scope"] == "category", "standing"]) == {""}
