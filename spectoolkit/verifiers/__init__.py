"""Rules that decide how much of a proposal becomes output, one file each.

Rules that are wrong on purpose are in `negative_controls`, and are not exported here.
"""

from spectoolkit.verifiers.block import Block
from spectoolkit.verifiers.coupled import Coupled
from spectoolkit.verifiers.lenient import Lenient
from spectoolkit.verifiers.match import Match
from spectoolkit.verifiers.mixture import Mixture
from spectoolkit.verifiers.recursive import Recursive
from spectoolkit.verifiers.rejection import Rejection
from spectoolkit.verifiers.relaxed import Relaxed
from spectoolkit.verifiers.threshold import Threshold
from spectoolkit.verifiers.typical import Typical

__all__ = [
    "Block",
    "Coupled",
    "Lenient",
    "Match",
    "Mixture",
    "Recursive",
    "Rejection",
    "Relaxed",
    "Threshold",
    "Typical",
]
