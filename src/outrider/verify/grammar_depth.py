"""The depth of a grammar with every reference followed: an upper bound on the stack that compiling it needs.

References make a graph of definitions. The compiler visits a definition once along any path, so the depth is at most
that of the longest path through the graph, in which definitions that refer to each other in a circle count together.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

MOST_DEFINITIONS = 10_000  # or rules; each costs some ten microseconds here and memory later
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")


def schema_depth(schema: Any) -> int:
    """Of a JSON schema: objects within objects, `#/...` followed."""
    own: dict[str, int] = {}
    uses: dict[str, list[str]] = {}
    waiting = ["#"]
    while waiting:
        name = waiting.pop()
        if name not in own:
            own[name], uses[name] = _body(_at(schema, name), whole=name == "#")
            _check_count(len(own))
            waiting.extend(uses[name])
    return longest_path("#", own, uses)


def _body(schema: Any, whole: bool) -> tuple[int, list[str]]:
    """How deep the objects of a definition nest, and which definitions it refers to. Those of the whole schema's own
    `$defs` count where they are used."""
    depth = 0
    refers: list[str] = []
    level = [schema]
    while level:
        depth += any(isinstance(item, dict) for item in level)
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                refers.extend(
                    v for k in _REFERENCES if isinstance(v := item.get(k), str) and v.startswith("#")
                )
                skipped = ("$defs", "definitions") if whole and item is schema else ()
                below.extend(value for key, value in item.items() if key not in skipped)
            elif isinstance(item, list):
                below.extend(item)
        level = below
    return depth, refers


def _at(schema: Any, pointer: str) -> Any:
    """What a reference points to; nothing where it leads nowhere, which the compiler will say."""
    for part in pointer.removeprefix("#").split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(schema, list) and key.isdecimal() and int(key) < len(schema):
            schema = schema[int(key)]
        else:
            schema = schema.get(key) if isinstance(schema, Mapping) else None
    return schema


_QUIET = re.compile(r'"(?:[^"\\\n]|\\.)*"|/(?:[^/\\\n]|\\.)+/|//[^\n]*|#[^\n]*')
_RULE = re.compile(r"^[ \t]*[?!]?([A-Za-z_][\w-]*)(?:\.-?\d+)?(?:\[[^\]]*\])?[ \t]*:", re.M)
_NAME = re.compile(r"[A-Za-z_][\w-]*")


def lark_depth(grammar: str) -> int:
    """Of a Lark grammar: rules and terminals within each other, and brackets within them."""
    text = _QUIET.sub('""', grammar)
    heads = list(_RULE.finditer(text))
    _check_count(len(heads))
    own: dict[str, int] = {}
    uses: dict[str, list[str]] = {}
    ends = [head.start() for head in heads[1:]] + [len(text)]
    for head, end in zip(heads, ends, strict=False):
        body = text[head.end() : end]
        name = head[1]
        own[name] = max(own.get(name, 0), 1 + _brackets(body))
        uses.setdefault(name, []).extend(_NAME.findall(body))
    return longest_path("start", own, uses) if "start" in own else 0


def _check_count(definitions: int) -> None:
    if definitions > MOST_DEFINITIONS:
        raise ValueError(f"it has more than {MOST_DEFINITIONS} definitions")


def _brackets(body: str) -> int:
    deepest = depth = 0
    for char in body:
        depth += (char in "([{") - (char in ")]}")
        deepest = max(deepest, depth)
    return deepest


def longest_path(root: str, own: Mapping[str, int], uses: Mapping[str, Iterable[str]]) -> int:
    """The heaviest path from `root`, each circle taken as one node as heavy as all its members."""
    depth: dict[str, int] = {}
    for members in _circles(root, own, uses):  # those that are used come first
        inside = set(members)
        beyond = (depth[use] for name in members for use in uses[name] if use in depth and use not in inside)
        total = sum(own[name] for name in members) + max(beyond, default=0)
        depth.update(dict.fromkeys(members, total))
    return depth[root]


def _circles(root: str, own: Mapping[str, int], uses: Mapping[str, Iterable[str]]) -> Iterator[list[str]]:
    """Tarjan's strongly connected components of what `root` reaches, without recursion."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    on_stack: set[str] = set()
    path: list[tuple[str, Iterator[str]]] = []

    def enter(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        on_stack.add(name)
        path.append((name, iter([use for use in uses[name] if use in own])))

    enter(root)
    while path:
        name, rest = path[-1]
        following = next(rest, None)
        if following is None:
            path.pop()
            if path:
                low[path[-1][0]] = min(low[path[-1][0]], low[name])
            if low[name] == index[name]:
                members = [stack.pop()]
                while members[-1] != name:
                    members.append(stack.pop())
                on_stack.difference_update(members)
                yield members
        elif following not in index:
            enter(following)
        elif following in on_stack:
            low[name] = min(low[name], index[following])
