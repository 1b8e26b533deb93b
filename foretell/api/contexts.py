"""A prompt of several contexts that are read apart, each after the same prefix: `Contexts`.

    prefix | context 1
           | context 2            | question
           | the longest context  |

Which policy reads them, and how, is `kv/encoded/ape.py`. Others read each of them as a few rows
that a trained encoder makes, one after the other: `kv/encoded/arc_encoder.py`,
`kv/encoded/lclm.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from foretell.errors import BadConfig
from foretell.spec import build_cache_policy

if TYPE_CHECKING:
    from foretell.api.prompts import Text

Given = str | Sequence[int]  # a text, or token ids
KIND = "ape"  # the policy that reads them, where none is named
MARK = "\ue000contexts\ue000"  # where a chat template puts them: characters for private use


@dataclass(frozen=True)
class Contexts:
    """`question` follows all contexts: a text, token ids, or chat messages, in the last of
    which the contexts stand before what it says. `prefix` stands before each of them; left out, it
    is what the tokenizer puts before any prompt, or what the chat has before the contexts.
    `expand`: numbers of contexts, from 1, which stand before the question as plain text too.
    """

    contexts: Sequence[Given]
    question: Given | Sequence[Mapping[str, Any]]
    prefix: Given = ""
    expand: Sequence[int] = ()

    def laid_out(self, text: Text) -> tuple[list[int], list[list[int]], list[int]]:
        """Token ids of prefix, contexts and question. Raises BadConfig or BadModel."""
        given_contexts = self.contexts
        if (
            isinstance(given_contexts, str)
            or not isinstance(given_contexts, Sequence)
            or not len(given_contexts)
        ):
            raise BadConfig("contexts: must be a list of at least one text; or give a plain prompt")
        contexts = [
            _part_ids(text, item, f"context {i}") for i, item in enumerate(given_contexts, 1)
        ]
        question: Any = self.question
        if question and isinstance(question, list | tuple) and isinstance(question[0], Mapping):
            chat_start, question = text.chat_around([dict(item) for item in question], MARK)
            if not isinstance(self.prefix, str):
                raise BadConfig("prefix: in a chat it must be a text, as it stands in a message")
            prefix = text.encode_text(chat_start + self.prefix)
        elif isinstance(self.prefix, str):
            prefix = text.encode(self.prefix)
        else:
            prefix = _part_ids(text, self.prefix, "prefix")
        plain_tokens = [
            token for item in self._list_expanded(len(contexts)) for token in contexts[item - 1]
        ]
        return prefix, contexts, [*plain_tokens, *_part_ids(text, question, "question")]

    def _list_expanded(self, count: int) -> Sequence[int]:
        for number in self.expand:
            if not isinstance(number, int) or not 1 <= number <= count:
                raise BadConfig.field("expand", number, f"a context's number, from 1 to {count}")
        return self.expand


def _part_ids(text: Text, prompt_part: Any, name: str) -> list[int]:
    """Token ids of what stands in a prompt. Raises BadConfig where there is nothing."""
    token_ids = []
    if isinstance(prompt_part, str):
        token_ids = text.encode_text(prompt_part) if prompt_part else []
    elif prompt_part is not None:
        token_ids = text.prompt_ids(prompt_part)
    if not token_ids:
        raise BadConfig(f"{name}: it is empty, and there is nothing to read; give some text")
    return token_ids


class ReadPrompt(NamedTuple):
    """Token ids of a prompt, and the cache policy that reads its contexts; None: it has none."""

    ids: list[int]
    kv: Any


def read_prompt(prompt: Any, kv: Any, text: Text, most: int | None = None) -> ReadPrompt:
    """Reads a prompt as `LM.generate` takes it; `kv`: the policy that contexts come under. Raises
    BadConfig or BadModel, and for more than `most` tokens, where it has no contexts, PromptTooLong.
    """
    if not isinstance(prompt, Contexts):
        return ReadPrompt(text.prompt_ids(prompt, most), None)
    config = build_cache_policy(KIND if kv is None else kv)
    reading = getattr(config, "with_contexts", None)
    if reading is None:
        raise BadConfig(
            f"kv={config.name}: contexts that are read apart come under kv={KIND}, or under a "
            "compressor as kv=arc-encoder:folder=FOLDER; leave kv out"
        )
    prefix, contexts, question = prompt.laid_out(text)
    token_ids = [*prefix, *(token for context in contexts for token in context), *question]
    return ReadPrompt(token_ids, reading(len(prefix), tuple(map(len, contexts))))
