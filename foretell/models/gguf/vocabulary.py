"""The tokenizer that a GGUF file holds, by llama.cpp, with the methods that foretell uses of
transformers' tokenizers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

from foretell.errors import BadConfig, first_message_line


class Vocabulary:
    """The tokenizer of a file. `ends`: the ids that end a text, as llama.cpp finds them. `handle`:
    an open model, which must outlive this.
    """

    def __init__(self, lib: Any, handle: Any):
        self.lib = lib
        self.vocab = lib.llama_model_get_vocab(handle)
        self.size = int(lib.llama_vocab_n_tokens(self.vocab))
        self.bos_token_id = self._special_id(lib.llama_vocab_bos)
        self.eos_token_id = self._special_id(lib.llama_vocab_eos)
        self.ends = [
            token for token in range(self.size) if lib.llama_vocab_is_eog(self.vocab, token)
        ]
        template = lib.llama_model_chat_template(handle, None)
        self.chat_template = template.decode("utf-8", "replace") if template else None

    def _special_id(self, function: Any) -> int | None:
        token = int(function(self.vocab))
        return token if token >= 0 else None

    def __len__(self) -> int:
        return self.size

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {
            "input_ids": self._encode_bytes(text.encode("utf-8", "replace"), add_special_tokens)
        }

    def _encode_bytes(
        self, text_bytes: bytes, add_special: bool, parse_special: bool = True
    ) -> list[int]:
        """The ids of a text: with those that stand around it, and with special ones that it
        names.
        """
        capacity = len(text_bytes) + 8
        while True:
            buffer = (ctypes.c_int32 * capacity)()
            n = self.lib.llama_tokenize(
                self.vocab,
                text_bytes,
                len(text_bytes),
                buffer,
                capacity,
                add_special,
                parse_special,
            )
            if n >= 0:
                return buffer[:n]
            capacity = -n

    def decode(
        self,
        tokens: Sequence[int],
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool = False,
    ) -> str:
        """The text of these tokens. Bytes that are no whole character become U+FFFD."""
        token_ids = (ctypes.c_int32 * max(1, len(tokens)))(*tokens)
        capacity = 16 * len(tokens) + 16
        while True:
            buffer = ctypes.create_string_buffer(capacity)
            n = self.lib.llama_detokenize(
                self.vocab, token_ids, len(tokens), buffer, capacity, False, not skip_special_tokens
            )
            if n >= 0:
                return buffer.raw[:n].decode("utf-8", "replace")
            capacity = -n

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for, or the name of a special one."""
        capacity = 64
        while True:
            buffer = ctypes.create_string_buffer(capacity)
            n = int(self.lib.llama_token_to_piece(self.vocab, token, buffer, capacity, 0, True))
            if n >= 0:
                return buffer.raw[:n]
            capacity = -n

    def is_special(self, token: int) -> bool:
        """Whether it stands for no letters, such as an end."""
        attributes = int(self.lib.llama_vocab_get_attr(self.vocab, token))
        return bool(attributes & int(self.lib.LLAMA_TOKEN_ATTR_CONTROL))

    def for_forms(self, vocab_size: int, end_ids: Sequence[int] | None) -> Any:
        """The tokenizer as llguidance has it, of so many tokens and with these ends."""
        from llguidance import LLTokenizer, TokenizerWrapper

        return LLTokenizer(TokenizerWrapper(Letters(self)), vocab_size, list(end_ids or self.ends))

    def get_vocab(self) -> dict[str, int]:
        """The id of every text; of several ids with one text the last."""
        return {self.convert_ids_to_tokens(token): token for token in range(self.size)}

    def convert_ids_to_tokens(self, token: int) -> str:
        """A token as the file writes it."""
        text: bytes = self.lib.llama_vocab_get_text(self.vocab, token)
        return text.decode("utf-8", "replace")

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        return_dict: bool = True,
        tokenize: bool = True,
    ) -> Any:
        """The ids of a conversation, or its text. Raises BadConfig where the file's template
        refuses it.
        """
        from llama_cpp.llama_chat_format import Jinja2ChatFormatter

        bos, eos = (
            "" if token is None else self.decode([token])
            for token in (self.bos_token_id, self.eos_token_id)
        )
        try:
            format_chat = Jinja2ChatFormatter(
                self.chat_template or "", eos, bos, add_generation_prompt
            )
            text = format_chat(messages=[dict(message) for message in messages]).prompt
        except Exception as error:  # a template is a program of its own
            raise BadConfig(
                f"the file's chat template refuses these messages ({first_message_line(error)}); "
                "give a text"
            ) from error
        return self(text, add_special_tokens=False) if tokenize else text


class Letters:
    """A tokenizer as llguidance asks of one: the bytes of its tokens, and the ids of letters."""

    def __init__(self, vocabulary: Vocabulary):
        self.words = vocabulary
        self.bos_token_id = vocabulary.bos_token_id
        self.eos_token_id = vocabulary.ends[0] if vocabulary.ends else vocabulary.eos_token_id
        self.tokens = [vocabulary.token_bytes(token) for token in range(len(vocabulary))]
        self.special_token_ids = [t for t in range(len(vocabulary)) if vocabulary.is_special(t)]

    def __call__(self, text: bytes) -> list[int]:
        return self.words._encode_bytes(text, add_special=False, parse_special=False)
