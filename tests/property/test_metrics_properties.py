"""What holds for metrics of any rows."""

import math

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spectoolkit.datatypes import StepRecord
from spectoolkit.metrics import COUNTS, bootstrap, summarise
from tests.helpers.fake_rows import row, step

K = 4


@st.composite
def steps(draw: st.DrawFn) -> StepRecord:
    drafted = draw(st.integers(0, K))
    alone = tuple(draw(st.lists(st.booleans(), min_size=drafted, max_size=drafted)))
    verified = next((i for i, passed in enumerate(alone) if not passed), drafted)
    emitted = draw(st.integers(1, verified + 1))
    return step(
        drafted,
        verified,
        accepted=min(verified, emitted),
        emitted=emitted,
        truncated=emitted <= verified,
        judged_alone=alone,
        seconds=0.25,
    )


requests = st.builds(
    lambda s, prompt: row(s, K, cluster=f"p{prompt}"), st.lists(steps(), min_size=1, max_size=5), st.integers(0, 3)
)
tables = st.lists(requests, min_size=1, max_size=6).map(pd.DataFrame)


def ratios(summary: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in summary.items() if name not in COUNTS}


@settings(deadline=None, max_examples=60)
@given(tables)
def test_bounds_and_identities(rows):
    found = summarise(rows)
    assert 1 <= found["acceptance_length"] <= K + 1
    assert found["acceptance_length"] <= found["acceptance_length_nominal"] <= K + 1
    assert found["system_efficiency"] == pytest.approx(found["acceptance_length"] / (K + 1))
    joint = [found[f"accepted_at_{i}"] for i in range(1, K + 1)]
    assert all(1 >= earlier >= later >= 0 for earlier, later in zip([1.0, *joint], joint, strict=False))
    assert sum(joint) == pytest.approx(found["accepted"] / found["steps"])
    for i in range(1, K + 1):
        conditional = found[f"accepted_at_{i}_conditional"]
        assert math.isnan(conditional) or found[f"accepted_at_{i}"] - 1e-12 <= conditional <= 1
    if found["drafted"]:
        assert 0 <= found["acceptance_rate"] <= found["acceptance_rate_unmasked"] <= 1
        assert found["acceptance_rate_slots"] <= found["acceptance_rate"]
        assert found["acceptance_length_proposing"] >= found["acceptance_length"] - 1e-12


@settings(deadline=None, max_examples=40)
@given(tables, st.randoms(use_true_random=False), st.floats(0.1, 7))
def test_order_repetition_and_scale_do_not_matter(rows, random, scale):
    expected = ratios(summarise(rows))
    order = list(range(len(rows)))
    random.shuffle(order)
    assert ratios(summarise(rows.iloc[order])) == pytest.approx(expected, nan_ok=True)
    assert ratios(summarise(pd.concat([rows, rows]))) == pytest.approx(expected, nan_ok=True)
    # Expected counts are counts times weights, so scaling every sum must leave every ratio alone.
    scaled = rows.copy()
    for name in scaled.columns.drop(["num_draft_tokens", "draft_bytes_per_token", "prompt_tokens", "tokens"]):
        if isinstance(rows[name].iloc[0], float):
            scaled[name] = rows[name] * scale
        elif name.endswith("_at"):
            scaled[name] = [[value * scale for value in values] for values in rows[name]]
    assert ratios(summarise(scaled)) == pytest.approx(expected, nan_ok=True)


@settings(deadline=None, max_examples=40)
@given(tables)
def test_the_requests_of_a_prompt_may_be_split_or_merged(rows):
    """Pooled metrics and their intervals depend on the prompts' sums only."""
    kept = {name: "first" for name in rows.columns if name != "cluster"}
    kept |= dict.fromkeys(rows.select_dtypes("float").columns, "sum")
    kept |= {name: lambda lists: [sum(at) for at in zip(*lists, strict=True)] for name in rows if name.endswith("_at")}
    merged = rows.groupby("cluster", as_index=False).agg(kept)
    names = ["acceptance_length", "acceptance_rate", "accepted_at_1_conditional"]
    whole, parts = summarise(merged), summarise(rows)
    assert {n: whole[n] for n in names} == pytest.approx({n: parts[n] for n in names}, nan_ok=True)
    one, other = bootstrap(merged, names, 50), bootstrap(rows, names, 50)
    assert all(one[name] == pytest.approx(other[name], nan_ok=True) for name in names)


@settings(deadline=None, max_examples=40)
@given(tables)
def test_intervals_lie_within_the_range_of_the_prompts(rows):
    name = "acceptance_length"
    low, high = bootstrap(rows, [name], 60)[name]
    each = [summarise(part)[name] for _, part in rows.groupby("cluster")]
    if len(each) < 2:
        assert math.isnan(low)
        assert math.isnan(high)
    else:
        assert min(each) - 1e-9 <= low <= high <= max(each) + 1e-9
