"""Rules and drafters that are wrong on purpose: each must be seen, and by the law that its fault has."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

from spectoolkit.datatypes import Dense, DraftNoise, PointMass, Proposal, Request, SamplingParams, Uniforms
from spectoolkit.drafters import ModelDrafter
from spectoolkit.drafters.negative_controls import ArgmaxAsSampled, NoiseByPosition, TopMReportedRaw, TopPOnDraftOnly
from spectoolkit.errors import ContractError, UsageError
from spectoolkit.functional.noise import position_keys, position_uniforms
from spectoolkit.functional.warp import warp
from spectoolkit.interfaces import Verifier
from spectoolkit.models.tabular import TabularModel
from spectoolkit.replay import check_replayable
from spectoolkit.sampling import SamplingState
from spectoolkit.verifiers import Block, Match, Rejection, Threshold
from spectoolkit.verifiers.negative_controls import (
    AcceptedByTarget,
    BonusByArgmax,
    RecoveredFromTarget,
    RecoveredWithDraftNoise,
    RecoveredWithoutDraft,
    Reseeded,
    WholeBlock,
)
from tests.helpers.enumerate import (
    Table,
    argmax_table,
    block_cells,
    cells_of,
    constant_table,
    cumulated,
    cut_table,
    emission,
    law_of,
    random_table,
    ratio_cuts,
    residual_weights,
    target_weights,
    top_m_law,
    total_variation,
    without_draft_weights,
)
from tests.helpers.toys import WRONG_VERIFIERS, run, toy_pair, wrong_drafters
from tests.unit.test_lossy_laws import RowLaw, accept_or, argmax_of, by_rows, normalised

NO_MODEL: Any = None
EXACT = 1e-12
SEEN = 1e-3
SIZES = [(2, 3), (3, 2), (4, 2)]
EVERY_WEIGHT = cumulated(target_weights, residual_weights, without_draft_weights)


def every_accept_cut(p: Tensor, q: Tensor, x: int) -> Tensor:
    return torch.cat([ratio_cuts(p, q, x), p[x : x + 1]])


def missing(p: Tensor, q: Tensor) -> Tensor:
    return normalised((p - q).clamp(min=0))


def without(p: Tensor, x: int) -> Tensor:
    return normalised(p * (torch.arange(len(p)) != x))


def law_of_accepted_by_target(p: Tensor, q: Tensor) -> Tensor:
    return accept_or(p, q, p, [missing(p, q)] * len(p))


def law_of_recovered_from_target(p: Tensor, q: Tensor) -> Tensor:
    return accept_or(p, q, (p / q).clamp(max=1), [p] * len(p))


def law_of_recovered_without_draft(p: Tensor, q: Tensor) -> Tensor:
    return accept_or(p, q, (p / q).clamp(max=1), [without(p, x) for x in range(len(p))])


BY_ROWS: list[tuple[Verifier, RowLaw, Callable[[Tensor], Tensor]]] = [
    (AcceptedByTarget(), law_of_accepted_by_target, lambda p: p),
    (RecoveredFromTarget(), law_of_recovered_from_target, lambda p: p),
    (RecoveredWithoutDraft(), law_of_recovered_without_draft, lambda p: p),
]


@pytest.mark.parametrize(("vocab_size", "num_drafts"), SIZES)
@pytest.mark.parametrize(("rule", "law", "bonus"), [pytest.param(*case, id=repr(case[0])) for case in BY_ROWS])
@pytest.mark.parametrize("is_sparse", [False, True])
def test_a_fault_of_every_position_has_its_law(
    rule: Verifier,
    law: RowLaw,
    bonus: Callable[[Tensor], Tensor],
    is_sparse: bool,
    vocab_size: int,
    num_drafts: int,
) -> None:
    target, draft = random_table(13, vocab_size, num_drafts + 1), random_table(14, vocab_size, num_drafts)
    stated = by_rows(target, draft, law, bonus)
    handed = top_m_law(vocab_size) if is_sparse else Dense
    emitted = emission(
        target, draft, draft, rule, every_accept_cut, EVERY_WEIGHT, law_of_rows=handed, continued_by=stated
    )
    assert total_variation(emitted.law, law_of(stated)) <= EXACT
    if vocab_size > 2 or not isinstance(rule, RecoveredWithoutDraft):  # of two tokens, the other one is the residual
        assert total_variation(emitted.law, law_of(target)) > SEEN
    if num_drafts == 2:
        continued = emission(target, draft, draft, rule, every_accept_cut, EVERY_WEIGHT, law_of_rows=handed)
        assert total_variation(continued.law, law_of(target)) > SEEN


@pytest.mark.parametrize(
    ("rule", "acceptance", "out"),
    [
        (AcceptedByTarget(), 0.29, [0.81, 0.09, 0.1]),
        (RecoveredFromTarget(), 0.7, [0.35, 0.39, 0.26]),
        (RecoveredWithoutDraft(), 0.7, [0.3875, 0.4125, 0.2]),
        (BonusByArgmax(), 0.7, [0.5, 0.3, 0.2]),
        (WholeBlock(), 0.7, [0.5, 0.3, 0.2]),
        (Reseeded(), 0.7, [0.5, 0.3, 0.2]),
    ],
)
def test_the_textbook_pair_by_numbers(rule: Verifier, acceptance: float, out: list[float]) -> None:
    target, draft = constant_table([0.5, 0.3, 0.2], 2), constant_table([0.2, 0.3, 0.5], 1)
    emitted = emission(target, draft, draft, rule, every_accept_cut, EVERY_WEIGHT)
    assert emitted.reaches.item() == pytest.approx(acceptance)
    assert emitted.first_token == pytest.approx(out)


@pytest.mark.parametrize("rule", [AcceptedByTarget(), RecoveredWithoutDraft()], ids=repr)
def test_what_would_be_right_for_a_point_mass_does_not_take_one(rule: Verifier) -> None:
    assert PointMass not in rule.laws
    target, certain = random_table(15, 4, 3), argmax_table(random_table(16, 4, 2))
    emitted = emission(target, certain, None, rule, every_accept_cut, EVERY_WEIGHT)
    assert total_variation(emitted.law, law_of(target)) <= EXACT


@pytest.mark.parametrize("rule", [RecoveredFromTarget(), BonusByArgmax(), WholeBlock(), Reseeded()], ids=repr)
def test_the_others_are_seen_with_point_masses_too(rule: Verifier) -> None:
    target, certain = random_table(15, 3, 3), argmax_table(random_table(16, 3, 2))
    assert PointMass in rule.laws
    cells = joint_cells if isinstance(rule, Reseeded | WholeBlock) else None
    emitted = emission(target, certain, None, rule, every_accept_cut, EVERY_WEIGHT, cells)
    assert total_variation(emitted.law, law_of(target)) > SEEN


@pytest.mark.parametrize(("vocab_size", "num_drafts"), SIZES)
def test_a_bonus_by_argmax_is_wrong_behind_accepted_drafts_only(vocab_size: int, num_drafts: int) -> None:
    target, draft = random_table(13, vocab_size, num_drafts + 1), random_table(14, vocab_size, num_drafts)
    emitted = emission(target, draft, draft, BonusByArgmax(), every_accept_cut, EVERY_WEIGHT)
    assert total_variation(emitted.law.sum(-1), law_of(target[:-1])) <= EXACT
    # The last token is the argmax as often as all drafts were accepted behind the context, else it follows p.
    right = emission(target, draft, draft, Rejection(), every_accept_cut, EVERY_WEIGHT)
    stated = law_of(target).clone()
    for tokens, mass in right.blocks.items():
        if len(tokens) == num_drafts + 1:
            stated[tokens] -= mass
            stated[tokens[:-1]] += mass * argmax_of(target[-1][tokens[:-1]])
    assert total_variation(emitted.law, stated) <= EXACT
    assert total_variation(emitted.law, law_of(target)) > SEEN


def joint_cells(target_rows: Tensor, draft_rows: Tensor, drafts: Sequence[int]) -> list[Tensor]:
    """For rules that use the first number of each kind everywhere: all cuts there, and the joint ratio."""
    size = len(drafts)
    cells = cells_of(target_rows, draft_rows, drafts, every_accept_cut, EVERY_WEIGHT)
    ratios = torch.stack([p[x] / q[x] for p, q, x in zip(target_rows, draft_rows, drafts, strict=False)])
    joint = ratios.prod().clamp(max=1)[None]
    accept, emit = torch.cat([*cells[:size], joint]).unique(), torch.cat(cells[size:]).unique()
    return [accept, *cells[1:size], emit, *cells[size + 1 :]]


@pytest.mark.parametrize(("vocab_size", "num_drafts"), [(2, 2), (2, 3), (3, 2)])
def test_a_whole_block_has_its_law(vocab_size: int, num_drafts: int) -> None:
    target, draft = random_table(13, vocab_size, num_drafts + 1), random_table(14, vocab_size, num_drafts)
    p, q = law_of(target[:-1]), law_of(draft)
    kept = torch.minimum(p, q)
    recovered = law_of([missing(target[0], draft[0]), *target[1:]])
    stated = kept[..., None] * target[-1] + (1 - kept.sum()) * recovered
    emitted = emission(target, draft, draft, WholeBlock(), cells=joint_cells)
    assert total_variation(emitted.law, stated) <= EXACT
    assert emitted.reaches.tolist() == pytest.approx([kept.sum().item()] * num_drafts)
    assert total_variation(stated, law_of(target)) > SEEN


def test_noise_that_is_seeded_again_leaves_a_draft_its_own_law_behind_a_doubtful_one() -> None:
    """p = [1/3, 2/3], q = [2/3, 1/3]: a 0 is accepted below 1/2, and then any second draft is: the token follows q."""
    target, draft = constant_table([1 / 3, 2 / 3], 3), constant_table([2 / 3, 1 / 3], 2)
    emitted = emission(target, draft, draft, Reseeded(), cells=joint_cells)
    two = emitted.law.sum(-1)
    assert two.flatten().tolist() == pytest.approx([2 / 9, 1 / 9, 2 / 9, 4 / 9])
    assert total_variation(two, law_of(target[:2])) == pytest.approx(1 / 9)
    assert emitted.first_token == pytest.approx([1 / 3, 2 / 3])


@pytest.mark.parametrize(("vocab_size", "num_drafts"), [(2, 2), (2, 3), (3, 2)])
def test_noise_that_is_seeded_again_is_seen(vocab_size: int, num_drafts: int) -> None:
    target, draft = random_table(13, vocab_size, num_drafts + 1), random_table(14, vocab_size, num_drafts)
    assert total_variation(emission(target, draft, draft, Rejection(), cells=joint_cells).law, law_of(target)) <= EXACT
    emitted = emission(target, draft, draft, Reseeded(), cells=joint_cells)
    assert total_variation(emitted.law, law_of(target)) > SEEN
    assert total_variation(emitted.law.flatten(1).sum(-1), target[0]) <= EXACT


# Drafters


def drawn_and_reported(drafter: ModelDrafter, row: Tensor) -> tuple[Tensor, Tensor]:
    """The law that the drafter's token has, by inversion at the middle of every cell, and the row that it reports."""
    thousandths = torch.arange(1, 1000, dtype=torch.float64) / 1000
    cuts = torch.cat([row.new_tensor([0, 1]), row.cumsum(0), thousandths]).clamp(max=1).unique()
    law = torch.zeros_like(row)
    middles = (cuts[1:] + cuts[:-1]) / 2
    noise = DraftNoise(middles[:, None], torch.zeros(len(middles), 1, dtype=torch.int64))
    tokens, (reported,) = drafter.sample(row.expand(len(middles), -1), noise, 0)
    return law.index_add(0, tokens, cuts.diff()), reported[0]


def by_drafter(drafter: ModelDrafter, table: Table) -> tuple[list[Tensor], list[Tensor]]:
    """What the drafter draws from and what it reports, of a model's rows."""
    size = table[0].shape[-1]
    found = [[drawn_and_reported(drafter, row) for row in rows.reshape(-1, size)] for rows in table]
    return tuple(  # type: ignore[return-value]
        [torch.stack([pair[side] for pair in some]).view_as(rows) for some, rows in zip(found, table, strict=True)]
        for side in (0, 1)
    )


def test_an_argmax_reported_as_sampled_by_numbers() -> None:
    drawn, reported = by_drafter(ArgmaxAsSampled(NO_MODEL, 3, ratio=1.0), constant_table([0.6, 0.3, 0.1], 1))
    emitted = emission(constant_table([0.5, 0.3, 0.2], 2), drawn, reported, Rejection())
    assert emitted.reaches.item() == pytest.approx(5 / 6)
    assert emitted.first_token == pytest.approx([5 / 6, 0, 1 / 6])


@pytest.mark.parametrize("rule", [Rejection(), Block()], ids=repr)
@pytest.mark.parametrize(("vocab_size", "num_drafts"), SIZES)
def test_an_argmax_reported_as_sampled_is_seen(rule: Verifier, vocab_size: int, num_drafts: int) -> None:
    target, draft = random_table(15, vocab_size, num_drafts + 1), random_table(16, vocab_size, num_drafts)
    drawn, reported = by_drafter(ArgmaxAsSampled(NO_MODEL, vocab_size, ratio=1.0), draft)
    cells = block_cells if rule == Block() else None
    assert law_of(drawn).equal(law_of(argmax_table(draft)))
    assert law_of(reported).equal(law_of(draft))
    assert total_variation(emission(target, drawn, reported, rule, cells=cells).law, law_of(target)) > SEEN
    for blind in (Match(), Threshold()):  # rules that do not read the row take no harm
        emitted = emission(target, drawn, reported, blind, every_accept_cut, EVERY_WEIGHT)
        assert total_variation(emitted.law, law_of(target)) <= EXACT


def test_a_cut_row_reported_raw_is_seen() -> None:
    target, draft = random_table(15, 4, 3), random_table(16, 4, 2)
    drafter = TopMReportedRaw(NO_MODEL, 4, ratio=1.0, keep=2)
    drawn, reported = by_drafter(drafter, draft)
    assert law_of(reported).equal(law_of(draft))
    cut = cut_table(draft, 2)
    for some, rows in zip(drawn, cut, strict=True):
        assert total_variation(some, rows) <= 0.001 * some.numel()  # the cells of the cut row are not all found
    for rule, cells in ((Rejection(), None), (Block(), block_cells)):
        assert total_variation(emission(target, cut, cut, rule, cells=cells).law, law_of(target)) <= EXACT
        assert total_variation(emission(target, cut, reported, rule, cells=cells).law, law_of(target)) > SEEN


def test_a_cut_row_reported_raw_by_numbers() -> None:
    p, raw = [2 / 3, 1 / 3, 0.0], torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    drafter = TopMReportedRaw(NO_MODEL, 3, ratio=1.0, keep=2)
    drawn, reported = by_drafter(drafter, [raw])
    assert drawn[0].tolist() == pytest.approx([0.625, 0.375, 0.0])
    emitted = emission(constant_table(p, 2), drawn, reported, Rejection())
    assert emitted.reaches.item() == pytest.approx(1.0)
    assert emitted.first_token == pytest.approx([0.625, 0.375, 0.0])


def state(top_p: float = 1.0) -> SamplingState:
    return SamplingState.of(["r"], [SamplingParams(top_p=top_p)], [(0,)], [[]], 4)


def test_top_p_on_the_draft_only_leaves_the_nucleus() -> None:
    """Lossless for the target's own law, but not for the one that was asked for: id 3 is emitted in 1 of 20 steps."""
    raw_p, raw_q = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.4, 0.3, 0.22, 0.08]], dtype=torch.float64)
    drafter = TopPOnDraftOnly(NO_MODEL, 4, ratio=1.0, top_p=0.9)
    q = drafter.draft_probs(raw_q.log()[None, None], state(), torch.empty(1, 0, dtype=torch.int64))[0, 0]
    assert q.tolist() == pytest.approx([10 / 23, 7.5 / 23, 5.5 / 23, 0])
    p = warp(raw_p.log()[None, None], torch.ones(1), None, torch.tensor([0.9], dtype=torch.float64), None)[0, 0]
    emitted = emission([raw_p, raw_p.expand(4, 4)], [q], [q], Rejection())
    assert emitted.reaches.item() == pytest.approx(0.8848, abs=5e-5)
    assert emitted.first_token == pytest.approx(raw_p.tolist())
    assert total_variation(emitted.law.sum(-1), p) == pytest.approx(0.05)


def test_top_p_on_the_draft_only_asks_for_one_on_no_other_side() -> None:
    for arguments in ({}, {"top_p": 1.0}):
        with pytest.raises(UsageError, match=r"drafter\.top_p: expected a number below 1"):
            TopPOnDraftOnly(NO_MODEL, 4, ratio=1.0, **arguments)
    drafter = TopPOnDraftOnly(NO_MODEL, 4, ratio=1.0, top_p=0.9)
    noise = DraftNoise(torch.zeros(1, 1, dtype=torch.float64))
    with pytest.raises(UsageError, match=r"sampling\.top_p: expected 1"):
        drafter.propose(None, state(top_p=0.9), [1], noise)


# Noise


def test_the_number_of_a_position_is_uniform_and_its_own() -> None:
    seeds, requests = torch.arange(3), torch.tensor([7, 7, 8])
    keys = position_keys(seeds, requests, torch.zeros(3, dtype=torch.int64), 4000)
    numbers = position_uniforms(keys)
    assert numbers.shape == (3, 4000)
    assert 0 <= numbers.min() <= numbers.max() < 1
    counts = torch.histc(numbers.flatten(), 20, 0, 1)
    assert ((counts - 600).abs() < 6.2 * (600 * 0.95) ** 0.5).all()  # false alarm below 1e-8
    assert numbers.flatten().unique().numel() == numbers.numel()
    later = position_keys(seeds, requests, torch.tensor([5, 0, 1000]), 10)
    assert torch.equal(position_uniforms(later)[0], numbers[0, 5:15])
    assert torch.equal(position_uniforms(later)[2], numbers[2, 1000:1010])


def test_a_position_that_is_drafted_again_gets_the_same_token() -> None:
    drafter = NoiseByPosition(NO_MODEL, 4, ratio=1.0)
    row = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    seeds, requests = torch.arange(4000), torch.zeros(4000, dtype=torch.int64)
    first = DraftNoise(torch.rand(4000, 3).double(), position_keys(seeds, requests, torch.full((4000,), 5), 3))
    again = DraftNoise(torch.rand(4000, 3).double(), position_keys(seeds, requests, torch.full((4000,), 6), 3))
    rows = row.expand(4000, 4)
    tokens, (reported,) = drafter.sample(rows, first, 1)
    assert torch.equal(drafter.sample(rows, again, 0)[0], tokens)
    assert not torch.equal(drafter.sample(rows, again, 1)[0], tokens)
    assert torch.equal(reported, rows)
    share = torch.bincount(tokens, minlength=4) / 4000
    assert ((share - row).abs() < 6.2 * (row * (1 - row) / 4000) ** 0.5).all()
    with pytest.raises(ContractError, match="shared noise"):
        drafter.sample(rows, DraftNoise(torch.rand(4000, 3).double()), 0)


def certain_table(draft: Table, drafts: Sequence[int]) -> list[Tensor]:
    """The model that drafts just these tokens."""
    rows = [torch.zeros_like(some) for some in draft]
    for some, token in zip(rows, drafts, strict=True):
        some[..., token] = 1
    return rows


def law_with_reused_drafts(p: Sequence[float], q: Sequence[float], rule: Verifier) -> Tensor:
    """Law [V, V] of the first two tokens with K = 2 and rows p and q everywhere, if a later step drafts a position anew
    with the same noise: as q is the same, that is the same token."""
    size = len(p)
    target, draft = constant_table(p, 3), constant_table(q, 2)
    cells = block_cells if rule == Block() else None
    law = torch.zeros(size, size, dtype=torch.float64)
    weights = torch.tensor(q, dtype=torch.float64)

    def of_step(drafts: tuple[int, int]) -> dict[tuple[int, ...], Tensor]:
        return emission(target, certain_table(draft, drafts), draft, rule, cells=cells).blocks

    step = {(a, b): of_step((a, b)) for a in range(size) for b in range(size)}
    for (a, b), blocks in step.items():
        for tokens, mass in blocks.items():
            share = weights[a] * weights[b] * mass
            if len(tokens) > 1:
                law[tokens[:2]] += share
                continue
            # The next step begins one position later, whose draft was b and is b again; the draft behind it is new.
            for c in range(size):
                for further, much in step[b, c].items():
                    law[(*tokens, *further[:1])] += share * weights[c] * much
    return law


@pytest.mark.parametrize(("p", "q"), [([1 / 3, 2 / 3], [2 / 3, 1 / 3]), ([0.5, 0.3, 0.2], [0.2, 0.3, 0.5])])
def test_draft_noise_reused_by_a_later_step_harms_block_verification(p: list[float], q: list[float]) -> None:
    right = law_of(constant_table(p, 2))
    by_block, by_rejection = (law_with_reused_drafts(p, q, rule) for rule in (Block(), Rejection()))
    assert by_block.sum().item() == pytest.approx(1)
    assert total_variation(by_block, right) > SEEN
    assert total_variation(by_rejection, right) <= EXACT


def test_draft_noise_reused_in_the_loop_has_the_law_of_the_enumeration() -> None:
    """Chi-square tests of the first two tokens; the right one has false alarm 1e-9."""
    p, q, num = [1 / 3, 2 / 3], [2 / 3, 1 / 3], 12000
    target, draft = (TabularModel(torch.tensor(row, dtype=torch.float64)) for row in (p, q))
    asked = [Request(id=f"r{i}", prompt=(0,), max_new_tokens=4) for i in range(num)]
    made = {"by position": NoiseByPosition(draft, 2, ratio=1.0), "by step": ModelDrafter(draft, 2, ratio=1.0)}
    laws = {"wrong": law_with_reused_drafts(p, q, Block()), "right": law_of(constant_table(p, 2))}
    chance = {}
    for how, drafter in made.items():
        counts = Counter(done.tokens[:2] for done in run(target, drafter, Block(), asked, 2, 2000).values())
        observed = [counts[a, b] for a in range(2) for b in range(2)]
        for name, law in laws.items():
            chance[how, name] = stats.chisquare(observed, num * law.flatten().numpy()).pvalue
    assert chance["by position", "wrong"] > 1e-9 > chance["by position", "right"]
    assert chance["by step", "right"] > 1e-9 > chance["by step", "wrong"]


def test_a_recovered_token_with_the_drafts_noise_by_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    p = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    q = p.flip(0)
    # Every cut (tenths of q and p, ratios 2/3 and 1/4, residual 3/4) is a multiple of 1/60: the grid is exact.
    grid = (torch.arange(60, dtype=torch.float64) + 0.5) / 60
    for place in ("drafters", "verifiers"):
        monkeypatch.setattr(f"spectoolkit.{place}.negative_controls.position_uniforms", lambda keys: grid[keys])
    numbers = torch.arange(60)
    keys, accept, fresh = torch.cartesian_prod(numbers, numbers, numbers[::6]).T
    size = len(keys)
    shared = torch.stack([keys, keys], -1)

    def first_token(drafter: ModelDrafter, rule: Verifier) -> list[float]:
        tokens, (rows,) = drafter.sample(q.expand(size, 4), DraftNoise(grid[fresh][:, None], shared), 0)
        proposal = Proposal(tokens[:, None], torch.ones(size, dtype=torch.int64), Dense(rows[:, None]))
        uniforms = Uniforms(grid[accept][:, None], grid[fresh][:, None].expand(size, 2), shared)
        emitted = rule.verify(p.expand(size, 2, 4), proposal, uniforms).emitted[:, 0]
        return (torch.bincount(emitted, minlength=4) / size).tolist()

    by_position = NoiseByPosition(NO_MODEL, 4, ratio=1.0)
    wrong = [0.3125, 0.3875, 0.2, 0.1]
    assert first_token(by_position, RecoveredWithDraftNoise()) == pytest.approx(wrong, abs=1e-6)
    # Either half alone is right: the other side's number is fresh.
    tenths = ModelDrafter(NO_MODEL, 4, ratio=1.0)
    assert first_token(tenths, RecoveredWithDraftNoise()) == pytest.approx(p.tolist(), abs=1e-6)


def test_the_bonus_has_fresh_noise_and_the_noise_must_be_there() -> None:
    rows = torch.tensor([[[0.5, 0.5], [0.5, 0.5]]], dtype=torch.float64)
    proposal = Proposal(torch.tensor([[0]]), torch.tensor([1]), PointMass())
    for emit, token in ((0.1, 0), (0.9, 1)):
        uniforms = Uniforms(
            torch.tensor([[0.1]]).double(), torch.tensor([[0.5, emit]]).double(), torch.tensor([[1, 2]])
        )
        assert RecoveredWithDraftNoise().verify(rows, proposal, uniforms).emitted.tolist() == [[0, token]]
    with pytest.raises(ContractError, match="shared noise"):
        RecoveredWithDraftNoise().verify(rows, proposal, Uniforms(uniforms.accept, uniforms.emit))


# By name only


def test_wrong_parts_say_so_and_nothing_exports_them() -> None:
    import spectoolkit.drafters
    import spectoolkit.verifiers

    _, draft = toy_pair()
    wrong = [*WRONG_VERIFIERS.values(), *wrong_drafters(draft, 5).values()]
    assert all(part.is_negative_control for part in wrong)
    exported = {*spectoolkit.drafters.__all__, *spectoolkit.verifiers.__all__}
    assert not exported & {type(part).__name__ for part in wrong}
    assert not any(rule.is_lossless for rule in WRONG_VERIFIERS.values())


def test_wrong_drafters_are_not_replayed() -> None:
    _, draft = toy_pair()
    for drafter in wrong_drafters(draft, 5).values():
        with pytest.raises(UsageError, match="wrong on purpose"):
            check_replayable(drafter, Rejection(), is_greedy=False)
