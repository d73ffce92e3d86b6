"""Training draft heads: text in, a head and its measured acceptance out."""
