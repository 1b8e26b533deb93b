"""What `foretell bench` and `foretell tune` found, for people: tables, and HTML files that need
nothing from anywhere else.
"""

from foretell.bench.report.pages import html, reasons, tuned
from foretell.bench.report.tables import Table, drafted, failures, tables

__all__ = ["Table", "drafted", "failures", "html", "reasons", "tables", "tuned"]
