"""The predictor assumes of the server what the server does by itself."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from eval import predict
from eval.server_options import ServerSide, add_server_arguments, server_side
from eval.serving_model import Host
from serve.config import ServeConfig
from serve.engine.prepare import PROMPT_ROWS

GIB = 2**30


def of(
    *options: str,
    memory: float = 140 * GIB,
    parameters: int = 3_633_315_840,
    custom: str | None = None,
    weights: str = "bf16",
) -> ServerSide:
    parser = argparse.ArgumentParser()
    add_server_arguments(parser)
    args = parser.parse_args(options)
    args.custom_card, args.weights, args.weights_map, args.tp = custom, weights, None, 1
    return server_side(args, memory, parameters)


@pytest.mark.parametrize(("memory", "rows"), [(14.6 * GIB, 2048), (79 * GIB, 8192), (140 * GIB, 16_384)])
def test_a_card_has_the_rows_of_a_step_that_the_server_takes_on_it(memory: float, rows: int) -> None:
    found = of(memory=memory)
    assert found == ServerSide(Host(graph_rows=PROMPT_ROWS), 0.0, rows, ServeConfig.max_num_seqs, 0)
    assert of("--max-num-seqs", "20000").batch_tokens == 20_000
    assert of(memory=memory, parameters=31 * 10**9).batch_tokens == min(rows, 8192)


def test_short_prompts_are_graphs_where_the_server_makes_graphs_of_them() -> None:
    assert of(weights="int8").host.graph_rows == 0
    assert of("--cpu", custom="c:8:41:0.25").host.graph_rows == 0
    assert of("--graph-rows", "0").host == Host()


def test_a_cpu_has_small_steps_its_own_pages_and_no_kernels_to_start() -> None:
    found = of("--cpu", custom="c:8:41:0.25")
    assert (found.batch_tokens, found.kv_memory, found.host.prompt_pass) == (256, 768 << 20, 0.0)
    assert (found.overhead > 0, found.host.delay) == (True, 0.0)
    told = of("--cpu", "--overhead-ms", "0", "--prompt-pass-ms", "3", "--kv-memory-mib", "5", custom="c:8:41:0.25")
    assert (told.overhead, told.host.prompt_pass, told.kv_memory) == (0.0, 0.003, 5 << 20)
    with pytest.raises(ValueError, match="--cpu needs --custom-card"):
        of("--cpu")


def test_a_prediction_for_two_cores_is_near_what_was_measured_on_them(tmp_path: Path) -> None:
    """The default model without drafts, 240 tokens in and 200 out, 2026-11-30; the step's overhead is fitted to the
    first number, so the others are the test."""
    out = tmp_path / "prediction.json"
    model = ["--model", "smollm2-135m", "--custom-card", "cpu2:8:41:0.25", "--cpu", "--weights", "int8", "--kv", "fp32"]
    assert predict.main([*model, "--prompt", "240", "--output", "200", "--json", str(out)]) == 0
    found = json.loads(out.read_text())["predictions"]
    assert found["kv_pages"] == 546  # what the server says at its start
    measured = {"1": (144, 5.9), "4": (257, 13.3), "8": (302, 23), "32": (343, 87)}
    for streams, (rate, tpot) in measured.items():
        row = found["served"][streams]
        assert row["tokens_per_second"] == pytest.approx(rate, rel=0.10), streams
        assert row["tpot"] * 1e3 == pytest.approx(tpot, rel=0.20), streams


def test_no_more_run_together_than_the_pages_hold(tmp_path: Path) -> None:
    """A T4 with fp16 weights holds 23,191 tokens: 15 requests at their mean length of 1,500, and the others wait."""
    rates = {}
    for name, options in (("few", []), ("many", ["--kv-memory-mib", "40000"])):
        out = tmp_path / f"{name}.json"
        assert predict.main(["--card", "t4", "--json", str(out), *options]) == 0
        rates[name] = json.loads(out.read_text())["predictions"]["served"]
    assert rates["few"]["8"] == rates["many"]["8"]
    assert rates["few"]["64"]["tokens_per_second"] < 0.8 * rates["many"]["64"]["tokens_per_second"]
    assert rates["few"]["64"]["ttft_p50"] > 2 * rates["many"]["64"]["ttft_p50"]
