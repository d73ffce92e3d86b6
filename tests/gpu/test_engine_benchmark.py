"""The engine benchmark on a GPU, whose forward passes are timed by events."""

import pandas as pd
import pytest
import torch

from spectoolkit import config

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_engines_are_measured(tmp_path):
    overrides = ["experiment=engine_benchmark_tiny", "target.device=cuda", "grid.batch_size=[1,4]"]
    overrides += ["prompts.limit=4", "max_new_tokens=12", "study.repetitions=1", "study.compared_requests=1"]
    config.plan([*overrides, f"folder={tmp_path}"]).run()
    table = pd.read_csv(tmp_path / "table.csv")
    assert list(table["batch_size"][:2]) == [1, 4]
    assert table["forward_share"].between(0, 1.01).all()
    assert (table["over_floor"] > 0).all()
