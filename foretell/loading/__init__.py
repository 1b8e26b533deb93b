"""Models by name, folder or file."""
