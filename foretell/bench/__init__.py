"""The measurements of `foretell bench`: methods and peers side by side, as one JSON document.

A cell is (model, dtype, contender, prompt set, temperature, requests, context). All cells that
differ only in the contender form a group and take turns, prompt by prompt in an order shuffled each
time, after a round that warms up and does not count; all in one process, but for peers that have
packages of their own. Each contender has engine stores of its own, emptied before every round:
nobody learns from another one's text, nor from the same text in an earlier round. A ratio is taken
prompt by prompt within one round against the first contender; of all of them the median and the
range from the 10th to the 90th percentile are kept.

Tokens/s count from when the last request of the batch has its first token, so that no side's
prefill takes part. Nothing here prints.
"""

from foretell.bench.contenders import Method
from foretell.bench.document import SCHEMA, begin_document, open_document, write_document
from foretell.bench.runner import run_bench
from foretell.bench.sets import SETS, prompt_ids, read_sets
from foretell.bench.settings import Settings

__all__ = [
    "SCHEMA",
    "SETS",
    "Method",
    "Settings",
    "begin_document",
    "open_document",
    "prompt_ids",
    "read_sets",
    "run_bench",
    "write_document",
]
