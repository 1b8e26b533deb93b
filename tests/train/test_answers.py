"""train/answers.py: the target's answers and laws, as they are on disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from foretell.api.lm import LM
from foretell.errors import BadConfig, BadFile
from foretell.train import answers
from tests import tiny

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
PROMPTS = ["def add(", "The quick", "naïve", "the dog"]


@pytest.fixture
def lm(monkeypatch: pytest.MonkeyPatch) -> Iterator[LM]:
    lm = tiny.lm()
    assert lm.tokenizer is not None
    lm.tokenizer.chat_template = TEMPLATE
    yield lm
    lm.tokenizer.chat_template = None


def test_what_is_written_are_the_texts_and_laws_of_the_target(lm: LM, tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    (path,) = answers.write_answers(
        lm, PROMPTS, tmp_path, tokens=6, seed=3, tell=lambda *what: told.append(what)
    )
    assert told == [("answers", 4, 4)]
    texts = list(answers.read_texts(path))
    assert len(texts) == len(PROMPTS)
    for number, (prompt, text) in enumerate(zip(PROMPTS, texts, strict=True)):
        ids = lm.prompt_ids(prompt)
        assert text.tokens[: text.prompt].tolist() == ids
        temperature = answers.TEMPERATURES[number]
        again = lm.generate(
            ids, "plain", max_new_tokens=6, temperature=temperature, seed=3 + number
        )
        assert text.tokens[text.prompt :].tolist() == again.tokens
        assert text.top_tokens.shape == (len(again.tokens), answers.BEST)
        tokens = text.tokens.tolist()
        for i, (best, logprobs) in enumerate(zip(text.top_tokens, text.logprobs, strict=True)):
            law = lm.models["target"].score(tokens[: text.prompt + i])[-1].log_softmax(-1)
            order = law.topk(answers.BEST)
            assert best.tolist() == order.indices.tolist()
            assert torch.tensor(logprobs.astype(np.float32)).allclose(order.values, atol=1e-2)
        if temperature == 0:
            assert (text.top_tokens[:, 0] == text.tokens[text.prompt :]).all()


def test_plain_texts_are_written_in_pieces_once(tmp_path: Path) -> None:
    source = tmp_path / "texts"
    source.mkdir()
    (source / "long.txt").write_text("a" * 1000, "utf-8")
    (source / "short.md").write_text("b" * 70 + "c" * 10, "utf-8")

    def encode(text: str) -> list[int]:
        return [ord(letter) for letter in text]

    out = tmp_path / "out" / "text"
    (path,) = answers.write_texts(encode, [str(source)], out, 2000, 1)
    texts = list(answers.read_texts(path))
    found = sorted("".join(map(chr, text.tokens)) for text in texts)
    assert found == sorted(["a" * 384, "a" * 384, "a" * 232, "b" * 70 + "c" * 10])
    for text in texts:
        assert text.prompt == 1 and text.top_tokens[:, 0].tolist() == text.tokens[1:].tolist()
        assert not text.logprobs.any()
    assert answers.write_texts(encode, ["no such place"], out, 2000, 1) == [path]
    (path,) = answers.write_texts(encode, [str(source)], tmp_path / "fewer", 400, 1)
    assert len(list(answers.read_texts(path))) == 2
    with pytest.raises(BadConfig, match="64 tokens"):
        answers.write_texts(lambda text: [1], [str(source)], tmp_path / "none", 400, 1)


def test_prompts_without_an_answer_are_told_of(lm: LM, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="1 of the prompts from number 0 on got no answer"):
        (path,) = answers.write_answers(lm, ["the dog", "dog " * 400], tmp_path, tokens=4, seed=0)
    assert len(list(answers.read_texts(path))) == 1


def test_a_run_goes_on_with_the_files_that_are_missing(
    lm: LM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "A_FILE", 2)
    files = answers.write_answers(lm, PROMPTS, tmp_path, tokens=4, seed=0)
    contents = [path.read_bytes() for path in files]
    assert len(files) == 2
    files[1].unlink()
    before = files[0].stat().st_mtime_ns
    assert answers.write_answers(lm, PROMPTS, tmp_path, tokens=4, seed=0) == files
    assert [path.read_bytes() for path in files] == contents
    assert files[0].stat().st_mtime_ns == before


def test_without_prompts_the_answers_that_are_there_serve(lm: LM, tmp_path: Path) -> None:
    assert answers.write_all(lm, [], 0, tmp_path, tokens=4, seed=0) == []
    files = answers.write_all(lm, PROMPTS, 0, tmp_path, tokens=4, seed=0)
    assert files and answers.write_all(lm, [], 0, tmp_path, tokens=4, seed=0) == files


def test_the_model_asks_itself(lm: LM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opening, ending = answers.turn_of(lm)
    assert lm.decode(opening) == "<user>" and ending == "<|end|><assistant>"
    # A random model ends its turns by the end of the text, and not all of them in time.
    questions = answers.own_questions(lm, 12, 40, seed=0)
    assert all(q[0]["role"] == "user" and q[0]["content"] for q in questions)
    monkeypatch.setattr(answers, "own_questions", lambda *args: [PROMPTS[0]])
    monkeypatch.setattr(answers, "A_FILE", 2)
    files = answers.write_all(lm, PROMPTS[:1], 3, tmp_path, 4, 0)
    assert [len(list(answers.read_texts(path))) for path in files] == [1, 1, 1]
    assert answers.write_all(lm, PROMPTS[:1], 3, tmp_path, 4, 0) == files


def test_a_model_without_a_template_asks_nothing() -> None:
    with pytest.raises(BadConfig, match="chat template"):
        answers.own_questions(tiny.lm(), 1, 4, seed=0)


@pytest.mark.parametrize("damage", [b"", b"no file", None])
def test_a_damaged_file_is_named(damage: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "00000.safetensors"
    if damage is not None:
        path.write_bytes(damage)
    with pytest.raises(BadFile, match=r"00000.safetensors: no file of answers"):
        list(answers.read_texts(path))
