"""spectoolkit: measure what each choice in speculative decoding costs."""

__version__ = "0.1.0"
