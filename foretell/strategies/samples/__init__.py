"""Whole answers, compared or refined."""
