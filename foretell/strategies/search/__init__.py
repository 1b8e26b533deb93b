"""Searches over beams and trees."""
