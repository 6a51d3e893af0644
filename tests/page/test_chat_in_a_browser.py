"""Chatting in Chromium: streams, stops, marks that equal the engine's trace, and speculation off beside on."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver.common.keys import Keys

from tests.e2e.real_server import RealServer
from tests.page.conftest import Opener
from tests.serve.api.live_server import LiveServer, eventually

pytestmark = pytest.mark.browser

COPYING = (
    "Repeat this list three times, nothing else: red, green, blue, yellow, violet, red, green, blue, yellow, violet."
)
MARKS = """
const seen = {};
for (const token of [...document.querySelectorAll(".answer")].at(-1).querySelectorAll(".body .t"))
  (seen[token.dataset.s] ??= new Set()).add(token.dataset.i);
return Object.fromEntries(Object.entries(seen).map(([source, ids]) => [source, ids.size]));
"""


def last_trace(folder: Path) -> dict[str, Any]:
    (file,) = folder.iterdir()
    line: dict[str, Any] = json.loads(file.read_text().splitlines()[-1])
    return line


def test_an_answer_appears_while_it_is_written(scripted: LiveServer, open_page: Opener) -> None:
    page = open_page(scripted.base)
    told = "some words that arrive a few at a time"
    page.ask(f"!say:{told}! !slow:0.05! !chunk:3!", wait=False)
    lengths = page.seen_until(lambda: len(page.text(".answer .body")), lambda: not page.busy, "the answer did not end")
    assert len(lengths & set(range(1, len(told)))) >= 3
    assert page.text(".answer .body") == told
    assert page.one(".answer").get_attribute("aria-busy") == "false"


def test_marks_and_rounds_equal_the_trace(model_server: RealServer, trace_dir: Path, open_page: Opener) -> None:
    page = open_page(model_server.base)
    page.ask(COPYING)
    trace = last_trace(trace_dir)
    kept: Counter[str] = Counter({"target": trace["completion_tokens"]})
    for source, _, accepted in trace["rounds"]:
        if accepted:
            kept[source] += accepted
            kept["target"] -= accepted
    assert kept["block"] > 0
    assert kept["lookup"] > 0
    page.one(".answer footer button").click()  # every token, also those without text
    assert page.run(MARKS) == dict(kept)
    foot = {source: page.text(f"[data-count={source}]").split()[1] for source in kept}
    assert foot == {source: str(count) for source, count in kept.items()}
    labels = page.run("return [...document.querySelectorAll('.round[data-label]')].map((r) => r.dataset.label)")
    assert labels == [f"{accepted}/{drafted}" for _, drafted, accepted in trace["rounds"] if drafted]
    assert len(page.all(".round")) == len(trace["rounds"]) + 1  # and what the prompt pass gave
    # The tiles and the chart follow from the metrics.
    page.until(lambda: page.text("#tile-tau") != "–", "no acceptance length")
    assert 1 < float(page.text("#tile-tau")) <= 6
    assert 1 < float(page.text("#tile-block")) <= 5
    page.until(lambda: page.text("#tile-queue") == "0 · 0", "the queue is not empty")
    page.until(lambda: "position 1 " in str(page.one("#chart").get_attribute("aria-label")), "no chart")
    assert page.all("#chart circle")
    assert page.text("#model") == "smollm2-135m-instruct"


def test_off_and_on_side_by_side_give_equal_texts(model_server: RealServer, trace_dir: Path, open_page: Opener) -> None:
    page = open_page(model_server.base)
    page.one("#settings summary").click()
    page.run("document.getElementById('max-tokens').value = '40'")
    page.one("#prompt").send_keys("Count from one to thirty in words.")
    page.one("#compare").click()
    page.until(lambda: page.all(".result p"), "the comparison did not end")
    off, on = (half.text for half in page.all(".half .body"))
    assert off == on != ""
    assert page.one(".result p").get_attribute("data-equal") == "true"
    assert page.all(".half:first-child .body .t:not([data-s=target])") == []
    assert page.all(".half:last-child .body .t:not([data-s=target])") != []
    (file,) = trace_dir.iterdir()
    first, second = (json.loads(line) for line in file.read_text().splitlines()[-2:])
    assert first["output_ids"] == second["output_ids"]
    assert f"equal, token by token ({len(first['output_ids'])})" in page.text(".result p")
    assert {drafted for _, drafted, _ in first["rounds"]} == {0}
    assert any(drafted for _, drafted, _ in second["rounds"])
    assert (first["seed"], first["cached_tokens"]) == (second["seed"], second["cached_tokens"])
    # What was answered is part of the conversation, once.
    page.run("document.getElementById('max-tokens').value = '4'")
    page.ask("And now?")
    said = ",".join(str(i) for i in second["output_ids"][:-1])
    assert ",".join(str(i) for i in last_trace(trace_dir)["prompt_ids"]).count(said) == 1
    # Without a prompt of its own, a comparison takes the last one.
    page.one("#compare").click()
    page.until(lambda: len(page.all(".result p")) == 2, "the second comparison did not end")
    assert page.text(".turn:last-child .question") == "You: And now?"


def test_stop_ends_the_request_and_keeps_the_text(scripted: LiveServer, open_page: Opener) -> None:
    page = open_page(scripted.base)
    page.run("document.getElementById('max-tokens').value = '60'")
    page.ask(f"!say:{'word ' * 20}! !slow:0.05!", wait=False)
    page.until(lambda: len(page.text(".answer .body")) > 6, "no text")
    cancels = len(scripted.messages("cancel"))
    page.one("#send").click()
    page.until(lambda: not page.busy, "it did not stop")
    assert page.text(".answer .stopped") == "Stopped."
    assert page.text(".answer .body").startswith("word w")
    eventually(lambda: len(scripted.messages("cancel")) == cancels + 1)
    page.ask(f"!say:{'more ' * 20}! !slow:0.05!", wait=False)
    page.until(lambda: len(page.text(".answer .body")) > 6, "no text")
    page.press(Keys.ESCAPE)
    page.until(lambda: not page.busy, "Escape did not stop it")
    page.ask("!say:fine!")
    assert page.text(".answer .body") == "fine"
    prompt = bytes(i for i in scripted.messages("generate")[-1]["prompt_ids"] if i < 256).decode()
    assert "assistant\nword w" in prompt  # what was kept is what the model is told it said
    assert "assistant\nmore m" in prompt


def test_a_new_chat_stops_the_old_one_and_forgets_it(scripted: LiveServer, open_page: Opener) -> None:
    page = open_page(scripted.base)
    page.ask(f"!say:{'last ' * 20}! !slow:0.05!", wait=False)
    page.until(lambda: len(page.text(".turn:last-child .body")) > 6, "no text")
    page.one("#new").click()
    page.until(lambda: not page.busy, "a new chat did not stop the old one")
    assert page.all(".turn") == []
    page.ask("!say:new!")
    prompt = bytes(i for i in scripted.messages("generate")[-1]["prompt_ids"] if i < 256).decode()
    assert prompt.count("user\n") == 1  # nothing of the old chat is in the new one


def test_settings_reach_the_request(scripted: LiveServer, open_page: Opener) -> None:
    page = open_page(scripted.base)
    page.one("#settings summary").click()
    page.one("#system").send_keys("Be brief.")
    for field, value in (("#temperature", "0.7"), ("#max-tokens", "5")):
        page.one(field).clear()
        page.one(field).send_keys(value)
    page.ask("!say:hello there!")
    params = scripted.messages("generate")[-1]
    assert (params["params"]["temperature"], params["params"]["max_tokens"]) == (0.7, 5)
    assert params["params"]["provenance"] is True
    assert b"Be brief." in bytes(i for i in params["prompt_ids"] if i < 256)
    assert page.text(".answer .body") == "hello"
    assert "(the limit)" in page.text(".answer footer")


def test_a_refusal_is_shown_as_the_server_words_it(scripted: LiveServer, open_page: Opener) -> None:
    page = open_page(scripted.base)
    page.run("document.getElementById('max-tokens').value = '100000'")
    page.ask("!say:x!")
    assert page.one(".answer .failed").get_attribute("role") == "alert"
    assert "context limit is 512" in page.text(".answer .failed")
    page.run("document.getElementById('max-tokens').value = '20'")
    page.one(".again").click()
    page.until(lambda: page.text(".answer .body") == "x", "no answer after the second try")
    page.collect()
    (complaint,) = page.complaints  # the browser's own line about the 400
    assert "400" in complaint
    page.complaints.clear()
