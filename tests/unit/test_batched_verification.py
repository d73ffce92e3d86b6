"""Ways to verify a batch: what each computes, that all emit the same, and what is refused."""

import pandas as pd
import pytest
import torch

from spectoolkit import config
from spectoolkit.datatypes import PointMass, Proposal, Uniforms, Verdict
from spectoolkit.errors import RunError, UsageError
from spectoolkit.report import batched_verification as figures
from spectoolkit.studies import batched_verification as study

TOY = [
    "experiment=batched_verification", "target=tabular", "draft_model=tabular", "max_new_tokens=7", "study.turns=2",
    "prompts.limit=6", "grid.batch_size=[1,2,4]",
]  # fmt: skip
NGRAM = [TOY[0].replace("verification", "verification_ngram"), *TOY[1:], "drafter.min_ngram=1"]


class Given:
    """A verifier whose verdict is known."""

    laws, is_lossless, keeps_law = (PointMass,), True, False

    def verify(self, target_probs, proposal, uniforms):
        emitted = torch.tensor([[1, 2, 3, -1], [4, -1, -1, -1], [5, 6, -1, -1]])
        return Verdict(torch.tensor([2, 0, 1]), emitted, torch.zeros(3, 3, dtype=torch.bool))


def test_all_rows_wait_for_the_slowest():
    waiting = study.WaitForSlowest(Given())
    drafts = Proposal(torch.zeros(3, 3, dtype=torch.long), torch.full((3,), 3), PointMass())
    verdict = waiting.verify(torch.zeros(3, 4, 9), drafts, Uniforms(torch.zeros(3, 3), torch.zeros(3, 4)))
    assert verdict.emitted.tolist() == [[1, -1, -1, -1], [4, -1, -1, -1], [5, -1, -1, -1]]
    assert verdict.num_accepted.tolist() == [0, 0, 0]
    assert waiting.unused == [3]


@pytest.mark.parametrize("overrides", [TOY, NGRAM])
def test_every_way_emits_the_same_and_every_position_is_accounted_for(overrides, tmp_path):
    shown = config.plan([*overrides, f"folder={tmp_path}"]).run()
    table = pd.read_csv(tmp_path / "table.csv").set_index(["batch_size", "way"])
    assert (table["same_tokens"] == 1).all()
    parts = table[["rejected", "placeholders", "unused", "cut"]].sum(axis=1) + 1
    assert parts.to_numpy() == pytest.approx(table["slots"].to_numpy())
    assert (table.xs("expanded", level="way")["placeholders"] == 0).all()
    assert table.loc[(1, "together"), "over_batch_1"] == 1
    assert (table["over_batch_1_low"] <= table["over_batch_1"]).all()
    same_steps = table.drop(index="slowest", level="way", errors="ignore")["al_difference"]
    assert (same_steps == 0).all()
    if overrides is TOY:
        assert list(table.index)[:3] == [(1, "together"), (1, "expanded"), (2, "together")]
        slowest = table.xs("slowest", level="way")
        assert (slowest["unused"] > 0).all()
        assert slowest.loc[4, "acceptance_length"] < table.loc[(4, "together"), "acceptance_length"]
        assert (table.drop(index="slowest", level="way")["unused"] == 0).all()
    else:
        assert table.loc[(4, "together"), "placeholders"] > 0
        assert (table.xs("by_length", level="way")["placeholders"] == 0).all()
    assert "75 % probability" not in shown  # of two turns the least and the most enclose the median every second time
    assert "50 % probability" in shown
    assert (tmp_path / "figure.png").exists()


def test_the_figure_has_a_line_per_way(tmp_path):
    config.plan([*TOY, f"folder={tmp_path}"]).run()
    speed, wasted = figures.batched_verification_figure(pd.read_csv(tmp_path / "table.csv")).axes
    assert [line.get_marker() for line in speed.lines] == ["o", "s", "D"]
    assert [len(line.get_xdata()) for line in wasted.lines] == [3, 3, 2]


def test_different_tokens_are_an_error():
    table = pd.DataFrame({"way": ["together", "slowest"], "batch_size": [1, 4], "same_tokens": [1.0, 0.9]})
    study.check_same_tokens(table, 0.1 + 1e-9, "x/table.md")
    with pytest.raises(RunError, match=r"all wait for the slowest at batch size 4 has them for 90\.0%"):
        study.check_same_tokens(table, 0.02, "x/table.md")


def test_a_run_whose_tokens_differ_keeps_its_table_and_figure(tmp_path, monkeypatch):
    monkeypatch.setattr(study, "_same", lambda done, base: 0.5)
    with pytest.raises(RunError, match=rf"50\.0% .* the table: {tmp_path}/table\.md"):
        config.plan([*TOY, f"folder={tmp_path}"]).run()
    assert "50.0%" in (tmp_path / "table.md").read_text()
    assert all((tmp_path / name).exists() for name in ("table.csv", "figure.png", "manifest.json"))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["study.ways=[expanded]"], "expected together and others"),
        (["study.ways=[together,all]"], "expected together and others of together, expanded, by_length, slowest"),
        (["study.turns=0"], r"study\.turns: expected an integer >= 1, got 0"),
        (["study.max_differing=2"], r"study\.max_differing: expected a share"),
        (["grid.batch_size=[2,4]"], "1 among them"),
        (["verifier=rejection", "drafter=argmax"], "got rejection at temperature 0.7"),
        (["engine=auto"], "expected engine=live"),
        (["study.turns=7", "samples_per_prompt=1"], r"study\.turns: .* got 7 turns and 6 requests"),
        (["drafter=chains", "verifier=recursive", "sampling.temperature=0"], "one chain per step.* got drafter=chains"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_runs(more, message):
    with pytest.raises(UsageError, match=message):
        config.plan([*TOY, *more])


def test_a_target_that_cannot_score_parts_is_refused(tmp_path, monkeypatch):
    from spectoolkit.models.tabular import TabularModel

    monkeypatch.delattr(TabularModel, "score_parts")
    with pytest.raises(UsageError, match="expected a model with score_parts"):
        config.plan([*TOY, f"folder={tmp_path}"]).run()
    config.plan([*TOY, f"folder={tmp_path}", "study.ways=[together,slowest]"]).run()


def test_batches_that_cannot_be_full_are_told(tmp_path):
    shown = config.plan([*TOY, f"folder={tmp_path / 'a'}", "grid.batch_size=[1,16]"]).run()
    assert "A turn has about 6 requests: larger batches are not full" in shown
    assert "not full" not in config.plan([*TOY, f"folder={tmp_path / 'b'}"]).run()
