"""The server's settings, complete when built and never changed after. The engine's own are elsewhere.

A limit bounds what one client may ask before anything is allocated for it. Limits that users need not change are
constants in limits.py. What one key may ask in a minute is in the key file.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outrider.errors import InvalidRequest, invalid, suggesting
from outrider.fields import check_fields, known_options, setting

ANY = "*"
LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
WEEK = 7 * 86400.0  # longer waits overflow some of the clocks beneath
FIRST_USE = "first use"
EVENT_ADDRESS = r"tcp://[^\s/]+:\d{1,5}|ipc://\S+"
# Settings that each model of a table may have its own of. The others concern the server as a whole.
PER_MODEL = frozenset(
    (
        *("served_name", "load", "unload_after", "max_tokens", "max_schema_bytes", "max_queued_requests"),
        *("max_queued_tokens", "request_timeout", "grammar_timeout", "engine_restarts", "draft_folders"),
        *("keep_traffic", "keep_traffic_bytes", "kv_events", "kv_events_replay", "kv_events_topic"),
    )
)


@suggesting
@dataclass(frozen=True, slots=True)
class ServeSettings:
    """Server settings. Defaults suit one machine and its own user: only local programs can connect.

    `help` is what the command line says of a setting. Times are in seconds.
    """

    host: str = setting(
        "127.0.0.1", metavar="ADDRESS", help="Address to listen on; 0.0.0.0 lets other machines in."
    )
    port: int = setting(8000, 0, 65535, help="Port to listen on; 0 takes any free one.")
    served_name: str | None = setting(
        None, 1, metavar="NAME", help="Another name for the model, for clients."
    )
    load: str = setting(
        "start",
        known=("start", FIRST_USE),
        help="When to load a model: with the server, or for the first request that names it.",
    )
    unload_after: float = setting(
        60.0,
        0,
        WEEK,
        metavar="SEC",
        help="Idle time after which a model is unloaded if another needs its memory.",
    )
    api_keys: tuple[str, ...] = setting(
        (),
        1,
        secret=True,
        flag="--api-key",
        metavar="KEY",
        help="A key clients must send. Repeatable. Others may see flags: prefer its variable or --key-file.",
    )
    key_file: str | None = setting(None, 1, metavar="FILE", help="Keys by their hashes; see outrider keys.")
    allowed_hosts: tuple[str, ...] = setting(
        (),
        1,
        flag="--allowed-host",
        metavar="HOST",
        help="A name clients may reach the server by; * is any. Repeatable. By default local names when "
        "listening locally, else any.",
    )
    cors_origins: tuple[str, ...] = setting(
        (),
        1,
        flag="--cors-origin",
        metavar="ORIGIN",
        help="A web page's origin that may call the server; * is any. Repeatable.",
    )
    memory_bytes: int = setting(0, 0, help="Most memory that all models take together; auto: what is free.")
    max_tokens: int | None = setting(
        None, 1, help="Longest answer of requests that set no length; by default a quarter of the context."
    )
    max_body_bytes: int = setting(8 << 20, 1, help="Largest request.")
    max_schema_bytes: int = setting(64 << 10, 1, help="Largest JSON schema or grammar.")
    max_queued_requests: int = setting(256, 1, help="Requests that may wait; more are refused.")
    max_queued_tokens: int = setting(1_000_000, 1, help="Prompt tokens that may wait; more are refused.")
    max_connections: int = setting(2048, 1, help="Connections that may be open; more are refused.")
    max_connections_per_peer: int = setting(
        512, 0, help="The same for one address other than this machine's; 0: no limit."
    )
    request_timeout: float = setting(600.0, above=0, high=WEEK, help="Longest a request may take.")
    body_timeout: float = setting(
        30.0, above=0, high=WEEK, help="Longest a request's body may take to arrive."
    )
    header_timeout: float = setting(
        10.0, above=0, high=WEEK, help="Longest a request's headers may take to arrive."
    )
    write_timeout: float = setting(
        60.0, above=0, high=WEEK, help="Drop a client that reads nothing for this long."
    )
    grammar_timeout: float = setting(5.0, above=0, high=WEEK, help="Longest a grammar may take to compile.")
    drain_seconds: float = setting(30.0, 0, WEEK, help="How long running requests may go on after Ctrl-C.")
    engine_restarts: int = setting(3, 0, help="Times in ten minutes a failed engine is started again.")
    metrics_compat: str = setting(
        "none", known=("none", "vllm"), help="Metrics under another server's names too."
    )
    kv_events: str | None = setting(
        None,
        metavar="ADDRESS",
        help="Publish by ZMQ which blocks of prompts are cached: tcp://HOST:PORT or ipc://FILE.",
    )
    kv_events_replay: str | None = setting(
        None, metavar="ADDRESS", help="Where subscribers ask for events that they missed."
    )
    kv_events_topic: str | None = setting(
        None, metavar="TEXT", help="Topic of the events, such as kv@10.0.0.7:8000@MODEL."
    )
    price_per_hour: float | None = setting(
        None,
        0,
        1e12,
        help="What an hour of this machine costs: /metrics then has the cost of a million tokens.",
    )
    stream_padding: bool = setting(False, help="Pad streamed events, which hides the lengths of their texts.")
    ping_seconds: float = setting(15.0, 0, WEEK, help="Time between pings on silent streams; 0: none.")
    log_format: str = setting("text", known=("text", "json"), help="How log lines are written.")
    log_level: str = setting(
        "info",
        known=("debug", "info", "warning", "error"),
        metavar="LEVEL",
        help="What to log: debug, info, warning or error, and worse.",
    )
    log_prompts: bool = setting(False, help="Log what users write, too.")
    draft_folders: tuple[str, ...] = setting(
        (),
        1,
        flag="--draft-folder",
        metavar="DIR",
        help="A folder whose drafts may replace the one in use; see outrider draft. Repeatable.",
    )
    keep_traffic: str | None = setting(
        None, 1, metavar="DIR", help="Keep tokens of keys that are marked for it here, to train drafts on."
    )
    keep_traffic_bytes: int = setting(1 << 30, 1 << 20, help="Most to keep; the oldest files are deleted.")

    batch_folder: str | None = setting(
        None, 1, metavar="DIR", help="Keep files and batches here: /v1/files and /v1/batches are served."
    )
    batch_bytes: int = setting(1 << 30, 1 << 20, help="Most to keep there; more is refused.")
    batch_sequences: int | None = setting(
        None, 1, help="Lines of batches at once; by default an eighth of max_sequences."
    )

    def __post_init__(self) -> None:
        check_fields(self)
        object.__setattr__(self, "allowed_hosts", tuple(host.lower() for host in self.allowed_hosts))
        _check_host(self.host, "host")
        for host in self.allowed_hosts:
            if host != ANY:
                _check_host(host, "allowed_hosts")
        for origin in self.cors_origins:
            _check_origin(origin)
        self._check_events()

    def _check_events(self) -> None:
        for name in ("kv_events", "kv_events_replay"):
            if (address := getattr(self, name)) is not None and not re.fullmatch(EVENT_ADDRESS, address):
                raise invalid(name, f"must be tcp://HOST:PORT or ipc://FILE, not {address!r:.100}")
        if self.kv_events is None and (self.kv_events_replay or self.kv_events_topic):
            name = "kv_events_replay" if self.kv_events_replay else "kv_events_topic"
            raise invalid(name, "needs kv_events, the address that events are published at")
        if self.kv_events is not None and (self.api_keys or self.key_file):
            raise invalid(
                "kv_events",
                "is for servers without keys: routers find blocks by their tokens alone, so they would take one key's "
                "prompts for another's; let the gateway check keys",
            )

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
