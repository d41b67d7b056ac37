"""The server's OpenAPI document, made from the structs that requests are read with."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec

from outrider import __version__
from outrider.serve.wire import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    ResponsesRequest,
    TokenizeRequest,
)

POSTS: dict[str, tuple[type[msgspec.Struct], str]] = {
    "/v1/chat/completions": (ChatRequest, "Answer a conversation."),
    "/v1/completions": (CompletionRequest, "Continue texts."),
    "/v1/responses": (ResponsesRequest, "Answer a conversation, stateless."),
    "/tokenize": (TokenizeRequest, "Text to token ids."),
    "/detokenize": (DetokenizeRequest, "Token ids to text."),
}
GETS = {
    "/v1/models": "What is served.",
    "/health": "200 when requests are taken, else 503.",
    "/ping": "The same.",
    "/version": "The version.",
    "/metrics": "Counters for Prometheus.",
    "/openapi.json": "This document.",
    "/": "The routes.",
}
STATUSES = {
    "400": "The request is wrong; `param` says where.",
    "401": "No valid key.",
    "403": "The Host header names another server.",
    "404": "No such model or route.",
    "405": "Another method is wanted.",
    "408": "The body came too slowly.",
    "413": "The body is too large.",
    "415": "The body is not sent as JSON.",
    "429": "The key's limit is reached; see retry-after.",
    "500": "A fault here.",
    "503": "Loading, full, or shutting down; see retry-after.",
    "504": "The request took too long.",
}


@cache
def document() -> dict[str, Any]:
    _, schemas = msgspec.json.schema_components(
        [kind for kind, _ in POSTS.values()], ref_template="#/components/schemas/{name}"
    )
    paths: dict[str, Any] = {path: {"get": _operation(text)} for path, text in GETS.items()}
    name = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
    paths["/v1/models/{model}"] = {"get": {**_operation("One of them."), "parameters": [name]}}
    for path, (kind, text) in POSTS.items():
        body = {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}}
        operation = _operation(text)
        operation["requestBody"] = {"required": True, "content": {"application/json": body}}
        paths[path] = {"post": operation}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Outrider", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": {**schemas, "Error": _error()},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}],
    }


def _operation(text: str) -> dict[str, Any]:
    failure = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    responses: dict[str, Any] = {"200": {"description": "The answer."}}
    responses |= {code: {"description": why, "content": failure} for code, why in STATUSES.items()}
    return {"summary": text, "responses": responses}


def _error() -> dict[str, Any]:
    text = {"type": ["string", "null"]}
    inner = {
        "type": "object",
        "properties": {
            "message": {"type": "string"},
            "type": {"type": "string"},
            "param": text,
            "code": text,
        },
        "required": ["message", "type", "param", "code"],
    }
    return {"type": "object", "properties": {"error": inner}, "required": ["error"]}
