"""Tokenizers from the fields of files: against sentencepiece's rule, transformers' own classes, and
each other; and fields that cannot be.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from transformers import AutoTokenizer, BertTokenizer

from foretell.api.token_bounds import Fewest
from foretell.core.tokenizer_bytes import TokenizerWords
from foretell.errors import BadModel
from foretell.models.gguf.tokenizer import read_tokenizer
from foretell.serve.served import Served
from tests import tiny
from tests.models.gguf import tokens
from tests.models.gguf.tokens import BYTES, SPACE, Sentencepiece, scored, texts_of, write_file

TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"


def read(folder: Path, **keys: Any) -> Any:
    return read_tokenizer(write_file(folder / "it.gguf", **keys))


def listed(**more: Any) -> dict[str, Any]:
    """The keys of a byte-level vocabulary, with these in place of the usual ones."""
    ids = tiny.tokenizer().get_vocab()
    model = json.loads(tiny.tokenizer().backend_tokenizer.to_str())["model"]
    keys = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": sorted(ids, key=lambda text: ids[text]),
        "token_type": [tokens.CONTROL, *[tokens.NORMAL] * (len(ids) - 1)],
        "merges": [" ".join(pair) for pair in model["merges"]],
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    return {**keys, **more}


# --- sentencepiece


@pytest.fixture(scope="module")
def coder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One without a space before texts."""
    return read(tmp_path_factory.mktemp("words"), **scored(add_space_prefix=False))


def test_tokens_are_sentencepieces(coder: Any) -> None:
    reference = Sentencepiece(scored(), prefix=False)
    for text in [*texts_of(1500), "a" * 3000, "", "ha" * 700 + "h"]:
        ids = coder(text, add_special_tokens=False)["input_ids"]
        assert ids == reference.encode(text), repr(text)
        # The sign of a space is a space, as everywhere with sentencepiece.
        assert coder.decode(ids) == text.replace(SPACE, " ")


def test_a_space_before_a_text_is_part_of_its_first_word(tmp_path: Path) -> None:
    keys = scored()
    coder, reference = read(tmp_path, **keys), Sentencepiece(keys, prefix=True)
    parts = [part for part in tokens.PARTS if part.strip() and part != "[cut]"]
    for text in texts_of(500, parts=[*parts, " "]):
        if "  " in text or text.startswith(" ") or SPACE in text or "\n" in text:
            continue  # tokens of users are found before a space is put there
        ids = coder(text, add_special_tokens=False)["input_ids"]
        assert ids == reference.encode(text), repr(text)
        assert coder.decode(ids) == text


def test_letters_that_are_no_tokens_are_unknown_where_there_are_no_bytes(tmp_path: Path) -> None:
    keys = scored()
    for name in ("tokens", "token_type", "scores"):
        keys[name] = keys[name][:8] + keys[name][8 + 256 :]
    coder = read(tmp_path, **{**keys, "add_space_prefix": False})
    reference = Sentencepiece(keys, prefix=False)
    for text in texts_of(300):
        assert coder(text, add_special_tokens=False)["input_ids"] == reference.encode(text)


@pytest.mark.parametrize("space", [True, False, None])
def test_a_space_stands_before_a_text_where_the_file_says_so(
    space: bool | None, tmp_path: Path
) -> None:
    coder = read(tmp_path, **scored(add_space_prefix=space, add_bos_token=False))
    ids = coder("ab a")["input_ids"]
    first = "ab" if space is False else f"{SPACE}ab"
    assert coder.convert_ids_to_tokens(ids) == [first, f"{SPACE}a"]
    assert coder.decode(ids) == "ab a"
    spaced = coder(" ab")["input_ids"]
    assert coder.convert_ids_to_tokens(spaced) == (
        [SPACE, f"{SPACE}ab"] if space is not False else [f"{SPACE}ab"]
    )
    assert coder.decode(spaced) == " ab"
    assert coder.decode(ids[1:]) == ("a" if space is not False else " a")
    after = coder("x<s>ab")["input_ids"][-1]
    assert coder.convert_ids_to_tokens(after) == first, "and before what follows a special token"


@pytest.mark.parametrize("first", [True, False, None])
def test_the_first_and_last_tokens_of_a_text_are_what_the_file_says(
    first: bool | None, tmp_path: Path
) -> None:
    coder = read(tmp_path, **scored(add_bos_token=first))
    assert (coder("ab")["input_ids"][0] == 1) == (first is not False)
    assert coder("")["input_ids"] == ([1] if first is not False else [])
    for rule, usual in (("gpt-2", False), ("llama-bpe", True), ("tekken", True), ("qwen2", False)):
        wanted = usual if first is None else first
        coder = read(tmp_path, **listed(pre=rule, add_bos_token=first))
        assert (coder("ab")["input_ids"][0] == 0) == wanted, rule
    last = read(tmp_path, **scored(add_bos_token=first, add_eos_token=True))("ab")["input_ids"]
    assert last[-1] == 2


def test_merges_of_the_file_come_before_those_of_scores(tmp_path: Path) -> None:
    keys = scored(merges=["a b", "ab a"], add_space_prefix=False)
    keys["tokens"] = [*keys["tokens"], "aba"]
    keys["token_type"], keys["scores"] = [*keys["token_type"], 1], [*keys["scores"], -99.0]
    coder = read(tmp_path, **keys)
    assert coder.tokenize("aba") == ["aba"] and coder.tokenize("ba") == ["b", "a"]


def test_ids_that_a_file_does_not_name_are_the_kinds_usual_ones(tmp_path: Path) -> None:
    keys = scored()
    for name in ("bos", "eos", "unknown"):
        del keys[f"{name}_token_id"]
    coder = read(tmp_path, **{**keys, "padding_token_id": 0xFFFFFFFF})
    assert (coder.bos_token, coder.eos_token, coder.unk_token) == ("<s>", "</s>", "<unk>")
    assert coder.pad_token is None


# --- bytes


def test_bytes_are_merged_in_the_order_of_the_list(tmp_path: Path) -> None:
    coder, theirs = read(tmp_path, **listed()), tiny.tokenizer()
    for text in [*tiny.TEXTS, *texts_of(200), "<|end|>x<|end|>"]:
        ids = coder(text)["input_ids"]
        assert ids == theirs(text)["input_ids"]
        for skip in (True, False):
            wanted = theirs.decode(ids, skip_special_tokens=skip)
            assert coder.decode(ids, skip_special_tokens=skip) == wanted


def test_words_of_the_vocabulary_are_taken_whole_by_some_rules(tmp_path: Path) -> None:
    keys = listed()
    keys["tokens"], keys["token_type"] = [*keys["tokens"], "zebra"], [*keys["token_type"], 1]
    whole = [len(keys["tokens"]) - 1]  # no merges lead to it
    for rule, taken in (("gpt-2", False), ("llama-bpe", True), ("tekken", True), ("dbrx", False)):
        coder = read(tmp_path, **{**keys, "pre": rule, "add_bos_token": False})
        assert (coder("zebra")["input_ids"] == whole) == taken, rule


def test_gemma_4_merges_letters_by_a_list(tmp_path: Path) -> None:
    texts = ["<pad>", "<eos>", "<bos>", "<unk>", *BYTES, *"ab\n", SPACE, "ab", f"{SPACE}ab", "\n\n"]
    types = [3, 3, 3, 2, *[6] * 256, *[1] * 7]
    coder = read(
        tmp_path,
        model="gemma4",
        tokens=texts,
        token_type=types,
        merges=["a b", f"{SPACE} ab", "\n \n"],
        bos_token_id=2,
        unknown_token_id=3,
    )
    ids = coder("ab ab\n\n\nc")["input_ids"]
    pieces = ["<bos>", "ab", f"{SPACE}ab", "\n\n", "\n", "<0x63>"]
    assert coder.convert_ids_to_tokens(ids) == pieces
    assert coder.decode(ids[1:]) == "ab ab\n\n\nc"


# --- BERT


@pytest.mark.parametrize("lowercase", [True, False])
def test_pieces_of_bert_are_as_transformers_has_them(lowercase: bool, tmp_path: Path) -> None:
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    starts = ["un", "aff", "a", "b", "the", "The", "\u4f60", ",", "'", "x"]
    insides = ["##aff", "##able", "##a", "##b", "##s"]
    theirs = BertTokenizer(
        vocab={text: token for token, text in enumerate([*special, *starts, *insides])},
        do_lower_case=lowercase,
    )
    coder = read(
        tmp_path,
        model="bert",
        tokens=[*special, *(SPACE + text for text in starts), *(text[2:] for text in insides)],
        token_type=[3] * 5 + [1] * 15,
        cls_token_id=2,
        seperator_token_id=3,
        unknown_token_id=1,
        padding_token_id=0,
        mask_token_id=4,
        normalizer__lowercase=lowercase,
    )
    for text in (
        "unaffable",
        "The unaffs",
        "th\u00e9 ab,bs",
        "\u4f60\u4f60",
        "[MASK] qqq",
        "",
        "A's",
    ):
        ids = coder(text)["input_ids"]
        assert ids == theirs(text)["input_ids"], text
        assert coder.decode(ids, skip_special_tokens=True) == theirs.decode(
            ids, skip_special_tokens=True
        )


# --- what foretell does with a tokenizer


def test_pieces_are_bytes_of_the_text(coder: Any, tmp_path: Path) -> None:
    words = TokenizerWords(coder)
    for text in texts_of(100):
        ids = coder(text, add_special_tokens=False)["input_ids"]
        assert words.text(ids).decode() == text.replace(SPACE, " ")
    assert (words.start, words.end) == ((1,), 2)
    assert words.specials == {"<unk>": 0, "<s>": 1, "</s>": 2}
    bounds = Fewest(coder)
    for text in texts_of(100):
        assert bounds.longest > 0 and bounds.tokens(text) <= len(coder(text)["input_ids"])


def test_grammars_read_them(coder: Any, tmp_path: Path) -> None:
    hf = pytest.importorskip("llguidance.hf", reason="needs foretell[constrain]")
    for each in (coder, read(tmp_path, **listed())):
        forms = hf.from_tokenizer(each, len(each), None)
        for text in texts_of(50):
            ids = each(text, add_special_tokens=False)["input_ids"]
            wanted = text.replace(SPACE, " ") if each is coder else text
            assert forms.decode_bytes(ids).decode() == wanted
        assert forms.is_special_token(each.eos_token_id) and forms.eos_token == each.eos_token_id


def test_a_server_says_what_a_token_stands_for(coder: Any) -> None:
    served = Served(cast(Any, SimpleNamespace(tokenizer=coder)), "it")
    texts = scored()["tokens"]
    wanted = {
        "  ": b"  ",
        "<s>": b"<s>",
        "<0xC3>": b"\xc3",
        f"{SPACE}ab": b" ab",
        "[cut]": b"[cut]",
    }
    for text, token_bytes in wanted.items():
        token = texts.index(text)
        assert served.token_bytes(token) == token_bytes
        assert served.is_special(token) == (text in ("  ", "<s>", "[cut]"))
    assert served.token_bytes(len(texts)) == b"", "a row of the model that is no token"


def test_types_say_what_is_special(coder: Any) -> None:
    ids = coder("a<s>  [cut]<unk>b")["input_ids"]
    texts = scored()["tokens"]
    assert [texts[token] for token in ids] == ["<s>", "a", "<s>", "  ", "[cut]", "<unk>", "b"]
    assert coder.decode(ids, skip_special_tokens=True) == "a  [cut]b"
    special = {token for token, added in coder.added_tokens_decoder.items() if added.special}
    assert special == {0, 1, 2} and len(coder) == len(scored()["tokens"])


def test_a_folder_has_the_same_tokenizer(tmp_path: Path) -> None:
    for place, keys in enumerate(
        (scored(chat_template=TEMPLATE), scored(add_space_prefix=False), listed(pre="qwen2"))
    ):
        coder = read(tmp_path, **keys)
        folder = tmp_path / str(place)
        coder.save_pretrained(folder)
        back = AutoTokenizer.from_pretrained(folder)
        assert back.get_vocab() == coder.get_vocab()
        assert back.chat_template == coder.chat_template
        for text in [*texts_of(100), "x<s>y"]:
            ids = coder(text)["input_ids"]
            assert back(text)["input_ids"] == ids and back.decode(ids) == coder.decode(ids)


# --- chats


def test_a_chat_that_writes_its_first_token_has_it_once(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "ab"}]
    coder = read(tmp_path, **scored(chat_template=TEMPLATE))
    assert coder.apply_chat_template(chat, return_dict=False) == coder("ab")["input_ids"]
    assert coder("ab")["input_ids"].count(1) == 1


def test_templates_have_names(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "ab"}]
    coder = read(tmp_path, **scored(chat_template="one", chat_template__tool_use="two"))
    assert coder.apply_chat_template(chat, tokenize=False) == "one"
    assert coder.apply_chat_template(chat, tools=[{"name": "f"}], tokenize=False) == "two"
    assert coder.apply_chat_template(chat, chat_template="tool_use", tokenize=False) == "two"
    assert read(tmp_path, **scored()).chat_template is None


# --- fields that cannot be


def short(keys: dict[str, Any], name: str) -> dict[str, Any]:
    return {**keys, name: keys[name][:-1]}


def spoilt(keys: dict[str, Any], name: str, place: int, value: Any) -> dict[str, Any]:
    changed = list(keys[name])
    changed[place] = value
    return {**keys, name: changed}


def encoded(keys: dict[str, Any], name: str) -> dict[str, Any]:
    """With one text that is no UTF-8."""
    return {**keys, name: [*(text.encode() for text in keys[name][:-1]), b"\xff\xfe"]}


UNMERGED = scored()["tokens"].index("abab")
END = len(scored()["tokens"]) - 1
WRONG = {
    "ggml.model is 'quipu', which is unknown here; llama.cpp": scored(model="quipu"),
    "ggml.model is 'rwkv' (RWKV's tries), which is not built here; llama.cpp": scored(model="rwkv"),
    "ggml.model is 't5' (Unigram": scored(model="t5"),
    "ggml.model is 'plamo2' (PLaMo": scored(model="plamo2"),
    "ggml.model is not there": {"tokens": ["a"]},
    "ggml.model is 3, and no text": scored(model=3),
    "ggml.tokens is not there: the file has no vocabulary; llama.cpp": {"model": "llama"},
    "ggml.pre is 'a-new-rule': its tokenizer splits words by that rule, unknown here; llama.cpp": (
        listed(pre="a-new-rule")
    ),
    "ggml.merges is not there, which 'gpt2' needs": listed(merges=None),
    "ggml.merges has 'Zzz Q' at 0, and 'Zzz' is no token": listed(merges=["Zzz Q"]),
    "ggml.merges has 'Z Q' at 0, and 'ZQ' is no token": listed(merges=["Z Q"]),
    "ggml.merges has 'ZQ' at 0, which is no two": listed(merges=["ZQ"]),
    "ggml.merges is no list of texts": listed(merges=[1, 2]),
    "ggml.scores is not there, which 'llama' needs": scored(scores=None),
    "ggml.scores has one number for all tokens (-1.0)": scored(
        scores=[-1.0] * len(scored()["tokens"])
    ),
    f"ggml.scores has {END} numbers, and tokenizer.ggml.tokens has {END + 1}": short(
        scored(), "scores"
    ),
    "ggml.scores has the number nan for 7": spoilt(scored(), "scores", 7, float("nan")),
    "ggml.scores is no list of numbers": scored(scores=["a"]),
    f"ggml.token_type has {END} numbers": short(scored(), "token_type"),
    "ggml.token_type has the type 9 for token 5, and it is 1 to 6": spoilt(
        scored(), "token_type", 5, 9
    ),
    "ggml.token_type says that 'abab' is not used, and merges lead to it": spoilt(
        scored(), "token_type", UNMERGED, tokens.UNUSED
    ),
    "ggml.tokens has tokens of bytes, and lacks <0x00>": spoilt(scored(), "tokens", 8, "<0xqq>"),
    "ggml.tokens has 'ab' twice": spoilt(scored(), "tokens", UNMERGED, "ab"),
    "ggml.tokens has a token of 5000 letters, and 4096": spoilt(
        scored(), "tokens", UNMERGED, "a" * 5000
    ),
    f"entry {END} of tokenizer.ggml.tokens is no UTF-8; fetch": encoded(scored(), "tokens"),
    "of tokenizer.ggml.merges is no UTF-8": encoded(listed(), "merges"),
    f"ggml.bos_token_id is 9999, and the file has the tokens 0 to {END}": scored(bos_token_id=9999),
    "ggml.mask_token_id is 'x', and": scored(mask_token_id="x"),
    "ggml.bos_token_id is not there, and a text begins": listed(bos_token_id=None, pre="llama-bpe"),
    "ggml.remove_extra_whitespaces is true": scored(remove_extra_whitespaces=True),
    "ggml.seperator_token_id is not there": {
        "model": "bert",
        "tokens": ["[UNK]", "a"],
        "unknown_token_id": 0,
        "cls_token_id": 0,
    },
    "chat_template does not parse (line 2: ": scored(chat_template="a\n{% for %}"),
    "chat_template.tools does not parse (line 1: ": scored(chat_template__tools="{{ a"),
}


@pytest.mark.parametrize("said", WRONG)
def test_what_cannot_be_is_one_line(said: str, tmp_path: Path) -> None:
    with pytest.raises(BadModel) as refused:
        read(tmp_path, **WRONG[said])
    line = str(refused.value)
    assert said in line and line.startswith(f"{tmp_path / 'it.gguf'}: ") and "\n" not in line
    assert line.rpartition("; ")[2], "and the cure"


def test_a_template_that_is_no_utf_8_is_one_line(tmp_path: Path) -> None:
    file = write_file(tmp_path / "it.gguf", **scored(chat_template="abcdef"))
    file.write_bytes(file.read_bytes().replace(b"abcdef", b"abc\xffef"))
    with pytest.raises(BadModel, match=r"\(tokenizer\.chat_template is no UTF-8\); fetch it again"):
        read_tokenizer(file)


def test_tokens_without_a_text_have_a_name(tmp_path: Path) -> None:
    keys = listed()
    keys["tokens"] = [*keys["tokens"], "", ""]
    keys["token_type"] = [*keys["token_type"], 5, 5]
    count = len(keys["tokens"])
    assert read(tmp_path, **keys).convert_ids_to_tokens(count - 1) == f"[EMPTY_{count - 1}]"
