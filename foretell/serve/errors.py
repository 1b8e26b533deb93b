"""Every refusal in the shape that OpenAI's clients read: message, type, param, code."""

from __future__ import annotations

import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from foretell.errors import (
    BadConfig,
    DeadlineExceeded,
    ForetellError,
    PromptTooLong,
    RequestFailed,
    Unsupported,
)

LONGEST = 500  # characters of a message: it may quote what was sent


# Fields that are arguments of types.Sampling, by their names there.
ARGUMENTS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "typical_p": "typical_p",
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "no_repeat_ngram_size": "no_repeat_ngram_size",
    "bad_words": "bad_words",
    "stop": "stop",
    "stop_token_ids": "stop_token_ids",
    "ignore_eos": "ignore_eos",
    "min_new_tokens": "min_tokens",
    "processor": "processor",
}
# How an error of ours names an argument, and which field of a request that was.
FIELDS_OF_ARGUMENTS = ARGUMENTS | {
    "max_new_tokens": "max_tokens",
    "logit_bias": "logit_bias",
    "logprobs": "logprobs",
    "seed": "seed",
    "n": "n",
    "method": "method",
    "unknown method": "method",
    "guidance": "guidance",
    "kv": "kv",
    "reward": "reward",
    "budget": "budget",
    "timeout": "timeout",
    "priority": "priority",
    "json_schema": "response_format",
    "regex": "structured_outputs",
    "grammar": "structured_outputs",
    "constraint": "constraint",
    "monitor": "constraint",
    "a prompt": "prompt",
}


class ApiError(Exception):
    """The refusal of a request.

    `param`: the field at fault, as in `messages.0.role`. `headers`: sent beside the answer.
    """

    def __init__(
        self,
        message: str,
        param: str | None = None,
        code: str | None = None,
        status: int = HTTPStatus.BAD_REQUEST,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.message = message if len(message) <= LONGEST else f"{message[:LONGEST]}..."
        self.param = param
        self.code = code
        self.status = int(status)
        self.headers = dict(headers or {})

    @property
    def type(self) -> str:
        """OpenAI's word for errors of this status."""
        if self.status >= 500:
            return "server_error"
        return TYPES.get(self.status, "invalid_request_error")

    def json_body(self) -> dict[str, Any]:
        """The body that is sent for this error."""
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }


TYPES = {403: "permission_error", 429: "rate_limit_error"}
# Of our errors, the more special first: status and code.
KINDS: tuple[tuple[type[ForetellError], int, str], ...] = (
    (DeadlineExceeded, HTTPStatus.REQUEST_TIMEOUT, "timeout"),
    (RequestFailed, HTTPStatus.INTERNAL_SERVER_ERROR, "request_failed"),
    (PromptTooLong, HTTPStatus.BAD_REQUEST, "context_length_exceeded"),
    (Unsupported, HTTPStatus.BAD_REQUEST, "unsupported_value"),
    (BadConfig, HTTPStatus.BAD_REQUEST, "invalid_value"),
)
# OpenAI's clients ask again after such a status, which would only take the time once more.
ONCE = {"x-should-retry": "false"}


def of_ours(error: ForetellError) -> ApiError:
    """The refusal for an error of the engine. A request that broke says no more than that: the log
    has the details.
    """
    status_code, error_code = _status_and_code(error)
    message = str(error)
    if status_code == HTTPStatus.INTERNAL_SERVER_ERROR:
        message = "the request failed"
    headers = ONCE if status_code == HTTPStatus.REQUEST_TIMEOUT else {}
    if isinstance(error, Unsupported) and _find_field(message) is None:
        return ApiError(f"method: {message}", "method", error_code, status_code, headers)
    return ApiError(message, _find_field(message), error_code, status_code, headers)


def _status_and_code(error: ForetellError) -> tuple[int, str]:
    """Returns the HTTP status and the code of an error."""
    for error_kind, status, code in KINDS:
        if isinstance(error, error_kind):
            return status, code
    return HTTPStatus.INTERNAL_SERVER_ERROR, "model_error"


def _find_field(message: str) -> str | None:
    """Finds the field that a message of ours begins with, as in `top_p=2: must be ...`, or that a
    method refuses.
    """
    for argument, field in FIELDS_OF_ARGUMENTS.items():
        message_rest = message.removeprefix(argument)
        if message_rest != message and not (message_rest[:1].isalnum() or message_rest[:1] == "_"):
            return field
    refusal_match = re.search(r" cannot honour (\w+)=", message)  # of a method, see engine.checks
    return FIELDS_OF_ARGUMENTS.get(refusal_match[1]) if refusal_match else None
