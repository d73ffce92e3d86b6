"""One file per way to propose draft tokens."""

from spectoolkit.drafters.model import ModelDrafter
from spectoolkit.drafters.ngram import NGramDrafter

__all__ = ["ModelDrafter", "NGramDrafter"]
