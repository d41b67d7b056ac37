"""Server settings: complete and valid once built, and which Host headers they let in."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest

from outrider.errors import InvalidRequest
from outrider.serve.settings import ServeSettings

_WHOLE = [one.name for one in fields(ServeSettings) if one.type == "int"]
_SECONDS = [one.name for one in fields(ServeSettings) if one.type == "float"]


def test_defaults_are_valid_and_local() -> None:
    settings = ServeSettings()
    assert settings.local and settings.max_body_bytes == 8 * 1024 * 1024
    with pytest.raises(FrozenInstanceError):
        settings.port = 1  # type: ignore[misc]


def test_every_number_has_a_lower_bound() -> None:
    assert len(_WHOLE) >= 9 and len(_SECONDS) >= 7
    for one in fields(ServeSettings):
        if one.name in (*_WHOLE, *_SECONDS):
            assert one.metadata["low"] >= 0 or one.metadata["above"] == 0, one.name


def test_unknown_names_suggest() -> None:
    assert ServeSettings.of({"port": 0}).port == 0
    with pytest.raises(
        InvalidRequest, match="unknown setting 'max_body_byte'; did you mean 'max_body_bytes'"
    ):
        ServeSettings.of({"max_body_byte": 1})


@pytest.mark.parametrize("name", _WHOLE)
@pytest.mark.parametrize("value", [-1, 1.5, "8", True, None, math.nan])
def test_whole_numbers(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"^{name} must be") as told:
        ServeSettings.of({name: value})
    assert told.value.param == name


@pytest.mark.parametrize("name", _SECONDS)
@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf, 1e9, "8", True, None])
def test_seconds(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"^{name} must be") as told:
        ServeSettings.of({name: value})
    assert told.value.param == name


@pytest.mark.parametrize("name", [name for name in _SECONDS if name.endswith("timeout")])
def test_a_timeout_of_nothing_would_fail_every_request(name: str) -> None:
    with pytest.raises(InvalidRequest, match=r"in \(0, "):
        ServeSettings.of({name: 0})


def test_numbers_of_seconds_become_floats() -> None:
    assert isinstance(ServeSettings(drain_seconds=0).drain_seconds, float)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"port": 65536}, "port must be between 0 and 65535"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"max_tokens": "9"}, "max_tokens must be a whole number"),
        ({"metrics_compat": "vlm"}, "unknown metrics_compat 'vlm'; did you mean 'vllm'"),
        ({"log_level": "INFO"}, "unknown log_level 'INFO'"),
        ({"log_format": 3}, "unknown log_format 3"),
        ({"stream_padding": 1}, "stream_padding must be true or false"),
        ({"log_prompts": "yes"}, "log_prompts must be true or false"),
        ({"served_name": " "}, "served_name must not be an empty string"),
        ({"key_file": 5}, "key_file must be a string, not int"),
        ({"api_keys": ["a", 5]}, "api_keys must be a string or a list of strings"),
        ({"allowed_hosts": [""]}, "allowed_hosts must not hold an empty string"),
        ({"cors_origins": {"a": 1}}, "cors_origins must be a string or a list of strings"),
        ({"host": ""}, "host: '' is not a name or an address"),
        ({"host": "localhost:8000"}, "leave out http:// and the port"),
        ({"host": "http://localhost"}, "is not a name or an address"),
        ({"host": "a b"}, "is not a name or an address"),
        ({"host": None}, "host must be a string"),
        ({"allowed_hosts": ["https://example.org"]}, "allowed_hosts: 'https://example.org'"),
        ({"cors_origins": ["example.org"]}, "is not an origin"),
        ({"cors_origins": ["https://example.org/"]}, "is not an origin"),
        ({"cors_origins": ["https://*.example.org"]}, "is not an origin"),
    ],
)
def test_bad_values_name_themselves(options: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequest) as told:
        ServeSettings.of(options)
    assert says in str(told.value) and told.value.param in options


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "::1", "example.org", "node-3", "my_pod", "localhost"])
def test_hosts_that_can_be_bound(host: str) -> None:
    assert ServeSettings(host=host).host == host


def test_one_text_is_a_list_of_one() -> None:
    assert ServeSettings(cors_origins="http://localhost:3000").cors_origins == ("http://localhost:3000",)  # type: ignore[arg-type]


def test_keys_stay_out_of_what_is_printed() -> None:
    settings = ServeSettings(api_keys=("or-secret-secret-secret",))
    assert "secret" not in repr(settings)
    with pytest.raises(InvalidRequest) as told:
        ServeSettings(api_keys=("or-secret-secret", None))  # type: ignore[arg-type]
    assert "secret" not in str(told.value)


LOCAL = ServeSettings()
OPEN = ServeSettings(host="0.0.0.0")
NAMED = ServeSettings(host="0.0.0.0", allowed_hosts=("LLM.example.org", "10.0.0.5", "fe80::1"))


@pytest.mark.parametrize(
    ("settings", "header", "accepted"),
    [
        (LOCAL, "localhost:8000", True),
        (LOCAL, "LOCALHOST", True),
        (LOCAL, "localhost.", True),
        (LOCAL, "127.0.0.1:8000", True),
        (LOCAL, "[::1]:8000", True),
        (LOCAL, "evil.example:8000", False),  # a name pointed at 127.0.0.1
        (LOCAL, "127.0.0.1.evil.example", False),
        (LOCAL, "localhost:80@evil.example", False),
        (LOCAL, "localhost:x", False),
        (LOCAL, "localhost evil", False),
        (LOCAL, "", False),
        (LOCAL, None, False),
        (ServeSettings(host="127.0.0.2"), "127.0.0.2:8000", True),
        (ServeSettings(host="::1"), "[::1]", True),
        (OPEN, "anything.example", True),
        (OPEN, None, True),
        (NAMED, "llm.example.org", True),
        (NAMED, "10.0.0.5:8000", True),
        (NAMED, "[fe80::1]", True),
        (NAMED, "localhost", False),
        (ServeSettings(allowed_hosts=("*",)), "anything.example", True),
    ],
)
def test_host_headers(settings: ServeSettings, header: str | None, accepted: bool) -> None:
    assert settings.accepts_host(header) is accepted


@pytest.mark.parametrize("price", ["4", True, -1, float("nan"), float("inf")])
def test_a_price_that_is_none(price: Any) -> None:
    with pytest.raises(InvalidRequest, match="price_per_hour must be") as refused:
        ServeSettings(price_per_hour=price)
    assert refused.value.param == "price_per_hour"
    assert ServeSettings(price_per_hour=4).price_per_hour == 4.0
