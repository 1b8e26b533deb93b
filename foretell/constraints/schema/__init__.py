"""JSON schemas in the words of the grammar compiler."""
