"""What a head predicts on text that it was not trained on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from spectoolkit.functional.acceptance import overlap
from spectoolkit.metrics import ratio_interval
from spectoolkit.models.causal_lm import CausalLM
from spectoolkit.models.eagle3 import Eagle3
from spectoolkit.training.data import Batch, hidden_of
from spectoolkit.training.loss import is_counted

_ROWS = 128
MEASURES = ("overlap", "agreement", "argmax_acceptance")


@torch.no_grad()
def held_out(
    draft: Eagle3, target: CausalLM, batches: Sequence[Batch], temperature: float, num_depths: int
) -> pd.DataFrame:
    """Teacher-forced acceptance at every depth, one row per example and depth.

    Columns: `example`, `depth` (from 1), `tokens` counted, and sums over them of `overlap` (sum_x min(p, q), both laws
    at `temperature`), `agreement` (whether p and q have the same most probable token) and `argmax_acceptance` (p of q's
    most probable token: the acceptance of an argmax draft).
    """
    output = target.output_rows
    rows: list[dict[str, float]] = []
    num_before = 0
    draft.head.eval()
    for one in batches:
        batch = one.to(draft.device)
        hidden = hidden_of(target, batch)
        with torch.autocast(draft.device.type, torch.bfloat16, enabled=hidden.last.dtype == torch.bfloat16):
            past = draft.unroll_start(batch.prompts, hidden.of_prompts)
            states, _ = draft.unroll(past, batch.inputs, hidden.of_inputs, num_depths)
        counted = [is_counted(batch.tokens, depth) for depth in range(num_depths)]
        found = torch.zeros(num_depths, len(MEASURES), *batch.tokens.shape, dtype=torch.float64)
        for places in counted[0].nonzero().split(_ROWS):
            at = (places[:, 0], places[:, 1])
            kept = (at[0].cpu(), at[1].cpu())
            target_probs = _probs(hidden.last[at] @ output.T, temperature)
            best = target_probs.argmax(-1)
            for depth in range(num_depths):
                with torch.autocast(draft.device.type, torch.bfloat16, enabled=hidden.last.dtype == torch.bfloat16):
                    logits = draft.wide_logits(states[depth][at])
                draft_probs = _probs(logits, temperature)
                drafted = draft_probs.argmax(-1)
                found[depth, 0][kept] = overlap(target_probs, draft_probs).cpu()
                found[depth, 1][kept] = (drafted == best).double().cpu()
                found[depth, 2][kept] = target_probs.gather(-1, drafted[:, None])[:, 0].double().cpu()
        for depth in range(num_depths):
            mask = counted[depth].cpu()
            sums = torch.where(mask, found[depth], 0).sum(-1)
            for i in range(len(batch.prompts)):
                row = {"example": num_before + i, "depth": depth + 1, "tokens": int(mask[i].sum())}
                rows.append(row | {name: float(sums[m, i]) for m, name in enumerate(MEASURES)})
        num_before += len(batch.prompts)
    return pd.DataFrame(rows)


def means(frame: pd.DataFrame, clusters: Sequence[str]) -> pd.DataFrame:
    """Mean per token of every measure by depth, with a 95 % bootstrap interval over `clusters`, one per example."""
    rows = []
    for depth, part in frame.groupby("depth"):
        names = [str(clusters[int(i)]) for i in part["example"].tolist()]
        tokens = part["tokens"].tolist()
        row: dict[str, Any] = {"depth": depth, "tokens": sum(tokens)}
        for name in MEASURES:
            row[name], (row[f"{name}_low"], row[f"{name}_high"]) = ratio_interval(part[name].tolist(), tokens, names)
        rows.append(row)
    return pd.DataFrame(rows)


def _probs(logits: Tensor, temperature: float) -> Tensor:
    return torch.softmax(logits.float() / temperature, dim=-1)
