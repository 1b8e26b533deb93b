"""The suite `parallel`: what methods lose where they decode tokens in parallel, and gain."""

from foretell.bench.suites.parallel.runner import (
    CANVASES,
    TAKES,
    WAYS,
    begin,
    failures,
    html,
    prepare,
    run,
    tables,
)

__all__ = ["CANVASES", "TAKES", "WAYS", "begin", "failures", "html", "prepare", "run", "tables"]
