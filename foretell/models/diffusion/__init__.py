"""Models that fill masks."""
