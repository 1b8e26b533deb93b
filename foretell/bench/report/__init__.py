"""What `foretell bench` and `foretell tune` found, for people: tables, and HTML files that need
nothing from anywhere else.
"""

from foretell.bench.report.pages import explain_choice, html, tuning_page
from foretell.bench.report.tables import Table, failures, mean_draft_size, tables

__all__ = [
    "Table",
    "explain_choice",
    "failures",
    "html",
    "mean_draft_size",
    "tables",
    "tuning_page",
]
