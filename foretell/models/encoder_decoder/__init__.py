"""Models that read a source."""
