"""Faults 1 to 10: what is emitted follows the target's law, and drafts are accepted as often as they can be."""

from dataclasses import dataclass, replace

import pytest
import torch
from scipy import stats
from torch.nn.functional import one_hot

from spectoolkit.batch import Batch
from spectoolkit.datatypes import Dense, PointMass, Proposal, Request, SamplingParams, SharedNoise, Uniforms
from spectoolkit.drafters import ModelDrafter, TopMDrafter
from spectoolkit.functional.acceptance import probs_of
from spectoolkit.functional.draw import draw, gumbel_max
from spectoolkit.verifiers import Block, Coupled, Match, Rejection
from spectoolkit.verifiers.draft_law import residual_at
from tests.helpers.enumerate import (
    accept_cells,
    block_cells,
    constant_table,
    cumulated,
    emission,
    law_of,
    residual_weights,
    target_weights,
    total_variation,
)
from tests.helpers.one_step import first_token, propose, same_row, sampler, target_probs
from tests.helpers.toys import run

EXACT = 1e-12
P, Q = [0.5, 0.3, 0.2], [0.2, 0.3, 0.5]
TENTHS = (10, 10, 10)


def emitted(target_row, drawn_from, reported):
    """Acceptance and first token under rejection, of a draft drawn from one row and reported as another."""
    found = emission(
        constant_table(target_row, 2),
        constant_table(drawn_from, 1),
        constant_table(reported, 1),
        Rejection(),
        emit_cuts=cumulated(target_weights, residual_weights),
    )
    return found.reaches.item(), found.first_token


def test_01_the_control_pair():
    for verifier in (Rejection(), Block()):
        acceptance, out = first_token(P, sampler(Q), verifier, TENTHS)
        assert acceptance == pytest.approx(0.7)
        assert out == pytest.approx(P)
    q = torch.tensor([[Q]], dtype=torch.float64)
    rejected = Proposal(torch.tensor([[2]]), torch.tensor([1]), Dense(q))
    weights = residual_at(torch.tensor([P], dtype=torch.float64), rejected, torch.tensor([0]))
    assert (weights / weights.sum()).tolist() == [[1, 0, 0]]


def test_02_parameters_belong_on_both_sides():
    """vLLM #9834, #10198: a filter on one side only is biased or slower."""
    raw_p, raw_q, params = [0.5, 0.3, 0.15, 0.05], [0.4, 0.3, 0.22, 0.08], SamplingParams(top_p=0.9)
    proposal = propose(sampler(raw_q), torch.tensor([[0.5]], dtype=torch.float64), 4, params)
    p = target_probs(same_row(raw_p), proposal, params)[0, 0].tolist()
    q = proposal.law.probs[0, 0].tolist()
    assert p == pytest.approx([0.5263, 0.3158, 0.1579, 0], abs=5e-5)
    assert q == pytest.approx([0.4348, 0.3261, 0.2391, 0], abs=5e-5)

    acceptance, out = emitted(p, q, q)
    assert acceptance == pytest.approx(0.9085, abs=5e-5)
    assert out == pytest.approx(p)

    acceptance, out = emitted(raw_p, q, q)  # the draft alone is filtered: the output is the unfiltered target's
    assert acceptance == pytest.approx(0.8848, abs=5e-5)
    assert out == pytest.approx(raw_p)
    assert total_variation(torch.tensor(out), torch.tensor(p)) == pytest.approx(0.05)

    acceptance, out = emitted(p, raw_q, raw_q)  # the target alone is filtered: right, but accepted less often
    assert acceptance == pytest.approx(0.8579, abs=5e-5)
    assert out == pytest.approx(p)
    # What a drafter says that is asked for it.
    raw = propose(sampler(raw_q, top_p=1.0), torch.tensor([[0.5]], dtype=torch.float64), 4, params)
    assert raw.law.probs[0, 0].tolist() == pytest.approx(raw_q)


@dataclass(frozen=True)
class SaysTheSoftRow(ModelDrafter):
    """Drafts the argmax and reports the row it is the argmax of."""

    def propose(self, state, sampling, max_tokens, noise):
        proposal, state = super().propose(state, sampling, max_tokens, noise)
        soft = self.draft_model.rows[0].expand(*proposal.tokens.shape, -1)
        return replace(proposal, law=Dense(soft)), state


def test_03_an_argmax_draft_is_a_point_mass():
    """transformers #32867: judged with the soft row, the argmax is accepted too often."""
    q = [0.6, 0.3, 0.1]
    for verifier in (Rejection(), Block()):
        acceptance, out = first_token(P, sampler(q, constant=0.0), verifier, (1, 30, 30))
        assert acceptance == pytest.approx(0.5)
        assert out == pytest.approx(P)
    acceptance, out = first_token(P, SaysTheSoftRow(same_row(q), 3, constant=0.0), Rejection(), (1, 30, 30))
    assert acceptance == pytest.approx(0.8333, abs=5e-5)
    assert out == pytest.approx([0.8333, 0, 0.1667], abs=5e-5)


@dataclass(frozen=True)
class DropsTheRow(ModelDrafter):
    """Samples and reports point masses."""

    def propose(self, state, sampling, max_tokens, noise):
        proposal, state = super().propose(state, sampling, max_tokens, noise)
        return replace(proposal, law=PointMass()), state


def test_04_a_sampled_draft_without_its_row_is_exact_but_slower():
    dropped = DropsTheRow(same_row(Q), 3, ratio=1.0)
    for drafter, verifier in ((dropped, Rejection()), (dropped, Block()), (sampler(Q), Match())):
        acceptance, out = first_token(P, drafter, verifier, (10, 10, 280))  # recovered rows in 5ths, 7ths and 8ths
        assert acceptance == pytest.approx(0.29)
        assert out == pytest.approx(P)
    acceptance, out = first_token(P, sampler(Q, constant=0.0), Rejection(), (1, 10, 80))
    assert acceptance == pytest.approx(0.2)
    assert out == pytest.approx(P)


def test_05_the_reported_row_is_the_one_that_was_sampled():
    """transformers #47932: a row reported before its filter, which the tokens never came from."""
    p, sampled, reported = [2 / 3, 1 / 3, 0.0], [0.625, 0.375, 0.0], [0.5, 0.3, 0.2]
    params = SamplingParams(top_k=2)
    cut_to_two = TopMDrafter(same_row(reported), 3, ratio=1.0, keep=2)
    for drafter in (sampler(reported), cut_to_two):
        acceptance, out = first_token([0.6, 0.3, 0.1], drafter, Rejection(), (8, 9, 3), params)
        assert acceptance == pytest.approx(0.9583, abs=5e-5)
        assert out == pytest.approx(p)
    acceptance, out = emitted(p, sampled, reported)
    assert acceptance == pytest.approx(1)
    assert out == pytest.approx(sampled)


def test_06_the_residual_takes_the_whole_draft_row_away(monkeypatch):
    """xLLM #2175: taking q away at the rejected id alone, or not at all."""
    acceptance, out = first_token(P, sampler(Q), Rejection(), (10, 10, 80))
    assert acceptance == pytest.approx(0.7)
    assert out == pytest.approx(P)

    def at_the_rejected_id(row, proposal, position):
        q = proposal.law.probs[:, 0]
        return (row - q * one_hot(proposal.tokens[:, 0], q.shape[-1])).clamp(min=0)

    for wrong, law in ((at_the_rejected_id, [0.3875, 0.4125, 0.2]), (lambda row, *_: row, [0.35, 0.39, 0.26])):
        monkeypatch.setattr("spectoolkit.verifiers.rejection.residual_at", wrong)
        assert first_token(P, sampler(Q), Rejection(), (10, 10, 80))[1] == pytest.approx(law)


def test_07_the_recovered_token_has_noise_of_its_own(monkeypatch):
    """vLLM #47386, #54282: what drew the draft also draws the recovered token. False alarm 1e-9 for each law."""
    p, q = [0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4]
    target, drafter = same_row(p), sampler(q)
    asked = [Request(f"r{i}", (0,), 2) for i in range(4000)]

    def first_tokens():
        done = run(target, drafter, Rejection(), asked, 1, 2000).values()
        counts = torch.bincount(torch.tensor([one.tokens[0] for one in done]), minlength=4).tolist()
        return counts, sum(one.steps[0].accepted for one in done)

    def p_value(counts, law):
        return stats.chisquare(counts, [sum(counts) * share for share in law]).pvalue

    counts, accepted = first_tokens()
    assert p_value(counts, p) > 1e-9
    assert stats.binomtest(accepted, len(asked), 0.6).pvalue > 1e-9

    def reuse(self, proposal):
        noise = real(self, proposal)
        return replace(noise, emit=torch.cat([self.draft_noise().uniforms, noise.emit[:, -1:]], dim=1))

    real = Batch.verify_noise
    monkeypatch.setattr(Batch, "verify_noise", reuse)
    counts, _ = first_tokens()
    assert p_value(counts, p) < 1e-9
    assert p_value(counts, [0.3125, 0.3875, 0.2, 0.1]) > 1e-9  # a rejected 2 always recovers as 0, a 3 often as 1

    # With Gumbel noise the same mistake errs to the other side. Rules that read the draft law refuse shared noise.
    keys = torch.arange(40_000)
    rows_p, rows_q = (torch.tensor(row, dtype=torch.float64).expand(len(keys), 4) for row in (p, q))
    tokens = gumbel_max(rows_q, keys)
    numbers = torch.rand(len(keys), 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    proposal = Proposal(tokens[:, None], torch.ones(len(keys), dtype=torch.int64), Dense(rows_q[:, None]))
    uniforms = Uniforms(numbers, torch.zeros(len(keys), 2, dtype=torch.float64))
    is_accepted = Rejection().verify(rows_p[:, None].expand(-1, 2, -1), proposal, uniforms).num_accepted > 0
    first = torch.where(is_accepted, tokens, gumbel_max((rows_p - rows_q).clamp(min=0), keys))
    shares = (torch.bincount(first, minlength=4) / len(keys)).tolist()
    assert shares == pytest.approx([0.433, 0.267, 0.2, 0.1], abs=0.015)
    assert SharedNoise not in (*Rejection.laws, *Block.laws)


def test_08_block_verification_accepts_more():
    """vLLM #46781, vllm-ascend #7807: expected accepted drafts of rejection and of block verification."""

    def accepted(p, q, num_drafts, verifier, is_certain=False):
        target, draft = constant_table(p, num_drafts + 1), constant_table(q, num_drafts)
        found = emission(target, draft, None if is_certain else draft, verifier, cells=accept_cells)
        return found.reaches.sum().item()

    p, q = [1 / 3, 2 / 3], [2 / 3, 1 / 3]
    for num_drafts, by_token, by_block in ((1, 2 / 3, 2 / 3), (2, 10 / 9, 11 / 9), (3, 1.4074, 1.6667)):
        assert accepted(p, q, num_drafts, Rejection()) == pytest.approx(by_token, abs=5e-5)
        assert accepted(p, q, num_drafts, Block()) == pytest.approx(by_block, abs=5e-5)
    assert accepted(p, q, 4, Rejection()) == pytest.approx(1.6049, abs=5e-5)
    assert accepted(p, q, 4, Block()) == pytest.approx(2.0494, abs=5e-5)
    for verifier in (Rejection(), Block()):
        assert accepted([0.8, 0.2], [1.0, 0.0], 3, verifier, is_certain=True) == pytest.approx(1.952)
    target, draft = constant_table(p, 3), constant_table(q, 2)
    law = emission(target, draft, draft, Block(), cells=block_cells).law
    assert total_variation(law, law_of(target)) <= EXACT


@pytest.mark.parametrize("verifier", [Rejection(), Block(), Match(), Coupled()], ids=repr)
def test_09_the_uniform_zero_accepts_nothing_that_the_target_excludes(verifier):
    """SGLang #35771: u <= p(d) accepts where both are 0."""
    zeros = torch.zeros(1, 2, dtype=torch.float64)
    p = torch.tensor([[[1.0, 0.0]] * 2], dtype=torch.float64)
    for law in (PointMass(), Dense(torch.tensor([[[0.5, 0.5]]], dtype=torch.float64))):
        proposal = Proposal(torch.tensor([[1]]), torch.tensor([1]), law)
        verdict = verifier.verify(p, proposal, Uniforms(zeros[:, :1], zeros, torch.zeros(1, 2, dtype=torch.int64)))
        assert verdict.num_accepted.tolist() == [0]
        assert verdict.emitted[:, 0].tolist() == [0]
    assert (zeros[:, :1] <= probs_of(p[:, 0], torch.tensor([1]))).item()  # the wrong test would have passed
    assert draw(torch.tensor([0.0, 1.0]), torch.tensor(0.0)).item() == 1


def test_10_the_draft_model_has_fewer_ids():
    """What the draft model lacks is what is left after a rejection."""
    p, q = [0.4, 0.3, 0.2, 0.1], [0.5, 0.3, 0.2]
    drafter = sampler(q, vocab_size=4)
    acceptance, out = first_token(p, drafter, Rejection(), TENTHS)
    assert acceptance == pytest.approx(0.9)
    assert out == pytest.approx(p)
    # The row of three ids itself, as a rule may be given it.
    short = torch.tensor([[q]], dtype=torch.float64)
    proposal = Proposal(torch.tensor([[0]]), torch.tensor([1]), Dense(short))
    target = torch.tensor([[p, p]], dtype=torch.float64)
    weights = residual_at(target[:, 0], proposal, torch.tensor([0]))
    assert weights[0, :3].tolist() == [0, 0, 0]
    assert weights[0, 3].item() == pytest.approx(0.1)
    for verifier in (Rejection(), Block()):
        verdict = verifier.verify(
            target, proposal, Uniforms(torch.tensor([[0.81]]).double(), torch.tensor([[0.01, 0.5]]).double())
        )
        assert verdict.emitted.tolist() == [[3, -1]]
