"""One file per way to propose draft tokens."""

from spectoolkit.drafters.model import ModelDrafter
from spectoolkit.drafters.ngram import NGramDrafter
from spectoolkit.drafters.none import NoDrafter

__all__ = ["ModelDrafter", "NGramDrafter", "NoDrafter"]
