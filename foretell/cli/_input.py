"""What the commands read: arguments and standard input, which must be UTF-8 text."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator, Sequence

from foretell.errors import BadConfig

SHOWN = 20  # characters before the place of a mistake


def check_arguments(arguments: Sequence[str]) -> None:
    """Raises BadConfig for an argument that is not UTF-8 text.

    Python puts half characters (surrogates) in the place of bytes that it could not decode.
    """
    for number, argument in enumerate(arguments, 1):
        try:
            argument.encode("utf-8")
        except UnicodeEncodeError as error:
            preceding = argument[max(0, error.start - SHOWN) : error.start]
            byte = ord(argument[error.start]) & 0xFF
            raise BadConfig(
                f"argument {number}, after {preceding!r}: not UTF-8 text (byte 0x{byte:02x}); "
                "write it in UTF-8"
            ) from None


def prompt_text(prompt: str) -> str:
    """The prompt; `-` stands for standard input. Raises BadConfig where that is no UTF-8 text."""
    if prompt != "-":
        return prompt
    standard_input("give the prompt as an argument, or pipe it in")
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        byte = error.object[error.start]
        raise BadConfig(
            f"standard input, line {line}: not UTF-8 text (byte 0x{byte:02x}); "
            "convert it, for example with iconv -t UTF-8"
        ) from None


def standard_input(cure: str) -> None:
    """Makes standard input UTF-8, whatever the locale says. Raises BadConfig, with the cure, where
    it is closed.
    """
    if sys.stdin is None:
        raise BadConfig(f"standard input is closed; {cure}")
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="strict")


def source_texts(sources: Sequence[str]) -> Iterator[str]:
    """The documents of these sources that are not empty.

    Raises BadConfig for a source that is not there.
    """
    from foretell.train.corpus import read_documents

    for source in sources:
        try:
            for _, text in read_documents(source):
                if text:
                    # A .jsonl file may hold half a character, which no tokenizer takes.
                    yield text.encode("utf-8", "replace").decode()
        except BadConfig as error:
            raise BadConfig(str(error).removeprefix("--text ")) from None
