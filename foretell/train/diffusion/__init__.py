"""Models that fill masks, and filters of their blocks."""
