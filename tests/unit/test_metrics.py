"""Metrics against numbers worked out by hand, and the statistical promises of the intervals."""

import math

import numpy as np
import pandas as pd
import pytest
from scipy.stats import binom

from spectoolkit.errors import UsageError
from spectoolkit.metrics import COUNTS, Interval, bootstrap, paired_difference, ratio_interval, summarise, undefined
from tests.helpers.fake_rows import row, simulate, step


def frame(*rows: dict[str, object]) -> pd.DataFrame:
    return pd.DataFrame(list(rows))


def test_masks_accept_prefixes_and_judge_alone():
    # Masks 1,0,1 and 1,1,1: prefixes 1 and 3; alone 2 and 3 pass.
    steps = [step(3, 1, judged_alone=(True, False, True)), step(3, 3)]
    found = summarise(frame(row(steps, 3)))
    assert found["accepted"] == 4
    assert found["emitted"] == 6
    assert found["acceptance_rate"] == pytest.approx(4 / 6)
    assert found["acceptance_rate_unmasked"] == pytest.approx(5 / 6)
    assert found["system_efficiency"] == pytest.approx(0.75)
    assert found["acceptance_length"] == pytest.approx(3.0)
    assert [found[f"accepted_at_{i}"] for i in (1, 2, 3)] == pytest.approx([1.0, 0.5, 0.5])
    assert [found[f"accepted_at_{i}_conditional"] for i in (1, 2, 3)] == pytest.approx([1.0, 0.5, 1.0])


def test_end_of_text_inside_a_block():
    cut = step(5, 5, accepted=3, emitted=3, truncated=True)
    found = summarise(frame(row([cut], 5)))
    assert found["acceptance_length"] == 3
    assert found["acceptance_length_nominal"] == 6  # what a serving log would claim
    assert found["acceptance_rate"] == pytest.approx(3 / 5)
    assert found["truncated"] == 1
    assert found["accepted_at_3_conditional"] == 1
    assert math.isnan(found["accepted_at_4_conditional"])


def test_slots_that_hold_no_draft_are_not_drafts():
    found = summarise(frame(row([step(2, 2)], 5)))
    assert found["acceptance_rate"] == 1
    assert found["acceptance_rate_slots"] == pytest.approx(2 / 5)


def test_steps_without_a_proposal_are_steps():
    # 993 proposals of about five tokens and 821 steps without one, as sums.
    one = row([step(5, 3)], 5) | {
        "steps": 1814.0, "proposing_steps": 993.0, "drafted": 4960.0, "verified": 3562.0, "accepted": 3562.0,
        "emitted": 5376.0,
    }  # fmt: skip
    found = summarise(frame(one))
    assert found["acceptance_length_proposing"] == pytest.approx(4.587, abs=5e-4)
    assert found["acceptance_length"] == pytest.approx(2.964, abs=5e-4)
    assert found["acceptance_rate"] == pytest.approx(3562 / 4960)
    assert found["acceptance_rate_slots"] == pytest.approx(3562 / (5 * 1814))


def test_a_drafter_that_never_proposes_gives_one_token_per_step_and_no_rate():
    found = summarise(frame(row([step(0, 0)] * 4, 3)))
    assert found["acceptance_length"] == 1
    assert found["acceptance_rate_slots"] == 0
    names = ("acceptance_rate", "acceptance_rate_unmasked", "acceptance_length_proposing", "accepted_at_1_conditional")
    assert all(math.isnan(found[name]) for name in names)
    assert set(names) <= set(undefined(found))
    assert "acceptance_length" not in undefined(found)


@pytest.mark.parametrize("rows", [frame(row([], 3)), frame(row([step(1, 1)], 3)).iloc[:0]], ids=["no steps", "no rows"])
def test_nothing_measured_is_undefined(rows):
    found = summarise(rows)
    assert found["steps"] == 0
    ratios = [name for name in found if name not in (*COUNTS, "draft_bytes_per_token")]
    assert ratios
    assert all(math.isnan(found[name]) for name in ratios)
    interval = bootstrap(rows, ["acceptance_length"], num_resamples=5)["acceptance_length"]
    assert all(math.isnan(end) for end in interval)


def test_longer_drafts_raise_the_acceptance_of_the_first_position_on_a_periodic_text():
    # Easy, easy, hard, repeated: with one draft per step every second draft is the hard one; with eight, every step
    # starts after the hard token, so its first draft is easy. Acceptance at a position depends on where steps start.
    short = summarise(frame(row([step(1, 1), step(1, 0)] * 30, 1)))
    long = summarise(frame(row([step(8, 2)] * 30, 8)))
    assert (short["accepted_at_1"], short["acceptance_length"]) == (0.5, 1.5)
    assert (long["accepted_at_1"], long["acceptance_length"]) == (1.0, 3.0)


def test_pooled_is_a_ratio_of_sums_and_request_mean_a_mean_of_ratios():
    rows = frame(row([step(3, 3)] * 1, 3), row([step(3, 0)] * 9, 3))
    found = summarise(rows)
    assert found["acceptance_length"] == pytest.approx(13 / 10)
    assert found["acceptance_length_request_mean"] == pytest.approx(2.5)
    # A request without steps has no ratio and is left out of the mean.
    assert summarise(frame(row([step(3, 3)], 3), row([], 3)))["acceptance_length_request_mean"] == 4


def test_requests_of_different_lengths_of_draft():
    found = summarise(frame(row([step(1, 1)] * 2, 1), row([step(3, 3)] * 2, 3)))
    assert found["accepted_at_1"] == 1
    assert found["accepted_at_3"] == 0.5
    assert found["accepted_at_3_conditional"] == 1
    assert found["system_efficiency"] == pytest.approx(12 / (2 * 2 + 4 * 2))


def test_bytes_and_speed():
    found = summarise(frame(row([step(3, 1, seconds=0.5)] * 4, 3, stored_bytes=8), row([step(3, 1)], 3)))
    assert found["draft_bytes_per_token"] == 8
    assert found["tokens_per_second"] == pytest.approx(10 / 2.0)
    assert math.isnan(summarise(frame(row([step(3, 1)], 3)))["tokens_per_second"])


def test_expected_values_need_not_be_whole_numbers():
    one = row([step(2, 1)], 2) | {"steps": 10.4, "proposing_steps": 9.9, "emitted": 25.0, "accepted_at": [7.2, 3.1]}
    found = summarise(frame(one))
    assert found["acceptance_length"] == pytest.approx(25 / 10.4)
    assert found["acceptance_length_proposing"] == pytest.approx((25 - 0.5) / 9.9)
    assert found["accepted_at_2"] == pytest.approx(3.1 / 10.4)


def test_rows_survive_parquet(tmp_path):
    rows = simulate(0.6, num_clusters=4)
    rows.to_parquet(tmp_path / "rows.parquet")
    assert summarise(pd.read_parquet(tmp_path / "rows.parquet")) == summarise(rows)


def test_missing_columns_and_bad_parameters_are_named():
    rows = simulate(0.6, num_clusters=3)
    with pytest.raises(UsageError, match="reached_at missing"):
        summarise(rows.drop(columns="reached_at"))
    with pytest.raises(UsageError, match="expected a cluster for every request"):
        summarise(rows.assign(cluster=None))
    with pytest.raises(UsageError, match=r"metrics: .* got speed"):
        bootstrap(rows, ["speed"])
    with pytest.raises(UsageError, match=r"num_resamples: .* got 0"):
        bootstrap(rows, ["acceptance_length"], num_resamples=0)
    with pytest.raises(UsageError, match=r"confidence: .* got 1\.0"):
        bootstrap(rows, ["acceptance_length"], confidence=1.0)
    with pytest.raises(UsageError, match=r"seed: .* got -1"):
        bootstrap(rows, ["acceptance_length"], seed=-1)


def test_one_prompt_has_no_interval():
    found = bootstrap(simulate(0.6, num_clusters=1), ["acceptance_length"])["acceptance_length"]
    assert math.isnan(found.low)
    assert math.isnan(found.high)


def test_bootstrap_of_every_ratio_matches_resampled_tables():
    """Against the definition: build each resampled table row by row and summarise it."""
    rows = simulate(0.6, num_clusters=5, proposes=0.7)
    names = [name for name in summarise(rows) if name not in (*COUNTS, "draft_bytes_per_token")]
    fast = bootstrap(rows, names, num_resamples=40, confidence=0.8, seed=3)
    clusters = sorted(set(rows["cluster"]))
    drawn = np.random.default_rng(3).integers(5, size=(40, 5))
    parts = dict(list(rows.groupby("cluster")))
    slow = [summarise(pd.DataFrame(pd.concat([parts[clusters[i]] for i in pick]))) for pick in drawn]
    for name in names:
        assert fast[name] == pytest.approx(np.quantile([s[name] for s in slow], [0.1, 0.9]), rel=1e-12), name


def test_equal_seeds_give_equal_intervals_in_any_row_order():
    rows = simulate(0.6)
    names = ["acceptance_length", "acceptance_length_request_mean"]
    first = bootstrap(rows, names, seed=1)
    assert first == bootstrap(rows, names, seed=1)
    assert first != bootstrap(rows, names, seed=2)
    shuffled = bootstrap(rows.sample(frac=1, random_state=0), names, seed=1)
    for name in names:
        assert shuffled[name] == pytest.approx(first[name], rel=1e-12)


def test_resamples_without_a_denominator_are_left_out():
    rows = frame(row([step(2, 1)], 2, cluster="a"), row([step(0, 0)], 2, cluster="b"))
    # One resample in four draws "b" twice and has no draft at all.
    assert bootstrap(rows, ["acceptance_rate"])["acceptance_rate"] == Interval(0.5, 0.5)


REPLICATES, TOKENS, REQUESTS, PROMPTS = 500, 48, 6, 40


def _one_study(seed: int) -> pd.DataFrame:
    """Requests of a fixed length whose number of steps depends on the prompt; one sum row each, no step records."""
    generator = np.random.default_rng(seed)
    chance = np.repeat(generator.uniform(0.2, 0.8, PROMPTS), REQUESTS)
    steps = 16.0 + generator.binomial(32, 1 - chance)
    template = row([step(2, 1)], 2)
    columns = {name: [value] * len(steps) for name, value in template.items()}
    prompts = np.repeat([f"p{i}" for i in range(PROMPTS)], REQUESTS)
    return pd.DataFrame(columns | {"cluster": prompts, "steps": steps, "emitted": float(TOKENS)})


def test_intervals_cover_the_truth_as_often_as_they_say_and_ignoring_prompts_would_not():
    """80 % intervals; false alarm below 1e-9 for any true coverage between .75 and .83.

    A percentile bootstrap of 40 clusters undercovers a little, hence the asymmetric range. Power: the same data with
    every request taken for a prompt of its own must fall outside the bounds.
    """
    low = int(binom.ppf(5e-10, REPLICATES, 0.75)) - 1
    high = int(binom.ppf(1 - 5e-10, REPLICATES, 0.83)) + 1
    truth = TOKENS / (16 + 32 * 0.5)
    covered = naive = 0
    for seed in range(REPLICATES):
        rows = _one_study(seed)
        found = bootstrap(rows, ["acceptance_length"], 200, 0.8, seed)["acceptance_length"]
        covered += found.low <= truth <= found.high
        alone = rows.assign(cluster=[str(i) for i in range(len(rows))])
        found = bootstrap(alone, ["acceptance_length"], 200, 0.8, seed)["acceptance_length"]
        naive += found.low <= truth <= found.high
    assert low <= covered <= high
    assert naive < low


def test_pairing_by_prompt_narrows_the_interval():
    a, b = simulate(0.6, seed=1), simulate(0.5, seed=2)
    paired = paired_difference(a, b, "acceptance_length")
    one, other = (bootstrap(rows, ["acceptance_length"], seed=s)["acceptance_length"] for s, rows in enumerate((a, b)))
    unpaired = math.hypot(one.high - one.low, other.high - other.low)
    assert paired.high - paired.low < 0.7 * unpaired
    assert paired.estimate == pytest.approx(
        summarise(a)["acceptance_length"] - summarise(b)["acceptance_length"], rel=1e-12
    )
    assert paired.low < paired.estimate < paired.high
    assert paired.excludes_zero
    assert not paired_difference(a, a, "acceptance_length").excludes_zero
    assert paired_difference(a, a, "acceptance_length_request_mean") == (0.0, 0.0, 0.0)


def test_a_difference_needs_the_same_prompts():
    a = simulate(0.6, num_clusters=6)
    with pytest.raises(UsageError, match=r"same clusters.*p005"):
        paired_difference(a, pd.DataFrame(a[a["cluster"] != "p005"]), "acceptance_length")
    undefined_side = simulate(0.6, num_clusters=6, proposes=0.0)
    assert math.isnan(paired_difference(a, undefined_side, "acceptance_rate").estimate)
    assert not paired_difference(a, undefined_side, "acceptance_rate").excludes_zero


def test_the_interval_of_any_ratio_is_that_of_the_metric_it_equals():
    rows = simulate(0.6, seed=3)
    value, found = ratio_interval(rows["emitted"].tolist(), rows["steps"].tolist(), rows["cluster"].tolist())
    assert value == pytest.approx(summarise(rows)["acceptance_length"])
    assert found == bootstrap(rows, ["acceptance_length"])["acceptance_length"]
