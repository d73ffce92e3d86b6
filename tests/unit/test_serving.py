"""Serving logs: what was simulated and printed as the engines print it comes back, under their own definitions.

The lines are written here, in the forms of the engines' sources (named in `spectoolkit/serving/vllm.py` and so on).
"""

import gzip
import hashlib
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from spectoolkit import metrics
from spectoolkit.errors import UsageError
from spectoolkit.report import tables
from spectoolkit.serving import command, definitions, llamacpp, sglang, vllm
from spectoolkit.serving import study as serving_study
from spectoolkit.serving.counts import pooled, recover_drafts
from spectoolkit.studies import accounting
from tests.helpers.fake_rows import cells, simulate

K = 4


def drafts_of(seed, num_drafts, acceptance=0.7, full=True):
    """Drafted and accepted tokens of some drafts."""
    generator = np.random.default_rng(seed)
    drafted = np.full(num_drafts, K) if full else generator.integers(1, K + 1, num_drafts)
    return [(int(d), int(min(d, generator.geometric(1 - acceptance) - 1))) for d in drafted]


def sums(drafts):
    """Number of drafts, drafted, accepted, and accepted at each position."""
    at = [sum(accepted > i for _, accepted in drafts) for i in range(K)]
    return len(drafts), sum(d for d, _ in drafts), sum(a for _, a in drafts), at


def v1_line(drafts, bonus=1, form="now", second=0):
    n, drafted, accepted, at = sums(drafts)
    head = f"(APIServer pid=7) INFO 03-01 10:00:{second:02d} [metrics.py:120] SpecDecoding metrics: "
    rate = f"{100 * accepted / drafted:.1f}%" if drafted else "nan%"
    if form == "first":
        return f"{head}Draft acceptance rate: {rate}, Accepted: {accepted} tokens, Drafted: {drafted} tokens\n"
    mean, rates = f"{bonus + accepted / n:.2f}", ", ".join(f"{m / n:.3f}" for m in at)
    counts = f"Accepted: {accepted} tokens, Drafted: {drafted} tokens, Per-position acceptance rate: {rates}"
    if form == "second":
        return f"{head}Draft acceptance rate: {rate}, Mean acceptance length: {mean}, {counts}\n"
    speed = "Accepted throughput: 12.34 tokens/s, Drafted throughput: 45.60 tokens/s"
    return f"{head}Mean acceptance length: {mean}, {speed}, {counts}, Avg Draft acceptance rate: {rate}\n"


def v0_line(accepted, drafted, emitted, k=K):
    return (
        f"INFO 02-11 14:50:38 metrics.py:477] Speculative metrics: Draft acceptance rate: {accepted / drafted:.3f}, "
        f"System efficiency: {emitted / (drafted / k * (k + 1)):.3f}, Number of speculative tokens: {k}, Number of "
        f"accepted tokens: {accepted}, Number of draft tokens: {drafted}, Number of emitted tokens: {emitted}.\n"
    )


def counters(drafts, engine="0", prefix="vllm"):
    n, drafted, accepted, at = sums(drafts)
    labels = f'engine="{engine}",model_name="a, \\"b\\" {{c}}"'
    shown = ["# HELP some words", "# TYPE a counter"]
    for name, value in (("num_drafts", n), ("num_draft_tokens", drafted), ("num_accepted_tokens", accepted)):
        shown.append(f"{prefix}:spec_decode_{name}_total{{{labels}}} {value:.1f}")
        shown.append(f"{prefix}:spec_decode_{name}_created{{{labels}}} 1.7e+09")
    for i, value in enumerate(at):
        shown.append(f'{prefix}:spec_decode_num_accepted_tokens_per_pos_total{{{labels},position="{i}"}} {value:.1f}')
    return "\n".join(shown) + "\n"


def values(served):
    return {figure.definition.key: figure.value for figure in pooled(served)}


def expected(drafts, bonus=1):
    n, drafted, accepted, at = sums(drafts)
    found = {"length": bonus + accepted / n, "rate": accepted / drafted}
    return found | {f"position_{i}": m / n for i, m in enumerate(at, 1)}


OTHER = [
    "INFO 03-01 10:00:00 [loggers.py:310] Engine 000: Avg prompt throughput: 93.9 tokens/s, Accepted: nothing\n",
    'INFO:     127.0.0.1:56326 - "POST /v1/chat/completions HTTP/1.1" 200 OK\n',
    "\n",
]


@pytest.mark.parametrize(("bonus", "form"), [(1, "now"), (1, "second"), (0, "second")])
@pytest.mark.parametrize("full", [True, False])
def test_vllm_intervals_are_pooled_by_counts_that_the_rounded_figures_give_back(bonus, form, full):
    """Fails when intervals are averaged, drafts are guessed, or a release without the bonus is read as one with it."""
    intervals = [drafts_of(seed, n, full=full) for seed, n in enumerate((37, 3, 120, 61))]
    served = vllm.read([*OTHER, *(v1_line(d, bonus, form) for d in intervals), *OTHER])
    everything = [draft for d in intervals for draft in d]
    figures = {figure.definition.key: figure for figure in pooled(served)}
    for key, value in expected(everything, bonus).items():
        assert figures[key].low - 1e-12 <= value <= figures[key].high + 1e-12
        if full:
            assert figures[key].value == pytest.approx(value, abs=1e-3)
    assert figures["rate"].obtained == "counts"
    assert figures["rate"].value == expected(everything)["rate"]
    assert served.num_draft_tokens == K
    own = "included" if bonus else "left out"
    assert f"the target's own token {own}" in figures["length"].definition.words


def test_few_drafts_are_recovered_exactly_and_many_up_to_what_rounding_leaves():
    n, drafted, accepted, at = sums(drafts_of(3, 37))
    drafts, ratios = recover_drafts(accepted, drafted, round(accepted / n, 2), [round(m / n, 3) for m in at], K)
    assert (drafts.low, drafts.value, drafts.high) == (n, n, n)
    assert [ratio.numerator.value for ratio in ratios] == at

    n, drafted, accepted, at = sums(drafts_of(4, 50_000, full=False))
    drafts, ratios = recover_drafts(accepted, drafted, round(accepted / n, 2), [round(m / n, 3) for m in at], K)
    assert drafts.low <= n <= drafts.high
    assert 0 < drafts.high - drafts.low < 0.02 * n
    assert not ratios[0].numerator.is_exact
    with pytest.raises(UsageError, match="expected figures that fit together, got 10 accepted of 20 draft tokens"):
        recover_drafts(10, 20, 3.0, [0.9, 0.1], 2)


def test_as_many_drafts_as_no_memory_holds_are_bounded():
    """Fails when every possible number of drafts is tried, or when the sums are not looked at."""
    drafts, ratios = recover_drafts(2 * 10**14, 4 * 10**14, 2.0, [0.9, 0.6, 0.4, 0.1], 4)
    assert drafts.value == 10**14
    assert 0 < drafts.high - drafts.low < 0.01 * drafts.value
    assert ratios[0].numerator.value == pytest.approx(0.9e14)
    assert recover_drafts(0, 10**14, 0.0, [0.0], None)[0].high == 10**14
    for accepted, mean, rates in ((2 * 10**14, 2.0, [0.9, 0.6, 0.4, 0.3]), (10**14, 1.5, [1.5]), (0, 1.0, [0.0])):
        with pytest.raises(UsageError, match="expected figures that fit together"):
            recover_drafts(accepted, 4 * 10**14, mean, rates, None)


def spoilt(line, old, new):
    assert old in line
    return line.replace(old, new)


IMPOSSIBLE = [
    (vllm, v1_line([(4, 2)] * 100, form="first").replace("Accepted: 200", "Accepted: 9122"), "got 9122 accepted .*400"),
    (vllm, v1_line([(4, 2)] * 100).replace("Accepted: 200", "Accepted: 9122"), "got 9122 accepted tokens, 400 drafted"),
    (vllm, v1_line([(4, 2)] * 100).replace("Accepted: 200", "Accepted: " + "9" * 5000), "at most 15 digits"),
    (vllm, v1_line([(4, 2)] * 100).replace("Accepted: 200", "Accepted: 123"), "fit together, got 123 accepted of 400"),
    (vllm, v1_line([(4, 1)] * 9).replace("1.000, 0.000", "1.900, 0.000").replace("h: 2.00", "h: 2.90")
     .replace("Accepted: 9 ", "Accepted: 17 "), "fit together"),
    (vllm, v0_line(90, 80, 50), "got 90 accepted tokens, 80 draft tokens"),
    (vllm, v0_line(40, 80, 101), "emitted tokens times K"),
    (vllm, v0_line(40, 80, 50).replace("speculative tokens: 4", "speculative tokens: 0"), "at least 1, got 0"),
    (sglang, "{'completion_tokens': " + "9" * 400 + ", 'spec_verify_ct': 2}\n", "at most 15 digits"),
    (sglang, 'sglang:spec_accept_length{tp_rank="0"} NaN\n', "between 0 and 1e\\+15, got NaN"),
    (llamacpp, "draft acceptance rate = 0.5 (   91 accepted /    40 generated)\n", "got 91 .*, 40 generated"),
    (llamacpp, "draft acceptance = 0.5 (1 accepted / 4 generated), mean len = 1.50\nacc per pos = (0.5.1)\n", "0.5.1"),
    (llamacpp, "n_drafted = 40\nn_accept = 91\naccept    = 50.000%\n", "got 91 n_accept, 40 n_drafted"),
]  # fmt: skip


@pytest.mark.parametrize(("reader", "shown", "message"), IMPOSSIBLE)
def test_impossible_figures_are_refused_by_their_line(reader, shown, message):
    """Fails when a rate above 1 is reported as counted, or a damaged number ends in a traceback."""
    lines = [*OTHER, *shown.splitlines(keepends=True)]
    with pytest.raises(UsageError, match=rf"log, line [456]: expected .*{message}"):
        reader.read(lines)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("_drafts_total{L} 50.0", "_drafts_total{L} abc", "line 3: expected a value between 0 and .*, got abc"),
        ("_drafts_total{L} 50.0", "_drafts_total{L} +Inf", "got [+]Inf"),
        ("_drafts_total{L} 50.0", "_drafts_total{L} NaN", "got NaN"),
        ("_drafts_total{L} 50.0", "_drafts_total{L} -50.0", "got -50"),
        (',position="1"', ',position="x"', "line 10: expected a label position of 0 to 1023, got 'x'"),
        (',position="1"', ',position="-1"', "got '-1'"),
        (',position="1"', ',position="1024"', "got '1024'"),
        (',position="1"', ',position="99999999"', "got '99999999'"),
        (',position="1"', "", "got none"),
        ("_draft_tokens_total{L} 200.0", "_draft_tokens_total{L} 20.0", "up to line 12: .*accepted tokens, 20 draft"),
        ("_drafts_total{L} 50.0", "_drafts_total{L} 5.0", "accepted at a position, 5 drafts"),
    ],
)
@pytest.mark.parametrize("prefix", ["vllm", "llamacpp"])
def test_damaged_counters_are_refused_by_their_line(prefix, old, new, message):
    labels = 'engine="0",model_name="a, \\"b\\" {c}"'
    whole = counters(drafts_of(0, 50), prefix=prefix)
    damaged = spoilt(whole, old.replace("L", labels), new.replace("L", labels)).splitlines(keepends=True)
    reader = {"vllm": vllm, "llamacpp": llamacpp}[prefix]
    with pytest.raises(UsageError, match=f"log, .*{message}"):
        reader.read(damaged)
    if "between 0" in message:
        with pytest.raises(UsageError, match=f"before, .*{message}"):
            reader.read(whole.splitlines(keepends=True), damaged)


def test_an_interval_without_an_accepted_token_counts():
    none, some = [(K, 0)] * 5, [(K, 2)] * 5
    assert values(vllm.read([v1_line(none), v1_line(some)]))["length"] == 2.0


def test_first_release_has_a_rate_alone_and_idle_intervals_are_nothing():
    drafts = drafts_of(0, 40)
    served = vllm.read([v1_line([], form="first"), v1_line(drafts, form="first")])
    assert values(served) == {"rate": expected(drafts)["rate"]}
    assert "a length does not follow" in served.notes[0]


@pytest.mark.parametrize("form", ["now", "second", "first"])
def test_a_log_that_breaks_off_anywhere_gives_what_the_whole_lines_say(form):
    """Fails as soon as a number that lacks its last digits, or a list that lacks its last rates, is read."""
    whole, last = v1_line(drafts_of(0, 40), form=form), v1_line(drafts_of(1, 40), form=form)
    alone, both = values(vllm.read([whole])), values(vllm.read([whole, last]))
    for end in range(len(last)):
        assert values(vllm.read([whole, last[:end]])) in (alone, both)


def test_releases_and_kinds_are_not_mixed():
    drafts = drafts_of(0, 40)
    with pytest.raises(UsageError, match="expected lines of one release"):
        vllm.read([v1_line(drafts, 1, "second"), v1_line(drafts, 0, "second")])
    with pytest.raises(UsageError, match="expected lines of one kind"):
        vllm.read([v1_line(drafts), v0_line(10, 40, 20)])


def test_vllm_v0_counts_since_the_start_and_judges_every_draft_alone():
    """Fails when the lines are added up, or a restart is taken for a negative interval."""
    served = vllm.read([v0_line(44, 80, 32), v0_line(60, 120, 50), v0_line(10, 40, 15), v0_line(15, 60, 30)])
    drafted, accepted, emitted = 120 + 60, 60 + 15, 50 + 30
    found = values(served)
    assert found["rate_unmasked"] == accepted / drafted
    assert found["length"] == emitted / (drafted / K)
    assert found["efficiency"] == emitted / (drafted / K * (K + 1))
    assert len(served.readings) == 4


def test_counters_add_up_over_engines_and_restarts():
    """Fails when engines share a series, positions a process, or when a restart is missed."""
    early, late, again, other = (drafts_of(seed, n) for seed, n in enumerate((30, 50, 20, 25)))
    one = counters(early) + counters(other, "1")
    two = counters(early + late) + counters(other, "1")
    three = counters(again) + counters(other + early, "1")  # the first engine was started again
    served = vllm.read((one + two + three).splitlines(keepends=True))
    assert values(served) == expected(early + late + again + other + early)
    assert (len(served.readings), served.unit, served.num_draft_tokens) == (3, "scrapes", K)
    assert {figure.obtained for figure in pooled(served)} == {"counts"}

    since = vllm.read(two.splitlines(keepends=True), one.splitlines(keepends=True))
    assert values(since) == expected(late)
    whole = counters(early).splitlines(keepends=True)
    whole[-1] = whole[-1].rstrip("\n")
    assert "position_4" not in values(vllm.read(whole))  # its last digits may be missing


def test_a_restart_sets_back_every_counter_of_its_process():
    """Fails when a counter that has overtaken its old value meanwhile is taken to have gone on."""
    early, again = [(K, K)] * 2 + [(K, 0)] * 48, [(K, K)] * 5
    served = vllm.read((counters(early) + counters(again)).splitlines(keepends=True))
    assert values(served) == expected(early + again)


def test_counters_of_v0_know_no_drafts():
    shown = 'vllm:spec_decode_num_accepted_tokens_total{model_name="m"} 44.0\n'
    shown += 'vllm:spec_decode_num_draft_tokens_total{model_name="m"} 80.0\n'
    shown += 'vllm:spec_decode_num_emitted_tokens_total{model_name="m"} 12.0\n'
    served = vllm.read(shown.splitlines(keepends=True))
    assert values(served) == {"rate_unmasked": 0.55}


def sglang_line(requests, length, rate=None, second=0):
    shown = "" if rate is None else f"accept rate: {rate:.2f}, "
    return (
        f"[2026-03-01 10:00:{second:02d} TP0] Decode batch. #running-req: {requests}, #token: 35, "
        f"token usage: 0.01, accept len: {length:.2f}, {shown}cuda graph: True, gen "
        "throughput (token/s): 52.20, #queue-req: 0\n"
    )


def test_sglang_lines_are_weighted_by_their_requests_and_say_what_rounding_leaves():
    served = sglang.read(
        [sglang_line(1, 2.0), "[2026-03-01 10:00:00] Prefill batch. #new-seq: 1\n", sglang_line(3, 3.0)]
    )
    (length,) = pooled(served)
    assert length.value == pytest.approx((2.0 + 3 * 3.0) / 4)
    assert (length.low, length.high) == pytest.approx((length.value - 0.005, length.value + 0.005))
    assert length.obtained == "rounded ratios"


@pytest.mark.parametrize(
    ("rate", "ours"),
    [
        (lambda length: length / 4, "system efficiency, nominal"),
        (lambda length: (length - 1) / 3, "rate of K slots, before the cut"),
        (lambda length: 0.5, "rate of K slots or system efficiency"),
    ],
)
@pytest.mark.parametrize("logs_arguments", [True, False])
def test_which_accept_rate_a_release_of_sglang_prints_follows_from_the_length(rate, ours, logs_arguments):
    """Fails when the first releases' rate, which counts the target's own token, is taken for one of drafts."""
    lengths = (1.3, 1.9, 2.4, 3.1)
    lines = [sglang_line(2, length, rate(length)) for length in lengths]
    start = "server_args=ServerArgs(speculative_eagle_topk=1, speculative_num_draft_tokens=4, x=1)\n"
    served = sglang.read([start, *lines] if logs_arguments else lines)
    figure = pooled(served)[1]
    assert figure.definition.ours == ours
    assert served.num_draft_tokens == (3 if logs_arguments else None)
    row = pd.Series(
        {"acceptance_length_nominal": 2.0, "steps": 10, "proposing_steps": 10, "drafted": 30, "num_draft_tokens": 3}
    )
    predicted = {"system efficiency, nominal": 0.5, "rate of K slots, before the cut": 1 / 3}
    assert figure.definition.predicted(row) == pytest.approx(predicted.get(ours, math.nan), nan_ok=True)


def test_sglang_requests_are_counted():
    finish = (
        "[2026-03-01 10:00:16] Finish: obj=X, out={{'meta_info': {{'completion_tokens': {}, 'spec_verify_ct': {}}}}}\n"
    )
    served = sglang.read([finish.format(60, 20), finish.format(10, 10), finish.format(1, 0)])
    assert values(served) == {"request_length": 70 / 30, "request_mean": 2.0}
    assert served.unit == "requests"
    both = sglang.read([sglang_line(1, 2.5), finish.format(60, 20)])
    assert values(both) == {"length": 2.5, "request_length": 3.0, "request_mean": 3.0}
    assert both.unit == "log intervals and requests"


def test_sglang_gauges_are_named_as_what_they_are():
    shown = 'sglang:spec_accept_length{tp_rank="0"} 2.5\nsglang:spec_accept_rate{tp_rank="0"} 0.5\n'
    assert "or system efficiency" in pooled(sglang.read(shown.splitlines(keepends=True)))[1].definition.ours
    shown += shown.replace("2.5", "1.9").replace("0.5", "0.3")
    length, rate = pooled(sglang.read(shown.splitlines(keepends=True)))
    assert (length.value, rate.value, length.obtained) == (pytest.approx(2.2), 0.4, "gauge")
    assert rate.definition.ours == "rate of K slots, before the cut"
    with pytest.raises(UsageError, match="gauges, not counters"):
        sglang.read([], [])


def llama_line(drafts, form, task=0):
    n, drafted, accepted, at = sums(drafts)
    rates = ", ".join(f"{m / n:.3f}" for m in at)
    head = f"0.0{task % 10}.896.015 I slot print_timing: id  1 | task {task} | "
    counts = f"({accepted:5d} accepted / {drafted:5d} generated)"
    stats = (
        f"0.06.896.057 I statistics draft: #gen tokens = {drafted}, #acc tokens = {accepted}, #mean acc len = 9.99\n"
    )
    if form == "old":
        return [head + "\n", f"draft acceptance rate = {accepted / drafted:.5f} {counts}\n", stats]
    mean = f"{1 + accepted / n:5.2f}"
    if form == "one line":
        tail = f", mean acceptance length = {mean}, acceptance rate per position = ({rates})\n"
        return [f"{head}draft acceptance = {accepted / drafted:.5f} {counts}{tail}", stats]
    trace = [f"{head}     acc per pos = ({rates})\n"] if form == "trace" else []
    return [f"{head}draft acceptance = {accepted / drafted:.5f} {counts}, mean len = {mean}\n", *trace, stats]


@pytest.mark.parametrize("form", ["old", "one line", "trace", "no trace"])
def test_llama_server_requests_are_pooled(form):
    """Fails when the cumulative statistics are counted as well, or requests are averaged."""
    requests = [drafts_of(seed, n, full=False) for seed, n in enumerate((87, 9, 40))]
    lines = [line for i, request in enumerate(requests) for line in llama_line(request, form, i)]
    served = llamacpp.read(lines)
    whole = expected([draft for request in requests for draft in request])
    figures = {figure.definition.key: figure for figure in pooled(served)}
    assert figures["rate"].value == whole["rate"]
    assert figures.keys() == {
        "old": {"rate"}, "no trace": {"rate", "length"}, "one line": whole.keys(), "trace": whole.keys()
    }[form]  # fmt: skip
    for key, figure in figures.items():
        assert figure.low - 1e-12 <= whole[key] <= figure.high + 1e-12
    assert bool(served.notes) == (form == "old")


def test_the_examples_of_llama_say_how_many_forwards_they_ran():
    run = "\nn_draft   = 4\nn_predict = {}\nn_drafted = {}\nn_accept  = {}\naccept    = 50.000%\n"
    lines = (run.format(100, 120, 60) + run.format(30, 40, 10)).splitlines(keepends=True)
    served = llamacpp.read(lines)
    assert values(served) == {"length_all": 130 / (130 - 70), "rate": 70 / 160}
    assert values(llamacpp.read([*lines[:6], *lines[7:9]])) == {"length_all": 100 / 40, "rate": 0.5}


def test_llama_counters_and_what_it_cannot_count():
    drafts = drafts_of(0, 50)
    served = llamacpp.read(counters(drafts, prefix="llamacpp").splitlines(keepends=True))
    assert values(served) == expected(drafts)
    warning = "common_context_can_seq_rm: the target context does not support partial sequence removal\n"
    assert "too high" in llamacpp.read([warning, *llama_line(drafts, "old")]).notes[0]


def test_intervals_need_readings_and_are_those_of_the_bootstrap():
    intervals = [drafts_of(seed, 40) for seed in range(12)]
    lines = [v1_line(drafts, second=i) for i, drafts in enumerate(intervals)]
    assert math.isnan(pooled(vllm.read(lines[:9]))[0].interval.low)
    length = pooled(vllm.read(lines))[0]
    found = [sums(drafts) for drafts in intervals]
    _, expected_interval = metrics.ratio_interval(
        [accepted for _, _, accepted, _ in found], [n for n, *_ in found], [str(i) for i in range(12)]
    )
    assert length.interval == pytest.approx([1 + end for end in expected_interval])
    assert length.interval.low < length.value < length.interval.high


def request_rows(drafter, k):
    return simulate({"argmax": 0.6, "coupled": 0.7}[drafter], num_clusters=4, num_draft_tokens=k, proposes=0.8)


def study(folder, engine="live"):
    """A study's table.csv with two cells of one drafter at K = 4 and one at K = 2, and their summaries."""
    rows, summaries = [], []
    for name, k in (("argmax", 4), ("coupled", 4), ("argmax", 2)):
        summary = metrics.summarise(request_rows(name, k))
        if engine == "replay":
            summary |= {"acceptance_length_nominal": math.nan}
        summaries.append(summary | {"num_draft_tokens": k})
        where = {"scope": "overall", "category": None, "drafter": name, "drafter.name": name, "num_draft_tokens": k}
        rows.append(where | {"engine": engine, "lossless": True} | summary)
        rows.append(where | {"scope": "category", "category": "maths", "engine": engine, "lossless": True} | summary)
    folder.mkdir()
    pd.DataFrame(rows).to_csv(folder / "table.csv", index=False)
    return summaries


@pytest.mark.parametrize("engine", ["live", "replay"])
def test_predicted_cells_stand_beside_the_served_figures_by_the_same_definition(tmp_path, engine):
    """Fails when a cell of another K, or a category, is compared, or steps without a proposal are counted as drafts."""
    argmax, _, _ = study(tmp_path / "cells", engine)
    log = tmp_path / "serve.log"
    log.write_text("".join([*OTHER, v1_line(drafts_of(0, 40), second=5), v1_line(drafts_of(1, 60), second=15)]))
    out = tmp_path / "out"
    shown = command.run(["vllm", str(log), f"study={tmp_path / 'cells'}", f"folder={out}"])
    assert "03-01 10:00:05 to 03-01 10:00:15" in shown
    assert hashlib.sha256(log.read_bytes()).hexdigest() in shown
    assert shown.startswith((out / "table.md").read_text())
    assert ("Replayed cells count no draft behind" in shown) == (engine == "replay")
    table = pd.read_csv(out / "table.csv")
    served = table[table["side"] == "served"].set_index("figure")
    predicted = table[table["side"] == "predicted"]
    assert list(predicted["cell drafter"].unique()) == ["argmax", "coupled"]
    assert set(predicted["cell K"]) == {4}
    one = predicted[predicted["cell drafter"] == "argmax"].set_index("figure")["value"]
    steps, drafts = argmax["steps"], argmax["proposing_steps"]
    verified = argmax["accepted"] if engine == "replay" else (argmax["acceptance_length_nominal"] - 1) * steps
    assert drafts < steps
    assert one["length"] == pytest.approx(1 + verified / drafts)
    assert one["rate"] == pytest.approx(verified / argmax["drafted"])
    assert one["position_2"] == pytest.approx(argmax["accepted_at_2"] * steps / drafts)
    gap = predicted[predicted["cell drafter"] == "argmax"].set_index("figure")["difference"]
    assert gap["length"] == pytest.approx(served["value"]["length"] - one["length"])
    assert served["num_lines"].tolist() == [len(OTHER) + 2] * len(served)
    assert set(served["obtained"]) == {"counts"}


def test_a_table_as_it_is_written_today_says_its_k(tmp_path):
    """Fails when the intervals of the rates by position are counted as positions."""
    made = cells((0.7,), ("argmax", "ngram"), ("rejection",), num_clusters=4, tokens=16)
    tables.write(tables.build(made, ["drafter"], num_resamples=20), tmp_path, "made")
    read = serving_study.read(str(tmp_path), 4)
    assert [cell.numbers["num_draft_tokens"] for cell in read] == [4, 4]
    numbers = read[0].numbers
    assert "accepted_at_1_low" in numbers
    assert definitions.slots(numbers) == pytest.approx(definitions.accepted_per_draft(numbers) / 4)


def test_the_predicted_figures_are_ours_where_ours_has_a_column():
    row = {str(k): float(v) for k, v in metrics.summarise(request_rows("argmax", K)).items()} | {"num_draft_tokens": K}
    row["proposing_steps"] = row["steps"]  # then drafts are steps
    assert definitions.length(row) == pytest.approx(row["acceptance_length_nominal"])
    row["acceptance_length_nominal"] = math.nan
    assert definitions.rate(row) == pytest.approx(row["acceptance_rate"])
    assert definitions.slots(row) == pytest.approx(row["acceptance_rate_slots"])
    assert definitions.position(3)(row) == pytest.approx(row["accepted_at_3"])


def test_every_figure_names_a_definition_of_the_accounting_study():
    names = (*accounting.DEFINITIONS.values(), "position i, joint")
    described = [
        *definitions.counted(("a", "b", "c"), 2),
        *vllm._V0_DEFINITIONS,
        *sglang._REQUESTS,
        *sglang._described([(2.5, 0.5)], None, 0.005),
        *sglang._described([], None, 0.005),
        *llamacpp._EXAMPLE_DEFINITIONS,
    ]
    for definition in described:
        assert definition.ours.startswith(names), definition.ours


def test_compressed_and_coloured_logs_are_read(tmp_path):
    drafts = drafts_of(0, 40)
    line = v1_line(drafts).replace("INFO", "\x1b[32mINFO\x1b[0m").replace("Accepted: ", "Accepted: \x1b[1m")
    whole = gzip.compress("".join([line, *OTHER]).encode())
    (tmp_path / "serve.log.gz").write_bytes(whole)
    shown = command.run(["vllm", str(tmp_path / "serve.log.gz")])
    assert "vLLM, log" in shown
    assert "cut off" not in shown
    (tmp_path / "short.gz").write_bytes(whole[:-4])  # still being written
    shown = command.run(["vllm", str(tmp_path / "short.gz"), f"folder={tmp_path}"])
    assert "vLLM, log" in shown
    assert "\n\nshort.gz is cut off: what could be unpacked was read.\n" in (tmp_path / "table.md").read_text()
    (tmp_path / "empty.gz").write_bytes(whole[:12])
    with pytest.raises(UsageError, match=r"nothing was drafted\. empty\.gz is cut off"):
        command.run(["vllm", str(tmp_path / "empty.gz")])
    (tmp_path / "broken.gz").write_bytes(whole[:2] + bytes([9]) + whole[3:])
    with pytest.raises(UsageError, match="expected an intact gzip file"):
        command.run(["vllm", str(tmp_path / "broken.gz")])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tgi", "x"], "expected one of vllm, sglang, llamacpp, got 'tgi'"),
        (["vllm"], "expected a log or a metrics dump, got none"),
        (["vllm", "folder=x"], "expected a log or a metrics dump, got folder=x"),
        (["vllm", "{log}", "fodler=x"], "a key among folder, study, before, got 'fodler=x'"),
        (["vllm", "{log}", "folder="], "expected key=value"),
        (["vllm", "{log}", "folder=a", "folder=b"], "got folder twice"),
        (["vllm", "{missing}"], "expected a readable file"),
        (["vllm", "{other}"], "SpecDecoding metrics: .*or counters vllm:spec_decode_num_draft_tokens"),
        (["sglang", "{other}"], "Decode batch .*accept len"),
        (["llamacpp", "{other}"], "draft acceptance rate = .*n_drafted"),
        (["vllm", "{log}", "study={missing}"], "expected a study's folder with a table.csv"),
        (["vllm", "{log}", "study={bare}"], "`spectoolkit report study=.*bare` makes it .* study=.*bare/report"),
        (["vllm", "{log}", "study={cells}"], "expected cells with K = 4, which was served, got 2"),
        (["vllm", "{log}", "before={log}"], "expected an earlier metrics dump beside a metrics dump"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(arguments, message, tmp_path):
    (tmp_path / "log").write_text(v1_line(drafts_of(0, 40)))
    (tmp_path / "other").write_text("".join(OTHER))
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "manifest.json").write_text("{}")
    study(tmp_path / "cells")
    table = pd.read_csv(tmp_path / "cells" / "table.csv")
    table[table["num_draft_tokens"] == 2].to_csv(tmp_path / "cells" / "table.csv", index=False)
    filled = [
        argument.format(**{n: tmp_path / n for n in ("log", "other", "cells", "bare", "missing")})
        for argument in arguments
    ]
    with pytest.raises(UsageError, match=message):
        command.run(filled)


def test_the_command_line_leads_there(tmp_path):
    (tmp_path / "serve.log").write_text(v1_line(drafts_of(0, 40)))
    call = [sys.executable, "-m", "spectoolkit.cli", "import", "vllm"]
    for name, code, said in (("serve.log", 0, "Acceptance as served"), ("none.log", 2, "expected a readable file")):
        done = subprocess.run([*call, name], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == code
        assert said in (done.stderr if code else done.stdout)
    assert [path.name for path in tmp_path.iterdir()] == ["serve.log"]


@pytest.mark.parametrize("name", ["accounting", "draft_length", "temperature_sweep"])
def test_recorded_studies_can_be_set_beside_a_log(name, tmp_path):
    log = tmp_path / "serve.log"
    log.write_text(v1_line(drafts_of(0, 40)))
    folder = Path(__file__).parents[2] / "experiments" / name
    shown = command.run(["vllm", str(log), f"study={folder}"])
    assert shown.count("argmax") >= 1
    assert "nan" not in shown
