"""The metrics of several nodes on one page."""

from prometheus_client.parser import text_string_to_metric_families

from mars_ray.serve.ingress.metrics_endpoint import joined

NODE = """# HELP ray_mars_forwards_total Forwards that wrote tokens.
# TYPE ray_mars_forwards_total counter
ray_mars_forwards_total{mode="exact",replica="a"} 5.0
# HELP ray_node_cpu_count Cores.
# TYPE ray_node_cpu_count gauge
ray_node_cpu_count 4.0
# HELP ray_mars_queue_seconds Waiting.
# TYPE ray_mars_queue_seconds histogram
ray_mars_queue_seconds_bucket{le="0.1",replica="a"} 1.0
ray_mars_queue_seconds_bucket{le="+Inf",replica="a"} 2.0
ray_mars_queue_seconds_count{replica="a"} 2.0
ray_mars_queue_seconds_sum{replica="a"} 0.5
"""


def test_families_of_several_nodes_are_joined():
    """Prometheus refuses a page on which a family appears twice; Ray's own are left out."""
    page = joined([NODE, NODE.replace('"a"', '"b"'), ""])
    families = list(text_string_to_metric_families(page))
    assert [family.name for family in families] == ["ray_mars_forwards", "ray_mars_queue_seconds"]
    forwards, queue = families
    assert {s.labels["replica"]: s.value for s in forwards.samples} == {"a": 5, "b": 5}
    assert len(queue.samples) == 8
    assert page.count("# TYPE ray_mars_forwards_total") == 1


def test_no_node_no_metrics():
    """An empty page is a valid one."""
    assert joined([]) == ""
