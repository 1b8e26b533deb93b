"""A conversation as a prompt: by the model's chat template, or in plain words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from foretell.errors import BadConfig
from foretell.serve.errors import ApiError
from foretell.serve.schemas import Message

if TYPE_CHECKING:
    from foretell.api.lm import LM


def chat_prompt(messages: Sequence[Message], lm: LM) -> Any:
    """The conversation as LM takes it: for a tokenizer without a template, as a text."""
    turns: list[dict[str, str]] = []
    for message in messages:
        role = "system" if message.role == "developer" else message.role
        turns.append({"role": role, "content": message.text})
        if message.name is not None:
            turns[-1]["name"] = message.name
    template = lm.tokenizer is not None and bool(lm.tokenizer.chat_template)
    for who in sorted({turn["role"] for turn in turns if "name" in turn}):
        if not (template and _reads_names(lm, turns, who)):
            place = [turn["role"] == who and "name" in turn for turn in turns].index(True)
            field = f"messages.{place}.name"
            why = "the model's chat template does not read it; leave it out"
            raise ApiError(f"{field}: {why}", field, "unsupported_value")
    return turns if template else plain_chat(turns)


def _reads_names(lm: LM, turns: Sequence[Mapping[str, str]], role: str) -> bool:
    """Whether a chat is another one without the names in what this role says. Raises ApiError."""
    bare = [
        {key: value for key, value in turn.items() if key != "name" or turn["role"] != role}
        for turn in turns
    ]
    try:
        return lm.prompt_ids(bare) != lm.prompt_ids(list(turns))
    except BadConfig as error:
        raise ApiError(f"messages: {error}", "messages", "invalid_value") from None


def plain_chat(turns: Sequence[dict[str, str]]) -> str:
    """ChatML's order in plain words, for models that know no template: a line with the role, then
    what was said, then an empty line.
    """
    parts = [f"{turn['role']}:\n{turn['content']}\n\n" for turn in turns]
    return "".join(parts) + "assistant:\n"
