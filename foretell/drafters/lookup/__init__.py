"""Drafts that are looked up."""
