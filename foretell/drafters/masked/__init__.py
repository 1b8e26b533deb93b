"""Drafts of models that fill masks."""
