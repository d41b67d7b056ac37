"""API keys by their hashes, and a limiter that counts what each key uses.

Keys are long random strings, so a plain SHA-256 cannot be searched; the keys themselves are forgotten once
hashed. A key file is TOML, one table a key, as `outrider keys add` writes it:

    [[key]]
    name = "team-a"
    hash = "sha256:<64 hex digits>"
    requests_per_minute = 60        # these three may be left out: no limit
    tokens_per_minute = 100000
    max_running = 8
    models = ["small", "large"]     # that it may use; left out: all
    admin = true                    # may swap drafts (serve/draft.py)
    keep_traffic = true             # what it is served may be kept (serve/traffic.py)
"""

from __future__ import annotations

import hashlib
import hmac
import re
import time
import tomllib
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from outrider.errors import InvalidRequest, suggest
from outrider.serve.settings import ServeSettings

MIN_KEY_LENGTH = 16  # of keys given by flag or variable: random ones of this length cannot be found by trying
MINUTE = 60.0
ROUNDING = 1e-6
MARKS = ("admin", "keep_traffic")  # of a key, in its file
LONGEST_NAME = 100  # characters
MOST = 10**12  # of any limit: arithmetic with floats stays exact
RETRY_RUNNING = 1.0  # seconds; when a running request will end is not known


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """What one key may use; 0 is no limit."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    max_running: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if type(value) is not int or not 0 <= value <= MOST:
                raise InvalidRequest(
                    f"{field.name} must be a whole number up to 10^12, 0 for no limit, not {value!r:.30}",
                    field.name,
                )


@dataclass(frozen=True, slots=True)
class Key:
    """A key as the server knows it: by name and digest, never by itself."""

    name: str
    digest: bytes
    limits: KeyLimits = KeyLimits()
    admin: bool = False  # may change what is served
    keep_traffic: bool = False  # its tokens may be kept, where the server keeps any
    models: tuple[str, ...] = ()  # names of those it may use; none: all

    def allows(self, names: Iterable[str]) -> bool:
        """Whether the key may use a model with these names."""
        return not self.models or not set(self.models).isdisjoint(names)

    @property
    def owner(self) -> str:
        """Whose cache entries its requests may reuse. Says nothing of the key or of its digest."""
        return hashlib.sha256(b"outrider owner " + self.digest).hexdigest()[:32] if self.digest else ""


ANYONE = Key("", b"")


def digest_of(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


class Keyring:
    """The keys a server knows. Without any, it is open and everyone is `ANYONE`."""

    def __init__(self, keys: Iterable[Key] = ()) -> None:
        self._keys = tuple(keys)

    @classmethod
    def of(cls, settings: ServeSettings) -> Keyring:
        """The keys given by flag or variable, named `key-1` and so on, and those of the key file."""
        keys = [Key(f"key-{i}", _digest_of_given(key)) for i, key in enumerate(settings.api_keys, 1)]
        if settings.key_file is not None:
            keys += _keys_that_must_be_there(Path(settings.key_file).expanduser())
        _check_unique(keys, "the keys given")
        return cls(keys)

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def open(self) -> bool:
        return not self._keys

    @property
    def model_names(self) -> set[str]:
        """Models that some key is limited to."""
        return {name for key in self._keys for name in key.models}

    @property
    def keeps_traffic(self) -> bool:
        """Whether what some key is served may be kept."""
        return any(key.keep_traffic for key in self._keys)

    def of_owner(self, owner: str) -> Key | None:
        return next((key for key in self._keys if key.owner == owner), None)

    def check(self, authorization: str | None, own: str | None = None) -> Key | None:
        """The key of an `Authorization: Bearer ...` header, or of `x-api-key`; None: unknown, or two different ones.

        Digests are compared, each with every key, in constant time: how long it takes says nothing.
        """
        if self.open:
            return ANYONE
        scheme, _, candidate = (authorization or f"bearer {own or ''}").strip().partition(" ")
        if scheme.lower() != "bearer" or (own is not None and own.strip() != candidate.strip()):
            return None
        digest, found = digest_of(candidate.strip()), None
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found


def _digest_of_given(key: str) -> bytes:
    """The messages do not repeat the key: they end up in logs."""
    if len(key) < MIN_KEY_LENGTH:
        raise InvalidRequest(
            f"an API key has {len(key)} characters and can be found by trying; at least {MIN_KEY_LENGTH} are needed "
            "(`outrider keys add NAME --file keys.toml` makes a good one)",
            "api_keys",
        )
    if not re.fullmatch(r"[!-~]+", key):
        raise InvalidRequest(
            "an API key has characters that no header can carry; use ASCII, no spaces", "api_keys"
        )
    return digest_of(key)


def read_key_file(file: Path) -> list[Key]:
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as problem:
        raise InvalidRequest(f"{file} cannot be read: {problem.strerror}", "key_file") from None
    except UnicodeDecodeError:
        raise InvalidRequest(f"{file} is not UTF-8 text", "key_file") from None
    return parse_keys(text, str(file))


def parse_keys(text: str, source: str) -> list[Key]:
    """The keys in the text of a key file; `source` is what messages call it."""
    try:
        document = tomllib.loads(text)
    except ValueError as problem:  # not TOML, or an integer of thousands of digits
        raise InvalidRequest(f"{source} is not TOML: {problem}", "key_file") from None
    except RecursionError:
        raise InvalidRequest(f"{source} is not TOML: it is nested too deeply", "key_file") from None
    _check_names(document, ("key",), source)
    entries = document.get("key", [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise InvalidRequest(f"{source}: keys are tables headed [[key]]", "key_file")
    keys = [_key_of(entry, f"{source}, key {i}") for i, entry in enumerate(entries, 1)]
    _check_unique(keys, source)
    return keys


def _keys_that_must_be_there(file: Path) -> list[Key]:
    """A file emptied of its keys must not open the server to everyone."""
    keys = read_key_file(file)
    if not keys:
        raise InvalidRequest(
            f"{file} holds no keys; add one (outrider keys add NAME --file {file}) or leave out --key-file",
            "key_file",
        )
    return keys


def _key_of(entry: Mapping[str, Any], source: str) -> Key:
    limits = [field.name for field in fields(KeyLimits)]
    _check_names(entry, ("name", "hash", "models", *limits, *MARKS), source)
    name, digest = check_name(entry.get("name"), source, "key_file"), entry.get("hash")
    if not isinstance(digest, str) or not re.fullmatch(r"sha256:[0-9a-fA-F]{64}", digest):
        raise InvalidRequest(f"{source} needs a hash: sha256: and 64 hex digits", "key_file")
    try:
        allowed = KeyLimits(**{name: entry[name] for name in limits if name in entry})
    except InvalidRequest as problem:
        raise InvalidRequest(f"{source}: {problem}", "key_file") from None
    for mark in MARKS:
        if type(entry.get(mark, False)) is not bool:
            raise InvalidRequest(f"{source}: {mark} must be true or false", "key_file")
    marks = {mark: entry[mark] for mark in MARKS if mark in entry}
    models = _models_of(entry.get("models"), source)
    return Key(name, bytes.fromhex(digest.removeprefix("sha256:")), allowed, models=models, **marks)


def _models_of(given: object, source: str) -> tuple[str, ...]:
    """An empty list is refused: it would allow all models, and reads as if it allowed none."""
    if given is None:
        return ()
    if not isinstance(given, list) or not given or not all(type(name) is str and name for name in given):
        raise InvalidRequest(f"{source}: models must be a list of names; leave it out for all", "key_file")
    return tuple(given)


def check_name(name: object, source: str, param: str) -> str:
    """Names stand in logs, in lists and in names of folders: two must not look alike, and none may break a line."""
    if (
        isinstance(name, str)
        and 0 < len(name) <= LONGEST_NAME
        and name.isprintable()
        and name == unicodedata.normalize("NFC", name).strip()
    ):
        return name
    given = "" if name is None else f", not {str(name)[:40]!a}"
    raise InvalidRequest(
        f"{source} needs a name of 1 to {LONGEST_NAME} printable characters, without spaces around it{given}",
        param,
    )


def _check_names(given: Iterable[str], known: Iterable[str], source: str) -> None:
    for name in given:
        if name not in known:
            raise InvalidRequest(f"{source}: unknown entry {name!r:.60}{suggest(name, known)}", "key_file")


def _check_unique(keys: Iterable[Key], source: str) -> None:
    """Names and keys must be unique, so that limits and revocations meet the right client."""
    names: set[str] = set()
    holders: dict[bytes, str] = {}
    for key in keys:
        if key.name in names:
            raise InvalidRequest(f"{source}: two keys are named {key.name!r}", "key_file")
        if key.digest in holders:
            both = f"{holders[key.digest]!r} and {key.name!r}"
            raise InvalidRequest(f"{source}: {both} are the same key", "key_file")
        names.add(key.name)
        holders[key.digest] = key.name


@dataclass(frozen=True, slots=True)
class Refusal:
    """Not now: try again in `seconds`. `final`: waiting will not help, the request itself is too large."""

    seconds: float
    reason: str
    final: bool = False


class _Bucket:
    """Fills evenly to a minute's worth, which may be spent at once."""

    __slots__ = ("level", "size", "updated")

    def __init__(self, size: int, now: float) -> None:
        self.size, self.level, self.updated = size, float(size), now

    def fill(self, now: float) -> None:
        passed = max(0.0, now - self.updated)  # a clock may be set back
        self.level = min(float(self.size), self.level + passed * self.size / MINUTE)
        self.updated = now

    def wait(self, amount: float) -> float:
        """Seconds until `amount` can be taken; 0: now. Who waited that long is not refused for rounding."""
        lacking = amount - self.level
        return lacking * MINUTE / self.size if lacking > ROUNDING else 0.0

    @property
    def full(self) -> bool:
        return self.level >= self.size


class _Use:
    """What one key is using: requests that run, and what is left of its minute. No bucket, no limit."""

    __slots__ = ("limits", "requests", "running", "tokens")

    def __init__(self, limits: KeyLimits, now: float, running: int = 0) -> None:
        self.limits, self.running = limits, running
        self.requests = _Bucket(limits.requests_per_minute, now) if limits.requests_per_minute else None
        self.tokens = _Bucket(limits.tokens_per_minute, now) if limits.tokens_per_minute else None

    def fill(self, now: float) -> None:
        for bucket in (self.requests, self.tokens):
            if bucket is not None:
                bucket.fill(now)

    @property
    def idle(self) -> bool:
        """As good as never seen."""
        return self.running == 0 and all(b is None or b.full for b in (self.requests, self.tokens))


class Limiter:
    """Counts what each key uses. For one thread; `done` must be called once for every admitted request."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._uses: dict[bytes, _Use] = {}

    def __len__(self) -> int:
        """Keys that are remembered: those with something running or a minute not yet refilled."""
        return len(self._uses)

    def running(self, key: Key) -> int:
        use = self._uses.get(key.digest)
        return use.running if use else 0

    def count(self, key: Key) -> Refusal | None:
        """Count a request as soon as it comes, whatever becomes of it; or say why not, taking nothing."""
        if not key.limits.requests_per_minute:
            return None
        bucket = self._use_of(key).requests
        assert bucket is not None
        if seconds := bucket.wait(1):
            return Refusal(seconds, f"this key may send {bucket.size} requests a minute")
        bucket.level -= 1
        return None

    def admit(self, key: Key, tokens: int) -> Refusal | None:
        """Reserves `tokens`, of prompt and answer, for a request; or says why not, reserving nothing."""
        if key.limits == KeyLimits():
            return None
        use = self._use_of(key)
        refusal = _refusal(use, tokens)
        if refusal is None:
            use.running += 1
            if use.tokens is not None:
                use.tokens.level -= tokens
        return refusal

    def done(self, key: Key, unused: int = 0) -> None:
        """An admitted request has ended; `unused` of the tokens it was admitted with are given back."""
        use = self._uses.get(key.digest)
        if use is None:
            return
        use.running = max(0, use.running - 1)
        if use.tokens is not None:
            use.tokens.level = min(float(use.tokens.size), use.tokens.level + max(0, unused))

    def _use_of(self, key: Key) -> _Use:
        now = self._clock()
        use = self._uses.get(key.digest)
        if use is None:
            self._forget_idle(now)
            use = self._uses[key.digest] = _Use(key.limits, now)
        elif use.limits != key.limits:  # the key file was changed
            use = self._uses[key.digest] = _Use(key.limits, now, use.running)
        use.fill(now)
        return use

    def _forget_idle(self, now: float) -> None:
        """Keys come and go with the key file; only those in use are worth their memory."""
        for use in self._uses.values():
            use.fill(now)
        self._uses = {digest: use for digest, use in self._uses.items() if not use.idle}


def _refusal(use: _Use, tokens: int) -> Refusal | None:
    limits = use.limits
    if limits.max_running and use.running >= limits.max_running:
        return Refusal(RETRY_RUNNING, f"this key may run {limits.max_running} requests at once")
    if use.tokens is not None and tokens > limits.tokens_per_minute:
        asked = f"the request may use {tokens} tokens; this key may use {limits.tokens_per_minute} a minute"
        return Refusal(MINUTE, f"{asked}, so shorten it or lower max_tokens", final=True)
    if use.tokens is not None and (seconds := use.tokens.wait(tokens)):
        return Refusal(seconds, f"this key may use {limits.tokens_per_minute} tokens a minute")
    return None
