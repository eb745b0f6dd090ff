"""The documentation, the dashboard and the alerts name the metrics that there are."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml

from datastreamer.metrics.exposition import LISTED_CLIENTS, Tally, exposition_parts
from datastreamer.metrics.names import METRICS
from datastreamer.server.metrics import REASONS
from datastreamer.server.session import FAILED
from tests.programs import needs

ROOT = Path(__file__).resolve().parent.parent
OPERATING = (ROOT / "docs" / "OPERATING.md").read_text()
DASHBOARD = ROOT / "contrib" / "grafana" / "datastreamer.json"
PROMETHEUS = ROOT / "contrib" / "prometheus"

NAME = re.compile(r"\b(?:datastreamer|process)_\w+")


def histogram_of(name: str, values: Iterable[float]) -> Any:
    tally = Tally(name)
    for value in values:
        tally.add(value)
    return tally.histogram()


def series() -> set[str]:
    """The names that a query may have: those of samples, as they are exposed."""
    samples: Any = {
        name: [
            (
                ["x"] * len(metric.labels),
                histogram_of(name, [1]) if metric.bounds else 1,
            )
        ]
        for name, metric in METRICS.items()
    }
    parts = exposition_parts({"time": 0.0, "samples": samples, "clients": []})
    text = b"".join(parts).decode()
    return {line.split("{")[0].split(" ")[0] for line in text.splitlines() if line[0] != "#"}


def expressions(dashboard: Any) -> list[str]:
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    return [*queries, *(v["query"]["query"] for v in dashboard["templating"]["list"][1:])]


def test_the_table_is_the_code() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| ([\w, ]*) \| (.*) \|$", OPERATING, re.MULTILINE)
    assert rows == [
        (name, metric.kind, ", ".join(metric.labels), metric.help)
        for name, metric in METRICS.items()
    ]
    assert f"Only the {LISTED_CLIENTS} clients" in OPERATING


@pytest.mark.parametrize("name", METRICS)
def test_names_are_as_prometheus_wants_them(name: str) -> None:
    metric = METRICS[name]
    assert re.fullmatch(r"(datastreamer|process)(_[a-z]+)+", name)
    assert name.endswith("_total") == (metric.kind == "counter")
    assert ("histogram" in metric.kind) == bool(metric.bounds)
    assert list(metric.bounds) == sorted(set(metric.bounds))
    assert not {"le", "instance", "job"} & set(metric.labels)


def test_the_dashboard_shows_what_there_is() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    named = {name for text in expressions(dashboard) for name in NAME.findall(text)}
    assert named <= series()
    shown = {re.sub("_(bucket|count|sum)$", "", name) for name in named}
    assert shown == set(METRICS)


def test_the_alerts_are_about_what_there_is() -> None:
    text = (PROMETHEUS / "datastreamer.rules.yml").read_text()
    named = {
        name
        for line in text.splitlines()
        if not line.lstrip().startswith(("#", "- name"))
        for name in NAME.findall(line)
    }
    assert len(named) > 5
    assert named <= series()


@needs("promtool")
@pytest.mark.parametrize(
    "words",
    [
        ("check", "config", "prometheus.yml"),
        ("check", "rules", "datastreamer.rules.yml"),
        ("test", "rules", "datastreamer.rules.test.yml"),
    ],
    ids=" ".join,
)
def test_prometheus_takes_them(words: tuple[str, ...]) -> None:
    subprocess.run(["promtool", *words], cwd=PROMETHEUS, check=True)


def test_every_alert_is_tried() -> None:
    rules = yaml.safe_load((PROMETHEUS / "datastreamer.rules.yml").read_text())
    trials = yaml.safe_load((PROMETHEUS / "datastreamer.rules.test.yml").read_text())
    alerts = {rule["alert"] for group in rules["groups"] for rule in group["rules"]}
    raised = {
        trial["alertname"]
        for test in trials["tests"]
        for trial in test["alert_rule_test"]
        if trial.get("exp_alerts")
    }
    assert raised == alerts
    fed = {series["series"] for test in trials["tests"] for series in test["input_series"]}
    assert {name.partition("{")[0] for name in fed} <= series() | {"up"}


def test_labels_that_alerts_name_are_told() -> None:
    # One that is not there from the beginning raises no alert when it first is.
    text = (PROMETHEUS / "datastreamer.rules.yml").read_text()
    named = set(re.findall(r"(\w+_total)\{(\w+)=\"(\w+)\"\}", text))
    assert named == {("datastreamer_connections_ended_total", "reason", FAILED)}
    assert FAILED in REASONS
