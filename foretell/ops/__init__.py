"""Numeric kernels: pure functions of tensors, each with a slow twin in the tests."""
