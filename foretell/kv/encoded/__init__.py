"""Rows that an encoder makes of contexts."""
