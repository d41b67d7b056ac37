"""The server's OpenAPI document, made from the routes and the structs that requests are read with."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec

from outrider import __version__
from outrider.serve.replies import Reports
from outrider.serve.routes import Endpoint

STATUSES = {
    "400": "The request is wrong; `param` says where.",
    "401": "No valid key.",
    "403": "The Host header names another server.",
    "404": "No such model or route.",
    "405": "Another method is wanted.",
    "408": "The body came too slowly.",
    "413": "The body is too large.",
    "415": "The body is not sent as JSON.",
    "431": "The headers are too long.",
    "429": "The key's limit is reached; see retry-after.",
    "500": "A fault here.",
    "503": "Loading, full, or shutting down; see retry-after.",
    "504": "The request took too long.",
}

# Routes that belong together, by how their paths begin; the rest are of the server itself.
TAGS = {
    "Answers": ("/v1/chat/", "/v1/completions", "/v1/responses", "/v1/messages"),
    "Tokens": ("/tokenize", "/detokenize"),
    "Files and batches": ("/v1/files", "/v1/batches"),
    "Models and drafts": ("/v1/models", "/v1/draft", "/v1/pairs", "/v1/what-if"),
}
REST = "The server"


@cache
def document(routes: tuple[Endpoint, ...]) -> dict[str, Any]:
    bodies = [kind for route in routes for kind in (route.body, route.reply) if kind]
    _, schemas = msgspec.json.schema_components(bodies, ref_template="#/components/schemas/{name}")
    paths: dict[str, Any] = {}
    for route in routes:
        operation = _operation(route)
        if parameters := [*map(_path_parameter, route.param_convertors), *map(_query_parameter, route.query)]:
            operation["parameters"] = parameters
        if route.body:
            reference = {"schema": {"$ref": f"#/components/schemas/{route.body.__name__}"}}
            operation["requestBody"] = {"required": True, "content": {"application/json": reference}}
        elif route.form:
            operation["requestBody"] = {
                "required": True,
                "content": {"multipart/form-data": _form(route.form)},
            }
        paths.setdefault(route.path_format, {})[route.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "Outrider", "version": __version__},
        "tags": [{"name": name} for name in (*TAGS, REST)],
        "paths": paths,
        "components": {
            "schemas": {**schemas, "Error": _error()},
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "own": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{"key": []}, {"own": []}],
    }


def _path_parameter(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


def _query_parameter(name: str) -> dict[str, Any]:
    return {"name": name, "in": "query", "required": False, "schema": {"type": "string"}}


def _form(names: tuple[str, ...]) -> dict[str, Any]:
    fields = {name: {"type": "string", **({"format": "binary"} if name == "file" else {})} for name in names}
    return {"schema": {"type": "object", "properties": fields, "required": list(names)}}


def _tag(path: str) -> str:
    return next((name for name, begins in TAGS.items() if path.startswith(begins)), REST)


def _operation(route: Endpoint) -> dict[str, Any]:
    failure = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    responses: dict[str, Any] = {"200": {"description": "The answer."}}
    if route.reply:
        shape = {"$ref": f"#/components/schemas/{route.reply.__name__}"}
        responses["200"]["content"] = {"application/json": {"schema": shape}}
        if issubclass(route.reply, Reports):  # an answer may be streamed
            responses["200"]["content"]["text/event-stream"] = {}
    responses |= {code: {"description": why, "content": failure} for code, why in STATUSES.items()}
    return {"summary": route.summary, "tags": [_tag(route.path)], "responses": responses}


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
