"""Heads that draft, and rows and adapters that are trained as heads are."""
