"""Logits processors."""
