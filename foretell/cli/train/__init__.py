"""Train the models that foretell needs."""
