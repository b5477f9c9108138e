"""The helper process: a hostile grammar or conversation ends only the helper, and a grammar that
the helper accepts is safe in the engine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import gevent
import pytest

from container.apis.generation.conversation import Conversation
from container.apis.generation.media import CHAT_MEDIA, Media
from container.apis.generation.prompting import Prompting
from container.apis.generation.rendering import ISOLATED_BYTES, Conversations
from container.isolation import process
from container.isolation.child import Child
from container.isolation.helper import MAX_KEPT, Helper
from container.isolation.jobs import Compile, Done, Reply, Setup
from container.isolation.process import HELPER_STACK_BYTES
from core.configuration.limits import GRAMMAR
from core.errors import LongshoreError, RequestError
from core.structured_outputs import StructuredOutputsParams
from core.text.chat_template import ChatTemplate
from core.text.tokenizer import Tokenizer
from tests.container.conftest import EOS
from tests.container.fake_engine import FACTS
from tests.container.processes import descendants


@pytest.fixture
def own_helper(tokenizer: Tokenizer) -> Iterator[Helper]:
    """A helper for one test only, since a hostile job may end its process."""
    helper = Helper(tokenizer.model_dir, None)
    yield helper
    helper.close()


def grammar(helper: Helper, **form: Any) -> str:
    text = helper.grammar(StructuredOutputsParams(**form), (EOS,)).grammar
    assert text is not None
    return text


def rules(depth: int) -> dict[str, Any]:
    """Return a grammar whose rules refer to each other in a chain."""
    chain = [f'r{n}: "a" r{n + 1}' for n in range(depth)]
    return {"grammar": "\n".join(["start: r0", *chain, f'r{depth}: "a"'])}


def terminals(depth: int) -> dict[str, Any]:
    chain = [f'T{n}: "a" T{n + 1}' for n in range(depth)]
    return {"grammar": "\n".join(["start: T0", *chain, f'T{depth}: "a"'])}


def references(depth: int) -> dict[str, Any]:
    """Return a schema of objects that are nested in each other by reference."""
    schemas: dict[str, Any] = {
        f"d{n}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{n + 1}"}}}
        for n in range(depth)
    }
    return {"json": json.dumps({"$ref": "#/$defs/d0", "$defs": {**schemas, f"d{depth}": {}}})}


def alternatives(depth: int) -> dict[str, Any]:
    schemas: dict[str, Any] = {
        f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}, {"type": "null"}]} for n in range(depth)
    }
    return {"json": json.dumps({"$ref": "#/$defs/d0", "$defs": {**schemas, f"d{depth}": {}}})}


def optional_properties(count: int) -> dict[str, Any]:
    return {"json": {"type": "object", "properties": {f"{n:x}": {} for n in range(count)}}}


HOSTILE = [
    rules(5000),
    terminals(5000),
    references(1500),
    alternatives(1500),
    optional_properties(9000),
    {"grammar": "start: T\nT: " + " & ".join(f"/(.*{n:x}.*)/" for n in range(5000))},
    {"grammar": "start: " + " ".join(f'("{n:x}" | "b"){{{n},{n + 999}}}' for n in range(4500))},
]
BOUNDED = [
    ({"grammar": "x" * (GRAMMAR.maximum + 1)}, "has 131,073 characters"),
    ({"regex": "|".join(f"x{n:06d}" for n in range(120_000))}, "is longer than"),
    ({"choice": tuple(f"{n:x}" for n in range(200_000))}, "is longer than"),
    ({"json": '{"items":' * 900 + "{}" + "}" * 900}, "recursion limit exceeded"),
    ({"grammar": "root ::= " + "(" * 20_000}, "maximum recursion depth"),
    ({"grammar": "\n" * (GRAMMAR.maximum - 1)}, "Empty grammar"),
]


def test_hostile_grammars_end_only_the_helper(own_helper: Helper) -> None:
    """Each grammar crashes llguidance or runs for seconds. The next one gets a new process."""
    for number, form in enumerate(HOSTILE):
        with pytest.raises(RequestError, match=r"too complex|takes too long"):
            grammar(own_helper, **form)
        assert grammar(own_helper, regex=f"a{{{number}}}") == f"start: /a{{{number}}}/"


@pytest.mark.parametrize(("form", "why"), BOUNDED)
def test_grammars_that_are_refused_without_harm(
    helper: Helper, form: dict[str, Any], why: str
) -> None:
    with pytest.raises(RequestError, match=why):
        grammar(helper, **form)


def test_a_grammar_that_fails_at_its_first_mask_is_refused(
    monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer
) -> None:
    class Matcher:
        error = ""

        def deep_copy(self) -> Matcher:
            return Matcher()

        def compute_bitmask(self) -> None:
            self.error = "lexer error:\ntoo many expressions"

        def is_error(self) -> bool:
            return bool(self.error)

        def get_error(self) -> str:
            return self.error

    monkeypatch.setattr(process, "limit_memory", lambda num_bytes: None)
    monkeypatch.setattr(process, "compile_grammar", lambda *_, **named: Matcher())
    jobs = process.Jobs(Setup(str(tokenizer.model_dir), None))
    with pytest.raises(RequestError, match=r"^structured_outputs: lexer error: too many"):
        jobs.perform(Compile(StructuredOutputsParams(regex="a"), (EOS,)))


COMPILE = """
import sys
from pathlib import Path
from core.text.grammar_matcher import call_on_stack, compile_grammar, read_grammar_tokenizer
tokenizer = read_grammar_tokenizer(Path(sys.argv[1]), [256])
num_bytes = int(sys.argv[2])
def use(text):
    compile_grammar(tokenizer, text, stack_bytes=num_bytes).deep_copy().compute_bitmask()
call_on_stack(num_bytes, lambda: use(sys.stdin.read()))
"""


@pytest.mark.parametrize("make", [rules, references, alternatives])
def test_the_deepest_grammar_that_is_accepted_is_safe(
    own_helper: Helper, tokenizer: Tokenizer, make: Callable[[int], dict[str, Any]]
) -> None:
    """The deepest grammar is found by bisection. It compiles on a quarter of the engine's stack."""

    def accepts(depth: int) -> bool:
        try:
            return bool(grammar(own_helper, **make(depth)))
        except RequestError:
            return False

    low, high = 64, 1024
    assert accepts(low)
    assert not accepts(high)
    while high - low > low // 4:
        middle = (low + high) // 2
        low, high = (middle, high) if accepts(middle) else (low, middle)
    command = [sys.executable, "-c", COMPILE, str(tokenizer.model_dir), str(2 * HELPER_STACK_BYTES)]
    deepest = grammar(own_helper, **make(low))
    subprocess.run(command, input=deepest, text=True, check=True)


def test_the_event_loop_goes_on_while_the_helper_works(own_helper: Helper) -> None:
    grammar(own_helper, regex="a")
    ticks = 0

    def tick() -> None:
        nonlocal ticks
        while True:
            gevent.sleep(0.01)
            ticks += 1

    ticking = gevent.spawn(tick)
    with pytest.raises(RequestError, match=r"too complex|takes too long"):
        grammar(own_helper, **HOSTILE[-1])
    ticking.kill()
    assert ticks > 10


def test_a_request_that_ends_while_it_waits_leaves_the_helper_usable(own_helper: Helper) -> None:
    grammar(own_helper, regex="a")
    waiting = gevent.spawn(grammar, own_helper, **HOSTILE[-1])
    gevent.sleep(0.05)
    waiting.kill()
    assert grammar(own_helper, regex="ab") == "start: /ab/"


def test_grammars_are_kept(own_helper: Helper) -> None:
    """A grammar that the helper has cached is returned without a process."""
    for number in range(MAX_KEPT + 1):
        grammar(own_helper, regex=f"a{{{number}}}")
    own_helper.close()
    before = descendants(os.getpid())
    assert grammar(own_helper, regex="a{1}") == "start: /a{1}/"
    assert descendants(os.getpid()) == before


def conversation(text: str) -> Conversation:
    return Conversation(
        messages=({"role": "user", "content": text},),
        tools=(),
        add_generation_prompt=True,
        continue_final_message=False,
        add_special_tokens=False,
        variables={},
        media=Media("messages", CHAT_MEDIA),
    )


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}", "long"),
        ("{{ messages[0].content * 9999 }}", "rejects them: MemoryError"),
        ("{{ raise_exception('no robots') }}", "rejects them: no robots"),
    ],
)
def test_hostile_conversations_are_refused(tokenizer: Tokenizer, template: str, why: str) -> None:
    begin = "{{ messages[0].content[:9] }}{% if messages[0].content[1000:] %}"
    hostile = ChatTemplate(f"{begin}{template}{{% endif %}}")
    helper = Helper(tokenizer.model_dir, hostile.source)
    prompting = Prompting(tokenizer, lambda: 10**6)
    conversations = Conversations(prompting, hostile, helper, lambda: FACTS)
    with pytest.raises(RequestError, match=why) as caught:
        conversations.encode(conversation("x" * ISOLATED_BYTES), size=ISOLATED_BYTES + 1)
    helper.close()
    assert caught.value.field == "messages"


def test_a_job_that_needs_too_much_memory_does_not_fail_the_next() -> None:
    setup = Setup("", None)
    child = Child[Done]("tests.container.launch.hungry_helper", setup, Reply)
    with pytest.raises(RequestError, match="takes too much memory to prepare"):
        child.perform(Setup("hungry", None), "messages")
    assert child.perform(Setup("frugal", None), "messages") == Done("done")
    child.close()


def test_a_library_that_exits_fails_only_its_job() -> None:
    """Nor does its exit code, which the process uses itself, blame the request."""
    child = Child[Done]("tests.container.launch.hungry_helper", Setup("", None), Reply)
    with pytest.raises(LongshoreError, match="exit code 1"):
        child.perform(Setup("exit", None), "messages")
    assert child.perform(Setup("frugal", None), "messages") == Done("done")
    child.close()


def test_short_and_long_conversations_are_rendered_alike(
    tokenizer: Tokenizer, helper: Helper, template: ChatTemplate
) -> None:
    """By its size, a conversation is rendered at once, in a thread, or in the helper process."""
    prompting = Prompting(tokenizer, lambda: 10**6)
    conversations = Conversations(prompting, template, helper, lambda: FACTS)
    said = conversation("é" * 300)
    alike = [conversations.encode(said, size=size) for size in (1, 10_000, ISOLATED_BYTES + 1)]
    assert alike[0] == alike[1] == alike[2]
    assert tokenizer.decode(alike[0].token_ids) == "u:" + "é" * 300 + ";a:"
