"""The rows that a model keeps of a text, and who may change them."""
