"""How deep grammars go, and that compiling a deep one ends nobody's process."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest

from outrider.errors import InvalidRequest
from outrider.verify.grammar import GrammarCompiler
from outrider.verify.grammar_depth import lark_depth, longest_path, schema_depth
from outrider.verify.grammar_source import DEEPEST
from tests.load.tiny import byte_level_backend, vocabulary


def chain(links: int) -> dict[str, Any]:
    """Each definition is a list of the next."""
    lists = {f"r{i}": {"type": "array", "items": {"$ref": f"#/$defs/r{i + 1}"}} for i in range(links)}
    return {"$defs": {**lists, f"r{links}": {"type": "string"}}, "$ref": "#/$defs/r0"}


def rules(links: int) -> str:
    return "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(links)) + f'\nr{links}: "z"'


TREE = {
    "$defs": {"t": {"properties": {"l": {"$ref": "#/$defs/t"}, "r": {"$ref": "#/$defs/t"}}}},
    "$ref": "#/$defs/t",
}


@pytest.mark.parametrize(
    ("schema", "depth"),
    [
        (True, 0),
        ({}, 1),
        ({"items": {"items": {}}}, 3),
        ({"anyOf": [{}, {"items": {}}]}, 3),
        (chain(10), 1 + 2 * 10 + 1),
        (TREE, 1 + 3),
        ({"$ref": "#"}, 1),
        ({"$ref": "#/nowhere"}, 1),
        ({"properties": {"$ref": {"type": "string"}}}, 3),
        ({"definitions": {"a/b": {"items": {}}}, "$ref": "#/definitions/a~1b"}, 3),
        ({"prefixItems": [{"items": {}}, {"$ref": "#/prefixItems/0"}]}, 3 + 2),
    ],
)
def test_depth_of_schemas(schema: Any, depth: int) -> None:
    assert schema_depth(schema) >= depth  # never less
    assert schema_depth(schema) <= depth + 3


@pytest.mark.parametrize(
    ("grammar", "depth"),
    [
        ('start: "a"', 1),
        ('start: "b: c" // d: e\n', 1),
        ("start: a | start\na: B\nB: /x/", 3),
        ('?start.2: ("a" ("b" c))\nc[capture]: /d: e/', 1 + 2 + 1),
        (rules(10), 12),
        ("nothing", 0),
    ],
)
def test_depth_of_lark(grammar: str, depth: int) -> None:
    assert lark_depth(grammar) == depth


def test_no_path_without_repetition_is_longer() -> None:
    """Whatever order a compiler goes in."""
    for seed in range(200):
        chance = random.Random(seed)
        names = [str(i) for i in range(7)]
        own = {name: chance.randrange(1, 4) for name in names}
        uses = {name: chance.sample(names, chance.randrange(3)) for name in names}

        def walk(name: str, seen: frozenset[str]) -> int:
            below = [walk(use, seen | {name}) for use in uses[name] if use not in seen | {name}]  # noqa: B023
            return own[name] + max(below, default=0)  # noqa: B023

        assert walk("0", frozenset()) <= longest_path("0", own, uses) <= sum(own.values())


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(byte_level_backend().to_str(), len(vocabulary()), [0])


@pytest.mark.parametrize("links", [1_000, 10_000, 30_000])
@pytest.mark.parametrize("kind", ["json_schema", "lark"])
def test_chains_of_references_are_refused(compiler: GrammarCompiler, kind: str, links: int) -> None:
    grammar = {kind: chain(links) if kind == "json_schema" else rules(links)}
    with pytest.raises(InvalidRequest, match=r"levels deep|definitions") as refused:
        compiler.compile(grammar)
    assert refused.value.param == "grammar"


def test_chains_within_a_grammar_are_refused(compiler: GrammarCompiler) -> None:
    with pytest.raises(InvalidRequest, match="levels deep"):
        compiler.compile({"lark": "start: %json " + str(chain(1000)).replace("'", '"')})


def test_what_is_allowed_compiles_whatever_the_callers_stack(compiler: GrammarCompiler) -> None:
    done: list[Any] = []
    usual = threading.stack_size(512 << 10)
    try:
        caller = threading.Thread(
            target=lambda: done.extend(
                compiler.compile(one).mask(())
                for one in ({"json_schema": chain(DEEPEST // 2 - 2)}, {"lark": rules(DEEPEST - 2)})
            )
        )
        caller.start()
    finally:
        threading.stack_size(usual)
    caller.join()
    assert len(done) == 2
