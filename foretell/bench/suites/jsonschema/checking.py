"""Whether an answer follows its schema, by the package jsonschema."""

from __future__ import annotations

import json
from typing import Any

from foretell.errors import Unsupported, first_message_line


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
        validator_class = self.package.validators.validator_for(schema, default=latest)
        try:
            validator_class.check_schema(schema, format_checker=None)
        except self.package.SchemaError as error:
            return "unchecked", f"not a valid schema: {first_message_line(error)}"
        try:
            parsed_answer = json.loads(text)
        except (ValueError, RecursionError) as error:
            return "invalid", f"not JSON: {first_message_line(error)}"
        validator = validator_class(
            schema, registry=self.registry, format_checker=validator_class.FORMAT_CHECKER
        )
        try:
            best_error = self.package.exceptions.best_match(validator.iter_errors(parsed_answer))
        except Exception as error:  # a reference that leads nowhere, a pattern Python cannot read
            return "unchecked", f"{type(error).__name__}: {first_message_line(error)}"
        if best_error is None:
            return "valid", ""
        return "invalid", f"{best_error.validator}: {first_message_line(best_error)}"
