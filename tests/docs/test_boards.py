"""docs/grafana.json and docs/prometheus.yml fit the server: every metric and label they name is in a live scrape."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.conftest import ROOT
from tests.serve.api.live_server import LiveServer, chat

# Of PromQL: what stands before a bracket, and words between operands.
WORDS = {"sum", "min", "max", "rate", "increase", "histogram_quantile", "by", "ignoring", "group_left"}


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Sample name to the labels it has, after one answered and one refused request."""
    with LiveServer(tmp_path_factory.mktemp("board")) as server, server.client() as http:
        http.post("/v1/chat/completions", json=chat("!say:hello!")).raise_for_status()
        assert http.post("/v1/chat/completions", json={}).status_code == 400
        text = httpx.get(server.base + "/metrics", trust_env=False).text
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


@pytest.fixture(scope="module")
def board() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((ROOT / "docs" / "grafana.json").read_text(encoding="utf-8"))
    return loaded


def expressions(board: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """(where, PromQL) of every panel and variable."""
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            (metric,) = re.findall(r"^label_values\(([\w:]+), \w+\)$", variable["query"]["query"])
            yield variable["name"], metric


def test_every_metric_and_label_of_the_board_exists(board: dict[str, Any], scraped: dict[str, set[str]]) -> None:
    checked = 0
    for where, expression in expressions(board):
        selectors = re.findall(r"([a-zA-Z_][\w:]*)\{([^}]*)\}", expression)
        bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]|\((?:le|position|code|block_length|finished_reason)\)", "", expression)
        names = set(re.findall(r"(?<![\w.$])[a-zA-Z_][\w:]*", bare)) - WORDS
        assert names, where
        assert names <= set(scraped), (where, names - set(scraped))
        for name, matchers in selectors:
            labels = set(re.findall(r"(\w+)=~?\"", matchers)) - {"instance", "job"}  # Prometheus adds these two
            assert labels <= scraped[name], (where, name, labels - scraped[name])
        for label in re.findall(r"\b(?:by|ignoring) \((\w+)\)", expression):
            assert any(label in scraped[name] for name, _ in selectors), (where, label)
        checked += 1
    assert checked > 30


def test_the_check_would_notice_a_metric_that_is_gone(board: dict[str, Any], scraped: dict[str, set[str]]) -> None:
    gone = {name: labels for name, labels in scraped.items() if name != "vllm:spec_decode_num_drafts_total"}
    with pytest.raises(AssertionError, match="num_drafts_total"):
        test_every_metric_and_label_of_the_board_exists(board, gone)


def test_panels_have_their_own_ids_places_and_the_chosen_data_source(board: dict[str, Any]) -> None:
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = set(
            itertools.product(
                range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"])
            )
        )  # fmt: skip
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
        for target in panel.get("targets", ()):
            assert target["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
            assert target["expr"].count("(") == target["expr"].count(")")
            assert target["expr"].count("{") == target["expr"].count("}")


def test_the_prometheus_sample_scrapes_where_the_server_answers() -> None:
    config = yaml.safe_load(Path(ROOT / "docs" / "prometheus.yml").read_text(encoding="utf-8"))
    (job,) = config["scrape_configs"]
    assert job["metrics_path"] == "/metrics"
    assert job["static_configs"] == [{"targets": ["127.0.0.1:8000"]}]
