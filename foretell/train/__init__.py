"""Trainers: `lm` makes the embedded model pair from plain text."""
