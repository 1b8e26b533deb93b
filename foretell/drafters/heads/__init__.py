"""Drafts of such networks."""
