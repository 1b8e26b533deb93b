"""The suite `rewards`: do rewards tell good texts from bad ones, and is more got by following them?

It has three parts. `pairs`: of a short answer to a question and a long text about something else,
which one does a reward, named by `--reward`, put above the other? `words`: of keywords that a
prompt asks for, how many stand in the sentence by the prompt alone, by `deal` and by `transfer-q`
with the same prompt? With `--draft` there is a second `transfer-q`, which rolls out that model, one
that was aligned with the wish, in the target's place. `samples`: how often is the answer of
`best-of`, chosen hard or softly by its rank among references, better than one sample? Differences
are taken task by task, with a 95 % interval.

Source: the claims of Hong et al., arXiv:2402.03469 (pairs), Huang et al., arXiv:2402.06147 and
Chakraborty et al., arXiv:2405.20495 (words), and Balashankar et al., arXiv:2412.19792 (samples).
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretell.bench import tasks as shared
from foretell.bench.runner import Load, Tell
from foretell.bench.sets import prompt_ids
from foretell.bench.settings import Settings
from foretell.ops.assets import ASSETS
from foretell.rewards.keywords import Keywords
from foretell.spec import build_reward

if TYPE_CHECKING:
    from foretell.api.lm import LM

TAKES = ("reward",)
TEXTS = ASSETS / "texts"
WORDS = 4  # keywords of a sentence
SENTENCES = 24  # of part `words`, and
QUESTIONS = 40  # questions of the other two, unless a number is given
N = 4  # samples of best-of
REFERENCES = 16  # texts among which their rewards are ranked
T = 10.0  # of the soft choice, as in the paper
OTHERS = 8  # single samples that an answer is compared with
TEMPERATURE = 1.0  # of the samples, unless one above 0 is given
REWARD = "length:target=40"  # of part `samples`, unless one is named
ASKED = "Write one sentence that uses all of these words: {words}."
NOUNS = (
    "apple apples|baker bakers|ball balls|bench benches|bird birds|boat boats|book books|"
    "bridge bridges|candle candles|chair chairs|child children|clock clocks|coat coats|dog dogs|"
    "farmer farmers|flower flowers|garden gardens|hammer hammers|horse horses|kitchen kitchens|"
    "ladder ladders|lake lakes|lamp lamps|letter letters|market markets|mountain mountains|"
    "nurse nurses|piano pianos|river rivers|road roads|rope ropes|school schools|shoe shoes|"
    "snow|soup soups|table tables|teacher teachers|train trains|tree trees|window windows"
)
failures = shared.failure_lines


@dataclass(frozen=True)
class Task:
    """A task of a part: a question with two texts, a question, or keywords with their forms."""

    part: str
    question: str
    short: str = ""
    long: str = ""
    words: str = ""  # as the reward `keywords` takes them


def prepare(paths: Sequence[str | Path], settings: Settings, limit: int = 0) -> list[Task]:
    """The tasks, `limit` of each part."""
    rows = [json.loads(line) for line in _read_lines("questions")]
    passages = [json.loads(line)["text"] for line in _read_lines("passages")]
    rows = rows[: limit or QUESTIONS]
    pair_tasks = []
    for row_number, row in enumerate(rows if settings.rewards else ()):
        passage = passages[row_number % len(passages)]
        pair_tasks.append(Task("pairs", row["question"], row["answer"], passage))
    generator = random.Random(settings.seed)
    word_tasks = [_word_task(generator) for _ in range(limit or SENTENCES)]
    return [*pair_tasks, *word_tasks, *(Task("samples", row["question"]) for row in rows)]


def _read_lines(name: str) -> list[str]:
    return (TEXTS / f"{name}.jsonl").read_text("utf-8").splitlines()


def _word_task(generator: random.Random) -> Task:
    word_forms = [forms.split() for forms in generator.sample(NOUNS.split("|"), WORDS)]
    question = ASKED.format(words=", ".join(forms[0] for forms in word_forms))
    return Task("words", question, words=" ".join("|".join(forms) for forms in word_forms))


def begin(settings: Settings, tasks: Sequence[Task], path: Path | None = None) -> dict[str, Any]:
    """A document without answers, or that of `path` if it was begun the same way.

    Raises BadFile where it was not, BadConfig for settings that the suite has no use for.
    """
    for spec in settings.rewards:
        build_reward(spec)
    task_records = [asdict(task) for task in tasks]
    return shared.begin_suite(settings, "rewards", task_records, path, ("draft", "rewards"))


def run(
    settings: Settings,
    tasks: Sequence[Task],
    load: Load,
    document: dict[str, Any],
    tell: Tell = lambda what, done, total: None,
    save: Callable[[dict[str, Any]], None] = lambda document: None,
) -> dict[str, Any]:
    """Fills `document` (see `begin`) with the answers it lacks and their figures; returns it."""
    answer_functions = {"pairs": score_pair, "words": cover_keywords, "samples": compare_samples}

    def work(lm: LM, numbers: Sequence[int]) -> list[shared.Answer]:
        numbered_tasks = [(number, tasks[number]) for number in numbers]
        return [
            {"part": task.part} | answer_functions[task.part](lm, task, settings, number)
            for number, task in numbered_tasks
        ]

    return shared.answer_all(
        settings, len(tasks), load, document, work, summarise_parts, tell, save
    )


def score_pair(lm: LM, task: Task, settings: Settings, number: int) -> shared.Answer:
    """Scores the short and the long text by each reward."""
    texts = [task.short, task.long]
    return {
        "scores": {
            spec: build_reward(spec).scores(task.question, texts) for spec in settings.rewards
        }
    }


def cover_keywords(lm: LM, task: Task, settings: Settings, number: int) -> shared.Answer:
    """The share of keywords that each way brings in, its sentence and its forwards."""
    prompt = prompt_ids(lm, [{"role": "user", "content": task.question}])
    reward = Keywords(task.words)
    ways = {"prompt alone": "plain", "deal": "deal", "transfer-q": "transfer-q"}
    if settings.draft is not None:
        ways["transfer-q, rolling out the draft"] = "transfer-q:baseline=draft"
    figures: shared.Answer = {"texts": {}, "coverage": {}, "forwards": {}}
    for name, spec in ways.items():
        generate_options: dict[str, Any] = {"max_new_tokens": settings.max_new_tokens}
        if spec != "plain":
            generate_options["reward"] = reward
        output = lm.generate(prompt, spec, **generate_options)
        figures["texts"][name] = output.text
        [figures["coverage"][name]] = reward.scores(task.question, [output.text])
        figures["forwards"][name] = sum(output.stats.calls.values())
    return figures


def compare_samples(lm: LM, task: Task, settings: Settings, number: int) -> shared.Answer:
    """Share of single samples that the answer of each choice is better than, ties by half."""
    prompt = prompt_ids(lm, [{"role": "user", "content": task.question}])
    spec = settings.rewards[0] if settings.rewards else REWARD
    reward = build_reward(spec)
    options: dict[str, Any] = {
        "max_new_tokens": settings.max_new_tokens,
        "temperature": settings.temperatures[0] or TEMPERATURE,
    }
    seed = (settings.seed * 1_000_003 + number) * 1_000
    single_outputs = lm.generate(
        [prompt] * OTHERS,
        "plain",
        seed=[seed + 1 + single_index for single_index in range(OTHERS)],
        **options,
    )
    texts = {}
    for name, choice_options in (("hard", "no"), ("soft", f"yes,t={T:g}")):
        method = f"best-of:n={N},references={REFERENCES},soft={choice_options}"
        texts[name] = lm.generate(prompt, method, seed=seed, reward=reward, **options).text
    single_texts = [single_output.text for single_output in single_outputs]
    for single_output in single_outputs:
        if single_output.error is not None:
            raise single_output.error
    reward_values = reward.scores(task.question, [*texts.values(), *single_texts])
    wins = {
        name: sum(
            (choice_value > single_value) + (choice_value == single_value) / 2
            for single_value in reward_values[len(texts) :]
        )
        / OTHERS
        for name, choice_value in zip(texts, reward_values, strict=False)
    }
    return {
        "reward": spec,
        "texts": texts,
        "others": single_texts,
        "values": reward_values,
        "wins": wins,
    }


def summarise_parts(answers: Sequence[shared.Answer]) -> dict[str, Any]:
    """Figures of each part; a part without answers has none."""
    parts: dict[str, list[shared.Answer]] = {}
    for answer in answers:
        parts.setdefault(answer["part"], []).append(answer)
    figures: dict[str, Any] = {}
    if "pairs" in parts:
        figures["pairs"] = {}
        for spec in parts["pairs"][0]["scores"]:
            score_pairs = [answer["scores"][spec] for answer in parts["pairs"]]
            right_count = sum(short_score > long_score for short_score, long_score in score_pairs)
            figures["pairs"][spec] = {"pairs": len(score_pairs), "right": right_count}
    if "words" in parts:
        ways = parts["words"][0]["coverage"]
        coverage_by_way = {
            way: [answer["coverage"][way] for answer in parts["words"]] for way in ways
        }
        figures["words"] = {}
        for way, coverages in coverage_by_way.items():
            forward_counts = [answer["forwards"][way] for answer in parts["words"]]
            figures["words"][way] = {
                "coverage": sum(coverages) / len(coverages),
                "forwards": sum(forward_counts) / len(forward_counts),
                "more": shared.compare_scores(coverages, coverage_by_way["prompt alone"]),
            }
            if way.startswith("transfer-q, "):
                figures["words"][way]["aligned"] = shared.compare_scores(
                    coverages, coverage_by_way["transfer-q"]
                )
    if "samples" in parts:
        figures["samples"] = {}
        for name in ("hard", "soft"):
            win_shares = [answer["wins"][name] for answer in parts["samples"]]
            figures["samples"][name] = {
                "wins": sum(win_shares) / len(win_shares),
                "more": shared.compare_scores(win_shares, [0.5] * len(win_shares)),
            }
    return figures


def tables(document: dict[str, Any]) -> list[tuple[str, list[list[str]]]]:
    """A title and rows, the head first, for every model and part."""
    titled_tables = []
    for cell in document["cells"]:
        model_and_dtype = f"{cell['model']}, {cell['dtype']}"
        if "pairs" in cell:
            rows = [["reward", "pairs", "short above long", ""]]
            for spec, part_figures in cell["pairs"].items():
                right_share = f"{part_figures['right'] / part_figures['pairs']:.1%}"
                rows.append(
                    [spec, str(part_figures["pairs"]), str(part_figures["right"]), right_share]
                )
            titled_tables.append((f"pairs, {model_and_dtype}", rows))
        if "words" in cell:
            rows = [["", "keywords", "more than by the prompt alone", "forwards"]]
            for way, part_figures in cell["words"].items():
                difference_text = (
                    ""
                    if way == "prompt alone"
                    else shared.format_difference(part_figures["more"], "+.3f")
                )
                rows.append(
                    [
                        way,
                        f"{part_figures['coverage']:.3f}",
                        difference_text,
                        f"{part_figures['forwards']:.0f}",
                    ]
                )
            for way, part_figures in cell["words"].items():
                if "aligned" in part_figures:
                    aligned_text = shared.format_difference(part_figures["aligned"], "+.3f")
                    aligned_text += ", against transfer-q"
                    rows.append([way, "", aligned_text, ""])
            titled_tables.append((f"words, {model_and_dtype}", rows))
        if "samples" in cell:
            rows = [["", "better than one sample", "more than half"]]
            for name, part_figures in cell["samples"].items():
                label = f"best-of {N}, {name}"
                rows.append(
                    [
                        label,
                        f"{part_figures['wins']:.1%}",
                        shared.format_difference(part_figures["more"]),
                    ]
                )
            titled_tables.append((f"samples, {model_and_dtype}", rows))
    return titled_tables
