"""Prompts to measure with when the user brings none: a few of each kind, written for this purpose."""

from __future__ import annotations

from collections.abc import Iterable

CHAT = (
    "Explain to a ten-year-old why the moon seems to change its shape over a month.",
    "I have an hour before guests arrive and only eggs, rice and tomatoes. What should I cook, step by step?",
    "Write a short letter to a neighbour asking, politely, to keep the dog quiet at night.",
    "What are three good reasons to learn to play an instrument as an adult?",
)
CODE = (
    "Write a Python function that returns the longest word in a sentence, with a docstring and two examples.",
    "Write a function in Python that checks whether a list of brackets is balanced.",
)
MATHS = (
    "A train leaves at 9:40 and arrives at 13:05, with a stop of 25 minutes. How long was it moving?",
    "Three friends share 84 marbles so that each has twice as many as the one before. How many has each?",
)

_TEXTS = (
    "The harbour office opens at seven in the morning and closes at six in the evening. Boats that arrive later must "
    "wait at the outer pier until the next day. Every captain has to sign the book, pay the fee and leave a telephone "
    "number. Dogs are allowed on the pier, but not in the office.",
    "def area(shapes):\n    total = 0\n    for shape in shapes:\n        if shape.kind == 'circle':\n"
    "            total += 3.14159 * shape.radius ** 2\n        elif shape.kind == 'square':\n"
    "            total += shape.side ** 2\n    return total\n",
    "Our meeting on Tuesday is moved to Thursday at ten o'clock in room 214. Please bring the figures for March and "
    "April, and send your list of open questions to Laura by Wednesday noon. The coffee machine in room 214 is broken, "
    "so bring your own coffee. The meeting will take no more than an hour.",
    "Water the ferns twice a week and the cactus once a month. The orchid stands on the kitchen window and wants a "
    "cup of rain water every Sunday. Turn the lemon tree a little every few days so that it grows straight. If leaves "
    "turn yellow, water less.",
)
_CHANGES = (
    "Rewrite this text. Change every time of day to one hour later and leave the rest as it is:\n\n",
    "Rewrite this code with the constant 3.14159 replaced by math.pi and leave the rest as it is:\n\n",
    "Repeat this text word for word, but with room 214 replaced by room 305:\n\n",
    "Copy this text exactly, but write roses instead of ferns:\n\n",
)
COPY = "Rewrite this text word for word, correcting only spelling mistakes:\n\n"
LONG, CUT = 500, 600  # characters a text must have to be worth rewriting, and how many of them are
REWRITE = tuple(change + text for change, text in zip(_CHANGES, _TEXTS, strict=True))

KINDS: dict[str, tuple[str, ...]] = {"chat": CHAT, "code": CODE, "maths": MATHS, "rewrite": REWRITE}
BUILT_IN = tuple(text for texts in KINDS.values() for text in texts)


def rewriting(texts: Iterable[str]) -> list[str]:
    """Prompts that ask for a copy of the longer ones of these texts."""
    return [COPY + text[:CUT] for text in texts if len(text) > LONG]
