"""Rules that decide how much of a proposal becomes output, one file each."""

from spectoolkit.verifiers.block import Block
from spectoolkit.verifiers.coupled import Coupled
from spectoolkit.verifiers.match import Match
from spectoolkit.verifiers.rejection import Rejection
from spectoolkit.verifiers.typical import Typical

__all__ = ["Block", "Coupled", "Match", "Rejection", "Typical"]
