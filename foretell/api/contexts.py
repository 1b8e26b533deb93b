"""A prompt of several contexts that are read apart, each behind the same prefix: `Contexts`.

    prefix | context 1
           | context 2            | question
           | the longest context  |

Which policy reads them, and how, is `kv/encoded/ape.py`. Others read each of them as a few rows
that a trained encoder makes, one behind the other: `kv/encoded/arc_encoder.py`,
`kv/encoded/lclm.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from foretell.errors import BadConfig

if TYPE_CHECKING:
    from foretell.api.prompts import Text
    from foretell.kv.base import KV

Given = str | Sequence[int]  # a text, or token ids
KIND = "ape"  # the policy that reads them, where none is named
MARK = "\ue000contexts\ue000"  # where a chat template puts them: characters for private use


@dataclass(frozen=True)
class Contexts:
    """`question` stands behind all contexts: a text, token ids, or chat messages, in the last of
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
        given = self.contexts
        if isinstance(given, str) or not isinstance(given, Sequence) or not len(given):
            raise BadConfig("contexts: must be a list of at least one text; or give a plain prompt")
        contexts = [_ids(text, one, f"context {i}") for i, one in enumerate(given, 1)]
        question: Any = self.question
        if question and isinstance(question, list | tuple) and isinstance(question[0], Mapping):
            before, question = text.chat_around([dict(one) for one in question], MARK)
            if not isinstance(self.prefix, str):
                raise BadConfig("prefix: in a chat it must be a text, as it stands in a message")
            prefix = text.encode_text(before + self.prefix)
        elif isinstance(self.prefix, str):
            prefix = text.encode(self.prefix)
        else:
            prefix = _ids(text, self.prefix, "prefix")
        plain = [token for one in self._expanded(len(contexts)) for token in contexts[one - 1]]
        return prefix, contexts, [*plain, *_ids(text, question, "question")]

    def _expanded(self, count: int) -> Sequence[int]:
        for one in self.expand:
            if not isinstance(one, int) or not 1 <= one <= count:
                raise BadConfig.field("expand", one, f"a context's number, from 1 to {count}")
        return self.expand


def _ids(text: Text, given: Any, name: str) -> list[int]:
    """Token ids of what stands in a prompt. Raises BadConfig where there is nothing."""
    ids = []
    if isinstance(given, str):
        ids = text.encode_text(given) if given else []
    elif given is not None:
        ids = text.prompt_ids(given)
    if not ids:
        raise BadConfig(f"{name}: it is empty, and there is nothing to read; give some text")
    return ids


def read_by(
    prompt: Any, options: Mapping[str, Any], text: Text
) -> tuple[list[int], Mapping[str, Any]]:
    """Token ids of a prompt as `LM.generate` takes it, and its arguments, with the policy that
    reads its contexts, if it has some. Raises BadConfig or BadModel.
    """
    text.warn_of(prompt.question if isinstance(prompt, Contexts) else prompt)
    if not isinstance(prompt, Contexts):
        return text.prompt_ids(prompt), options
    ids, kv = apart(prompt, options.get("kv"), text)
    return ids, {**options, "kv": kv}


def apart(prompt: Contexts, kv: str | KV | None, text: Text) -> tuple[list[int], KV]:
    """The tokens of `Contexts`, and the policy that reads them. Raises BadConfig or BadModel."""
    from foretell.spec import kv_of  # here, since checking a name must not import torch

    config = kv_of(KIND if kv is None else kv)
    reading = getattr(config, "reading", None)
    if reading is None:
        raise BadConfig(
            f"kv={config.name}: contexts that are read apart come under kv={KIND}, or under a "
            "compressor as kv=arc-encoder:folder=FOLDER; leave kv out"
        )
    prefix, contexts, question = prompt.laid_out(text)
    ids = [*prefix, *(token for one in contexts for token in one), *question]
    return ids, reading(len(prefix), tuple(map(len, contexts)))
