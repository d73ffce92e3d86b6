"""The study of the kernels' times: what it refuses, that it runs, and which bytes it counts."""

import pandas as pd
import pytest
import torch

from spectoolkit import config
from spectoolkit.errors import UsageError
from spectoolkit.studies import kernel_benchmark

pytest.importorskip("triton")

HAS_GPU = torch.cuda.is_available()
FEW = ["study.vocab_sizes=[40]", "study.batch_sizes=[2]", "study.num_rows=2", "study.copied_mib=1"]
DRY = ["study.device=cpu", "study.interpret=true"]


def test_it_runs_and_every_verdict_is_the_reference_s(tmp_path):
    where = [] if HAS_GPU else DRY
    text = config.plan(["experiment=kernel_benchmark", *FEW, *where, "num_draft_tokens=2", f"folder={tmp_path}"]).run()
    table = pd.read_csv(tmp_path / "table.csv")
    assert table[["rule", "law"]].apply(tuple, axis=1).tolist() == [(r, law) for r, _, law in kernel_benchmark.RULES]
    assert (table["equal_verdicts"] == 1).all()
    assert (table["kernel_s"] > 0).all()
    of_replay = pd.read_csv(tmp_path / "reduction.csv")
    assert (of_replay["largest_relative_difference"] < 1e-4).all()
    assert (tmp_path / "manifest.json").exists()
    assert ("these times say nothing" in text) is not HAS_GPU


@pytest.mark.parametrize(
    ("more", "message"),
    [
        pytest.param(
            [], "expected a CUDA device, found none", marks=pytest.mark.skipif(HAS_GPU, reason="there is one")
        ),
        (["study.device=cpu"], "expected study.device=cuda, or cpu with study.interpret=true, got 'cpu'"),
        (["study.interpret=true"], "got 'cuda' with interpret=True"),
        ([*DRY, "sampling.temperature=0"], r"sampling.temperature: expected a number > 0"),
    ],
)
def test_what_it_cannot_measure_is_refused(tmp_path, more, message):
    if more[:1] == DRY[:1] and len(more) > 1 and HAS_GPU:
        pytest.skip("the interpreter has to be chosen before triton is imported")
    with pytest.raises(UsageError, match=message):
        config.plan(["experiment=kernel_benchmark", *FEW, *more, f"folder={tmp_path}"]).run()


def test_the_bytes_are_those_of_the_reads():
    case = kernel_benchmark.Case.of(3, 2, 40, 1.0, torch.device("cpu"))
    once = 3 * 3 * 40 * 2  # target rows in bfloat16
    assert kernel_benchmark.bytes_read(case, "PointMass", False, 2) == once
    assert kernel_benchmark.bytes_read(case, "SharedNoise", False, 2) == once
    assert kernel_benchmark.bytes_read(case, "Dense", False, 2) == once + 2 * 40 * (2 + 4)
    assert kernel_benchmark.bytes_read(case, "Dense", True, 2) == once + 3 * 2 * 40 * (2 + 4)
    assert kernel_benchmark.bytes_read(case, "DraftLogits", False, 1) == once + 3 * 2 * 40 * 2 + 40 * (2 + 2)
