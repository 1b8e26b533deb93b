"""Which rows of a masked text are computed again."""
