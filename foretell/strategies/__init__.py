"""Strategies other than speculation, one a file."""
