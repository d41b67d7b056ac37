"""The server's settings, complete when built and never changed after. The engine's own are elsewhere.

A limit bounds what one client may ask before anything is allocated for it. Limits that users need not change are
constants in limits.py. What one key may ask in a minute is in the key file.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from outrider.errors import InvalidRequest, suggesting
from outrider.fields import check_fields, known_options, setting

ANY = "*"
LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
WEEK = 7 * 86400.0  # longer waits overflow some of the clocks beneath


@suggesting
@dataclass(frozen=True, slots=True)
class ServeSettings:
    """Server settings. Defaults suit one machine and its own user: only local programs can connect."""

    host: str = "127.0.0.1"
    port: int = setting(8000, 0, 65535)  # 0: any free one
    served_name: str | None = setting(None, 1)  # shown in /v1/models besides the model's own
    api_keys: tuple[str, ...] = field(
        default=(), repr=False, metadata={"low": 1}
    )  # the server keeps their hashes
    key_file: str | None = setting(None, 1)
    # Names of the Host header. Empty: local names on a loopback address, else any.
    allowed_hosts: tuple[str, ...] = setting((), 1)
    cors_origins: tuple[str, ...] = setting((), 1)
    max_tokens: int | None = setting(
        None, 1
    )  # of an answer whose request sets none; None: a quarter of the context
    max_body_bytes: int = setting(8 << 20, 1)
    max_schema_bytes: int = setting(64 << 10, 1)
    max_queued_requests: int = setting(256, 1)
    max_queued_tokens: int = setting(1_000_000, 1)
    max_connections: int = setting(2048, 1)
    max_connections_per_peer: int = setting(512, 0)  # of one address other than this machine's; 0: no limit
    request_timeout: float = setting(600.0, above=0, high=WEEK)
    body_timeout: float = setting(30.0, above=0, high=WEEK)
    header_timeout: float = setting(10.0, above=0, high=WEEK)
    write_timeout: float = setting(
        60.0, above=0, high=WEEK
    )  # drops a client that reads nothing for this long
    grammar_timeout: float = setting(5.0, above=0, high=WEEK)
    drain_seconds: float = setting(30.0, 0, WEEK)  # for running requests, once asked to stop
    engine_restarts: int = setting(3, 0)  # in ten minutes; then the server ends with an error
    metrics_compat: str = setting("none", known=("none", "vllm"))
    # What the machine costs, in any currency: /metrics has the cost of a million tokens.
    price_per_hour: float | None = setting(None, 0, 1e12)
    stream_padding: bool = False  # hides the lengths of streamed events; a request can ask for it too
    ping_seconds: float = setting(15.0, 0, WEEK)  # between comment lines on a silent stream; 0: none
    log_format: str = setting("text", known=("text", "json"))
    log_level: str = setting("info", known=("debug", "info", "warning", "error"))
    log_prompts: bool = False
    draft_folders: tuple[str, ...] = setting((), 1)  # drafts beneath these may replace the one in use
    keep_traffic: str | None = setting(None, 1)  # a folder for tokens of keys that are marked for it
    keep_traffic_bytes: int = setting(1 << 30, 1 << 20)  # the most to keep; the oldest files are deleted

    def __post_init__(self) -> None:
        check_fields(self)
        object.__setattr__(self, "allowed_hosts", tuple(host.lower() for host in self.allowed_hosts))
        _check_host(self.host, "host")
        for host in self.allowed_hosts:
            if host != ANY:
                _check_host(host, "allowed_hosts")
        for origin in self.cors_origins:
            _check_origin(origin)

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> ServeSettings:
        """Builds from a mapping of names. Refuses unknown names with a suggestion."""
        return cls(**known_options(cls, options, "setting"))

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


def _check_host(host: str, name: str) -> None:
    if not _is_host(host):
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
