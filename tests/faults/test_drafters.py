"""Faults 21 to 23 and 31 to 33: drafters propose what they say, from the law that they say."""

from dataclasses import replace

import pytest
import torch
from scipy import stats

from spectoolkit.datatypes import Dense, DraftNoise, PointMass, Proposal, Request, SamplingParams, TopM, Uniforms
from spectoolkit.drafters import CoupledDrafter, ModelDrafter, NGramDrafter, SuffixDrafter, TopMDrafter
from spectoolkit.errors import ContractError
from spectoolkit.models.tabular import TabularModel, random_tabular
from spectoolkit.sampling import SamplingState
from spectoolkit.verifiers import Block, Rejection
from tests.helpers.enumerate import (
    block_cells,
    cumulated,
    emission,
    joint_ratios,
    law_of,
    random_table,
    residual_weights,
    total_variation,
)
from tests.helpers.one_step import first_token, propose, same_row, sampler, target_probs
from tests.helpers.toys import run, toy_pair


def looked_up(history, limit, drafter):
    noise = DraftNoise(torch.zeros(1, limit, dtype=torch.float64))
    proposal, _ = drafter.propose(drafter.start([history]), None, [limit], noise)
    assert proposal.tokens.shape[1] == proposal.lengths.item()
    return proposal.tokens[0].tolist()


def test_21_a_last_token_never_seen_gives_no_proposal():
    """text-generation-inference #2997: a proposal was made without a match."""
    for drafter in (NGramDrafter(3, 1), NGramDrafter(3, 1, match="earliest"), SuffixDrafter()):
        assert looked_up([7, 8, 9, 4, 5], 4, drafter) == []


def test_22_the_match_policy_decides():
    """Two implementations of prompt lookup give two answers; which one is meant is a parameter."""
    history = [1, 2, 9, 1, 2, 7, 1, 2]
    assert looked_up(history, 3, NGramDrafter(2, 2, match="earliest")) == [9, 1, 2]
    assert looked_up(history, 3, NGramDrafter(2, 2, match="latest")) == [7, 1, 2]
    for match in ("earliest", "latest"):
        assert looked_up([1, 2, 3, 4, 2, 3], 4, NGramDrafter(3, 2, match=match)) == [4, 2, 3]
        assert looked_up([3], 4, NGramDrafter(3, 2, match=match)) == []
        assert looked_up([1, 1, 1], 4, NGramDrafter(2, 2, match=match)) == [1]
        assert looked_up([4, 3, 5, 3], 4, NGramDrafter(3, 2, match=match)) == []
        assert looked_up([4, 3, 5, 3], 4, NGramDrafter(3, 1, match=match)) == [5, 3]


class Overlong(NGramDrafter):
    """Proposes three tokens whatever it is allowed."""

    def propose(self, state, sampling, max_tokens, noise):
        return super().propose(state, sampling, [3] * len(max_tokens), noise)


def test_23_a_lookup_longer_than_what_may_still_be_emitted():
    """transformers #46993: three tokens were looked up and three emitted where two were allowed."""
    target = random_tabular(4, 1, seed=5)
    cycle = (1, 2, 3, 1, 2, 3, 1)
    for drafter in (NGramDrafter(1, 1), SuffixDrafter(max_spec_factor=3.0)):
        assert looked_up(list(cycle), 3, drafter) == [2, 3, 1]
        for verifier in (Rejection(), Block()):
            done = run(target, drafter, verifier, [Request(f"r{i}", cycle, 2) for i in range(6)], 3)
            assert {len(one.tokens) for one in done.values()} == {2}
            assert all(step.drafted <= 1 - step.start for one in done.values() for step in one.steps)
    # A drafter that breaks its contract is found out, whatever the target would accept.
    follows = TabularModel(torch.eye(4, dtype=torch.float64)[[0, 2, 3, 1]])
    with pytest.raises(ContractError, match=r"proposal\.lengths: expected 0 to 1 drafts of request 'r'.* got 3"):
        run(follows, Overlong(1, 1), Rejection(), [Request("r", cycle, 2)], 3)


@pytest.mark.parametrize("make", [ModelDrafter, TopMDrafter, CoupledDrafter])
@pytest.mark.parametrize("parameters", [{"constant": 0.0}, {"ratio": 0.0}])
def test_31_a_draft_temperature_of_zero_is_a_point_mass_in_every_path(make, parameters):
    """Sampled at T = 1 in one path, argmax judged with its softmax row in another."""
    draft = same_row([0.25, 0.4, 0.35])
    drafter = make(draft, 3, **parameters)
    for size in (1, 100):
        noise = torch.linspace(0, 0.999, 3 * size, dtype=torch.float64).view(size, 3)
        proposal = propose(drafter, noise, 3)
        assert isinstance(proposal.law, PointMass)
        assert proposal.tokens.tolist() == [[1, 1, 1]] * size
    acceptance, out = first_token([0.5, 0.3, 0.2], drafter, Rejection(), (4, 10, 70))
    assert acceptance == pytest.approx(0.3)
    assert out == pytest.approx([0.5, 0.3, 0.2])
    # In the loop, beside requests of other temperatures.
    asked = [Request(f"r{i}", (0,), 2, SamplingParams(temperature=[0.0, 0.7, 1.0][i % 3])) for i in range(100)]
    done = run(draft, drafter, Rejection(), asked, 1, 100)
    assert all(step.accepted == int(one.tokens[0] == 1) for one in done.values() for step in one.steps[:1])


def test_32_block_verification_is_enumerated_and_holds_on_256_tokens(monkeypatch):
    """A whole-block rule advertised as lossless missed the law of the first token by far. False alarm 1e-9."""
    target, draft = random_table(31, 3, 4), random_table(32, 3, 3)

    def cells(target_rows, draft_rows, drafts):
        edges, joint = block_cells(target_rows, draft_rows, drafts), joint_ratios(target_rows, draft_rows, drafts)
        wrong = [torch.tensor([pi], dtype=torch.float64) for pi in joint[1:]]
        wrong += [cumulated(residual_weights)(p, q, 0) for p, q in zip(target_rows, draft_rows, strict=False)]
        return [*(torch.cat(pair).clamp(0, 1).unique() for pair in zip(edges, wrong, strict=False)), edges[-1]]

    def distance():
        return total_variation(emission(target, draft, draft, Block(), cells=cells).law, law_of(target))

    size, num_drafts, params = 6000, 4, SamplingParams(temperature=0.8)
    big = random_tabular(256, 1, concentration=0.3, seed=6)
    drafter = ModelDrafter(big, 256, ratio=2.0)
    numbers = torch.rand(size, 3 * num_drafts + 1, dtype=torch.float64, generator=torch.Generator().manual_seed(8))
    proposal = propose(drafter, numbers[:, :num_drafts], 256, params)
    probs = target_probs(big, proposal, params)
    uniforms = Uniforms(numbers[:, num_drafts : 2 * num_drafts], numbers[:, 2 * num_drafts :])

    def p_value():
        first = Block().verify(probs, proposal, uniforms).emitted[:, 0]
        observed, expected = torch.bincount(first, minlength=256), size * probs[0, 0]
        is_common = expected >= 5
        groups = [torch.cat([x[is_common], x[~is_common].sum()[None]]) for x in (observed, expected)]
        return stats.chisquare(*(group.double().tolist() for group in groups), sum_check=False).pvalue

    assert distance() <= 1e-12
    assert p_value() > 1e-9
    # A prefix accepted at u < pi, its joint ratio, as if the shorter prefixes were judged by nothing else.
    monkeypatch.setattr("spectoolkit.verifiers.block.residual_masses", lambda probs, proposal, joint: joint)
    assert p_value() < 1e-9
    assert distance() > 0.01


@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.6])
def test_33_the_draft_temperature_is_applied_once(temperature):
    """T applied in the drafter and once more in the warp: exact, but another strategy than the one asked for."""
    _, draft = toy_pair()
    state = SamplingState.of(["r"], [SamplingParams(temperature=temperature)], [(1,)], [()], 5)
    logits = draft.score(draft.prefill([()]), torch.tensor([[1]]))[0][0, 0]
    noise = DraftNoise(torch.tensor([[0.5]], dtype=torch.float64))
    for drafter, used in (
        (ModelDrafter(draft, 5, ratio=1.0), temperature),
        (TopMDrafter(draft, 5, ratio=1.0, keep=5), temperature),
        (ModelDrafter(draft, 5, ratio=0.5), temperature / 2),
        (ModelDrafter(draft, 5, constant=1.2), 1.2),
    ):
        law = drafter.propose(drafter.start([(1,)]), state, [1], noise)[0].law
        row = law.probs[0, 0]
        if isinstance(law, TopM):
            row = torch.zeros(5, dtype=torch.float64).scatter(0, law.ids[0, 0], row)
        torch.testing.assert_close(row, torch.softmax(logits / used, -1), rtol=0, atol=1e-15)
        assert (row - torch.softmax(logits / used**2, -1)).abs().max() > 1e-3
    # The request's own temperature is not the draft's.
    row = sampler([0.2, 0.8], constant=1.0)
    proposal = propose(row, torch.tensor([[0.5]], dtype=torch.float64), 2, SamplingParams(temperature=temperature))
    assert proposal.law.probs[0, 0].tolist() == pytest.approx([0.2, 0.8])


class Smoothed(ModelDrafter):
    """A drafter of one's own that changes the rows, and says so where `replay` asks as well."""

    def draft_probs(self, logits, sampling, appended):
        probs = super().draft_probs(logits, sampling, appended)
        return (probs + 1 / probs.shape[-1]) / 2


@pytest.mark.parametrize("options", [{"ratio": 1.0}, {"ratio": 0.5, "repetition_penalty": 1.3}], ids=repr)
def test_the_law_of_a_proposal_is_that_of_the_rows_a_drafter_makes_of_its_own(options):
    _, draft = toy_pair()
    drafter = Smoothed(draft, 5, **options)
    sampling = SamplingState.of(["r"], [SamplingParams()], [(1, 2)], [()], 5, keeps_histories=True)
    noise = DraftNoise(torch.tensor([[0.1, 0.5, 0.9]], dtype=torch.float64))
    proposal, _ = drafter.propose(drafter.start([(1, 2)]), sampling, [3], noise)
    logits, _ = draft.score(draft.prefill([(1,)]), torch.cat([torch.tensor([[2]]), proposal.tokens[:, :-1]], 1))
    torch.testing.assert_close(proposal.law.probs, drafter.draft_probs(logits, sampling, proposal.tokens[:, :-1]))


def changed(**parts):
    """Rejection with a verdict of which these parts are something else."""

    class Changed(Rejection):
        def verify(self, target_probs, proposal, uniforms):
            verdict = super().verify(target_probs, proposal, uniforms)
            return replace(verdict, **{name: change(getattr(verdict, name)) for name, change in parts.items()})

    return Changed()


@pytest.mark.parametrize(
    ("verifier", "message"),
    [
        (changed(emitted=lambda e: torch.full_like(e, -1)), r"verdict\.emitted: expected 1 to 3 tokens .* 'r'.* got 0"),
        (changed(emitted=lambda e: torch.ones(1, 7).long()), r"verdict\.emitted: expected 1 to 3 tokens .* got 7"),
        (changed(emitted=lambda e: torch.full_like(e, 9)), r"verdict\.emitted: expected ids below 5 .* 'r', got 9"),
        (changed(num_accepted=lambda n: n + 9), r"verdict\.num_accepted: expected 0 to 2 for request 'r'.* got "),
        (changed(num_accepted=lambda n: -1 - n), r"verdict\.num_accepted: expected 0 to 2 .* got -"),
    ],
)
def test_a_verdict_that_cannot_be_is_refused(verifier, message):
    """Records would count what never was, or the request would never end."""
    target, draft = toy_pair()
    with pytest.raises(ContractError, match=message):
        run(target, ModelDrafter(draft, 5, ratio=1.0), verifier, [Request("r", (0,), 9)], 2)


@pytest.mark.parametrize("law", [PointMass, Dense])
@pytest.mark.parametrize(("length", "width"), [(4, 4), (3, 2), (-1, 2)])
def test_more_drafts_than_there_may_be_are_refused(law, length, width):
    class TooMany(NGramDrafter):
        laws = (law,)

        def propose(self, state, sampling, max_tokens, noise):
            rows = () if law is PointMass else (torch.full((1, width, 5), 0.2),)
            return Proposal(torch.zeros(1, width).long(), torch.tensor([length]), law(*rows)), state

    drafter = TooMany(2, 1)
    object.__setattr__(drafter, "laws", (law,))
    with pytest.raises(
        ContractError, match=rf"proposal\.lengths: expected 0 to {min(2, width)} drafts .* got {length}"
    ):
        run(toy_pair()[0], drafter, Rejection(), [Request("r", (0,), 9)], 2)


def test_rows_of_its_own_count_at_temperature_0_as_well():
    class Forbids(ModelDrafter):
        """Never drafts what it would draft otherwise."""

        def draft_probs(self, logits, sampling, appended):
            probs = super().draft_probs(logits, sampling, appended)
            return torch.where(probs > 0, 0, 1 / (probs.shape[-1] - 1))

    _, draft = toy_pair()
    usual, other = (propose(own(draft, 5, constant=0.0), torch.zeros(1, 1), 5) for own in (ModelDrafter, Forbids))
    assert usual.tokens.tolist() != other.tokens.tolist()
