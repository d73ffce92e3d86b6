"""What to emit at the first rejection: which rules are compared, and what follows from the numbers."""

import pandas as pd
import pytest

from spectoolkit import config
from spectoolkit.errors import RunError, UsageError
from spectoolkit.exactness.audit import Finding
from spectoolkit.exactness.proof import Proof
from spectoolkit.report import recovered_token as figures
from spectoolkit.report.cells import CellResult
from spectoolkit.studies import recovered_token as study
from tests.helpers.fake_rows import row, step

TOY = ["experiment=recovered_token", "target=tabular", "draft_model=tabular", "prompts.limit=8", "max_new_tokens=8"]
T = study.TEMPERATURE


def cell(verifier: str, *lengths: int, temperature: float = 0.7, drafter: str = "argmax", **more: object) -> CellResult:
    made = [row([step(2, n - 1)], 2, cluster=f"p{i}") for i, n in enumerate(lengths)]
    settings = {"drafter.name": drafter, "verifier.name": verifier, "verifier.is_lossless": verifier != "typical"}
    settings |= {"verifier.epsilon": 0.09, "verifier.delta": 0.3} if verifier == "typical" else {}
    return CellResult(settings | {T: temperature} | {f"verifier.{k}": v for k, v in more.items()}, pd.DataFrame(made))


def finding(claim: str, distance: float) -> Finding:
    return Finding(
        "d", "v", "v" if claim == "wrong on purpose" else "", claim, Proof(distance, distance, ""), None, None, 0
    )


CELLS = [
    cell("typical", 1, 2, recovery="first_only"),
    cell("typical", 2, 3, recovery="sample"),
    cell("rejection", 2, 2),
    cell("match", 1, 2),
    cell("rejection", 2, 2, temperature=0.0, drafter="same_temperature"),
    cell("match", 2, 2, temperature=0.0),
]
FINDINGS = [finding("lossy", 0.2), finding("lossy", 0.2), *[finding("lossless", 0.0)] * 4]


def test_every_rule_is_compared_with_its_base():
    assert study.bases(CELLS) == [0, 0, 2, 2, 4, 4]
    both = [*CELLS, cell("rejection", 2, 2, temperature=0.0)]
    assert study.bases(both)[5] == 6  # the one of its own drafter, where there is one
    looser = [cell("typical", 1, recovery=how, epsilon=0.3) for how in ("first_only", "sample")]
    assert study.bases([*CELLS, *looser])[6:] == [6, 6]  # of its own thresholds
    with pytest.raises(
        UsageError, match=r"one cell of typical, first_only at .* to compare typical, sample with, got 0"
    ):
        study.bases(CELLS[1:])
    with pytest.raises(UsageError, match=r"one cell of rejection .* to compare rejection with, got 2"):
        study.bases([*CELLS, cell("rejection", 2, 2)])
    with pytest.raises(UsageError, match=r"rules among rejection; .* got lenient"):
        study.bases([cell("lenient", 1)])


def test_ratios_are_taken_within_turns_and_lengths_within_prompts():
    def measured(*speeds: float) -> list[dict[str, float]]:
        return [{"tokens_per_s": s, "step_s": 1 / s, "verify_share": 0.1} for s in speeds]

    found = study.compared(CELLS, study.bases(CELLS), FINDINGS, {0: measured(1, 2, 4), 1: measured(2, 3, 4)})
    typical = found.iloc[1]
    assert (typical["speed_ratio"], typical["speed_ratio_low"], typical["speed_ratio_high"]) == (1.5, 1, 2)
    assert typical["length_ratio"] == pytest.approx(5 / 3)
    assert (typical["difference"], typical["difference_low"], typical["difference_high"]) == (1, 1, 1)
    assert found["base"].iloc[0] == ""
    assert found["base"].iloc[5] == "rejection of same temperature drafts"
    assert found.loc[[0, 2, 4], "length_ratio"].isna().all()
    assert found.loc[2:, "speed_ratio"].isna().all()
    assert found["exactness"].tolist() == ["lossy: distance 0.200"] * 2 + ["proven"] * 4
    assert study._faster(typical) == "open"
    assert study._faster({"speed_ratio_low": 1.01, "speed_ratio_high": 2}) == "yes"
    assert study._faster({"speed_ratio_low": 0.9, "speed_ratio_high": 0.99}) == "no, slower"
    lengths, speeds = figures.recovered_token_figure(found, 1.24).axes
    assert [line.get_marker() for line in lengths.lines] == ["s", "s", "o", "o", "o", "o"]
    assert [float(line.get_xdata()[0]) for line in lengths.lines] == [1.5, 2.5, 2, 1.5, 2, 2]
    assert 1.24 in [float(line.get_xdata()[0]) for line in speeds.lines]
    assert [t.get_text() for t in speeds.texts] == ["base"]


def test_different_tokens_at_temperature_0_are_an_error():
    study.check_same_tokens(CELLS)  # those at other temperatures may differ
    other = cell("match", 2, 3, temperature=0.0)
    with pytest.raises(RunError, match="request 'r' differs between rejection of same temperature drafts and match"):
        study.check_same_tokens([*CELLS, other])


def test_the_study_says_what_each_token_costs(tmp_path):
    shown = config.plan([*TOY, f"folder={tmp_path}", "study.repetitions=2", "prompts.limit=24"]).run()
    found = pd.read_csv(tmp_path / "recovered.csv")
    assert found["exactness"].str.partition(":")[0].tolist() == [
        "lossy", "lossy", "proven", "caught", "proven", "proven", "proven", "proven",
    ]  # fmt: skip
    nothing, sample = found["two_steps"].iloc[:2]
    assert abs(nothing - sample) > 1e-3  # enumerated where rejections happen
    greedy = found[found[T] == 0]
    assert greedy["acceptance_length"].nunique() == 1
    assert found["difference_low"].iloc[1] > 0  # a token more makes steps longer
    assert found["difference_high"].iloc[4] < 0  # strict match accepts less than rejection
    timed = found["speed_ratio"].notna()
    assert timed.tolist() == [False, True, False, False, False, False, True, True]
    assert (found[timed]["speed_ratio_low"] > 0).all()
    assert "2 turns over 5 requests, batch 1" in shown
    assert "50 % probability" in shown


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["engine=auto"], "expected engine=live"),
        (["study.repetitions=0"], r"study\.repetitions: expected an integer >= 1, got 0"),
        (["study.timed_prompts=0"], r"study\.timed_prompts: expected an integer >= 1"),
        (["cases=[{drafter: argmax, verifier: match}]"], "one cell of rejection at sampling.temperature=1.0"),
        (["cases=[{drafter: argmax, verifier: typical}]"], "one cell of typical, first_only"),
        (["cases=[{verifier: rejection}, {verifier: relaxed}]"], "got relaxed"),
        (["cases=[]"], "a rule beside the one that it is compared with, got rejection alone"),
        (["cases=[{sampling.temperature: 0.0}, {sampling.temperature: 1.0}]"], "got rejection; rejection alone"),
        (["cases=[{drafter: none, verifier: rejection}, {drafter: none, verifier: match}]"], "got drafter=none"),
        (["drafter=none", "cases=[]"], "got drafter=none"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_runs(more, message):
    with pytest.raises(UsageError, match=message):
        config.plan([*TOY, *more])
