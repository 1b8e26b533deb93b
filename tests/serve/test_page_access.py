"""The page at `/` is for everybody: keyboards, colours, small windows, and no other host."""

from __future__ import annotations

import re

import pytest

from tests.serve.browser import ActionChains, Keys, Page
from tests.serve.page_server import PAGE


def test_it_works_by_keyboard_alone(page: Page) -> None:
    def press(*keys: str) -> str:
        """Presses keys where the focus is, and returns the id of what has it afterwards."""
        ActionChains(page.driver).send_keys(*keys).perform()
        active = page.driver.switch_to.active_element
        ring = page.js("return getComputedStyle(arguments[0]).outlineStyle", active)
        assert ring != "none" or active.get_attribute("name") == "mode", "the focus is not seen"
        return str(active.get_attribute("id"))

    assert press("Hi") == "prompt"  # it has the focus at once
    order = [press(Keys.TAB) for _ in range(4)]
    assert order == ["send", "halt", "again", "race"]
    press(Keys.ENTER)
    page.until(lambda: page.script.asked and page.idle())
    assert page.get("race-result").is_displayed()
    seen = [press(Keys.TAB) for _ in range(5)]  # both texts can be scrolled, then come the steps
    assert seen == ["formatted", "", "", "step", "follow"]
    ActionChains(page.driver).key_down(Keys.SHIFT).send_keys(Keys.TAB).key_up(Keys.SHIFT).perform()
    press(Keys.ARROW_LEFT)
    assert page.text("step-number") == "5 of 6"
    assert page.get("step").get_attribute("aria-valuetext").startswith("step 5: 3 of 5 drafted")


def test_every_field_and_button_has_a_name(page: Page) -> None:
    page.ask("a river")
    ids = page.js("return [...document.querySelectorAll('[id]')].map((e) => e.id)")
    assert len(set(ids)) == len(ids)
    code = """return [...document.querySelectorAll("input, select, textarea, button, [role=img]")]
      .filter((e) => !(e.labels?.length || e.textContent.trim() || e.ariaLabel))
      .filter((e) => e.getClientRects().length)
      .map((e) => e.outerHTML)"""
    assert page.js(code) == []
    assert page.get("said").get_attribute("role") == "status"
    assert page.all(".lane .text")[0].get_attribute("aria-busy") == "false"


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_colours_follow_the_system_or_the_switch(page: Page, theme: str) -> None:
    def ground() -> str:
        return str(page.js("return getComputedStyle(document.body).backgroundColor"))

    grounds = {"light": "rgb(247, 246, 242)", "dark": "rgb(21, 23, 26)"}
    other = {"light": "dark", "dark": "light"}[theme]
    page.emulate(prefers_color_scheme=theme)
    assert ground() == grounds[theme]
    page.fill("theme", other)
    assert ground() == grounds[other]
    page.open()
    assert ground() == grounds[other]  # it is remembered
    page.fill("theme", "")
    assert ground() == grounds[theme]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_colours_have_contrast(page: Page, theme: str) -> None:
    page.emulate(prefers_color_scheme=theme)
    code = """const probe = document.body.appendChild(document.createElement("i"));
    const names = arguments[0];
    const values = names.map((name) => {
      probe.style.color = `var(--${name})`;
      return getComputedStyle(probe).color.match(/\\d+/g).map(Number);
    });
    probe.remove();
    return Object.fromEntries(names.map((name, i) => [name, values[i]]));"""
    drafters = [f"c{i}" for i in range(5)]
    names = ["page", "card", "sunk", "ink", "soft", "edge", "main", "on-main", "bad", *drafters]
    light = {name: luminance(rgb) for name, rgb in page.js(code, names).items()}

    def contrast(one: str, other: str) -> float:
        low, high = sorted((light[one], light[other]))
        return (high + 0.05) / (low + 0.05)

    for ground in ("page", "card", "sunk"):
        assert min(contrast(letters, ground) for letters in ("ink", "soft", "main", "bad")) >= 4.5
        assert min(contrast(mark, ground) for mark in ("edge", *drafters)) >= 3
    assert contrast("on-main", "main") >= 4.5


def luminance(rgb: list[int]) -> float:
    """The relative luminance of WCAG."""
    parts = [c / 255 for c in rgb]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("width", [360, 1280])
def test_nothing_is_wider_than_the_window(page: Page, width: int) -> None:
    size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        page.open()
        page.fill("rounds", "1")
        page.race("long")
        for details in page.all("details"):
            page.js("arguments[0].open = true", details)
        assert page.js("return document.documentElement.scrollWidth") <= width
    finally:
        page.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_nothing_moves_where_that_is_not_wanted(page: Page) -> None:
    code = "return getComputedStyle(document.getElementById('send')).transitionDuration"
    assert page.js(code) != "0s"
    page.emulate(prefers_reduced_motion="reduce")
    assert page.js(code) == "0s"


# --- the server


def test_nothing_is_asked_of_another_host(page: Page) -> None:
    page.problems()
    page.open()
    page.race("a river")
    asked = page.js("return performance.getEntriesByType('resource').map((entry) => entry.name)")
    assert len(asked) > 10 and all(address.startswith(page.url) for address in asked)
    assert page.problems() == []  # neither a policy nor a missing file was run into


def test_the_page_names_no_other_host_and_has_no_inline_code() -> None:
    for path in PAGE.iterdir():
        text = path.read_text("utf-8").replace("http://www.w3.org/2000/svg", "")
        assert "://" not in text, f"{path.name} names another host"
        assert max(map(len, text.splitlines())) <= 100, f"{path.name} has long lines"
    html = (PAGE / "index.html").read_text("utf-8")
    assert not re.search(r"\son\w+=|\sstyle=|<style|<script(?![^>]* src=)", html)


def test_the_load_of_the_server_is_shown(page: Page) -> None:
    code = "return [...document.querySelectorAll('#load dl > div')].map((e) => e.innerText)"
    rows = dict(row.split("\n", 1) for row in page.js(code))
    assert rows["Running"] == "1" and rows["Waiting"] == "2"
    assert rows["Drafts accepted"] == "50 %" and rows["Prompts reused"] == "25 %"
    assert rows["Caches"].strip() == "256 MB of 1.0 GB"
    assert page.text("busy") == "1 running, 2 waiting"
    assert page.get("positions").get_attribute("aria-label") == "Of drafts: 80 %, 40 %, 13 %"
    offered = page.js("return [...document.querySelectorAll('option')].map((e) => e.value)")
    assert {"auto", "plain", "suffix"} <= set(offered)
    page.fill("method", "suffix")
    assert page.text("guarantee") == "Copies what came before. Guarantee: exact."
