"""What a Python program calls."""
