"""Faults 24 to 30 and 34 to 36: caches that are rolled back, outputs that end, and what is counted."""

import math

import pandas as pd
import pytest
import torch

from spectoolkit.batch import Batch
from spectoolkit.datatypes import Judged, PointMass, Proposal, Request, SamplingParams, Uniforms
from spectoolkit.drafters import ModelDrafter, NGramDrafter, NoDrafter
from spectoolkit.errors import ContractError
from spectoolkit.functional.acceptance import typical_threshold
from spectoolkit.laps import Laps
from spectoolkit.metrics import COUNTS, summarise, undefined
from spectoolkit.models.layer_skip import skip_layers
from spectoolkit.models.tabular import TabularModel
from spectoolkit.records import request_row
from spectoolkit.studies import engines
from spectoolkit.study import Experiment
from spectoolkit.verifiers import Rejection, Typical
from tests.helpers.fake_rows import row, step
from tests.helpers.one_step import same_row
from tests.helpers.tiny_models import tiny_model
from tests.helpers.toys import VERIFIERS, drafters, pairs, requests, run, toy_pair


def summary(completions, num_draft_tokens):
    rows = [request_row(one, num_draft_tokens, cluster=one.request.id, category="c") for one in completions]
    return summarise(pd.DataFrame(rows))


class Watched(TabularModel):
    """Notes what it is fed and how much each rollback drops, in its only row."""

    def __init__(self, successors):
        super().__init__(torch.eye(len(successors), dtype=torch.float64)[successors])
        self.fed, self.dropped = [], []

    def score(self, state, tokens):
        self.fed.append(tokens[0].tolist())
        return super().score(state, tokens)

    def rollback(self, state, lengths):
        self.dropped.append(int(state.lengths[0] - lengths[0]))
        return super().rollback(state, lengths)


def test_24_a_rollback_drops_what_was_rejected_in_this_step():
    """mlx-lm #1528 and relatives: negative or stale numbers of entries to drop."""
    chain = [1, 2, 3, 4, 5, 0]
    asked = [Request("r", (0,), 20)]
    # One of four drafts is accepted: the draft model goes wrong behind token 1.
    target, draft = Watched(chain), Watched([1, 3, 3, 4, 5, 0])
    (one,) = run(target, ModelDrafter(draft, 6, constant=0.0), Rejection(), asked, 4).values()
    assert (one.steps[0].drafted, one.steps[0].accepted) == (4, 1)
    assert target.fed[0] == [0, 1, 3, 4, 5]
    assert target.dropped[0] == 3
    assert draft.fed[:4] == [[0], [1], [3], [4]]
    assert draft.dropped[0] == 2  # of the drafts 1, 3, 4 that were fed
    # All four are accepted: nothing is dropped, and the draft model has yet to see the last of them.
    target, draft = Watched(chain), Watched(chain)
    (one,) = run(target, ModelDrafter(draft, 6, constant=0.0), Rejection(), asked, 4).values()
    assert [s.accepted for s in one.steps] == [4, 4, 4, 4]
    assert target.dropped == [0, 0, 0, 0]
    assert draft.dropped == [0] * 4
    assert draft.fed[:5] == [[0], [1], [2], [3], [4, 5]]
    toy_target, toy_draft = toy_pair()
    for drafter, verifier in pairs(VERIFIERS):
        done = run(toy_target, drafters(toy_draft, 5)[drafter], VERIFIERS[verifier], requests(3), 4)
        for s in (s for one in done.values() for s in one.steps):
            assert 0 <= s.accepted <= s.verified <= s.drafted <= 4


def test_25_the_end_of_text_inside_accepted_drafts_ends_the_output():
    """vLLM #56101: [d1, d2, EOS, d4, d5] and the bonus were all accepted."""
    target = TabularModel(torch.eye(7, dtype=torch.float64)[[1, 2, 3, 4, 5, 6, 0]], stop_ids=[3])
    asked = [Request("r", (0,), 20, stop_ids=target.tokenizer.stop_ids)]
    (one,) = run(target, ModelDrafter(target, 7, ratio=1.0), Rejection(), asked, 5).values()
    (only,) = one.steps
    assert one.tokens == (1, 2, 3)
    assert one.finish_reason == "stop_id"
    assert (only.drafted, only.verified, only.accepted, only.emitted, only.truncated) == (5, 5, 3, 3, True)
    found = summary([one], 5)
    assert (found["accepted"], found["emitted"], found["truncated"], found["acceptance_length"]) == (3, 3, 1, 3)


def test_26_masks_are_prefixes():
    """vLLM #2658: [[1, 0, 1], [1, 1, 1]] judged alone is 5 of 6, as prefixes it is 4 of 6."""
    model = same_row([0.5, 0.5])
    batch = Batch(model, [Request("a", (0,), 9), Request("b", (0,), 9)], 3, 2)
    proposal = Proposal(torch.zeros(2, 3, dtype=torch.int64), torch.tensor([3, 3]), PointMass())
    accept = torch.tensor([[0.4, 0.6, 0.4], [0.4, 0.4, 0.4]], dtype=torch.float64)
    verdict = Rejection().verify(
        torch.full((2, 4, 2), 0.5, dtype=torch.float64), proposal, Uniforms(accept, torch.full((2, 4), 0.7).double())
    )
    assert verdict.judged_alone.long().tolist() == [[1, 0, 1], [1, 1, 1]]
    batch.commit(proposal, Judged(verdict, None, None, lambda: verdict), keeps_law=True)
    laps = Laps(torch.device("cpu"))
    for _ in range(4):
        laps.mark()
    batch.record_laps(laps)
    for running in batch.rows:
        running.finish_reason = "length"
    found = summary([running.completion() for running in batch.rows], 3)
    assert found["accepted"] == 4
    assert found["acceptance_rate"] == pytest.approx(4 / 6)
    assert found["acceptance_rate_unmasked"] == pytest.approx(5 / 6)
    assert found["emitted"] == 6
    assert found["system_efficiency"] == 6 / 8


def test_27_nothing_drafted_is_undefined_and_neither_one_nor_a_crash():
    (one,) = run(same_row([0.5, 0.5]), NoDrafter(), Rejection(), [Request("r", (0,), 5)], 3).values()
    found = summary([one], 3)
    assert found["acceptance_length"] == 1
    for name in ("acceptance_rate", "acceptance_rate_unmasked", "acceptance_length_proposing"):
        assert math.isnan(found[name])
        assert name in undefined(found)
    for rows in (pd.DataFrame([row([], 3)]), pd.DataFrame([row([step(1, 1)], 3)]).iloc[:0]):
        found = summarise(rows)
        ratios = set(found) - {*COUNTS, "draft_bytes_per_token"}
        assert all(math.isnan(found[name]) for name in ratios)
        assert ratios <= set(undefined(found))


def test_28_steps_without_a_proposal_are_steps():
    """vLLM #24344: only 993 of 1814 steps proposed, and the length was that of these."""
    proposing = [step(5, 4)] * 583 + [step(5, 3)] * 405 + [step(4, 3)] * 5
    found = summarise(pd.DataFrame([row(proposing + [step(0, 0)] * 821, 5)]))
    assert [found[name] for name in ("proposing_steps", "drafted", "accepted", "steps", "emitted")] == [
        993, 4960, 3562, 993 + 821, 5376,
    ]  # fmt: skip
    assert found["acceptance_length_proposing"] == pytest.approx(4.587, abs=5e-4)
    assert found["acceptance_length"] == pytest.approx(2.964, abs=5e-4)
    assert found["acceptance_rate"] == pytest.approx(3562 / 4960)


def test_29_typical_thresholds():
    """The entropy is in nats, equality rejects, and a recovered token follows every prefix (vLLM #8562)."""
    for probs, expected in (
        ([0.6, 0.3, 0.1], 0.09),
        ([1 / 4] * 4, 0.0750),
        ([1 / 100] * 100, 0.0030),
        ([1.0, 0.0], 0.09),
    ):
        for dtype in (torch.float32, torch.float64):
            found = typical_threshold(torch.tensor(probs, dtype=dtype), 0.09, 0.3).item()
            assert found == pytest.approx(expected, abs=1e-7)

    def judged(rows, drafts):
        size = len(drafts)
        proposal = Proposal(torch.tensor([drafts]), torch.tensor([size]), PointMass())
        halves = torch.full((1, size + 1), 0.5, dtype=torch.float64)
        return Typical().verify(torch.tensor([rows], dtype=torch.float64), proposal, Uniforms(halves[:, 1:], halves))

    equal, above = [0.81, 0.1, 0.09], [0.81, 0.0999, 0.0901]
    assert judged([equal] * 2, [2]).num_accepted.tolist() == [0]
    assert judged([above] * 2, [2]).num_accepted.tolist() == [1]
    likely, unlikely = [0.95, 0.05], [0.05, 0.95]
    for third in (likely, unlikely):
        verdict = judged([likely, unlikely, third, likely], [0, 0, 0])
        assert verdict.judged_alone[0, :2].tolist() == [True, False]
        assert verdict.emitted.tolist() == [[0, 1, -1, -1]]


@pytest.mark.parametrize(("num_draft_tokens", "first_position", "length"), [(1, 0.5, 1.5), (8, 1.0, 3.0)])
def test_30_the_first_position_is_accepted_more_often_with_longer_drafts(num_draft_tokens, first_position, length):
    """Easy, easy, hard, repeated: long drafts make every step start at the first easy token. Right, and no fault."""
    target, draft = (TabularModel(torch.eye(3, dtype=torch.float64)[nexts]) for nexts in ([1, 2, 0], [1, 2, 1]))
    (one,) = run(
        target, ModelDrafter(draft, 3, constant=0.0), Rejection(), [Request("r", (0,), 60)], num_draft_tokens
    ).values()
    whole = [s for s in one.steps if s.drafted == num_draft_tokens][:16]
    found = summarise(pd.DataFrame([row(whole, num_draft_tokens)]))
    assert found["accepted_at_1"] == first_position
    assert found["acceptance_length"] == length


def test_34_a_baseline_samples_from_all_tokens(monkeypatch):
    """transformers samples with top_k = 50 unless it is told otherwise."""
    # Plain decoding here: 200 equally probable tokens, of which a cut at 50 would leave the first 50.
    (one,) = run(same_row([1 / 200] * 200), NoDrafter(), Rejection(), [Request("r", (0,), 400)], 1).values()
    assert len(set(one.tokens)) > 100
    # transformers' generation that the loop is compared with.
    target, seen = tiny_model(vocab_size=120), []
    real = target.hf_model.generate
    monkeypatch.setattr(
        target.hf_model, "generate", lambda *args, **options: seen.append(options) or real(*args, **options)
    )
    asked = [Request("r", (3, 4), 4, SamplingParams(temperature=0.7))]
    drafter = ModelDrafter(skip_layers(target, [1]), 120, ratio=1.0)
    names = {"r": "r"}
    pair = Experiment(target, drafter, Rejection(), asked, names, names, num_draft_tokens=2, batch_size=1)
    engines.assisted_generation(pair, asked, fixed_length=True).run()
    assert [seen[0].get(name) for name in ("do_sample", "top_k", "top_p")] == [True, 0, 1.0]  # the others draft


def test_35_rates_are_those_of_their_own_run_and_of_all_its_steps():
    """A rate summed over an engine's life, and a lookup whose steps without a proposal were left out."""
    target, draft = toy_pair()
    drafter, first, second = ModelDrafter(draft, 5, ratio=1.0), requests(4), requests(9, max_new_tokens=20)[4:]
    run(target, drafter, Rejection(), first)
    after = summary(run(target, drafter, Rejection(), second).values(), 3)
    fresh = summary(run(target, ModelDrafter(draft, 5, ratio=1.0), Rejection(), second).values(), 3)
    names = [name for name in fresh if name not in ("tokens_per_second", *undefined(fresh))]
    assert [after[name] for name in names] == [fresh[name] for name in names]

    # A lookup that has a proposal in one step of 400: 2.99 tokens where it has, about 1.00 in truth.
    steps = [step(2, 2)] * 99 + [step(2, 1)] + [step(0, 0)] * 39_900
    found = summarise(pd.DataFrame([row(steps, 3)]))
    assert found["acceptance_length_proposing"] == pytest.approx(2.99)
    assert found["acceptance_length"] == pytest.approx(1.005, abs=5e-4)
    # The same of a real lookup: a text that repeats nothing but its first token, once.
    chain = TabularModel(torch.eye(60, dtype=torch.float64)[[*range(1, 60), 0]])
    (one,) = run(chain, NGramDrafter(1, 1), Rejection(), [Request("r", (0, 1, 2, 3, 0), 30)], 3).values()
    found = summary([one], 3)
    assert found["proposing_steps"] < found["steps"]
    assert found["acceptance_length"] == pytest.approx(30 / found["steps"])
    assert found["acceptance_length_proposing"] > found["acceptance_length"]


def test_36_a_cache_is_rolled_back_to_a_length():
    """Cropping a cache to a positive length raises in transformers from 5.24 on; here every row has its own length."""
    model = tiny_model(layers=2)
    prompts, tokens = [(1, 2, 3), (4, 5, 6, 7, 8)], torch.tensor([[9, 10, 11], [12, 13, 14]])
    _, state = model.score(model.prefill(prompts), tokens)
    state = model.rollback(state, [4, 8])
    assert state.host_lengths == [4, 8]
    again, _ = model.score(state, torch.tensor([[20], [21]]))
    for index, prefix in enumerate([(1, 2, 3, 9), (4, 5, 6, 7, 8, 12, 13, 14)]):
        fresh, _ = model.score(model.prefill([prefix]), torch.tensor([[20 + index]]))
        torch.testing.assert_close(again[index], fresh[0], rtol=0, atol=1e-10)
    _, state = model.score(model.prefill(prompts), tokens)
    for lengths in ([7, 8], [-1, 8]):
        with pytest.raises(ContractError, match="rollback: expected at most the current lengths"):
            model.rollback(state, lengths)
        _, state = model.score(model.prefill(prompts), tokens)
