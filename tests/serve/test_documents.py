"""What people read to run the server says what is so: routes, fields, settings, metrics, files to start from."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from openai.types.chat.chat_completion_stream_options_param import ChatCompletionStreamOptionsParam
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as OpenAIChat
from openai.types.completion_create_params import CompletionCreateParamsBase as OpenAICompletion
from openai.types.responses.response_create_params import ResponseCreateParamsBase as OpenAIResponses

from outrider.cli.config import read_config
from outrider.cli.options import ENGINE, SAMPLING, SERVE, TABLES
from outrider.serve import wire
from outrider.serve.app import ROUTES
from outrider.serve.keys import KeyLimits
from outrider.serve.messages import MessagesRequest
from outrider.serve.metrics import COUNTERS, GAUGES, HISTOGRAMS, PREFIX, Metrics
from outrider.serve.replies import Step
from outrider.serve.settings import ServeSettings
from outrider.settings import Settings
from outrider.types import SamplingParams
from tests.test_structure import ROOT, blocks, check_outrider, commands

DEPLOY, DOCS = ROOT / "deploy", ROOT / "docs"
SERVING, OPERATING, METRICS = (DOCS / f"{name}.md" for name in ("serving", "operating", "metrics"))


def rows(document: Path, heading: str) -> dict[str, list[str]]:
    """Of the tables under a heading, cells by the names in the first one."""
    text = re.split(rf"^#+ {re.escape(heading)}\n", document.read_text(), flags=re.MULTILINE)[1]
    found = {}
    for line in re.split(r"^#+ ", text, maxsplit=1, flags=re.MULTILINE)[0].splitlines():
        if line.startswith("| `"):
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            found |= dict.fromkeys(re.findall(r"`([^`]+)`", cells[0]), cells[1:])
    return found


def named(document: Path) -> set[str]:
    """Words of the text that stand as code, without the blocks."""
    text = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    return {word for code in re.findall(r"`([^`]+)`", text) for word in re.findall(r"\w+", code)}


# ----------------------------------------------------------------------------------------------- serving.md


def test_every_route_is_described() -> None:
    shown = {(route.split()[0], route.split()[1]) for route in rows(SERVING, "Routes")}
    assert shown == {(route.method, route.path_format) for route in ROUTES}


def keys_of(typed: Any) -> set[str]:
    return {*typed.__required_keys__, *typed.__optional_keys__, "stream"}


@pytest.mark.parametrize(
    ("kind", "plain"),
    [
        (wire.ChatRequest, keys_of(OpenAIChat)),
        (wire.CompletionRequest, keys_of(OpenAICompletion)),
        (wire.ResponsesRequest, keys_of(OpenAIResponses)),
        (wire.StreamOptions, keys_of(ChatCompletionStreamOptionsParam)),
        (wire.TokenizeRequest, {"model"}),
        (wire.DetokenizeRequest, {"model"}),
        (wire.SpeculativeDecoding, set()),
        (wire.StructuredOutputs, set()),
        (wire.Prediction, {"type", "content"}),
    ],
)
def test_every_field_beyond_openai_is_named(kind: type[msgspec.Struct], plain: set[str]) -> None:
    beyond = set(kind.__struct_fields__) - plain
    assert beyond <= named(SERVING), f"not in serving.md: {sorted(beyond - named(SERVING))}"


def test_the_table_of_fields_has_only_fields() -> None:
    real = {
        name
        for kind in (wire.ChatRequest, wire.CompletionRequest, wire.StreamOptions)
        for name in kind.__struct_fields__
    }
    assert set(rows(SERVING, "What requests may say beyond OpenAI")) <= real
    assert set(rows(SERVING, "Speculation")) == set(wire.SpeculativeDecoding.__struct_fields__)
    assert set(rows(SERVING, "Structured output")) == set(wire.StructuredOutputs.__struct_fields__)


def test_what_is_refused_and_what_passes_is_named() -> None:
    refused = {name.split()[0] for name in rows(SERVING, "What is refused")}
    assert refused == set(wire.REFUSED)
    assert named(SERVING) >= wire.HARMLESS


def test_every_error_code_is_named() -> None:
    source = "".join(file.read_text() for file in (ROOT / "src" / "outrider" / "serve").glob("*.py"))
    codes = set(re.findall(r'\bcode="(\w+)"', source))
    assert len(codes) > 10
    assert codes <= named(SERVING), f"not in serving.md: {sorted(codes - named(SERVING))}"


@pytest.mark.parametrize("text", blocks(SERVING, "json"))
def test_examples_are_requests_the_server_takes(text: str) -> None:
    body = json.loads(text)
    if "error" in body:
        assert set(body["error"]) == {"message", "type", "param", "code"}
        return
    if "draft" in body:
        assert msgspec.to_builtins(msgspec.convert(body, Step)) == body
        return
    kinds = (wire.ChatRequest, wire.CompletionRequest, wire.ResponsesRequest, MessagesRequest)
    [kind] = [k for k in kinds if fits(body, k) and set(body) <= set(k.__struct_fields__)][:1]
    asked = wire.read_request(body, kind)
    if isinstance(asked, wire.Sampling):
        wire.sampling_params(asked, SamplingParams(), ServeSettings(), None)


def fits(body: dict[str, Any], kind: type[msgspec.Struct]) -> bool:
    return all(field.name in body for field in msgspec.structs.fields(kind) if field.required)


def test_curl_sends_json() -> None:
    bodies = [
        words[words.index("-d") + 1]
        for document in (SERVING, ROOT / "README.md")
        for words in commands(document)
        if words[0] == "curl" and "-d" in words
    ]
    assert len(bodies) > 2
    assert all(isinstance(json.loads(body), dict) for body in bodies)


# --------------------------------------------------------------------------------------------- operating.md


def shown_default(name: str) -> str:
    """As the flag spells it."""
    [flag] = [flag for flag in SERVE.flags if flag.name == name]
    [field] = [field for field in fields(ServeSettings) if field.name == name]
    if flag.default is not None:
        return flag.default
    value = field.default
    return "none" if value in (None, ()) else f"{value:g}" if isinstance(value, float) else str(value).lower()


def test_every_setting_is_described_with_its_default() -> None:
    table = {name: cells[0] for name, cells in rows(OPERATING, "Server settings").items()}
    assert table == {field.name: shown_default(field.name) for field in fields(ServeSettings)}


def test_every_limit_of_a_key_is_described() -> None:
    assert set(rows(OPERATING, "Keys")) == {field.name for field in fields(KeyLimits)}


def series() -> dict[str, str]:
    """Names as Prometheus knows them, each with the name in the tables."""
    counters = {f"{name}_total": name for name in COUNTERS}
    parts = {f"{name}{part}": name for name in HISTOGRAMS for part in ("", "_bucket", "_sum", "_count")}
    return {**counters, **{name: name for name in GAUGES}, **parts}


def test_every_metric_is_described() -> None:
    assert set(rows(METRICS, "Every metric")) == {
        *(f"{name}_total" for name in COUNTERS),
        *GAUGES,
        *HISTOGRAMS,
    }


def mentioned(text: str) -> set[str]:
    return set(re.findall(rf"{PREFIX}(\w+)", text))


@pytest.mark.parametrize(
    "file", [*sorted(DOCS.glob("*.md")), DEPLOY / "grafana.json", DEPLOY / "alerts.yml"], ids=lambda f: f.name
)
def test_metrics_that_are_mentioned_exist(file: Path) -> None:
    assert mentioned(file.read_text()) <= set(series())


# -------------------------------------------------------------------------------------------- the dashboard


def dashboard() -> dict[str, Any]:
    return json.loads((DEPLOY / "grafana.json").read_text())


def test_dashboard_shows_speculation_whole_and_most_of_the_rest() -> None:
    used = {series()[name] for name in mentioned((DEPLOY / "grafana.json").read_text())}
    every = {*COUNTERS, *GAUGES, *HISTOGRAMS}
    assert {name for name in every if "spec_decode" in name} <= used
    every -= {"cache_config_info"}  # all in its labels: nothing to draw
    assert not every - used, f"shown nowhere: {sorted(every - used)}"


def test_dashboard_can_be_imported() -> None:
    board = dashboard()
    assert board["schemaVersion"] >= 41
    assert board["id"] is None
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))
    [source] = [v for v in board["templating"]["list"] if v["type"] == "datasource"]
    for panel in board["panels"]:
        place = panel["gridPos"]
        assert place["x"] >= 0 and place["x"] + place["w"] <= 24
        for target in panel.get("targets", []):
            assert target["datasource"]["uid"] == "${" + source["name"] + "}"


def test_dashboard_uses_variables_it_has() -> None:
    board = dashboard()
    own = {variable["name"] for variable in board["templating"]["list"]}
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
    assert len(queries) > 30
    used = {name for query in queries for name in re.findall(r"\$(\w+)", query)}
    assert used <= own | {"__rate_interval", "__range"}
    assert all(query.count("(") == query.count(")") for query in queries)


def test_counters_are_shown_as_rates_or_totals() -> None:
    """The bare value of a counter says nothing; `sum(...)` since the start is only for those that are rare."""
    rare = {"engine_restarts_total", "admission_rejections_total"}
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", []):
            bare = re.findall(rf"(?<!rate\()(?<!increase\(){PREFIX}(\w+_total)", target["expr"])
            assert set(bare) <= rare, f"{panel['title']}: {bare}"


# ----------------------------------------------------------------------------------------------- the alerts


def test_alert_rules_are_whole_and_name_series_that_a_server_shows() -> None:
    [group] = yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"]
    rules = {rule["alert"]: rule for rule in group["rules"]}
    assert len(rules) == len(group["rules"])
    shown = set(re.findall(rf"^# TYPE {PREFIX}(\S+)", Metrics().text("model"), re.MULTILINE))
    for rule in rules.values():
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("page", "ticket", "note") and rule["annotations"]["summary"]
        assert re.fullmatch(r"\d+[mh]", rule.get("for", "1m"))
        assert mentioned(rule["expr"]) and mentioned(rule["expr"]) <= shown, rule["alert"]
        assert rule["expr"].count("(") == rule["expr"].count(")")
    slower = mentioned(rules["OutriderSlowerThanPlain"]["expr"])
    assert slower >= {"plain_decode_seconds_total", "decode_seconds_total"}


# ------------------------------------------------------------------------------------------- the other files


def config_values() -> dict[str, Any]:
    tables = {name: {flag.name: flag for flag in group.flags} for name, group in TABLES.items()}
    return dict(read_config(str(DEPLOY / "outrider.toml"), tables).values)


def built(group: Any, values: dict[str, Any]) -> Any:
    given = {flag.name: flag.value(values[flag.name]) for flag in group.flags if flag.name in values}
    return group.builds.of(given)


def test_example_config_is_read_and_every_key_is_a_setting() -> None:
    values = config_values()
    document = tomllib.loads((DEPLOY / "outrider.toml").read_text())
    for table, kind in (("sampling", SamplingParams), ("engine", Settings), ("serve", ServeSettings)):
        assert set(document[table]) <= {field.name for field in fields(kind)}
    serve = built(SERVE, values)
    assert built(SAMPLING, values) != SamplingParams()
    assert built(ENGINE, values) != Settings()
    assert serve.key_file and serve.local


def unit() -> dict[str, list[str]]:
    lines = [line for line in (DEPLOY / "outrider.service").read_text().splitlines() if "=" in line]
    settings: dict[str, list[str]] = {}
    for line in lines:
        if not line.startswith("#"):
            name, _, value = line.partition("=")
            settings.setdefault(name, []).append(value)
    return settings


def test_unit_starts_the_server_and_lets_it_drain() -> None:
    settings = unit()
    [command] = settings["ExecStart"]
    words = shlex.split(command.replace("/etc/outrider/outrider.toml", str(DEPLOY / "outrider.toml")))
    assert Path(words[0]).name == "outrider"
    check_outrider(words[1:])
    assert settings["KillMode"] == ["mixed"]  # the engine must outlive the drain
    assert int(settings["TimeoutStopSec"][0]) >= built(SERVE, config_values()).drain_seconds + 15


def test_unit_sets_variables_that_exist() -> None:
    known = {f"OUTRIDER_{flag.name.upper()}" for group in TABLES.values() for flag in group.flags}
    given = {pair.partition("=")[0] for line in unit()["Environment"] for pair in line.split()}
    assert {name for name in given if name.startswith("OUTRIDER_")} <= known | {"OUTRIDER_CACHE"}


def test_nginx_fits_the_example_config() -> None:
    text = (DEPLOY / "nginx.conf").read_text()
    serve = built(SERVE, config_values())

    def directive(name: str) -> str:
        [value] = re.findall(rf"^ *{name} ([^;{{]+);", text, re.MULTILINE)
        return value

    assert directive("server") == f"{serve.host}:{serve.port}"
    assert directive("server_name") in serve.allowed_hosts
    assert directive("proxy_buffering") == "off"
    assert directive("client_max_body_size") == f"{serve.max_body_bytes >> 20}m"
    assert float(directive("proxy_read_timeout").rstrip("s")) > serve.request_timeout
    assert text.count("{") == text.count("}")
    for body in re.findall(r"return \d+ '(.*)';", text):
        assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
