"""One file per way to propose draft tokens."""

from spectoolkit.drafters.chains import ChainsDrafter
from spectoolkit.drafters.coupled import CoupledDrafter
from spectoolkit.drafters.model import ModelDrafter
from spectoolkit.drafters.ngram import NGramDrafter
from spectoolkit.drafters.none import NoDrafter
from spectoolkit.drafters.suffix import SuffixDrafter
from spectoolkit.drafters.top_m import TopMDrafter

__all__ = [
    "ChainsDrafter",
    "CoupledDrafter",
    "ModelDrafter",
    "NGramDrafter",
    "NoDrafter",
    "SuffixDrafter",
    "TopMDrafter",
]
