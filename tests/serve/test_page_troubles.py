"""The page at `/`: every trouble is said in words, where it belongs."""

from __future__ import annotations

import pytest

from tests.serve.browser import By, Page
from tests.serve.page_server import TEXT


def test_a_missing_key_is_said_beside_its_field(page: Page) -> None:
    page.script.keys = ["secret"]
    page.open()
    assert page.text("load-trouble") == "No such API key. Enter an API key in the settings."
    page.ask("hello")
    assert page.text("key-trouble") == "No such API key. Enter an API key in the settings."
    field = page.driver.switch_to.active_element
    assert field.get_attribute("id") == "key" and field.get_attribute("aria-invalid") == "true"
    assert field.get_attribute("aria-describedby") == "key-trouble"
    assert page.get("prompt").get_attribute("value") == "hello"
    field.send_keys("secret")
    page.get("send").click()
    page.until(page.idle)
    assert page.answer() == TEXT and not page.get("key-trouble").is_displayed()
    kept = page.js("return JSON.stringify([localStorage, sessionStorage, document.cookie])")
    assert "secret" not in kept
    page.open()
    assert page.get("key").get_attribute("value") == ""


def test_a_full_server_says_when_to_try_again(page: Page) -> None:
    page.script.full = 1
    page.ask("hello")
    said = page.get("trouble").find_element(By.TAG_NAME, "p").text
    assert said == "The server is full. Try again in 3 s."
    assert not page.get("result").is_displayed()
    page.get("retry").click()
    page.until(lambda: page.idle() and page.answer() == TEXT)
    assert not page.get("trouble").is_displayed()


def test_a_refused_setting_is_said_beside_it(page: Page) -> None:
    page.ask("refused")
    assert page.text("top_k-trouble") == "Input should be at most 10."
    assert page.driver.switch_to.active_element.get_attribute("id") == "top_k"


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ("break", "broke off"),
        ("late error", "The model failed."),
        ("fails", "Internal error 1f2e."),
    ],
)
def test_what_came_before_an_error_is_kept(page: Page, prompt: str, said: str) -> None:
    page.ask(prompt)
    assert said in page.get("trouble").text
    kept = "" if prompt == "fails" else "The river bends east past the mill"
    assert page.answer() == kept
    assert page.get("result").is_displayed() is bool(kept)


def test_a_server_that_is_gone_is_said(page: Page) -> None:
    page.js("window.fetch = () => Promise.reject(new TypeError('no route'))")
    page.ask("hello")
    assert page.get("trouble").text.startswith("The connection failed.")
    page.until(lambda: page.text("load-trouble") == "The server does not answer.")


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("top_p", "7", "This must be a number from 0.001 to 1."),
        ("max_tokens", "1.5", "This must be a whole number from 1."),
    ],
)
def test_a_bad_number_is_not_sent(page: Page, name: str, value: str, said: str) -> None:
    page.fill(name, value)
    page.ask("hello")
    assert page.text(f"{name}-trouble") == said and page.script.asked == []
    page.fill(name, "")
    page.get("send").click()
    page.until(lambda: page.script.asked and page.idle())
    assert not page.all("[aria-invalid]")


def test_a_bad_schema_is_not_sent(page: Page) -> None:
    page.fill("format", "json")
    page.fill("constraint", "{oops")
    page.ask("hello")
    assert page.text("constraint-trouble").startswith("This is no JSON: ")
    assert page.driver.switch_to.active_element.is_displayed() and page.script.asked == []


def test_a_refused_constraint_is_said_beside_it_or_where_it_is_seen(page: Page) -> None:
    page.ask("bad regex")  # no field for it is shown
    assert page.texts("#trouble p") == ["regex: a bracket is not closed."]
    page.fill("format", "regex")
    page.fill("constraint", "(a")
    page.get("retry").click()
    page.until(lambda: page.idle() and page.text("constraint-trouble"))
    assert page.text("constraint-trouble") == "A bracket is not closed."
    assert page.script.asked[-1]["structured_outputs"] == {"regex": "(a"}


def test_nothing_is_not_sent(page: Page) -> None:
    page.ask("")
    assert page.text("prompt-trouble") == "Write a prompt first." and page.script.asked == []


@pytest.mark.parametrize("prompt", ["fails", "refused", "bad regex"])
def test_an_error_hides_no_answer(page: Page, prompt: str) -> None:
    page.ask("hello")
    page.ask(prompt)
    assert page.get("result").is_displayed() and page.answer() == TEXT
    assert page.text("asked") == "hello" and page.all("#legend li")
    assert page.get("steps").is_displayed() and not page.get("earlier").is_displayed()
    page.ask("again")  # the conversation goes on after the answer
    assert [turn["content"] for turn in page.script.asked[-1]["messages"]] == [
        "hello",
        TEXT,
        "again",
    ]


def test_a_full_server_hides_no_race(page: Page) -> None:
    page.race("hello")
    verdict = page.text("race-result")
    page.script.full = 1
    page.race("hello")
    assert page.get("trouble").is_displayed() and page.text("race-result") == verdict
    assert len(page.all(".lane")) == 2 and page.get("race-said").is_displayed()
