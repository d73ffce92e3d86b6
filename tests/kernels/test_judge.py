"""Where kernels run, that decoding and replay give the same with and without them, and who reports what is wrong."""

import math
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pytest
import torch

from spectoolkit.datatypes import Dense, Proposal, Request, SamplingParams, Uniforms
from spectoolkit.drafters import CoupledDrafter, ModelDrafter, NGramDrafter, NoDrafter, TopMDrafter
from spectoolkit.errors import ContractError, InvalidLogitsError, UsageError
from spectoolkit.kernels import replay_reduction
from spectoolkit.kernels.judge import Judge
from spectoolkit.kernels.switch import SWITCH, reason_for_reference
from spectoolkit.models.tabular import TabularModel, blend_tabular, random_tabular
from spectoolkit.replay import Strategy, replay
from spectoolkit.sampling import SamplingState
from spectoolkit.trajectories import Trajectories
from spectoolkit.verifiers import Block, Coupled, Match, Rejection
from tests.helpers.toys import outcome, requests, run

coupled = pytest.importorskip("spectoolkit.kernels.coupled")
reduce = pytest.importorskip("spectoolkit.kernels.reduce")
fused = pytest.importorskip("spectoolkit.kernels.rejection_and_block")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ON = "auto" if DEVICE == "cuda" else "interpret"
PLAIN = [SamplingParams(temperature=t) for t in (0.8, 0.0, 1.3)]


class Single(TabularModel):
    """The toy with logits in float32, where the kernels run."""

    def score(self, state, tokens):
        logits, new = super().score(state, tokens)
        return logits.float(), new


def pair(vocab_size: int = 6) -> tuple[Single, Single]:
    target = random_tabular(vocab_size=vocab_size, order=2, seed=0)
    draft = blend_tabular(target, weight=0.5, seed=1)
    return Single(target.rows.to(DEVICE)), Single(draft.rows.to(DEVICE))


@pytest.fixture
def calls(monkeypatch) -> Counter:
    """Counts the calls of every kernel, which are on; those of the self-check come before."""
    counted: Counter = Counter()
    monkeypatch.setenv(SWITCH, ON)
    assert not reason_for_reference(torch.zeros(1, device=DEVICE).device)

    def counting(name, function):
        def call(*arguments, **options):
            counted[name] += 1
            return function(*arguments, **options)

        return call

    for module, name in ((fused, "rejection"), (fused, "block"), (coupled, "coupled"), (reduce, "reduce_rows")):
        monkeypatch.setattr(module, name, counting(name, getattr(module, name)))
    return counted


PAIRS = {
    "argmax rejection": (lambda draft: ModelDrafter(draft, 6, constant=0.0), Rejection(), "rejection"),
    "same_temperature rejection": (lambda draft: ModelDrafter(draft, 6, ratio=1.0), Rejection(), "rejection"),
    "temperature block": (lambda draft: ModelDrafter(draft, 6, ratio=0.6), Block(), "block"),
    "ngram block": (lambda draft: NGramDrafter(2, 1), Block(), "block"),
    "none rejection": (lambda draft: NoDrafter(), Rejection(), "rejection"),
    "coupled coupled": (lambda draft: CoupledDrafter(draft, 6, ratio=1.0), Coupled(), "coupled"),
}


@pytest.mark.parametrize("name", PAIRS)
def test_decoding_gives_the_same_tokens_and_steps(name, calls, monkeypatch):
    make, verifier, kernel = PAIRS[name]
    target, draft = pair()
    asked = requests(5, max_new_tokens=7, vocab_size=6, params=PLAIN)
    found = run(target, make(draft), verifier, asked)
    assert set(calls) == {kernel}
    monkeypatch.setenv(SWITCH, "off")
    calls.clear()
    expected = run(target, make(draft), verifier, asked)
    assert not calls
    assert {key: outcome(one) for key, one in found.items()} == {key: outcome(one) for key, one in expected.items()}


class NeverAccepts(Rejection):
    def verify(self, target_probs, proposal, uniforms):
        return super().verify(target_probs, proposal, replace(uniforms, accept=torch.ones_like(uniforms.accept)))


OTHERS = {
    "a filter": (SamplingParams(top_p=0.9), lambda draft: ModelDrafter(draft, 6, ratio=1.0), Rejection()),
    "a penalty": (SamplingParams(repetition_penalty=1.3), lambda draft: ModelDrafter(draft, 6, ratio=1.0), Block()),
    "a bias": (SamplingParams(logit_bias={2: 1.0}), lambda draft: ModelDrafter(draft, 6, ratio=1.0), Rejection()),
    "a law": (SamplingParams(), lambda draft: TopMDrafter(draft, 6, ratio=1.0, keep=2), Rejection()),
    "a rule": (SamplingParams(), lambda draft: ModelDrafter(draft, 6, ratio=1.0), Match()),
    "a rule made from one": (SamplingParams(), lambda draft: ModelDrafter(draft, 6, ratio=1.0), NeverAccepts()),
}


@pytest.mark.parametrize("name", OTHERS)
def test_everything_else_is_the_reference(name, calls):
    params, make, verifier = OTHERS[name]
    target, draft = pair()
    done = run(target, make(draft), verifier, requests(2, 4, 6, params=[params]))
    undrafted = sum(step.drafted == 0 for completion in done.values() for step in completion.steps)
    # A last step has no room for a draft, and so the law of none.
    assert calls.total() <= (undrafted if name == "a law" else 0)


def test_float64_logits_are_the_reference(calls):
    target = random_tabular(vocab_size=6, order=1, seed=0)
    assert run(target, NoDrafter(), Rejection(), requests(2, 4, 6, params=PLAIN))
    assert not calls


def test_who_observes_rows_gets_them_from_the_reference(calls):
    from spectoolkit.decode import decode

    target, draft = pair()
    seen = []
    drafter = ModelDrafter(draft, 6, ratio=1.0)
    options = {"num_draft_tokens": 2, "batch_size": 2, "observe": lambda *step: seen.append(step[1].shape)}
    assert list(decode(target, drafter, Rejection(), requests(2, 4, 6, params=PLAIN), **options))
    assert seen
    assert not calls


class Breaks(Single):
    """A row is NaN once a sequence that began with token 5 has six tokens."""

    def score(self, state, tokens):
        logits, new = super().score(state, tokens)
        ends = (state.lengths[:, None] + torch.arange(tokens.shape[1]) + 1).to(logits.device)
        return logits.masked_fill(((ends == 6) & (new.tokens[:, :1] == 5))[..., None], math.nan), new


def order_0(model: type[Single] = Single) -> Single:
    return model(torch.full((6,), 1 / 6, dtype=torch.float64, device=DEVICE))


@pytest.mark.parametrize(("drafter", "verifier"), [(ModelDrafter, Rejection()), (CoupledDrafter, Coupled())])
def test_nan_is_reported_as_the_reference_reports_it(drafter, verifier, calls, monkeypatch):
    asked = [Request("fine", (3, 4), 7), Request("bad", (5, 4), 7)]
    messages = []
    for switch in (ON, "off"):
        monkeypatch.setenv(SWITCH, switch)
        with pytest.raises(InvalidLogitsError, match="target logits of request 'bad' at position 6 ") as caught:
            run(order_0(Breaks), drafter(order_0(), 6, ratio=1.0), verifier, asked, 2)
        messages.append(str(caught.value))
    assert calls
    assert messages[0] == messages[1]


def test_a_broken_contract_is_reported_as_the_reference_reports_it(calls):
    sampling = SamplingState.of(["r"], [SamplingParams()], [(0,)], [()], 4, DEVICE)
    law = Dense(torch.tensor([[[0.5, 0.5, 0.0, 0.0]]], device=DEVICE))
    proposal = Proposal(torch.tensor([[3]], device=DEVICE), torch.tensor([1], device=DEVICE), law)
    logits, half = torch.zeros(1, 2, 4, device=DEVICE), torch.full((1, 2), 0.5, dtype=torch.float64, device=DEVICE)
    with pytest.raises(ContractError, match="a drafted token of probability 0"):
        Judge(Rejection(), logits.device)(sampling, logits, proposal, Uniforms(half[:, :1], half)).again()
    assert calls == {"rejection": 1}


def strategies(draft) -> list[Strategy]:
    return [
        Strategy(ModelDrafter(draft, 6, ratio=1.0), Block(), 3),
        Strategy(ModelDrafter(draft, 6, constant=0.5), Rejection(), 3),
        Strategy(ModelDrafter(draft, 6, constant=0.0), Rejection(), 3),
        Strategy(ModelDrafter(draft, 6, ratio=1.3), Match(), 2),
        Strategy(CoupledDrafter(draft, 6, ratio=0.8), Coupled(), 3),
        Strategy(TopMDrafter(draft, 6, ratio=1.0, keep=2), Rejection(), 3),
        Strategy(ModelDrafter(draft, 6, ratio=1.0, top_p=0.9), Rejection(), 3),
        Strategy(NGramDrafter(2, 1), Rejection(), 3),
    ]


def outputs_of(target, asked) -> Trajectories:
    done = run(target, NoDrafter(), Rejection(), asked)
    return Trajectories(tuple(asked), tuple(done[r.id].tokens for r in asked), ("length",) * len(asked))


def test_replay_gives_the_same_counts(calls, monkeypatch):
    target, draft = pair()
    outputs = outputs_of(target, requests(4, max_new_tokens=6, vocab_size=6, params=PLAIN))
    calls.clear()
    found = replay(target, strategies(draft), outputs)
    assert set(calls) == {"reduce_rows"}
    monkeypatch.setenv(SWITCH, "off")
    expected = replay(target, strategies(draft), outputs)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one[-1].accepted_at, other[-1].accepted_at, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(one[-1].steps, other[-1].steps, rtol=1e-5, atol=1e-7)


PENALISED = SamplingParams(0.9, repetition_penalty=1.5, presence_penalty=0.4, logit_bias={2: 0.5})
OF_REPLAY = {"plain": PLAIN, "filters": [SamplingParams(0.7, top_p=0.8, min_p=0.05)], "penalties": [PENALISED]}


@pytest.mark.parametrize("name", OF_REPLAY)
def test_the_reference_reduces_the_same_to_the_last_bit_however_many_positions_it_takes_together(name, monkeypatch):
    monkeypatch.setenv(SWITCH, "off")
    target, draft = random_tabular(vocab_size=6, order=2, seed=0), random_tabular(vocab_size=6, order=2, seed=1)
    outputs = outputs_of(target, requests(4, max_new_tokens=6, vocab_size=6, params=OF_REPLAY[name]))
    found = []
    for numbers in (1, 1 << 40, 4 * 6 * 4):
        monkeypatch.setattr(replay_reduction, "_NUM_TOGETHER", numbers)
        found.append(replay(target, strategies(draft), outputs))
    for part in found[1:]:
        for one, other in zip(found[0], part, strict=True):
            assert torch.equal(one[-1].accepted_at, other[-1].accepted_at)
            assert torch.equal(one[-1].steps, other[-1].steps)


def test_a_large_vocabulary_is_reduced_a_few_positions_at_a_time_on_a_cpu():
    threads = torch.get_num_threads()
    shape = (1, 8, 1 << 15)
    assert replay_reduction._num_positions_together(4, torch.empty(shape)) == 2 * threads
    assert replay_reduction._num_positions_together(1 << 20, torch.empty(shape)) == 1
    assert replay_reduction._num_positions_together(4, torch.empty(shape, device="meta")) == 8  # no CPU


@pytest.mark.parametrize("side", ["target", "draft"])
def test_replay_reports_nan_as_the_reference_reports_it(side, calls, monkeypatch):
    target, draft = (order_0(Breaks), order_0()) if side == "target" else (order_0(), order_0(Breaks))
    asked = (Request("fine", (3, 4), 7), Request("bad", (5, 4), 7))
    outputs = Trajectories(asked, ((1, 2, 3, 4, 0, 1, 2),) * 2, ("length",) * 2)
    messages = []
    for switch in (ON, "off"):
        monkeypatch.setenv(SWITCH, switch)
        with pytest.raises(InvalidLogitsError, match=f"{side} logits of request 'bad' at position 6 ") as caught:
            replay(target, [Strategy(ModelDrafter(draft, 6, ratio=1.0), Rejection(), 2)], outputs)
        messages.append(str(caught.value))
    assert calls
    assert messages[0] == messages[1]
    # A row behind the end of an output belongs to no token and may hold anything.
    short = replace(outputs, outputs=((1, 2, 3, 4, 0, 1, 2), (1, 2, 3)))
    monkeypatch.setenv(SWITCH, ON)
    assert replay(target, [Strategy(ModelDrafter(draft, 6, ratio=1.0), Rejection(), 2)], short)


def test_the_switch(monkeypatch):
    device = torch.zeros(1, device=DEVICE).device
    for value, expected in (("off", False), ("interpret", True), ("auto", DEVICE == "cuda")):
        monkeypatch.setenv(SWITCH, value)
        assert (not reason_for_reference(device)) is expected
    monkeypatch.delenv(SWITCH)
    assert (not reason_for_reference(device)) is (DEVICE == "cuda")
    monkeypatch.setenv(SWITCH, "on")
    with pytest.raises(UsageError, match="SPECTOOLKIT_KERNELS: expected auto, off or interpret, got 'on'"):
        reason_for_reference(device)


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_a_switch_that_there_is_not_is_refused_before_the_first_forward(top_p, monkeypatch):
    """Also where no kernel would run: another machine would take it for a word."""
    monkeypatch.setenv(SWITCH, "on")
    target = order_0()
    asked = (Request("r", (3, 4), 7, SamplingParams(top_p=top_p)),)
    outputs = Trajectories(asked, ((1, 2),), ("length",))
    target.prefill = None  # nothing may be asked of it
    with pytest.raises(UsageError, match="SPECTOOLKIT_KERNELS"):
        run(target, ModelDrafter(target, 6, ratio=1.0), Rejection(), asked)
    with pytest.raises(UsageError, match="SPECTOOLKIT_KERNELS"):
        replay(target, [Strategy(ModelDrafter(target, 6, ratio=1.0), Rejection(), 2)], outputs)


def test_triton_is_imported_only_when_a_kernel_is_needed():
    """By this package: parts of torch that transformers uses import it wherever it is installed."""
    code = (
        "import sys, spectoolkit.decode, spectoolkit.replay, spectoolkit.kernels.launch\n"
        "raise SystemExit('triton' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
