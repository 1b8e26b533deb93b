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
    """Returns the conversation as LM takes it: for a tokenizer without a template, as a text."""
    chat_turns: list[dict[str, str]] = []
    for message in messages:
        role = "system" if message.role == "developer" else message.role
        chat_turns.append({"role": role, "content": message.text})
        if message.name is not None:
            chat_turns[-1]["name"] = message.name
    has_template = lm.tokenizer is not None and bool(lm.tokenizer.chat_template)
    for role_name in sorted({turn["role"] for turn in chat_turns if "name" in turn}):
        if not (has_template and _reads_names(lm, chat_turns, role_name)):
            turn_index = [
                turn["role"] == role_name and "name" in turn for turn in chat_turns
            ].index(True)
            field = f"messages.{turn_index}.name"
            reason = "the model's chat template does not read it; leave it out"
            raise ApiError(f"{field}: {reason}", field, "unsupported_value")
    return chat_turns if has_template else plain_chat(chat_turns)


def _reads_names(lm: LM, turns: Sequence[Mapping[str, str]], role: str) -> bool:
    """Whether a chat becomes another prompt without the names in what this role says. Raises
    ApiError.
    """
    nameless_turns = [
        {key: value for key, value in turn.items() if key != "name" or turn["role"] != role}
        for turn in turns
    ]
    try:
        return lm.prompt_ids(nameless_turns) != lm.prompt_ids(list(turns))
    except BadConfig as error:
        raise ApiError(f"messages: {error}", "messages", "invalid_value") from None


def plain_chat(turns: Sequence[dict[str, str]]) -> str:
    """Writes turns in ChatML's order in plain words, for models that know no template: a line with
    the role, then what was said, then an empty line.
    """
    turn_texts = [f"{turn['role']}:\n{turn['content']}\n\n" for turn in turns]
    return "".join(turn_texts) + "assistant:\n"
