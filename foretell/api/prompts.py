"""From a user's words to the engine's: prompts to token ids, arguments to `Sampling`.

Prompts are tokenised here alone; the engine knows tokens only.
"""

from __future__ import annotations

import dataclasses
import json
import math
import threading
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any

from foretell.api.arguments import NESTED, as_python, as_tuple, read_bias, token_id
from foretell.api.token_bounds import Fewest
from foretell.api.unsaid import LONGEST, Unsaid
from foretell.constraints.grammars import Grammars
from foretell.core.constraint import Prompted, TextConstraint, form_of
from foretell.core.masked_text import MASKED
from foretell.core.text import whole_text
from foretell.core.tokenizer_bytes import words_of
from foretell.core.types import Sampling
from foretell.errors import BadConfig, BadModel, BareText, PromptTooLong, first_message_line
from foretell.ops.memory import trim_memory
from foretell.spec import build_constraint, build_processors

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from foretell.core.model import Model

LONG = 100_000  # characters of a text whose tokens take much memory while they are made
PROMPT = "a prompt is a text, a list of token ids, a list of chat messages or Contexts"


def split_prompts(prompt: Any) -> tuple[list[Any], bool]:
    """The prompts, and whether a list of them was given. An array of one row is one prompt."""
    if hasattr(prompt, "tolist") and not isinstance(prompt, memoryview):
        prompt = prompt.tolist()
        has_rows = isinstance(prompt, list) and any(isinstance(row, list) for row in prompt)
        return (prompt, True) if has_rows else ([prompt], False)
    if not isinstance(prompt, list | tuple):
        return [prompt], False
    if not prompt:
        return [], True
    for item in prompt:
        if token_id(item) is None and not isinstance(item, Mapping):
            return list(prompt), True
    return [prompt], False


def place_prompt(
    target: Model, ids: list[int], pictures: Any = None
) -> tuple[list[int], dict[str, Any]]:
    """A user's prompt as the `prompt` and the `inputs` of a request.

    To a model that reads a source the prompt is the source, and the text begins with its start.
    """
    inputs = {} if pictures is None else {"pictures": pictures}
    if "source" not in target.caps:
        return ids, inputs
    reader: Any = target
    return list(reader.start), {**inputs, "source": tuple(ids)}


class Text:
    """A tokenizer with its model's rules: texts and chats to token ids, and token ids to text."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase | None, vocab: int = 0, eos: Sequence[int] = ()
    ):
        """`vocab` and `eos`: of the model, for constraints."""
        self.tokenizer = tokenizer
        self.name = "this model"
        self.grammars = Grammars(tokenizer, vocab, eos)
        self.kept: dict[Any, Any] = {}  # what constraints share
        # Setting up a fast tokenizer while another thread uses it is an error there. That is done
        # with the first text; then threads may use it side by side, and nobody waits for others.
        self._encoding = threading.Lock()
        self._set_up = False
        self._told = False

    @property
    def has_chats(self) -> bool:
        """Whether there is a chat template: the model answers turns of chats."""
        return self.tokenizer is not None and bool(self.tokenizer.chat_template)

    def warn_of(self, prompt: Any) -> None:
        """Warns, once, of a bare text for a model that answers chats, which often ends at once."""
        if self._told or not isinstance(prompt, str) or not self.has_chats:
            return
        self._told = True
        warnings.warn(
            "a chat model continues this text, and does not answer it, which may end at once: for "
            'an answer give [{"role": "user", "content": text}]; to continue it without this '
            "warning give lm.encode(text)",
            BareText,
            stacklevel=5,  # who called generate, stream or trace
        )

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Token ids of a text; an empty one is the tokenizer's first token, if it has one.

        `special`: with the tokens that the tokenizer puts around a prompt. Raises BadModel without
        a tokenizer, BadConfig for what it cannot read.
        """
        if self.tokenizer is None:
            raise BadModel(
                "this model has no tokenizer: give token ids, or a folder that has tokenizer files"
            )
        whole_text("prompt", text)  # tokenizers do not say what is wrong with half a character
        try:
            with self._hold_tokenizer():
                encoded = self.tokenizer(text, add_special_tokens=special)["input_ids"]
        except Exception as error:  # a text that is no Unicode, say
            reason = first_message_line(error)
            raise BadConfig(f"the tokenizer cannot read this prompt ({reason})") from error
        token_ids = [int(token) for token in encoded]
        if len(text) > LONG:
            trim_memory()  # its tokens took some thousand bytes each
        if token_ids:
            return token_ids
        start_token = self.tokenizer.bos_token_id
        if start_token is None:
            raise BadConfig(
                "the prompt is empty and the tokenizer has no BOS token: give some text"
            )
        return [int(start_token)]

    def _hold_tokenizer(self) -> AbstractContextManager[Any]:
        """Inside, no other thread uses the tokenizer, if it is one that cannot be shared."""
        if not getattr(self.tokenizer, "is_fast", False):
            return self._encoding
        with self._encoding:
            if not self._set_up:
                assert self.tokenizer is not None
                self.tokenizer("", add_special_tokens=False)
                self._set_up = True
        return nullcontext()

    @cached_property
    def fewest(self) -> Fewest:
        """How few tokens a text can have."""
        return Fewest(self.tokenizer)

    def check_length(self, text: str, max_tokens: int) -> None:
        """Raises PromptTooLong, without tokenizing it, for a text of more than `max_tokens` tokens
        in any case.
        """
        min_tokens = self.fewest.tokens(text)
        if min_tokens > max_tokens:
            raise PromptTooLong(
                f"it has at least {min_tokens} tokens, and there is room for {max_tokens}; "
                "shorten it"
            )

    def encode_text(self, text: str) -> list[int]:
        """Token ids of a text that stands in another, without special ones."""
        return self.encode(text, special=False)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without special ones; empty where there is no tokenizer."""
        if self.tokenizer is None:
            return ""
        text = self.tokenizer.decode(
            list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return str(text)

    def prompt_ids(self, prompt: Any, most: int | None = None) -> list[int]:
        """Token ids of one prompt: a text, a list or array of ids, or a chat. Raises BadConfig, and
        PromptTooLong before it tokenizes what has more than `most` tokens in any case.
        """
        if isinstance(prompt, str):
            if most is not None:
                self.check_length(prompt, most)
            return self.encode(prompt)
        if isinstance(prompt, bytes | bytearray | memoryview):
            raise BadConfig("a prompt is text, not bytes: decode it, as in data.decode('utf-8')")
        if hasattr(prompt, "tolist"):
            prompt = prompt.tolist()
        if not isinstance(prompt, Iterable):
            raise BadConfig(PROMPT)
        items = list(prompt)
        if items and all(isinstance(item, Mapping) for item in items):
            if most is not None:
                self._check_chat(items, most)
            return self._chat_ids(items)
        token_ids = []
        for item in items:
            token = token_id(item)
            if token is None:
                raise BadConfig(PROMPT)
            token_ids.append(token)
        return token_ids

    def with_gaps(self, parts: Iterable[Any]) -> tuple[list[int], list[int]]:
        """A text with gaps: texts, and numbers of missing tokens. Returns the tokens of its first
        text, and those after it, MASKED where they are missing. Raises BadConfig or BadModel.
        """
        text_parts = [parts] if isinstance(parts, str) else list(parts)
        prompt: list[int] = []
        suffix_ids: list[int] = []
        for part in text_parts:
            missing_count = 0 if isinstance(part, str) else token_id(part) or 0
            if not isinstance(part, str) and missing_count < 1:
                expected = "texts, and numbers of missing tokens (1 or more) between them"
                raise BadConfig.field("fill", part, expected)
            if missing_count and not prompt:
                raise BadConfig("fill: begins with a gap; begin with some text")
            if missing_count:
                suffix_ids += [MASKED] * missing_count
            elif prompt:
                suffix_ids += self.encode_text(part)
            else:
                prompt = self.encode(part)
        if MASKED not in suffix_ids:
            raise BadConfig("fill: has no gap; put the number of missing tokens between two texts")
        return prompt, suffix_ids

    def chat_around(self, messages: list[dict[str, Any]], mark: str) -> tuple[str, str]:
        """The text of a chat before and after the place where its last message begins. `mark`:
        what no message has. Raises BadConfig.
        """
        last_message = messages[-1]
        marked_messages = [
            *messages[:-1],
            {**last_message, "content": f"{mark}{last_message.get('content', '')}"},
        ]
        parts = str(self._apply_template(marked_messages, tokenize=False)).split(mark)
        if len(parts) != 2:
            raise BadConfig(
                "contexts: the model's chat template does not say the last message once, where it "
                "stands; give texts instead"
            )
        return parts[0], parts[1]

    def _check_chat(self, messages: Sequence[Mapping[str, Any]], max_tokens: int) -> None:
        """A template may leave out what messages say, so that its text decides."""
        contents = [
            content for message in messages if isinstance(content := message.get("content"), str)
        ]
        if sum(map(self.fewest.tokens, contents)) > max_tokens:
            self.check_length(str(self._apply_template(messages, tokenize=False)), max_tokens)

    def _chat_ids(self, messages: list[Mapping[str, Any]]) -> list[int]:
        encoded = self._apply_template(messages, return_dict=True)
        return [int(token) for token in encoded["input_ids"]]

    def _apply_template(self, messages: Sequence[Mapping[str, Any]], **form: Any) -> Any:
        """Applies the chat template to messages. Raises BadConfig."""
        if self.tokenizer is None or not self.has_chats:
            raise BadConfig(
                "chat messages need a model whose tokenizer has a chat template; "
                "give a text instead"
            )
        for message in messages:
            if not {"role", "content"} <= set(message):
                names = sorted(map(str, message))
                raise BadConfig(f"a chat message needs `role` and `content`, not {names}")
            for message_value in message.values():
                is_text = isinstance(message_value, str)
                whole_text(
                    "messages",
                    message_value
                    if is_text
                    else json.dumps(message_value, ensure_ascii=False, default=str),
                )
        try:
            with self._hold_tokenizer():
                return self.tokenizer.apply_chat_template(
                    messages,  # type: ignore[arg-type]
                    add_generation_prompt=True,
                    **form,
                )
        except BadConfig:
            raise
        except Exception as error:  # a template is a program, and may refuse with any error
            reason = first_message_line(error)
            raise BadConfig(
                f"the model's chat template refuses these messages ({reason}); "
                "change them, or give a text"
            ) from error

    def sampling(
        self, arguments: Mapping[str, Any], tenant: str = "", deadline: float = math.inf
    ) -> Sampling:
        """The arguments with texts as token ids and single values as tuples, and forms compiled:
        see `Grammars.compile_form`, also for errors. Raises BadConfig.
        """
        options: dict[str, Any] = {}
        for name, value in arguments.items():
            if name == "logit_bias":
                options[name] = read_bias({} if value is None else value)
            elif name == "processor":
                options[name] = () if value is None else build_processors(value, self.encode_text)
            elif name == "constraint" and isinstance(value, str):
                options[name] = build_constraint(value, self.encode_text)
            elif name in NESTED:
                options[name] = as_tuple(name, value)
            else:
                options[name] = as_python(value)
        if not all(callable(p) for p in options.get("logits_processors", ())):
            raise BadConfig.field(
                "logits_processors", options["logits_processors"], "a list of callables"
            )
        if "stop_token_ids" in options:
            stop_ids = options["stop_token_ids"]
            options["stop_token_ids"] = tuple(as_python(token) for token in stop_ids)
        if "bad_words" in options:
            options["bad_words"] = self._bad_words(options["bad_words"])
        sampling = Sampling(**options)
        form, constraint = form_of(sampling), sampling.constraint
        if form and constraint is not None:
            raise BadConfig(f"{next(iter(form))} and constraint: a text has one form; give one")
        tracks = callable(getattr(constraint, "track", None))
        if constraint is not None and not tracks and not isinstance(constraint, TextConstraint):
            expected = "a spec like 'monitor:root=FOLDER', or an object with a method track()"
            raise BadConfig.field("constraint", constraint, expected)
        if form:
            compiled_form = self.grammars.compile_form(form, tenant, deadline)
            sampling = dataclasses.replace(sampling, constraint=compiled_form)
        return sampling

    def sample(self, sampling: Sampling, k: int, prompt: Sequence[int], target: Model) -> Sampling:
        """Sampling of the k-th sample after a prompt, whose constraint knows the prompt.

        Raises BadConfig or Unsupported.
        """
        seed = None if sampling.seed is None else sampling.seed + k
        sample_sampling = dataclasses.replace(sampling, seed=seed, n=1)
        text_constraint = sampling.constraint
        if not isinstance(text_constraint, TextConstraint):
            return sample_sampling
        words = words_of(target, type(text_constraint).__name__.lower())
        made_constraint = text_constraint.on(
            Prompted(tuple(prompt), words, target.vocab, self.kept)
        )
        return dataclasses.replace(sample_sampling, constraint=made_constraint)

    def _bad_words(self, banned: Iterable[Any]) -> tuple[Any, ...]:
        made_words: list[Any] = []
        for entry in banned:
            if isinstance(entry, str) and entry:
                text = whole_text("bad_words", entry).encode()
                if len(text) > LONGEST:
                    raise BadConfig(f"bad_words: {entry[:20]!r}... has more than {LONGEST} bytes")
                made_words.append(Unsaid(text, words_of(self, "bad_words")))
            elif isinstance(entry, list | tuple) or entry == "":
                made_words.append([as_python(token) for token in entry])
            else:
                raise BadConfig.field("bad_words", entry, "a text or a list of token ids")
        return tuple(made_words)
