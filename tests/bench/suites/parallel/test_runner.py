"""The suite `parallel`: the law of what is lost on an exact oracle, and runs on tiny models."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from foretell import cli
from foretell.api.lm import LM
from foretell.bench.settings import Settings
from foretell.bench.suites.parallel import runner as parallel
from foretell.bench.suites.parallel.tasks import Item, Question, format_list, make_items, read_list
from foretell.errors import BadConfig, Unsupported
from foretell.loading.wrap import wrap
from foretell.models.diffusion.canvas import Denoiser
from foretell.testing.toy_canvas import Oracle
from tests import tiny
from tests.bench.suites.parallel.test_data import put, row
from tests.diffusion.worlds import filled

OLD = ("Ida Ash", "Otto Elm", "Nora Oak", "Hugo Yew")
NEW = "Ruth Fern"
TOLD = {"shuffle": [*itertools.permutations(OLD)]}
TOLD["replace_random"] = [(*OLD[:i], NEW, *OLD[i + 1 :]) for i in range(4)]
TOLD["insert_random"] = [(*OLD[:i], NEW, *OLD[i:]) for i in range(5)]
TOLD["remove_random"] = [(*OLD[:i], *OLD[i + 1 :]) for i in range(4)]
TOLD["reverse"] = [OLD[::-1]]


class Knowing:
    """A model that knows the law of a task's answers; names are its tokens."""

    tokenizer = None

    def __init__(self, task: str) -> None:
        ids = {name: token for token, name in enumerate((*OLD, NEW))}
        self.names = [*ids]
        texts = {tuple(ids[name] for name in told): 1 / len(TOLD[task]) for told in TOLD[task]}
        self.models = {"target": Oracle(texts, vocab=len(ids) + 1)}
        self.length = len(TOLD[task][0])

    def prompt_ids(self, prompt: Any) -> list[int]:
        return [0]

    def generate(self, prompt: list[int], method: str, stop: Any, **options: Any) -> Any:
        if method in ("plain", "auto"):
            raise Unsupported(f"{method}: not here")
        options["max_new_tokens"] = self.length
        (live,) = filled(self.models["target"], method, prompt, **options)
        tokens = list(live.ctx.output)
        text = format_list([self.names[token] for token in tokens])
        return SimpleNamespace(text=text, tokens=tokens, stats=live.ctx.stats)


def measured(task: str, methods: tuple[str, ...], count: int) -> dict[str, Any]:
    """The document of a question that is asked so often."""
    new = NEW if task.startswith(("insert", "replace")) else ""
    asked = [Item(task, Question(OLD, new))] * count
    settings = Settings(models=("oracle",), methods=methods, temperatures=(1.0,))
    lm: Any = Knowing(task)
    document = parallel.begin(settings, asked)
    return parallel.run(settings, asked, lambda *_: lm, document)


def check_share(found: float, chance: float, count: int) -> None:
    """Within three standard errors."""
    assert abs(found - chance) <= 3 * math.sqrt(chance * (1 - chance) / count) + 1e-9


@pytest.mark.parametrize(
    ("steps", "orders"),
    [(1, 0.09375), (2, 0.375), (4, 1.0)],
    ids=["at once", "in two", "one by one"],
)
def test_what_a_shuffle_loses_is_what_theory_says(steps: int, orders: float) -> None:
    """Any order is drawn right by `orders`; the task wants another one than it was."""
    count, method = 300, f"random:block=0,steps={steps}"
    document = measured("shuffle", (method,), count)
    texts = [one["ways"][method]["text"] for one in document["answers"]]
    right = [Counter(read_list(text) or ()) == Counter(OLD) for text in texts]
    check_share(sum(right) / count, orders, count)
    (cell,) = document["cells"]
    way = cell["groups"]["shuffle"]["ways"][method]
    check_share(way["score"]["mean"], orders * 23 / 24, count)
    assert way["forwards"]["mean"] == steps and way["speed"]["mean"] == 4 / steps


@pytest.mark.parametrize("task", ["replace_random", "insert_random", "remove_random", "reverse"])
def test_what_other_lists_lose_at_once_is_a_product_of_marginals(task: str) -> None:
    told, count = TOLD[task], 300
    places = [Counter(one[i] for one in told) for i in range(len(told[0]))]
    chance = sum(
        math.prod(place[name] / len(told) for place, name in zip(places, one, strict=True))
        for one in told
    )
    closed = {"replace_random": 0.4219, "reverse": 1.0}
    assert chance == pytest.approx(closed.get(task, chance), abs=1e-4)
    method = "random:block=0,steps=1"
    (cell,) = measured(task, (method,), count)["cells"]
    check_share(cell["groups"][task]["ways"][method]["score"]["mean"], chance, count)


def test_an_unsure_model_falls_back_to_one_token_a_forward() -> None:
    methods = ("threshold:tau=0.9", "threshold:tau=0.1")
    (cell,) = measured("shuffle", methods, 20)["cells"]
    one_by_one, at_once = (cell["groups"]["shuffle"]["ways"][name] for name in methods)
    assert one_by_one["score"]["mean"] > at_once["score"]["mean"]
    assert one_by_one["forwards"]["mean"] == 4 and at_once["forwards"]["mean"] == 1
    assert at_once["forwards"]["more"]["mean"] == -3 and "more" not in one_by_one["forwards"]
    assert cell["groups"]["shuffle"]["first"] == methods[0]
    assert cell["groups"]["shuffle"]["ways"]["plain"] == {"refused": "plain: not here"}


def test_a_model_that_can_run_nothing_is_a_failure() -> None:
    document = measured("shuffle", ("plain",), 2)
    assert document["cells"] == []
    assert parallel.failures(document)[0] == "oracle, auto, task 0: plain: not here"


# --- runs


def models(asked: Sequence[Item]) -> dict[str, LM]:
    words: Any = tiny.tokenizer()
    llama = tiny.llama(max_position_embeddings=2048)
    used = {token for item in asked for token in words.encode(item.prompt)}
    mask_id = max(token for token in range(1, len(words)) if token not in used)
    denoiser = LM(Denoiser(llama, "denoiser", mask_id=mask_id), words, eos=(0,))
    return {"tiny": wrap(llama, words, None, "tiny"), "denoiser": denoiser}


def test_it_runs_on_both_kinds_of_models_and_shows_what_it_measured() -> None:
    settings = Settings(
        models=("tiny", "denoiser"), methods=("threshold:tau=0.5",), max_new_tokens=6
    )
    asked = [*make_items("copy", 2), *make_items("sudoku", 2), *make_items("words_hard", 1)]
    both = models(asked)
    document = parallel.begin(settings, asked)
    parallel.run(settings, asked, lambda name, dtype: both[name], document)
    assert not parallel.failures(document)
    ordinary, denoiser = document["cells"]
    assert list(ordinary["groups"]) == [parallel.EXACT, "copy", "sudoku", "words_hard"]
    group = ordinary["groups"][parallel.EXACT]
    assert group["items"] == 4 and list(group["ways"]) == ["plain", "auto", "threshold:tau=0.5"]
    assert "canvas" in group["ways"]["threshold:tau=0.5"]["refused"]
    assert group["ways"]["plain"]["speed"]["mean"] == 1
    group = denoiser["groups"]["copy"]
    assert group["first"] == "auto" and "fills canvases" in group["ways"]["plain"]["refused"]
    prompt = [len(both["tiny"].prompt_ids(item.prompt)) for item in asked[:2]]
    rows = [both_of["ways"]["plain"]["rows"] for both_of in document["answers"][:2]]
    assert rows == [length + 5 for length in prompt], "the last token is not computed"
    for one in document["answers"][5:7]:
        way = one["ways"]["auto"]
        assert way["rows"] >= prompt[one["number"]] and way["forwards"] <= 6
    shown = parallel.tables(json.loads(json.dumps(document)))
    titles = [title for title, _ in shown]
    assert f"{parallel.EXACT}, tiny, auto: 4 items" in titles
    assert "words_hard, denoiser, auto: 1 item, more than auto" in titles
    assert all(len(line) == len(rows[0]) for _, rows in shown for line in rows)
    heads = {title.partition(",")[0]: rows[0] for title, rows in shown}
    assert heads["words_hard"][1] == "score (ours)" and heads["copy"][1] == "score"
    page = parallel.html(document)
    assert page.count("<svg") == 8 and "tokens a forward" in page and "<script" not in page


def test_methods_are_sets_of_settings_too() -> None:
    assert parallel.expand_sweeps(Settings()) == ["plain", "auto"]
    found = parallel.expand_sweeps(
        Settings(methods=("orders", "factors", "random:block=0,steps=2"))
    )
    assert found[:3] == ["plain", "auto", "random:block=0,steps=1"]
    assert len(found) == 2 + 28 + 5 and len(set(found)) == len(found)
    for name, specs in parallel.SWEEPS.items():
        assert parallel.expand_sweeps(Settings(methods=(name,)))[2:] == specs
    with pytest.raises(BadConfig, match="orders has no fields"):
        parallel.begin(Settings(methods=("orders:steps=2",)), [])
    with pytest.raises(BadConfig, match="steps"):
        parallel.begin(Settings(methods=("random:steps=-2",)), [])


def test_tasks_are_named_by_groups_or_one_by_one(tmp_path: Path) -> None:
    made = parallel.prepare([], Settings(tasks=("puzzles", "copy", "sudoku")), 3)
    assert [item.task for item in made] == ["latin_square"] * 3 + ["sudoku"] * 3 + ["copy"] * 3
    every = parallel.prepare([], Settings())
    assert len(every) == 17 * parallel.ITEMS and len({item.task for item in every}) == 17
    assert sum(map(len, parallel.GROUPS.values())) == 17
    with pytest.raises(BadConfig, match="--tasks='nothing': must be one of lists, puzzles"):
        parallel.prepare([], Settings(tasks=("nothing",)))
    own = make_items("copy", 40)
    put(tmp_path, "copy", [row("copy", item.question) for item in own])
    some = parallel.prepare([tmp_path], Settings(), 8)
    assert len({len(item.question.entries) for item in some}) > 2, "not the first ones only"
    assert len(parallel.prepare([tmp_path], Settings())) == 40


def test_the_command_names_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = put(tmp_path, "copy", [])
    path.write_text("{}\n", "utf-8")
    for arguments, said in (
        (["--suite", "parallel", "--data", str(tmp_path)], "copy.jsonl, line 1: is no item"),
        (["--suite", "parallel", "--data", "nowhere"], "--data nowhere: is no folder"),
        (["--data", "x"], "--data: are of a suite; add --suite search or parallel"),
        (["--suite", "monitor", "--data", "x"], "--data: --suite monitor has no use"),
        (["--suite", "parallel", "--tasks", "sums"], "--tasks='sums': must be one of lists"),
        (["--suite", "parallel", "--methods", "nothing"], "nothing"),
        (["--suite", "parallel", "--schemas", "x"], "--schemas: --suite parallel has no use"),
    ):
        assert cli.run(["bench", *arguments]) == 2
        error = capsys.readouterr().err
        assert said in error.replace("\n", " ") and "Traceback" not in error


def test_the_command_compares_on_a_model_that_fills_canvases(
    capsys: pytest.CaptureFixture[str],
) -> None:
    more = ["--model", "dlm-lists", "--max-new-tokens", "24", "--methods", "threshold"]
    arguments = ["--suite", "parallel", "--tasks", "copy", "--limit", "2", *more]
    assert cli.run(["bench", *arguments]) == 0
    told = capsys.readouterr().out
    assert "copy" in told and "threshold" in told
    assert cli.run(["bench", *more]) == 2
    error = capsys.readouterr().err.replace("\n", " ")
    assert "--suite parallel run it" in error and "Traceback" not in error
