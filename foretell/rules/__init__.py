"""Verification rules, one a file."""
