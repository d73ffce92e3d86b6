"""Whether a drafter and a verifier emit the target's law: proven on toys, tested through the whole engine."""
