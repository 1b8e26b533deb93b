"""The page at `/`: answers in Markdown, which may say anything and run nothing."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.serve.browser import Page

ANSWER = """# Rivers

They *bend*, **`fast`** or __slow__; a snake_case_name and 2 * 3 * 4 stay.

1. First
   - inner with [a link](https://example.org/a?b=c)
2. Second
   goes on

> quoted
> twice

| River | Length |
|---|--:|
| Rhine | 1,233 |

```python
def f(x):
    return "<b>" # **not bold**
```
---
Done \\*so\\*."""

ATTACKS = [
    "<img src=x onerror=alert(1)> **b**",
    "<script>alert(1)</script> **b**",
    "[run](javascript:alert(1)) **b**",
    "[run](JaVaScRiPt:alert(1)) **b**",
    "[run](data:text/html,<script>alert(1)</script>) **b**",
    '[run](https://example.org" onmouseover="alert(1)) **b**',
    "![x](https://example.org/pixel.png) **b**",
    "[a](//example.org) **b**",
    "`<svg onload=alert(1)>` **b**",
    "```<style>*{display:none}</style>\n<iframe srcdoc='<script>alert(1)</script>'>\n```",
    "| <b>x</b> | y |\n|---|---|\n| <img src=x> | z |",
]
SAFE = {
    *("article", "div", "span", "p", "ul", "ol", "li", "pre", "code", "strong", "em", "del", "a"),
    *("blockquote", "table", "tr", "th", "td", "hr", "h3", "h4", "h5", "h6", "dl", "dd", "dt"),
}


def said(page: Page, text: str) -> None:
    page.problems()  # of tests before
    page.script.says = text
    page.ask("said")


def shown(page: Page, tag: str) -> list[str]:
    return page.texts(f".lane .text {tag}")


def test_an_answer_in_markdown_is_shown_as_what_it_means(page: Page) -> None:
    said(page, ANSWER)
    assert shown(page, "h4") == ["Rivers"]
    assert shown(page, "em") == ["bend"] and shown(page, "strong") == ["fast", "slow"]
    assert shown(page, "strong code") == ["fast"]
    assert shown(page, "ol > li > p") == ["First", "Second\ngoes on"]
    assert shown(page, "ol ul li") == ["inner with a link"]
    assert shown(page, "blockquote p") == ["quoted\ntwice"]
    assert shown(page, "th") == ["River", "Length"] and shown(page, "td") == ["Rhine", "1,233"]
    assert shown(page, "pre") == ['def f(x):\n    return "<b>" # **not bold**\n']
    assert len(page.all(".lane .text hr")) == 1
    assert shown(page, "> p")[-1] == "Done *so*."
    assert "a snake_case_name and 2 * 3 * 4 stay." in page.text("lanes")
    (link,) = page.all(".lane .text a")
    assert link.get_attribute("href") == "https://example.org/a?b=c"
    assert link.get_attribute("rel") == "noopener noreferrer"
    sources = {token.get_attribute("title") for token in page.all(".lane strong .token")}
    assert any("suffix" in str(title) for title in sources), "a token keeps its source"
    page.get("formatted").click()
    assert page.answer() == ANSWER and not page.all(".lane .text strong")
    page.get("formatted").click()
    assert shown(page, "em") == ["bend"]
    page.ask("more")  # what was said before is formatted, too
    assert page.script.asked[-1]["messages"][1]["content"] == ANSWER
    assert page.texts("#turns h4") == ["Rivers"]
    assert page.problems() == []


@pytest.mark.parametrize("text", ATTACKS)
def test_nothing_of_a_text_runs_or_loads(page: Page, text: str) -> None:
    said(page, text)
    assert page.all(".lane .text.markdown")
    tags = page.js("return [...document.querySelectorAll('.lane *')].map((e) => e.localName)")
    assert set(tags) <= SAFE
    names = """return [...document.querySelectorAll('.lane .text *')].flatMap(
      (e) => e.getAttributeNames())"""
    assert set(page.js(names)) <= {"class", "data-step", "title", "href", "target", "rel", "start"}
    for link in page.all(".lane .text a"):
        assert str(link.get_attribute("href")).startswith(("https://", "http://"))
    assert not [path for path in page.script.paths if "pixel" in path or path.endswith("/x")]
    assert page.problems() == [], "the policy had to stop something"


def test_every_letter_that_is_no_mark_is_shown_whatever_is_written(page: Page) -> None:
    """By many texts made of marks: no error, and words keep their order."""
    draw = random.Random(4)
    parts = ["**", "*", "_", "`", "```\n", "\n", "\n\n", "- ", "1. ", "> ", "# ", "|", "|---|\n"]
    parts += ["[", "](", ")", "\\", "  ", "\t", "~~", "<b>", "---\n"]
    texts = []
    for _ in range(400):
        words = (f"w{n}" for n in range(99))
        pieces = [draw.choice([draw.choice(parts), next(words)]) for _ in range(draw.randrange(40))]
        texts.append("".join(pieces))
    code = """const [texts, done] = arguments;
    import("/markdown.js").then(({ parsed, built }) => done(texts.map((text) => {
      const box = document.createElement("div");
      box.append(...built(parsed(text), (from, to) => [text.slice(from, to)]));
      return [box.textContent, [...box.querySelectorAll("*")].map((e) => e.localName)];
    })), (error) => done(String(error.stack)));"""
    found: Any = page.driver.execute_async_script(code, texts)
    assert not isinstance(found, str), found
    for text, (letters, tags) in zip(texts, found, strict=True):
        wanted = [c for c in text if c.isalnum() and c != "1"]
        kept = [c for c in letters if c.isalnum() and c != "1"]
        assert kept == wanted, repr(text)
        assert set(tags) <= SAFE
