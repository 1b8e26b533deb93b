"""Toys and recorders for laws of one's own."""
