"""LangChain against `foretell serve`: a chain that streams, and several questions at once.

    pip install langchain-openai
    foretell serve --model smollm2          # in another terminal
    python examples/langchain_stream.py

OPENAI_BASE_URL and OPENAI_API_KEY say where the server is and who asks.
"""

from __future__ import annotations

import os

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI

TOPICS = ("the sea", "a mountain", "a river")


def main() -> None:
    model = ChatOpenAI(
        base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
        api_key=os.environ.get("OPENAI_API_KEY", "none"),
        model=os.environ.get("MODEL", "smollm2"),
        temperature=0,
        max_completion_tokens=48,
        extra_body={"method": "auto"},  # what OpenAI has not
    )
    prompt = ChatPromptTemplate.from_messages(
        [("system", "Answer in one sentence."), ("user", "Tell me something about {topic}.")]
    )
    chain = prompt | model | StrOutputParser()
    print("stream: ", end="")
    pieces = 0
    for piece in chain.stream({"topic": TOPICS[0]}):
        pieces += bool(piece)
        print(piece, end="", flush=True)
    print(f"\npieces: {pieces}")
    answers = chain.batch([{"topic": topic} for topic in TOPICS])
    for topic, answer in zip(TOPICS, answers, strict=True):
        print(f"{topic}: {answer}")


if __name__ == "__main__":
    main()
