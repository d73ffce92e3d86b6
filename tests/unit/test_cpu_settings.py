"""The study of settings on a CPU: what it refuses, what it compares, and that its caches do the same work."""

from contextlib import nullcontext
from types import SimpleNamespace

import pandas as pd
import pytest
import torch

from spectoolkit import config
from spectoolkit.errors import UsageError
from spectoolkit.studies import cache_on_cpu, cpu_settings
from tests.helpers.tiny_models import tiny_model
from tests.helpers.toys import toy_pair

TINY = ["experiment=cpu_settings", "target=random", "draft_model=random", "num_draft_tokens=2"]
NUM_STEPS, NUM_QUERIES = 3, 4


@pytest.fixture
def two_cores(monkeypatch):
    monkeypatch.setattr(cpu_settings, "num_cores", lambda: 2)


def cases(context=11):
    target = tiny_model()
    return target, cache_on_cpu.cases_of(target, [context], 5, NUM_QUERIES, NUM_STEPS)


def test_it_runs_and_the_default_is_one_times_itself(tmp_path, two_cores, monkeypatch):
    said = []  # two threads that share a core with another process take seconds
    monkeypatch.setattr(cpu_settings, "num_threads", lambda number: (said.append(number), nullcontext())[1])
    few = ["prompts.limit=2", "max_new_tokens=4", "grid.batch_size=[1,2]", "study.repetitions=2", "study.threads=[1,2]"]
    few += ["study.num_requests=1", "study.contexts=[8]", "study.cache_steps=1", f"folder={tmp_path}"]
    text = config.plan([*TINY, *few]).run()
    assert said == [1, 2] * 4 * 3  # of every cell, in two repetitions and one before them
    table = pd.read_csv(tmp_path / "table.csv")
    found = table[["dtype", "batch_size", "threads"]].apply(tuple, axis=1).tolist()
    assert found == [(dtype, size, n) for dtype in ("bfloat16", "float32") for size in (1, 2) for n in (1, 2)]
    assert table["requests"].tolist() == table["batch_size"].tolist()
    is_default = (table["dtype"] == "bfloat16") & (table["threads"] == 1)
    for rate in cpu_settings.RATES:
        over, low, high = (table[f"{rate}_over_default{end}"] for end in ("", "_min", "_max"))
        assert ((over == 1) == is_default).all()
        assert ((low <= over) & (over <= high)).all()
        assert (low < high).sum() == (~is_default).sum()
    caches = pd.read_csv(tmp_path / "cache.csv")
    assert caches["lengths"].tolist() == ["equal"] * 3 + ["from half to all"] * 2
    assert ((caches["over_in_place"] == 1) == (caches["cache"] == "in place")).all()
    assert (caches["batch_size"] == 2).all()
    assert "Medians of 2 repetitions" in text
    assert "bfloat16, 1 thread (torch's own number)" in text
    assert (tmp_path / "manifest.json").exists()


@pytest.mark.parametrize(("num_requests", "expected"), [(1, [1, 2]), (3, [3, 3])])
def test_a_run_has_so_many_requests_and_never_less_than_a_batch(num_requests, expected):
    cells = config.plan([*TINY, "prompts.limit=4", "grid.batch_size=[1,2]", "grid.target.dtype=[float32]"]).cells
    settings = cpu_settings.settings_of(cells, [1], num_requests)
    assert [len(setting.experiment.requests) for setting in settings] == expected


def test_all_caches_give_the_same_logits_at_every_step():
    """In float64: rows that were padded, masked or cut wrongly would differ by far more."""
    _, found = cases()
    logits = {}
    for case in found:
        with case.passes.attention():
            steps = []
            for _ in range(NUM_STEPS):
                steps.append(case.passes.step(case.tokens))
                case.passes.cut(NUM_QUERIES - cache_on_cpu.NUM_KEPT)
        logits.setdefault(case.settings["lengths"], []).append(torch.stack(steps))
    assert [len(of_one) for of_one in logits.values()] == [3, 2]
    for in_place, *others in logits.values():
        assert (in_place[0] - in_place[1]).abs().max() > 0.1  # the cache has a say
        for other in others:
            torch.testing.assert_close(other, in_place, rtol=1e-9, atol=1e-9)


def test_after_steps_were_timed_a_cache_is_as_before_and_so_is_the_model():
    target, found = cases()
    for case in found:
        firsts = []
        for _ in range(2):
            with case.passes.attention():
                firsts.append(case.passes.step(case.tokens))
            case.passes.cut(NUM_QUERIES)
            assert cache_on_cpu.step_s(case, NUM_STEPS) > 0
        torch.testing.assert_close(*firsts, rtol=0, atol=0)
        assert target.hf_model.config._attn_implementation == "spectoolkit_ragged"


def test_rows_of_a_batch_differ_in_length_where_the_table_says_so(monkeypatch):
    seen = []
    target = tiny_model()
    monkeypatch.setattr(
        target, "prefill", lambda p, prefill=target.prefill: (seen.append([len(row) for row in p]), prefill(p))[1]
    )
    cache_on_cpu.cases_of(target, [8], 5, NUM_QUERIES, NUM_STEPS)
    assert seen == [[8, 8, 8, 8, 8], [4, 5, 6, 7, 8]]


def test_a_context_without_room_for_the_steps_is_refused():
    most = tiny_model().context_length - NUM_STEPS * cache_on_cpu.NUM_KEPT - NUM_QUERIES
    cases(most)
    with pytest.raises(UsageError, match=rf"study\.contexts: expected at most {most} tokens.*got {most + 1}"):
        cases(most + 1)


def test_the_loop_runs_with_its_threads_and_torch_has_its_own_again_whatever_happens(monkeypatch):
    seen = []

    def fails(experiment):
        seen.append(torch.get_num_threads())
        raise KeyboardInterrupt

    monkeypatch.setattr(cpu_settings, "completions_of", fails)
    with pytest.raises(KeyboardInterrupt):
        cpu_settings.measured(cpu_settings.Setting("float32", 2, 1, None))
    assert seen == [2]
    assert torch.get_num_threads() == 1


def test_rates_are_of_tokens_and_of_steps(monkeypatch):
    done = [SimpleNamespace(tokens=[0] * 6, steps=[0] * 4), SimpleNamespace(tokens=[0] * 6, steps=[0] * 2)]
    clock = iter([5.0, 7.0])
    monkeypatch.setattr(cpu_settings, "completions_of", lambda experiment: iter(done))
    monkeypatch.setattr(cpu_settings.time, "perf_counter", lambda: next(clock))
    found = cpu_settings.measured(cpu_settings.Setting("float32", 1, 2, None))
    assert found == {"tokens_per_s": 6.0, "steps_per_s": 3.0, "acceptance_length": 2.0}


def test_ratios_are_taken_at_equal_batch_sizes():
    settings = [cpu_settings.Setting(dtype, 2, size, None) for dtype in ("a", "b") for size in (1, 8)]
    found = [{"tokens_per_s": rate, "steps_per_s": 1 / rate} for rate in (2.0, 10.0, 3.0, 5.0)]
    ratios = cpu_settings.with_ratios(settings, found, ("a", 2))
    assert [one["tokens_per_s_over_default"] for one in ratios] == [1.0, 1.0, 1.5, 0.5]
    assert [one["steps_per_s_over_default"] for one in ratios] == pytest.approx([1, 1, 2 / 3, 2])


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["study.threads=[0,1]"], r"study\.threads: expected integers from 1 to 2, the cores .*, got \[0, 1\]"),
        (["study.threads=[1,3]"], r"study\.threads: expected integers from 1 to 2, .*, got \[1, 3\]"),
        (["study.threads=2"], r"threads: expected .*Sequence\[int\] \| None, got 2"),
        (["study.threads=[]"], r"study\.threads: expected integers from 1 to 2, .*, got \[\]"),
        (["study.threads=[2]"], r"study\.threads: expected torch's own number, 1, among them.*got \[2\]"),
        (["study.repetitions=0"], r"study\.repetitions: expected an integer >= 1, got 0"),
        (["study.num_requests=-1"], r"study\.num_requests: expected an integer >= 1, got -1"),
        (["study.cache_steps=0"], r"study\.cache_steps: expected an integer >= 1, got 0"),
        (["study.contexts=[64,1]"], r"study\.contexts: expected integers >= 2, got \[64, 1\]"),
        (["+grid.num_draft_tokens=[2,4]"], "grid: expected axes of cpu_settings among .*, got num_draft_tokens"),
        (["engine=auto"], "expected engine=live"),
        (["worker=1"], "worker: expected null, since cpu_settings cannot be spread over processes, got 1"),
    ],
)
def test_what_it_cannot_measure_is_refused_before_a_model_is_loaded(more, message, two_cores):
    with pytest.raises(UsageError, match=message):
        config.plan(["experiment=cpu_settings", *more])


def test_a_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for device in ("cuda", "auto"):
        with pytest.raises(UsageError, match=f"target.device: expected cpu, .*, got '{device}'"):
            config.plan(["experiment=cpu_settings", f"target.device={device}"])


def test_a_target_of_another_kind_is_refused():
    target, _ = toy_pair()
    with pytest.raises(UsageError, match="expected a target of transformers"):
        cpu_settings.model_of(SimpleNamespace(target=target))


def test_the_cores_are_those_that_this_process_may_use():
    assert cpu_settings.num_cores() >= 1
