"""What a model is: one adapter a file."""
