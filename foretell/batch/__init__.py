"""Offline batches: a file of requests in, a file of results out. docs/batch.md explains it."""
