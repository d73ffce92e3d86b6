"""Outputs sampled from a target, kept with what they were sampled from, so that they are never taken for others."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from spectoolkit.datatypes import Request
from spectoolkit.errors import UsageError
from spectoolkit.frames import read_frame, write_frame

FINISH_REASONS = ("stop_id", "stop_string", "length")


@dataclass(frozen=True)
class Trajectories:
    """One output per request.

    Attributes:
        requests: R requests.
        outputs: R outputs, each drawn from the target at its request's sampling parameters and cut as a request is cut:
            at a stop id (kept) or at max_new_tokens.
        finish_reasons: R, as in `Completion`.
    """

    requests: tuple[Request, ...]
    outputs: tuple[tuple[int, ...], ...]
    finish_reasons: tuple[str, ...]


def save(path: Path, trajectories: Trajectories, identity: Mapping[str, Any]) -> None:
    """Write a Parquet file: request_id, prompt, tokens, finish_reason; `identity` goes into its metadata.

    `identity` names everything that the law of the outputs depends on: the target, its sampling parameters, where
    outputs end, and the prompts.
    """
    frame = pd.DataFrame(
        {
            "request_id": [request.id for request in trajectories.requests],
            "prompt": [list(request.prompt) for request in trajectories.requests],
            "tokens": [list(output) for output in trajectories.outputs],
            "finish_reason": list(trajectories.finish_reasons),
        }
    )
    frame.attrs = {"identity": json.dumps(identity, sort_keys=True, default=str)}
    write_frame(path, frame)


def load(path: Path, requests: Sequence[Request], identity: Mapping[str, Any], vocab_size: int) -> Trajectories:
    """Read what `save` wrote, for the same requests sampled from the same target at the same setting.

    Raises:
        UsageError: not such a file, another identity (the differing keys are listed), other requests, or an output that
            its request cannot have.
    """
    try:
        frame = read_frame(path, is_sealed=False)
        found = dict(json.loads(frame.attrs["identity"]))
        rows = {
            str(row["request_id"]): (
                tuple(map(int, row["prompt"])),
                tuple(map(int, row["tokens"])),
                str(row["finish_reason"]),
            )
            for row in frame.to_dict("records")
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            "trajectories: expected a file with the columns request_id, prompt, tokens and finish_reason, and with the "
            f"setting that they were sampled at, got {path} ({type(error).__name__}: {error})"
        ) from error
    wanted = json.loads(json.dumps(identity, sort_keys=True, default=str))
    differing = sorted(key for key in wanted.keys() | found.keys() if wanted.get(key) != found.get(key))
    if differing:
        listed = "; ".join(f"{key}: {found.get(key)!r} in the file, {wanted.get(key)!r} asked for" for key in differing)
        raise UsageError(
            "trajectories: a replay is exact only on text that was sampled from this target at this setting, but "
            f"{path} differs in {listed}"
        )
    for request in requests:
        if request.id not in rows:
            raise UsageError(f"trajectories: expected an output of every request in {path}, none of {request.id!r}")
        prompt, tokens, reason = rows[request.id]
        if prompt != request.prompt:
            raise UsageError(f"trajectories: the prompt of {request.id!r} in {path} is another one")
        is_full = len(tokens) == request.max_new_tokens
        if not (
            1 <= len(tokens) <= request.max_new_tokens
            and all(0 <= token < vocab_size for token in tokens)
            and reason in FINISH_REASONS
            and (is_full or reason != "length")
        ):
            raise UsageError(
                f"trajectories: expected 1 to {request.max_new_tokens} token ids below {vocab_size} and one of the "
                f"reasons {', '.join(FINISH_REASONS)} for {request.id!r} in {path} (length only at the limit), got "
                f"{len(tokens)} tokens {tokens[:3]}... and {reason!r}"
            )
    chosen = [rows[request.id] for request in requests]
    return Trajectories(tuple(requests), tuple(tokens for _, tokens, _ in chosen), tuple(why for _, _, why in chosen))
