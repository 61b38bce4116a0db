"""The page of metrics: whose it is, under which names, and what it leaves out."""

import re
from pathlib import Path

import dashboard
import pytest
from prometheus_client.parser import text_string_to_metric_families
from serve.vllm_queries import QUERIES

from mars_ray.serve.ingress.metrics import SAME_AS_VLLM, page_of

RAYS = 'NodeAddress="10.0.0.1",SessionName="session_1",WorkerId="a",otel_scope_name="ray._private"'
SERVES = 'application="mars-ray",deployment="Replica-m",replica="one"'
OURS = f'{RAYS},{SERVES},model_name="m"'
NODE = f"""# HELP ray_mars_num_requests_running Sequences in the batch.
# TYPE ray_mars_num_requests_running gauge
ray_mars_num_requests_running{{{OURS}}} 2.0
# HELP ray_mars_forwards_total Forwards that wrote tokens.
# TYPE ray_mars_forwards_total counter
ray_mars_forwards_total{{{OURS},mode="exact"}} 5.0
# HELP ray_mars_prompt_tokens_total Tokens of prompts.
# TYPE ray_mars_prompt_tokens_total counter
ray_mars_prompt_tokens_total{{{OURS}}} 7.0
# HELP ray_node_cpu_count Cores.
# TYPE ray_node_cpu_count gauge
ray_node_cpu_count 4.0
# HELP ray_mars_request_queue_time_seconds Waiting.
# TYPE ray_mars_request_queue_time_seconds histogram
ray_mars_request_queue_time_seconds_bucket{{{OURS},mode="exact",le="0.1"}} 1.0
ray_mars_request_queue_time_seconds_bucket{{{OURS},mode="exact",le="+Inf"}} 2.0
ray_mars_request_queue_time_seconds_count{{{OURS},mode="exact"}} 2.0
ray_mars_request_queue_time_seconds_sum{{{OURS},mode="exact"}} 0.5
ray_mars_request_queue_time_seconds_bucket{{{OURS},mode="verified",le="0.1"}} 4.0
ray_mars_request_queue_time_seconds_bucket{{{OURS},mode="verified",le="+Inf"}} 4.0
ray_mars_request_queue_time_seconds_count{{{OURS},mode="verified"}} 4.0
ray_mars_request_queue_time_seconds_sum{{{OURS},mode="verified"}} 0.1
# HELP ray_serve_application_status State.
# TYPE ray_serve_application_status gauge
ray_serve_application_status{{application="mars-ray"}} 6.0
# HELP ray_serve_http_request_latency_ms Serve's own.
# TYPE ray_serve_http_request_latency_ms gauge
ray_serve_http_request_latency_ms{{application="mars-ray"}} 1.0
"""
OTHER = NODE.replace('"one"', '"two"')


def samples(page: str) -> dict[str, list]:
    """By metric, as a scraper reads the page."""
    return {family.name: family.samples for family in text_string_to_metric_families(page)}


def test_vllms_names_with_vllms_labels():
    """Sums over modes, by model and replica; what vLLM has not keeps its name. Guards a dashboard
    with a line for each mode, and one that divides a mode's sum by another one's count."""
    found = samples(page_of([NODE], "vllm"))
    (running,) = found["vllm:num_requests_running"]
    assert (running.labels, running.value) == ({"replica": "one", "model_name": "m"}, 2)
    assert [sample.value for sample in found["vllm:prompt_tokens"]] == [7]
    queue = {
        (sample.name.rpartition("_")[2], sample.labels.get("le")): sample.value
        for sample in found["vllm:request_queue_time_seconds"]
    }
    sums = {("bucket", "0.1"): 5, ("bucket", "+Inf"): 6, ("count", None): 6, ("sum", None): 0.6}
    assert queue == pytest.approx(sums)
    assert found["ray_mars_forwards"][0].labels["mode"] == "exact"
    assert not [name for name in found if name.startswith("ray_mars_num")]


def test_the_nodes_own_names_without_rays_labels():
    """For this project's dashboard and alerts. Guards a page that is mostly Ray's: labels of
    processes, and metrics that nobody asked for."""
    found = samples(page_of([NODE], "ray"))
    assert set(found) == {
        "ray_mars_num_requests_running",
        "ray_mars_forwards",
        "ray_mars_prompt_tokens",
        "ray_mars_request_queue_time_seconds",
        "ray_serve_application_status",
    }
    (forwards,) = found["ray_mars_forwards"]
    assert forwards.labels == {
        "application": "mars-ray",
        "deployment": "Replica-m",
        "replica": "one",
        "model_name": "m",
        "mode": "exact",
    }
    assert len(found["ray_mars_request_queue_time_seconds"]) == 8


@pytest.mark.parametrize("names", ["vllm", "ray"])
def test_nodes_are_joined(names):
    """Prometheus refuses a page on which a family appears twice."""
    page = page_of([NODE, OTHER, ""], names)
    forwards = samples(page)["ray_mars_forwards"]
    assert {s.labels["replica"]: s.value for s in forwards} == {"one": 5, "two": 5}
    types = [line for line in page.splitlines() if line.startswith("# TYPE")]
    assert len(types) == len(set(types)) == 5


def test_a_replica_that_is_gone_is_not_on_the_page():
    """Ray keeps its counts for as long as the node lives. Guards a page that grows with every
    replica that ever was; what keys have used is the ingress's, and stays."""
    gone = "\n".join(line for line in OTHER.splitlines() if "num_requests_running" not in line)
    key = 'ray_mars_key_requests_total{deployment="Ingress",replica="x",model_name="m"} 3.0'
    kind = "# TYPE ray_mars_key_requests_total counter"
    found = samples(page_of([NODE, f"{gone}\n{kind}\n{key}\n"], "ray"))
    assert {s.labels["replica"] for s in found["ray_mars_forwards"]} == {"one"}
    assert len(found["ray_mars_request_queue_time_seconds"]) == 8
    assert [s.value for s in found["ray_mars_key_requests"]] == [3]


def test_processes_of_one_name_are_added_up():
    """Ray's labels alone tell them apart. Guards a page with the same series twice."""
    another = NODE.replace('WorkerId="a"', 'WorkerId="b"')
    found = samples(page_of([NODE, another], "ray"))
    assert [s.value for s in found["ray_mars_prompt_tokens"]] == [14]
    assert [s.value for s in found["ray_serve_application_status"]] == [6]


def test_names_stay_as_they_were_written():
    """Escapes in a label are not this page's to undo."""
    odd = NODE.replace('model_name="m"', r'model_name="a \"b\", {c}\\"')
    (running,) = samples(page_of([odd], "vllm"))["vllm:num_requests_running"]
    assert running.labels["model_name"] == 'a "b", {c}\\'


def test_no_node_no_metrics():
    """An empty page is a valid one."""
    assert page_of([], "vllm") == ""


def test_vllms_dashboard_finds_its_metrics():
    """Each that it asks for is declared here and renamed. Guards a metric that is renamed, or that
    vLLM has and nobody declares; test_prometheus.py asks the real thing."""
    asked = {name for query in QUERIES for name in re.findall(r"vllm:(\w+)", query)}
    assert len(asked) > 15
    declared = {name.removeprefix("ray_mars_") for name in dashboard.exported()}
    assert asked <= declared
    family = {name: re.sub(r"_(bucket|sum|count)$", "", name) for name in asked}
    assert set(family.values()) <= SAME_AS_VLLM
    assert {name for name in SAME_AS_VLLM if not {name, f"{name}_sum"} & declared} == set()


def test_the_table_says_which_names_are_vllms():
    """Guards documentation of a name that no page has."""
    page = (Path(__file__).parents[2] / "docs" / "operate" / "monitoring.md").read_text()
    said = set(re.findall(r"^\| `mars_(\w+)` \| yes \|", page, re.MULTILINE))
    assert said == {name.removesuffix("_total") for name in SAME_AS_VLLM}
