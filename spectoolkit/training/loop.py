"""The training loop of a draft head ("training-time test", Li et al., arXiv 2503.01840, section 3.2).

Every position is the start of a step of `num_depths` drafts: the first reads the target's features, the others the
head's own states, exactly as they will when drafting, with the output's tokens for drafts. The loss of a batch is

    sum_j decay^j mean_n L(p_n, q_{n,j}),

p_n the target's law (soft targets, renormalised over the draft ids), q_{n,j} the head's at depth j, both at a
temperature that changes from step to step, and L cross-entropy, joined by the probability of acceptance for the later
part of the training (`training.loss`).
"""

from __future__ import annotations

import math
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from spectoolkit.errors import UsageError
from spectoolkit.files import replace
from spectoolkit.models.causal_lm import CausalLM
from spectoolkit.models.eagle3 import Eagle3
from spectoolkit.training.data import Batch, Hidden, HiddenCache
from spectoolkit.training.loss import draft_loss, is_counted


@dataclass(frozen=True)
class Schedule:
    """How a head is trained.

    Attributes:
        num_steps: batches; the learning rate rises over the first `num_warmup` and falls to a tenth along a cosine.
        learning_rate: of Muon for matrices (its update scaled to the size of AdamW's) and of AdamW for the rest.
        num_depths: drafts of a step that are trained.
        depth_decay: weight of a depth over that of the one before.
        temperatures: of both laws in the loss, one after the other over the steps.
        acceptance_weight: w of `training.loss.draft_loss`, from the share `acceptance_from` of the steps on; 0 before.
        trains_output: whether the output layer is trained, or keeps the target's rows.
        checkpoint_every: steps after which everything is written to disk.
    """

    num_steps: int
    num_warmup: int
    learning_rate: float
    num_depths: int
    depth_decay: float
    temperatures: tuple[float, ...]
    acceptance_weight: float
    acceptance_from: float
    trains_output: bool
    checkpoint_every: int
    seed: int

    def __post_init__(self) -> None:
        for name in ("num_steps", "num_depths", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise UsageError(f"study.{name}: expected an integer >= 1, got {getattr(self, name)!r}")
        if not self.learning_rate > 0 or not 0 < self.depth_decay <= 1 or self.num_warmup < 0:
            raise UsageError(
                "study: expected learning_rate > 0, 0 < depth_decay <= 1 and num_warmup >= 0, got "
                f"{self.learning_rate!r}, {self.depth_decay!r} and {self.num_warmup!r}"
            )
        if not self.temperatures or not all(temperature > 0 for temperature in self.temperatures):
            raise UsageError(f"study.temperatures: expected numbers > 0, got {list(self.temperatures)!r}")
        if self.acceptance_weight < 0 or not 0 <= self.acceptance_from <= 1:
            raise UsageError(
                "study: expected acceptance_weight >= 0 and acceptance_from in [0, 1], got "
                f"{self.acceptance_weight!r} and {self.acceptance_from!r}"
            )

    def weight(self, step: int) -> float:
        """Weight of acceptance in the loss of a step, counted from 0."""
        return self.acceptance_weight if step >= self.acceptance_from * self.num_steps else 0.0

    def temperature(self, step: int) -> float:
        """Temperature of the laws in the loss of a step, counted from 0."""
        return self.temperatures[step % len(self.temperatures)]

    def rate(self, step: int) -> float:
        """Learning rate of a step, counted from 0."""
        if step < self.num_warmup:
            return self.learning_rate * (step + 1) / self.num_warmup
        done = (step - self.num_warmup) / max(1, self.num_steps - self.num_warmup)
        return self.learning_rate * (0.55 + 0.45 * math.cos(math.pi * done))


def train(
    draft: Eagle3,
    target: CausalLM,
    batches: Sequence[Batch],
    hidden: HiddenCache,
    schedule: Schedule,
    checkpoint: Path,
    identity: dict[str, Any],
    evaluate: Callable[[], dict[str, float]],
) -> list[dict[str, float]]:
    """Train `draft.head` in place; a run that was interrupted goes on from its last checkpoint.

    Args:
        batches: walked through in an order that depends on the schedule's seed, again and again.
        checkpoint: file of everything that a later run needs to go on.
        identity: what must be equal for a checkpoint to be this training's.
        evaluate: called before the first step, at every checkpoint and behind the last step; its numbers are logged.

    Returns:
        The log: a row per step that was logged (`step`, `seconds`, `loss_1` .. per depth) or evaluated.

    Raises:
        UsageError: the checkpoint is that of another training.
        RunError: it cannot be written.
    """
    head = draft.head
    head.lm_head.weight.requires_grad_(schedule.trains_output)
    optimizers = _optimizers(head, schedule)
    output = target.output_rows[head.draft_ids]
    identity = {**identity, **asdict(schedule), "temperatures": list(schedule.temperatures)}
    log: list[dict[str, float]] = []
    begin, spent = 0, 0.0
    if checkpoint.exists():
        begin, spent, log = _load(checkpoint, head, optimizers, identity)
    else:
        log.append({"step": 0, "seconds": 0.0, **evaluate()})
    started = time.perf_counter()
    losses = torch.zeros(schedule.num_depths, device=draft.device)
    head.train()
    for step in range(begin, schedule.num_steps):
        epoch, place = divmod(step, len(batches))
        order = list(range(len(batches)))
        random.Random(f"{schedule.seed}/{epoch}").shuffle(order)
        batch = batches[order[place]].to(draft.device)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = schedule.rate(step)
        temperature, weight = schedule.temperature(step), schedule.weight(step)
        of_depths = _losses(draft, batch, hidden.get(batch), output, schedule.num_depths, temperature, weight)
        weights = schedule.depth_decay ** torch.arange(schedule.num_depths, device=draft.device)
        (of_depths * weights).sum().backward()
        nn.utils.clip_grad_norm_([p for p in head.parameters() if p.requires_grad], 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        losses += of_depths.detach()
        done = step + 1
        is_last = done == schedule.num_steps
        if done % LOG_EVERY == 0 or is_last:
            seconds = spent + time.perf_counter() - started
            num = (done - 1) % LOG_EVERY + 1
            means = (losses / num).tolist()
            row = {"step": done, "seconds": round(seconds, 1)}
            row |= {f"loss_{j}": round(loss, 4) for j, loss in enumerate(means, 1)}
            losses.zero_()
            if done % schedule.checkpoint_every == 0 or is_last:
                row |= evaluate()
                head.train()
            log.append(row)
            left = seconds / done * (schedule.num_steps - done)
            numbers = " ".join(f"{key} {value:.3f}" for key, value in row.items() if key not in ("step", "seconds"))
            print(f"step {done}/{schedule.num_steps}  {numbers}  {left / 60:.0f} min left", file=sys.stderr, flush=True)
            if done % schedule.checkpoint_every == 0 or is_last:
                seconds = spent + time.perf_counter() - started
                _save(checkpoint, head, optimizers, identity, done, seconds, log)
    head.eval()
    return log


LOG_EVERY = 20


def _losses(
    draft: Eagle3,
    batch: Batch,
    hidden: Hidden,
    output: Tensor,
    num_depths: int,
    temperature: float,
    acceptance_weight: float,
) -> Tensor:
    """[num_depths] mean loss per counted position; `output` [V', D] are the target's output rows."""
    with torch.autocast(draft.device.type, torch.bfloat16, enabled=hidden.last.dtype == torch.bfloat16):
        past = draft.unroll_start(batch.prompts, hidden.of_prompts)
        states, _ = draft.unroll(past, batch.inputs, hidden.of_inputs, num_depths)
        with torch.no_grad():
            target_probs = torch.softmax((hidden.last @ output.T).float() / temperature, dim=-1)
        found = []
        for depth, of_depth in enumerate(states):
            counted = is_counted(batch.tokens, depth)
            logits = draft.head.logits(of_depth[counted]) / temperature
            found.append(
                draft_loss(logits, target_probs[counted], acceptance_weight).sum() / counted.sum().clamp(min=1)
            )
    return torch.stack(found)


def _optimizers(head: nn.Module, schedule: Schedule) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the head, AdamW for norms and the output layer."""
    trained = [(name, p) for name, p in head.named_parameters() if p.requires_grad]
    matrices = [p for name, p in trained if p.dim() == 2 and not name.startswith("lm_head")]
    others = [p for name, p in trained if p.dim() != 2 or name.startswith("lm_head")]
    rate = schedule.learning_rate
    return [
        torch.optim.Muon(matrices, lr=rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=rate, weight_decay=0.0, betas=(0.9, 0.95)),
    ]


def _save(
    path: Path,
    head: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    identity: dict[str, Any],
    step: int,
    seconds: float,
    log: list[dict[str, float]],
) -> None:
    state = {
        "identity": identity,
        "step": step,
        "seconds": seconds,
        "log": log,
        "head": head.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
    }
    replace(path, lambda temporary: torch.save(state, temporary))


def _load(
    path: Path, head: nn.Module, optimizers: Sequence[torch.optim.Optimizer], identity: dict[str, Any]
) -> tuple[int, float, list[dict[str, float]]]:
    state = torch.load(path, weights_only=True)
    differing = sorted(
        key for key in identity.keys() | state["identity"].keys() if identity.get(key) != state["identity"].get(key)
    )
    if differing:
        raise UsageError(
            f"{path} is the checkpoint of a training with another {', '.join(differing)}; say folder=... for this one, "
            "or delete the checkpoint to begin anew"
        )
    head.load_state_dict(state["head"])
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    return state["step"], state["seconds"], state["log"]
