"""Requests made from /openapi.json, within its bounds and just outside of them, and replies checked against it.

The document is a promise: statuses, content types and shapes of every reply are in it, a body that it allows is not a
server error, and a body that it forbids is refused.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import Phase, given
from schemathesis import checks
from schemathesis.specs.openapi import checks as openapi_checks

from tests.e2e.real_server import RealServer
from tests.fuzz.scale import fuzz
from tests.tiny_models import write_model

# A body within the schema can still be refused: context and vocabulary are the model's, some fields exclude others.
CHECKS = (
    checks.not_a_server_error,
    openapi_checks.status_code_conformance,
    openapi_checks.content_type_conformance,
    openapi_checks.response_headers_conformance,
    openapi_checks.response_schema_conformance,
    openapi_checks.negative_data_rejection,
    openapi_checks.unsupported_method,
)
ROUTES = [
    *("POST /v1/chat/completions", "POST /v1/completions", "POST /tokenize", "POST /detokenize"),
    *("GET /health", "GET /v1/models", "GET /v1/models/{name}", "GET /version", "GET /metrics"),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """A tiny model, or in a long run those in FORETOKEN_FUZZ_MODEL_DIR and FORETOKEN_FUZZ_DRAFTER_DIR."""
    chosen = os.environ.get("FORETOKEN_FUZZ_MODEL_DIR")
    folder = Path(chosen) if chosen else tmp_path_factory.mktemp("fuzzed")
    arguments = ["--max-body-bytes", "300000", "--max-model-len", "64"]
    drafter = os.environ.get("FORETOKEN_FUZZ_DRAFTER_DIR")
    if drafter:
        arguments += ["--drafter-dir", drafter]
    if not chosen:
        write_model(folder)
        arguments += ["--weights", "fp32", "--kv-memory-mib", "4"]
    with RealServer(folder, *arguments) as live:
        yield live


@pytest.fixture(scope="module")
def document(server: RealServer) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(server.base + "/openapi.json", trust_env=False).json()
    return found


def test_the_routes_of_the_document_are_the_ones_that_are_fuzzed(document: dict[str, Any]) -> None:
    found = {f"{method.upper()} {path}" for path, methods in document["paths"].items() for method in methods}
    assert found == set(ROUTES)


@pytest.mark.parametrize("route", ROUTES)
def test_replies_are_as_documented(
    server: RealServer, document: dict[str, Any], route: str, tried: Callable[[str], None]
) -> None:
    schema = schemathesis.openapi.from_dict(document)
    schema.config.update(base_url=server.base)
    # A body may be larger than the server takes as well as wrong; 413 is then as good a refusal as 400.
    schema.config.checks.negative_data_rejection.expected_statuses = ["400", "404", "413"]
    method, path = route.split()
    operation = schema[path][method]

    def attempt(case: schemathesis.Case[Any]) -> None:
        response = case.call_and_validate(checks=list(CHECKS), timeout=60)
        tried(str(response.status_code))

    strategy = operation.as_strategy(generation_mode=schemathesis.GenerationMode.POSITIVE)
    if method == "POST":
        strategy = strategy | operation.as_strategy(generation_mode=schemathesis.GenerationMode.NEGATIVE)
    fuzz(40 if method == "POST" else 3, phases=(Phase.generate,))(given(strategy)(attempt))()
    assert httpx.get(server.base + "/health", trust_env=False).status_code == 200


@pytest.mark.parametrize("route", ["chat/completions", "completions"])
def test_every_chunk_of_a_stream_is_as_documented(server: RealServer, document: dict[str, Any], route: str) -> None:
    schema = schemathesis.openapi.from_dict(document)
    schema.config.update(base_url=server.base)
    operation = schema[f"/v1/{route}"]["POST"]
    chat = route == "chat/completions"
    asked = {"messages": [{"role": "user", "content": "a"}]} if chat else {"prompt": "a", "echo": True}
    options = {"include_usage": True, "include_provenance": True}
    details = {"logprobs": True, "top_logprobs": 3} if chat else {"logprobs": 3}
    common = {"max_tokens": 6, "n": 2, "return_token_ids": True, "ignore_eos": True}
    body: Any = {**asked, **details, **common, "stream": True, "stream_options": options}
    case = operation.Case(body=body, media_type="application/json")
    response = case.call_and_validate(checks=list(CHECKS), timeout=60)
    assert response.status_code == 200
    assert response.text.count("data: ") >= 4


def test_headers_over_the_limit_are_refused_as_documented(server: RealServer, document: dict[str, Any]) -> None:
    schema = schemathesis.openapi.from_dict(document)
    schema.config.update(base_url=server.base)
    case = schema["/health"]["GET"].Case(headers={f"x-{i}": "a" * 8000 for i in range(5)})
    response = case.call_and_validate(checks=list(CHECKS), timeout=60)
    assert response.status_code == 431
