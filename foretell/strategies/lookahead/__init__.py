"""Tokens chosen by what would follow."""
