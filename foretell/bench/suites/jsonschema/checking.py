"""Whether an answer follows its schema, by the package jsonschema."""

from __future__ import annotations

import json
from typing import Any

from foretell.errors import Unsupported, first_line


class Checker:
    """Raises Unsupported without the package."""

    def __init__(self) -> None:
        try:
            import jsonschema
            from jsonschema_specifications import REGISTRY
        except ImportError as error:
            raise Unsupported(
                "--suite jsonschema judges answers by the package jsonschema: "
                "pip install 'foretell[bench]'"
            ) from error
        self.package: Any = jsonschema
        self.registry = REGISTRY  # of the meta-schemas alone: nothing is fetched

    def judge(self, schema: Any, text: str) -> tuple[str, str]:
        """`valid`, `invalid` or `unchecked`, and why. `unchecked`: the schema itself is unusable,
        or refers to what is not here.
        """
        latest = self.package.Draft202012Validator
        kind = self.package.validators.validator_for(schema, default=latest)
        try:
            kind.check_schema(schema, format_checker=None)
        except self.package.SchemaError as error:
            return "unchecked", f"not a valid schema: {first_line(error)}"
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            return "invalid", f"not JSON: {first_line(error)}"
        checked = kind(schema, registry=self.registry, format_checker=kind.FORMAT_CHECKER)
        try:
            found = self.package.exceptions.best_match(checked.iter_errors(value))
        except Exception as error:  # a reference that leads nowhere, a pattern Python cannot read
            return "unchecked", f"{type(error).__name__}: {first_line(error)}"
        if found is None:
            return "valid", ""
        return "invalid", f"{found.validator}: {first_line(found)}"
