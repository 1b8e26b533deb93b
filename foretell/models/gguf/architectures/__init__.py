"""Architectures of .gguf files, a group a file: found by listing this folder."""
