"""The tokenizers of real .gguf files: Gemma 3's as sentencepiece has it, SmolLM2's as in its
folder.
"""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from foretell.loading.fetch import fetch
from foretell.loading.names import aliases
from foretell.models.gguf.token_fields import CONTROL, UNKNOWN, TokenFields, read_fields
from foretell.models.gguf.tokenizer import read_tokenizer
from tests.conftest import USERS
from tests.models.gguf.tokens import PARTS, SPACE, Sentencepiece, texts_of

pytestmark = pytest.mark.real

ROOT = Path(__file__).resolve().parent.parent.parent
TOGETHER = (
    *PARTS,
    *("Größe", "naïve", " the", "漢字かな", "한국어", "हिन्दी", "مرحبا", "שלום", "ไทย", "Ελλάδα"),
    *(
        "👩\u200d👩\u200d👧",
        "🏳️\u200d🌈",
        "\u00a0",
        "\u3000",
        "\ufeff",
        "\t\t\t",
        "\n\n\n",
        "0x1F",
        "1234567",
    ),
)


def file_of(name: str) -> Path:
    """The .gguf file of a known model, which is kept where the user's models are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FORETELL_CACHE", str(USERS))
        if name not in aliases():
            pytest.skip(f"{name} is no known model")
        found = fetch(name)
    return found if found.is_file() else next(found.glob("*.gguf"))


@cache
def lines() -> list[str]:
    """2,000 lines: code and prose of this project, and scripts of many languages mixed."""
    files = [
        path for kind in ("py", "md", "c") for path in sorted(ROOT.glob(f"[dft]*/**/*.{kind}"))
    ]
    written = [line for path in files for line in path.read_text("utf-8").splitlines() if line]
    chosen = random.Random(0).sample(written, 1500)
    return [*chosen, *texts_of(500, parts=TOGETHER)]


@pytest.fixture(scope="module")
def fields() -> TokenFields:
    return read_fields(file_of("gemma3-270m"))


@pytest.fixture(scope="module")
def coder(fields: TokenFields) -> Any:
    return read_tokenizer(fields.path)


@pytest.fixture(scope="module")
def plain_lines(fields: TokenFields) -> list[str]:
    """The lines without names of special tokens, which sentencepiece finds in no text."""
    names = [fields.texts[token] for token in fields.of_types(CONTROL, UNKNOWN)]
    assert all(name[0] == "<" for name in names)
    plain = []
    for line in lines():
        for name in names if "<" in line else ():
            line = line.replace(name, "")
        plain.append(line)
    return plain


def test_gemmas_tokens_are_those_of_sentencepieces_rule(
    fields: TokenFields, coder: Any, plain_lines: list[str]
) -> None:
    assert fields.scores is not None and len(coder) == 262_144
    reference = Sentencepiece(
        {
            "tokens": fields.texts,
            "token_type": fields.types.tolist(),
            "scores": fields.scores.tolist(),
            "unknown_token_id": fields.ids["unknown"],
        },
        prefix=False,
    )
    for line in plain_lines:
        ids = coder(line)["input_ids"]
        assert ids == [coder.bos_token_id, *reference.encode(line)], line
        assert coder.decode(ids, skip_special_tokens=True) == line.replace(SPACE, " ")


def test_gemmas_tokens_are_sentencepieces(
    fields: TokenFields, coder: Any, plain_lines: list[str]
) -> None:
    library = pytest.importorskip("sentencepiece", reason="needs the package sentencepiece")
    from sentencepiece import sentencepiece_model_pb2

    assert fields.scores is not None
    model = sentencepiece_model_pb2.ModelProto()
    user_defined = model.SentencePiece.USER_DEFINED
    for text, score, kind in zip(fields.texts, fields.scores, fields.types, strict=True):
        piece = text.replace(" ", SPACE) if kind == user_defined else text
        model.pieces.add(piece=piece, score=float(score), type=int(kind))
    model.trainer_spec.model_type = model.trainer_spec.BPE
    model.trainer_spec.byte_fallback = True
    model.trainer_spec.unk_id = fields.ids["unknown"]
    model.normalizer_spec.name = "identity"
    model.normalizer_spec.add_dummy_prefix = False
    model.normalizer_spec.remove_extra_whitespaces = False
    theirs = library.SentencePieceProcessor()
    theirs.LoadFromSerializedProto(model.SerializeToString())
    for line in [*plain_lines, "a" * 5000, "=-" * 999, ""]:
        ids = coder(line, add_special_tokens=False)["input_ids"]
        assert ids == theirs.EncodeAsIds(line), line
        assert coder.decode(ids) == theirs.DecodeIds(ids), line


def test_smollm2s_tokens_are_those_of_its_folder() -> None:
    file = file_of("smollm2")
    coder, theirs = read_tokenizer(file), AutoTokenizer.from_pretrained(file.parent)
    assert coder.get_vocab() == theirs.get_vocab()
    assert coder.chat_template == theirs.chat_template
    for line in [*lines(), "<|im_start|>user\nHi<|im_end|>"]:
        ids = coder(line)["input_ids"]
        assert ids == theirs(line)["input_ids"], line
        assert coder.decode(ids) == theirs.decode(ids) == line
