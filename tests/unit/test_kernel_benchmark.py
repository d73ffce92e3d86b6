"""The study of the kernels' times: what it refuses, that it runs, and which bytes it counts."""

import sys
from importlib.util import find_spec
from types import ModuleType

import pandas as pd
import pytest
import torch

from spectoolkit import config
from spectoolkit.errors import UsageError
from spectoolkit.studies import kernel_benchmark

pytest.importorskip("triton")

HAS_GPU = torch.cuda.is_available()
FEW = ["study.vocab_sizes=[40]", "study.batch_sizes=[2]", "study.num_rows=[2]", "study.copied_mib=1"]
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
    dense = table[(table["rule"] == "rejection") & (table["law"] == "Dense")].iloc[0]
    for name in ("flashinfer", "vllm"):
        if find_spec(name) is None:
            assert dense[f"{name}_note"] == "not installed"
            assert "| not installed |" in text


def test_on_a_cpu_a_replay_s_reduction_is_compared_with_the_plain_expression(tmp_path):
    where = ["study.device=cpu", "study.vocab_sizes=[40,300]", "study.num_rows=[20,3]", "study.repetitions=2"]
    text = config.plan(["experiment=kernel_benchmark", *where, f"folder={tmp_path}"]).run()
    table = pd.read_csv(tmp_path / "reduction_on_cpu.csv")
    assert table[["vocab_size", "rows", "rule"]].apply(tuple, axis=1).tolist() == [
        (v, rows, rule)
        for v in (40, 300)
        for rows in (32, 3)  # of at most 16 sequences, as many positions of each as are needed
        for rule in ("rejection", "coupled")
    ]
    assert (table["largest_relative_difference"] < 1e-4).all()
    for name in ("replay_s", "plain_s", "plain_over_replay", "plain_with_overlap_over_replay"):
        assert (table[f"{name}_min"] > 0).all()
        assert (table[f"{name}_min"] <= table[name]).all()
        assert (table[name] <= table[f"{name}_max"]).all()
    row = table.iloc[0]
    shown = [f"{row[f'plain_over_replay{end}']:.2f}" for end in ("", "_min", "_max")]
    assert "{} ({} to {})".format(*shown) in text
    assert "no GPU is measured" in text


@pytest.mark.parametrize("takes_logits", [False, True])
def test_vllm_gets_what_its_version_takes(takes_logits, monkeypatch):
    """Up to 0.9 probabilities, from 0.17 on logits, whose softmax it takes itself."""
    seen = []

    def of_probs(tokens, counts, most, ends, draft_probs, target_probs, bonus, metadata):
        seen.append(target_probs)

    def of_logits(tokens, counts, most, ends, draft_probs, target_logits, bonus, metadata, synthetic_mode=False):
        seen.append(target_logits.softmax(-1))

    module = ModuleType("vllm.v1.sample.rejection_sampler")
    module.rejection_sample = of_logits if takes_logits else of_probs
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for parent in ("vllm", "vllm.v1", "vllm.v1.sample"):
        monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    case = kernel_benchmark.Case.of(3, 2, 40, 0.7, torch.device("cpu"))
    kernel_benchmark._vllm(case)()
    expected = torch.softmax(case.target[:, :2].float() / 0.7, -1).reshape(6, 40)
    torch.testing.assert_close(seen[0], expected)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        pytest.param(
            [], "expected a CUDA device, found none", marks=pytest.mark.skipif(HAS_GPU, reason="there is one")
        ),
        (["study.device=tpu"], "expected study.device=cuda, or cpu where study.interpret may be true, got 'tpu'"),
        (["study.interpret=true"], "got 'cuda' with interpret=True"),
        (["study.device=cpu", "sampling.temperature=0"], r"sampling.temperature: expected a number > 0"),
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


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("study.num_rows=[8,0]", r"study.num_rows: expected integers >= 1, got \[8, 0\]"),
        ("study.num_rows=[]", r"study.num_rows: expected integers >= 1, got \[\]"),
        ("study.repetitions=0", r"study.repetitions: expected integers >= 1, got \[0\]"),
        ("study.vocab_sizes=[]", r"study.vocab_sizes: expected integers >= 1, got \[\]"),
        ("study.vocab_sizes=[300,-1]", r"study.vocab_sizes: expected integers >= 1, got \[300, -1\]"),
        ("study.batch_sizes=[0]", r"study.batch_sizes: expected integers >= 1, got \[0\]"),
    ],
)
def test_sizes_that_there_are_not_are_refused(setting, named, tmp_path):
    with pytest.raises(UsageError, match=named):
        config.plan(["experiment=kernel_benchmark", *FEW, "study.device=cpu", setting, f"folder={tmp_path}"]).run()
