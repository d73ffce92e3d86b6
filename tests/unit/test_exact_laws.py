"""The law of what each rule emits, integrated exactly, against the target's; and wrong rules that must be seen."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from spectoolkit.datatypes import Dense, PointMass, Proposal, Uniforms, Verdict
from spectoolkit.functional.acceptance import (
    emitted_block,
    is_drafted,
    overlap,
    prefix_length,
    probs_of,
    residual,
    take,
)
from spectoolkit.functional.draw import draw
from spectoolkit.functional.theory import expected_acceptance_length
from spectoolkit.interfaces import Verifier
from spectoolkit.verifiers import Block, Match, Rejection, Typical
from tests.helpers.enumerate import (
    Emission,
    accept_cells,
    argmax_table,
    block_cells,
    cells_of,
    constant_table,
    cumulated,
    cut_table,
    emission,
    judge,
    law_of,
    no_cuts,
    random_table,
    ratio_cuts,
    residual_weights,
    rows_along,
    target_weights,
    top_m_law,
    total_variation,
)

EXACT = 1e-12
SEEN = 0.01
SIZES = [(2, 3), (3, 2), (3, 3), (4, 2), (4, 3)]
TARGET_CUTS = cumulated(target_weights)


def distance(target: list[Tensor], emitted: Emission) -> float:
    return total_variation(emitted.law, law_of(target))


def single(
    target_row: list[float],
    drawn_from: list[float],
    reported: list[float] | None,
    rule: Verifier | None = None,
) -> tuple[float, list[float]]:
    """Acceptance and law of the first token of a step with one draft."""
    emitted = emission(
        constant_table(target_row, 2),
        constant_table(drawn_from, 1),
        None if reported is None else constant_table(reported, 1),
        rule or Rejection(),
        emit_cuts=EVERY_CUT,
    )
    return emitted.reaches.item(), emitted.first_token


# Lossless rules


@pytest.mark.parametrize(("vocab_size", "num_drafts"), SIZES)
def test_rejection_is_exact_for_sampled_drafts(vocab_size: int, num_drafts: int) -> None:
    target, draft = random_table(1, vocab_size, num_drafts + 1), random_table(2, vocab_size, num_drafts)
    emitted = emission(target, draft, draft, Rejection())
    assert distance(target, emitted) <= EXACT
    assert emitted.law.sum().item() == pytest.approx(1, abs=EXACT)
    assert emitted.reaches[0].item() == pytest.approx(overlap(target[0], draft[0]).item(), abs=EXACT)


@pytest.mark.parametrize(("vocab_size", "num_drafts"), SIZES)
def test_rejection_is_exact_for_argmax_drafts(vocab_size: int, num_drafts: int) -> None:
    target, draft = random_table(3, vocab_size, num_drafts + 1), random_table(4, vocab_size, num_drafts)
    certain = argmax_table(draft)
    as_point_masses = emission(target, certain, None, Rejection())
    assert distance(target, as_point_masses) <= EXACT
    as_rows = emission(target, certain, certain, Rejection())
    assert torch.allclose(as_rows.law, as_point_masses.law, atol=EXACT)
    assert torch.allclose(as_rows.reaches, as_point_masses.reaches, atol=EXACT)


@pytest.mark.parametrize(("vocab_size", "num_drafts"), SIZES[:-1])
def test_sampled_drafts_judged_as_point_masses_are_slower_but_exact(vocab_size: int, num_drafts: int) -> None:
    target, draft = random_table(5, vocab_size, num_drafts + 1), random_table(6, vocab_size, num_drafts)
    emitted = emission(target, draft, None, Rejection())
    assert distance(target, emitted) <= EXACT
    assert emitted.reaches[0].item() == pytest.approx((target[0] * draft[0]).sum().item(), abs=EXACT)


@pytest.mark.parametrize(("vocab_size", "num_drafts"), SIZES)
@pytest.mark.parametrize("is_sampled", [True, False])
def test_match_is_exact(vocab_size: int, num_drafts: int, is_sampled: bool) -> None:
    target, draft = random_table(7, vocab_size, num_drafts + 1), random_table(8, vocab_size, num_drafts)
    drawn_from = draft if is_sampled else argmax_table(draft)
    emitted = emission(target, drawn_from, None, Match(), accept_cuts=no_cuts, emit_cuts=TARGET_CUTS)
    assert distance(target, emitted) <= EXACT
    assert emitted.reaches[0].item() == pytest.approx((target[0] * drawn_from[0]).sum().item(), abs=EXACT)


@pytest.mark.parametrize(("vocab_size", "num_drafts"), SIZES)
def test_block_is_exact_for_sampled_drafts(vocab_size: int, num_drafts: int) -> None:
    target, draft = random_table(1, vocab_size, num_drafts + 1), random_table(2, vocab_size, num_drafts)
    emitted = emission(target, draft, draft, Block(), cells=block_cells)
    assert distance(target, emitted) <= EXACT
    assert emitted.law.sum().item() == pytest.approx(1, abs=EXACT)
    assert emitted.reaches.sum() > emission(target, draft, draft, Rejection(), cells=accept_cells).reaches.sum() + 1e-3


@pytest.mark.parametrize(("vocab_size", "num_drafts"), SIZES)
@pytest.mark.parametrize("is_sampled", [True, False])
def test_block_of_point_masses_is_rejection(vocab_size: int, num_drafts: int, is_sampled: bool) -> None:
    target, draft = random_table(3, vocab_size, num_drafts + 1), random_table(4, vocab_size, num_drafts)
    drawn_from = draft if is_sampled else argmax_table(draft)
    emitted = emission(target, drawn_from, None, Block(), cells=block_cells)
    assert distance(target, emitted) <= EXACT
    by_rejection = emission(target, drawn_from, None, Rejection(), cells=accept_cells)
    assert torch.allclose(emitted.reaches, by_rejection.reaches, atol=EXACT)


@pytest.mark.parametrize(("vocab_size", "num_drafts"), SIZES)
@pytest.mark.parametrize("num_kept", [1, 2, 3])
@pytest.mark.parametrize("rule", [Rejection(), Block()], ids=repr)
def test_top_m_drafts_are_exact(rule: Verifier, vocab_size: int, num_drafts: int, num_kept: int) -> None:
    if num_kept > vocab_size:
        pytest.skip("no more tokens than there are")
    target, draft = random_table(5, vocab_size, num_drafts + 1), random_table(6, vocab_size, num_drafts)
    cut, cells = cut_table(draft, num_kept), block_cells if rule == Block() else None
    emitted = emission(target, cut, cut, rule, cells=cells, law_of_rows=top_m_law(num_kept))
    assert distance(target, emitted) <= EXACT
    assert emitted.reaches[0] >= overlap(target[0], cut[0]) - EXACT
    as_rows = emission(target, cut, cut, rule, cells=accept_cells)
    assert torch.allclose(emitted.reaches, as_rows.reaches, atol=EXACT)
    # The cut is made before the draw: judged with the row before the cut, the same drafts are biased.
    if num_kept < vocab_size:
        assert distance(target, emission(target, cut, draft, rule, cells=cells)) > SEEN


def test_rows_with_zeros_stay_exact() -> None:
    target = [t.masked_fill(t < 0.2, 0) for t in random_table(9, 4, 3)]
    target = [t / t.sum(-1, keepdim=True) for t in target]
    draft = [t.masked_fill(t < 0.15, 0) for t in random_table(10, 4, 2)]
    draft = [t / t.sum(-1, keepdim=True) for t in draft]
    assert distance(target, emission(target, draft, draft, Rejection())) <= EXACT
    assert distance(target, emission(target, draft, None, Rejection())) <= EXACT
    assert distance(target, emission(target, draft, draft, Block(), cells=block_cells)) <= EXACT
    assert distance(target, emission(target, draft, None, Block(), cells=block_cells)) <= EXACT


@pytest.mark.parametrize("is_dense", [True, False])
def test_verdicts_are_constant_on_the_cells(is_dense: bool) -> None:
    """The integration is exact only if no cut is missing: points are judged like the midpoints of their cells."""
    target, draft = random_table(11, 4, 4), random_table(12, 4, 3)
    numbers = torch.rand(7, 5_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for drafts in [(0, 0, 0), (1, 2, 3), (3, 1, 0)]:
        target_rows, draft_rows = rows_along(target, draft if is_dense else None, drafts)
        cells = cells_of(target_rows, draft_rows, drafts, ratio_cuts, cumulated(target_weights, residual_weights))
        middles = []
        for edges, points in zip(cells, numbers, strict=True):
            above = torch.searchsorted(edges, points, right=True)
            middles.append((edges[above - 1] + edges[above]) / 2)
        reported = draft_rows if is_dense else None
        at_points = judge(Rejection(), target_rows, reported, drafts, numbers.T)
        at_middles = judge(Rejection(), target_rows, reported, drafts, torch.stack(middles, -1))
        assert torch.equal(at_points[0], at_middles[0])
        assert torch.equal(at_points[1], at_middles[1])


# Published figures


CONTROL = ([0.5, 0.3, 0.2], [0.2, 0.3, 0.5])


def test_the_textbook_pair() -> None:
    acceptance, out = single(CONTROL[0], CONTROL[1], CONTROL[1])
    assert acceptance == pytest.approx(0.7)
    assert out == pytest.approx(CONTROL[0], abs=EXACT)


def test_the_textbook_pair_without_the_draft_rows() -> None:
    acceptance, out = single(CONTROL[0], CONTROL[1], None)
    assert acceptance == pytest.approx(0.29)
    assert out == pytest.approx(CONTROL[0], abs=EXACT)
    acceptance, out = single(CONTROL[0], [0.0, 0.0, 1.0], None)
    assert acceptance == pytest.approx(0.2)
    assert out == pytest.approx(CONTROL[0], abs=EXACT)


def test_parameters_on_one_side_only() -> None:
    p, q = [10 / 19, 6 / 19, 3 / 19, 0.0], [10 / 23, 7.5 / 23, 5.5 / 23, 0.0]
    raw_p, raw_q = [0.5, 0.3, 0.15, 0.05], [0.4, 0.3, 0.22, 0.08]
    acceptance, out = single(p, q, q)
    assert acceptance == pytest.approx(0.9085, abs=5e-5)
    assert out == pytest.approx(p, abs=EXACT)
    acceptance, out = single(raw_p, q, q)
    assert acceptance == pytest.approx(0.8848, abs=5e-5)
    assert out == pytest.approx(raw_p, abs=EXACT)
    assert total_variation(torch.tensor(out), torch.tensor(p)) == pytest.approx(0.05)
    acceptance, out = single(p, raw_q, raw_q)
    assert acceptance == pytest.approx(0.8579, abs=5e-5)
    assert out == pytest.approx(p, abs=EXACT)


def test_a_draft_over_fewer_tokens() -> None:
    target, row = [0.4, 0.3, 0.2, 0.1], [0.5, 0.3, 0.2]
    emitted = emission(constant_table(target, 3), constant_table(row, 2, 4), constant_table(row, 2, 4), Rejection())
    assert distance(constant_table(target, 3), emitted) <= EXACT
    assert emitted.reaches.tolist() == pytest.approx([0.9, 0.81])


@pytest.mark.parametrize(("num_drafts", "expected"), [(1, 2 / 3), (2, 10 / 9), (3, 38 / 27), (4, 130 / 81)])
def test_expected_accepted_of_a_constant_pair(num_drafts: int, expected: float) -> None:
    target, draft = constant_table([1 / 3, 2 / 3], num_drafts + 1), constant_table([2 / 3, 1 / 3], num_drafts)
    emitted = emission(target, draft, draft, Rejection())
    assert emitted.reaches.sum().item() == pytest.approx(expected)
    assert 1 + expected == pytest.approx(expected_acceptance_length(2 / 3, num_drafts))


@pytest.mark.parametrize(("num_drafts", "expected"), [(1, 2 / 3), (2, 11 / 9), (3, 5 / 3), (4, 166 / 81)])
def test_expected_accepted_of_a_constant_pair_judged_as_a_block(num_drafts: int, expected: float) -> None:
    target, draft = constant_table([1 / 3, 2 / 3], num_drafts + 1), constant_table([2 / 3, 1 / 3], num_drafts)
    emitted = emission(target, draft, draft, Block(), cells=block_cells)
    assert emitted.reaches.sum().item() == pytest.approx(expected)
    assert distance(target, emitted) <= EXACT


@pytest.mark.parametrize("rule", [Rejection(), Block()], ids=repr)
def test_expected_accepted_of_a_point_mass(rule: Verifier) -> None:
    target, draft = constant_table([0.8, 0.2], 4), constant_table([1.0, 0.0], 3)
    emitted = emission(target, draft, None, rule, cells=block_cells if rule == Block() else None)
    assert emitted.reaches.sum().item() == pytest.approx(1.952)
    assert distance(target, emitted) <= EXACT


@pytest.mark.parametrize("seed", range(30))
def test_block_accepts_at_least_as_much_as_rejection(seed: int) -> None:
    num_drafts, vocab_size = 1 + seed % 4, 2 + seed % 3
    target = random_table(100 + seed, vocab_size, num_drafts + 1, sharpness=0.5 + seed % 5)
    draft = random_table(200 + seed, vocab_size, num_drafts)
    block, rejection = (
        emission(target, draft, draft, rule, cells=accept_cells).reaches.sum() for rule in (Block(), Rejection())
    )
    assert block >= rejection - EXACT
    if num_drafts == 1:
        assert block == pytest.approx(rejection.item(), abs=EXACT)


# Wrong rules


@dataclass(frozen=True)
class Wrong:
    """Rejection with one part replaced. accept: ratio, target. recover: residual, own_token, target."""

    accept: str = "ratio"
    recover: str = "residual"
    bonus: str = "sample"
    laws = (PointMass, Dense)
    is_lossless = True
    keeps_law = True

    def verify(self, target_probs: Tensor, proposal: Proposal, uniforms: Uniforms) -> Verdict:
        assert isinstance(proposal.law, Dense)
        tokens, draft_probs = proposal.tokens, proposal.law.probs
        p, q = probs_of(target_probs[:, :-1], tokens), probs_of(draft_probs, tokens)
        passed = {"ratio": uniforms.accept * q < p, "target": uniforms.accept < p, "or equal": uniforms.accept * q <= p}
        accepted = passed[self.accept]
        num_accepted = prefix_length(accepted & is_drafted(proposal.lengths, accepted.shape[1]))
        target_row = take(target_probs, num_accepted)
        position = num_accepted.clamp(max=tokens.shape[1] - 1)
        draft_row, token = take(draft_probs, position), take(tokens, position)[:, None]
        at_token = torch.zeros_like(draft_row).scatter(-1, token, 1)
        recovered = {
            "residual": residual(target_row, draft_row),
            "own token": (target_row - draft_row * at_token).clamp(min=0),
            "target": target_row,
        }[self.recover]
        is_bonus = num_accepted == proposal.lengths
        last = draw(torch.where(is_bonus[:, None], target_row, recovered), take(uniforms.emit, num_accepted))
        if self.bonus == "argmax":
            last = torch.where(is_bonus, target_row.argmax(-1), last)
        return Verdict(num_accepted, emitted_block(tokens, num_accepted, last), accepted)


def own_token_weights(target_row: Tensor, draft_row: Tensor, token: int) -> Tensor:
    rest = target_row.clone()
    rest[token] = (rest[token] - draft_row[token]).clamp(min=0)
    return rest


EVERY_CUT = cumulated(target_weights, residual_weights, own_token_weights)


def both_accept_cuts(target_row: Tensor, draft_row: Tensor, token: int) -> Tensor:
    return torch.cat([ratio_cuts(target_row, draft_row, token), target_row[token : token + 1]])


def test_the_wrong_rules_differ_from_a_right_one_in_one_part() -> None:
    target, draft = random_table(13, 3, 3), random_table(14, 3, 2)
    emitted = emission(target, draft, draft, Wrong(), both_accept_cuts, EVERY_CUT)
    assert distance(target, emitted) <= EXACT


@pytest.mark.parametrize(
    "rule",
    [Wrong(recover="own token"), Wrong(recover="target"), Wrong(accept="target"), Wrong(bonus="argmax"), Typical()],
    ids=repr,
)
@pytest.mark.parametrize(("vocab_size", "num_drafts"), [(3, 2), (4, 2)])
def test_wrong_rules_for_sampled_drafts_are_seen(rule: Verifier, vocab_size: int, num_drafts: int) -> None:
    target, draft = random_table(13, vocab_size, num_drafts + 1), random_table(14, vocab_size, num_drafts)
    emitted = emission(target, draft, draft, rule, both_accept_cuts, EVERY_CUT)
    assert emitted.law.sum().item() == pytest.approx(1, abs=EXACT)
    assert distance(target, emitted) > SEEN


@pytest.mark.parametrize(("vocab_size", "num_drafts"), SIZES)
def test_argmax_drafts_judged_with_the_soft_row_are_seen(vocab_size: int, num_drafts: int) -> None:
    target, draft = random_table(15, vocab_size, num_drafts + 1), random_table(16, vocab_size, num_drafts)
    assert distance(target, emission(target, argmax_table(draft), draft, Rejection())) > SEEN


def test_argmax_draft_judged_with_the_soft_row_by_numbers() -> None:
    p, q, certain = [0.5, 0.3, 0.2], [0.6, 0.3, 0.1], [1.0, 0.0, 0.0]
    acceptance, out = single(p, certain, None)
    assert acceptance == pytest.approx(0.5)
    assert out == pytest.approx(p, abs=EXACT)
    acceptance, out = single(p, certain, q)
    assert acceptance == pytest.approx(5 / 6)
    assert out == pytest.approx([5 / 6, 0, 1 / 6])


def test_a_reported_row_that_is_not_the_sampled_one_by_numbers() -> None:
    p, sampled, reported = [2 / 3, 1 / 3, 0.0], [0.625, 0.375, 0.0], [0.5, 0.3, 0.2]
    acceptance, out = single(p, sampled, sampled)
    assert acceptance == pytest.approx(0.9583, abs=5e-5)
    assert out == pytest.approx(p, abs=EXACT)
    acceptance, out = single(p, sampled, reported)
    assert acceptance == pytest.approx(1.0)
    assert out == pytest.approx(sampled)


def test_wrong_residuals_by_numbers() -> None:
    acceptance, out = single(CONTROL[0], CONTROL[1], CONTROL[1], Wrong(recover="own token"))
    assert acceptance == pytest.approx(0.7)
    assert out == pytest.approx([0.3875, 0.4125, 0.2])
    _, out = single(CONTROL[0], CONTROL[1], CONTROL[1], Wrong(recover="target"))
    assert out == pytest.approx([0.35, 0.39, 0.26])


@dataclass(frozen=True)
class StopsAtTheFirstFailure(Block):
    """Block verification that gives up at the first prefix that fails, as if its tests were of single tokens."""

    def verify(self, target_probs: Tensor, proposal: Proposal, uniforms: Uniforms) -> Verdict:
        # All uniforms behind the first failure are made to fail as well.
        accept = uniforms.accept.clone()
        for i in range(accept.shape[1]):
            prefix = replace(proposal, tokens=proposal.tokens.clone(), lengths=proposal.lengths)
            alone = torch.ones_like(accept)
            alone[:, i] = accept[:, i]
            failed = super().verify(target_probs, prefix, Uniforms(alone, uniforms.emit)).num_accepted <= i
            accept[failed, i:] = 1.0
        return super().verify(target_probs, proposal, replace(uniforms, accept=accept))


@dataclass(frozen=True)
class RecoversUnscaled(Block):
    """Block verification with the residual of rejection, (p - q)+."""

    def verify(self, target_probs: Tensor, proposal: Proposal, uniforms: Uniforms) -> Verdict:
        assert isinstance(proposal.law, Dense)
        verdict = super().verify(target_probs, proposal, uniforms)
        position = verdict.num_accepted.clamp(max=proposal.tokens.shape[1] - 1)
        unscaled = residual(take(target_probs, position), take(proposal.law.probs, position))
        redrawn = draw(unscaled, take(uniforms.emit, position))
        is_bonus = verdict.num_accepted == proposal.lengths
        last = torch.where(is_bonus, take(verdict.emitted, verdict.num_accepted), redrawn)
        return replace(verdict, emitted=emitted_block(proposal.tokens, verdict.num_accepted, last))


@pytest.mark.parametrize("rule", [StopsAtTheFirstFailure(), RecoversUnscaled()], ids=repr)
def test_wrong_block_rules_are_seen(rule: Verifier) -> None:
    target, draft = random_table(1, 3, 4), random_table(2, 3, 3)

    def cells(target_rows: Tensor, draft_rows: Tensor, drafts: Sequence[int]) -> list[Tensor]:
        by_rejection = cells_of(target_rows, draft_rows, drafts, no_cuts, cumulated(residual_weights))
        by_block = block_cells(target_rows, draft_rows, drafts)
        return [torch.cat(pair).unique() for pair in zip(by_rejection, by_block, strict=True)]

    assert distance(target, emission(target, draft, draft, Block(), cells=cells)) <= EXACT
    assert distance(target, emission(target, draft, draft, rule, cells=cells)) > 1e-3


def test_a_block_of_which_only_the_longest_prefix_passes_is_accepted_whole() -> None:
    """The first prefix fails its test, the second passes it; rejection would stop at once."""
    p, q = torch.tensor([1 / 3, 2 / 3], dtype=torch.float64), torch.tensor([2 / 3, 1 / 3], dtype=torch.float64)
    numbers = torch.tensor([[0.9, 0.5, 0.5, 0.5, 0.5]], dtype=torch.float64)
    emitted, num_accepted = judge(Block(), p.expand(3, 2), q.expand(2, 2), [0, 1], numbers)
    assert num_accepted.tolist() == [2]
    assert emitted.tolist() == [[0, 1, 1]]
    assert judge(Rejection(), p.expand(3, 2), q.expand(2, 2), [0, 1], numbers)[1].tolist() == [0]


@dataclass(frozen=True)
class Coarse:
    """A rule fed with uniforms cut to tenths, as a generator of few bits would give: 0 has a positive probability."""

    rule: Verifier
    laws = (PointMass, Dense)
    is_lossless = True
    keeps_law = True

    def verify(self, target_probs: Tensor, proposal: Proposal, uniforms: Uniforms) -> Verdict:
        tenths = (uniforms.accept * 10).floor() / 10
        return self.rule.verify(target_probs, proposal, replace(uniforms, accept=tenths))


def test_accepting_at_equality_is_seen_when_zero_can_be_drawn() -> None:
    target, draft = constant_table([1.0, 0.0], 2), constant_table([0.5, 0.5], 1)

    def tenths(target_row: Tensor, draft_row: Tensor, token: int) -> Tensor:
        return torch.arange(1, 10, dtype=torch.float64) / 10

    for rule in (Rejection(), Block()):
        right = emission(target, draft, draft, Coarse(rule), tenths, EVERY_CUT)
        assert distance(target, right) <= EXACT
    wrong = emission(target, draft, draft, Coarse(Wrong(accept="or equal")), tenths, EVERY_CUT)
    assert distance(target, wrong) == pytest.approx(0.05)


def test_drafting_noise_shared_with_the_recovered_token_is_seen() -> None:
    p = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    q = p.flip(0)
    # Every cut (tenths of q and p, ratios 2/3 and 1/4, residual 3/4) is a multiple of 1/60: the grid is exact.
    grid = (torch.arange(60, dtype=torch.float64) + 0.5) / 60
    drafting, accepting = torch.cartesian_prod(grid, grid).T
    size = len(drafting)
    proposal = Proposal(
        tokens=draw(q.expand(size, 4), drafting)[:, None],
        lengths=torch.ones(size, dtype=torch.int64),
        law=Dense(q.expand(size, 1, 4)),
    )
    shared = Uniforms(accepting[:, None], torch.stack([drafting, drafting], -1))
    first = Rejection().verify(p.expand(size, 2, 4), proposal, shared).emitted[:, 0]
    assert torch.equal(Block().verify(p.expand(size, 2, 4), proposal, shared).emitted[:, 0], first)
    # A rejected 2 (drawn at u in [.3, .6)) always recovers as 0, a rejected 3 often as 1.
    assert (torch.bincount(first, minlength=4) / size).tolist() == pytest.approx([0.3125, 0.3875, 0.2, 0.1], abs=1e-6)
