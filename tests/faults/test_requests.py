"""Faults 16 to 20: every request gets its own parameters, noise and drafts, whoever is beside it."""

import dataclasses

import pandas as pd
import pytest
import torch

from spectoolkit.datatypes import PAD, DraftNoise, PointMass, Proposal, Request, SamplingParams, Uniforms
from spectoolkit.drafters import CoupledDrafter, ModelDrafter, NGramDrafter, SuffixDrafter
from spectoolkit.metrics import summarise
from spectoolkit.models.tabular import TabularModel, random_tabular
from spectoolkit.records import request_row
from spectoolkit.sampling import SamplingState
from spectoolkit.verifiers import Block, Coupled, Match, Rejection, Typical
from tests.helpers.one_step import propose, same_row, sampler, target_probs
from tests.helpers.toys import run, toy_pair


def test_16_a_token_below_min_p_is_always_rejected():
    """vLLM #42744: min_p on plain decoding, but not where drafts are verified."""
    params = SamplingParams(min_p=0.2)
    certain = sampler([0.0, 0.0, 1.0], min_p=0.0)
    proposal = propose(certain, torch.tensor([[0.5]], dtype=torch.float64), 3, params)
    assert proposal.tokens.tolist() == [[2]]
    found = target_probs(same_row([0.6, 0.3, 0.1]), proposal, params)
    assert found[0, 0].tolist() == pytest.approx([0.6667, 0.3333, 0], abs=5e-5)
    asked = [Request(f"r{i}", (0,), 12, params) for i in range(8)]
    for verifier in (Rejection(), Block(), Match(), Coupled(), Typical()):
        for one in run(same_row([0.6, 0.3, 0.1]), certain, verifier, asked, 3, 8).values():
            assert sum(s.drafted for s in one.steps) > 0
            assert sum(s.accepted for s in one.steps) == 0
            assert 2 not in one.tokens


@pytest.mark.parametrize("verifier", [Rejection(), Block(), Match(), Coupled()], ids=repr)
def test_17_a_seeded_request_does_not_notice_its_neighbour(verifier):
    """vLLM #6038, #10863: the seeded request's tokens changed with the drafts of the one beside it."""
    target, draft = toy_pair()
    seeded = Request("b", (1, 2), 15, seed=42)
    noisy = [Request("a", (3,) * size, length) for size, length in ((1, 1), (2, 2), (4, 5), (1, 30))]
    for drafter in (ModelDrafter(draft, 5, ratio=1.0), NGramDrafter(2, 1)):
        alone = run(target, drafter, verifier, [seeded], 4)["b"].tokens
        assert alone != run(target, drafter, verifier, [dataclasses.replace(seeded, seed=43)], 4)["b"].tokens
        for other in noisy:
            for batch in ([other, seeded], [seeded, other], [other, dataclasses.replace(other, id="c"), seeded]):
                assert run(target, drafter, verifier, batch, 4)["b"].tokens == alone


class Recording(TabularModel):
    """Keeps the tokens that it is fed."""

    def score(self, state, tokens):
        self.fed = [*getattr(self, "fed", []), tokens]
        return super().score(state, tokens)


def test_18_padding_is_no_token():
    """vLLM #44054: -1 behind short proposals was embedded, counted as drafted, or used as an index."""
    rows = torch.full((2, 3, 10), 0.1, dtype=torch.float64)
    drafts = Proposal(torch.tensor([[7, 8], [PAD, PAD]]), torch.tensor([2, 0]), PointMass())
    uniforms = Uniforms(torch.zeros(2, 2).double(), torch.full((2, 3), 0.55).double(), torch.zeros(2, 3).long())
    for verifier in (Rejection(), Block(), Match(), Coupled(), Typical()):
        emitted = verifier.verify(rows, drafts, uniforms).emitted
        assert (emitted[1] >= 0).tolist() == [True, False, False]
        assert 0 <= emitted[1, 0] < 10
        assert emitted[0].max() < 10

    # In the loop: drafts [7, 8], and nothing for a prompt that never repeats.
    target = Recording(torch.full((10, 10), 0.1, dtype=torch.float64))
    asked = [Request("two", (1, 7, 8, 1), 3), Request("none", (3, 4, 5, 6), 3)]
    done = run(target, NGramDrafter(1, 1), Rejection(), asked, 2)
    assert target.fed[0].tolist()[0] == [1, 7, 8]
    assert all(tokens.min() >= 0 for tokens in target.fed)
    assert [done[name].steps[0].drafted for name in ("two", "none")] == [2, 0]
    assert done["none"].steps[0].emitted == 1
    # A penalty counts the drafts before a row and no padding: neither as the last id nor as the first.
    params = [SamplingParams(frequency_penalty=1.0)] * 2
    sampling = SamplingState.of(["a", "b"], params, [(3,), (3,)], [(), ()], 10)
    p = sampling.probs(torch.zeros(2, 3, 10), drafts.tokens, "target")
    assert p[1].tolist() == torch.full((3, 10), 0.1).tolist()
    assert p[0, 2].argsort()[:2].tolist() == [7, 8]

    # Drafts [5, 6, -1, -1, -1], because the request beside has five: both accepted, so the rate is 2 of 2.
    cycle = TabularModel(torch.eye(10, dtype=torch.float64)[[1, 2, 3, 4, 9, 6, 5, 7, 8, 1]])
    asked = [Request("short", (6, 5, 6), 3), Request("long", (1, 2, 3, 4, 9, 1), 6)]
    done = run(cycle, NGramDrafter(1, 1), Rejection(), asked, 5)
    (one,) = done["short"].steps
    assert (one.drafted, one.accepted, one.emitted) == (2, 2, 3)
    found = summarise(pd.DataFrame([request_row(done["short"], 5, cluster="p", category="c")]))
    assert found["acceptance_rate"] == 1
    assert found["acceptance_rate_slots"] == pytest.approx(2 / 5)


def test_19_drafts_follow_their_requests_and_not_their_places():
    """vLLM #40269: drafts kept by batch slot met another request after the batch was reordered."""

    def drafts(drafter, state, sampling, width=2):
        size = len(sampling.request_ids)
        noise = DraftNoise(torch.full((size, width), 0.5, dtype=torch.float64))
        return drafter.propose(state, sampling, [width] * size, noise)[0]

    def named(prompts):
        size = len(prompts)
        return SamplingState.of(list("abc")[:size], [SamplingParams()] * size, prompts, [()] * size, 6)

    prompts = [(2, 1, 2), (5,), (3, 3)]
    for drafter in (NGramDrafter(1, 1), SuffixDrafter(max_spec_factor=2.0)):
        state = drafter.start(prompts)
        before = drafts(drafter, state, named(prompts)).tokens.tolist()
        assert before == [[1, 2], [PAD, PAD], [3, PAD]]
        after = drafts(drafter, drafter.select(state, [2, 0, 1]), named(prompts)).tokens.tolist()
        assert after == [before[row] for row in (2, 0, 1)]

    # A draft model's tokens and rows, and the caches behind them.
    drafter = ModelDrafter(random_tabular(6, 2, seed=1), 6, ratio=1.0)
    by_row = [drafts(drafter, drafter.start([prompt]), named([prompt])) for prompt in prompts]
    order = [2, 0, 1]
    moved = drafts(drafter, drafter.select(drafter.start(prompts), order), named([prompts[i] for i in order]))
    assert moved.tokens.tolist() == [by_row[i].tokens[0].tolist() for i in order]
    assert torch.equal(moved.law.probs, torch.cat([by_row[i].law.probs for i in order]))
    assert len({tuple(one.tokens[0].tolist()) for one in by_row}) > 1

    # Places change in the loop when a request ends: all verdicts and counts stay those of the request alone.
    target = random_tabular(6, 2, seed=2)
    asked = [Request(f"r{i}", prompts[i % 3], 3 + 4 * ((i + 1) % 3)) for i in range(7)]
    done = run(target, drafter, Rejection(), asked, 3, 3)
    for one in asked:
        alone = run(target, drafter, Rejection(), [one], 3)[one.id]
        assert done[one.id].tokens == alone.tokens
        assert [s.accepted for s in done[one.id].steps] == [s.accepted for s in alone.steps]


@pytest.mark.parametrize("num_draft_tokens", range(1, 9))
@pytest.mark.parametrize("temperature", [0.0, 0.3, 0.7, 1.0, 2.0])
def test_20_a_model_that_drafts_for_itself_is_always_accepted(num_draft_tokens, temperature):
    target = random_tabular(6, 2, seed=3)
    params = SamplingParams(temperature=temperature, top_p=0.95)
    asked = [Request(f"r{i}", (i, 1), 2 * (num_draft_tokens + 1), params) for i in range(3)]
    for drafter, verifier in (
        (ModelDrafter(target, 6, ratio=1.0), Rejection()),
        (ModelDrafter(target, 6, ratio=1.0), Block()),
        (CoupledDrafter(target, 6, ratio=1.0), Coupled()),
    ):
        done = run(target, drafter, verifier, asked, num_draft_tokens).values()
        rows = [request_row(one, num_draft_tokens, cluster="p", category="c") for one in done]
        found = summarise(pd.DataFrame(rows))
        assert found["acceptance_rate"] == 1
        assert found["acceptance_length"] == num_draft_tokens + 1
