"""Rows in fewer bits, or in other memory."""
