"""Every error a user can meet. Each message is one line: what, where, the cure.

ForetellError
├── BadConfig          an argument or hyper-parameter is outside its range     exit 2
│   └── UnknownMethod  no such method; the nearest names are suggested         exit 2
├── Unsupported        this model cannot run it: the capability and the cure   exit 2
├── BadModel           the model's files are missing, damaged or unsafe        exit 2
├── BadFile            another file (a store, a recording) cannot be used      exit 2
├── PromptTooLong      the prompt does not fit into the model's context        exit 2
└── RequestFailed      a request broke (say, in a logits processor)            exit 1
    └── DeadlineExceeded  it was not done in the time it was given             exit 1

What goes on, and should be known, is a ForetellWarning, a category of Python's warnings.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

SHOWN = 300  # characters of a wrong value


class ForetellError(Exception):
    """The root of all errors. `exit_code` is what the command line returns, `output` the Output of
    the one answer that failed, as far as it came: its text up to a deadline, say.
    """

    exit_code = 2
    output: Any = None


class ForetellWarning(UserWarning):
    """The root of foretell's warnings: warnings.simplefilter("ignore", ForetellWarning) stills
    them.
    """


class BareText(ForetellWarning):
    """A chat model was given a text to continue, which is no turn of a chat."""


class BadConfig(ForetellError):
    """An argument is outside its range."""

    @classmethod
    def field(cls, name: str, value: object, expected: str) -> BadConfig:
        try:
            text = repr(value)
        except ValueError:  # a number of more digits than Python writes
            text = "a number of thousands of digits"
        shown = text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
        return cls(f"{name}={shown}: must be {expected}")


class UnknownMethod(BadConfig):
    """No method of that name."""

    @classmethod
    def suggest_names(cls, kind: str, name: str, known_names: Iterable[str]) -> UnknownMethod:
        known_names = sorted(known_names)
        if not known_names:
            return cls(f"unknown {kind} {name!r}; there are none, leave it out")
        close_names = get_close_matches(name, known_names, n=3, cutoff=0.45)
        if close_names:
            return cls(f"unknown {kind} {name!r}; did you mean {', '.join(close_names)}?")
        if kind == "method":  # there are too many of them for a line
            return cls(f"unknown method {name!r}; `foretell methods` lists all")
        return cls(f"unknown {kind} {name!r}; choose one of {', '.join(known_names)}")


class Unsupported(ForetellError):
    """A capability is missing."""

    @classmethod
    def missing_capability(cls, method: str, model: str, capability: str, cure: str) -> Unsupported:
        return cls(f"{method} cannot run on {model}: it needs {capability}; {cure}")

    @classmethod
    def missing_model(cls, method: str, model: str, name: str) -> Unsupported:
        """The error of a method that asks a model of this name beside the target, and there is
        none.
        """
        load_options = ("draft=...", "--draft")
        if name != "draft":
            load_options = (f'models={{"{name}": ...}}', f"--models {name}=...")
        cure = f"load one: load(..., {load_options[0]}), or {load_options[1]} of a command"
        return cls.missing_capability(method, model, f"a {name!r} model", cure)


class BadModel(ForetellError):
    """A model folder or file cannot be used."""


class BadFile(ForetellError):
    """A file that is not a model's cannot be used."""


class PromptTooLong(ForetellError):
    """The prompt leaves no room in the context."""


class RequestFailed(ForetellError):
    """A single request failed while others went on; `__cause__` is the original error."""

    exit_code = 1


class DeadlineExceeded(RequestFailed):
    """A request was not done in the time it was given; what it had written by then is its
    answer.
    """


def first_message_line(error: BaseException) -> str:
    """The first line of what an error says, or its type if it says nothing."""
    for line in str(error).splitlines():
        if line.strip():
            return line.strip()
    return type(error).__name__
