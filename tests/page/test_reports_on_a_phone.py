"""The reports of a sweep and of acceptance on a narrow screen: charts fit it, text wraps, nothing is fetched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver import Chrome

from eval import acceptance_report, predict, sweep
from tests.conftest import ROOT
from tests.eval.stub_server import WordCounter, running_stub

PHONE = {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True}
LOOK = """
const wide = [...document.querySelectorAll("p, h1, h2, img")].filter((one) => one.getBoundingClientRect().right > 390);
return {
  page: document.documentElement.scrollWidth,
  wide: wide.map((one) => one.textContent || one.alt),
  charts: [...document.images].map((one) => [one.complete, one.clientWidth, one.naturalWidth, one.alt]),
  type: [...document.querySelectorAll("p, td, th")].map((one) => parseFloat(getComputedStyle(one).fontSize)),
  fetched: performance.getEntriesByType("resource").map((one) => one.name).filter((name) => !name.startsWith("data:")),
};
"""


def look(chrome: Chrome, path: Path) -> dict[str, Any]:
    chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", PHONE)
    try:
        chrome.get(path.as_uri())
        found: dict[str, Any] = chrome.execute_script(LOOK)
    finally:
        chrome.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    return found


@pytest.mark.browser
def test_reports_can_be_read_on_a_phone(chrome: Chrome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "TokenizerCounter", lambda folder: WordCounter())
    prediction, out, page = tmp_path / "prediction.json", tmp_path / "run", tmp_path / "acceptance.html"
    assert predict.main(["--card", "h200", "--json", str(prediction)]) == 0
    with running_stub(first_delay=0.01, gap=0.002) as (url, _):
        common = ["--url", url, "--model-dir", "any", "--out", str(out), "--prediction", str(prediction), "--quick"]
        sizes = ["--seconds", "0.2", "--concurrency", "1", "2", "--prompt", "64", "--output", "8"]
        assert sweep.main([*common, *sizes]) == 0
    traces = ROOT / "eval" / "notebooks" / "fixture" / "traces.jsonl"
    assert acceptance_report.main([str(traces), "--html", str(page)]) == 0
    for path, charts in ((out / "report.html", 2), (page, 5)):
        found = look(chrome, path)
        assert found["page"] == PHONE["width"]
        assert not found["wide"]
        assert len(found["charts"]) >= charts
        # A chart is drawn at least as fine as it is shown, and shown as wide as the text.
        assert all(done and 300 < shown <= drawn and alt for done, shown, drawn, alt in found["charts"])
        assert min(found["type"]) >= 13
        assert not found["fetched"]
