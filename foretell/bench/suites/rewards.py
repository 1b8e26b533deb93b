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
from foretell.spec import reward_of

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
failures = shared.failures


@dataclass(frozen=True)
class Task:
    """Of a part: a question with two texts, a question, or keywords with their forms."""

    part: str
    question: str
    short: str = ""
    long: str = ""
    words: str = ""  # as the reward `keywords` takes them


def prepare(given: Sequence[str | Path], settings: Settings, limit: int = 0) -> list[Task]:
    """The tasks, `limit` of each part."""
    rows = [json.loads(line) for line in _lines("questions")]
    passages = [json.loads(line)["text"] for line in _lines("passages")]
    rows = rows[: limit or QUESTIONS]
    pairs = []
    for number, row in enumerate(rows if settings.rewards else ()):
        long = passages[number % len(passages)]
        pairs.append(Task("pairs", row["question"], row["answer"], long))
    draw = random.Random(settings.seed)
    sentences = [_sentence(draw) for _ in range(limit or SENTENCES)]
    return [*pairs, *sentences, *(Task("samples", row["question"]) for row in rows)]


def _lines(name: str) -> list[str]:
    return (TEXTS / f"{name}.jsonl").read_text("utf-8").splitlines()


def _sentence(draw: random.Random) -> Task:
    words = [forms.split() for forms in draw.sample(NOUNS.split("|"), WORDS)]
    question = ASKED.format(words=", ".join(forms[0] for forms in words))
    return Task("words", question, words=" ".join("|".join(forms) for forms in words))


def begin(settings: Settings, tasks: Sequence[Task], path: Path | None = None) -> dict[str, Any]:
    """A document without answers, or that of `path` if it was begun the same way.

    Raises BadFile where it was not, BadConfig for settings that the suite has no use for.
    """
    for spec in settings.rewards:
        reward_of(spec)
    told = [asdict(task) for task in tasks]
    return shared.begin(settings, "rewards", told, path, ("draft", "rewards"))


def run(
    settings: Settings,
    tasks: Sequence[Task],
    load: Load,
    document: dict[str, Any],
    tell: Tell = lambda what, done, total: None,
    save: Callable[[dict[str, Any]], None] = lambda document: None,
) -> dict[str, Any]:
    """Fills `document` (see `begin`) with the answers it lacks and their figures; returns it."""
    answers = {"pairs": judged, "words": asked_for, "samples": compared}

    def work(lm: LM, numbers: Sequence[int]) -> list[shared.Answer]:
        own = [(number, tasks[number]) for number in numbers]
        return [
            {"part": task.part} | answers[task.part](lm, task, settings, number)
            for number, task in own
        ]

    return shared.answered(settings, len(tasks), load, document, work, summary, tell, save)


def judged(lm: LM, task: Task, settings: Settings, number: int) -> shared.Answer:
    """What each reward says of the short and of the long text."""
    texts = [task.short, task.long]
    return {"scores": {s: reward_of(s).scores(task.question, texts) for s in settings.rewards}}


def asked_for(lm: LM, task: Task, settings: Settings, number: int) -> shared.Answer:
    """The share of keywords that each way brings in, its sentence and its forwards."""
    prompt = prompt_ids(lm, [{"role": "user", "content": task.question}])
    reward = Keywords(task.words)
    ways = {"prompt alone": "plain", "deal": "deal", "transfer-q": "transfer-q"}
    if settings.draft is not None:
        ways["transfer-q, rolling out the draft"] = "transfer-q:baseline=draft"
    found: shared.Answer = {"texts": {}, "coverage": {}, "forwards": {}}
    for name, spec in ways.items():
        options: dict[str, Any] = {"max_new_tokens": settings.max_new_tokens}
        if spec != "plain":
            options["reward"] = reward
        out = lm.generate(prompt, spec, **options)
        found["texts"][name] = out.text
        [found["coverage"][name]] = reward.scores(task.question, [out.text])
        found["forwards"][name] = sum(out.stats.calls.values())
    return found


def compared(lm: LM, task: Task, settings: Settings, number: int) -> shared.Answer:
    """Of both choices the share of single samples that the answer is better than, ties by half."""
    prompt = prompt_ids(lm, [{"role": "user", "content": task.question}])
    spec = settings.rewards[0] if settings.rewards else REWARD
    reward = reward_of(spec)
    options: dict[str, Any] = {
        "max_new_tokens": settings.max_new_tokens,
        "temperature": settings.temperatures[0] or TEMPERATURE,
    }
    seed = (settings.seed * 1_000_003 + number) * 1_000
    singles = lm.generate(
        [prompt] * OTHERS, "plain", seed=[seed + 1 + k for k in range(OTHERS)], **options
    )
    texts = {}
    for name, soft in (("hard", "no"), ("soft", f"yes,t={T:g}")):
        method = f"best-of:n={N},references={REFERENCES},soft={soft}"
        texts[name] = lm.generate(prompt, method, seed=seed, reward=reward, **options).text
    others = [one.text for one in singles]
    for one in singles:
        if one.error is not None:
            raise one.error
    values = reward.scores(task.question, [*texts.values(), *others])
    wins = {
        name: sum((value > other) + (value == other) / 2 for other in values[len(texts) :]) / OTHERS
        for name, value in zip(texts, values, strict=False)
    }
    return {"reward": spec, "texts": texts, "others": others, "values": values, "wins": wins}


def summary(answers: Sequence[shared.Answer]) -> dict[str, Any]:
    """Of each part its figures; a part without answers has none."""
    parts: dict[str, list[shared.Answer]] = {}
    for one in answers:
        parts.setdefault(one["part"], []).append(one)
    found: dict[str, Any] = {}
    if "pairs" in parts:
        found["pairs"] = {}
        for spec in parts["pairs"][0]["scores"]:
            pairs = [one["scores"][spec] for one in parts["pairs"]]
            right = sum(short > long for short, long in pairs)
            found["pairs"][spec] = {"pairs": len(pairs), "right": right}
    if "words" in parts:
        ways = parts["words"][0]["coverage"]
        columns = {way: [one["coverage"][way] for one in parts["words"]] for way in ways}
        found["words"] = {}
        for way, column in columns.items():
            forwards = [one["forwards"][way] for one in parts["words"]]
            found["words"][way] = {
                "coverage": sum(column) / len(column),
                "forwards": sum(forwards) / len(forwards),
                "more": shared.more(column, columns["prompt alone"]),
            }
            if way.startswith("transfer-q, "):
                found["words"][way]["aligned"] = shared.more(column, columns["transfer-q"])
    if "samples" in parts:
        found["samples"] = {}
        for name in ("hard", "soft"):
            wins = [one["wins"][name] for one in parts["samples"]]
            found["samples"][name] = {
                "wins": sum(wins) / len(wins),
                "more": shared.more(wins, [0.5] * len(wins)),
            }
    return found


def tables(document: dict[str, Any]) -> list[tuple[str, list[list[str]]]]:
    """A title and rows, the head first, for every model and part."""
    found = []
    for cell in document["cells"]:
        where = f"{cell['model']}, {cell['dtype']}"
        if "pairs" in cell:
            rows = [["reward", "pairs", "short above long", ""]]
            for spec, one in cell["pairs"].items():
                share = f"{one['right'] / one['pairs']:.1%}"
                rows.append([spec, str(one["pairs"]), str(one["right"]), share])
            found.append((f"pairs, {where}", rows))
        if "words" in cell:
            rows = [["", "keywords", "more than by the prompt alone", "forwards"]]
            for way, one in cell["words"].items():
                more = "" if way == "prompt alone" else shared.told(one["more"], "+.3f")
                rows.append([way, f"{one['coverage']:.3f}", more, f"{one['forwards']:.0f}"])
            for way, one in cell["words"].items():
                if "aligned" in one:
                    told = f"{shared.told(one['aligned'], '+.3f')}, against transfer-q"
                    rows.append([way, "", told, ""])
            found.append((f"words, {where}", rows))
        if "samples" in cell:
            rows = [["", "better than one sample", "more than half"]]
            for name, one in cell["samples"].items():
                label = f"best-of {N}, {name}"
                rows.append([label, f"{one['wins']:.1%}", shared.told(one["more"])])
            found.append((f"samples, {where}", rows))
    return found
