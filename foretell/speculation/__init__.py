"""How much is drafted, by whom, and when it pays."""
