"""How byte-level tokenizers split a text into words before they merge, by the names that
`tokenizer.ggml.pre` has for it.

A pattern makes a part of every match, and a part of what lies between two matches; the next pattern
goes on with each part. Where the models' own files are known they are followed, also where
llama.cpp is simpler: NFC first, digits that are told apart after the bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenizers import Regex
from tokenizers.pre_tokenizers import ByteLevel, Digits, Punctuation, Split

WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
APOSTROPHE = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|" + SPACES
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{APOSTROPHE}|{WORD}|\p{{N}}{{1,3}}|{SIGNS}"
QWEN2 = rf"{APOSTROPHE}|{WORD}|\p{{N}}|{SIGNS}"
QWEN35 = (
    rf"{APOSTROPHE}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{SPACES}"
)
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
UPPER_OTHER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
LOWER_OTHER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
PATHS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|" + SPACES


def cased_words(upper: str = UPPER, lower: str = LOWER, ending: str = "") -> str:
    """A pattern of words in which small letters follow large ones, and what may end them."""
    beginning = r"[^\r\n\p{L}\p{N}]?"
    return f"{beginning}{upper}*{lower}+{ending}|{beginning}{upper}+{lower}*{ending}"


TEKKEN = rf"{cased_words()}|\p{{N}}|{PATHS}"
GPT4O = rf"{cased_words(ending=f'{APOSTROPHE}?')}|\p{{N}}{{1,3}}|{PATHS}"
KIMI = (
    rf"[\p{{Han}}]+|{cased_words(UPPER_OTHER, LOWER_OTHER, f'{APOSTROPHE}?')}"
    rf"|\p{{N}}{{1,3}}|{SIGNS}"
)
HAN_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
HAN_HANGUL = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
ASCII_SIGN_WORD = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
MARKED_WORD = r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
DEEPSEEK3 = rf"{ASCII_SIGN_WORD}|{MARKED_WORD}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{SPACES}"
SPARK = rf"{ASCII_SIGN_WORD}|{MARKED_WORD}| ?[\p{{P}}\p{{S}}]+|[\r\n]|\s+(?!\S)|\s+"
# Letters that are large or small, as DeepSeek LLM's tokenizer lists them.
CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1"
    "\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5"
    "\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a"
    "\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3"
    "\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115"
    "\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149"
    "\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    "\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06"
    "\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df"
    "\U0001e900-\U0001e943"
)
CASED_SIGNS = "!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002"
BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
YOUTU = (
    "[\uac00-\ud7a3\u3131-\u318e]+"
    "|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
    f"|[\u3105-\u312f]+|{HAN_KANA}"
)
# Scripts without spaces between words, as AFMoE's tokenizer lists them.
UNSPACED = (
    "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f"
    "\u2f00-\u2fdf\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f"
    "\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)
THREES = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"  # groups of three digits, counted from the end
LONG_SPACES = "|".join(rf"\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4))
LINES = r"[^\n]+|[\n]+"
BYTES = ByteLevel(add_prefix_space=False, use_regex=False)  # each byte as a letter
GPT2_BYTES = ByteLevel(add_prefix_space=False, use_regex=True)  # after GPT-2's pattern
DIGITS = Digits(individual_digits=True)


@dataclass(frozen=True)
class Rule:
    """How texts are split. `steps`: pre-tokenizers in their order; `by_bytes`: the last of them
    writes each byte as a letter, else pieces are texts and \u2581 is a space. `whole_words`: a word
    of the vocabulary is one token, whatever the merges say. `has_bos`: a text begins with that
    token where the file is silent. `composed`: a text is brought to Unicode's form NFC first.
    """

    steps: tuple[Any, ...]
    by_bytes: bool = True
    whole_words: bool = False
    has_bos: bool = False
    composed: bool = False


def cut(*patterns: str) -> tuple[Any, ...]:
    """The steps of these patterns, before each byte is a letter."""
    return (*_split(*patterns), BYTES)


def _split(*patterns: str) -> tuple[Any, ...]:
    return tuple(Split(Regex(pattern), "isolated") for pattern in patterns)


_GPT2 = Rule((GPT2_BYTES,))
_DIGITS = Rule((DIGITS, GPT2_BYTES))
_QWEN2 = Rule(cut(QWEN2))
_GPT4O = Rule(cut(GPT4O))
_BLOOM = Rule(cut(BLOOM))
_DEEPSEEK3 = Rule(cut(r"\p{N}{1,3}", HAN_KANA, DEEPSEEK3))
_BAILING = Rule(
    cut(
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
    )
)
_LINES = Rule(_split(LINES), by_bytes=False, has_bos=True)

# The rule of each set of names.
NAMED: dict[str, Rule] = {
    "default": Rule(cut(r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano": Rule(
        cut(LLAMA3), whole_words=True, has_bos=True
    ),
    "dbrx smaug-bpe glm4 chatglm-bpe": Rule(cut(LLAMA3)),
    "jais-2": Rule(
        cut(
            rf"{APOSTROPHE}|{WORD}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
            rf"|\s*[\r\n]+|{LONG_SPACES}|\s{{1,2}}(?!\S)|\s{{1}}"
        )
    ),
    "gpt-2 phi-2 jina-es jina-de gigachat jina-v1-en jina-v2-es jina-v2-de jina-v2-code a.x-4.0 "
    "mellum modern-bert roberta-bpe jais exaone4 trillion granite-docling": _GPT2,
    "mpt olmo": Rule((GPT2_BYTES,), composed=True),
    "starcoder refact smollm codeshell exaone minerva-7b mellum2": _DIGITS,
    "command-r": Rule((DIGITS, GPT2_BYTES), composed=True),
    "falcon": Rule(
        (
            Punctuation("contiguous"),
            GPT2_BYTES,
            Digits(individual_digits=False),
            *_split("[0-9][0-9][0-9]"),
        )
    ),
    "qwen2 f2llmv2": Rule(cut(QWEN2), composed=True),
    "qwen35": Rule(cut(QWEN35), composed=True),
    "deepseek-r1-qwen kormo megrez stablelm2 hunyuan solar-open grok-2": _QWEN2,
    "ufakzeka": Rule(cut(rf"{WORD}|\p{{N}}|{SIGNS}")),
    "seed-coder": Rule(
        cut(rf"{APOSTROPHE}|{WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{SPACES}"),
    ),
    "laguna": Rule(cut(LINES, QWEN2)),
    "minicpm5": Rule(
        cut(r"\p{N}{1,3}", rf"{APOSTROPHE}|{WORD}|\p{{N}}+|{SIGNS}"), whole_words=True
    ),
    "exaone-moe": Rule(
        cut(
            rf"{APOSTROPHE}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+"
            r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
        )
    ),
    "gpt-4o llama4 kanana2 talkie minimax-m2": _GPT4O,
    "granite-embed-multi-97m": Rule(cut(GPT4O), whole_words=True),
    "tiny_aya cohere2moe": Rule(cut(r"\d{1,3}(?=(?:\d{3})*\b)", GPT4O)),
    "tekken": Rule(cut(TEKKEN), whole_words=True, has_bos=True),
    "kimi-k2": Rule(cut(KIMI)),
    "superbpe": Rule(cut(r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    "bailingmoe bailingmoe2 llada-moe": _BAILING,
    "bloom gpt3-finnish poro-chat": _BLOOM,
    "viking": Rule(cut(BLOOM, r"\p{N}")),
    "deepseek-llm": Rule(
        (
            *_split(r"[\r\n]", rf"\s?[{CASED}]+", rf"\s?[{CASED_SIGNS}]+", r"\s+$", HAN_HANGUL),
            DIGITS,
            BYTES,
        )
    ),
    "deepseek-coder": Rule(
        (*_split(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", HAN_HANGUL), DIGITS, BYTES)
    ),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": _DEEPSEEK3,
    "spark2_5": Rule(cut(r"\p{N}{1,3}", HAN_KANA, SPARK, r"\p{N}")),
    "youtu": Rule(
        cut(YOUTU, rf"{cased_words(ending=f'{APOSTROPHE}?')}|\p{{N}}|{PATHS}"), whole_words=True
    ),
    "afmoe": Rule(cut(THREES, UNSPACED, DEEPSEEK3)),
    "chameleon": Rule(
        (
            *_split(
                "<sentinel:[0-9]+>",
                "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
                r"([\t\n]|    |  )",
                r"\p{N}",
                r"[\p{P}!-/:-@\[-`{-~]",
            ),
            GPT2_BYTES,
        ),
        has_bos=True,
    ),
    "gemma4 granite-embed-multi-311m": _LINES,
    "sarvam-moe": Rule(_split(LINES), by_bytes=False),
}
RULES = {name: rule for names, rule in NAMED.items() for name in names.split()}
