"""Layouts in which others publish their heads.

A layout is one file: its class says what folders it knows and maps their tensors to our networks.
"""
