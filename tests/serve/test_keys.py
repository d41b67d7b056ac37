"""Keys: who is let in, what a key file may say, and how much each key may use."""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.errors import InvalidRequest
from outrider.serve import keys as module
from outrider.serve.keys import ANYONE, Key, KeyLimits, Keyring, Limiter, digest_of, parse_keys, read_key_file
from outrider.serve.log import TextLines
from outrider.serve.settings import ServeSettings

SECRET, OTHER = "or-0123456789abcdef", "or-fedcba9876543210"
HASH = f"sha256:{hashlib.sha256(SECRET.encode()).hexdigest()}"


def ring(*secrets: str) -> Keyring:
    return Keyring.of(ServeSettings(api_keys=secrets))


# ------------------------------------------------------------------------------------------------ who is it


def test_without_keys_everyone_is_let_in_and_shares_a_cache() -> None:
    assert ring().open
    for header in (None, "", "Bearer anything", "Basic x"):
        assert ring().check(header) is ANYONE
    assert ANYONE.owner == "" and ANYONE.limits == KeyLimits()


def test_each_key_is_known_by_its_own_name() -> None:
    known = ring(SECRET, OTHER)
    names = [key.name for key in (known.check(f"Bearer {SECRET}"), known.check(f"Bearer {OTHER}")) if key]
    assert names == ["key-1", "key-2"] and len(known) == 2 and not known.open


@pytest.mark.parametrize("form", ["Bearer {}", "bearer {}", "BEARER  {} "])
def test_forms_of_the_header(form: str) -> None:
    assert ring(SECRET).check(form.format(SECRET))


UNKNOWN = ["", f"{SECRET}x", SECRET[:-1], SECRET.upper(), f"{SECRET} {SECRET}", HASH, "\ud800\xff", "\x00"]


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", SECRET, f"Basic {SECRET}", *(f"Bearer {text}" for text in UNKNOWN)]
)
def test_headers_that_are_nobodys(header: str | None) -> None:
    assert ring(SECRET, OTHER).check(header) is None


def test_every_key_is_compared_wherever_the_match_is(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append(a)
        return hmac.compare_digest(a, b)

    monkeypatch.setattr(module, "hmac", SimpleNamespace(compare_digest=compare))
    secrets = [f"{SECRET}-{i}" for i in range(4)]
    known = ring(*secrets)
    for header in (f"Bearer {secrets[0]}", f"Bearer {secrets[3]}", "Bearer none"):
        compared.clear()
        known.check(header)
        assert len(compared) == 4


def test_owners_differ_by_key_and_give_nothing_away() -> None:
    key, other = Key("a", digest_of(SECRET)), Key("a", digest_of(OTHER))
    assert key.owner != other.owner and key.owner == Key("b", digest_of(SECRET)).owner
    assert SECRET not in key.owner and key.owner not in HASH


def test_only_hashes_are_kept() -> None:
    known = ring(SECRET)
    assert all(SECRET.encode() not in key.digest and SECRET not in repr(key) for key in known._keys)


@pytest.mark.parametrize(
    ("secret", "says"),
    [
        ("short", "has 5 characters"),
        ("x" * 15, "at least 16"),
        ("sixteen letters ü", "ASCII"),
        ("a b" * 8, "ASCII"),
    ],
)
def test_keys_that_are_no_good(secret: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as told:
        ring(secret)
    assert secret not in str(told.value) and told.value.param == "api_keys"


def test_the_same_key_twice() -> None:
    with pytest.raises(InvalidRequest, match="'key-1' and 'key-2' are the same key"):
        ring(SECRET, SECRET)


# ------------------------------------------------------------------------------------------------ key file


def test_a_key_file(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(f'[[key]]\nname = "team-a"\nhash = "{HASH}"\nrequests_per_minute = 60\nmax_running = 8\n')
    assert read_key_file(file) == [Key("team-a", digest_of(SECRET), KeyLimits(60, 0, 8))]
    known = Keyring.of(ServeSettings(key_file=str(file), api_keys=(OTHER,)))
    found = [known.check(f"Bearer {secret}") for secret in (SECRET, OTHER)]
    assert [key.name for key in found if key] == ["team-a", "key-1"]


def entry(*lines: str) -> str:
    return "\n".join(["[[key]]", *lines])


GOOD = entry('name = "a"', f'hash = "{HASH}"')


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[[key]\n", "f is not TOML: "),
        ("[[keys]]\n", "f: unknown entry 'keys'; did you mean 'key'?"),
        ("[key]\nname = 'a'", "tables headed [[key]]"),
        ("key = [1]", "tables headed [[key]]"),
        (entry(f'hash = "{HASH}"'), "f, key 1 needs a name"),
        (entry('name = " "', f'hash = "{HASH}"'), "f, key 1 needs a name"),
        (GOOD + "\n[[key]]\nname = 'b'", "f, key 2 needs a hash"),
        (entry('name = "a"', f'hash = "{SECRET}"'), "needs a hash"),
        (entry('name = "a"', 'hash = "sha256:abc"'), "needs a hash"),
        (
            f"{GOOD}\nrequest_per_minute = 5",
            "unknown entry 'request_per_minute'; did you mean 'requests_per_minute'",
        ),
        (f"{GOOD}\nmax_running = -1", "f, key 1: max_running must be a whole number"),
        (f"{GOOD}\nmax_running = 1.5", "max_running must be a whole number"),
        (f"{GOOD}\nmax_running = true", "max_running must be a whole number"),
        (f"{GOOD}\n{GOOD}", "two keys are named 'a'"),
        ("\n".join([GOOD, entry("name = 'b'", f"hash = '{HASH}'")]), "'a' and 'b' are the same key"),
    ],
)
def test_bad_key_files(text: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(says)) as told:
        parse_keys(text, "f")
    assert told.value.param == "key_file" and SECRET not in str(told.value)


ODD_NAMES = {
    "a line": "a\nb",
    "a control character": "a\x1b[31m",
    "a delete": "a\x7f",
    "writing direction": "a\u202etxt",
    "no width": "a\u200bb",
    "a separator": "a\u2028b",
    "a private character": "\ue000",
    "too long": "x" * 101,
    "spaces around it": " a",
    "spelt in pieces": "e\u0301",
}


@pytest.mark.parametrize("name", ODD_NAMES.values(), ids=ODD_NAMES)
def test_names_that_cannot_be_told_apart_or_shown(name: str) -> None:
    with pytest.raises(InvalidRequest, match="f, key 1 needs a name of 1 to 100 printable") as refusal:
        parse_keys(entry(f"name = {json.dumps(name)}", f'hash = "{HASH}"'), "f")
    assert str(refusal.value).isprintable() and len(str(refusal.value)) < 200


FINE_NAMES = [
    "../../etc/passwd",
    "__proto__",
    'a"b\\',
    "a'b",
    '{key="x"} 1',
    "é 中",
    "=",
    ".",
    "%41",
    "a" * 100,
]


@pytest.mark.parametrize("name", FINE_NAMES)
def test_names_that_only_look_odd(name: str) -> None:
    text = entry(f"name = {json.dumps(name)}", f'hash = "{HASH}"')
    assert [key.name for key in parse_keys(text, "f")] == [name]
    shown = TextLines().format(logging.makeLogRecord({"msg": "request", "facts": {"key": name, "id": "x"}}))
    assert shown.count("\n") == 0 and shown.endswith(" id=x")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("key = " + "[" * 100_000, "f is not TOML: it is nested too deeply"),
        (f"{GOOD}\nmax_running = " + "9" * 5000, "f is not TOML: "),
        (f"{GOOD}\ntokens_per_minute = " + "9" * 400, "tokens_per_minute must be a whole number up to"),
        (entry('name = ["a"]', f'hash = "{HASH}"'), "f, key 1 needs a name"),
        (entry('name = "\\ud800"', f'hash = "{HASH}"'), "f is not TOML: "),
    ],
)
def test_hostile_key_files(text: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(says)) as refusal:
        parse_keys(text, "f")
    assert len(str(refusal.value)) < 300


def test_a_file_without_keys_does_not_open_the_server(tmp_path: Path) -> None:
    (tmp_path / "keys.toml").write_text("# all revoked\n")
    with pytest.raises(InvalidRequest, match="holds no keys; add one"):
        Keyring.of(ServeSettings(key_file=str(tmp_path / "keys.toml")))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"none\.toml cannot be read: No such file"):
        Keyring.of(ServeSettings(key_file=str(tmp_path / "none.toml")))
    (tmp_path / "keys.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidRequest, match="is not UTF-8 text"):
        read_key_file(tmp_path / "keys.toml")


# ------------------------------------------------------------------------------------------------- limiter


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def limited(requests: int = 0, tokens: int = 0, running: int = 0, secret: str = SECRET) -> Key:
    return Key("a", digest_of(secret), KeyLimits(requests, tokens, running))


def test_without_limits_nothing_is_counted() -> None:
    limiter = Limiter(Clock())
    assert all(limiter.admit(key, 10**9) is None for key in [ANYONE, limited()] * 100)
    assert len(limiter) == 0
    limiter.done(ANYONE)


def test_requests_a_minute() -> None:
    clock = Clock()
    limiter, key = Limiter(clock), limited(requests=6)
    assert [limiter.count(key) for _ in range(6)] == [None] * 6
    refusal = limiter.count(key)
    assert refusal and refusal.seconds == pytest.approx(10) and "6 requests a minute" in refusal.reason
    clock.now += refusal.seconds
    assert limiter.count(key) is None and limiter.count(key) is not None
    clock.now += 3600
    assert [limiter.count(key) is None for _ in range(7)] == [True] * 6 + [False]  # no more than a minute's


def test_tokens_a_minute_and_what_was_not_used() -> None:
    clock = Clock()
    limiter, key = Limiter(clock), limited(tokens=600)
    assert limiter.admit(key, 500) is None
    refusal = limiter.admit(key, 150)
    assert refusal and refusal.seconds == pytest.approx(5) and "600 tokens a minute" in refusal.reason
    limiter.done(key, unused=400)
    assert limiter.admit(key, 450) is None
    limiter.done(key, unused=10**9)
    assert limiter.admit(key, 600) is None and limiter.admit(key, 1) is not None


def test_a_request_larger_than_a_minute_is_told_so() -> None:
    refusal = Limiter(Clock()).admit(limited(tokens=600), 601)
    assert refusal and refusal.final and "601 tokens" in refusal.reason and "max_tokens" in refusal.reason


def test_running_at_once() -> None:
    limiter, key = Limiter(Clock()), limited(running=2)
    assert limiter.admit(key, 1) is None and limiter.admit(key, 1) is None
    refusal = limiter.admit(key, 1)
    assert refusal and refusal.seconds > 0 and not refusal.final and "2 requests at once" in refusal.reason
    assert limiter.running(key) == 2
    limiter.done(key)
    assert limiter.admit(key, 1) is None


def test_a_refusal_takes_nothing() -> None:
    clock = Clock()
    limiter, key = Limiter(clock), limited(tokens=100, running=5)
    for _ in range(10):
        assert limiter.admit(key, 101) is not None
    assert limiter.admit(key, 100) is None  # no tokens were lost
    for _ in range(10):
        assert limiter.admit(key, 50) is not None
    clock.now += 30
    assert limiter.running(key) == 1 and limiter.admit(key, 50) is None


def test_keys_do_not_share_limits() -> None:
    limiter = Limiter(Clock())
    mine, yours = limited(requests=1), limited(requests=1, secret=OTHER)
    assert limiter.count(mine) is None and limiter.count(yours) is None
    assert limiter.count(mine) is not None


def test_a_clock_that_is_set_back_gives_and_takes_nothing() -> None:
    clock = Clock()
    limiter, key = Limiter(clock), limited(requests=1)
    assert limiter.count(key) is None
    clock.now -= 500
    assert limiter.count(key) is not None
    clock.now += 60
    assert limiter.count(key) is None


def test_keys_that_came_and_went_are_forgotten() -> None:
    clock = Clock()
    limiter = Limiter(clock)
    for i in range(1000):
        key = limited(requests=10, secret=f"{SECRET}{i}")
        assert limiter.count(key) is None
        limiter.done(key)
        clock.now += 10
    assert len(limiter) < 10


def test_a_key_with_something_running_is_not_forgotten() -> None:
    clock = Clock()
    limiter, key = Limiter(clock), limited(running=1)
    assert limiter.admit(key, 1) is None
    clock.now += 3600
    assert limiter.admit(limited(running=1, secret=OTHER), 1) is None
    assert limiter.admit(key, 1) is not None


def test_changed_limits_count_from_the_next_request() -> None:
    limiter = Limiter(Clock())
    assert limiter.admit(limited(running=1), 1) is None
    assert limiter.admit(limited(running=2), 1) is None
    assert limiter.admit(limited(running=2, tokens=10), 1) is not None


@given(st.lists(st.tuples(st.sampled_from(["admit", "done", "wait"]), st.integers(0, 40)), max_size=60))
def test_no_order_of_events_exceeds_the_limits(events: list[tuple[str, int]]) -> None:
    clock = Clock()
    limiter, key = Limiter(clock), limited(requests=5, tokens=100, running=3)
    admitted: list[tuple[float, int]] = []
    running = 0
    for what, amount in events:
        if what == "wait":
            clock.now += amount
        elif what == "done" and running:
            limiter.done(key)
            running -= 1
        elif what == "admit":
            refusal = limiter.count(key) or limiter.admit(key, amount)
            if refusal is None:
                admitted.append((clock.now, amount))
                running += 1
            else:
                assert refusal.seconds > 0
        assert running == limiter.running(key) <= 3
    for start, _ in admitted:
        span = [(at, tokens) for at, tokens in admitted if start <= at]
        for end, _ in span:
            within = [tokens for at, tokens in span if at <= end]
            share = 1 + (end - start) / 60
            assert len(within) <= 5 * share + 1e-3 and sum(within) <= 100 * share + 1e-3
