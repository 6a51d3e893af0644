"""docs/alerts.yml against a live scrape: every metric and every label that an alert asks for exists."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.serve.api.live_server import ROOT, LiveServer, chat

RULES: list[dict[str, Any]] = [
    rule
    for group in yaml.safe_load((ROOT / "docs" / "alerts.yml").read_text("utf-8"))["groups"]
    for rule in group["rules"]
]
FUNCTIONS = {"absent", "and", "by", "histogram_quantile", "increase", "or", "rate", "sum"}
OF_THE_SCRAPER = {"instance", "job"}
METRIC = re.compile(r"\b(?:vllm|foretoken):\w+")
DURATION = re.compile(r"\d+[smh]")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Label names by sample name, after requests that went well and badly."""
    with LiveServer(tmp_path_factory.mktemp("alerts")) as live, live.client() as http:
        http.post("/v1/chat/completions", json=chat("!say:abcdef!"))
        http.post("/v1/chat/completions", json=chat("!error:0!"))
        text = httpx.get(live.base + "/metrics", trust_env=False).text
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def test_alerts_are_rules_with_a_summary_and_an_action() -> None:
    assert len(RULES) >= 10
    assert len({rule["alert"] for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert set(rule["annotations"]) == {"summary", "action"}
        assert DURATION.fullmatch(rule.get("for", "1m"))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_an_alert_asks_for_what_the_server_offers(rule: dict[str, Any], page: dict[str, set[str]]) -> None:
    expression: str = rule["expr"]
    assert balanced(expression)
    metrics = METRIC.findall(expression)
    assert metrics
    for metric in metrics:
        assert metric in page, metric
    for metric, selector in re.findall(r"((?:vllm|foretoken):\w+)\{([^}]*)\}", expression):
        for name, _ in re.findall(r'(\w+)\s*(=~|!~|!=|=)\s*"', selector):
            assert name in page[metric], (metric, name)
    for names in re.findall(r"by \(([^)]*)\)", expression):
        assert {name.strip() for name in names.split(",")} <= OF_THE_SCRAPER | {"le"}
    bare = re.sub(r"\[[^]]*\]|\{[^}]*\}|by \([^)]*\)", " ", METRIC.sub(" ", expression))
    assert set(re.findall(r"[a-z_]{2,}", bare)) <= FUNCTIONS
    for window in re.findall(r"\[([^]]*)\]", expression):
        assert DURATION.fullmatch(window)


def balanced(expression: str) -> bool:
    """Whether every bracket is closed by its own kind."""
    closes = {")": "(", "]": "[", "}": "{"}
    opened: list[str] = []
    for character in re.sub(r'"[^"]*"', "", expression):
        if character in "([{":
            opened.append(character)
        elif character in closes and (not opened or opened.pop() != closes[character]):
            return False
    return not opened


def test_the_check_itself_sees_a_missing_metric(page: dict[str, set[str]]) -> None:
    rule = {"expr": "rate(foretoken:no_such_thing_total[5m]) > 0"}
    with pytest.raises(AssertionError):
        test_an_alert_asks_for_what_the_server_offers(rule, page)
    assert not balanced("sum(rate(a[5m])")


def test_the_file_is_named_where_people_look() -> None:
    assert Path(ROOT / "docs" / "alerts.yml").is_file()
    assert "alerts.yml" in (ROOT / "docs" / "promises.md").read_text("utf-8")
