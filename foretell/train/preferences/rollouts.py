"""Prompts with rewards, and answers drawn to them: what `foretell train grpo` learns from.

Prompts are JSON lines as everywhere (bench/prompts.py); beside the prompt a row may have
`references`, a text or several that a reward compares with, and `reward`, a spec for this prompt
alone. All answers to a prompt are drawn by `best-of`, side by side after a prompt that is computed
once, each maybe sped up by a drafter, and judged there as a user's request would be.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretell.bench.prompts import read_prompts
from foretell.bench.sets import prompt_ids
from foretell.errors import BadConfig, BadFile, ForetellError
from foretell.ops.files import write_text
from foretell.ops.parsing import parse_json
from foretell.registry import load_method
from foretell.rewards.base import Reward
from foretell.spec import build_reward
from foretell.train.preferences.groups import Group

if TYPE_CHECKING:
    from foretell.api.lm import LM

AT_ONCE = 64  # answers that are drawn side by side
A_FILE = 32  # prompts of which measurements are kept in one file
DIVIDER = re.compile(r"^(?=---\s*$)", re.MULTILINE)  # of references, see rewards/bleu.py
Tell = Callable[[str, int, int | None], None]  # (what is being done, how much of it, of how much)


@dataclass(frozen=True)
class Question:
    """A prompt's token ids, what answers to it are worth, and what that is compared with."""

    ids: tuple[int, ...]
    reward: Reward
    references: tuple[str, ...] = ()


def read_questions(
    lm: LM, files: Sequence[str | Path], spec: str, prompt_tokens: int, answer_tokens: int
) -> list[Question]:
    """The prompts of these files that have at most `prompt_tokens` tokens. Raises BadConfig, which
    names the row.
    """
    context = lm.models["target"].context
    max_prompt = min(prompt_tokens, context - answer_tokens)
    if max_prompt < 1:
        allowed_values = f"less than the {context} tokens that the model holds with a prompt"
        raise BadConfig.field("answer_tokens", answer_tokens, allowed_values)
    questions = []
    for path in files:
        prompts = read_prompts(path)
        lines = [line for line in Path(path).read_text("utf-8").split("\n") if line.strip()]
        for number, (prompt, line) in enumerate(zip(prompts, lines, strict=True), 1):
            row_place = f"{path}, row {number}"
            row = parse_json(line)
            references = _references(row.get("references", []), row_place)
            try:
                reward = with_references(
                    build_reward(row.get("reward", spec), lm.encode), references
                )
            except ForetellError as error:
                raise BadConfig(f"{row_place}: {error}") from error
            ids = prompt_ids(lm, prompt)
            if len(ids) <= max_prompt:
                questions.append(Question(tuple(ids), reward, references))
    return questions


def _references(references: Any, row_place: str) -> tuple[str, ...]:
    texts = [references] if isinstance(references, str) else references
    is_valid = isinstance(texts, list) and all(isinstance(text, str) for text in texts)
    if not is_valid or not all(text.strip() for text in texts):
        raise BadConfig(
            f"{row_place}: `references` must be a text or a list of texts, none of them empty"
        )
    return tuple(texts)


def with_references(reward: Reward, references: Sequence[str]) -> Reward:
    """The reward with these references, if it takes any."""
    compared_reward: Any = reward
    field_names = {field.name for field in dataclasses.fields(compared_reward)}
    if references and "references" in field_names:
        # A line of --- would divide it; after a space it does not, and is the same token.
        joined_references = "\n---\n".join(DIVIDER.sub(" ", text) for text in references)
        compared_reward = dataclasses.replace(compared_reward, references=joined_references)
    elif references and "reference" in field_names:
        compared_reward = dataclasses.replace(compared_reward, reference=references[0])
    result: Reward = compared_reward
    return result


def check_ranked(questions: Sequence[Question]) -> None:
    """Raises BadConfig for rewards that depend on which answers are judged together: such numbers
    have no rank among others that were judged before.
    """
    for question in questions:
        reward: Any = question.reward
        compares_answers = type(reward).steps is not Reward.steps
        if compares_answers or getattr(reward, "references", None) == "":
            raise BadConfig(
                f"calibrate: the reward {type(reward).__name__.lower()} compares the answers of a "
                "group with each other, so that they have no rank among references; give each "
                "prompt `references`, or another reward"
            )


def questions_digest(questions: Sequence[Question]) -> str:
    """Tells runs on other prompts or rewards apart."""
    digest = hashlib.sha256()
    for question in questions:
        digest.update(repr((question.ids, question.reward, question.references)).encode())
    return digest.hexdigest()


def draw_answers(
    lm: LM,
    questions: Sequence[Question],
    n: int,
    seed: int,
    *,
    tokens: int,
    temperature: float,
    drafter: str = "",
) -> list[Group]:
    """`n` answers to each prompt, of at most `tokens` tokens; the seed of a prompt is `seed` plus
    its number here. Raises what a request fails with.
    """
    if not questions:
        return []
    lm.limit(requests=max(1, AT_ONCE // n))
    outputs = lm.generate(
        [list(question.ids) for question in questions],
        sampling_method(n, drafter),
        reward=[question.reward for question in questions],
        temperature=temperature,
        max_new_tokens=tokens,
        seed=[seed + number for number in range(len(questions))],
    )
    groups = []
    for question, output in zip(questions, outputs, strict=True):
        if output.error is not None:
            raise output.error
        samples = [
            sample for sample in output.samples if sample.score > -math.inf and sample.tokens
        ]
        answers = [list(sample.tokens) for sample in samples]
        groups.append(Group(question.ids, answers, [float(sample.score) for sample in samples]))
    return groups


def sampling_method(n: int, drafter: str) -> str:
    """The method that draws n answers."""
    return f"best-of:n={n}" + (f",inner=({drafter})" if drafter else "")


def bleu_of_first(lm: LM, questions: Sequence[Question], tokens: int) -> list[float]:
    """BLEU of the model's greedy answer to each prompt, by the prompt's references."""
    lm.limit(requests=AT_ONCE)
    prompts = [list(question.ids) for question in questions]
    outputs = lm.generate(prompts, "plain", max_new_tokens=tokens)
    bleus = []
    for question, output in zip(questions, outputs, strict=True):
        if output.error is not None:
            raise output.error
        reward = with_references(load_method("bleu", "reward")(), question.references)
        bleus += reward.scores("", [output.text])
    return bleus


def keep_json(path: Path, make: Callable[[], Any]) -> Any:
    """Value of a JSON file, made and written where there is none yet. Raises BadFile."""
    if path.exists():
        try:
            return parse_json(path.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise BadFile(f"{path}: cannot be read ({error}); delete it") from error
    value = make()
    write_text(path, json.dumps(value))
    return value


def measure_parts(
    folder: Path,
    name: str,
    questions: Sequence[Question],
    measure: Callable[[Sequence[Question], int], list[Any]],
    tell: Tell | None = None,
) -> list[Any]:
    """Measurements of questions by `measure`, given some and the number of the first; parts that
    the folder holds are not measured again.
    """
    measured: list[Any] = []
    for first_number in range(0, len(questions), A_FILE):
        if tell is not None:
            tell(name, first_number, len(questions))
        part = questions[first_number : first_number + A_FILE]
        path = folder / f"{name.replace(' ', '-')}-{first_number // A_FILE:05}.json"
        measured += keep_json(path, partial(measure, part, first_number))
    if tell is not None:
        tell(name, len(questions), len(questions))
    return measured
