"""The measurements of `foretell longbench`: what cache policies cost in quality, by budget."""

from foretell.longbench.report import failure_lines, render_html, result_tables, summarize_cells
from foretell.longbench.runner import begin_document, run_units
from foretell.longbench.settings import MODES, PERPLEXITY, Settings

__all__ = [
    "MODES",
    "PERPLEXITY",
    "Settings",
    "begin_document",
    "failure_lines",
    "render_html",
    "result_tables",
    "run_units",
    "summarize_cells",
]
