"""A tokenizer as the bytes of its tokens: what models with different tokenizers have in common.

Two tokenizers write one token in different ways (a space may be a letter of its own), but what a
token stands for is the same everywhere: bytes, perhaps a part of a character. Special tokens have
names instead, and no bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, lru_cache
from itertools import takewhile
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch

from foretell.errors import Unsupported, first_message_line

BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")  # how tokenizers with byte fallback write a byte
SPACE = "\u2581"  # how they write a space
STRAY = re.compile("([\udc80-\udcff]+)")  # what Python makes of bytes that are no characters
SAMPLE = "One two  three,\n\tfour-5 (naïve) x_y."
GUARDS = ("\n", "a", ".")  # put before a text, so that it is not taken for the beginning of one
GUARDED = 4  # tokens that it may take
COMPARED = 256  # ids by which tokenizers are compared
ALIKE = 0.9  # share of them that relatives have in common


class Words:
    """`pieces`: of each id its bytes, None: it has none, or is not used. `specials`: ids by name.

    `start`: what stands before every prompt; `end`: the id that ends a text. `second`: ids that
    write their bytes only where no other token does. Encoding takes the longest piece each time.
    """

    def __init__(
        self,
        pieces: Sequence[bytes | None],
        specials: Mapping[str, int] | None = None,
        start: Sequence[int] = (),
        end: int | None = None,
        second: Iterable[int] = (),
    ):
        self.pieces = list(pieces)
        self.specials = dict(specials or {})
        self.names = {token: name for name, token in self.specials.items()}
        self.start = tuple(start)
        self.end = end
        later_ids = {*second}
        self.ids: dict[bytes, int] = {}  # the token that writes these bytes
        for token in sorted(range(len(self.pieces)), key=lambda token: (token in later_ids, token)):
            piece = self.pieces[token]
            if piece:
                self.ids.setdefault(piece, token)
        self.longest = max(map(len, self.ids), default=0)

    def piece(self, token: int) -> bytes | None:
        """The bytes of a token; None: it has none."""
        return self.pieces[token] if token < len(self.pieces) else None

    def text(self, tokens: Iterable[int]) -> bytes:
        """The bytes of tokens; those that have none are left out."""
        return b"".join(self.piece(token) or b"" for token in tokens)

    def encode(self, data: bytes) -> list[int]:
        """Tokens whose bytes are `data`. Bytes that no token can write are left out."""
        return self._longest_first(data)

    def _longest_first(self, data: bytes) -> list[int]:
        tokens: list[int] = []
        position = 0
        while position < len(data):
            for length in range(min(self.longest, len(data) - position), 0, -1):
                token = self.ids.get(data[position : position + length])
                if token is not None:
                    tokens.append(token)
                    break
            else:
                length = 1
            position += length
        return tokens


class TokenizerWords(Words):
    """Words of one of transformers' fast tokenizers, which also says how texts are divided.

    Raises LookupError, with the reason, where tokens are no pieces of the text.
    """

    def __init__(self, tokenizer: Any):
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise LookupError("it is not one of the package tokenizers")
        from tokenizers import Tokenizer

        self.coder: Any = Tokenizer.from_str(backend.to_str())  # a copy: it is set otherwise
        self.coder.no_padding()
        self.coder.no_truncation()
        self.coder.encode_special_tokens = True  # a text that looks like a special token is a text
        byte_level = "ByteLevel" in repr(backend.decoder)
        added_tokens = tokenizer.added_tokens_decoder
        special_names = {
            token: str(added_token)
            for token, added_token in added_tokens.items()
            if added_token.special
        }
        vocabulary = tokenizer.get_vocab()
        pieces: list[bytes | None] = [None] * (1 + max([*vocabulary.values(), *added_tokens]))
        second = set()
        for piece, token in vocabulary.items():
            if token in special_names:
                continue
            if token in added_tokens:
                pieces[token] = str(added_tokens[token]).encode()
                continue
            if not byte_level and BYTE.fullmatch(piece):
                second.add(token)
            pieces[token] = piece_bytes(piece, byte_level)
        # By the copy: nothing else may be encoding with it.
        start = takewhile(special_names.__contains__, self.coder.encode("a").ids)
        names = {name: token for token, name in special_names.items()}
        super().__init__(pieces, names, tuple(start), tokenizer.eos_token_id, second)
        if self._divide_text(SAMPLE) is None:
            raise LookupError("its tokens are no pieces of the text")

    def encode(self, data: bytes) -> list[int]:
        tokens: list[int] = []
        for part in STRAY.split(data.decode("utf-8", "surrogateescape")):
            if not part:
                continue
            part_tokens = None if STRAY.fullmatch(part) else self._divide_text(part)
            if part_tokens is None:
                part_tokens = self._longest_first(part.encode("utf-8", "surrogateescape"))
            tokens += part_tokens
        return tokens

    def _divide_text(self, text: str) -> list[int] | None:
        """The tokenizer's own tokens for a text in the middle of another; None: their bytes would
        be others.
        """
        expected_bytes = text.encode()
        tokens: list[int] = self.coder.encode(text, add_special_tokens=False).ids
        if self.text(tokens) == expected_bytes:
            return tokens
        for guard in GUARDS:
            guarded_ids = self.coder.encode(guard + text, add_special_tokens=False).ids
            for place in range(min(GUARDED, len(guarded_ids))):
                if self.text(guarded_ids[place:]) == expected_bytes:
                    return list(guarded_ids[place:])
        return None


def piece_bytes(piece: str, byte_level: bool) -> bytes:
    """Bytes that a token stands for, from what its tokenizer writes.

    `byte_level`: it writes every byte as a character of its own.
    """
    if byte_level:
        table = byte_table()
        if all(character in table for character in piece):
            return bytes(table[character] for character in piece)
    byte_match = BYTE.fullmatch(piece)
    if byte_match:
        return bytes([int(byte_match[1], 16)])
    return piece.replace(SPACE, " ").encode()


@cache
def byte_table() -> dict[str, int]:
    """The byte of each character by which byte-level tokenizers write it, as GPT-2 began it: bytes
    that are seen stand for themselves, the others follow after character 255.
    """
    printable_bytes = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(byte): byte for byte in printable_bytes}
    hidden_bytes = [byte for byte in range(256) if byte not in printable_bytes]
    return table | {chr(256 + place): byte for place, byte in enumerate(hidden_bytes)}


@lru_cache(maxsize=64)
def letter_words(vocab: int) -> Words:
    """A tokenizer with one letter a token, for models without texts."""
    return Words([chr(ord("a") + token).encode() for token in range(vocab)])


# --- of models

_words_by_tokenizer: WeakKeyDictionary[Any, Words] = WeakKeyDictionary()  # of each tokenizer


class Speaking(Protocol):
    """A model, or what else has its tokenizer."""

    name: str

    @property
    def tokenizer(self) -> Any:
        """Hugging Face's, or Words."""


def words_of(model: Speaking, method: str) -> Words:
    """The model's tokenizer as bytes, made once. Raises Unsupported where it is not known, or
    cannot be read so.
    """
    tokenizer: Any = model.tokenizer
    if isinstance(tokenizer, Words):
        return tokenizer
    reason = "it has none"
    if tokenizer is not None:
        if tokenizer in _words_by_tokenizer:
            return _words_by_tokenizer[tokenizer]
        try:
            words = _words_by_tokenizer[tokenizer] = TokenizerWords(tokenizer)
        except Exception as error:  # tokenizers raise nearly anything
            reason = first_message_line(error)
        else:
            return words
    raise Unsupported.missing_capability(
        method,
        model.name,
        f"a tokenizer whose tokens are pieces of the text ({reason})",
        "load it from a folder that has tokenizer.json",
    )


def are_related(first_tokenizer: Any, second_tokenizer: Any) -> bool:
    """Whether ids of one tokenizer mean the same as the other's, by a sample; also where that is
    not known.
    """
    if first_tokenizer is second_tokenizer or not (
        _is_readable(first_tokenizer) and _is_readable(second_tokenizer)
    ):
        return True
    size = min(_vocab_size(first_tokenizer), _vocab_size(second_tokenizer))
    sampled_ids = sorted({i * size // COMPARED for i in range(COMPARED)})
    equal_count: int = sum(
        _spell_token(first_tokenizer, sampled_id) == _spell_token(second_tokenizer, sampled_id)
        for sampled_id in sampled_ids
    )
    return equal_count >= ALIKE * len(sampled_ids)


def _is_readable(tokenizer: Any) -> bool:
    return isinstance(tokenizer, Words) or hasattr(tokenizer, "convert_ids_to_tokens")


def _vocab_size(tokenizer: Any) -> int:
    return len(tokenizer.pieces if isinstance(tokenizer, Words) else tokenizer)


def _spell_token(tokenizer: Any, token: int) -> Any:
    if isinstance(tokenizer, Words):
        return tokenizer.names.get(token, tokenizer.piece(token))
    return tokenizer.convert_ids_to_tokens(token)


# --- two of them


class Shared:
    """The tokens that two tokenizers have in common, one to one: those of equal bytes, special
    ones of equal names, and the ends of texts.

    `ours`, `theirs`: their ids (n,) in the two vocabularies, below the sizes given; `partner`: the
    other's id of one of ours.
    """

    def __init__(self, ours: Words, theirs: Words, our_vocab: int, their_vocab: int):
        pairs: dict[Any, int | None]
        pairs = {token: theirs.ids.get(piece) for piece, token in ours.ids.items()}
        pairs |= {token: theirs.specials.get(name) for name, token in ours.specials.items()}
        unpaired = ours.end is not None and pairs.get(ours.end) is None
        if unpaired and theirs.end is not None and theirs.end not in pairs.values():
            pairs[ours.end] = theirs.end
        self.partner: dict[int, int] = {}
        for our_token, their_token in sorted(pairs.items()):
            if their_token is not None and our_token < our_vocab and their_token < their_vocab:
                self.partner[our_token] = their_token
        self.ours = torch.tensor(list(self.partner), dtype=torch.long)
        self.theirs = torch.tensor(list(self.partner.values()), dtype=torch.long)
        self.vocab = our_vocab

    def row(self, row: torch.Tensor) -> torch.Tensor:
        """A row of theirs as one of ours, (V,): what is not in both is impossible."""
        our_row = row.new_full((self.vocab,), -torch.inf)
        our_row[self.ours.to(row.device)] = row[self.theirs.to(row.device)]
        return our_row


def whole_characters(data: bytes) -> int:
    """How many of the bytes are not the beginning of a character that lacks its end."""
    for back in range(1, min(3, len(data)) + 1):
        byte = data[-back]
        if byte >= 0xC0:  # the first byte of a character
            size = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return len(data) - back if back < size and byte < 0xF8 else len(data)
        if byte < 0x80:
            break
    return len(data)


def continue_tokens(
    words: Words, preceding_tokens: Sequence[int], data: bytes, window: int
) -> list[int]:
    """The tokens that `data` is written with after these.

    It is divided together with the last `window` tokens, up to a special one, as the whole text
    would be. Where that would also divide these otherwise, it is divided alone: tokens that are
    there already do not change.
    """
    tail = list(preceding_tokens[max(0, len(preceding_tokens) - window) :])
    for place in range(len(tail) - 1, -1, -1):
        if words.piece(tail[place]) is None:
            del tail[: place + 1]
            break
    prefix = words.text(tail)
    tokens = words.encode(prefix + data)
    byte_count = 0
    for place, token in enumerate(tokens):
        if byte_count == len(prefix) and words.text(tokens[place:]) == data:
            return tokens[place:]
        byte_count += len(words.piece(token) or b"")
    return words.encode(data)
