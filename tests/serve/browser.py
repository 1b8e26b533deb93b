"""A headless Chromium, and the page in it used as a reader would.

Who imports this is skipped where selenium is not installed; the browser itself may be missing, too.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.serve.page_server import Script

pytest.importorskip("selenium", reason="selenium is not installed: pip install 'foretell[dev]'")
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.wait import WebDriverWait

__all__ = ["PATIENCE", "ActionChains", "By", "Keys", "Page", "chromium"]
FLAGS = """--headless --no-sandbox --disable-gpu --disable-quic --no-first-run
--disable-background-networking --disable-component-update --disable-sync
--window-size=1280,900""".split()
PATIENCE = 10  # seconds until a test gives up to wait


@contextmanager
def chromium(folder: Path) -> Iterator[webdriver.Chrome]:
    """A browser that keeps what it must in a new folder; without one the test is skipped."""
    binary = shutil.which("chromium") or shutil.which("chromium-browser")
    driver = shutil.which("chromedriver")
    if not (binary and driver):
        pytest.skip("no chromium and chromedriver: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in [*FLAGS, f"--user-data-dir={folder}"]:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    try:
        yield browser
    finally:
        browser.quit()


class Page:
    """The page in a browser. `script`: of the server after it, if it answers from one."""

    def __init__(self, driver: webdriver.Chrome, url: str, script: Script | None = None):
        self.driver = driver
        self.url = url
        self.script = script or Script()

    def open(self) -> None:
        self.driver.get(self.url)
        self.until(lambda: self.text("model") or self.text("load-trouble"))

    def get(self, name: str) -> WebElement:
        return self.driver.find_element(By.ID, name)

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def js(self, code: str, *arguments: Any) -> Any:
        return self.driver.execute_script(code, *arguments)

    def text(self, name: str) -> str:
        """An element's text whether or not it is seen."""
        return str(self.js("return document.getElementById(arguments[0]).textContent", name))

    def texts(self, selector: str) -> list[str]:
        code = "return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent)"
        return list(self.js(code, selector))

    def until(self, holds: Callable[[], Any]) -> None:
        WebDriverWait(self.driver, PATIENCE, poll_frequency=0.02).until(lambda _: holds())

    def fill(self, name: str, text: str) -> None:
        """As typing does, but also where a closed group hides the field."""
        code = """const [field, text] = [document.getElementById(arguments[0]), arguments[1]];
        field.value = text;
        for (const kind of ["input", "change"]) {
          field.dispatchEvent(new Event(kind, { bubbles: true }));
        }"""
        self.js(code, name, text)

    def write(self, prompt: str, *keys: str) -> None:
        self.get("prompt").clear()
        self.get("prompt").send_keys(prompt, *keys)

    def idle(self) -> bool:
        return self.get("halt").get_attribute("aria-disabled") == "true"

    def ask(self, prompt: str, keys: str = Keys.ENTER) -> None:
        """Sends a prompt and waits until all is over."""
        self.write(prompt, keys)
        self.until(self.idle)

    def race(self, prompt: str) -> None:
        self.write(prompt)
        self.get("race").click()
        self.until(self.idle)

    def answer(self) -> str:
        return "".join(self.texts(".lane:last-child .token"))

    def choose_completion(self) -> None:
        self.js("document.querySelector('[name=mode][value=text]').click()")

    def emulate(self, **media: str) -> None:
        features = [{"name": name.replace("_", "-"), "value": v} for name, v in media.items()]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def problems(self) -> list[str]:
        """What the browser complained of since this was last asked: also of refused requests."""
        return [entry["message"] for entry in self.driver.get_log("browser")]
