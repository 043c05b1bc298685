"""deploy/: dashboard, alerts and scrape rules name only metrics and labels that /metrics has."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from support.http_server import serving

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
_SERIES = re.compile(r"\b((?:forkpoint_|vllm:)\w+)(?:\{([^}]*)\})?")
_GROUPING = re.compile(r"\bby \(([^)]*)\)")
# What Prometheus itself adds to each series.
_OF_PROMETHEUS = {"instance", "job"}


def dashboard_expressions() -> Iterator[str]:
    dashboard = json.loads((DEPLOY / "grafana/forkpoint.json").read_text("utf-8"))
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            yield target["expr"]
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]["query"]


def alert_rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text("utf-8"))["groups"]
    rules: list[dict[str, Any]] = group["rules"]
    return rules


@pytest.fixture(scope="module")
def labels_of() -> dict[str, set[str]]:
    """Labels of every series of a server that has answered one request and refused one."""
    with serving() as world:
        world.complete(prompt="hello", max_tokens=5)
        world.http.post("/v1/completions", json={"prompt": "hello", "max_tokens": -1})
        text = world.http.get("/metrics").text
    labels: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    return labels


@pytest.mark.parametrize(
    "expression",
    [*dashboard_expressions(), *(rule["expr"] for rule in alert_rules() if "up{" not in rule["expr"])],
)
def test_every_series_and_label_exists(expression: str, labels_of: dict[str, set[str]]) -> None:
    series = _SERIES.findall(expression)
    assert series
    for name, matchers in series:
        assert name in labels_of
        used = {matcher.partition("=")[0].rstrip("!") for matcher in matchers.split(",") if matcher}
        for grouping in _GROUPING.findall(expression):
            used |= {label.strip() for label in grouping.split(",")}
        assert used - _OF_PROMETHEUS <= labels_of[name]


def test_every_own_metric_but_vllms_aliases_is_on_the_dashboard(labels_of: dict[str, set[str]]) -> None:
    shown = {name for expression in dashboard_expressions() for name, _ in _SERIES.findall(expression)}
    bases = {re.sub(r"_(bucket|sum|count)$", "", name) for name in shown}
    own = {name for name in labels_of if name.startswith("forkpoint_") and not name.endswith("_created")}
    assert {re.sub(r"_(bucket|sum|count)$", "", name) for name in own} <= bases


def test_alerts_say_what_is_wrong_and_how_bad() -> None:
    for rule in alert_rules():
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert rule["annotations"]["summary"]


def test_prometheus_reads_the_rules_that_lie_beside_it() -> None:
    config = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text("utf-8"))
    for name in config["rule_files"]:
        assert (DEPLOY / "prometheus" / name).is_file()
    assert config["scrape_configs"][0]["job_name"] == "forkpoint"


def test_panels_do_not_overlap() -> None:
    panels = json.loads((DEPLOY / "grafana/forkpoint.json").read_text("utf-8"))["panels"]
    cells = [
        (x, y)
        for grid in (panel["gridPos"] for panel in panels)
        for x in range(grid["x"], grid["x"] + grid["w"])
        for y in range(grid["y"], grid["y"] + grid["h"])
    ]
    assert len(cells) == len(set(cells))
    assert len({panel["id"] for panel in panels}) == len(panels)
