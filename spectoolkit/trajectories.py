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
from spectoolkit.files import replace


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
    replace(path, lambda temporary: frame.to_parquet(temporary, index=False))


def load(path: Path, requests: Sequence[Request], identity: Mapping[str, Any]) -> Trajectories:
    """Read what `save` wrote, for the same requests sampled from the same target at the same setting.

    Raises:
        UsageError: not such a file, another identity (the differing keys are listed), or other requests.
    """
    try:
        frame = pd.read_parquet(path)
        found = json.loads(frame.attrs["identity"])
        rows = {str(row["request_id"]): row for row in frame.to_dict("records")}
        columns = {"request_id", "prompt", "tokens", "finish_reason"} - set(frame.columns)
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(
            f"trajectories: expected a file of trajectories with the setting they were sampled at, got {path} "
            f"({type(error).__name__}: {error})"
        ) from error
    if columns:
        raise UsageError(f"trajectories: expected the columns {', '.join(sorted(columns))} in {path}")
    wanted = json.loads(json.dumps(identity, sort_keys=True, default=str))
    differing = sorted(key for key in wanted.keys() | found.keys() if wanted.get(key) != found.get(key))
    if differing:
        listed = "; ".join(f"{key}: {found.get(key)!r} in the file, {wanted.get(key)!r} asked for" for key in differing)
        raise UsageError(
            "trajectories: a replay is exact only on text that was sampled from this target at this setting, but "
            f"{path} differs in {listed}"
        )
    missing = [request.id for request in requests if request.id not in rows]
    if missing:
        raise UsageError(f"trajectories: expected an output of every request in {path}, none of {missing[0]!r}")
    for request in requests:
        if tuple(rows[request.id]["prompt"]) != request.prompt:
            raise UsageError(f"trajectories: the prompt of {request.id!r} in {path} is another one")
    return Trajectories(
        requests=tuple(requests),
        outputs=tuple(tuple(int(token) for token in rows[request.id]["tokens"]) for request in requests),
        finish_reasons=tuple(str(rows[request.id]["finish_reason"]) for request in requests),
    )
