"""The page at `/`: answers, steps and races, against a server that answers from a script."""

from __future__ import annotations

import re

from tests.serve.browser import PATIENCE, Keys, Page
from tests.serve.page_server import TEXT

SENT = {"stream", "stream_options", "trace", "method", "temperature", "max_tokens"}  # by default

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
    assert "stopped" in page.texts(".badge")[0]


def test_the_button_stops_as_well(page: Page) -> None:
    page.write("slow", Keys.ENTER)
    page.until(lambda: page.all(".lane .token"))
    page.get("halt").click()
    page.until(page.idle)
    assert page.script.left.wait(PATIENCE)


def test_a_long_text_follows_what_comes_unless_it_is_scrolled_back(page: Page) -> None:
    where = """const text = document.querySelector(".lane .text");
    return [text.scrollTop, text.scrollHeight - text.clientHeight]"""
    page.write("slow", Keys.ENTER)
    page.until(lambda: page.js(where)[1] > 100)
    page.until(lambda: page.js(where)[0] > 100)
    page.js("document.querySelector('.lane .text').scrollTop = 0")
    before = page.js(where)[1]
    page.until(lambda: page.js(where)[1] > before + 30)
    assert page.js(where)[0] == 0
    page.get("halt").click()
    page.until(page.idle)


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


def test_where_one_side_of_a_race_fails_the_other_ends(page: Page) -> None:
    page.fill("order", "together")
    page.script.full = 1
    page.race("slow")
    assert "full" in page.texts("#trouble p")[0] and len(page.script.asked) == 2
    assert page.script.left.wait(PATIENCE)


def test_a_race_of_plain_against_plain_is_refused(page: Page) -> None:
    page.fill("method", "plain")
    page.race("a river")
    assert "another method" in page.text("method-trouble") and not page.script.asked
