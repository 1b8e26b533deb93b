"""Trainers: `lm` of the embedded models, `acceptance` of heads that end drafts."""
