"""The page at `/` as `foretell serve` serves it, with the tiny model after it."""

from __future__ import annotations

from typing import Any

import pytest

from foretell.serve.keys import read_keys
from foretell.serve.settings import Settings
from tests.serve.browser import Keys, Page
from tests.serve.live import Live, running, until

PROMPT = "The quick brown fox. The quick brown"


@pytest.fixture
def real(browser: Any, live: Live) -> Page:
    page = Page(browser, live.url + "/")
    page.emulate()
    page.open()
    return page


def test_the_server_has_the_page_and_what_it_asks_for(real: Page, live: Live) -> None:
    real.problems()
    real.choose_completion()
    real.fill("max_tokens", "40")
    real.fill("method", "token-recycling:nodes=8")
    real.race(PROMPT)
    assert real.texts("#trouble p") == [""]
    offline = live.lm.generate(PROMPT, method="plain", max_new_tokens=40, temperature=0)
    assert real.answer() == "".join(real.texts(".lane:first-child .token")) == offline.text
    assert "Both texts are the same" in real.texts(".verdict")[0]
    assert real.all(".lane:last-child .drafted") and real.texts(".badge")[1].startswith("exact")
    real.all(".lane:last-child .drafted")[0].click()
    assert real.all("#tree .node.accepted.drafted")
    assert real.problems() == []  # the server's policy is kept


def test_stopping_frees_what_the_server_held(real: Page, live: Live) -> None:
    real.fill("max_tokens", "100")
    real.write("go on", Keys.ENTER)
    real.until(lambda: real.all(".lane .token"))
    real.get("prompt").send_keys(Keys.ESCAPE)
    real.until(real.idle)
    until(lambda: live.lm.engine.status()["running"] == 0)
    assert live.lm.check_integrity() == []


def test_what_the_server_refuses_is_said_beside_the_field(real: Page) -> None:
    real.fill("method", "no-such-method")
    real.ask("hello")
    assert "no-such-method" in real.text("method-trouble")


def test_a_key_opens_the_server(browser: Any, tmp_path: Any) -> None:
    file = tmp_path / "keys"
    file.write_text("sk-0123456789abcdef name=reader\n")
    file.chmod(0o600)
    keys, _ = read_keys(file)
    with running(settings=Settings(keys=keys)) as server:
        page = Page(browser, server.url + "/")
        page.open()
        page.ask("hello")
        assert "Enter an API key" in page.text("key-trouble")
        page.fill("key", "sk-0123456789abcdef")
        page.fill("max_tokens", "8")
        page.get("send").click()
        page.until(lambda: page.idle() and page.answer())
        assert page.text("model") == "tiny" and not page.get("key-trouble").is_displayed()
        browser.get("about:blank")
