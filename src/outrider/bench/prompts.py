"""Workloads to measure with when the user brings no prompts, all written for this purpose.

They differ in what a drafter can know beforehand: rewriting, extraction and summaries copy from the prompt, code
repeats itself, chat and stories hardly do; short answers end before anything was learned, long ones wander.
"""

from __future__ import annotations

from collections.abc import Iterable

CHAT = (
    "Explain to a ten-year-old why the moon seems to change its shape over a month.",
    "I have an hour before guests arrive and only eggs, rice and tomatoes. What should I cook, step by step?",
    "Write a short letter to a neighbour asking, politely, to keep the dog quiet at night.",
    "What are three good reasons to learn to play an instrument as an adult?",
    "My bicycle makes a clicking noise on every turn of the pedals. What could it be, and how do I find out?",
    "We are moving to a smaller flat. How do I decide which books to keep?",
    "How does a lock on a canal lift a boat without an engine?",
    "I sleep badly when I travel. What can I try that needs no medicine?",
)
CODE = (
    "Write a Python function that returns the longest word in a sentence, with a docstring and two examples.",
    "Write a function in Python that checks whether a list of brackets is balanced.",
    "Write a Python class for a bank account with deposit, withdraw and balance, and raise an error on overdraft.",
    "Write a JavaScript function that groups a list of orders by customer and adds up their amounts.",
    "Write a SQL query that lists the five customers with the most orders in 2024, with tables customers and orders.",
    "Write a Python script that reads a CSV file and prints the mean of every column of numbers.",
    "Write unit tests in Python, with pytest, for a function slugify(text) that makes text fit for a web address.",
    "Write a shell script that removes files older than thirty days from a folder and says how many there were.",
)
MATHS = (
    "A train leaves at 9:40 and arrives at 13:05, with a stop of 25 minutes. How long was it moving?",
    "Three friends share 84 marbles so that each has twice as many as the one before. How many has each?",
    "A tank holds 240 litres. One pipe fills it in 6 hours, another in 4. How long do both take together?",
    "A coat costs 120 after a discount of a quarter. What did it cost before?",
    "Anna is 4 years older than Ben. In 6 years their ages add up to 40. How old is each now?",
    "A rectangle is 3 metres longer than wide and has an area of 70 square metres. How long are its sides?",
    "Of 60 pupils 35 play football, 28 play chess and 12 play neither. How many play both?",
    "A shop sells pens at 3 for 4 euros. What do 21 pens cost, and how many can you buy for 36 euros?",
)
CREATIVE = (
    "Write the beginning of a story about a clockmaker who repairs a clock that runs backwards.",
    "Write a poem about the first snow in a city that has never seen any.",
    "Invent a planet on which it is always evening, and describe a market there.",
    "Write a conversation between an umbrella and a pair of sunglasses in a lost property office.",
    "Write a fairy tale in which the dragon is afraid of the knight.",
    "Describe the smell of a library to someone who has never smelled anything.",
    "Write a monologue of the last lighthouse keeper on the day the light becomes automatic.",
    "Tell the story of a lost letter that arrives after forty years.",
)
SHORT = (
    "What is the capital of Portugal? Answer with one word.",
    "Is 91 a prime number? Answer yes or no.",
    "Which is heavier, a litre of water or a litre of oil? Answer in a few words.",
    "Name one mammal that lays eggs.",
    "What is the opposite of 'generous'? One word.",
    "How many minutes are there in a day? Just the number.",
    "Is this review positive or negative? 'I waited an hour and the soup was cold.' One word.",
    "Translate 'good morning' into French. Only the translation.",
)
LONG = (
    "Explain in detail how bread is made, from the grain on the field to the loaf on the table.",
    "Write a guide for someone who wants to start a vegetable garden: soil, seeds, watering, pests and harvest.",
    "Describe a day in the life of a postman in a mountain village, from morning to night, in several paragraphs.",
    "Explain how a computer starts, from the power button to the desktop, for readers who know little of computers.",
    "Write a plan for a week in a city by the sea for a family with two children, day by day.",
    "Compare trains, buses, bicycles and cars for getting to work: cost, time, comfort and environment.",
    "Tell the history of writing, from marks in clay to text on screens, in several paragraphs.",
    "Explain how to prepare for a job interview, with examples of questions and of good answers.",
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
    "The old mill at Brennford was built in 1784 and milled rye for five villages. In 1931 its wheel was replaced by "
    "an electric motor, and in 1962 it closed. For thirty years it stood empty. Since 1994 it has been a museum, run "
    "by twelve volunteers, and on the first Sunday of every month the wheel turns again and flour is sold at the door.",
    "Order 5512 of Mrs. Helga Brandt, Mill Lane 8, arrived on 3 May with two of three parcels. The third, a reading "
    "lamp for 49.90 euros, is missing. She was at home all day, and the driver left no card. She asks for a new lamp "
    "before her birthday on 20 May or for her money back, and can be reached at 555-0178 after five o'clock.",
    "The night train to Varna leaves platform 6 at 21:45 and arrives at 7:30. A seat costs 24 euros, a bed in a "
    "compartment for four costs 41, and a bed in one for two costs 68. Breakfast is included with a bed. Bicycles "
    "travel in the last carriage and need a ticket of their own for 6 euros. Dogs travel free if they fit under "
    "a seat.",
    "To change the filter, switch the machine off and wait until the lamp goes out. Open the cover by pressing both "
    "catches. Pull the old filter out by its tab and put the new one in with the arrow pointing up. Close the cover "
    "until it clicks. Switch the machine on and hold the button for three seconds; the lamp blinks twice.",
)
_CHANGES = (
    "Rewrite this text. Change every time of day to one hour later and leave the rest as it is:\n\n",
    "Rewrite this code with the constant 3.14159 replaced by math.pi and leave the rest as it is:\n\n",
    "Repeat this text word for word, but with room 214 replaced by room 305:\n\n",
    "Copy this text exactly, but write roses instead of ferns:\n\n",
    "Repeat this text word for word, but with the name Brennford replaced by Ashford:\n\n",
    "Copy this text exactly, but write Mrs. Ida Brandt instead of Mrs. Helga Brandt:\n\n",
    "Rewrite this text with platform 9 instead of platform 6 and leave the rest as it is:\n\n",
    "Copy this text exactly, but write coffee machine instead of machine:\n\n",
)
_FIELDS = (
    ("opens, closes, late_boats_wait_at, dogs_allowed", 0),
    ("function, parameter, kinds, returns", 1),
    ("old_day, new_day, time, room, send_to, deadline", 2),
    ("plants, a list of objects with name and how_often", 3),
    ("name, built, closed, museum_since, volunteers", 4),
    ("order, customer, address, missing_item, price, phone", 5),
    ("destination, platform, departure, arrival, prices, a list of objects with kind and euros", 6),
    ("task, steps, a list of texts in order", 7),
)
_LENGTHS = (
    "in one sentence",
    "in two sentences",
    "in three short points",
    "in a sentence for someone in a hurry",
)
COPY = "Rewrite this text word for word, correcting only spelling mistakes:\n\n"
WORTH, CUT = 500, 600  # characters a text must have to be worth rewriting, and how many of them are
REWRITE = tuple(change + text for change, text in zip(_CHANGES, _TEXTS, strict=True))
JSON = tuple(
    f"Extract from this text a JSON object with the fields {fields}. Answer with the JSON alone.\n\n{_TEXTS[at]}"
    for fields, at in _FIELDS
)
SUMMARY = tuple(
    f"Summarise these two texts {_LENGTHS[at % 4]} each.\n\n1. {one}\n\n2. {other}"
    for at, (one, other) in enumerate(zip(_TEXTS, (*_TEXTS[1:], _TEXTS[0]), strict=True))
)

KINDS: dict[str, tuple[str, ...]] = {
    "chat": CHAT, "code": CODE, "json": JSON, "rewrite": REWRITE, "summary": SUMMARY, "creative": CREATIVE,
    "short": SHORT, "long": LONG, "maths": MATHS,
}  # fmt: skip
LENGTHS = {"short": 0.25, "long": 3.0}  # of answers, as multiples of --max-tokens
BUILT_IN = tuple(text for texts in KINDS.values() for text in texts)


def rewriting(texts: Iterable[str]) -> list[str]:
    """Prompts that ask for a copy of the longer ones of these texts."""
    return [COPY + text[:CUT] for text in texts if len(text) > WORTH]
