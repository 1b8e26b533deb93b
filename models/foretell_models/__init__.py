"""The models, heads and tables that were trained for foretell, one folder each."""
