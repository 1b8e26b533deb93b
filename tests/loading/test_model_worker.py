"""What the process after lane=process does, in this one: asks in, rows out."""

from __future__ import annotations

import io
import json
from typing import Any

import numpy as np
import pytest

from foretell.core.tree import TokenTree
from foretell.engine.remote import HEAD, model_recipe, receive_message, send_message
from foretell.loading.model_worker import Answers, find_maker, load_target, serve_asks
from foretell.testing.toy import Toy

RECIPE = {"make": "foretell.testing.toy:Toy", "arguments": {"vocab": 8, "seed": 2}, "threads": 1}


def ask(tree: TokenTree, tokens: list[int], same: int = 0, **more: Any) -> dict[str, Any]:
    plain = {"drop": [], "seat": 0, "rows": None, "layers": None}
    return {**plain, "same": same, "tokens": tokens, "tree": [tree.tokens, tree.parents], **more}


def answers(*messages: dict[str, Any]) -> list[tuple[dict[str, Any], bytes]]:
    asks, out = io.BytesIO(), io.BytesIO()
    for message in messages:
        send_message(asks, message)
    asks.seek(0)
    serve_asks(asks, out)
    out.seek(0)
    found = []
    while (received := receive_message(out)) is not None:
        found.append(received)
    return found


def rows(answer: tuple[dict[str, Any], bytes]) -> np.ndarray:
    head, data = answer
    return np.frombuffer(data, dtype=head["dtype"]).reshape(head["shape"])


def test_rows_of_trees_that_grow_on_texts_that_grow() -> None:
    toy = Toy(8, 2)
    tree = TokenTree(3).chain([1, 2]).chain([5])
    last, other = TokenTree(2), TokenTree(3)
    _, first, second, third = answers(
        RECIPE,
        ask(tree, [1, 2, 3], rows=[1, 3]),
        ask(last, [1, 2], same=3),  # 1 and 2 of the tree were accepted
        ask(other, [4, 3], seat=1, drop=[0]),
    )
    assert first[0]["nodes"] == [1, 3]
    assert np.array_equal(rows(first), toy.score([1, 2, 3], tree)[[1, 3]].numpy())
    assert np.array_equal(rows(second), toy.score([1, 2, 3, 1, 2]).numpy())
    assert np.array_equal(rows(third), toy.score([4, 3]).numpy())


def test_rows_that_are_there_are_not_computed_again_and_dropped_ones_are_gone() -> None:
    model = Answers(Toy(8, 2))
    model.answer(ask(TokenTree(3).chain([1]), [1, 2, 3]))
    head, _ = model.answer(ask(TokenTree(3).chain([1, 5]), [], same=3, rows=[2]))
    assert head["new"] == [2]
    model.answer(ask(TokenTree(3), [3], seat=1, drop=[0, 9]))
    assert [*model.caches] == [*model.texts] == [1]


def test_what_goes_wrong_is_told_and_the_next_ask_is_answered() -> None:
    bad = ask(TokenTree(3), [1, 3], rows=[7])
    _, wrong, right = answers(RECIPE, bad, ask(TokenTree(3), [1, 3]))
    assert "error" in wrong[0] and "error" not in right[0]
    (refused,) = answers({**RECIPE, "make": "os:remove"}, bad)
    assert "no function of this package" in refused[0]["error"]
    with pytest.raises(ValueError, match="no function"):
        find_maker("builtins:eval")


def test_a_message_that_is_cut_off_is_the_end() -> None:
    whole = io.BytesIO()
    send_message(whole, {"a": 1}, b"data")
    for end in range(len(whole.getvalue())):
        assert receive_message(io.BytesIO(whole.getvalue()[:end])) is None
    whole.seek(0)
    assert receive_message(whole) == ({"a": 1}, b"data")
    text = json.dumps({"a": 1}).encode()
    assert whole.getvalue()[: HEAD.size] == HEAD.pack(len(text), 4)
    assert answers() == []


def test_the_recipe_of_a_loaded_model_names_a_function_that_is_there() -> None:
    assert find_maker(model_recipe("demo")["make"]) is load_target
