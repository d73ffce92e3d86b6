import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from spectoolkit.datatypes import PAD, Dense, DraftLaw, PointMass, Proposal, TopM, Uniforms, Verdict
from spectoolkit.functional.draw import draw
from spectoolkit.interfaces import Verifier
from spectoolkit.verifiers import Block, Coupled, Lenient, Match, Mixture, Rejection, Relaxed, Threshold, Typical
from tests.helpers.toys import WRONG_VERIFIERS

RULES: list[Verifier] = [
    Rejection(),
    Block(),
    Match(),
    Coupled(),
    Typical(),
    Typical(recovery="argmax"),
    Typical(recovery="first_only"),
    Typical(recovery="medusa"),
    Relaxed(top_n=3, delta=0.3),
    Threshold(threshold_single=0.4, threshold_acc=0.7),
    Lenient(lenience=0.5),
    Mixture(draft_weight=0.3),
    *WRONG_VERIFIERS.values(),
]


@st.composite
def cases(draw_from: st.DrawFn) -> tuple[Tensor, Proposal, Uniforms]:
    """A batch of proposals of mixed lengths over sparse rows, with extreme uniforms among the ordinary ones."""
    batch, num_drafts, vocab_size = (
        draw_from(st.integers(1, 5)),
        draw_from(st.integers(0, 4)),
        draw_from(st.integers(1, 6)),
    )
    generator = torch.Generator().manual_seed(draw_from(st.integers(0, 2**31)))
    dtype = draw_from(st.sampled_from([torch.float32, torch.float64]))

    def rows(count: int) -> Tensor:
        weights = torch.rand(batch, count, vocab_size, generator=generator, dtype=dtype) + 1e-3
        weights[torch.rand(weights.shape, generator=generator) < draw_from(st.sampled_from([0.0, 0.5]))] = 0
        weights[..., 0] += (weights.sum(-1) == 0).to(dtype)
        return weights / weights.sum(-1, keepdim=True)

    def numbers(count: int) -> Tensor:
        uniform = torch.rand(batch, count, generator=generator, dtype=torch.float64)
        extreme = torch.randint(0, 8, uniform.shape, generator=generator)
        return uniform.masked_fill(extreme == 0, 0.0).masked_fill(extreme == 1, 1 - 2.0**-53)

    target, draft = rows(num_drafts + 1), rows(num_drafts)
    lengths = torch.randint(0, num_drafts + 1, (batch,), generator=generator)
    tokens = draw(draft, numbers(num_drafts)).masked_fill(torch.arange(num_drafts) >= lengths[:, None], PAD)
    probs, ids = draft.topk(vocab_size, dim=-1)
    law = draw_from(st.sampled_from([PointMass(), Dense(draft), TopM(ids, probs)]))
    keys = torch.randint(-(2**63), 2**63 - 1, (batch, num_drafts + 1), generator=generator)
    return target, Proposal(tokens, lengths, law), Uniforms(numbers(num_drafts), numbers(num_drafts + 1), keys)


@pytest.mark.parametrize("rule", RULES, ids=repr)
@settings(deadline=None, derandomize=True, max_examples=80)
@given(cases())
def test_what_every_verdict_keeps(rule: Verifier, case: tuple[Tensor, Proposal, Uniforms]) -> None:
    target, proposal, uniforms = case
    assume(type(proposal.law) in rule.laws)
    verdict = rule.verify(target, proposal, uniforms)
    batch, num_drafts = proposal.tokens.shape
    assert verdict.emitted.shape == (batch, num_drafts + 1)
    assert verdict.judged_alone.shape == (batch, num_drafts)
    assert verdict.judged_alone.dtype == torch.bool
    assert verdict.emitted.dtype == verdict.num_accepted.dtype == torch.int64
    for row in range(batch):
        accepted, length = int(verdict.num_accepted[row]), int(proposal.lengths[row])
        block = [token for token in verdict.emitted[row].tolist() if token != PAD]
        assert 0 <= accepted <= length
        assert block[:accepted] == proposal.tokens[row, :accepted].tolist()
        assert verdict.emitted[row].tolist() == block + [PAD] * (num_drafts + 1 - len(block))
        is_cut = rule == Typical(recovery="first_only") and 0 < accepted < length
        assert len(block) == accepted + (not is_cut)
        drawn = block[accepted:] if isinstance(rule, Mixture) else block  # whose law has the draft's tokens, too
        assert all(target[row, len(block) - len(drawn) + i, token] > 0 for i, token in enumerate(drawn))
        alone = verdict.judged_alone[row].tolist()
        if rule != Block():  # whose tests are of prefixes
            assert alone[:accepted] == [True] * accepted
            assert accepted == length or not alone[accepted]
        assert not any(alone[length:])


@pytest.mark.parametrize("rule", RULES, ids=repr)
@settings(deadline=None, derandomize=True, max_examples=40)
@given(cases())
def test_a_sequence_does_not_depend_on_its_batch(rule: Verifier, case: tuple[Tensor, Proposal, Uniforms]) -> None:
    target, proposal, uniforms = case
    assume(type(proposal.law) in rule.laws)
    assert uniforms.shared is not None
    together = rule.verify(target, proposal, uniforms)
    again = rule.verify(target, proposal, uniforms)
    for row in range(len(target)):
        rows = slice(row, row + 1)
        alone = rule.verify(
            target[rows],
            Proposal(proposal.tokens[rows], proposal.lengths[rows], _law_of(proposal.law, rows)),
            Uniforms(uniforms.accept[rows], uniforms.emit[rows], uniforms.shared[rows]),
        )
        assert _same(alone, Verdict(together.num_accepted[rows], together.emitted[rows], together.judged_alone[rows]))
    assert _same(together, again)


def _law_of(law: DraftLaw, rows: slice) -> DraftLaw:
    match law:
        case Dense(probs):
            return Dense(probs[rows])
        case TopM(ids, probs):
            return TopM(ids[rows], probs[rows])
    return law


def _same(one: Verdict, other: Verdict) -> bool:
    return all(torch.equal(getattr(one, n), getattr(other, n)) for n in ("num_accepted", "emitted", "judged_alone"))
