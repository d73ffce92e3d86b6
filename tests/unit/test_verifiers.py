from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from spectoolkit.datatypes import PAD, Dense, DraftLaw, PointMass, Proposal, Uniforms, Verdict
from spectoolkit.errors import ContractError, UsageError
from spectoolkit.functional.draw import draw
from spectoolkit.functional.warp import warp
from spectoolkit.interfaces import Verifier
from spectoolkit.verifiers import Match, Rejection, Typical

LARGEST = 1 - 2.0**-53
RULES: list[Verifier] = [Rejection(), Match(), Typical(), Typical(recovery="argmax"), Typical(recovery="first_only")]


def tensor(values: Sequence) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def judge_one(
    rule: Verifier,
    target_rows: Sequence[Sequence[float]],
    drafts: Sequence[int],
    draft_rows: Sequence[Sequence[float]] | None = None,
    accept: Sequence[float] | None = None,
    emit: Sequence[float] | None = None,
) -> Verdict:
    """One sequence whose drafts fill the proposal; uniforms are 1/2 unless given."""
    size = len(drafts)
    law = PointMass() if draft_rows is None else Dense(tensor([draft_rows]))
    proposal = Proposal(torch.tensor([drafts], dtype=torch.int64), torch.tensor([size]), law)
    uniforms = Uniforms(tensor([accept or [0.5] * size]).view(1, size), tensor([emit or [0.5] * (size + 1)]))
    return rule.verify(tensor([target_rows]), proposal, uniforms)


def random_case(
    seed: int, batch: int = 6, num_drafts: int = 3, vocab_size: int = 11
) -> tuple[Tensor, Tensor, Tensor, Uniforms]:
    """Target rows, draft rows, drafts from them, uniforms."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    target = torch.softmax(3 * torch.randn(batch, num_drafts + 1, vocab_size, generator=generator), -1)
    draft = torch.softmax(target[:, :-1].log() + torch.randn(batch, num_drafts, vocab_size, generator=generator), -1)
    drafts = draw(draft, uniform(batch, num_drafts))
    return target, draft, drafts, Uniforms(uniform(batch, num_drafts), uniform(batch, num_drafts + 1))


def test_laws_and_losslessness_are_class_attributes() -> None:
    for rule in RULES:
        assert rule.laws == type(rule).laws == (PointMass, Dense)
    assert Rejection.is_lossless
    assert Match.is_lossless
    assert not Typical.is_lossless
    assert Rejection() == Rejection()
    assert Typical() == Typical(epsilon=0.09, delta=0.3, recovery="sample")


# Rejection


def test_rejection_accepts_below_the_ratio_and_recovers_from_the_residual() -> None:
    p, q = [0.5, 0.3, 0.2], [0.2, 0.3, 0.5]
    below = judge_one(Rejection(), [p, p], [2], [q], accept=[0.3999])
    assert below.emitted.tolist() == [[2, 1]]  # the bonus at u = 1/2: F(0) = .5 is not above it
    above = judge_one(Rejection(), [p, p], [2], [q], accept=[0.4001], emit=[LARGEST, 0.0])
    assert above.emitted.tolist() == [[0, PAD]]
    assert above.num_accepted.tolist() == [0]
    assert above.judged_alone.tolist() == [[False]]


def test_rejection_of_a_point_mass_accepts_below_p_and_recovers_from_the_rest() -> None:
    p = [0.5, 0.3, 0.2]
    assert judge_one(Rejection(), [p, p], [0], accept=[0.4999]).num_accepted.tolist() == [1]
    for emit, token in [(0.0, 1), (0.5999, 1), (0.6001, 2), (LARGEST, 2)]:
        verdict = judge_one(Rejection(), [p, p], [0], accept=[0.5], emit=[emit, 0.5])
        assert verdict.emitted.tolist() == [[token, PAD]]


@pytest.mark.parametrize("draft_rows", [None, [[0.0, 1.0]]])
def test_the_uniform_zero_does_not_accept_a_token_the_target_excludes(draft_rows: list[list[float]] | None) -> None:
    verdict = judge_one(Rejection(), [[1.0, 0.0], [1.0, 0.0]], [1], draft_rows, accept=[0.0])
    assert verdict.num_accepted.tolist() == [0]
    assert verdict.emitted.tolist() == [[0, PAD]]
    assert verdict.judged_alone.tolist() == [[False]]


def test_a_token_cut_by_min_p_is_always_rejected() -> None:
    row = tensor([[[0.6, 0.3, 0.1]] * 2]).log()
    p = warp(row, tensor([1.0]), None, None, tensor([0.2]))[0].tolist()
    for accept in (0.0, 0.5, LARGEST):
        assert judge_one(Rejection(), p, [2], accept=[accept]).num_accepted.tolist() == [0]


def test_an_empty_residual_draws_from_the_target() -> None:
    verdict = judge_one(Rejection(), [[0.5, 0.5]] * 2, [0], [[0.5005, 0.5]], accept=[0.9995], emit=[0.75, 0.5])
    assert verdict.emitted.tolist() == [[1, PAD]]
    verdict = judge_one(Rejection(), [[1.0 - 1e-9, 0.0]] * 2, [0], accept=[LARGEST], emit=[0.75, 0.5])
    assert verdict.emitted.tolist() == [[0, PAD]]


@pytest.mark.parametrize("temperature", [0.0, 1e-3, 0.7, 1.0, 2.0])
@pytest.mark.parametrize("num_drafts", [1, 2, 5, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_model_that_drafts_for_itself_is_always_accepted(
    temperature: float, num_drafts: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(num_drafts)
    logits = 4 * torch.randn(16, num_drafts + 1, 50, generator=generator, dtype=dtype)
    probs = warp(logits, torch.full((16,), temperature, dtype=torch.float64), None, None, None)
    drafts = draw(probs[:, :-1], torch.rand(16, num_drafts, generator=generator, dtype=torch.float64))
    proposal = Proposal(drafts, torch.full((16,), num_drafts), Dense(probs[:, :-1]))
    for accept in (0.0, 0.5, LARGEST):
        numbers = torch.full((16, num_drafts + 1), accept, dtype=torch.float64)
        uniforms = Uniforms(numbers[:, 1:], numbers)
        verdict = Rejection().verify(probs, proposal, uniforms)
        assert (verdict.num_accepted == num_drafts).all()
        assert (verdict.emitted >= 0).sum(-1).tolist() == [num_drafts + 1] * 16
        assert verdict.judged_alone.all()


def test_at_temperature_zero_rejection_is_exact_match() -> None:
    rows = [[0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]
    for accept, emit in [(0.0, 0.0), (LARGEST, LARGEST)]:
        for drafts, emitted in [([1, 0], [1, 0, 2]), ([1, 2], [1, 0, PAD]), ([0, 0], [1, PAD, PAD])]:
            verdict = judge_one(Rejection(), rows, drafts, accept=[accept] * 2, emit=[emit] * 3)
            assert verdict.emitted.tolist() == [emitted]


def test_each_position_has_its_own_uniforms() -> None:
    p, q = [0.5, 0.3, 0.2], [0.2, 0.3, 0.5]
    drafts, rows = [2, 2, 2], [p] * 4
    for position in range(3):
        accept = [0.1] * 3
        accept[position] = 0.9
        emit = [0.1] * 4
        emit[position] = 0.7  # the point mass residual of 2 is [.5, .3]: id 1 at .7, id 0 at .1
        verdict = judge_one(Rejection(), rows, drafts, accept=accept, emit=emit)
        assert verdict.emitted.tolist() == [[2] * position + [1] + [PAD] * (3 - position)]
        assert verdict.judged_alone.tolist() == [[i != position for i in range(3)]]
    verdict = judge_one(Rejection(), rows, drafts, [q] * 3, accept=[0.1] * 3, emit=[0.0, 0.0, 0.0, 0.9])
    assert verdict.emitted.tolist() == [[2, 2, 2, 2]]


def test_judged_alone_goes_on_behind_a_rejection() -> None:
    verdict = judge_one(Rejection(), [[0.5, 0.5]] * 4, [0, 0, 0], accept=[0.1, 0.9, 0.1])
    assert verdict.judged_alone.tolist() == [[True, False, True]]
    assert verdict.num_accepted.tolist() == [1]


@pytest.mark.parametrize("drafts", [[1], [3], [PAD]])
def test_a_draft_its_own_law_excludes_is_a_broken_contract(drafts: list[int]) -> None:
    with pytest.raises(ContractError, match="probability 0"):
        judge_one(Rejection(), [[0.5, 0.3, 0.2]] * 2, drafts, [[0.5, 0.0, 0.5]])


def test_padding_inside_a_point_mass_proposal_is_a_broken_contract() -> None:
    with pytest.raises(ContractError, match="probability 0"):
        judge_one(Rejection(), [[0.5, 0.5]] * 2, [PAD])


def test_rejection_refuses_a_law_it_does_not_know() -> None:
    class Foreign:
        pass

    law: DraftLaw = Foreign()  # pyright: ignore[reportAssignmentType]
    target, _, drafts, uniforms = random_case(0)
    with pytest.raises(ContractError, match="Foreign"):
        Rejection().verify(target, Proposal(drafts, torch.full((6,), 3), law), uniforms)


def test_the_larger_vocabulary_may_be_on_either_side() -> None:
    p, q = [0.4, 0.3, 0.2, 0.1], [0.5, 0.3, 0.2]
    verdict = judge_one(Rejection(), [p, p], [0], [q], accept=[0.81], emit=[0.3, 0.5])
    assert verdict.emitted.tolist() == [[3, PAD]]
    verdict = judge_one(Rejection(), [q, q], [3], [p], accept=[0.0], emit=[0.3, 0.5])
    assert verdict.emitted.tolist() == [[0, PAD]]
    for rule in RULES:
        verdict = judge_one(rule, [q, q], [3], accept=[0.0])
        assert verdict.num_accepted.tolist() == [0]
        assert 0 <= verdict.emitted[0, 0] < 3


# Match


def test_match_emits_its_own_draws_up_to_the_first_difference() -> None:
    p = [0.5, 0.3, 0.2]
    emit = [0.1, 0.6, 0.9, 0.6]  # draws 0, 1, 2, 1
    assert judge_one(Match(), [p] * 4, [0, 1, 2], emit=emit).emitted.tolist() == [[0, 1, 2, 1]]
    verdict = judge_one(Match(), [p] * 4, [0, 2, 2], emit=emit)
    assert verdict.emitted.tolist() == [[0, 1, PAD, PAD]]
    assert verdict.judged_alone.tolist() == [[True, False, True]]


def test_match_emits_the_same_text_whatever_is_drafted() -> None:
    target, _, _, uniforms = random_case(1)
    own = draw(target, uniforms.emit)
    drafts = own[:, :-1].clone()
    drafts[:, 1] = (drafts[:, 1] + 1) % 11
    verdict = Match().verify(target, Proposal(drafts, torch.full((6,), 3), PointMass()), uniforms)
    assert torch.equal(verdict.emitted[:, :2], own[:, :2])
    assert (verdict.num_accepted == 1).all()


# Typical


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [2, 4, 100, 49152])
def test_a_probability_equal_to_the_threshold_is_rejected(size: int, dtype: torch.dtype) -> None:
    # Uniform over n: exp(-H) = 1/n = p. Equal at delta = 1, below just above it, above just below it.
    target = torch.full((1, 2, size), 1 / size, dtype=dtype)
    proposal = Proposal(torch.tensor([[0]]), torch.tensor([1]), PointMass())
    uniforms = Uniforms(torch.full((1, 1), 0.5).double(), torch.full((1, 2), 0.5).double())
    for delta, accepted in [(0.9999, 1), (1.0, 0), (1.0001, 0)]:
        verdict = Typical(epsilon=1.0, delta=delta).verify(target, proposal, uniforms)
        assert verdict.num_accepted.tolist() == [accepted], delta


def test_a_probability_equal_to_epsilon_is_rejected() -> None:
    row = [0.81, 0.1, 0.09]  # delta * exp(-H) = .164 > epsilon
    assert judge_one(Typical(), [row, row], [2]).num_accepted.tolist() == [0]
    assert judge_one(Typical(), [row, row], [1]).num_accepted.tolist() == [1]


def test_low_entropy_rows_are_judged_by_epsilon_and_high_entropy_rows_by_delta() -> None:
    peaked, flat = [0.6, 0.3, 0.1], [0.25] * 4
    assert judge_one(Typical(), [peaked] * 2, [2]).num_accepted.tolist() == [1]  # .1 > .09
    assert judge_one(Typical(epsilon=0.2), [peaked] * 2, [2]).num_accepted.tolist() == [0]  # .1 < .122
    assert judge_one(Typical(), [flat] * 2, [3]).num_accepted.tolist() == [1]  # .25 > .075


LIKELY, UNLIKELY = [0.9, 0.02, 0.08], [0.02, 0.08, 0.9]


@pytest.mark.parametrize(
    ("recovery", "at_once", "later", "bonus"),
    [
        ("sample", [1, PAD, PAD, PAD], [0, 1, PAD, PAD], [0, 0, 0, 1]),
        ("argmax", [2, PAD, PAD, PAD], [0, 2, PAD, PAD], [0, 0, 0, 1]),
        ("first_only", [1, PAD, PAD, PAD], [0, PAD, PAD, PAD], [0, 0, 0, 1]),
    ],
)
def test_recovery(recovery: str, at_once: list[int], later: list[int], bonus: list[int]) -> None:
    rule = Typical(recovery=recovery)  # pyright: ignore[reportArgumentType]
    emit = [0.05] * 4  # id 1 of an unlikely row
    rejected_first = judge_one(rule, [UNLIKELY, LIKELY, LIKELY, LIKELY], [0, 0, 0], emit=emit)
    assert rejected_first.emitted.tolist() == [at_once]
    assert rejected_first.judged_alone.tolist() == [[False, True, True]]
    rejected_second = judge_one(rule, [LIKELY, UNLIKELY, LIKELY, LIKELY], [0, 0, 0], emit=emit)
    assert rejected_second.emitted.tolist() == [later]
    assert rejected_second.num_accepted.tolist() == [1]
    all_accepted = judge_one(rule, [LIKELY, LIKELY, LIKELY, UNLIKELY], [0, 0, 0], emit=emit)
    assert all_accepted.emitted.tolist() == [bonus]


@pytest.mark.parametrize(
    "arguments",
    [
        {"epsilon": 0.0},
        {"epsilon": 1.1},
        {"epsilon": float("nan")},
        {"delta": 0.0},
        {"delta": float("inf")},
        {"recovery": "other"},
    ],
)
def test_typical_refuses_bad_parameters(arguments: dict) -> None:
    with pytest.raises(UsageError, match=next(iter(arguments))):
        Typical(**arguments)


# Every rule


@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize("is_dense", [True, False])
def test_short_and_empty_proposals_among_full_ones(rule: Verifier, is_dense: bool) -> None:
    target, draft, drafts, uniforms = random_case(2)
    lengths = torch.tensor([3, 2, 1, 0, 0, 3])
    drafts = drafts.masked_fill(torch.arange(3) >= lengths[:, None], PAD)
    verdict = rule.verify(target, Proposal(drafts, lengths, Dense(draft) if is_dense else PointMass()), uniforms)
    assert (verdict.num_accepted <= lengths).all()
    assert not verdict.judged_alone[torch.arange(3) >= lengths[:, None]].any()
    for row, length in enumerate(lengths.tolist()):
        law = Dense(draft[row : row + 1, :length]) if is_dense else PointMass()
        alone = rule.verify(
            target[row : row + 1, : length + 1],
            Proposal(drafts[row : row + 1, :length], lengths[row : row + 1], law),
            Uniforms(uniforms.accept[row : row + 1, :length], uniforms.emit[row : row + 1, : length + 1]),
        )
        assert verdict.emitted[row].tolist() == alone.emitted[0].tolist() + [PAD] * (3 - length)
        if length == 0:
            expected = draw(target[row, 0], uniforms.emit[row, 0]).item()
            assert verdict.emitted[row].tolist() == [expected, PAD, PAD, PAD]


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_a_step_without_any_draft_emits_one_target_token(rule: Verifier) -> None:
    target, _, _, uniforms = random_case(3)
    nothing = torch.empty(6, 0, dtype=torch.int64)
    for law in (PointMass(), Dense(torch.empty(6, 0, 11))):
        verdict = rule.verify(
            target[:, :1], Proposal(nothing, torch.zeros(6, dtype=torch.int64), law),
            Uniforms(torch.empty(6, 0, dtype=torch.float64), uniforms.emit[:, :1]),
        )  # fmt: skip
        assert torch.equal(verdict.emitted, draw(target[:, :1], uniforms.emit[:, :1]))
        assert verdict.num_accepted.tolist() == [0] * 6
        assert verdict.judged_alone.shape == (6, 0)


def test_a_padded_row_beside_drafts() -> None:
    rows = tensor([[[0.1] * 10] * 3] * 2)
    proposal = Proposal(torch.tensor([[7, 8], [PAD, PAD]]), torch.tensor([2, 0]), PointMass())
    uniforms = Uniforms(torch.zeros(2, 2).double(), torch.full((2, 3), 0.55).double())
    for rule in (Rejection(), Typical()):
        verdict = rule.verify(rows, proposal, uniforms)
        assert verdict.emitted.tolist() == [[7, 8, 5], [5, PAD, PAD]]


@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize("rubbish", [torch.nan, torch.inf, 0.0, -1.0])
def test_what_lies_behind_a_proposal_does_not_matter(rule: Verifier, rubbish: float) -> None:
    target, draft, drafts, uniforms = random_case(4)
    lengths = torch.tensor([3, 2, 1, 0, 2, 1])
    behind = torch.arange(3) >= lengths[:, None]
    drafts = drafts.masked_fill(behind, PAD)
    dirty_target, dirty_draft = target.clone(), draft.clone()
    dirty_target[:, 1:][behind] = rubbish
    dirty_draft[behind] = rubbish
    for law, dirty_law in ((Dense(draft), Dense(dirty_draft)), (PointMass(), PointMass())):
        clean = rule.verify(target, Proposal(drafts, lengths, law), uniforms)
        dirty = rule.verify(dirty_target, Proposal(drafts, lengths, dirty_law), uniforms)
        for name in ("num_accepted", "emitted", "judged_alone"):
            assert torch.equal(getattr(clean, name), getattr(dirty, name))


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_the_arguments_are_left_alone(rule: Verifier) -> None:
    target, draft, drafts, uniforms = random_case(5)
    given = (target, draft, drafts, uniforms.accept, uniforms.emit)
    before = [t.clone() for t in given]
    for law in (Dense(draft), PointMass()):
        rule.verify(target, Proposal(drafts, torch.full((6,), 3), law), uniforms)
    assert all(torch.equal(a, b) for a, b in zip(given, before, strict=True))
