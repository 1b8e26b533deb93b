"""Drafts of parts of the target."""
