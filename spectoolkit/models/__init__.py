"""Language models behind `interfaces.LanguageModel`: transformers checkpoints, the embedded default, an exact toy."""
