"""Rows that are dropped."""
