"""Replay: steps counted by loops, sums, turns, what is kept between documents, what is refused, and
the command.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.progress import Progress

from foretell import cli
from foretell.bench.replay import SHOWN, Report, Row, Tally, replay_documents
from foretell.core.context import Context
from foretell.core.drafter import Drafter, Feedback
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Commit, Reply, Steps
from foretell.drafters.lookup.ngram import Ngram
from foretell.errors import BadConfig, RequestFailed, Unsupported
from foretell.loading.load import load_tokenizer
from foretell.speculation.strategy import Speculative, Strategy
from tests import tiny

WORDS = ["def", " add", "(a, b)", "\n", " return", "🙂", " fox", "ing"]
TEXTS = st.lists(st.sampled_from(WORDS), max_size=14).map("".join)
DOCUMENTS = st.lists(
    st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=3), min_size=1, max_size=3
)


def ids(text: str) -> list[int]:
    return list(tiny.tokenizer()(text)["input_ids"])


def looked_up(tokens: list[int], n: int, k: int) -> list[int]:
    """After the most recent place of the longest of the last n, n-1, ... tokens, going on into
    itself.
    """
    for size in range(min(n, len(tokens) - 1), 0, -1):
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == tokens[-size:]:
                text = list(tokens)
                for at in range(end, end + k):
                    text.append(text[at])
                return text[len(tokens) :]
    return []


def counted(prompt: list[int], answer: list[int], n: int, k: int) -> Tally:
    """The steps that prompt lookup needs for `answer`, in loops."""
    tally = Tally()
    while tally.tokens < len(answer):
        left = answer[tally.tokens :]
        draft = looked_up(prompt + answer[: tally.tokens], n, min(k, len(left) - 1))
        good = 0
        while good < len(draft) and draft[good] == left[good]:
            good += 1
        tally += Tally(good + 1, 1, len(draft), good)
    return tally


@settings(max_examples=25)
@given(DOCUMENTS, st.integers(1, 4), st.integers(1, 12), st.integers(1, 6))
def test_the_steps_are_those_of_the_loops(
    documents: list[list[tuple[str, str]]], n: int, k: int, nodes: int
) -> None:
    turns: list[Tally] = []
    for document in documents:
        text: list[int] = []
        for turn, (prompt, said) in enumerate(document):
            text += ids(prompt)
            answer = ids(said)
            if not text:
                text, answer = answer[:1], answer[1:]
            turns += [Tally()] * (turn == len(turns))
            turns[turn] = turns[turn] + counted(text, answer, n, min(k, nodes))
            text += answer
    if not any(turn.tokens for turn in turns):
        with pytest.raises(BadConfig, match="hold no recorded text"):
            replay_documents(tiny.tokenizer(), ["ngram"], documents)
        return
    report = replay_documents(
        tiny.tokenizer(), [f"ngram:n={n},k={k}", "plain"], iter(documents), nodes
    )
    assert report.rows[0].turns == turns
    assert report.documents == len(documents)
    total = report.rows[0].total
    assert total.tokens == sum(turn.tokens for turn in turns)
    assert total.tokens == total.steps + total.accepted
    assert report.rows[1].total == Tally(total.tokens, total.tokens)


@pytest.mark.parametrize("method", ["ngram", "copyspec:gamma=2", "ngram:n=1+copyspec:gamma=2"])
def test_repetition_pays(method: str) -> None:
    draw = random.Random(1)
    text = "".join(draw.choice(WORDS) for _ in range(40))
    report = replay_documents(
        tiny.tokenizer(), [method], [[("Write.", text), ("Once more.", text)]]
    )
    first, second = report.rows[0].turns
    assert first.tokens == second.tokens
    assert second.tokens_per_step > 4 > first.tokens_per_step > 1


def test_nodes_are_the_size_where_a_method_does_not_say() -> None:
    letters = "abcdefghijklmnopqrstuvwxyz"
    methods = ["ngram:k=64", "ngram:k=64,nodes=4", Ngram(k=2), Speculative(Ngram(k=64), None, 6)]
    rows = replay_documents(tiny.tokenizer(), methods, [[(letters * 2, letters * 4)]], 8).rows
    assert [row.method for row in rows[:3]] == [*methods[:2], "ngram"]
    for row, size in zip(rows, (8, 4, 2, 6), strict=True):
        assert row.total.steps == math.ceil(row.total.tokens / (size + 1))


@dataclass(frozen=True)
class Reading(Drafter):
    """Drafts nothing, and notes the request's text."""

    seen: list[str] = field(default_factory=list, hash=False)

    def propose(self, ctx: Context, state: None, budget: int) -> TokenTree:
        assert ctx.request.text is not None
        self.seen.append(ctx.request.text(ctx.tokens))
        return TokenTree(ctx.tokens[-1])


def test_a_drafter_can_read_the_text() -> None:
    reader = Reading()
    replay_documents(tiny.tokenizer(), [reader], [[("caf", "é 🙂"), (" naïve", "x")]])
    assert reader.seen[0] == "caf"
    assert reader.seen[-1] == "café 🙂 naïve"


@dataclass(frozen=True)
class Remembering(Drafter):
    """Says of each token what followed it in any request so far."""

    def start(self, ctx: Context) -> dict[int, int]:
        return ctx.shared(dict)

    def propose(self, ctx: Context, state: dict[int, int], budget: int) -> TokenTree:
        tree = TokenTree(ctx.tokens[-1])
        return (
            tree.chain([state[ctx.tokens[-1]]]) if ctx.tokens[-1] in state and ctx.depth else tree
        )

    def observe(self, ctx: Context, state: dict[int, int], step: Feedback) -> None:
        text = [step.tree.tokens[0], *step.tokens]
        state.update(itertools.pairwise(text))


def test_what_is_learnt_is_kept_unless_fresh() -> None:
    document = [("x", "abcdefgh"), ("y", "abcdefgh")]
    kept, fresh = (
        replay_documents(
            tiny.tokenizer(), [Remembering(), Remembering()], [document] * 3, fresh=fresh
        )
        for fresh in (False, True)
    )
    once = replay_documents(tiny.tokenizer(), [Remembering()], [document])
    assert fresh.rows[0].total == sum([once.rows[0].total] * 3, Tally())
    assert kept.rows[0].total.steps < fresh.rows[0].total.steps
    assert kept.rows[0] == kept.rows[1], "each method has stores of its own"
    assert once.rows[0].turns[1].accepted > once.rows[0].turns[0].accepted == 0, (
        "turns of a document share"
    )


def test_documents_are_taken_one_by_one() -> None:
    taken = 0

    def documents() -> Iterator[list[tuple[str, str]]]:
        nonlocal taken
        for _ in range(5):
            taken += 1
            yield [("ab", "abab")]

    told: list[tuple[int, int]] = []
    report = replay_documents(
        tiny.tokenizer(), ["ngram"], documents(), tell=lambda done: told.append((done, taken))
    )
    assert told == [(i, i) for i in range(1, 6)]
    assert report.documents == 5


def test_special_tokens_begin_a_document_and_nothing_else() -> None:
    asked: list[tuple[str, bool]] = []

    class Spy:
        def get_vocab(self) -> dict[str, int]:
            return tiny.tokenizer().get_vocab()

        def __call__(self, text: str, add_special_tokens: bool, verbose: bool) -> Any:
            asked.append((text, add_special_tokens))
            return tiny.tokenizer()(text)

    replay_documents(Spy(), ["plain"], [[("a", "b"), ("c", "d")]])  # type: ignore[arg-type]
    assert asked == [("a", True), ("b", False), ("c", False), ("d", False)]


# --- refusals


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ("draft", "draft cannot run on a recording: it needs a 'draft' model; name methods"),
        (
            "token-recycling",
            "token-recycling cannot run on a recording: it needs the model's logits",
        ),
        (
            "ngram+token-recycling",
            "ngram+token-recycling cannot run on a recording: it needs the model's logits",
        ),
    ],
)
def test_what_needs_more_than_text_is_refused(method: str, said: str) -> None:
    with pytest.raises(Unsupported) as raised:
        replay_documents(tiny.tokenizer(), ["ngram", method], [[("a", "b")]])
    assert str(raised.value).startswith(said)


@pytest.mark.parametrize(
    ("methods", "nodes", "said"),
    [
        (["auto"], 16, "auto chooses by measured cost"),
        (["ngrm"], 16, "did you mean ngram"),
        ([], 16, "no methods"),
        (["ngram"], 0, "nodes=0: must be between 1 and 1024"),
        (["ngram"], 1025, "nodes=1025"),
        (["ngram"], 2.5, "nodes=2.5"),
    ],
)
def test_bad_arguments_are_refused(methods: list[str], nodes: Any, said: str) -> None:
    with pytest.raises(BadConfig, match=said):
        replay_documents(tiny.tokenizer(), methods, [[("a", "b")]], nodes)


@dataclass(frozen=True)
class Straying(Strategy):
    """Commits what it likes."""

    def run(self, ctx: Context) -> Steps:
        while True:
            reply: Reply = yield Ask(TokenTree(ctx.tokens[-1]))
            if (yield Commit([7], reply.logits)).reason:
                return


@dataclass(frozen=True)
class Broken(Drafter):
    """Fails."""

    name: str = field(default="broken")

    def propose(self, ctx: Context, state: None, budget: int) -> TokenTree:
        raise ArithmeticError("overflow")


def test_a_method_that_strays_or_fails_is_not_scored() -> None:
    with pytest.raises(Unsupported, match="strays from the recorded text"):
        replay_documents(tiny.tokenizer(), [Straying()], [[("a", "bcd")]])
    with pytest.raises(RequestFailed, match="ArithmeticError: overflow"):
        replay_documents(tiny.tokenizer(), [Broken()], [[("a", "bcd")]])


# --- the report


def report(turns: int) -> Report:
    tallies = [Tally(10 * i, 4 * i, 20 * i, 6 * i) for i in range(1, turns + 1)]
    return Report(
        16,
        False,
        [Row("ngram", tallies), Row("plain", [Tally(t.tokens, t.tokens) for t in tallies])],
        1234,
    )


def test_the_document_has_a_row_a_method() -> None:
    document = report(2).to_dict()
    assert document["schema"] == "foretell.measure.replay/1"
    assert document["version"]
    assert document["documents"] == 1234
    assert document["nodes"] == 16
    assert document["fresh"] is False
    row = document["rows"][0]
    assert {k: v for k, v in row.items() if k != "turns"} == {
        "method": "ngram",
        "tokens": 30,
        "steps": 12,
        "drafted": 60,
        "accepted": 18,
        "tokens_per_step": 2.5,
    }
    assert [turn["turn"] for turn in row["turns"]] == [1, 2]
    assert row["turns"][1]["steps"] == 8
    assert json.loads(json.dumps(document)) == document


def test_the_table_lines_up() -> None:
    one, two = report(1).text().splitlines(), report(2).text().splitlines()
    assert "turn" not in one[0]
    assert "turn 2" in two[0]
    assert len({len(line) for line in two}) == 1
    assert two[1].split() == ["ngram", "2.50", "2.50", "2.50", "5.0", "30", "%", "12", "30"]
    assert two[2].split() == ["plain", "1.00", "1.00", "1.00", "0.0", "-", "30", "30"]


@pytest.mark.parametrize("turns", [1, 2, SHOWN, SHOWN + 1, SHOWN + 5])
def test_later_turns_are_taken_together(turns: int) -> None:
    names = report(turns).turn_names()
    assert len(names) == min(turns, SHOWN)
    assert ("later" in names[-1]) == (turns > SHOWN)
    for row in report(turns).rows:
        tallies = row.shown_turns()
        assert len(tallies) == len(names)
        assert sum(tallies, Tally()) == row.total
    words = [
        str(t.text) for t in ET.fromstring(report(turns).svg()).iter() if t.tag.endswith("text")
    ]
    assert {"ngram", "plain", "2.50", "1.00"} <= set(words)
    assert any("1,234 documents" in word for word in words)
    assert words.count("2.50") == len(names)


def test_a_turn_without_text_has_no_bar() -> None:
    some = Report(16, False, [Row("ngram", [Tally(), Tally(6, 3)])], 1)
    words = [str(t.text) for t in ET.fromstring(some.svg()).iter() if t.tag.endswith("text")]
    assert "2.00" in words
    assert "1.00" not in words


# --- the command


def test_a_composition_is_one_method() -> None:
    specs = ["ngram:n=2,k=4+copyspec:gamma=2,nodes=3", "plain"]
    assert cli.split_specs(",".join(specs)) == specs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer alone, and files to replay."""
    path = tmp_path_factory.mktemp("replay")
    tiny.tokenizer().save_pretrained(path / "tokenizer")
    rows = [{"prompt": f"Say {w}.", "text": (w + " and ") * 6} for w in ("fox", "dog", "cat")]
    (path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    answers = [
        {"question_id": i, "choices": [{"turns": ["one two three", "one two three"]}]}
        for i in (1, 2)
    ]
    (path / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in answers))
    (path / "questions.jsonl").write_text(
        json.dumps({"question_id": 1, "turns": ["Count.", "Again."]}) + "\n"
    )
    (path / "bad.jsonl").write_text(json.dumps(rows[0]) + "\n{\n")
    (path / "empty.jsonl").write_text("")
    (path / "mute.jsonl").write_text('{"prompt": "a", "text": ""}\n')
    return path


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], folder: Path) -> Callable[..., tuple[int, str, str]]:
    def call(*args: str) -> tuple[int, str, str]:
        words = [arg.format(at=folder) for arg in args]
        code = cli.run(
            [
                "replay",
                *words,
                *([] if "--tokenizer" in words else ["--tokenizer", f"{folder}/tokenizer"]),
            ]
        )
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return code, out, err

    return call


def test_the_command_prints_a_table(run: Any) -> None:
    code, out, err = run("--methods", "ngram:n=2,k=4,copyspec, plain", "--text", "{at}/log.jsonl")
    lines = out.splitlines()
    assert code == 0
    assert [line.split()[0] for line in lines] == ["method", "ngram:n=2,k=4", "copyspec", "plain"]
    assert float(lines[1].split()[1]) > 2
    assert float(lines[3].split()[1]) == 1
    assert err == "3 documents; plain decoding makes 1.00 tokens a step\n"


def test_the_command_writes_json_and_a_plot(run: Any, folder: Path, tmp_path: Path) -> None:
    log = [
        "--methods",
        "ngram",
        "--text",
        "{at}/log.jsonl",
        "--nodes",
        "3",
        "--fresh",
        "--limit",
        "2",
    ]
    code, out, _ = run(*log, "--json", f"{tmp_path}/out.json", "--plot", f"{tmp_path}/out.svg")
    document = json.loads((tmp_path / "out.json").read_text("utf-8"))
    assert code == 0
    assert out.startswith("method")
    assert (document["documents"], document["nodes"], document["fresh"]) == (2, 3, True)
    assert ET.parse(tmp_path / "out.svg").getroot().tag.endswith("svg")
    code, out, err = run(*log, "--json", "-")
    assert code == 0
    assert err == ""
    assert json.loads(out) == document
    rows = [
        [(row["prompt"], row["text"])]
        for row in map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    ]
    expected = replay_documents(tiny.tokenizer(), ["ngram"], rows[:2], 3, fresh=True).to_dict()
    assert expected.items() <= document.items()
    assert document["tokenizer"].endswith("tokenizer")


def test_questions_without_answer_are_told(run: Any) -> None:
    args = [
        "--methods",
        "ngram",
        "--text",
        "{at}/answers.jsonl",
        "--questions",
        "{at}/questions.jsonl",
    ]
    code, out, err = run(*args)
    assert code == 0
    assert "turn 2" in out
    assert "1 answers left out" in err
    assert "questions.jsonl" in err
    document = json.loads(run(*args, "--json", "-")[1])
    first, second = document["rows"][0]["turns"]
    assert document["skipped"] == 1
    assert second["steps"] < first["steps"] <= first["tokens"] == second["tokens"]


def test_the_embedded_tokenizer_is_the_default() -> None:
    assert load_tokenizer().get_vocab() == load_tokenizer("demo").get_vocab()


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--text", "{at}/log.jsonl"], "--methods"),
        (["--methods", "ngram"], "--text"),
        (["--methods", ",", "--text", "{at}/log.jsonl"], "--methods is empty"),
        (["--methods", "ngrm", "--text", "{at}/log.jsonl"], "did you mean ngram"),
        (["--methods", "auto", "--text", "{at}/log.jsonl"], "auto chooses"),
        (["--methods", "draft", "--text", "{at}/log.jsonl"], "a 'draft' model"),
        (["--methods", "ngram", "--text", "{at}/none.jsonl"], "No such file"),
        (["--methods", "ngram", "--text", "{at}"], "directory"),
        (["--methods", "ngram", "--text", "{at}/empty.jsonl"], "has no recordings"),
        (["--methods", "ngram", "--text", "{at}/mute.jsonl"], "hold no recorded text"),
        (["--methods", "ngram", "--text", "{at}/bad.jsonl"], "bad.jsonl, line 2: not JSON"),
        (["--methods", "ngram", "--text", "{at}/answers.jsonl"], "--questions"),
        (
            ["--methods", "ngram", "--text", "{at}/log.jsonl", "--questions", "{at}/log.jsonl"],
            "is no question",
        ),
        (["--methods", "ngram", "--text", "{at}/log.jsonl", "--nodes", "0"], "nodes=0"),
        (["--methods", "ngram", "--text", "{at}/log.jsonl", "--limit", "0"], "--limit"),
        (["--methods", "ngram", "--text", "{at}/log.jsonl", "--plot", "out.png"], "ends in .svg"),
        (
            ["--methods", "ngram", "--text", "{at}/log.jsonl", "--plot", "{at}/no/out.svg"],
            "folder does not exist",
        ),
        (["--methods", "ngram", "--text", "{at}/log.jsonl", "--json", "{at}"], "a folder"),
        (
            ["--methods", "ngram", "--text", "{at}/log.jsonl", "--tokenizer", "./nowhere"],
            "no such folder",
        ),
        (
            ["--methods", "ngram", "--text", "{at}/log.jsonl", "--tokenizer", "{at}"],
            "no usable tokenizer",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line(run: Any, args: list[str], said: str) -> None:
    code, out, err = run(*args)
    assert code == 2
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert said in err


def test_progress_follows_the_bytes_read(
    run: Any, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    seen: list[tuple[float, float | None]] = []
    update = Progress.update

    def spy(self: Any, task: Any, **values: Any) -> None:
        update(self, task, **values)
        seen.append((self.tasks[0].completed, self.tasks[0].total))

    monkeypatch.setattr(Progress, "update", spy)
    run("--methods", "ngram", "--text", "{at}/log.jsonl")
    lines = (folder / "log.jsonl").read_bytes().splitlines(keepends=True)
    size = sum(map(len, lines))
    assert seen == [(sum(map(len, lines[: i + 1])), size) for i in range(3)]
