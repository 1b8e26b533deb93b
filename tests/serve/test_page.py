"""The page at `/`, in a real headless Chromium, against a server that answers from a script."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serve.page_server import TEXT, Script, Server, serving

pytest.importorskip("selenium", reason="selenium is not installed: pip install 'foretell[dev]'")
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.wait import WebDriverWait

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER),
    reason="no chromium and chromedriver: apt-get install chromium chromium-driver",
)
FLAGS = """--headless --no-sandbox --disable-gpu --disable-quic --no-first-run
--disable-background-networking --disable-component-update --disable-sync""".split()
PATIENCE = 10  # seconds until a test gives up to wait
SENT = {"stream", "stream_options", "trace", "method", "temperature", "max_tokens"}  # by default


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    folder = tmp_path_factory.mktemp("chromium")
    for flag in [*FLAGS, f"--user-data-dir={folder}", "--window-size=1280,900"]:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


class Page:
    """The page in the browser, used as a reader would."""

    def __init__(self, driver: webdriver.Chrome, script: Script, url: str):
        self.driver = driver
        self.script = script
        self.url = url

    def open(self) -> None:
        self.driver.get(self.url)
        self.until(lambda: self.text("model") == "scripted" or self.text("load-trouble"))

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


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(Script()) as server:
        yield server


@pytest.fixture
def page(browser: webdriver.Chrome, server: Server) -> Page:
    """The page as it is when it is opened, with a script of this test's own."""
    server.script = Script()
    page = Page(browser, server.script, server.url)
    page.emulate()
    page.open()
    return page


# --- answers


def test_an_answer_streams_and_tells_who_proposed_each_token(page: Page) -> None:
    page.ask("Describe a river.")
    assert page.answer() == TEXT
    tokens = {t.text.strip(): t.get_attribute("class") for t in page.all(".lane .token")}
    assert tokens["The"] == "token own"
    looks = {tokens[word] for word in ("river", "past", "water")}  # three drafters
    assert len(looks) == 3 and all("drafted" in str(look) for look in looks)
    underlines = {
        page.js("return getComputedStyle(arguments[0]).textDecorationStyle", token)
        for token in page.all(".legend .drafted")
    }
    assert underlines == {"solid", "dashed", "dotted"}  # not by colour alone
    assert page.all(".lane .token")[1].get_attribute("title") == "proposed by suffix, step 2"
    legend = [re.sub(r"\s+", " ", text) for text in page.texts("#legend li")]
    assert legend[:2] == ["the model itself 6 tokens, 43 %", "suffix 4 tokens, 29 %"]
    figures = dict(zip(page.texts(".figures dt"), page.texts(".figures dd"), strict=True))
    assert figures["drafts accepted"] == "57 %" and figures["tokens a step"] == "2.33"
    assert float(figures["tokens/s"].replace(",", "")) > 0
    assert page.text("said").startswith("Done: 14 tokens")
    assert page.texts(".badge") == ["exact · ended by itself"]


def test_empty_settings_are_not_sent(page: Page) -> None:
    page.ask("hello")
    (body,) = page.script.asked
    assert body.keys() == SENT | {"messages"}
    assert body["temperature"] == 0 and body["trace"] is True and body["method"] == "auto"


def test_settings_are_sent(page: Page) -> None:
    page.choose_completion()
    numbers = {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 3}
    numbers |= {"max_tokens": 17, "presence_penalty": -1, "frequency_penalty": 0.5}
    for name, value in numbers.items():
        page.fill(name, str(value))
    page.fill("method", "ngram:n=3")
    page.fill("stop", "\\n\\n\nEND")
    page.fill("format", "json")
    page.fill("constraint", '{"type": "array"}')
    page.ask("Once", Keys.CONTROL + Keys.ENTER)
    (body,) = page.script.asked
    assert body.keys() == SENT | numbers.keys() | {"prompt", "stop", "structured_outputs"}
    assert {name: body[name] for name in numbers} == numbers
    assert body["prompt"] == "Once" and body["method"] == "ngram:n=3"
    assert body["stop"] == ["\n\n", "END"]
    assert body["structured_outputs"] == {"json": {"type": "array"}}
    assert page.texts(".lane .text > .soft") == ["Once"]  # what is continued stands before it


def test_a_chat_goes_on_until_it_is_begun_anew(page: Page) -> None:
    page.fill("system", "Be brief.")
    page.ask("first")
    assert page.get("prompt").get_attribute("value") == ""
    page.ask("second")
    system, *turns = page.script.asked[1]["messages"]
    assert system == {"role": "system", "content": "Be brief."}
    assert [turn["content"] for turn in turns] == ["first", TEXT, "second"]
    page.get("again").click()
    page.until(lambda: len(page.script.asked) == 3 and page.idle())
    assert page.script.asked[2] == page.script.asked[1]
    page.get("anew").click()
    page.ask("third")
    assert [m["content"] for m in page.script.asked[3]["messages"]] == ["Be brief.", "third"]


def test_esc_stops_and_what_came_is_kept(page: Page) -> None:
    page.write("slow", Keys.ENTER)
    page.until(lambda: len(page.all(".lane .token")) > 5)
    page.driver.switch_to.active_element.send_keys(Keys.ESCAPE)
    page.until(page.idle)
    assert page.script.left.wait(PATIENCE)  # the server is told
    assert page.answer().startswith("The river bends")
    assert page.text("said").startswith("Stopped: ") and page.get("trouble").is_displayed() is False
    assert "stopped by you" in page.texts(".badge")[0]


def test_the_button_stops_as_well(page: Page) -> None:
    page.write("slow", Keys.ENTER)
    page.until(lambda: page.all(".lane .token"))
    page.get("halt").click()
    page.until(page.idle)
    assert page.script.left.wait(PATIENCE)


def test_texts_are_shown_as_they_are(page: Page) -> None:
    page.choose_completion()
    markup = "<b>bold</b><img src=x>"
    page.ask(markup, Keys.CONTROL + Keys.ENTER)
    assert page.texts(".lane .text > .soft") == [markup]
    assert not page.all(".lane b, .lane img")


# --- steps


def test_the_tree_of_a_step_is_drawn(page: Page) -> None:
    page.ask("a river")
    assert page.text("step-said") == "1 of 1 drafted token accepted: “.↵”"  # of the last step
    page.all('.token[data-step="4"]')[0].click()
    assert page.text("step-number") == "5 of 6"
    assert page.text("step-said") == "3 of 5 drafted tokens accepted: “where the water falls”"
    words = {
        kind: page.texts(f"#tree .node.{kind} text")
        for kind in ("root", "accepted", "own", "rejected")
    }
    assert words["root"] == [","] and words["accepted"] == ["·where", "·the", "·water"]
    assert "·falls" in words["own"] and words["rejected"] == ["·weather", "·who"]
    assert len(page.all("#tree .edge.accepted")) == 4 and len(page.all("#tree .edge")) == 6
    assert page.texts(".token.marked") == [" where", " the", " water", " falls"]
    assert page.texts("#tree title")[4].endswith("proposed by suffix, rejected")
    places = [page.js("return arguments[0].getBBox().y", node) for node in page.all("#tree .node")]
    accepted, refused = [places[i] for i in (0, 1, 2, 3, 6)], [places[4], places[5]]
    assert max(accepted) - min(accepted) < 1 and min(refused) > max(accepted) + 20


def test_no_two_nodes_of_a_tree_share_a_place(page: Page) -> None:
    tree = {
        "tokens": list("rabcdefgh"),
        "parents": [-1, 0, 0, 1, 1, 2, 5, 2, 0],
        "sources": ["target", *["suffix"] * 8],
        "accepted": [2, 7],
    }
    code = """const [tree, done] = arguments;
    import("/tree.js").then(({ layout }) => done(layout(tree, "x")));"""
    nodes = page.driver.execute_async_script(code, tree)
    places = [(node["column"], node["row"]) for node in nodes]
    assert len(set(places)) == len(nodes) == 10
    assert [places[i] for i in (0, 2, 7, 9)] == [(0, 0), (1, 0), (2, 0), (3, 0)]
    for node in nodes[1:]:
        assert node["column"] == nodes[node["parent"]]["column"] + 1


# --- the race


def test_a_race_alternates_who_goes_first(page: Page) -> None:
    page.race("a river")
    page.race("a river")
    plain = [body["method"] == "plain" for body in page.script.asked]
    assert plain == [True, False, False, True] * 2
    assert "".join(page.texts(".lane:first-child .token")) == page.answer() == TEXT
    assert not page.all(".lane:first-child .drafted") and page.all(".lane:last-child .drafted")
    rows = [row.split("|") for row in page.js(
        "return [...document.querySelectorAll('tbody tr')]"
        ".map((row) => [...row.cells].map((cell) => cell.textContent).join('|'))"
    )]  # fmt: skip
    assert [row[:2] for row in rows] == [["1", "plain"], ["2", "auto"]]
    assert float(rows[0][4]) > 0
    verdict = page.texts(".verdict")[0]
    assert "times as fast as plain decoding, median of 2 rounds" in verdict
    assert verdict.endswith("Both texts are the same, letter by letter.")


def test_a_race_at_once_with_draws_has_one_seed(page: Page) -> None:
    page.fill("order", "together")
    page.fill("rounds", "1")
    page.fill("temperature", "1")
    page.race("long")
    one, other = page.script.asked
    assert {one["method"], other["method"]} == {"plain", "auto"}
    assert one["seed"] == other["seed"] >= 0
    assert "both at once, sharing the machine" in page.text("race-said")
    assert page.texts("tbody td")[1] == "at once"


def test_a_race_is_stopped_as_a_whole(page: Page) -> None:
    page.write("slow")
    page.get("race").click()
    page.until(lambda: page.all(".lane .token"))
    page.get("prompt").send_keys(Keys.ESCAPE)
    page.until(page.idle)
    assert len(page.script.asked) == 1 and not page.get("race-result").is_displayed()


def test_a_race_of_plain_against_plain_is_refused(page: Page) -> None:
    page.fill("method", "plain")
    page.race("a river")
    assert "another method" in page.text("method-trouble") and not page.script.asked


# --- troubles


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


def test_nothing_is_not_sent(page: Page) -> None:
    page.ask("")
    assert page.text("prompt-trouble") == "Write a prompt first." and page.script.asked == []


# --- everybody can use it


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
    seen = [press(Keys.TAB) for _ in range(4)]  # both texts can be scrolled, then come the steps
    assert seen == ["", "", "step", "follow"]
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
    folder = Path(__file__).resolve().parents[2] / "foretell" / "serve" / "page"
    for path in folder.iterdir():
        text = path.read_text("utf-8").replace("http://www.w3.org/2000/svg", "")
        assert "://" not in text, f"{path.name} names another host"
    html = (folder / "index.html").read_text("utf-8")
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
