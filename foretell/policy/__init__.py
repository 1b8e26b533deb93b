"""How much to draft: what forwards cost, what drafts bring in, and several drafters together."""
