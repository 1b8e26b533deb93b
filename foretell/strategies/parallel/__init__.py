"""Several tokens or models at once."""
