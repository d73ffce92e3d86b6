"""The law of what each lossy rule emits, integrated exactly: the one it states, and the target's where lossless."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from spectoolkit.functional.acceptance import TYPICAL_TOLERANCE, overlap, typical_threshold
from spectoolkit.interfaces import Verifier
from spectoolkit.verifiers import Lenient, Match, Mixture, Rejection, Relaxed, Threshold, Typical
from tests.helpers.enumerate import (
    Cuts,
    Table,
    argmax_table,
    constant_table,
    cumulated,
    cut_table,
    emission,
    law_of,
    random_table,
    residual_weights,
    target_weights,
    top_m_law,
    total_variation,
    without_draft_weights,
)

EXACT = 1e-12
SEEN = 1e-3
SIZES = [(2, 3), (3, 2), (4, 2)]
ROWS = [(1, 2), (3, 4), (5, 6)]
EVERY_WEIGHT = cumulated(target_weights, residual_weights, without_draft_weights)

RowLaw = Callable[[Tensor, Tensor], Tensor]
"""Target row p [V] and draft row q [V] -> the law [V] of the token at a drafted position."""


def argmax_of(p: Tensor) -> Tensor:
    return one_hot(p.argmax(), len(p)).to(p.dtype)


def normalised(weights: Tensor) -> Tensor:
    return weights / weights.sum()


def accept_or(p: Tensor, q: Tensor, accept: Tensor, recovered: list[Tensor]) -> Tensor:
    """Law of a position that accepts x ~ q with probability `accept[x]`, else draws from `recovered[x]`."""
    rest = [q[x] * (1 - accept[x]) * recovered[x] for x in range(len(p)) if q[x] * (1 - accept[x]) > 0]
    return q * accept + sum(rest, torch.zeros_like(p))


def law_of_threshold(rule: Threshold) -> RowLaw:
    def law(p: Tensor, q: Tensor) -> Tensor:
        accept = torch.where(p >= rule.threshold_single, 1, (p / rule.threshold_acc).clamp(max=1))
        others = [p * (torch.arange(len(p)) != x) / (1 - p[x]) for x in range(len(p))]
        return accept_or(p, q, accept, others)

    return law


def law_of_lenient(rule: Lenient) -> RowLaw:
    def law(p: Tensor, q: Tensor) -> Tensor:
        kept = torch.minimum(p / rule.lenience, q)
        missing = (p - q).clamp(min=0)
        return kept + (1 - kept.sum()) * (normalised(missing) if missing.sum() > 0 else missing)

    return law


def law_of_mixture(rule: Mixture) -> RowLaw:
    return lambda p, q: (1 - rule.draft_weight) * p + rule.draft_weight * q


def law_of_relaxed(rule: Relaxed) -> RowLaw:
    def law(p: Tensor, q: Tensor) -> Tensor:
        first = p.argsort(descending=True)[: rule.top_n]
        is_top = torch.zeros_like(p).index_fill(0, first, 1)
        return accept_or(p, q, is_top * (p >= p.max() - rule.delta), [argmax_of(p)] * len(p))

    return law


def law_of_medusa(rule: Typical) -> RowLaw:
    def law(p: Tensor, q: Tensor) -> Tensor:
        accept = p > typical_threshold(p, rule.epsilon, rule.delta) * (1 + TYPICAL_TOLERANCE)
        return accept_or(p, q, accept.to(p.dtype), [argmax_of(p)] * len(p))

    return law


def cuts_of(rule: Verifier) -> Cuts:
    """Where the rule's test of a draft changes."""

    def cuts(p: Tensor, q: Tensor, x: int) -> Tensor:
        match rule:
            case Threshold():
                return p[x : x + 1] / rule.threshold_acc
            case Lenient():
                return p[x : x + 1] / (rule.lenience * q[x])
            case Mixture():
                return ((1 - rule.draft_weight) * p[x : x + 1] + rule.draft_weight * q[x]) / q[x]
        return p[:0]

    return cuts


def by_rows(target: Table, draft: Table, law: RowLaw, bonus: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """The model whose rows are `law` of both models' rows, and behind K drafts `bonus` of the target's."""

    def rows(of_target: Tensor, of_draft: Tensor) -> Tensor:
        vocab_size = of_target.shape[-1]
        pairs = zip(of_target.reshape(-1, vocab_size), of_draft.reshape(-1, vocab_size), strict=True)
        return torch.stack([law(p, q) for p, q in pairs]).view_as(of_target)

    last = target[-1].reshape(-1, target[-1].shape[-1])
    return [
        *(rows(p, q) for p, q in zip(target, draft, strict=False)),
        torch.stack([bonus(p) for p in last]).view_as(target[-1]),
    ]


LOSSY: list[tuple[Verifier, RowLaw, Callable[[Tensor], Tensor]]] = [
    *(
        (rule, law_of_threshold(rule), lambda p: p)
        for rule in (Threshold(threshold_acc=0.7), Threshold(threshold_single=0.4), Threshold(0.3, 0.5))
    ),
    *((rule, law_of_lenient(rule), lambda p: p) for rule in (Lenient(0.5), Lenient(0.9), Lenient(0.01))),
    *((rule, law_of_mixture(rule), lambda p: p) for rule in (Mixture(0.1), Mixture(0.5), Mixture(1.0))),
    *((rule, law_of_relaxed(rule), argmax_of) for rule in (Relaxed(2, 0.3), Relaxed(3, 1.0), Relaxed(1, 0.0))),
    *((rule, law_of_medusa(rule), argmax_of) for rule in (Typical(recovery="medusa"), Typical(0.5, 0.9, "medusa"))),
]
RULES = [rule for rule, _, _ in LOSSY]
CASES = pytest.mark.parametrize(("rule", "law", "bonus"), [pytest.param(*case, id=repr(case[0])) for case in LOSSY])


@pytest.mark.parametrize(("vocab_size", "num_drafts"), SIZES)
@CASES
def test_every_position_has_the_law_that_is_stated(
    rule: Verifier, law: RowLaw, bonus: Callable[[Tensor], Tensor], vocab_size: int, num_drafts: int
) -> None:
    """Context by context: drafted positions by rows of both models, behind them the target's; sampled drafts."""
    far = 0.0
    for one, other in ROWS:
        target, draft = random_table(one, vocab_size, num_drafts + 1), random_table(other, vocab_size, num_drafts)
        stated = by_rows(target, draft, law, bonus)
        emitted = emission(target, draft, draft, rule, cuts_of(rule), EVERY_WEIGHT, continued_by=stated)
        assert total_variation(emitted.law, law_of(stated)) <= EXACT
        for depth in range(num_drafts + 1):
            # Rows of the emitted law after every context that it gives a probability.
            upto = emitted.law.reshape(*emitted.law.shape[: depth + 1], -1).sum(-1)
            reached = upto.sum(-1)
            rows = upto[reached > 0] / reached[reached > 0][..., None]
            assert torch.allclose(rows, stated[depth][reached > 0], rtol=0, atol=1e-9)
        far = max(far, total_variation(emitted.law, law_of(target)))
    assert not rule.is_lossless
    assert far > SEEN


@pytest.mark.parametrize(("vocab_size", "num_drafts"), SIZES)
@CASES
def test_a_certain_draft_is_the_draft_row_that_is_one_hot(
    rule: Verifier, law: RowLaw, bonus: Callable[[Tensor], Tensor], vocab_size: int, num_drafts: int
) -> None:
    target, draft = random_table(3, vocab_size, num_drafts + 1), random_table(4, vocab_size, num_drafts)
    certain = argmax_table(draft)
    stated = by_rows(target, certain, law, bonus)
    for reported in (None, certain):
        emitted = emission(target, certain, reported, rule, cuts_of(rule), EVERY_WEIGHT, continued_by=stated)
        assert total_variation(emitted.law, law_of(stated)) <= EXACT


@pytest.mark.parametrize("rule", [rule for rule in RULES if isinstance(rule, Lenient | Mixture)], ids=repr)
@pytest.mark.parametrize("num_kept", [1, 2, 4])
def test_sparse_rows_say_the_same_as_whole_ones(rule: Verifier, num_kept: int) -> None:
    target, draft = random_table(5, 4, 3), cut_table(random_table(6, 4, 2), num_kept)
    sparse = emission(target, draft, draft, rule, cuts_of(rule), EVERY_WEIGHT, law_of_rows=top_m_law(num_kept))
    whole = emission(target, draft, draft, rule, cuts_of(rule), EVERY_WEIGHT)
    assert total_variation(sparse.law, whole.law) <= EXACT
    assert torch.allclose(sparse.reaches, whole.reaches, atol=EXACT)


AT_LOSSLESS: list[Verifier] = [Threshold(), Threshold(1, 1), Lenient(1.0), Mixture(0.0)]


@pytest.mark.parametrize(("vocab_size", "num_drafts"), [*SIZES, (3, 3)])
@pytest.mark.parametrize("rule", AT_LOSSLESS, ids=repr)
@pytest.mark.parametrize("is_sampled", [True, False])
def test_a_lossless_setting_is_exact(rule: Verifier, is_sampled: bool, vocab_size: int, num_drafts: int) -> None:
    target, draft = random_table(7, vocab_size, num_drafts + 1), random_table(8, vocab_size, num_drafts)
    drawn_from = draft if is_sampled else argmax_table(draft)
    assert rule.is_lossless
    emitted = emission(target, drawn_from, drawn_from, rule, cuts_of(rule), EVERY_WEIGHT)
    assert total_variation(emitted.law, law_of(target)) <= EXACT
    as_known = Match() if isinstance(rule, Threshold) else Rejection()
    known = emission(target, drawn_from, drawn_from, as_known, emit_cuts=EVERY_WEIGHT)
    assert torch.allclose(emitted.reaches, known.reaches, atol=EXACT)


@pytest.mark.parametrize("rule", [Lenient(1.0), Mixture(0.0)], ids=repr)
@pytest.mark.parametrize("num_kept", [1, 2, 3])
def test_a_lossless_setting_is_exact_for_top_m_drafts(rule: Verifier, num_kept: int) -> None:
    target, draft = random_table(5, 4, 3), cut_table(random_table(6, 4, 2), num_kept)
    emitted = emission(target, draft, draft, rule, cuts_of(rule), EVERY_WEIGHT, law_of_rows=top_m_law(num_kept))
    assert total_variation(emitted.law, law_of(target)) <= EXACT


def test_sampled_drafts_judged_as_certain_ones_accept_the_product_of_the_rows() -> None:
    """The control that must pass: no draft row is read, neither for the test nor for the residual."""
    target, draft = constant_table([0.5, 0.3, 0.2], 2), constant_table([0.2, 0.3, 0.5], 1)
    emitted = emission(target, draft, draft, Threshold(), cuts_of(Threshold()), EVERY_WEIGHT)
    assert emitted.reaches.item() == pytest.approx(0.29)
    assert emitted.first_token == pytest.approx([0.5, 0.3, 0.2], abs=EXACT)


@pytest.mark.parametrize(
    ("rule", "acceptance", "out"),
    [
        # p = [.5, .3, .2], x ~ q = [.2, .3, .5]; rejection accepts .7, and its residual is id 0.
        (
            Threshold(threshold_acc=0.5),
            0.58,
            [0.2 + 0.12 * 5 / 7 + 0.3 * 5 / 8, 0.18 + 0.3 * 3 / 8, 0.2 + 0.12 * 2 / 7],
        ),
        (Threshold(threshold_single=0.3), 0.6, [0.2 + 0.4 * 5 / 8, 0.3 + 0.4 * 3 / 8, 0.1]),
        (Lenient(0.5), 0.9, [0.3, 0.3, 0.4]),
        (Lenient(0.4), 1.0, [0.2, 0.3, 0.5]),
        (Mixture(0.5), 0.85, [0.35, 0.3, 0.35]),
        (Relaxed(2, 0.2), 0.5, [0.7, 0.3, 0.0]),
        (Relaxed(2, 0.1), 0.2, [1.0, 0.0, 0.0]),
        (Relaxed(3, 0.3), 1.0, [0.2, 0.3, 0.5]),
    ],
)
def test_the_textbook_pair_by_numbers(rule: Verifier, acceptance: float, out: list[float]) -> None:
    target, draft = constant_table([0.5, 0.3, 0.2], 2), constant_table([0.2, 0.3, 0.5], 1)
    emitted = emission(target, draft, draft, rule, cuts_of(rule), EVERY_WEIGHT)
    assert emitted.reaches.item() == pytest.approx(acceptance)
    assert emitted.first_token == pytest.approx(out)


@pytest.mark.parametrize("weight", [0.0, 0.2, 0.7, 1.0])
def test_a_mixture_accepts_by_the_distance_that_is_left(weight: float) -> None:
    target, draft = random_table(9, 4, 2), random_table(10, 4, 1)
    emitted = emission(target, draft, draft, Mixture(weight), cuts_of(Mixture(weight)), EVERY_WEIGHT)
    distance = 1 - overlap(target[0], draft[0]).item()
    assert emitted.reaches.item() == pytest.approx(1 - (1 - weight) * distance)
    assert total_variation(emitted.law.sum(-1), target[0]) == pytest.approx(weight * distance, abs=EXACT)


@pytest.mark.parametrize("seed", range(10))
def test_leniency_bounds_how_probable_a_token_becomes(seed: int) -> None:
    target, draft = random_table(20 + seed, 4, 2), random_table(40 + seed, 4, 1)
    for lenience in (0.3, 0.8):
        rule = Lenient(lenience)
        out = emission(target, draft, draft, rule, cuts_of(rule), EVERY_WEIGHT).law.sum(-1)
        assert (out <= target[0] / lenience + EXACT).all()


@CASES
def test_the_rule_says_the_law_of_its_rows(rule, law, bonus):
    """`emitted_probs` and `bonus_probs`, of sampled drafts and of point masses, against the laws proven above."""
    generator = torch.Generator().manual_seed(3)
    target = torch.softmax(3 * torch.randn(40, 4, dtype=torch.float64, generator=generator), -1)
    draft = torch.softmax(3 * torch.randn(40, 4, dtype=torch.float64, generator=generator), -1)
    certain = one_hot(draft.argmax(-1), 4).double()
    for q in (draft, certain):
        expected = torch.stack([law(*pair) for pair in zip(target, q, strict=True)])
        torch.testing.assert_close(rule.emitted_probs(target, q), expected, rtol=1e-12, atol=1e-12)
    behind = getattr(rule, "bonus_probs", lambda p: p)(target)
    torch.testing.assert_close(behind, torch.stack([bonus(p) for p in target]))
