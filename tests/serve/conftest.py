"""One server for the tests that change nothing of it, and one browser for those of the page."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.serve import page_server
from tests.serve.live import Live, running


@pytest.fixture(scope="session")
def live() -> Iterator[Live]:
    with running() as server:
        yield server


@pytest.fixture
def client(live: Live) -> Iterator[httpx.Client]:
    with live.client() as client:
        yield client


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from tests.serve.browser import chromium  # needs selenium

    with chromium(tmp_path_factory.mktemp("chromium")) as browser:
        yield browser


@pytest.fixture(scope="session")
def scripted() -> Iterator[page_server.Server]:
    with page_server.serving(page_server.Script()) as server:
        yield server


@pytest.fixture
def page(browser: Any, scripted: page_server.Server) -> Any:
    """The page as it is when it is opened, with a script of this test's own after it."""
    from tests.serve.browser import Page

    scripted.script = page_server.Script()
    page = Page(browser, scripted.url, scripted.script)
    page.emulate()
    page.open()
    return page
