"""Tasks of parallel decoding: items, splits, and checkers against everything that can be said."""

from __future__ import annotations

import itertools
import random

import pytest

from foretell.bench.suites.parallel import tasks
from foretell.bench.suites.parallel.tasks import (
    RIGHT_LISTS,
    SPLITS,
    TASKS,
    Item,
    Question,
    format_list,
    make_items,
)
from foretell.errors import BadConfig

OLD = ("a", "b", "c")


def parts(question: Question) -> set[str]:
    """What no item of the other split may have."""
    if question.text:
        return {question.text}
    if any(" " in entry for entry in question.entries):  # names
        return {*question.entries, *([question.new] if question.new else [])}
    if all(entry.isdigit() for entry in question.entries):  # a sudoku
        return {question.answer}
    return {" ".join(sorted(question.entries))}


@pytest.mark.parametrize("task", TASKS)
def test_items_are_the_same_for_a_seed_and_their_answers_are_right(task: str) -> None:
    found = make_items(task, 12, seed=3)
    assert found == make_items(task, 12, seed=3) and len({item.prompt for item in found}) == 12
    assert found != make_items(task, 12, seed=4)
    least = 0.3 if task == "paraphrase" else 1  # a right one shares words with its source
    for item in found:
        assert item.example is not None and item.example != item.question
        shown = TASKS[task].score_answer(item.example, item.example.answer)
        assert min(item.score(item.completion), shown) >= least, item
        assert item.prompt.endswith("\nAnswer:") and item.prompt.count("Answer:") == 2
        assert item.example.answer in item.prompt and item.stop in item.prompt
        assert item.score("") == item.score("Answer:") == 0


@pytest.mark.parametrize("task", TASKS)
def test_splits_share_nothing(task: str) -> None:
    seen: dict[str, set[str]] = {}
    for split in SPLITS:
        own = [item for seed in range(3) for item in make_items(task, 40, seed, split)]
        both = [one for item in own for one in (item.question, item.example) if one is not None]
        seen[split] = set().union(*map(parts, both))
    assert all(seen.values()) and not seen["train"] & seen["test"]


def test_lists_have_all_lengths_alike() -> None:
    lengths = [len(item.question.entries) for item in make_items("copy", 100)]
    assert {length: lengths.count(length) for length in lengths} == dict.fromkeys((3, 4, 5, 6), 25)


def is_right(task: str, found: list[str], new: str, place: int) -> bool:
    """By the words of each operation."""
    old, rest = list(OLD), list(found)
    if task in ("copy", "reverse", "sort"):
        return found == {"copy": ["a", "b", "c"], "reverse": ["c", "b", "a"]}.get(task, sorted(old))
    if task == "shuffle":
        return sorted(found) == old and found != old
    if task.startswith("insert"):
        if found.count(new) != 1:
            return False
        at = found.index(new)
        rest.remove(new)
        return rest == old and (task == "insert_random" or at == place)
    if task.startswith("remove"):
        missing = [name for name in old if name not in found]
        if len(missing) != 1 or len(found) != 2 or found != [n for n in old if n in found]:
            return False
        return task == "remove_random" or missing == [old[place]]
    changed = [i for i in range(3) if len(found) == 3 and found[i] != old[i]]
    if len(changed) != 1 or found[changed[0]] != new:
        return False
    return task == "replace_random" or changed == [place]


@pytest.mark.parametrize("task", [*RIGHT_LISTS, "shuffle"])
def test_lists_are_checked_as_their_operation_says(task: str) -> None:
    rights = 0
    for place in range(3):
        question = Question(OLD, "n", place)
        for length in range(5):
            for found in itertools.product("abcn", repeat=length):
                want = is_right(task, list(found), "n", place)
                rights += want
                assert TASKS[task].score_answer(question, format_list(found)) == want, (
                    found,
                    place,
                )
    several = {"shuffle": 5, "insert_random": 4, "remove_random": 3, "replace_random": 3}
    assert rights == 3 * several.get(task, 1)


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ('["a", "b", "c"]', 1),
        (' ["a","b","c"] and more', 1),
        ('["x"]\n["a", "b", "c"]', 1),
        ('["a", "b", "c"]\n["x"]', 0),  # the last one counts
        ("['a', 'b', 'c']", 0),
        ("[a, b, c]", 0),
        ('["a", "b", "c",]', 0),
        ('["a", "b", "c"', 0),
        ('"a", "b", "c"', 0),
        ('[["a", "b", "c"]]', 1),  # the innermost brackets
        ('{"a": ["a", "b", "c"]}', 1),
        ('["a", "b", 3]', 0),
        ("[" * 5000, 0),
        ("", 0),
    ],
)
def test_lists_are_read_strictly(text: str, want: float) -> None:
    assert TASKS["copy"].score_answer(Question(OLD), text) == want


def test_squares_are_checked_row_by_row_and_column_by_column() -> None:
    draw = random.Random(0)
    symbols = ("H", "4", "C", "A")
    rights = 0
    orders = list(itertools.permutations(symbols))
    for number in range(3000):
        rows = list(draw.choices(orders, k=4))
        if number % 3 == 0:  # one that is right, or has two cells changed
            square = draw.choice(tasks.latin_squares())
            rows = [tuple(symbols[cell] for cell in row) for row in square]
            if number % 2:
                cells = [list(row) for row in rows]
                i, j = draw.sample(range(4), 2)
                cells[i][0], cells[j][0] = cells[j][0], cells[i][0]
                rows = [tuple(row) for row in cells]
        want = all({row[i] for row in rows} == set(symbols) for i in range(4))
        want = want and all(set(row) == set(symbols) for row in rows)
        rights += want
        text = "\n".join(",".join(row) for row in rows)
        assert TASKS["latin_square"].score_answer(Question(symbols), text) == want
        assert TASKS["latin_square"].score_answer(Question(symbols), f"Here:\n{text}\n\nok") == want
    assert rights >= 400
    assert len(set(tasks.latin_squares())) == 576 and len(set(tasks.sudoku_solutions())) == 288
    for text in ("H4CA\n4CAH\nCAH4\nAH4C", "H,4,C,A\n4,C,A,H\nC,A,H,4"):
        assert TASKS["latin_square"].score_answer(Question(symbols), text) == 0


def test_a_sudoku_has_one_solution_which_is_its_answer() -> None:
    quarters = [(0, 1, 4, 5), (2, 3, 6, 7), (8, 9, 12, 13), (10, 11, 14, 15)]
    groups = [
        *quarters,
        *(range(i, i + 4) for i in (0, 4, 8, 12)),
        *(range(i, 16, 4) for i in range(4)),
    ]
    for item in make_items("sudoku", 12, seed=1):
        given = "".join(item.question.entries)
        gaps = [place for place, one in enumerate(given) if one == "0"]
        assert len(gaps) == 4 and len(given) == 16
        right = []
        for numbers in itertools.product("1234", repeat=4):
            cells = list(given)
            for place, number in zip(gaps, numbers, strict=True):
                cells[place] = number
            text = "\n".join("".join(cells[i : i + 4]) for i in range(0, 16, 4))
            solves = all(len({cells[i] for i in group}) == 4 for group in groups)
            assert item.score(text) == solves
            right += [text] if solves else []
        assert right == [item.question.answer]
        assert item.score(item.question.answer.replace("\n", "")) == 0


def test_prompts_have_an_example_only_where_there_is_one() -> None:
    question = Question(("a b", "c d"), "e f", 1, answer='["a b", "e f", "c d"]')
    item = Item("insert_index", question)
    assert item.prompt.endswith('\n\nList: ["a b", "c d"]\nNew: "e f"\nPosition: 1\nAnswer:')
    assert item.completion == ' ["a b", "e f", "c d"]' and item.prompt.count("Answer") == 1
    square = make_items("latin_square", 1)[0]
    assert square.completion.startswith("\n") and square.completion.count("\n") == 4


def test_what_cannot_be_made_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadConfig, match="task='nothing': must be one of copy"):
        make_items("nothing", 1)
    with pytest.raises(BadConfig, match="split='dev': must be one of train, test"):
        make_items("copy", 1, split="dev")
    # Of these eight sets of words there are 192 orders.
    monkeypatch.setattr(tasks.texts, "THEMES", ("cook|stir taste|soup stew|cellar kitchen",))
    with pytest.raises(BadConfig, match=r"so many different items \(200\) cannot be made"):
        make_items("words_easy", 200, split="train")
