"""The fields of a .gguf file that say how it writes texts as tokens, each checked before anyone
believes it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from foretell.errors import BadModel, first_message_line
from foretell.models.gguf.limits import Found, check_file, read_numbers, read_texts

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # types of tokens
# Keys of tokens with a task, and the name that transformers has for it; None: it has none.
TASKS: dict[str, str | None] = {
    "bos": "bos_token",
    "eos": "eos_token",
    "eot": None,
    "eom": None,
    "unknown": "unk_token",
    "padding": "pad_token",
    "seperator": "sep_token",  # as the format spells it
    "cls": "cls_token",
    "mask": "mask_token",
}
NONE = 0xFFFFFFFF  # an id of files that say so that they have no such token
MOST_LETTERS = 4096  # of a token: what is derived of it grows with the square
ELSEWHERE = "llama.cpp may run the file itself: give its path"
AGAIN = "fetch the file again, or convert the model again"


@dataclass
class TokenFields:
    """What a file says of its tokens, which are (n,): their texts, their types, and their scores
    if it has any. `merges`: pairs of texts in their order, if it has any. `ids`: of tokens with a
    task, by the key that names them. `templates`: of chats, by name; "" for the usual one.
    """

    path: Path
    model: str
    rule: str
    texts: list[str]
    types: np.ndarray
    scores: np.ndarray | None
    merges: list[tuple[str, str]] | None
    ids: dict[str, int] = field(default_factory=dict)
    flags: dict[str, bool] = field(default_factory=dict)
    templates: dict[str, str] = field(default_factory=dict)

    def refusal(self, key: str, reason: str, cure: str = AGAIN) -> BadModel:
        """The error for a field."""
        return BadModel(f"{self.path}: tokenizer.{key} {reason}; {cure}")

    def name_token(self, key: str) -> str | None:
        """The text of a token with a task; None: the file names none."""
        return None if key not in self.ids else self.texts[self.ids[key]]

    def of_types(self, *token_types: int) -> list[int]:
        """The ids of tokens of these types."""
        return np.flatnonzero(np.isin(self.types, token_types)).tolist()

    def index_texts(self) -> dict[str, int]:
        """The id of each text. Raises BadModel where two tokens have one."""
        indices = {text: token for token, text in enumerate(self.texts)}
        if len(indices) < len(self.texts):
            repeated = next(t for token, t in enumerate(self.texts) if indices[t] != token)
            reason = f"has {_shorten(repeated)} twice, and a token is found by its text"
            raise self.refusal("ggml.tokens", reason)
        return indices


def read_fields(file_path: Path) -> TokenFields:
    """The fields of a file's tokenizer. Raises BadModel."""
    header = check_file(file_path)
    values = header.values
    fields = TokenFields(
        file_path,
        _text_value(file_path, values, "ggml.model", ""),
        _text_value(file_path, values, "ggml.pre", "default"),
        [],
        np.empty(0),
        None,
        None,
    )
    if not fields.model:
        raise fields.refusal("ggml.model", "is not there: the file has no tokenizer")
    if "tokenizer.ggml.tokens" not in header.lengths:
        raise fields.refusal("ggml.tokens", "is not there: the file has no vocabulary", ELSEWHERE)
    texts = read_texts(file_path, "tokenizer.ggml.tokens")
    # An empty text would be everywhere; llama.cpp names it so too.
    fields.texts = [text or f"[EMPTY_{token}]" for token, text in enumerate(texts)]
    if not fields.texts:
        raise fields.refusal("ggml.tokens", "is empty")
    longest = max(fields.texts, key=len)
    if len(longest) > MOST_LETTERS:
        reason = f"has a token of {len(longest)} letters, and {MOST_LETTERS} are read at most"
        raise fields.refusal("ggml.tokens", reason)
    fields.types = _read_types(fields, header)
    fields.scores = _numbers_of(fields, header, "ggml.scores")
    if fields.scores is not None and not np.isfinite(fields.scores).all():
        token = int(np.flatnonzero(~np.isfinite(fields.scores))[0])
        raise fields.refusal("ggml.scores", f"has the number {fields.scores[token]} for {token}")
    if "tokenizer.ggml.merges" in header.lengths:
        fields.merges = _split_merges(fields, read_texts(file_path, "tokenizer.ggml.merges"))
    fields.ids = _read_ids(fields, values)
    fields.flags = {
        key.removeprefix("tokenizer.ggml."): value
        for key, value in values.items()
        if key.startswith("tokenizer.ggml.") and isinstance(value, bool)
    }
    fields.templates = _read_templates(fields, values)
    return fields


def _text_value(file_path: Path, values: dict[str, Any], key: str, usual: str) -> str:
    value = values.get(f"tokenizer.{key}", usual)
    if not isinstance(value, str):
        raise BadModel(f"{file_path}: tokenizer.{key} is {value!r}, and no text; {AGAIN}")
    return value


def _numbers_of(fields: TokenFields, header: Found, key: str) -> np.ndarray | None:
    """A list of a number for each token; None: the file has none."""
    if f"tokenizer.{key}" not in header.lengths:
        return None
    numbers = read_numbers(fields.path, f"tokenizer.{key}")
    if len(numbers) != len(fields.texts):
        reason = f"has {len(numbers)} numbers, and tokenizer.ggml.tokens has {len(fields.texts)}"
        raise fields.refusal(key, reason)
    return numbers


def _read_types(fields: TokenFields, header: Found) -> np.ndarray:
    types = _numbers_of(fields, header, "ggml.token_type")
    if types is None:
        return np.full(len(fields.texts), NORMAL)
    strange = np.flatnonzero(~np.isin(types, range(NORMAL, BYTE + 1)))
    if strange.size:
        token = int(strange[0])
        reason = f"has the type {types[token]} for token {token}, and it is 1 to {BYTE}"
        raise fields.refusal("ggml.token_type", reason)
    return types


def _split_merges(fields: TokenFields, lines: list[str]) -> list[tuple[str, str]]:
    merges = []
    for place, line in enumerate(lines):
        cut = line.find(" ", 1)  # the first text may begin with a space
        if cut < 0 or cut == len(line) - 1:
            raise fields.refusal("ggml.merges", f"has {_shorten(line)} at {place}, which is no two")
        merges.append((line[:cut], line[cut + 1 :]))
    return merges


def _read_ids(fields: TokenFields, values: dict[str, Any]) -> dict[str, int]:
    ids = {}
    for task in TASKS:
        key = f"ggml.{task}_token_id"
        token = values.get(f"tokenizer.{key}")
        if token is None or token in (-1, NONE):
            continue
        if type(token) is not int or not 0 <= token < len(fields.texts):
            reason = f"is {token!r}, and the file has the tokens 0 to {len(fields.texts) - 1}"
            raise fields.refusal(key, reason)
        ids[task] = token
    return ids


def _read_templates(fields: TokenFields, values: dict[str, Any]) -> dict[str, str]:
    """The templates of chats, each tried with a chat of no messages."""
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import render_jinja_template

    templates = {}
    for key in values:
        name = key.removeprefix("tokenizer.chat_template")
        if name == key or (name and not name.startswith(".")):
            continue
        template = _text_value(fields.path, values, key.removeprefix("tokenizer."), "")
        try:
            render_jinja_template([], chat_template=template)
        except TemplateSyntaxError as error:
            reason = f"does not parse (line {error.lineno}: {first_message_line(error)})"
            raise fields.refusal(key.removeprefix("tokenizer."), reason) from error
        templates[name.removeprefix(".")] = template
    return templates


def _shorten(text: str) -> str:
    written = repr(text)
    return written if len(written) <= 60 else f"{written[:60]}..."
