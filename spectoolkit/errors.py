"""The errors that a caller can act on. Everything else that escapes is a defect of this package."""


class UsageError(ValueError):
    """Bad input of the user.

    The message names the argument, what was expected and what came. The command line exits with code 2.
    """


class RunError(RuntimeError):
    """A run that cannot go on although its input was acceptable (disk full, a model that emits NaN).

    The command line exits with code 1; whatever was finished before stays on disk.
    """


class InvalidLogitsError(RunError):
    """A row of logits from which no distribution follows: NaN, +inf, no finite entry, or overflow on the way."""

    def __init__(self, model: str, request_id: str, position: int) -> None:
        self.model, self.request_id, self.position = model, request_id, position
        super().__init__(
            f"{model} logits of request {request_id!r} at position {position} (0 is its first prompt token) give no "
            "distribution: expected at least one finite logit, no NaN or +inf, and no overflow by penalties, bias or "
            "temperature"
        )


class ContractError(RuntimeError):
    """A drafter, verifier or model broke the contract of `interfaces`; the message says which and how."""
