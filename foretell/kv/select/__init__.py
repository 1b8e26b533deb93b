"""Rows that are read, of all that are held."""
