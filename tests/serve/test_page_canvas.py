"""The page with a model that fills canvases: what stands where while it fills, and a race."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from foretell.api.lm import LM
from foretell.models.diffusion.canvas import Denoiser
from tests import tiny
from tests.serve.browser import Keys, Page
from tests.serve.live import running

PROMPT = "The quick brown"
METHOD = "remdm:block=12,count=3"


class Gate:
    """Lets the model run when it may."""

    def __init__(self, model: Any):
        self.forward = model.forward
        self.may = threading.Semaphore(0)
        self.open = False
        model.forward = self

    def __call__(self, jobs: Any) -> Any:
        if not self.open:
            assert self.may.acquire(timeout=20)
        return self.forward(jobs)


@pytest.fixture
def canvas(browser: Any) -> Iterator[tuple[Page, LM, Gate]]:
    words: Any = tiny.tokenizer()
    model = Denoiser(tiny.llama(), "tiny", mask_id=len(words) - 9)
    lm = LM(model, words, eos=())
    gate = Gate(model)
    with running(lm) as server:
        page = Page(browser, server.url + "/")
        page.emulate()
        page.open()
        page.choose_completion()
        page.fill("max_tokens", "12")
        page.fill("method", METHOD)
        yield page, lm, gate
        gate.open = True
        gate.may.release(100)
        browser.get("about:blank")


def test_a_canvas_fills_before_the_reader(canvas: tuple[Page, LM, Gate]) -> None:
    page, lm, gate = canvas
    page.problems()
    page.write(PROMPT, Keys.CONTROL + Keys.ENTER)
    gate.may.release(1)  # a step's news come when its forward is through
    page.until(lambda: len(page.all(".cell.mask")) == 12)
    gate.may.release(3)
    page.until(lambda: len(page.all(".cell.mask")) == 9 and len(page.all(".cell.fresh")) == 1)
    figures = dict(zip(page.texts(".figures dt"), page.texts(".figures dd"), strict=True))
    assert figures["filled"] == "25 %"
    gate.may.release(8)  # seven eighths of the steps are over: tokens are taken back
    page.until(lambda: page.all(".cell.back"))
    gate.open = True
    gate.may.release(100)
    page.until(page.idle)
    wanted = lm.generate(PROMPT, METHOD, max_new_tokens=12)
    assert page.answer() == wanted.text and not page.all(".cell")
    assert page.get("steps").is_displayed() is False  # there are no trees
    assert page.problems() == [] and page.texts("#trouble p") == [""]


def test_the_race_is_against_one_token_a_forward(canvas: tuple[Page, LM, Gate]) -> None:
    page, lm, gate = canvas
    gate.open = True
    gate.may.release(100)
    page.until(lambda: page.text("race") == "Race against confidence")
    page.race(PROMPT)
    assert page.texts("#trouble p") == [""]
    base = lm.generate(PROMPT, "confidence", max_new_tokens=12)
    assert "".join(page.texts(".lane:first-child .token")) == base.text
    assert page.texts("#race-result th")[2] == "confidence, tokens/s"
