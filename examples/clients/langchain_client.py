"""Run a LangChain chain with its OpenAI chat model, once whole and once streamed.

`python -m examples.clients.langchain_client [--url http://localhost:8080] [--topic WORDS]`
"""

from __future__ import annotations

import argparse

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable
from langchain_openai import ChatOpenAI
from pydantic import SecretStr


def chain(url: str) -> Runnable[dict[str, str], str]:
    """Return a chain from a topic to a text: prompt template, chat model, output parser."""
    prompt = ChatPromptTemplate.from_messages([("user", "Speak of {topic}.")])
    model = ChatOpenAI(
        base_url=f"{url}/v1",
        api_key=SecretStr("none"),
        model="any",
        temperature=0,
        max_completion_tokens=20,
    )
    return prompt | model | StrOutputParser()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://localhost:8080")
    parser.add_argument("--topic", default="love")
    arguments = parser.parse_args()
    speech = chain(arguments.url)
    print(speech.invoke({"topic": arguments.topic}))
    for text in speech.stream({"topic": arguments.topic}):
        print(text, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
