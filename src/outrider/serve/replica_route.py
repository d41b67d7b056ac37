"""Which replica a request goes to, and the metrics of all of them as one text. No Ray."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from outrider.serve.keys import Key

PREFIX_CHARACTERS = 1024  # of a text; a conversation counts up to its first question

T = TypeVar("T")


def ranking(prefix: str, attempt: int, replicas: Mapping[str, T]) -> list[T]:
    """The replicas by name, in the order in which a request of this prefix prefers them. Each further attempt starts
    with the next one.
    """
    names = sorted(replicas, key=lambda name: hashlib.sha256(f"{prefix} {name}".encode()).digest())
    start = attempt % max(1, len(names))
    return [replicas[name] for name in (*names[start:], *names[:start])]


def prefix_of(key: Key, asked: Mapping[str, Any]) -> str:
    """What tells conversations apart, as their cached prompts are: the key, the salt and how the prompt begins. A
    conversation grows at its end, so it counts up to its first question.
    """
    begins: list[Any] = [asked.get("system"), asked.get("instructions"), asked.get("tools")]
    messages = asked.get("messages") or asked.get("input") or asked.get("prompt") or ""
    if isinstance(messages, list) and messages and isinstance(messages[0], dict):
        users = [i for i, one in enumerate(messages) if isinstance(one, dict) and one.get("role") == "user"]
        begins += messages[: users[0] + 1 if users else 1]
    else:
        begins.append(messages[:PREFIX_CHARACTERS] if isinstance(messages, str) else messages)
    text = json.dumps([key.owner, asked.get("cache_salt"), asked.get("model"), begins], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def merged_metrics(replicas: Sequence[tuple[str, str]]) -> str:
    """Metrics of all replicas, each sample with the label of its own."""
    families: dict[str, list[str]] = {}
    for replica, text in replicas:
        samples: list[str] = []
        for line in text.splitlines():
            if line.startswith("# HELP"):
                samples = families.setdefault(line, [])
            elif line.startswith("# TYPE"):
                if not samples:
                    samples.append(line)
            else:
                name, _, labelled = line.partition("{")
                samples.append(f'{name}{{replica="{replica}",{labelled}')
    return "".join(f"{line}\n" for head, samples in families.items() for line in (head, *samples))
