""".gguf files."""
