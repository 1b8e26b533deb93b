"""Answers that follow JSON schemas: how many schemas can be used, whether answers keep to them, and
what that costs.

Every method answers every schema twice, with it as the answer's form and without. Answers are
judged by the package jsonschema, which has nothing in common with what enforces them.

Source: Geng et al., JSONSchemaBench, arXiv:2501.10868: coverage, compliance and efficiency.
"""

from foretell.bench.suites.jsonschema.figures import failures, tables
from foretell.bench.suites.jsonschema.runner import SCHEMA, begin, run
from foretell.bench.suites.jsonschema.schemas import Item, prepare

__all__ = ["SCHEMA", "Item", "begin", "failures", "prepare", "run", "tables"]
