"""A model's own answers with its distributions: what a draft model for it is distilled on.

Answers are written by the engine, many at once, each token with the model's likeliest tokens
there. A file holds some hundred of them as flat arrays, so that a run can be interrupted and
continued: what is on disk is not written again.

    tokens     (n,)     all texts after each other, prompts included
    starts     (m + 1,) where each text begins
    prompts    (m,)     how many of its tokens are prompt
    best       (n, K)   the K likeliest tokens there; 0 in prompts
    logprobs   (n, K)   their log-probabilities in half precision; -inf in prompts
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from foretell.bench.sets import prompt_ids
from foretell.errors import BadConfig, BadFile, ForetellError, ForetellWarning
from foretell.ops.files import replace_file
from foretell.train.corpus import read_documents

if TYPE_CHECKING:
    from foretell.api.lm import LM
    from foretell.api.outputs import Output

BEST = 20  # tokens of a distribution that are kept
A_FILE = 256  # answers in one
A_TEXT_FILE = 2048  # pieces of plain texts in one
PIECE, LEAST_PIECE = 384, 64  # tokens of a piece of a plain text
AT_ONCE = 48  # answers that are written side by side
TEMPERATURES = (0.0, 1.0, 0.0, 0.7)  # in turns
OWN_TEMPERATURE = 1.0  # of questions that the model asks itself
Tell = Callable[[str, int, int], None]


@dataclass
class Text:
    """Answer after its prompt: tokens (n,), best and logprobs (n - prompt, K)."""

    tokens: np.ndarray
    prompt: int
    top_tokens: np.ndarray
    logprobs: np.ndarray


def write_answers(
    lm: LM, prompts: Sequence[Any], folder: Path, tokens: int, seed: int, tell: Tell | None = None
) -> list[Path]:
    """Answers every prompt with at most `tokens` tokens; returns the files.

    The temperatures take turns, and the seed of a prompt is `seed` plus its number. Files that are
    there are kept.
    """
    files = []
    for first_number in range(0, len(prompts), A_FILE):
        path = folder / f"{first_number // A_FILE:05}.safetensors"
        files.append(path)
        if not path.exists():
            prompt_part = list(enumerate(prompts))[first_number : first_number + A_FILE]
            options = [
                {
                    "seed": seed + number,
                    "temperature": TEMPERATURES[number % len(TEMPERATURES)],
                    "max_new_tokens": tokens,
                    "logprobs": BEST,
                }
                for number, _ in prompt_part
            ]
            outputs = side_by_side(lm, [prompt for _, prompt in prompt_part], options)
            texts = []
            for (_, prompt), output in zip(prompt_part, outputs, strict=True):
                if output is not None and output.tokens:
                    texts.append(text_of(prompt_ids(lm, prompt), output))
            if len(texts) < len(prompt_part):
                warnings.warn(
                    f"{len(prompt_part) - len(texts)} of the prompts from number {first_number} "
                    "on got no answer (too long, or it ended at once) and are left out",
                    ForetellWarning,
                    stacklevel=2,
                )
            save_texts(path, texts)
        if tell is not None:
            tell("answers", min(first_number + A_FILE, len(prompts)), len(prompts))
    return files


def write_all(
    lm: LM,
    prompts: Sequence[Any],
    question_count: int,
    folder: Path,
    tokens: int,
    seed: int,
    tell: Tell | None = None,
) -> list[Path]:
    """Answers the prompts and `question_count` questions that the model asks itself; returns the
    files. With neither, those that are there.
    """
    if not prompts and question_count < 1:
        return answer_files(folder)
    files = write_answers(lm, prompts, folder / "prompts", tokens, seed, tell)
    for first_number in range(0, question_count, A_FILE):
        question_folder = folder / "own" / f"{first_number // A_FILE:05}"
        count = min(A_FILE, question_count - first_number)
        path = question_folder / "00000.safetensors"
        if path.exists():
            files.append(path)
        else:
            questions = own_questions(lm, count, tokens, seed + first_number)
            files += write_answers(lm, questions, question_folder, tokens, seed + first_number)
        if tell is not None:
            tell("questions of its own", first_number + count, question_count)
    return files


def answer_files(folder: Path) -> list[Path]:
    """The files of answers that a folder holds, those to prompts first."""
    return sorted((folder / "prompts").glob("*.safetensors")) + sorted(
        folder.glob("own/*/*.safetensors")
    )


def own_questions(lm: LM, count: int, tokens: int, seed: int) -> list[list[dict[str, str]]]:
    """Chat messages that the model itself writes where a user's turn begins.

    Source: Xu et al., "Magpie: Alignment Data Synthesis from Scratch by Prompting Aligned LLMs
    with Nothing" (arXiv 2406.08464), section 2. Raises BadConfig for a model without a chat
    template.
    """
    opening, ending = turn_of(lm)
    options = [
        {"seed": seed + i, "temperature": OWN_TEMPERATURE, "max_new_tokens": tokens, "top_p": 0.95}
        for i in range(count)
    ]
    questions = []
    for output in side_by_side(lm, [opening] * count, options):
        question_text = "" if output is None else output.text.split(ending)[0].strip()
        if output is not None and output.finish_reason == "stop" and question_text:
            questions.append([{"role": "user", "content": question_text}])
    return questions


def turn_of(lm: LM) -> tuple[list[int], str]:
    """The tokens before a user's words in the model's chat template, and the text after them."""
    tokenizer: Any = lm.tokenizer
    if tokenizer is None or not tokenizer.chat_template:
        raise BadConfig("the model asks itself nothing without a chat template; give prompts")
    placeholder = "0123456789"
    full_text = tokenizer.apply_chat_template(
        [{"role": "user", "content": placeholder}], tokenize=False, add_generation_prompt=True
    )
    prefix, _, suffix = full_text.partition(placeholder)
    return lm.encode(prefix), suffix.strip().splitlines()[0]


def side_by_side(
    lm: LM, prompts: Sequence[Any], options: Sequence[dict[str, Any]]
) -> list[Output | None]:
    """Answers prompts by plain decoding, AT_ONCE at a time; None for one that failed."""

    async def answer(gate: asyncio.Semaphore, prompt: Any, option: dict[str, Any]) -> Any:
        async with gate:
            try:
                return await lm.agenerate(prompt_ids(lm, prompt), "plain", **option)
            except ForetellError:
                return None

    async def run() -> list[Output | None]:
        gate = asyncio.Semaphore(AT_ONCE)
        jobs = [answer(gate, *pair) for pair in zip(prompts, options, strict=True)]
        return list(await asyncio.gather(*jobs))

    return asyncio.run(run())


def text_of(prompt: Sequence[int], output: Output) -> Text:
    """The prompt's tokens and the answer's, with its distributions."""
    assert output.logprobs is not None
    token_rows = [
        [(candidate["token"], candidate["logprob"]) for candidate in entry["top"]]
        for entry in output.logprobs
    ]
    return Text(
        np.array([*prompt, *output.tokens], np.int32),
        len(prompt),
        np.array([[token for token, _ in row] for row in token_rows], np.int32),
        np.array([[value for _, value in row] for row in token_rows], np.float16),
    )


def save_texts(path: Path, texts: Sequence[Text]) -> None:
    """Writes a file whole or not at all. Raises BadFile."""
    starts = np.cumsum([0, *(len(text.tokens) for text in texts)])
    max_width = max((text.top_tokens.shape[1] for text in texts), default=BEST)
    top_tokens = np.zeros((int(starts[-1]), max_width), np.int32)
    logprobs = np.full(top_tokens.shape, -np.inf, np.float16)
    for start, text in zip(starts, texts, strict=False):
        answer_rows = slice(int(start) + text.prompt, int(start) + len(text.tokens))
        width = text.top_tokens.shape[1]
        top_tokens[answer_rows, :width] = text.top_tokens
        logprobs[answer_rows, :width] = text.logprobs
    arrays = {
        "tokens": np.concatenate([np.empty(0, np.int32), *(text.tokens for text in texts)]),
        "starts": starts.astype(np.int64),
        "prompts": np.array([text.prompt for text in texts], np.int32),
        "best": top_tokens,
        "logprobs": logprobs,
    }
    with replace_file(path) as part_path:
        save_file(arrays, part_path)


def write_texts(
    encode: Callable[[str], list[int]], sources: Sequence[str], folder: Path, tokens: int, seed: int
) -> list[Path]:
    """Plain texts in pieces of PIECE tokens, in random order, about `tokens` in all; returns the
    files. Sources are those of `corpus.documents`. Raises BadConfig.
    """
    if folder.is_dir():
        return sorted(folder.glob("*.safetensors"))
    pieces = []
    for source in sources:
        for _, text in read_documents(source):
            text_ids = encode(text)
            pieces += [text_ids[start : start + PIECE] for start in range(0, len(text_ids), PIECE)]
    np.random.default_rng(seed).shuffle(pieces)  # type: ignore[arg-type]
    pieces = [piece for piece in pieces if len(piece) >= LEAST_PIECE][: -(-tokens // PIECE)]
    if not pieces:
        raise BadConfig(f"--text: nothing in it has {LEAST_PIECE} tokens; give longer texts")
    part_folder = folder.with_name(f"{folder.name}.part")  # all of them are there, or none
    part_folder.mkdir(parents=True, exist_ok=True)
    for first_piece in range(0, len(pieces), A_TEXT_FILE):
        texts = [plain_text(piece) for piece in pieces[first_piece : first_piece + A_TEXT_FILE]]
        save_texts(part_folder / f"{first_piece // A_TEXT_FILE:05}.safetensors", texts)
    part_folder.rename(folder)
    return sorted(folder.glob("*.safetensors"))


def plain_text(tokens: Sequence[int]) -> Text:
    """A text of somebody else's as if the target had written it: every distribution is certain."""
    array = np.array(tokens, np.int32)
    return Text(array, 1, array[1:, None], np.zeros((len(array) - 1, 1), np.float16))


def read_texts(path: Path) -> Iterator[Text]:
    """The texts of a file. Raises BadFile."""
    try:
        arrays = load_file(path)
        starts, prompts = arrays["starts"], arrays["prompts"]
        tokens, top_tokens, logprobs = arrays["tokens"], arrays["best"], arrays["logprobs"]
        lengths = np.diff(starts)
        fit_checks = [
            tokens.dtype.kind == top_tokens.dtype.kind == "i" and prompts.shape == lengths.shape,
            len(starts) > 0 and starts[0] == 0 and starts[-1] == len(tokens),
            (lengths > 0).all() and (prompts > 0).all() and (prompts <= lengths).all(),
            top_tokens.ndim == 2
            and top_tokens.shape == logprobs.shape
            and len(top_tokens) == len(tokens),
            (tokens >= 0).all() and (top_tokens >= 0).all(),
        ]
        if not all(fit_checks):
            raise ValueError("its parts do not belong together")
    except (OSError, KeyError, ValueError, TypeError, SafetensorError) as error:
        raise BadFile(f"{path}: no file of answers ({error}); write it again") from error
    for start, end, prompt in zip(starts[:-1], starts[1:], prompts, strict=True):
        answer_rows = slice(int(start) + int(prompt), int(end))
        yield Text(tokens[start:end], int(prompt), top_tokens[answer_rows], logprobs[answer_rows])
