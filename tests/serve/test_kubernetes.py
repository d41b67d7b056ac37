"""The manifests for Kubernetes fit the server: paths, ports, flags, times, and the metrics that a picker reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml

from outrider.serve.app import PATHS
from outrider.serve.settings import ServeSettings
from tests.serve.conftest import Served
from tests.test_structure import ROOT, check_outrider

FOLDER = ROOT / "deploy" / "kubernetes"


def objects() -> dict[str, dict[str, Any]]:
    documents = [one for file in FOLDER.glob("*.yaml") for one in yaml.safe_load_all(file.read_text())]
    return {one["kind"]: one for one in documents}


def pod() -> dict[str, Any]:
    return objects()["Deployment"]["spec"]["template"]["spec"]


def seconds(probe: dict[str, Any]) -> int:
    return int(probe["periodSeconds"]) * int(probe["failureThreshold"])


def test_the_pool_and_the_service_select_the_pods_and_their_port() -> None:
    found = objects()
    labels = found["Deployment"]["spec"]["template"]["metadata"]["labels"]
    [container] = pod()["containers"]
    [port] = container["ports"]
    assert (
        found["Service"]["spec"]["selector"]
        == labels
        == found["Deployment"]["spec"]["selector"]["matchLabels"]
    )
    assert found["Service"]["spec"]["ports"][0]["targetPort"] == port["name"]
    pool = found["InferencePool"]
    assert pool["apiVersion"] == "inference.networking.k8s.io/v1"
    assert pool["spec"]["selector"]["matchLabels"] == labels
    assert pool["spec"]["targetPorts"] == [{"number": port["containerPort"]}]
    assert port["containerPort"] == ServeSettings().port
    assert {*pool["spec"]["endpointPickerRef"]} == {"name", "port", "failureMode"}


def test_probes_ask_for_health_and_wait_long_enough() -> None:
    [container] = pod()["containers"]
    probes = {name: container[f"{name}Probe"] for name in ("startup", "readiness", "liveness")}
    for probe in probes.values():
        assert probe["httpGet"] == {"path": "/health", "port": "http"} and "/health" in PATHS
    # A pod takes no requests long before it is restarted, and is not restarted while it loads.
    assert seconds(probes["readiness"]) < 30 < seconds(probes["liveness"]) < seconds(probes["startup"])


def test_the_pod_may_drain_and_its_command_is_one() -> None:
    [container] = pod()["containers"]
    args = container["args"]
    drain = float(args[args.index("--drain-seconds") + 1])
    assert pod()["terminationGracePeriodSeconds"] >= drain + 10
    check_outrider(["serve", *args])


@pytest.fixture
def asked() -> Iterator[list[str]]:
    yield objects()["InferencePool"]["metadata"]["annotations"]["outrider/picker-metrics"].split()


def test_a_server_shows_every_metric_that_the_picker_reads(
    serve_tiny: Callable[..., Served], asked: list[str]
) -> None:
    server = serve_tiny("--metrics-compat", "vllm", "--threads", "1", "--cache-bytes", "8M")
    text = server.get("/metrics").text
    assert len(asked) == 4
    for name in asked:
        assert any(line.startswith(f"{name}{{") for line in text.splitlines()), name
    [info] = [line for line in text.splitlines() if line.startswith("vllm:cache_config_info{")]
    assert 'block_size="16"' in info and 'num_gpu_blocks="0"' not in info and info.endswith(" 1")
    assert "lora_requests_info" not in text
