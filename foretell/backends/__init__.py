"""Who computes a model's steps, in torch's place."""
