"""The server against its own OpenAPI document: whatever fits it, and whatever does not, gets an answer that the
document knows, and never a fault. Contexts are short here, so that no answer takes long.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    allow_header_conformance,
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from outrider.serve.app import ROUTES
from outrider.serve.openapi import document
from tests.serve.conftest import Served, start_server

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    unsupported_method,
    allow_header_conformance,
]


def search(examples: int, *phases: Phase) -> settings:
    """Random examples; with the phase `explicit`, also those at the bounds of what the document says."""
    return settings(
        max_examples=examples,
        phases=[*phases, Phase.generate],
        suppress_health_check=list(
            HealthCheck
        ),  # an example is a request to the server, which all of them share
    )


@pytest.fixture(scope="module")
def short(tiny_folder: Path) -> Iterator[Served]:
    """It survives everything in this file: the first engine still, nothing running, nothing waiting."""
    server = start_server(tiny_folder, "--context", "128", "--max-tokens", "4")
    yield server
    server.wait_idle()
    assert server.get("/health").status_code == 200
    assert server.metric("engine_restarts_total") == 0
    assert not [line for line in server.lines if "Traceback" in line]
    assert server.stop() == 0


@pytest.fixture(scope="module")
def session() -> Iterator[requests.Session]:
    with requests.Session() as shared:
        yield shared


def generating(mode: GenerationMode) -> Any:
    schema = schemathesis.openapi.from_dict(document(ROUTES))
    schema.config.generation.update(modes=[mode])
    return schema


right, wrong = generating(GenerationMode.POSITIVE), generating(GenerationMode.NEGATIVE)


def test_the_document_is_the_one_served(short: Served) -> None:
    assert short.get("/openapi.json").json() == json.loads(json.dumps(document(ROUTES)))


NEEDED: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hi"}],
    "prompt": "hi",
    "input": "hi",
    "tokens": [5],
}


def within_reason(body: dict[str, Any], path: str) -> dict[str, Any]:
    """Every other body with few of its fields, and with words that can be answered: with all of them there is always
    one that asks for something impossible, and nothing behind the first check would ever be reached.
    """
    size = len(json.dumps(body))
    if size % 2:
        return {name: value for name, value in body.items() if name != "model"}
    needed = {**NEEDED, "max_tokens": 4} if path == "/v1/messages" else NEEDED
    names = sorted(set(body) - needed.keys() - {"model"})
    kept = {name: body[name] for name in names[size % 7 :: 7]} if size % 3 else {}
    return {**kept, **{name: needed[name] for name in needed.keys() & body.keys()}}


@right.include(method="GET").parametrize()
@search(3)
def test_what_is_only_read(case: Case, short: Served, session: requests.Session) -> None:
    case.call_and_validate(base_url=short.url, session=session, checks=CHECKS, timeout=30)


@right.include(method="POST").parametrize()
@search(8)
def test_what_fits_the_document(case: Case, short: Served, session: requests.Session) -> None:
    if isinstance(case.body, dict):
        case.body = within_reason(case.body, case.path)
    case.call_and_validate(base_url=short.url, session=session, checks=CHECKS, timeout=30)


@wrong.include(method="POST").parametrize()
@search(4, Phase.explicit)
def test_what_does_not_fit_the_document(case: Case, short: Served, session: requests.Session) -> None:
    response = case.call(base_url=short.url, session=session, timeout=30)
    case.validate_response(response, checks=CHECKS)
    assert response.status_code != 422
