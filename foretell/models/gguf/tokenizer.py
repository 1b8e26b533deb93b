"""The tokenizer of a .gguf file, built from the fields of the file alone, as one of the package
tokenizers with the methods that transformers gives it.

Three kinds are built. `gpt2`: bytes merged in the order of a list, in words that a rule cuts.
`llama` (sentencepiece): letters merged by scores; the list of merges is derived from the pieces.
`bert`: the longest piece first. What else there is, is refused by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors
from tokenizers.pre_tokenizers import BertPreTokenizer, Sequence

from foretell.models.gguf.pre_tokenizers import RULES, Rule
from foretell.models.gguf.token_fields import (
    BYTE,
    CONTROL,
    ELSEWHERE,
    NORMAL,
    TASKS,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    TokenFields,
    read_fields,
)

SPACE = "\u2581"  # that sentencepiece writes for one
CONTINUING = "##"  # begins a piece of WordPiece inside a word
LONGEST_WORD = 100  # letters that WordPiece takes apart; a longer word is unknown
USUAL_IDS = {  # of tokens that a file does not name, as files of the kind have had them
    "llama": {"bos": 1, "eos": 2, "unknown": 0},
    "bert": {"cls": 101, "unknown": 100, "seperator": 102, "padding": 0, "mask": 103},
}
OTHERS = {  # kinds that are known, and not built
    "t5": "Unigram, which only encoders have",
    "rwkv": "RWKV's tries",
    "plamo2": "PLaMo 2's table",
    "hybriddna": "words of DNA",
    "whitespace": "whole words, which only encoders have",
    "none": "no vocabulary",
    "no_vocab": "no vocabulary",
}


@dataclass
class _Parts:
    """A tokenizer before it is put together. `plain_model`: a model with the tokens that are found
    by their names, which is all that tokens are added to: what wraps a tokenizer copies it, and
    other tokens and merges are most of it.
    `has_bos`, `has_eos`: whether they stand around a text. `frame`: what else does.
    """

    plain_model: Any
    model: Any
    decoder: Any
    normalizer: Any = None
    pre_tokenizer: Any = None
    has_bos: bool = False
    has_eos: bool = False
    frame: Any = None
    joined: bool = False  # user-defined tokens are looked for where spaces are written already


def read_tokenizer(file_path: Path) -> Any:
    """The tokenizer of a .gguf file, one of transformers' PreTrainedTokenizerFast. Raises BadModel
    with the field that is wrong, or that nobody here reads, and the cure.
    """
    fields = read_fields(file_path)
    build_parts = BUILDERS.get(fields.model)
    if build_parts is None:
        reason = f"is {fields.model!r}, which is unknown here"
        if fields.model in OTHERS:
            reason = f"is {fields.model!r} ({OTHERS[fields.model]}), which is not built here"
        raise fields.refusal("ggml.model", reason, ELSEWHERE)
    for task, token in USUAL_IDS.get(fields.model, {}).items():
        if token < len(fields.texts):
            fields.ids.setdefault(task, token)
    return _wrap_parts(fields, build_parts(fields))


def _wrap_parts(fields: TokenFields, parts: _Parts) -> Any:
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(parts.plain_model)
    tokenizer.decoder = parts.decoder
    if parts.normalizer is not None:
        tokenizer.normalizer = parts.normalizer
    if parts.pre_tokenizer is not None:
        tokenizer.pre_tokenizer = parts.pre_tokenizer
    if parts.frame is not None:
        tokenizer.post_processor = parts.frame
    for token_types in ((CONTROL, UNKNOWN), (USER_DEFINED,)):
        special = token_types[0] == CONTROL
        joined = parts.joined and not special
        tokenizer.add_tokens(
            [
                AddedToken(fields.texts[token], special=special, normalized=joined)
                for token in fields.of_types(*token_types)
            ]
        )
    frame_flags = {}
    if parts.frame is None:
        frame_flags = {"add_bos_token": parts.has_bos, "add_eos_token": parts.has_eos}
    wrapped: Any = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
        **{name: fields.name_token(task) for task, name in TASKS.items() if name is not None},
        **frame_flags,
    )
    wrapped.backend_tokenizer.model = parts.model
    templates = fields.templates
    if templates:
        named = {name or "default": template for name, template in templates.items()}
        wrapped.chat_template = templates[""] if [*templates] == [""] else named
    return wrapped


def _flag(fields: TokenFields, key: str, usual: bool) -> bool:
    """Whether the file says `add_KEY_token`, for which the token itself must be there."""
    stated = fields.flags.get(f"add_{key}_token", usual)
    if stated and key not in fields.ids:
        reason = "is not there, and a text begins or ends with that token"
        raise fields.refusal(f"ggml.{key}_token_id", reason)
    return stated


def _found_tokens(fields: TokenFields) -> dict[str, int]:
    """The tokens that are found by their names, or that the file names, with their ids."""
    tokens = {*fields.of_types(CONTROL, UNKNOWN, USER_DEFINED), *fields.ids.values()}
    return {fields.texts[token]: token for token in sorted(tokens)}


# --- bytes, and merges in a list


def _build_bytes(fields: TokenFields) -> _Parts:
    """A tokenizer of `gpt2` or `gemma4`."""
    rule_name = "gemma4" if fields.model == "gemma4" else fields.rule
    rule = RULES.get(rule_name)
    if rule is None:
        reason = f"is {rule_name!r}: its tokenizer splits words by that rule, unknown here"
        raise fields.refusal("ggml.pre", reason, ELSEWHERE)
    if fields.merges is None:
        raise fields.refusal("ggml.merges", f"is not there, which {fields.model!r} needs")
    vocabulary = fields.index_texts()
    _check_merges(fields, vocabulary, fields.merges)
    normalizer: Any = normalizers.NFC() if rule.composed else None
    options = {"ignore_merges": rule.whole_words}
    if not rule.by_bytes:
        normalizer = normalizers.Replace(" ", SPACE)
        options |= _fallback_options(fields)
    return _Parts(
        plain_model=models.BPE(_found_tokens(fields), [], **options),
        model=models.BPE(vocabulary, fields.merges, **options),
        decoder=decoders.ByteLevel() if rule.by_bytes else _spaced_decoder(has_space=False),
        normalizer=normalizer,
        pre_tokenizer=_join_steps(rule),
        has_bos=_flag(fields, "bos", rule.has_bos),
        has_eos=_flag(fields, "eos", False),
        joined=not rule.by_bytes,
    )


def _join_steps(rule: Rule) -> Any:
    return rule.steps[0] if len(rule.steps) == 1 else Sequence(list(rule.steps))


def _check_merges(
    fields: TokenFields, vocabulary: dict[str, int], merges: list[tuple[str, str]]
) -> None:
    """Raises BadModel for a merge of what are no tokens, or that makes none."""
    for place, (left, right) in enumerate(merges):
        for text in (left, right, left + right):
            if text not in vocabulary:
                reason = f"has {f'{left} {right}'!r} at {place}, and {text!r} is no token"
                raise fields.refusal("ggml.merges", reason)


# --- letters, and merges by scores


def _build_scored(fields: TokenFields) -> _Parts:
    """A tokenizer of sentencepiece, which merges the neighbours that make the piece of the highest
    score, the leftmost first.

    Tokens that users defined are found first, and are parts of no other. Where the file has a space
    before a text, it also has one before what follows any token that was found so.
    """
    if fields.flags.get("remove_extra_whitespaces"):
        reason = "is true, and texts keep their spaces here"
        raise fields.refusal("ggml.remove_extra_whitespaces", reason, ELSEWHERE)
    vocabulary = fields.index_texts()
    merges = fields.merges
    if merges is None:
        merges = _derive_merges(fields)
    else:
        _check_merges(fields, vocabulary, merges)
    has_space = fields.flags.get("add_space_prefix", True)
    replacement = normalizers.Replace(" ", SPACE)
    prefixed = normalizers.Sequence([normalizers.Prepend(SPACE), replacement])
    options = _fallback_options(fields)
    return _Parts(
        plain_model=models.BPE(_found_tokens(fields), [], **options),
        model=models.BPE(vocabulary, merges, **options),
        decoder=_spaced_decoder(has_space),
        normalizer=prefixed if has_space else replacement,
        has_bos=_flag(fields, "bos", True),
        has_eos=_flag(fields, "eos", False),
        # A prefix would stand before the tokens themselves, which are brought to the same form.
        joined=not has_space,
    )


def _fallback_options(fields: TokenFields) -> dict[str, Any]:
    """How letters are written that are no tokens: by their bytes, or as one unknown token."""
    byte_texts = {fields.texts[token] for token in fields.of_types(BYTE)}
    missing = [f"<0x{byte:02X}>" for byte in range(256) if f"<0x{byte:02X}>" not in byte_texts]
    if byte_texts and missing:
        raise fields.refusal("ggml.tokens", f"has tokens of bytes, and lacks {missing[0]}")
    return {
        "byte_fallback": bool(byte_texts),
        "fuse_unk": True,
        "unk_token": fields.name_token("unknown"),
    }


def _spaced_decoder(has_space: bool) -> Any:
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if has_space else steps)


def _derive_merges(fields: TokenFields) -> list[tuple[str, str]]:
    """Every way to make a piece of two others, those of higher scores first. Raises BadModel where
    scores say no order, or where a merge would make a token that is not used.
    """
    scores = fields.scores
    if scores is None:
        raise fields.refusal("ggml.scores", f"is not there, which {fields.model!r} needs")
    pieces = [token for token in fields.of_types(NORMAL, UNUSED) if len(fields.texts[token]) > 1]
    if len(pieces) > 1 and np.ptp(scores[pieces]) == 0:
        reason = f"has one number for all tokens ({scores[pieces[0]]}), which is no order"
        raise fields.refusal("ggml.scores", reason)
    parts = {fields.texts[token] for token in fields.of_types(NORMAL, UNUSED)}
    merges: list[tuple[str, str]] = []
    by_score = np.asarray(pieces, np.int64)[np.argsort(-scores[pieces], kind="stable")]
    for token in by_score.tolist():
        piece = fields.texts[token]
        for cut in range(1, len(piece)):  # written out: there are millions
            left = piece[:cut]
            if left in parts:
                right = piece[cut:]
                if right in parts:
                    merges.append((left, right))
    for token in fields.of_types(UNUSED):
        # sentencepiece would merge to it and take it apart again, which merges cannot say.
        if _split_piece(fields.texts[token], parts):
            reason = f"says that {fields.texts[token]!r} is not used, and merges lead to it"
            raise fields.refusal("ggml.token_type", reason, ELSEWHERE)
    return merges


def _split_piece(piece: str, parts: Set[str]) -> list[tuple[str, str]]:
    """The ways to make a piece of two."""
    return [
        (piece[:cut], piece[cut:])
        for cut in range(1, len(piece))
        if piece[:cut] in parts and piece[cut:] in parts
    ]


# --- the longest pieces


def _build_longest(fields: TokenFields) -> _Parts:
    """A tokenizer of BERT's. Files write a piece that begins a word with the sign of a space, and
    one inside a word without any.
    """
    fields.ids.setdefault("cls", fields.ids.get("bos", -1))
    if fields.ids["cls"] < 0 or "seperator" not in fields.ids or "unknown" not in fields.ids:
        reason = "is not there: a text is written between two tokens"
        raise fields.refusal("ggml.seperator_token_id", reason)
    ids = {token for task, token in fields.ids.items() if task in TASKS}
    ids |= {*fields.of_types(CONTROL, UNKNOWN, USER_DEFINED)}
    if any(text.startswith(SPACE) for text in fields.texts):
        fields.texts = [
            text if token in ids or text[0] + text[-1] == "[]" else _word_piece(text)
            for token, text in enumerate(fields.texts)
        ]
    vocabulary = fields.index_texts()
    cls, sep = fields.ids["cls"], fields.ids["seperator"]
    lowercase = fields.flags.get("normalizer.lowercase", True)
    model = models.WordPiece(
        vocabulary,
        unk_token=fields.texts[fields.ids["unknown"]],
        max_input_chars_per_word=LONGEST_WORD,
        continuing_subword_prefix=CONTINUING,
    )
    return _Parts(
        plain_model=model,
        model=model,
        decoder=decoders.WordPiece(prefix=CONTINUING),
        normalizer=normalizers.BertNormalizer(
            lowercase=lowercase,
            strip_accents=fields.flags.get("normalizer.strip_accents", lowercase),
        ),
        pre_tokenizer=BertPreTokenizer(),
        frame=processors.BertProcessing((fields.texts[sep], sep), (fields.texts[cls], cls)),
    )


def _word_piece(text: str) -> str:
    return text[1:] if text.startswith(SPACE) else CONTINUING + text


BUILDERS: dict[str, Callable[[TokenFields], _Parts]] = {
    "gpt2": _build_bytes,
    "gemma4": _build_bytes,
    "llama": _build_scored,
    "bert": _build_longest,
}
