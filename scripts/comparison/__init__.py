"""The project's published figures: foretell beside every peer, on seven kinds of text.

Each side runs in a process of its own, and one computes at a time: prompt by prompt, in an order
shuffled each time, for some rounds after one that warms up. `scripts/compare.py` is the command.
What was measured stays in the document run by run (document.py), from which figures.py makes
numbers and pages.py the tables of the documentation; these three need no other packages.
"""
