"""The mathematics, as pure functions of tensors: no state, no hidden randomness, nothing else of the package."""
