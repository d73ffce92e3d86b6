from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from spectoolkit.datatypes import PAD, Dense, DraftLaw, PointMass, Proposal, SharedNoise, TopM, Uniforms, Verdict
from spectoolkit.errors import ContractError, UsageError
from spectoolkit.functional.draw import draw, gumbel_max
from spectoolkit.functional.warp import warp
from spectoolkit.interfaces import Verifier
from spectoolkit.verifiers import Block, Coupled, Lenient, Match, Mixture, Rejection, Relaxed, Threshold, Typical
from tests.helpers.toys import WRONG_VERIFIERS

LARGEST = 1 - 2.0**-53
LOSSLESS_SETTINGS: list[Verifier] = [Lenient(1.0), Mixture(0.0), Threshold()]
RULES: list[Verifier] = [
    Rejection(),
    Block(),
    Match(),
    Coupled(),
    Typical(),
    Typical(recovery="argmax"),
    Typical(recovery="first_only"),
    Typical(recovery="medusa"),
    Relaxed(),
    Relaxed(top_n=2, delta=0.1),
    Threshold(threshold_single=0.4, threshold_acc=0.7),
    Lenient(),
    Mixture(draft_weight=0.3),
    *LOSSLESS_SETTINGS,
    *WRONG_VERIFIERS.values(),
]
BY_RATIO: list[Verifier] = [Rejection(), Block(), Lenient(), Lenient(1.0), Mixture(), Mixture(0.0)]


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
    uniforms = Uniforms(
        tensor([accept or [0.5] * size]).view(1, size),
        tensor([emit or [0.5] * (size + 1)]),
        torch.arange(size + 1)[None],
    )
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
    keys = torch.randint(-(2**63), 2**63 - 1, (batch, num_drafts + 1), generator=generator)
    return target, draft, drafts, Uniforms(uniform(batch, num_drafts), uniform(batch, num_drafts + 1), keys)


def laws_of(rule: Verifier, draft: Tensor) -> list[DraftLaw]:
    """All laws that the rule judges, of drafts from these rows."""
    probs, ids = draft.topk(draft.shape[-1], dim=-1)
    return [law for law in (PointMass(), Dense(draft), TopM(ids, probs), SharedNoise()) if type(law) in rule.laws]


def target_token(rule: Verifier, rows: Tensor, uniforms: Uniforms, position: int) -> Tensor:
    """What the rule draws from the target rows [B, V] at a position when nothing is drafted there."""
    if isinstance(rule, Relaxed) or rule in (Typical(recovery="medusa"), WRONG_VERIFIERS["bonus_by_argmax"]):
        return rows.argmax(-1)
    if rule == Coupled():
        assert uniforms.shared is not None
        return gumbel_max(rows, uniforms.shared[:, position])
    return draw(rows, uniforms.emit[:, position])


def test_laws_and_losslessness_are_class_attributes() -> None:
    for rule in RULES:
        if rule in WRONG_VERIFIERS.values():
            assert not rule.is_lossless
            assert getattr(rule, "is_negative_control")  # noqa: B009
            continue
        assert not hasattr(rule, "is_negative_control")
        assert rule.laws is vars(type(rule))["laws"]
        assert rule.laws == (PointMass, Dense, TopM, *(() if rule.keeps_law else (SharedNoise,)))
    assert all(rule.is_lossless for rule in (Rejection, Block, Match, Coupled))
    assert not Typical.is_lossless
    assert not Relaxed.is_lossless
    assert {type(rule) for rule in RULES if rule.keeps_law} >= {Rejection, Block, Lenient, Mixture}
    assert Rejection() == Rejection()
    assert Typical() == Typical(epsilon=0.09, delta=0.3, recovery="sample")


def test_losslessness_depends_on_the_setting() -> None:
    assert all(rule.is_lossless for rule in LOSSLESS_SETTINGS)
    for rule in (Lenient(0.999), Mixture(0.001), Threshold(0.999, 1.0), Threshold(1.0, 0.999)):
        assert not rule.is_lossless


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


@pytest.mark.parametrize("draft_rows", [None, [[0.0, 1.0]], [[0.5, 0.5]]])
@pytest.mark.parametrize(
    "rule",
    [Rejection(), Block(), Match(), Coupled(), *LOSSLESS_SETTINGS, Lenient(), Threshold(0.1, 0.1), Relaxed(delta=1.0)],
    ids=repr,
)
def test_the_uniform_zero_does_not_accept_a_token_the_target_excludes(
    rule: Verifier, draft_rows: list[list[float]] | None
) -> None:
    certain = [1.0, 0.0]
    verdict = judge_one(rule, [certain] * 2, [1], draft_rows, accept=[0.0], emit=[0.0, 0.0])
    assert verdict.num_accepted.tolist() == [0]
    assert verdict.emitted.tolist() == [[0, PAD]]
    assert verdict.judged_alone.tolist() == [[False]]
    # In the middle of a block too, where a longer prefix could still pass.
    rows = draft_rows and draft_rows * 3
    for drafts, accepted in [([1, 0, 0], 0), ([0, 1, 0], 1), ([0, 0, 1], 2)]:
        if rows and rows[0][0] == 0:
            continue
        verdict = judge_one(rule, [certain] * 4, drafts, rows, accept=[0.0] * 3, emit=[0.0] * 4)
        assert verdict.num_accepted.tolist() == [accepted]
        assert verdict.emitted.tolist() == [[0] * (accepted + 1) + [PAD] * (3 - accepted)]


def test_a_token_cut_by_min_p_is_always_rejected() -> None:
    row = tensor([[[0.6, 0.3, 0.1]] * 2]).log()
    p = warp(row, tensor([1.0]), None, None, tensor([0.2]))[0].tolist()
    for accept in (0.0, 0.5, LARGEST):
        for rule in (Rejection(), Block()):
            assert judge_one(rule, p, [2], accept=[accept]).num_accepted.tolist() == [0]


@pytest.mark.parametrize("rule", [Rejection(), Block(), Lenient(1.0), Mixture(0.0)], ids=repr)
def test_an_empty_residual_draws_from_the_target(rule: Verifier) -> None:
    verdict = judge_one(rule, [[0.5, 0.5]] * 2, [0], [[0.5005, 0.5]], accept=[0.9995], emit=[0.75, 0.5])
    assert verdict.emitted.tolist() == [[1, PAD]]
    verdict = judge_one(rule, [[1.0 - 1e-9, 0.0]] * 2, [0], accept=[LARGEST], emit=[0.75, 0.5])
    assert verdict.emitted.tolist() == [[0, PAD]]


@pytest.mark.parametrize("temperature", [0.0, 1e-3, 0.7, 1.0, 2.0])
@pytest.mark.parametrize("num_drafts", [1, 2, 5, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rule", BY_RATIO, ids=repr)
def test_a_model_that_drafts_for_itself_is_always_accepted(
    temperature: float, num_drafts: int, dtype: torch.dtype, rule: Verifier
) -> None:
    generator = torch.Generator().manual_seed(num_drafts)
    logits = 4 * torch.randn(16, num_drafts + 1, 50, generator=generator, dtype=dtype)
    probs = warp(logits, torch.full((16,), temperature, dtype=torch.float64), None, None, None)
    drafts = draw(probs[:, :-1], torch.rand(16, num_drafts, generator=generator, dtype=torch.float64))
    proposal = Proposal(drafts, torch.full((16,), num_drafts), Dense(probs[:, :-1]))
    for accept in (0.0, 0.5, LARGEST):
        numbers = torch.full((16, num_drafts + 1), accept, dtype=torch.float64)
        uniforms = Uniforms(numbers[:, 1:], numbers)
        verdict = rule.verify(probs, proposal, uniforms)
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
@pytest.mark.parametrize("rule", BY_RATIO, ids=repr)
def test_a_draft_its_own_law_excludes_is_a_broken_contract(rule: Verifier, drafts: list[int]) -> None:
    with pytest.raises(ContractError, match="probability 0"):
        judge_one(rule, [[0.5, 0.3, 0.2]] * 2, drafts, [[0.5, 0.0, 0.5]])
    law = TopM(torch.tensor([[[0, 2]]]), tensor([[[0.5, 0.5]]]))
    proposal = Proposal(torch.tensor([drafts]), torch.tensor([1]), law)
    with pytest.raises(ContractError, match="probability 0"):
        rule.verify(tensor([[[0.5, 0.3, 0.2]] * 2]), proposal, Uniforms(tensor([[0.5]]), tensor([[0.5, 0.5]])))


def test_padding_inside_a_point_mass_proposal_is_a_broken_contract() -> None:
    with pytest.raises(ContractError, match="probability 0"):
        judge_one(Rejection(), [[0.5, 0.5]] * 2, [PAD])


@pytest.mark.parametrize("rule", BY_RATIO, ids=repr)
def test_a_rule_refuses_a_law_it_does_not_know(rule: Verifier) -> None:
    class Foreign:
        pass

    foreign: DraftLaw = Foreign()  # pyright: ignore[reportAssignmentType]
    target, _, drafts, uniforms = random_case(0)
    for law in (foreign, SharedNoise()):
        with pytest.raises(ContractError, match=type(law).__name__):
            rule.verify(target, Proposal(drafts, torch.full((6,), 3), law), uniforms)


def test_the_larger_vocabulary_may_be_on_either_side() -> None:
    p, q = [0.4, 0.3, 0.2, 0.1], [0.5, 0.3, 0.2]
    for rule in (Rejection(), Block(), Lenient(1.0), Mixture(0.0)):
        verdict = judge_one(rule, [p, p], [0], [q], accept=[0.81], emit=[0.3, 0.5])
        assert verdict.emitted.tolist() == [[3, PAD]]
        verdict = judge_one(rule, [q, q], [3], [p], accept=[0.0], emit=[0.3, 0.5])
        assert verdict.emitted.tolist() == [[0, PAD]]
        verdict = judge_one(rule, [q] * 3, [0, 3], [p, p], accept=[0.0, 0.0], emit=[0.3] * 3)
        assert verdict.emitted.tolist() == [[0, 0, PAD]]
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


# Coupled


def test_coupled_emits_the_same_text_whatever_is_drafted() -> None:
    target, _, _, uniforms = random_case(1)
    assert uniforms.shared is not None
    own = gumbel_max(target, uniforms.shared)
    drafts = own[:, :-1].clone()
    drafts[:, 1] = (drafts[:, 1] + 1) % 11
    for law in (SharedNoise(), PointMass()):
        verdict = Coupled().verify(target, Proposal(drafts, torch.full((6,), 3), law), uniforms)
        assert torch.equal(verdict.emitted[:, :2], own[:, :2])
        assert (verdict.emitted[:, 2:] == PAD).all()
        assert verdict.judged_alone.tolist() == [[True, False, True]] * 6


def test_coupled_needs_the_shared_noise() -> None:
    target, _, drafts, uniforms = random_case(1)
    without = Uniforms(uniforms.accept, uniforms.emit)
    with pytest.raises(ContractError, match="shared noise"):
        Coupled().verify(target, Proposal(drafts, torch.full((6,), 3), SharedNoise()), without)


# Block


def test_block_judges_a_row_by_its_own_length() -> None:
    """A prefix that ends the proposal is judged by pi, the same prefix of a longer proposal by h."""
    p, q = [1 / 3, 2 / 3], [2 / 3, 1 / 3]
    # pi_1 = 1/2; S_1 = (1/6 - 2/3)+ + (1/3 - 1/3)+ = 0, so h_1 = 0.
    short = judge_one(Block(), [p, p], [0], [q], accept=[0.49])
    assert short.num_accepted.tolist() == [1]
    long = judge_one(Block(), [p] * 3, [0, 0], [q, q], accept=[0.01, 0.26])
    assert long.num_accepted.tolist() == [0]
    assert long.judged_alone.tolist() == [[True, True]]
    assert judge_one(Block(), [p] * 3, [0, 0], [q, q], accept=[0.99, 0.24]).num_accepted.tolist() == [2]


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
        ("medusa", [2, PAD, PAD, PAD], [0, 2, PAD, PAD], [0, 0, 0, 2]),
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


# Relaxed


def test_relaxed_accepts_what_is_near_the_top_and_emits_argmaxes() -> None:
    p = [0.1, 0.4, 0.3, 0.2]
    for top_n, delta, accepted in [
        (1, 1.0, [1]),
        (2, 1.0, [1, 2]),
        (3, 0.1, [1, 2]),
        (3, 0.2, [1, 2, 3]),
        (4, 0.0, [1]),
    ]:
        passing = [x for x in range(4) if judge_one(Relaxed(top_n, delta), [p, p], [x]).num_accepted.item()]
        assert passing == accepted
    for emit in (0.0, LARGEST):
        verdict = judge_one(Relaxed(2, 1.0), [p] * 3, [2, 0], emit=[emit] * 3)
        assert verdict.emitted.tolist() == [[2, 1, PAD]]
        assert judge_one(Relaxed(2, 1.0), [p] * 3, [2, 1], emit=[emit] * 3).emitted.tolist() == [[2, 1, 1]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_relaxed_takes_the_lowest_ids_of_equals_and_a_tolerance_at_the_threshold(dtype: torch.dtype) -> None:
    uniforms = Uniforms(tensor([[0.5]]), tensor([[0.5, 0.5]]))

    def passing(rule: Verifier, row: list[float]) -> list[int]:
        rows = torch.tensor([[row, row]], dtype=dtype)
        proposals = (Proposal(torch.tensor([[x]]), torch.tensor([1]), PointMass()) for x in range(len(row)))
        return [x for x, made in enumerate(proposals) if rule.verify(rows, made, uniforms).num_accepted.item()]

    assert passing(Relaxed(2, 1.0), [0.25] * 4) == [0, 1]
    assert passing(Relaxed(2, 0.0), [0.2, 0.4, 0.4]) == [1, 2]
    assert passing(Relaxed(3, 0.3), [0.6, 0.3, 0.1]) == [0, 1]  # .6 - .3 is above .3 in floating point
    assert passing(Relaxed(3, 0.29), [0.6, 0.3, 0.1]) == [0]


def test_relaxed_at_temperature_zero_is_exact_match() -> None:
    certain = [[0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]
    for drafts, emitted in [([1, 0], [1, 0, 2]), ([1, 2], [1, 0, PAD]), ([0, 0], [1, PAD, PAD])]:
        assert judge_one(Relaxed(3, 1.0), certain, drafts).emitted.tolist() == [emitted]


# Threshold


def test_threshold_accepts_by_either_setting_and_recovers_without_the_draft() -> None:
    p = [0.5, 0.3, 0.2]
    for draft_rows in (None, [[0.2, 0.3, 0.5]]):
        assert judge_one(Threshold(1.0, 0.8), [p, p], [1], draft_rows, [0.374]).num_accepted.tolist() == [1]
        assert judge_one(Threshold(1.0, 0.8), [p, p], [1], draft_rows, [0.376]).num_accepted.tolist() == [0]
        assert judge_one(Threshold(0.3, 0.8), [p, p], [1], draft_rows, [LARGEST]).num_accepted.tolist() == [1]
        for emit, token in [(0.0, 0), (0.714, 0), (0.715, 2), (LARGEST, 2)]:
            verdict = judge_one(Threshold(1.0, 0.8), [p, p], [1], draft_rows, [0.376], [emit, 0.5])
            assert verdict.emitted.tolist() == [[token, PAD]]


def test_threshold_falls_back_to_the_target_where_nothing_is_left() -> None:
    verdict = judge_one(Threshold(), [[1.0 - 1e-9, 0.0]] * 2, [0], accept=[LARGEST], emit=[0.75, 0.5])
    assert verdict.emitted.tolist() == [[0, PAD]]


# Lenient and mixture


def test_lenient_accepts_below_the_widened_ratio() -> None:
    p, q = [0.5, 0.3, 0.2], [0.2, 0.3, 0.5]
    for accept, accepted in [(0.799, 1), (0.801, 0)]:  # .2 / (.5 * .5)
        verdict = judge_one(Lenient(0.5), [p, p], [2], [q], [accept], emit=[LARGEST, 0.0])
        assert verdict.num_accepted.tolist() == [accepted]
    assert verdict.emitted.tolist() == [[0, PAD]]
    assert judge_one(Lenient(0.5), [p, p], [2], None, [0.399]).num_accepted.tolist() == [1]
    assert judge_one(Lenient(0.5), [p, p], [2], None, [0.401]).num_accepted.tolist() == [0]


def test_a_mixture_accepts_below_its_ratio_and_also_what_only_the_draft_has() -> None:
    p, q = [0.5, 0.3, 0.2], [0.2, 0.3, 0.5]
    for accept, accepted in [(0.699, 1), (0.701, 0)]:  # (.5 * .2 + .5 * .5) / .5
        verdict = judge_one(Mixture(0.5), [p, p], [2], [q], [accept], emit=[LARGEST, 0.0])
        assert verdict.num_accepted.tolist() == [accepted]
    assert verdict.emitted.tolist() == [[0, PAD]]
    for draft_rows in (None, [[0.0, 1.0]]):
        for accept, emitted in [(0.299, [1, 0]), (0.301, [0, PAD])]:
            verdict = judge_one(Mixture(0.3), [[1.0, 0.0]] * 2, [1], draft_rows, [accept])
            assert verdict.emitted.tolist() == [emitted]
    assert judge_one(Mixture(1.0), [p, p], [2], [q], [LARGEST]).num_accepted.tolist() == [1]


@pytest.mark.parametrize(
    ("make", "arguments"),
    [
        (Relaxed, {"top_n": 0}),
        (Relaxed, {"top_n": 2.0}),
        (Relaxed, {"top_n": True}),
        (Relaxed, {"delta": -0.1}),
        (Relaxed, {"delta": 1.1}),
        (Relaxed, {"delta": float("nan")}),
        (Threshold, {"threshold_single": 0.0}),
        (Threshold, {"threshold_single": 1.1}),
        (Threshold, {"threshold_acc": 0.0}),
        (Threshold, {"threshold_acc": float("nan")}),
        (Lenient, {"lenience": 0.0}),
        (Lenient, {"lenience": 1.5}),
        (Lenient, {"lenience": float("nan")}),
        (Mixture, {"draft_weight": -0.1}),
        (Mixture, {"draft_weight": 1.1}),
        (Mixture, {"draft_weight": float("nan")}),
    ],
)
def test_lossy_rules_refuse_bad_parameters(make: type, arguments: dict) -> None:
    ((name, value),) = arguments.items()
    with pytest.raises(UsageError, match=rf"verifier\.{name}: expected .*, got {value!r}"):
        make(**arguments)


# Every rule


@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize("kind", [PointMass, Dense, TopM, SharedNoise])
def test_short_and_empty_proposals_among_full_ones(rule: Verifier, kind: type[DraftLaw]) -> None:
    if kind not in rule.laws:
        pytest.skip("not a law of this rule")
    target, draft, drafts, uniforms = random_case(2)

    def law_of(rows: Tensor) -> DraftLaw:
        (law,) = (law for law in laws_of(rule, rows) if isinstance(law, kind))
        return law

    lengths = torch.tensor([3, 2, 1, 0, 0, 3])
    drafts = drafts.masked_fill(torch.arange(3) >= lengths[:, None], PAD)
    assert uniforms.shared is not None
    verdict = rule.verify(target, Proposal(drafts, lengths, law_of(draft)), uniforms)
    assert (verdict.num_accepted <= lengths).all()
    assert not verdict.judged_alone[torch.arange(3) >= lengths[:, None]].any()
    for row, length in enumerate(lengths.tolist()):
        law = law_of(draft[row : row + 1, :length])
        alone = rule.verify(
            target[row : row + 1, : length + 1],
            Proposal(drafts[row : row + 1, :length], lengths[row : row + 1], law),
            Uniforms(
                uniforms.accept[row : row + 1, :length],
                uniforms.emit[row : row + 1, : length + 1],
                uniforms.shared[row : row + 1, : length + 1],
            ),
        )
        assert verdict.emitted[row].tolist() == alone.emitted[0].tolist() + [PAD] * (3 - length)
        if length == 0:
            expected = target_token(rule, target[:, 0], uniforms, 0)[row].item()
            assert verdict.emitted[row].tolist() == [expected, PAD, PAD, PAD]


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_a_step_without_any_draft_emits_one_target_token(rule: Verifier) -> None:
    target, _, _, uniforms = random_case(3)
    nothing = torch.empty(6, 0, dtype=torch.int64)
    assert uniforms.shared is not None
    for law in laws_of(rule, torch.empty(6, 0, 11)):
        verdict = rule.verify(
            target[:, :1], Proposal(nothing, torch.zeros(6, dtype=torch.int64), law),
            Uniforms(torch.empty(6, 0, dtype=torch.float64), uniforms.emit[:, :1], uniforms.shared[:, :1]),
        )  # fmt: skip
        assert torch.equal(verdict.emitted[:, 0], target_token(rule, target[:, 0], uniforms, 0))
        assert verdict.num_accepted.tolist() == [0] * 6
        assert verdict.judged_alone.shape == (6, 0)


def test_a_padded_row_beside_drafts() -> None:
    rows = tensor([[[0.1] * 10] * 3] * 2)
    proposal = Proposal(torch.tensor([[7, 8], [PAD, PAD]]), torch.tensor([2, 0]), PointMass())
    uniforms = Uniforms(torch.zeros(2, 2).double(), torch.full((2, 3), 0.55).double())
    for rule in (Rejection(), Block(), Typical()):
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

    def dirty_of(law: DraftLaw) -> DraftLaw:
        if isinstance(law, TopM):
            ids, probs = law.ids.clone(), law.probs.clone()
            ids[behind], probs[behind] = 10**6, rubbish
            return TopM(ids, probs)
        return Dense(dirty_draft) if isinstance(law, Dense) else law

    for law, dirty_law in ((law, dirty_of(law)) for law in laws_of(rule, draft)):
        clean = rule.verify(target, Proposal(drafts, lengths, law), uniforms)
        dirty = rule.verify(dirty_target, Proposal(drafts, lengths, dirty_law), uniforms)
        for name in ("num_accepted", "emitted", "judged_alone"):
            assert torch.equal(getattr(clean, name), getattr(dirty, name))


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_the_arguments_are_left_alone(rule: Verifier) -> None:
    target, draft, drafts, uniforms = random_case(5)
    assert uniforms.shared is not None
    given = (target, draft, drafts, uniforms.accept, uniforms.emit, uniforms.shared)
    before = [t.clone() for t in given]
    for law in laws_of(rule, draft):
        rule.verify(target, Proposal(drafts, torch.full((6,), 3), law), uniforms)
    assert all(torch.equal(a, b) for a, b in zip(given, before, strict=True))
