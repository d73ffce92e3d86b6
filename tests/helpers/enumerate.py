"""Exact law of what a verification rule emits, on toy vocabularies.

All draft sequences are enumerated with the probability that they are drawn. For each, the unit cube of uniforms is cut
into cells on which the rule's verdict is constant, the real `verify` judges the midpoint of every cell, and the cell's
volume is the weight of what it emits. Blocks shorter than K + 1 are continued by the target's own rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spectoolkit.datatypes import Dense, DraftLaw, PointMass, Proposal, TopM, Uniforms
from spectoolkit.interfaces import Verifier

Table = Sequence[Tensor]
"""A context-dependent model: `table[d]` [V, .., V] holds the rows that follow every context of d tokens."""

Cuts = Callable[[Tensor, Tensor, int], Tensor]
"""Target row p, reported draft row q (one-hot of x for a point mass) and drafted token x -> cut points of a uniform."""


Cells = Callable[[Tensor, Tensor, Sequence[int]], list[Tensor]]
"""Target rows [K+1, V], reported rows [K, V] and drafts of a step -> edges of the cells along each uniform."""

Law = Callable[[Tensor], DraftLaw]
"""Reported rows [N, K, V] -> the draft law that says the same."""


def top_m_law(num_kept: int) -> Law:
    """Rows with at most `num_kept` positive entries, as ids and probabilities."""

    def law(rows: Tensor) -> TopM:
        probs, ids = rows.topk(num_kept, dim=-1)
        return TopM(ids, probs)

    return law


def cut_table(table: Table, num_kept: int) -> list[Tensor]:
    """The model whose rows are cut to their most probable tokens and renormalised."""
    cut = [rows.masked_fill(rows < rows.topk(num_kept, dim=-1).values[..., -1:], 0) for rows in table]
    return [rows / rows.sum(-1, keepdim=True) for rows in cut]


def random_table(seed: int, vocab_size: int, num_positions: int, sharpness: float = 1.5) -> list[Tensor]:
    """A random model with rows for contexts of 0 .. `num_positions` - 1 tokens."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(vocab_size,) * (depth + 1) for depth in range(num_positions)]
    return [torch.softmax(sharpness * torch.randn(s, generator=generator, dtype=torch.float64), -1) for s in shapes]


def constant_table(row: Sequence[float], num_positions: int, context_size: int | None = None) -> list[Tensor]:
    """A model with the same row after every context; contexts may be over another vocabulary."""
    tensor = torch.tensor(row, dtype=torch.float64)
    contexts = context_size or len(row)
    return [tensor.expand(*(contexts,) * depth, len(row)) for depth in range(num_positions)]


def argmax_table(table: Table) -> list[Tensor]:
    """The deterministic model that always says the most probable token."""
    return [torch.nn.functional.one_hot(t.argmax(-1), t.shape[-1]).to(torch.float64) for t in table]


def law_of(table: Table) -> Tensor:
    """Probability [V, .., V] of every token sequence as long as the table."""
    law = table[0]
    for rows in table[1:]:
        law = law[..., None] * rows
    return law


def total_variation(left: Tensor, right: Tensor) -> float:
    return float((left - right).abs().sum()) / 2


@dataclass(frozen=True)
class Emission:
    """Attributes:
    law: [V, .., V], the law of the first K + 1 tokens.
    reaches: [K], probability that at least 1, 2, .. drafts are accepted.
    blocks: probability of every block that one step may emit.
    """

    law: Tensor
    reaches: Tensor
    blocks: dict[tuple[int, ...], Tensor]

    @property
    def first_token(self) -> list[float]:
        return self.law.flatten(1).sum(-1).tolist()


def ratio_cuts(target_row: Tensor, draft_row: Tensor, token: int) -> Tensor:
    """Where u < p(x) / q(x) changes."""
    return target_row[token : token + 1] / draft_row[token] if token < len(target_row) else target_row[:0]


def cumulated(*weights: Callable[[Tensor, Tensor, int], Tensor]) -> Cuts:
    """Where inverse-CDF draws from any of these weights change."""

    def cuts(target_row: Tensor, draft_row: Tensor, token: int) -> Tensor:
        parts = [weight(target_row, draft_row, token) for weight in weights]
        return torch.cat([part.cumsum(0) / part.sum() for part in parts if part.sum() > 0])

    return cuts


def target_weights(target_row: Tensor, draft_row: Tensor, token: int) -> Tensor:
    return target_row


def residual_weights(target_row: Tensor, draft_row: Tensor, token: int) -> Tensor:
    shared = min(len(target_row), len(draft_row))
    rest = target_row.clone()
    rest[:shared] -= draft_row[:shared]
    return rest.clamp(min=0)


def without_draft_weights(target_row: Tensor, draft_row: Tensor, token: int) -> Tensor:
    rest = target_row.clone()
    rest[token] = 0
    return rest


def no_cuts(target_row: Tensor, draft_row: Tensor, token: int) -> Tensor:
    return target_row[:0]


def emission(
    target: Table,
    drawn_from: Table,
    reported: Table | None,
    verifier: Verifier,
    accept_cuts: Cuts = ratio_cuts,
    emit_cuts: Cuts | None = None,
    cells: Cells | None = None,
    law_of_rows: Law = Dense,
    continued_by: Table | None = None,
) -> Emission:
    """What `verifier` emits when drafts are drawn from one model and reported as another (None: as point masses).

    K is the number of positions of `drawn_from`; `target` has one more. `cells` replaces the cuts by position for rules
    whose cells depend on the whole step; `law_of_rows` is how the reported rows are handed to the rule. Blocks shorter
    than K + 1 are continued by `continued_by`, or by the target's own rows.
    """
    emit_cuts = emit_cuts or cumulated(target_weights, residual_weights)

    def by_position(target_rows: Tensor, draft_rows: Tensor, drafts: Sequence[int]) -> list[Tensor]:
        return cells_of(target_rows, draft_rows, drafts, accept_cuts, emit_cuts)

    edges_of = cells or by_position
    num_draft_tokens, vocab_size = len(drawn_from), target[0].shape[-1]
    law = torch.zeros((vocab_size,) * (num_draft_tokens + 1), dtype=torch.float64)
    reaches = torch.zeros(num_draft_tokens, dtype=torch.float64)
    blocks: dict[tuple[int, ...], Tensor] = {}
    for drafts in itertools.product(range(drawn_from[0].shape[-1]), repeat=num_draft_tokens):
        weight = torch.stack([drawn_from[i][drafts[: i + 1]] for i in range(num_draft_tokens)]).prod()
        if weight == 0:
            continue
        target_rows, draft_rows = rows_along(target, reported, drafts)
        step_edges = edges_of(target_rows, draft_rows, drafts)
        middles = torch.cartesian_prod(*[(edges[1:] + edges[:-1]) / 2 for edges in step_edges])
        volumes = torch.cartesian_prod(*[edges.diff() for edges in step_edges]).prod(-1) * weight
        reported_rows = None if reported is None else draft_rows
        emitted, num_accepted = judge(verifier, target_rows, reported_rows, drafts, middles, law_of_rows)
        reaches += torch.stack([volumes[num_accepted > i].sum() for i in range(num_draft_tokens)])
        # Blocks as numbers in base V + 1 (padding is digit 0), so that equal ones are summed in one pass.
        places = (vocab_size + 1) ** torch.arange(num_draft_tokens + 1)
        mass = torch.bincount(((emitted + 1) * places).sum(-1), weights=volumes)
        for code in mass.nonzero().flatten():
            digits = (code // places % (vocab_size + 1)).tolist()
            tokens = tuple(digit - 1 for digit in digits if digit)
            blocks[tokens] = blocks.get(tokens, 0.0) + mass[code]
    for tokens, mass in blocks.items():
        rest = [rows[tokens] for rows in (continued_by or target)[len(tokens) :]]
        law[tokens] += mass * law_of(rest) if rest else mass
    return Emission(law, reaches, blocks)


def rows_along(target: Table, reported: Table | None, drafts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Target rows [K+1, V] and reported rows [K, V] along a draft sequence; one-hot rows for point masses."""
    vocab_size = target[0].shape[-1]
    target_rows = torch.stack([rows[tuple(drafts[:i])] for i, rows in enumerate(target)])
    if reported is None:
        return target_rows, torch.nn.functional.one_hot(torch.tensor(drafts), vocab_size).to(torch.float64)
    return target_rows, torch.stack([rows[tuple(drafts[:i])] for i, rows in enumerate(reported)])


def judge(
    verifier: Verifier,
    target_rows: Tensor,
    draft_rows: Tensor | None,
    drafts: Sequence[int],
    numbers: Tensor,
    law_of_rows: Law = Dense,
) -> tuple[Tensor, Tensor]:
    """Emitted blocks [N, K+1] and accepted prefixes [N] for `numbers` [N, 2K+1]: K accept, then K+1 emit uniforms."""
    size, num_draft_tokens = len(numbers), len(drafts)
    proposal = Proposal(
        tokens=torch.tensor(drafts).expand(size, -1),
        lengths=torch.full((size,), num_draft_tokens),
        law=PointMass() if draft_rows is None else law_of_rows(draft_rows.expand(size, -1, -1)),
    )
    uniforms = Uniforms(accept=numbers[:, :num_draft_tokens], emit=numbers[:, num_draft_tokens:])
    verdict = verifier.verify(target_rows.expand(size, -1, -1), proposal, uniforms)
    return verdict.emitted, verdict.num_accepted


def cells_of(
    target_rows: Tensor, draft_rows: Tensor, drafts: Sequence[int], accept_cuts: Cuts, emit_cuts: Cuts
) -> list[Tensor]:
    """The edges of the cells along each of the 2K + 1 uniforms."""
    along = list(zip(target_rows, draft_rows, drafts, strict=False))
    bonus_row = target_rows[-1]
    cuts = [accept_cuts(*here) for here in along]
    cuts += [emit_cuts(*here) for here in along]
    cuts.append(emit_cuts(bonus_row, torch.zeros_like(bonus_row), 0))
    return [_edges(c) for c in cuts]


def _edges(cuts: Tensor) -> Tensor:
    return torch.cat([cuts.new_tensor([0, 1]), cuts[(cuts > 0) & (cuts < 1)]]).unique()


def joint_ratios(target_rows: Tensor, draft_rows: Tensor, drafts: Sequence[int]) -> list[float]:
    """pi_0 .. pi_K of block verification, in plain numbers."""
    joint = [1.0]
    for target_row, draft_row, token in zip(target_rows, draft_rows, drafts, strict=False):
        joint.append(min(1.0, joint[-1] * float(target_row[token]) / float(draft_row[token])))
    return joint


def block_cells(target_rows: Tensor, draft_rows: Tensor, drafts: Sequence[int]) -> list[Tensor]:
    """For block verification: the threshold of each prefix, and draws from p and from every scaled residual."""
    joint, size = joint_ratios(target_rows, draft_rows, drafts), len(drafts)
    left = [(joint[i] * target_rows[i] - draft_rows[i]).clamp(min=0) for i in range(size)]
    missing = [float(row.sum()) for row in left]
    thresholds = [missing[i] / (missing[i] + 1 - joint[i]) if joint[i] < 1 else 1.0 for i in range(1, size)]
    accept = [target_rows.new_tensor([threshold]) for threshold in [*thresholds, joint[size]]]
    rows_by_position = zip(target_rows[:size], left, strict=True)
    emit = [torch.cat([row.cumsum(0) / row.sum() for row in rows if row.sum() > 0]) for rows in rows_by_position]
    return [_edges(cuts) for cuts in (*accept, *emit, target_rows[-1].cumsum(0))]


def accept_cells(target_rows: Tensor, draft_rows: Tensor, drafts: Sequence[int]) -> list[Tensor]:
    """For the accepted counts of rejection and block verification alone: emitted tokens are not resolved."""
    size = len(drafts)
    ratios = cells_of(target_rows, draft_rows, drafts, ratio_cuts, no_cuts)[:size]
    both = [
        torch.cat(pair).unique() for pair in zip(ratios, block_cells(target_rows, draft_rows, drafts), strict=False)
    ]
    return [*both, *[target_rows.new_tensor([0, 1])] * (size + 1)]
