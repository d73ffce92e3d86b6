"""Faults 11 to 15: rounding, broken rows, and temperatures at the end of their range."""

import math

import pytest
import torch

from spectoolkit.datatypes import Dense, Proposal, Request, SamplingParams, Uniforms
from spectoolkit.drafters import ModelDrafter, NoDrafter
from spectoolkit.errors import InvalidLogitsError
from spectoolkit.functional.warp import warp
from spectoolkit.models.tabular import TabularModel
from spectoolkit.sampling import SamplingState
from spectoolkit.verifiers import Block, Match, Rejection
from tests.helpers.one_step import same_row
from tests.helpers.toys import run

NOTHING = torch.empty(1, 0, dtype=torch.int64)


def probs(logits, dtype=torch.float64, **params):
    """The row of one request."""
    row = torch.tensor([[logits]], dtype=dtype)
    state = SamplingState.of(["r"], [SamplingParams(**params)], [(0,)], [()], len(logits))
    return state.probs(row, NOTHING, "target")[0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("verifier", [Rejection(), Block()], ids=repr)
def test_11_an_empty_residual_falls_back_to_the_target(verifier, dtype):
    """p and q are equal but for rounding, and the draft is rejected all the same."""
    p, q = torch.tensor([[[0.5, 0.5]] * 2], dtype=dtype), torch.tensor([[[0.5005, 0.5]]], dtype=dtype)
    assert not (p[0, 0] - q[0, 0]).clamp(min=0).any()
    proposal = Proposal(torch.tensor([[0]]), torch.tensor([1]), Dense(q))
    for emit, token in ((0.25, 0), (0.75, 1)):
        uniforms = Uniforms(torch.tensor([[0.9995]]).double(), torch.tensor([[emit, 0.5]]).double())
        verdict = verifier.verify(p, proposal, uniforms)
        assert verdict.num_accepted.tolist() == [0]
        assert verdict.emitted.tolist() == [[token, -1]]


class BreaksBehind(TabularModel):
    """Half of a row is NaN once a sequence that began with `first` has six tokens."""

    first = 7

    def score(self, state, tokens):
        logits, new = super().score(state, tokens)
        ends = state.lengths[:, None] + torch.arange(tokens.shape[1]) + 1
        began = new.tokens[:, 0] == self.first
        broken = logits.clone()
        broken[(ends == 6) & began[:, None], ::2] = math.nan
        return broken, new


@pytest.mark.parametrize("side", ["target", "draft"])
def test_12_a_row_of_nan_is_an_error_and_no_token(side):
    """vLLM #53029: a NaN row at V = 129280 became an id outside the vocabulary."""
    vocab_size = 129_280
    row = torch.full((vocab_size,), 1 / vocab_size, dtype=torch.float64)
    good, broken = TabularModel(row), BreaksBehind(row)
    target, draft = (broken, good) if side == "target" else (good, broken)
    asked = [Request("fine", (3, 5), 8), Request("bad", (7, 8), 8)]
    with pytest.raises(InvalidLogitsError, match=rf"{side} logits of request 'bad' at position 6 ") as caught:
        run(target, ModelDrafter(draft, vocab_size, ratio=1.0), Rejection(), asked, 2)
    assert (caught.value.request_id, caught.value.position) == ("bad", 6)


def test_12_a_row_of_nan_of_a_draft_model_with_fewer_tokens():
    """The id that is drawn from it may be one that the draft model lacks, and is fed to nobody before the refusal."""
    target, broken = (TabularModel(torch.full((size,), 1 / size)) for size in (12, 8))
    broken.score = BreaksBehind(broken.rows).score
    with pytest.raises(InvalidLogitsError, match="draft logits of request 'bad' at position 6 "):
        run(target, ModelDrafter(broken, 12, ratio=1.0), Rejection(), [Request("bad", (7, 1, 2, 3, 1), 6)], 3)


def test_12_a_drafter_made_of_another_one_need_not_pass_faults_on():
    class Again(ModelDrafter):
        def propose(self, *arguments):
            proposal, state = super().propose(*arguments)
            return Proposal(proposal.tokens, proposal.lengths, proposal.law), state

    row = torch.full((8,), 1 / 8)
    with pytest.raises(InvalidLogitsError, match="draft logits of request 'bad' at position 6 "):
        run(TabularModel(row), Again(BreaksBehind(row), 8, constant=0.0), Match(), [Request("bad", (7, 1, 2), 9)], 3)


def test_12_no_rule_is_given_a_row_of_nan():
    class Careful(Rejection):
        def verify(self, target_probs, proposal, uniforms):
            assert target_probs.isfinite().all(), "what it says would hide which request it was"
            return super().verify(target_probs, proposal, uniforms)

    row = torch.full((8,), 1 / 8)
    with pytest.raises(InvalidLogitsError, match="target logits of request 'bad' at position 6 "):
        run(BreaksBehind(row), NoDrafter(), Careful(), [Request("bad", (7, 1, 2), 9)], 3)


def test_13_half_precision_logits_are_not_half_precision_probabilities():
    half = torch.tensor([[[0.0, -20.0]]], dtype=torch.float16)
    warped = warp(half, torch.ones(1, dtype=torch.float64), None, None, None)[0, 0]
    for found in (warped, probs([0.0, -20.0], torch.float16)):
        assert found.dtype == torch.float32
        assert found[1].item() == pytest.approx(2.06e-9, rel=2e-3)
    assert found.half().tolist() == [1, 0]  # what a softmax in half precision would have left


def test_14_a_prefix_that_has_exactly_top_p_is_enough_on_both_sides_and_in_both_precisions():
    row = [0.4, 0.3, 0.2, 0.1]
    logits = [math.log(p) for p in row]
    drafter = ModelDrafter(same_row(row), 4, ratio=1.0)
    state = SamplingState.of(["r"], [SamplingParams(top_p=0.9)], [(0,)], [()], 4)
    for dtype in (torch.float32, torch.float64):
        p = probs(logits, dtype, top_p=0.9)
        q = drafter.draft_probs(torch.tensor([[logits]], dtype=dtype), state, NOTHING)[0, 0]
        assert p.tolist() == pytest.approx([4 / 9, 3 / 9, 2 / 9, 0], rel=1e-6)
        assert torch.equal(p, q)
    # Without a tolerance the two precisions disagree about the last token.
    masses = [torch.tensor(row, dtype=dtype).cumsum(0)[2] for dtype in (torch.float32, torch.float64)]
    assert [bool(mass >= torch.tensor(0.9, dtype=mass.dtype)) for mass in masses] == [True, False]


def test_15_greedy_beside_sampling_and_ties():
    """vLLM #27077: temperature 0 and 0.7 in one batch."""
    logits = torch.tensor([[[1.0, 2.0]], [[1.0, 2.0]]])
    state = SamplingState.of(
        ["a", "b"], [SamplingParams(temperature=0.0), SamplingParams(temperature=0.7)], [(0,)] * 2, [()] * 2, 2
    )
    found = state.probs(logits, torch.empty(2, 0, dtype=torch.int64), "target")
    assert found[0, 0].tolist() == [0, 1]
    assert found[1, 0].tolist() == pytest.approx(torch.softmax(logits[1, 0] / 0.7, -1).tolist())
    assert probs([0.0, 200.0], torch.float32, temperature=1e-4).tolist() == [0, 1]

    row = torch.softmax(torch.tensor([1.0, 2.0], dtype=torch.float64), -1).tolist()
    greedy, warm = (
        Request(name, (0,), 40, SamplingParams(temperature=t)) for name, t in (("greedy", 0), ("warm", 0.7))
    )
    for drafter in (NoDrafter(), ModelDrafter(same_row(row), 2, ratio=1.0)):
        done = run(same_row(row), drafter, Rejection(), [greedy, warm], 3, 2)
        assert set(done["greedy"].tokens) == {1}
        assert set(done["warm"].tokens) == {0, 1}

    # Ties go to the lowest id for both models: the target's is 1 of 1 and 3, and so is the draft's.
    tied, other = same_row([0.1, 0.4, 0.1, 0.4]), same_row([0.05, 0.45, 0.05, 0.45])
    for drafter in (ModelDrafter(other, 4, constant=0.0), ModelDrafter(other, 4, ratio=1.0)):
        for verifier in (Rejection(), Block(), Match()):
            (one,) = run(tied, drafter, verifier, [Request("r", (0,), 8, SamplingParams(temperature=0.0))], 3).values()
            assert one.tokens == (1,) * 8
            assert [step.emitted for step in one.steps] == [4, 4]
