"""Conversations: what is kept of them, whatever happens, and what the model is shown."""

from __future__ import annotations

import copy
from typing import Any

import pytest

import foretell
from foretell.cli._conversation import SCHEMA, Chat, read_conversation
from foretell.errors import BadConfig, BadFile, PromptTooLong, UnknownMethod
from tests import tiny

TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
CONTEXT = 192


def small(template: str | None) -> foretell.LM:
    tokenizer = copy.deepcopy(tiny.tokenizer())
    tokenizer.chat_template = template
    return foretell.wrap(tiny.llama(max_position_embeddings=CONTEXT), tokenizer, name="tiny")


@pytest.fixture(scope="module")
def lm() -> foretell.LM:
    return small(TEMPLATE)


@pytest.fixture
def chat(lm: foretell.LM) -> Chat:
    return Chat(lm, "plain", {"max_new_tokens": 12})


def say(chat: Chat, question: str) -> str:
    return "".join(piece.text for piece in chat.ask(question))


def test_every_turn_is_shown_to_the_model_before_the_next_question(chat: Chat) -> None:
    chat.tell("Be brief.")
    first = say(chat, "One?")
    second = say(chat, "Two?")
    shown = f"system: Be brief.\nuser: One?\nassistant: {first}\nuser: Two?\n"
    assert second == chat.lm.generate(chat.lm.encode(shown), "plain", max_new_tokens=12).text
    assert [(turn.question, turn.answer) for turn in chat.turns] == [
        ("One?", first),
        ("Two?", second),
    ]
    assert chat.tokens() == len(chat.lm.encode(f"{shown}assistant: {second}\n"))
    assert chat.turns[-1].stats is not None and chat.turns[-1].stats.tokens == 12


def test_what_was_said_before_an_interruption_is_kept(chat: Chat) -> None:
    pieces = chat.ask("One?")
    said = next(pieces).text + next(pieces).text
    pieces.close()
    [turn] = chat.turns
    assert turn.answer == said and turn.finish_reason is None and turn.stats is None
    assert not chat.lm.engine.live, "the request has ended"
    assert say(chat, "Two?")


def test_a_question_without_a_word_of_answer_is_forgotten(chat: Chat) -> None:
    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("foretell.engine.driver.Driver._receive_events", interrupted)
        with pytest.raises(KeyboardInterrupt):
            say(chat, "One?")
    assert chat.turns == [] and not chat.lm.engine.live


def test_the_oldest_turns_make_room_and_later_questions_come_after_the_same_text(
    chat: Chat,
) -> None:
    began = []
    for number in range(12):
        say(chat, f"Question {number}?")
        began.append(chat.left_out)
        stats = chat.turns[-1].stats
        assert stats and stats.prompt_tokens + stats.tokens <= CONTEXT
    assert began[0] == 0 and began[-1] > 0
    assert len(set(began)) < len([count for count in began if count]), "it moves in leaps"
    last = chat.turns[-1]
    assert last.stats and last.stats.tokens == 12, "there is room for a whole answer"


def test_a_question_that_never_fits_is_refused_and_not_kept(chat: Chat) -> None:
    say(chat, "One?")
    with pytest.raises(PromptTooLong, match="shorten it"):
        say(chat, "word " * 300)
    assert len(chat.turns) == 1 and chat.left_out == 0
    say(chat, "Two?")
    assert chat.left_out == 0 and len(chat.turns) == 2


def test_a_turn_can_be_taken_back(chat: Chat) -> None:
    first = say(chat, "One?")
    say(chat, "Two?")
    assert chat.undo().question == "Two?"
    assert [turn.answer for turn in chat.turns] == [first]
    chat.clear()
    assert chat.turns == [] and chat.tokens() == 0
    with pytest.raises(BadConfig, match="ask something first"):
        chat.undo()


def test_a_question_asked_again_draws_with_the_next_seed(chat: Chat) -> None:
    chat.change(temperature=1.0, seed=3)
    say(chat, "One?")
    again = "".join(piece.text for piece in chat.retry())
    sampling = {"max_new_tokens": 12, "temperature": 1.0, "seed": 4}
    assert again == chat.lm.generate(chat.lm.encode("user: One?\n"), "plain", **sampling).text
    assert [turn.answer for turn in chat.turns] == [again]
    pieces = chat.retry()
    pieces.close()  # before its first piece
    assert [turn.answer for turn in chat.turns] == [again], "the old answer stays"


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"temperature": -1.0}, BadConfig),
        ({"temprature": 1.0}, UnknownMethod),
        ({"method": "nothing"}, UnknownMethod),
        ({"method": "draft"}, foretell.ForetellError),  # there is no draft model
        ({"logit_bias": {99999: 1.0}}, BadConfig),
    ],
    ids=str,
)
def test_a_change_that_no_question_could_bear_changes_nothing(
    chat: Chat, change: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        chat.change(**change)
    assert chat.method == "plain" and chat.sampling == {"max_new_tokens": 12}


def test_a_model_without_a_chat_template_is_refused_at_the_first_change() -> None:
    chat = Chat(small(None), "plain")
    with pytest.raises(BadConfig, match="chat template"):
        chat.change(max_new_tokens=4)


@pytest.mark.parametrize("content", ["a \ud83d", [{"type": "text", "text": "\udc00"}]])
def test_half_a_character_in_a_message_is_named(lm: foretell.LM, content: Any) -> None:
    """And the template is not blamed, nor the tokenizer."""
    with pytest.raises(BadConfig, match=r"messages: \\u[0-9a-f]{4} is half a character"):
        lm.generate([{"role": "user", "content": content}], "plain")


def test_a_saved_conversation_goes_on(chat: Chat) -> None:
    chat.tell("Be brief.")
    say(chat, "One?")
    document = chat.to_dict()
    other = Chat(chat.lm, "plain", {"max_new_tokens": 12})
    other.take(document, "talk.json")
    assert say(other, "Two?") == say(chat, "Two?")
    assert other.to_dict() == chat.to_dict()


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ([], "no saved chat"),
        ({"schema": "foretell.generate/1"}, "no saved chat"),
        ({"schema": SCHEMA}, "needs a role"),
        ({"schema": SCHEMA, "messages": [{"role": "user"}]}, "needs a role"),
        ({"schema": SCHEMA, "messages": [{"role": "user", "content": "x"}]}, "needs an answer"),
        ({"schema": SCHEMA, "messages": [{"role": "robot", "content": "x"}] * 2}, "needs an ans"),
    ],
    ids=str,
)
def test_another_document_is_refused(chat: Chat, document: Any, said: str) -> None:
    say(chat, "One?")
    with pytest.raises(BadFile, match=rf"^talk\.json: .*{said}"):
        chat.take(document, "talk.json")
    assert len(chat.turns) == 1


def test_an_empty_conversation_can_be_saved() -> None:
    assert read_conversation({"schema": SCHEMA, "messages": []}, "x") == ("", [])
