"""Every knob of the server, complete when built, never changed after. The engine's own are elsewhere.

A limit here is what one client may ask of the server before anything is allocated for it; what one key may
ask in a minute is in the key file. Reads no files and opens no sockets.
"""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from outrider.errors import InvalidRequest, suggest
from outrider.sampling_params import MAX_CHOICES

METRICS_COMPAT = ("none", "vllm")
LOG_FORMATS = ("text", "json")
LOG_LEVELS = ("debug", "info", "warning", "error")

ANY = "*"
LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
DEEPEST = 500  # the parser recurses; Python's own limit is 1000
WEEK = 7 * 86400.0  # longer waits overflow some of the clocks beneath


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """Server settings. Defaults suit one machine and its own user: only local programs can connect."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0 = any free one
    served_name: str | None = None  # shown in /v1/models besides the model's own
    api_keys: tuple[str, ...] = field(default=(), repr=False)  # as typed; the server keeps only their hashes
    key_file: str | None = None
    # Characters of keys given as they are; random ones of so many characters cannot be found by trying.
    min_key_length: int = 16
    allowed_hosts: tuple[
        str, ...
    ] = ()  # of the Host header; empty: local names on a loopback address, else any
    cors_origins: tuple[str, ...] = ()
    max_tokens: int | None = None  # of an answer whose request sets none; None: a quarter of the context
    max_body_bytes: int = 8 << 20
    max_depth: int = 64  # nesting of JSON
    max_choices: int = 32  # n
    max_prompts: int = 256  # in one call to /v1/completions
    max_messages: int = 4096
    max_stop: int = 16
    max_bias: int = 1024
    max_schema_bytes: int = 64 << 10
    max_queued_requests: int = 256
    max_queued_tokens: int = 1_000_000
    max_connections: int = 2048
    max_connections_per_peer: int = 512  # of one address, this machine's own apart; 0 = no limit
    request_timeout: float = 600.0
    body_timeout: float = 30.0
    header_timeout: float = 10.0
    write_timeout: float = 60.0  # a client that reads nothing for so long is dropped
    grammar_timeout: float = 5.0
    drain_seconds: float = 30.0  # for running requests once asked to stop
    engine_restarts: int = 3  # in ten minutes; then the server leaves with an error
    metrics_compat: str = "none"
    # What the machine costs, in any currency: /metrics has the cost of a million tokens.
    price_per_hour: float | None = None
    stream_padding: bool = False  # sizes of events say nothing of the text; a request can ask for it too
    stream_interval: float = 0.0  # tokens are gathered this long before they are sent
    ping_seconds: float = 15.0  # between comment lines on a silent stream; 0 = none
    log_format: str = "text"
    log_level: str = "info"
    log_prompts: bool = False
    draft_folders: tuple[str, ...] = ()  # drafts beneath these may take the place of the one in use
    keep_traffic: str | None = None  # a folder for tokens of keys that are marked for it
    keep_traffic_bytes: int = 1 << 30  # of it, at most; the oldest go

    def __post_init__(self) -> None:
        for name, (low, high) in _WHOLE.items():
            _check_whole(self, name, low, high)
        if self.max_tokens is not None:
            _check_whole(self, "max_tokens", 1, None)
        for name, zero in _SECONDS.items():
            _check_seconds(self, name, zero)
        for name, known in _CHOICES.items():
            _check_choice(self, name, known)
        for name in ("stream_padding", "log_prompts"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequest(f"{name} must be true or false", name)
        for name in ("served_name", "key_file", "keep_traffic"):
            _check_text(self, name)
        if self.price_per_hour is not None:
            _check_price(self)
        for name in ("api_keys", "allowed_hosts", "cors_origins", "draft_folders"):
            _gather(self, name)
        _check_host(self.host, "host")
        object.__setattr__(self, "allowed_hosts", tuple(host.lower() for host in self.allowed_hosts))
        for host in self.allowed_hosts:
            if host != ANY:
                _check_host(host, "allowed_hosts")
        for origin in self.cors_origins:
            _check_origin(origin)

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> ServeSettings:
        """Build from a mapping of names, refusing unknown ones with a suggestion."""
        known = [f.name for f in fields(cls)]
        for name in options:
            if name not in known:
                raise InvalidRequest(f"unknown setting {name!r}{suggest(str(name), known)}", str(name))
        return cls(**options)

    @property
    def local(self) -> bool:
        """Only programs of this machine can connect."""
        if self.host.lower() == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False  # a name; where it leads is not known here

    @property
    def host_names(self) -> frozenset[str]:
        """What a Host header may name; empty: anything.

        A page in a browser can reach a local server under a name of its own, by pointing that name at
        127.0.0.1; the Host header gives it away.
        """
        if self.allowed_hosts:
            return frozenset() if ANY in self.allowed_hosts else frozenset(self.allowed_hosts)
        return LOCAL_NAMES | {self.host.lower()} if self.local else frozenset()

    def accepts_host(self, header: str | None) -> bool:
        """Whether a request with this Host header is for us."""
        names = self.host_names
        return not names or _named(header or "") in names


_WHOLE: dict[str, tuple[int, int | None]] = {
    "port": (0, 65535),
    "min_key_length": (1, None),
    "max_body_bytes": (1, None),
    "max_depth": (1, DEEPEST),
    "max_choices": (1, MAX_CHOICES),
    "max_prompts": (1, None),
    "max_messages": (1, None),
    "max_stop": (0, None),
    "max_bias": (0, None),
    "max_schema_bytes": (1, None),
    "max_queued_requests": (1, None),
    "max_queued_tokens": (1, None),
    "max_connections": (1, None),
    "max_connections_per_peer": (0, None),
    "engine_restarts": (0, None),
    "keep_traffic_bytes": (1 << 20, None),
}
# Whether 0 is allowed: it means "not at all" for these, and would break every request for the others.
_SECONDS: dict[str, bool] = {
    "request_timeout": False,
    "body_timeout": False,
    "header_timeout": False,
    "write_timeout": False,
    "grammar_timeout": False,
    "drain_seconds": True,
    "stream_interval": True,
    "ping_seconds": True,
}
_CHOICES: dict[str, tuple[str, ...]] = {
    "metrics_compat": METRICS_COMPAT,
    "log_format": LOG_FORMATS,
    "log_level": LOG_LEVELS,
}


def _check_whole(settings: ServeSettings, name: str, low: int, high: int | None) -> None:
    value = getattr(settings, name)
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{name} must be a whole number, not {type(value).__name__}", name)
    if value < low or (high is not None and value > high):
        bound = f"at least {low}" if high is None else f"between {low} and {high}"
        raise InvalidRequest(f"{name} must be {bound}, got {value}", name)


def _check_seconds(settings: ServeSettings, name: str, zero: bool) -> None:
    value = getattr(settings, name)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidRequest(f"{name} must be a number of seconds, not {type(value).__name__}", name)
    inside = 0 <= value <= WEEK if zero else 0 < value <= WEEK  # NaN is in neither
    if not inside:
        bound = "[0" if zero else "(0"
        raise InvalidRequest(f"{name} must be in {bound}, {WEEK:g}] seconds, got {value}", name)
    object.__setattr__(settings, name, float(value))


def _check_price(settings: ServeSettings) -> None:
    value = settings.price_per_hour
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise InvalidRequest(f"price_per_hour must be a number, 0 or more, not {value!r}", "price_per_hour")
    object.__setattr__(settings, "price_per_hour", float(value))


def _check_choice(settings: ServeSettings, name: str, known: Iterable[str]) -> None:
    value = getattr(settings, name)
    if value not in known:
        raise InvalidRequest(f"unknown {name} {value!r}{suggest(str(value), known)}", name)


def _check_text(settings: ServeSettings, name: str) -> None:
    value = getattr(settings, name)
    if value is not None and (not isinstance(value, str) or not value.strip()):
        raise InvalidRequest(f"{name} must be a text that is not empty", name)


def _gather(settings: ServeSettings, name: str) -> None:
    """One string or several, as a tuple. The value stays out of the message: it may be a key."""
    value = getattr(settings, name)
    values = (value,) if isinstance(value, str) else value
    if not isinstance(values, (list, tuple)) or not all(isinstance(v, str) and v for v in values):
        raise InvalidRequest(f"{name} must be a list of texts that are not empty", name)
    object.__setattr__(settings, name, tuple(values))


def _check_host(host: Any, name: str) -> None:
    if not isinstance(host, str) or not _is_host(host):
        raise InvalidRequest(
            f"{name}: {host!r} is not a name or an address, such as 127.0.0.1 or example.org; "
            "leave out http:// and the port",
            name,
        )


def _is_host(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return re.fullmatch(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?", host) is not None
    return True


def _check_origin(origin: str) -> None:
    if origin != ANY and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s?#@*]+", origin):
        raise InvalidRequest(
            f"cors_origins: {origin!r} is not an origin, such as https://example.org or http://localhost:3000",
            "cors_origins",
        )


def _named(header: str) -> str:
    """The name in a Host header, without port and final dot; "" where there is none."""
    match = re.fullmatch(r"(?:\[([0-9a-f:.]+)\]|([^\s:\[\]@/]+?)\.?)(?::\d*)?", header.strip().lower())
    return (match[1] or match[2]) if match else ""
