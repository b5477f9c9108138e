"""Answer questions from your own documents, with Milvus Lite and two containers.

    python -m examples.rag.rag --documents DIR \\
        --embeddings http://localhost:8081 --chat http://localhost:8080 'Who rang the bell?'

One container computes embeddings (`option.task=text-embedding`), the other one chats. The first run
embeds the paragraphs of DIR's text files into the file `--database`; later runs only read it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from openai import OpenAI
from pymilvus import MilvusClient

COLLECTION = "paragraphs"
MODEL = "any"
"""A container serves one model and ignores this name."""
BATCH_SIZE = 64
PROMPT = "Answer from these notes alone.\n\n{notes}\n\nQuestion: {question}"


def read_paragraphs(directory: Path) -> list[str]:
    """Return the paragraphs of the *.txt files, in order of file names. Blank lines part them."""
    texts = [path.read_text("utf-8") for path in sorted(directory.glob("*.txt"))]
    return [part.strip() for text in texts for part in text.split("\n\n") if part.strip()]


def embed(client: OpenAI, texts: Sequence[str]) -> list[list[float]]:
    """Return one vector per text."""
    answer = client.embeddings.create(model=MODEL, input=list(texts))
    return [item.embedding for item in answer.data]


def index(database: MilvusClient, client: OpenAI, paragraphs: Sequence[str]) -> None:
    """Create the collection and insert all paragraphs."""
    size = len(embed(client, paragraphs[:1])[0])
    database.create_collection(COLLECTION, dimension=size, metric_type="COSINE", auto_id=True)
    for start in range(0, len(paragraphs), BATCH_SIZE):
        texts = paragraphs[start : start + BATCH_SIZE]
        rows = zip(texts, embed(client, texts), strict=True)
        database.insert(COLLECTION, [{"text": text, "vector": vector} for text, vector in rows])


def search(database: MilvusClient, client: OpenAI, question: str, count: int) -> list[str]:
    """Return the paragraphs nearest to the question, nearest first."""
    (hits,) = database.search(
        COLLECTION, data=embed(client, [question]), limit=count, output_fields=["text"]
    )
    return [hit["entity"]["text"] for hit in hits]


def answer(client: OpenAI, question: str, notes: Sequence[str], max_tokens: int) -> Iterator[str]:
    """Yield the answer as it arrives."""
    content = PROMPT.format(notes="\n\n".join(notes), question=question)
    chunks = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": content}],
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
    )
    for chunk in chunks:
        yield chunk.choices[0].delta.content or ""


def main() -> None:
    arguments = _arguments()
    database = MilvusClient(str(arguments.database))
    embeddings, chat = (
        OpenAI(base_url=f"{url}/v1", api_key="none")
        for url in (arguments.embeddings, arguments.chat)
    )
    with embeddings, chat:
        if not database.has_collection(COLLECTION):
            paragraphs = read_paragraphs(arguments.documents)
            if not paragraphs:
                sys.exit(f"{arguments.documents} has no text in *.txt files")
            index(database, embeddings, paragraphs)
        database.load_collection(COLLECTION)  # a reopened file does not load its collections
        notes = search(database, embeddings, arguments.question, arguments.notes)
        for number, note in enumerate(notes, 1):
            print(f"[{number}] {note}", file=sys.stderr)
        for text in answer(chat, arguments.question, notes, arguments.max_tokens):
            print(text, end="", flush=True)
    print()
    database.close()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("question")
    parser.add_argument("--documents", type=Path, required=True, help="directory of *.txt files")
    parser.add_argument("--database", type=Path, default=Path("rag.db"))
    parser.add_argument("--embeddings", default="http://localhost:8081")
    parser.add_argument("--chat", default="http://localhost:8080")
    parser.add_argument("--notes", type=int, default=3, help="number of paragraphs to answer from")
    parser.add_argument("--max-tokens", type=int, default=200)
    return parser.parse_args()


if __name__ == "__main__":
    main()
