"""Dashboard, alert rules and scrape configuration: valid, up to date, of metrics that exist."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import dashboard
import job_manifests
import pytest
import yaml
from deploy.manifests import ROOT, check, documents, example, of_kind, rendered
from ray.serve.metrics import REPLICA_TAG

MONITORING = ROOT / "deploy" / "monitoring"
ALERTS = [
    rule for group in documents(MONITORING / "alerts.yml")[0]["groups"] for rule in group["rules"]
]


def promtool(*words: str) -> None:
    """Of Debian's package prometheus."""
    if shutil.which("promtool") is None:
        pytest.skip("no promtool: apt-get install prometheus")
    done = subprocess.run(
        ["promtool", *words], capture_output=True, text=True, check=False, cwd=MONITORING
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_dashboard_is_what_its_script_writes():
    """Guards a dashboard edited by hand, and metrics that were renamed under it."""
    written = json.loads((MONITORING / "dashboard.json").read_text())
    assert written == dashboard.dashboard(), "run python tools/dashboard.py"


def test_a_metric_that_nobody_declares_is_refused(monkeypatch):
    """Guards a panel that stays empty for ever because of a typo."""
    wrong = dashboard.Panel("x", "short", "x", {"x": "rate(ray_mars_forward_total[5m])"})
    monkeypatch.setattr(dashboard, "PANELS", (*dashboard.PANELS, wrong))
    with pytest.raises(ValueError, match="ray_mars_forward_total"):
        dashboard.dashboard()


def test_a_metric_that_no_panel_shows_is_noticed(monkeypatch):
    """Guards a new metric that the dashboard forgets."""
    fewer = tuple(panel for panel in dashboard.PANELS if panel.title != "Pre-emptions per second")
    monkeypatch.setattr(dashboard, "PANELS", fewer)
    with pytest.raises(ValueError, match="ray_mars_num_preemptions_total"):
        dashboard.dashboard()


def test_alerts_name_metrics_that_exist():
    """Guards an alert that can never fire."""
    known = dashboard.exported() | dashboard.SERVE_METRICS
    for rule in ALERTS:
        unknown = dashboard.metrics_of(rule["expr"]) - known
        assert not unknown, f"{rule['alert']}: {unknown}"


def test_alerts_look_at_one_service():
    """Guards an alert of one release for the replicas of another: names of metrics are the same."""
    for rule in ALERTS:
        named = re.findall(r"\b(?:ray_\w+|up)\b({job=\"ray\")?", rule["expr"])
        assert named, rule["alert"]
        assert all(named), rule["alert"]


def test_every_alert_says_what_to_do():
    """Guards a page at night that leads to a heading which is not there."""
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["site_url"]
    text = (ROOT / "docs" / "operate" / "monitoring.md").read_text()
    headings = {_anchor(heading) for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)}
    for rule in ALERTS:
        page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert page == f"{site}operate/monitoring.html"
        assert anchor in headings, rule["alert"]


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_rules_and_scrape_configuration_pass_promtool():
    """Guards a rule that Prometheus does not load, with all the others of its file."""
    promtool("check", "rules", "alerts.yml")
    promtool("check", "config", "prometheus.yml")


def test_documented_scrapes_pass_promtool(tmp_path):
    """Guards a parameter that Prometheus does not know."""
    page = (ROOT / "docs" / "operate" / "monitoring.md").read_text()
    (text,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "prometheus.yml").write_text(text)
    promtool("check", "config", str(tmp_path / "prometheus.yml"))


def test_each_alert_fires_on_its_condition_and_is_quiet_otherwise():
    """A made-up history that fails in every way, one that is well, and one that ends."""
    promtool("test", "rules", "alerts_test.yml")
    (cases,) = documents(MONITORING / "alerts_test.yml")
    fired = {
        case["alertname"]
        for test in cases["tests"]
        for case in test["alert_rule_test"]
        if case["exp_alerts"]
    }
    assert fired == {rule["alert"] for rule in ALERTS}


def test_starts_are_tested_as_serve_counts_them():
    """Guards an alert on a counter that climbs: each replica has its own, which stays at 1."""
    (cases,) = documents(MONITORING / "alerts_test.yml")
    starts = [
        (series["series"], series["values"].split())
        for test in cases["tests"]
        for series in test["input_series"]
        if "replica_starts_total" in series["series"]
    ]
    assert len({series for series, _ in starts}) == len(starts) > 0
    for series, values in starts:
        assert f"{REPLICA_TAG}=" in series
        assert all(value.startswith(("1x", "_x")) for value in values), series


def test_the_chart_brings_rules_and_dashboard():
    """Guards alerts that differ between a machine and Kubernetes, and a dashboard that Grafana's
    sidecar does not find."""
    release = rendered(example("object-store"))
    (rule,) = of_kind(release, "PrometheusRule")
    (alerts,) = documents(MONITORING / "alerts.yml")
    for alert in alerts["groups"][0]["rules"]:
        alert["expr"] = alert["expr"].replace('job="ray"', 'job="default/mars"')
        alert["labels"] |= {"namespace": "default", "release": "mars"}
    assert rule["spec"] == alerts
    (shown,) = of_kind(release, "ConfigMap")
    check(shown)
    assert shown["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert shown["data"]["dashboard.json"] == (MONITORING / "dashboard.json").read_text()
    for document in (rule, shown, *of_kind(release, "PodMonitor")):
        assert document["metadata"]["labels"]["release"] == "kube-prometheus-stack"


def test_compose_mounts_files_that_are_there():
    """Guards a directory that Docker makes where a file was meant."""
    sources = [volume.partition(":")[0] for volume in mounts() if isinstance(volume, str)]
    files = [source for source in sources if source.startswith(".")]
    assert len(files) == 5
    for source in files:
        assert (ROOT / "deploy" / source).is_file(), source


def test_compose_makes_no_directories_of_the_machine():
    """Guards a /tmp/ray of root's, in which nobody else can start Ray."""
    short = [volume for volume in mounts() if isinstance(volume, str)]
    assert not [volume for volume in short if volume.startswith(("/", "~"))]
    (ray,) = (volume for volume in mounts() if isinstance(volume, dict))
    assert ray["source"] == ray["target"] == "/tmp/ray"
    assert ray["read_only"] is True
    assert ray["bind"] == {"create_host_path": False}


def mounts() -> list[str | dict[str, Any]]:
    compose = yaml.safe_load((ROOT / "deploy" / "docker-compose.yaml").read_text())
    return [volume for service in compose["services"].values() for volume in service["volumes"]]


def test_compose_understands_its_file():
    """Guards keys that Docker refuses."""
    check = [Path(sys.executable).parent / "check-jsonschema"]
    schema = ["--builtin-schema", "vendor.compose-spec"]
    path = ROOT / "deploy" / "docker-compose.yaml"
    done = subprocess.run([*check, *schema, path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_scraping_reads_what_ray_writes_down():
    """Guards a path of Ray's that changed; tests/serve/test_prometheus.py has the real thing."""
    (config,) = documents(MONITORING / "prometheus.yml")
    (scrape,) = config["scrape_configs"]
    (path,) = scrape["file_sd_configs"][0]["files"]
    assert Path(path).name == "prom_metrics_service_discovery.json"
    assert scrape["job_name"] == "ray"


def test_runbooks_follow_the_site(monkeypatch, tmp_path):
    """Guards addresses that are written for one place and published at another."""
    settings = (ROOT / "mkdocs.yml").read_text()
    site = yaml.safe_load(settings)["site_url"]
    (tmp_path / "mkdocs.yml").write_text(settings.replace(site, "https://docs.test/mars/"))
    monkeypatch.setattr(job_manifests, "ROOT", tmp_path)
    text = job_manifests.with_runbooks((MONITORING / "alerts.yml").read_text())
    (group,) = yaml.safe_load(text)["groups"]
    assert {rule["annotations"]["runbook_url"].partition("#")[0] for rule in group["rules"]} == {
        "https://docs.test/mars/operate/monitoring.html"
    }
