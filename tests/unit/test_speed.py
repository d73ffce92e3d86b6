"""The study of live decoding's speed: what it refuses, and what its ratios are made of."""

import pandas as pd
import pytest

from spectoolkit import config
from spectoolkit.errors import UsageError

TOY = ["experiment=speed", "target=tabular", "draft_model=tabular", "prompts.limit=2", "max_new_tokens=6"]


def test_every_ratio_is_taken_against_plain_decoding_of_its_batch_size(tmp_path):
    text = config.plan([*TOY, f"folder={tmp_path}", "study.repetitions=2", "grid.batch_size=[1,2]"]).run()
    table = pd.read_csv(tmp_path / "table.csv")
    assert table["batch_size"].tolist() == [1] * 5 + [2] * 5
    plain = table[table["drafter"] == "none"]
    assert plain["speedup"].tolist() == [1.0, 1.0]
    assert plain["scoring_cost"].tolist() == [1.0, 1.0]
    assert plain["draft_cost"].tolist() == [0.0, 0.0]
    assert plain["acceptance_length"].tolist() == [1.0, 1.0]
    assert (table["speedup_low"] <= table["speedup"]).all()
    assert (table["speedup"] <= table["speedup_high"]).all()
    assert "Medians of 2 turns" in text


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["cases=[{drafter: argmax, verifier: rejection}]"], "a cell with drafter=none at every batch size"),
        (["engine=auto"], "expected engine=live"),
    ],
)
def test_what_it_cannot_compare_is_refused_before_anything_runs(tmp_path, more, message):
    with pytest.raises(UsageError, match=message):
        config.plan([*TOY, f"folder={tmp_path}", *more])


def test_repetitions(tmp_path):
    with pytest.raises(UsageError, match=r"study.repetitions: expected an integer >= 1, got 0"):
        config.plan([*TOY, f"folder={tmp_path}", "study.repetitions=0"]).run()
