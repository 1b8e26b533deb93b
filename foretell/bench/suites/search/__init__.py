"""Do searches, samples and other ways to decode solve more tasks, and what do they compute for it?

Tasks are made here, of five sorts: `functions` and `programs` with public and hidden tests, `sums`
in steps, `lists` of things that a closed set tells right from wrong, and `instructions` that a
program can check. Every method answers every task. A method that chooses by a reward gets what is
public of the task: tests that are shown, equations that hold, entries that differ, demands that
are kept. A user's own copy of HumanEval or GSM8K is read in their place. Differences to the first
method are taken task by task, with a 95 % interval.
"""

from foretell.bench.suites.search.figures import failures, tables
from foretell.bench.suites.search.methods import WAYS
from foretell.bench.suites.search.runner import SCHEMA, SORTS, begin, prepare, run

TAKES = ("tasks", "budget", "data")
__all__ = ["SCHEMA", "SORTS", "TAKES", "WAYS", "begin", "failures", "prepare", "run", "tables"]
