"""Prompts to distil with: requests that people make, combined with the subjects that they ask about.

    python -m outrider.distill.topics 12000 > topics.jsonl
    outrider distill TARGET --prompts topics.jsonl --made-up 20000 ...

Rows have `id`, `task` and `turns`, as any file of prompts. The same number gives the same rows. A draft learns from the
target's answers, so breadth counts more than clever prompts.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence

PLACES = (
    "Lisbon", "Kyoto", "the Scottish Highlands", "New Zealand", "Iceland", "Marrakesh", "Buenos Aires", "Vancouver",
    "the Alps", "Istanbul", "Cape Town", "Vietnam", "the Greek islands", "Mexico City", "Prague", "Costa Rica",
    "Norway's fjords", "Sicily", "Nepal", "Berlin", "Seoul", "the Amazon", "Egypt", "Havana",
    "a small fishing village", "a desert town", "Mars",
)  # fmt: skip
SUBJECTS = (
    "photosynthesis", "black holes", "inflation", "machine learning", "the French Revolution", "vaccines",
    "plate tectonics", "blockchain", "supply and demand", "climate change", "the immune system", "quantum computing",
    "the Roman Empire", "electric cars", "sleep", "memory", "the water cycle", "evolution", "compound interest",
    "renewable energy", "the Silk Road", "antibiotics", "neural networks", "volcanoes", "opera", "jazz", "chess",
    "democracy", "the printing press", "public transport", "coral reefs", "bees", "sourdough", "coffee", "tea",
    "meditation", "urban gardening", "remote work", "minimalism", "the gig economy", "space travel", "nuclear power",
    "gene editing", "the stock market", "insurance", "mental health", "nutrition", "running a marathon",
    "home schooling", "learning a language", "photography", "carpentry", "the Renaissance", "samurai", "glaciers",
    "whales", "dinosaurs", "the periodic table", "gravity", "relativity", "encryption", "open source software",
    "video games", "social media", "advertising", "cooking pasta", "wine", "architecture", "bridges", "tides",
    "earthquakes", "wildfires", "migration of birds", "wolves", "cats", "dogs", "horses", "football", "tennis",
    "the Olympic Games", "poetry", "the novel", "painting", "film music", "theatre", "philosophy", "ethics", "logic",
    "statistics", "probability", "geometry", "calculus", "time zones", "the calendar", "maps", "taxes", "pensions",
    "budgets", "start-ups", "leadership", "negotiation", "interviews", "stress", "routines", "procrastination",
    "friendship", "parenting", "ageing", "recycling", "plastic", "water shortage", "farming", "forests", "cities",
    "suburbs", "airports", "railways", "bicycles", "smartphones", "batteries", "solar panels", "wind turbines",
    "robots", "drones", "satellites", "telescopes", "microscopes", "DNA", "proteins", "cells", "the heart",
    "the brain", "the eye", "allergies", "exercise", "yoga", "diabetes", "pain",
)  # fmt: skip
PEOPLE = (
    "a ten-year-old", "a beginner", "an expert in another field", "my grandmother", "a new colleague", "a customer",
    "a manager", "a student", "a child who asks why all the time", "an investor", "a sceptic", "somebody in a hurry",
    "a patient", "a tourist",
)  # fmt: skip
THINGS = (
    "a lost key", "two brothers", "an old lighthouse", "a robot that learns to paint", "the last train",
    "a talking cat", "a clockmaker", "a storm", "a letter that arrives too late",
    "a detective who is afraid of the dark", "a garden on the moon", "a baker and a king",
    "a ship without a captain", "a library that never closes", "a dragon who collects books", "a violin",
    "the first day at school", "an empty house", "a wrong number", "a river", "a mountain guide", "a time machine",
)  # fmt: skip
EVENTS = (
    "a late delivery", "a meeting that was moved", "a pay rise", "a job application", "a broken washing machine",
    "a birthday party", "a missed deadline", "a new product", "a conference", "a refund", "a neighbour's loud music",
    "a holiday request", "a charity run", "a change of address", "a book club", "a wedding", "a software outage",
    "a partnership", "a complaint about a hotel", "feedback on a draft", "an apology",
    "a reminder to pay an invoice",
)  # fmt: skip
LANGUAGES = (
    "Python", "Python", "Python", "JavaScript", "TypeScript", "Java", "C++", "C", "Rust", "Go",
    "SQL", "Bash", "C#", "Ruby",
)  # fmt: skip
PROBLEMS = (
    "reverse a linked list", "check whether a word is a palindrome",
    "find the longest common prefix of some strings", "merge two sorted lists", "parse a CSV file",
    "count the words of a text", "compute the n-th Fibonacci number", "sort a list of records by two keys",
    "find the shortest path in a grid", "implement a stack", "implement a queue with two stacks",
    "implement an LRU cache", "validate an email address", "convert Roman numerals to numbers",
    "find duplicates in a list", "rotate a matrix", "multiply two matrices", "search a sorted array",
    "find all permutations of a string", "solve a sudoku", "count the islands of a grid", "balance parentheses",
    "find prime numbers up to n", "compute a greatest common divisor", "read a JSON file and print one field",
    "call a web service and retry on errors", "write a simple HTTP server", "a class for a bank account",
    "a class for a shopping cart", "a binary search tree with insert and delete", "a trie",
    "depth-first search in a graph", "topological sorting", "the edit distance of two words",
    "the longest increasing subsequence", "the knapsack problem", "coin change with the fewest coins",
    "a text adventure", "tic-tac-toe", "a to-do list on the command line", "a rate limiter", "a thread pool",
    "a producer and a consumer", "a simple tokenizer", "an expression evaluator", "quicksort", "merge sort",
    "heap sort", "a priority queue", "the median of a stream", "the k-th largest element", "the two-sum problem",
    "the maximum subarray", "trapping rain water", "spiral order of a matrix", "pascal's triangle", "the power set",
    "run-length encoding", "Caesar's cipher", "a password generator", "a temperature converter", "leap years",
    "days between two dates", "flatten a nested list", "group words that are anagrams", "remove vowels from a text",
    "the most frequent word of a file", "a moving average", "linear regression without libraries", "k-means",
    "a histogram of numbers", "a bloom filter", "a decorator that measures time", "a context manager",
    "a generator of batches", "unit tests for a calculator", "employees who earn more than their manager",
    "the second highest salary", "customers without orders", "monthly revenue", "rename all files of a folder",
    "find large files", "back up a folder", "watch a log file for errors", "a bar chart of sales",
)  # fmt: skip
ASKED: dict[str, tuple[str, ...]] = {
    "chat": (
        "Write a blog post about {subject}.", "Compose an engaging travel post about {place}.",
        "Plan a three-day trip to {place}.", "Explain {subject} to {person}.",
        "What are the advantages and disadvantages of {subject}?", "Write a short story about {thing}.",
        "Write a poem about {thing}.", "Write a limerick about {subject}.", "Draft an email about {event}.",
        "Write a polite letter to a company about {event}.", "Give me ten ideas for a talk about {subject}.",
        "Compare {subject} and {other}.", "Write a dialogue between {person} and a teacher about {subject}.",
        "How would you describe {place} to somebody who has never been there?",
        "I want to learn about {subject}. Where do I begin?", "Write a speech about {subject} for {person}.",
        "Make a study plan for {subject} over four weeks.", "What should I know before I visit {place}?",
        "Act as a tour guide of {place}.", "Act as a coach and help me with {subject}.",
        "Write a product description for a box that has to do with {subject}.",
        "Write the opening of a novel about {thing} in {place}.",
        "Suggest five titles for an article about {subject}, each with one sentence.",
        "List common mistakes people make with {subject}.", "Write a persuasive essay that {subject} matters.",
        "Imagine {thing} in {place}. What happens next?", "Write an advertisement for a course on {subject}.",
        "Give {person} some advice on {subject}.", "Write a news report about {thing} in {place}.",
        "Tell me a joke about {subject} and explain it.",
        "What would {person} ask about {subject}? Answer these questions, too.",
        "Write a review of a film about {thing}.",
        "Role-play: you are {thing}, and I interview you about {subject}.",
        "Write a table of facts about {subject} and {other}.",
        "Rewrite this so that it sounds friendlier: We regret to inform you of {event}.",
        "Write a cover letter that mentions {subject}.",
    ),
    "qa": (
        "What is {subject}?", "Why is {subject} important?", "How does {subject} work?", "When did {subject} begin?",
        "Who are famous people in the history of {subject}?", "What is {place} known for?",
        "How is {subject} related to {other}?", "Is it true that {subject} has changed a lot in the last century?",
        "What are three facts about {subject}?",
    ),
    "code": (
        "Write a function in {language}: {problem}.", "Implement in {language}: {problem}. Add comments.",
        "{problem}, in {language}, please", "How do I do this in {language}: {problem}?",
        "Write {language} code for: {problem}. Then explain how long it takes.",
        "Write tests in {language} for: {problem}.", "Show me two ways in {language}: {problem}.",
        "I am new to {language}. Explain step by step: {problem}.",
        "Write a small program in {language} about {subject}.",
    ),
    "reasoning": (
        "{name} has {a} boxes with {b} apples each and gives away {c}. How many apples are left?",
        "A train goes {a} km in {b} minutes. How far does it go in {c} minutes?",
        "What is {a} times {b} plus {c}? Show the steps.",
        "{name} saves {a} a month and has {b} already. After how many months are there {d}?",
        "A shop sells {a} pens at {b} cents each, and takes {c} % off. What is to be paid?",
        "If {a} workers need {b} days, how long do {c} workers need?",
        "The sum of two numbers is {d}, their difference is {a}. Which are they?",
        "{name} is {a} years older than a sister. Together they are {d}. How old is {name}?",
        "Solve for x: {a}x + {b} = {d}", "A rectangle is {a} by {b}. What are its area and its perimeter?",
    ),
    "translation": (
        "Translate into German: I would like to know more about {subject}.",
        "Translate into French: We went to {place} last summer.",
        "Translate into Spanish: The story of {thing} is well known.",
        "How do you say this in Italian: {event} is on Monday?",
        "Translate into English: Was wissen Sie über {subject}?",
    ),
}  # fmt: skip
NAMES = (
    "Anna", "Bilal", "Chen", "Dora", "Emil", "Fatima", "Goran", "Hana", "Ivan", "Julia", "Kofi", "Lena", "Mateo",
    "Nora", "Omar",
)  # fmt: skip
FURTHER = (
    "Make it shorter.", "Can you give an example?", "Rewrite your answer as a list.", "Explain the last part again.",
    "Now for a different audience.", "What could go wrong?", "Put it in a table.", "Are you sure? Check it.",
)  # fmt: skip
SHARES = {"chat": 0.42, "qa": 0.1, "code": 0.32, "reasoning": 0.1, "translation": 0.06}
ASKS_ON = 0.25  # share of rows with a second turn


def rows(count: int) -> list[dict[str, object]]:
    chance = random.Random(0)
    pick = chance.choice
    found: dict[str, dict[str, object]] = {}
    while len(found) < count:
        task = chance.choices(list(SHARES), list(SHARES.values()))[0]
        text = pick(ASKED[task]).format(
            subject=pick(SUBJECTS), other=pick(SUBJECTS), place=pick(PLACES), person=pick(PEOPLE), thing=pick(THINGS),
            event=pick(EVENTS), language=pick(LANGUAGES), problem=pick(PROBLEMS), name=pick(NAMES),
            a=chance.randint(2, 60), b=chance.randint(2, 60), c=chance.randint(2, 60), d=chance.randint(80, 900),
        )  # fmt: skip
        text = text[0].upper() + text[1:]
        turns = [text, pick(FURTHER)] if chance.random() < ASKS_ON else [text]
        found.setdefault(text, {"id": f"topics-{len(found)}", "task": task, "turns": turns})
    return list(found.values())


def main(given: Sequence[str]) -> int:
    for row in rows(int(given[0]) if given else 12_000):
        print(json.dumps(row, ensure_ascii=False))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
