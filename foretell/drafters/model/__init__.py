"""Drafts of a draft model."""
