"""The measurements of `foretell longbench`: what cache policies cost in quality, by budget."""

from foretell.longbench.report import cells, failures, html, tables
from foretell.longbench.runner import begin, run
from foretell.longbench.settings import MODES, PERPLEXITY, Settings

__all__ = ["MODES", "PERPLEXITY", "Settings", "begin", "cells", "failures", "html", "run", "tables"]
