"""What is said and read where a model judges an answer and refines it.

Source: Cheng et al., SPaR, arXiv:2412.11605, section 2; in other words.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from foretell.rewards.questions import Turn

JUDGE = """Below are a prompt and an answer to it. Does the answer do everything the prompt demands?
First list the demands that the answer does not meet. Then go through all demands step by step, and
say of each whether the answer meets it, and why. Close with one line, which is either
Final Judgement: Yes
if every demand is met, or
Final Judgement: No
if one is not.

The prompt:
{prompt}

The answer:
{answer}"""
REFINE = """Now improve the answer, so that it meets every demand of the prompt. First think about
what has to change. Then write the whole new answer, and nothing else, between the two marks
[[start]] and [[end]]."""
VERDICT = re.compile(r"final\s+judge?ment\b.*?\b(yes|no)\b", re.I | re.S)
SETTLED = re.compile(rf"{VERDICT.pattern}\W", re.I | re.S)  # what follows cannot lengthen the word
NEW = re.compile(r"\[\[start\]\](.*?)\[\[end\]\]", re.S)


@dataclass
class Node:
    """An answer. `critique`: what the majority of its judgements says; "": it has none."""

    branch: int
    text: str
    score: float = 0.0
    critique: str = ""


def judging_turns(prompt: str, answer: str) -> list[Turn]:
    """Turns that ask a model to judge an answer."""
    return [("user", JUDGE.format(prompt=prompt, answer=answer))]


def refining_turns(prompt: str, answer: str, critique: str) -> list[Turn]:
    """Turns that ask a model to refine an answer."""
    return [*judging_turns(prompt, answer), ("assistant", critique), ("user", REFINE)]


def refined(text: str) -> str:
    """The new answer in a refinement; empty where there is none between the marks."""
    marked_answer = NEW.search(text)
    return marked_answer[1].strip() if marked_answer else ""


def tally_verdicts(judgements: Sequence[str]) -> tuple[float, str] | None:
    """The share of yes, and the first judgement of the majority, up to its verdict; None: there are
    as many yes as no.
    """
    verdict_matches = [match for text in judgements if (match := VERDICT.search(text))]
    yes_matches = [match for match in verdict_matches if match[1].lower() == "yes"]
    no_matches = [match for match in verdict_matches if match[1].lower() == "no"]
    if len(yes_matches) == len(no_matches):
        return None
    first_match = max(yes_matches, no_matches, key=len)[0]
    return len(yes_matches) / len(verdict_matches), first_match.string[: first_match.end()]


def sort_best_first(nodes: Sequence[Node]) -> list[Node]:
    """Sorts nodes by score, the best first; of equal scores the later one."""
    return sorted(nodes, key=lambda node: node.score)[::-1]
