"""Arguments of the processes that only Longshore itself starts, such as an engine or a helper."""

from __future__ import annotations

import sys

from core.process.names import full_name

EXIT_USAGE = 2
_TYPES = {"": str, "int": int, "float": float}


def internal_arguments(module: str, description: str, *forms: str) -> list[str]:
    """Return the arguments of this process, which runs `module`.

    forms: what the module accepts, such as "join PARENT:int FILE". Words in capitals stand for any
    value, of the type after the colon if there is one; other words stand for themselves. If the
    last word ends with "...", it stands for one or more values.
    description: a sentence that says what the process is and who starts it.

    With --help, prints the description and exits with code 0. If no form fits, exits with code 2.

    NOTE: argparse would take a value that begins with a dash for an option.
    """
    given = sys.argv[1:]
    asks_for_help = given[:1] in (["-h"], ["--help"])
    if not asks_for_help and any(_fits(given, form.split()) for form in forms):
        return given
    usage = [f"python -m {full_name(module)} {form}" for form in forms]
    lines = [
        "usage: " + "\n       ".join(usage),
        f"{description} This is not a command for users, who run `longshore`.",
    ]
    print(*lines, sep="\n", file=sys.stdout if asks_for_help else sys.stderr)
    sys.exit(0 if asks_for_help else EXIT_USAGE)


def _fits(values: list[str], words: list[str]) -> bool:
    if words[-1].endswith("..."):
        last = words[-1].removesuffix("...")
        words = [*words[:-1], *[last] * max(1, len(values) - len(words) + 1)]
    return len(values) == len(words) and all(map(_accepts, words, values))


def _accepts(word: str, value: str) -> bool:
    name, _, kind = word.partition(":")
    if not name.isupper():
        return value == word
    try:
        _TYPES[kind](value)
    except ValueError:
        return False
    return True
