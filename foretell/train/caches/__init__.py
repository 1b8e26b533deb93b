"""What cache policies need of a model: gates, channels, merged heads, compressors."""
