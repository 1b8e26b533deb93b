"""The prompts that `smollm2-draft` is distilled on: `python scripts/draft_prompts.py`.

    python scripts/draft_prompts.py --data FOLDER --out prompts.jsonl
    foretell train draft --target smollm2 --prompts prompts.jsonl ...

The card of that model has the whole command. FOLDER holds public sets as JSON lines, those of them
that are there: spec_bench (`turns`), gsm8k (`question`), mbpp_sanitized and humaneval (`prompt`),
and books and documents (`text`). Beside these come functions of installed packages with their
docstrings, to be completed, and questions about many topics. With `--copies N` there are N more,
whose answers repeat much of them: texts to be changed a little, questions after passages,
translations. What the package ships for measuring, `foretell/assets/prompts`, is left out: the
prompts themselves, what has 13 words in a row with one of them, and every function of a name that
occurs in them.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SHIPPED = Path(__file__).resolve().parent.parent / "foretell" / "assets" / "prompts"
SITE = Path(sysconfig.get_paths()["purelib"])
PACKAGES = ("networkx", "numpy", "sympy", "transformers")  # whose functions are asked for
LONGEST = 2600  # characters of a prompt
IN_A_ROW = 13  # words
FUNCTIONS, FILES = 1100, 2500  # functions in all; files that they are looked for in
PASSAGES = 260
A_TOPIC = 7  # questions about each

COMPLETE = "Complete this Python function, and explain it in one sentence.\n\n```python\n{}\n```"
EDIT_FORMS = [
    "Rename the function to `{name}` and give the whole code back.\n\n```python\n{code}\n```",
    "Add a docstring to this function. Change nothing else.\n\n```python\n{code}\n```",
    "```python\n{code}\n```\n\nAdd type hints and return the complete function.",
    "Rewrite this code so that every argument has a longer name:\n\n```python\n{code}\n```",
    "Explain this function line by line, and quote each line.\n\n```python\n{code}\n```",
]
REWRITE_FORMS = [
    "Correct the spelling of this text. Give all of it back.\n\n{}",
    "Repeat the following text word by word:\n\n{}",
    "Write this text again in the past tense and change nothing else.\n\n{}",
    "Put the following text in a list, one sentence a line:\n\n{}",
    "Give back this text with a title in front of it.\n\n{}",
    "Which sentences of this text are the most important? Quote them.\n\n{}",
    "Summarize the following text in three sentences.\n\n{}",
    "Write a short summary of this text:\n\n{}",
]
QUESTION_FORMS = [
    "Context:\n{text}\nQuestion: what is said about {word}?\nAnswer:",
    "Context:\n{text}\nQuestion: why does {word} matter here?\nAnswer:",
    "{text}\n\nAnswer by the text above: what do we learn about {word}?",
    "Read the passages and answer with a quotation.\n\n{text}\n\nWhere is {word} mentioned?",
]
LANGUAGES = ("German", "French", "Spanish", "Italian")
FUNCTION_FORMS = [
    COMPLETE,
    COMPLETE,
    "Complete this function:\n\n```python\n{}\n```",
    "Write the body of this Python function.\n\n```python\n{}\n```",
    "```python\n{}\n```\n\nFinish this function and show an example of its use.",
]
TASK_FORMS = ["{}", "{} Use Python.", "{} Explain your solution."]
PASSAGE_FORMS = [
    "Summarize the following text:\n\n{}",
    "What is this text about?\n\n{}",
    "{}\n\nRewrite this text in simpler words.",
    "Read this and answer: what is the main idea?\n\n{}",
]
TOPIC_FORMS = [
    "Explain {} in simple terms.",
    "Write a short blog post about {}.",
    "What are the most important facts about {}?",
    "Write a short story about {}.",
    "Write a poem about {}.",
    "Give me five tips about {}.",
    "What are the advantages and disadvantages of {}? Discuss with examples.",
    "Could you outline the main points of {}?",
    "Write an email to a colleague about {}.",
    "Imagine you are a teacher. Explain {} to a child of ten.",
    "How has {} changed over the last hundred years?",
    "Compare two different views on {}.",
    "I would like to learn about {}. Where should I begin?",
    "Write a dialogue between two people about {}.",
    "Describe {} in fewer than 150 words.",
    "Make a list of ten questions about {} with answers.",
    "Develop a detailed outline for an essay on {}.",
    "What is {}, and why does it matter?",
    "Pretend to be an expert on {} and answer: what do most people get wrong?",
    "Write a product description or advertisement that has to do with {}.",
]
TOPICS = [
    topic.strip()
    for topic in """
photosynthesis | the water cycle | black holes | plate tectonics | the French Revolution | World
War II | the Roman Empire | inflation | supply and demand | antitrust law | the stock market |
climate change | renewable energy | machine learning | neural networks | databases | operating
systems | computer networks | cryptography | recursion | sorting algorithms | binary search
trees | hash tables | linked lists | graph algorithms | dynamic programming | object-oriented
programming | web development | JavaScript | Python decorators | Python generators | regular
expressions | SQL joins | version control with git | unit testing | REST APIs | cloud computing
| quantum mechanics | general relativity | thermodynamics | electromagnetism | optics | chemical
bonds | acids and bases | the periodic table | DNA replication | evolution | the immune system |
the human heart | the brain | sleep | nutrition | exercise | mental health | meditation | time
management | public speaking | job interviews | writing a resume | leadership | teamwork |
negotiation | marketing | starting a business | budgeting | investing | taxes | retirement
planning | real estate | travel to Japan | travel to Italy | a trip to Hawaii | hiking in the
mountains | camping | cooking pasta | baking bread | vegetarian meals | coffee | tea | gardening
| house plants | dogs | cats | birds | whales | bees | the rainforest | deserts | oceans |
volcanoes | earthquakes | the solar system | Mars | the Moon landing | satellites | airplanes |
electric cars | trains | bridges | architecture | painting | sculpture | photography | film |
theatre | jazz | classical music | rock music | Shakespeare | poetry | science fiction | fantasy
novels | detective stories | fairy tales | Greek mythology | philosophy | ethics | Kant | Plato
| Buddhism | Christianity | Islam | Hinduism | democracy | constitutional law | human rights |
the United Nations | globalization | immigration | education | online learning | libraries |
social media | smartphones | video games | chess | football | tennis | the Olympics | fractions
| algebra | geometry | probability | statistics | calculus | prime numbers | linear algebra |
logic puzzles | riddles | birthday parties | weddings | friendship | family | childhood | old
age | happiness | stress | creativity | curiosity | artificial intelligence | robots | space
travel | nuclear power | solar panels | recycling | water pollution | fast fashion | minimalism
| a small town | a big city | winter | summer | autumn | a storm at sea | an old lighthouse | a
lost letter | a magic mirror | a time machine | a detective and a thief | a dragon and a knight
""".split("|")
]


def rows(folder: Path, name: str) -> Iterator[dict[str, Any]]:
    """The rows of every JSON lines file of one set."""
    for path in sorted(folder.glob(f"{name}/*.jsonl")):
        with path.open(encoding="utf-8") as lines:
            yield from map(json.loads, lines)


def shipped() -> tuple[set[str], set[str]]:
    """The prompts that measuring uses, and the names of the functions in them."""
    texts = set()
    for path in SHIPPED.glob("*.jsonl"):
        for line in path.read_text("utf-8").splitlines():
            texts.add(json.loads(line)["messages"][0]["content"].strip())
    return texts, {name for text in texts for name in defined(text)}


def rows_of_words(text: str) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[i : i + IN_A_ROW]) for i in range(len(words) - IN_A_ROW + 1)}


def defined(text: str) -> list[str]:
    return re.findall(r"def (\w+)\(", text)


def of_sets(folder: Path, draw: random.Random) -> Iterator[str]:
    """Questions and tasks of the public sets."""
    for row in rows(folder, "spec_bench"):
        yield row["turns"][0]
    for row in rows(folder, "gsm8k"):
        yield row["question"]
    for row in rows(folder, "mbpp_sanitized"):
        yield draw.choice(FUNCTION_FORMS).format(row["prompt"].strip("\n"))
        task = re.search(r"'''\s*(.*?)\s*'''", row["prompt"], re.DOTALL)
        if task:
            yield draw.choice(TASK_FORMS).format(task.group(1).strip())
    for row in rows(folder, "humaneval"):
        yield COMPLETE.format(row["prompt"].strip("\n"))


def functions(draw: random.Random) -> Iterator[str]:
    """Signatures and docstrings of functions of the standard library and of PACKAGES."""
    library = Path(sysconfig.get_paths()["stdlib"])
    files = [path for path in library.rglob("*.py") if "site-packages" not in path.parts]
    for name in PACKAGES:
        files += (SITE / name).rglob("*.py")
    files = [path for path in sorted(files) if "test" not in str(path)]
    draw.shuffle(files)
    found = [pair for path in files[:FILES] for pair in described(path, draw)]
    draw.shuffle(found)
    for number, (text, first_line) in enumerate(found[:FUNCTIONS]):
        if number % 4:
            yield draw.choice(FUNCTION_FORMS).format(text)
        else:
            yield f"Write a Python function for this: {first_line}"


def described(path: Path, draw: random.Random, most: int = 3) -> list[tuple[str, str]]:
    """Of a file its first functions with a short docstring: head and docstring, and its first
    line.
    """
    try:
        tree = ast.parse(path.read_text("utf-8"))
    except (SyntaxError, ValueError, OSError):
        return []
    found: list[tuple[str, str]] = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
            continue
        words = ast.get_docstring(node) or ""
        method = node.args.args and node.args.args[0].arg in ("self", "cls")
        if method or node.decorator_list or not 30 < len(words) < 500:
            continue
        first_line = words.splitlines()[0]
        kept = first_line if draw.random() < 0.5 else words
        head = f"def {node.name}({ast.unparse(node.args)}):"
        found.append((f'{head}\n    """{kept}\n    """', first_line))
        if len(found) == most:
            break
    return found


def paragraphs(folder: Path, draw: random.Random, most: int) -> list[str]:
    """Of books and documents, at most so many of each."""
    found: list[str] = []
    for name in ("text_classics", "text_rust_book", "text_peps", "text_eips"):
        for number, row in enumerate(rows(folder, name)):
            if number == 80:
                break
            parts = [part.strip() for part in row["text"].split("\n\n") if 250 < len(part) < 900]
            found += draw.sample(parts, min(most, len(parts)))
    draw.shuffle(found)
    return found


def passages(folder: Path, draw: random.Random) -> Iterator[str]:
    """Questions about paragraphs."""
    for passage in paragraphs(folder, draw, 2)[:PASSAGES]:
        yield draw.choice(PASSAGE_FORMS).format(passage)


def questions(draw: random.Random) -> Iterator[str]:
    for topic in TOPICS:
        for _ in range(A_TOPIC):
            yield draw.choice(TOPIC_FORMS).format(topic)


def copies(folder: Path, count: int, draw: random.Random) -> Iterator[str]:
    """Prompts whose answers repeat much of them, a quarter of each kind."""
    parts = paragraphs(folder, draw, 6)
    codes = bodies(draw)
    for number in range(count // 4):
        name = f"{draw.choice(('solve', 'compute', 'handle', 'run'))}_{draw.randrange(100)}"
        yield draw.choice(EDIT_FORMS).format(code=codes[number % len(codes)], name=name)
        yield draw.choice(REWRITE_FORMS).format(longer(parts, draw, 1 + number % 3))
        text = longer(parts, draw, 1 + number % 4)
        words = re.findall(r"\b[a-z]{6,}\b", text) or ["this"]
        yield draw.choice(QUESTION_FORMS).format(text=text, word=draw.choice(words))
        sentence = draw.choice(re.split(r"(?<=[.!?])\s+", draw.choice(parts)))
        yield f"Translate English to {draw.choice(LANGUAGES)}: {sentence}"


def longer(parts: list[str], draw: random.Random, count: int) -> str:
    return "\n\n".join(draw.sample(parts, count))


def bodies(draw: random.Random) -> list[str]:
    """Whole short functions of the standard library."""
    library = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for path in sorted(library.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef) and not node.decorator_list:
                code = ast.unparse(node)
                if 120 < len(code) < 900:
                    found.append(code)
    draw.shuffle(found)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes the prompts of smollm2-draft.")
    parser.add_argument("--data", type=Path, required=True, help="folder of the public sets")
    parser.add_argument("--out", type=Path, required=True, help="file of JSON lines to write")
    parser.add_argument("--copies", type=int, default=0, help="prompts whose answers repeat them")
    parser.add_argument("--seed", type=int, default=7)
    arguments = parser.parse_args()
    draw = random.Random(arguments.seed)
    prompts = [*of_sets(arguments.data, draw), *functions(draw), *questions(draw)]
    prompts += passages(arguments.data, draw)
    prompts += copies(arguments.data, arguments.copies, draw)
    texts, names = shipped()
    measured = {words for text in texts for words in rows_of_words(text)}
    kept = []
    for prompt in dict.fromkeys(prompt.strip() for prompt in prompts):
        known = prompt in texts or names & {*defined(prompt)} or measured & rows_of_words(prompt)
        if not known and len(prompt) < LONGEST:
            kept.append(prompt)
    draw.shuffle(kept)
    with arguments.out.open("w", encoding="utf-8") as out:
        for prompt in kept:
            out.write(json.dumps({"messages": [{"role": "user", "content": prompt}]}) + "\n")
    print(f"{arguments.out}: {len(kept)} prompts")


if __name__ == "__main__":
    main()
