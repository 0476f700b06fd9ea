"""docs/observability.md against the code; rules and dashboard against PromQL, Grafana's types, and a real scrape."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from prometheus_client import REGISTRY

from resilient_executor.telemetry import names
from resilient_executor.telemetry.metrics import Metrics

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = DOCS / "observability.md"
ALERTS = DOCS / "monitoring" / "alerts.yaml"
DASHBOARD = DOCS / "monitoring" / "dashboard.json"
#: What Grafana puts in before it asks Prometheus.
GRAFANA = {"$__rate_interval": "5m", "$__interval": "1m", "$executor": ".*"}


def table(section: str) -> set[tuple[str, ...]]:
    """The rows of the first table below a heading, as tuples of cells without quotes."""
    text = PAGE.read_text().split(f"\n### {section}\n", 1)[1]
    lines = text.split("\n#", 1)[0].splitlines()
    rows = [line for line in lines if line.startswith("|")][2:]
    return {tuple(cell.strip().replace("`", "") for cell in row.strip("|").split("|")) for row in rows}


def plain(*cells: str) -> tuple[str, ...]:
    return tuple(cell.replace("`", "") for cell in cells)


def test_the_table_of_spans_is_the_codes() -> None:
    expected = {
        plain(name, row.parent, row.meaning, ", ".join(short(one) for one in row.attributes))
        for name, row in names.SPANS.items()
    }
    assert table("Spans") == expected


def test_the_table_of_attributes_is_the_codes() -> None:
    assert table("Attributes") == {plain(name, meaning) for name, meaning in names.ATTRIBUTES.items()}


def test_the_table_of_metrics_is_the_codes() -> None:
    expected = {
        plain(name, row.kind, row.unit, row.meaning, ", ".join(short(one) for one in row.attributes))
        for name, row in names.METRICS.items()
    }
    assert table("Metrics") == expected


def test_every_attribute_that_is_used_is_listed() -> None:
    used = {one for row in names.SPANS.values() for one in row.attributes}
    used |= {one for row in names.METRICS.values() for one in row.attributes}
    assert used <= set(names.ATTRIBUTES)


def short(attribute: str) -> str:
    return attribute.removeprefix("resilient_executor.")


# -- Prometheus and Grafana -------------------------------------------------------------------------------------------


def expressions(dashboard: dict[str, Any], alerts: dict[str, Any]) -> Iterator[str]:
    yield from (rule["expr"] for group in alerts["groups"] for rule in group["rules"])
    yield from (target["expr"] for panel in dashboard["panels"] for target in panel["targets"])
    yield from (one["expr"] for one in dashboard["annotations"]["list"])


@pytest.fixture(scope="module")
def scrape() -> dict[str, set[str]]:
    """What Prometheus sees: series -> labels."""
    reader = PrometheusMetricReader()
    provider = MeterProvider(metric_readers=[reader], shutdown_on_exit=False)
    metrics = Metrics(provider, "resilient_executor", "0", "scraped")
    metrics.silence = {0: 0.1}
    for name, row in names.METRICS.items():
        attributes: dict[str, Any] = {key: "x" for key, value in vars(names).items() if value in row.attributes}
        if row.kind == "histogram":
            metrics.record(name, 0.1, **attributes)
        elif row.kind == "counter":
            metrics.add(name, **attributes)
    seen: dict[str, set[str]] = {}
    for family in REGISTRY.collect():
        for sample in family.samples:
            seen.setdefault(sample.name, set()).update(sample.labels)
    provider.shutdown()
    return seen


def test_every_query_is_promql_over_series_that_exist(scrape: dict[str, set[str]]) -> None:
    found = list(expressions(json.loads(DASHBOARD.read_text()), yaml.safe_load(ALERTS.read_text())))
    assert len(found) > 20
    for expression in found:
        asked = expression
        for name, value in GRAFANA.items():
            asked = asked.replace(name, value)
        text = str(promql_parser.parse(asked))
        series = set(re.findall(r"\b((?:resilient_executor|rpc)_\w+)\{", text))
        assert series, expression
        assert series <= set(scrape), expression
        grouped = {label.strip() for labels in re.findall(r"by \(([^)]*)\)", text) for label in labels.split(",")}
        matched = set(re.findall(r"(\w+)(?:=~|=|!=)\"", text))
        known = set().union(*(scrape[one] for one in series))
        assert (grouped | matched) - {""} <= known, expression


def test_grafana_knows_every_field_of_the_dashboard() -> None:
    """Its SDK drops what it does not know, so a field that does not survive is a mistake."""
    register_default_plugins()
    ours = json.loads(DASHBOARD.read_text())
    theirs = json.loads(JSONEncoder().encode(Dashboard.from_json(ours)))
    assert list(differences(ours, theirs, "")) == []
    assert len({panel["id"] for panel in ours["panels"]}) == len(ours["panels"])


def differences(ours: Any, theirs: Any, where: str) -> Iterator[str]:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key, value in ours.items():
            yield from differences(value, theirs.get(key), f"{where}.{key}")
    elif isinstance(ours, list) and isinstance(theirs, list):
        for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            yield from differences(one, other, f"{where}[{number}]")
    elif ours != theirs:
        yield f"{where}: {ours!r} became {theirs!r}"


def test_rules_have_what_a_person_needs() -> None:
    rules = [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
    described = table("What to alert on")
    assert {rule["alert"] for rule in rules} == {row[0] for row in described}
    for rule in rules:
        assert set(rule["annotations"]) == {"summary", "description"}
        assert rule["labels"]["severity"] in ("critical", "warning", "info")


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is in Debian's package prometheus")
@pytest.mark.parametrize("arguments", [("check", "rules", "alerts.yaml"), ("test", "rules", "alerts.test.yaml")])
def test_prometheus_itself_takes_the_rules(arguments: tuple[str, ...]) -> None:
    done = subprocess.run(
        ["promtool", *arguments], cwd=ALERTS.parent, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
