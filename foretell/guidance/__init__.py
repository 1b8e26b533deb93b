"""Logits made of several models or layers."""
