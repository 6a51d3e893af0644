from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from eval import sweep
from eval.predict import limits_text, predict
from eval.predict import main as predict_main
from eval.roofline import Roofline
from eval.score import check_seal, score, seal, step_lines
from eval.servers import ManagedServer
from eval.shapes import load_card, load_shape
from tests.eval.stub_server import WordCounter, running_stub

STUB = Path(__file__).with_name("stub_server.py")


@pytest.fixture(autouse=True)
def _word_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "TokenizerCounter", lambda folder: WordCounter())


def run(url: str, out: Path, *extra: str) -> int:
    shape = ["--prompt", "40", "--output", "3", "--seconds", "0.4", "--quick"]
    return sweep.main(["--url", url, "--model-dir", "any", "--out", str(out), *shape, *extra])


def result_of(out: Path) -> dict[str, Any]:
    return dict(json.loads((out / "result.json").read_text()))


def test_a_quick_sweep_says_so_and_leaves_raw_points_and_a_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with running_stub(first_delay=0.02, gap=0.005) as (url, _):
        assert run(url, tmp_path, "--concurrency", "1", "2", "--rate", "20") == 0
    text = capsys.readouterr().out
    assert text.startswith("QUICK RUN")
    names = {path.name for path in tmp_path.glob("sweep_*.json")}
    assert names == {"sweep_c1.json", "sweep_c2.json", "sweep_r20.json"}
    page = (tmp_path / "report.html").read_text()
    assert "QUICK RUN" in page
    assert "http://" not in page.replace(url, "")
    assert "https://" not in page
    assert 'src="data:image/png' in page
    assert (tmp_path / "throughput.png").read_bytes().startswith(b"\x89PNG")
    summaries = result_of(tmp_path)["summaries"]
    assert [item["mode"] for item in summaries] == ["closed", "closed", "open"]
    assert all(item["acceptance_length"] == 2.0 for item in summaries)


def test_every_request_of_every_point_is_new_to_the_prefix_cache(tmp_path: Path) -> None:
    with running_stub(prefix_cache=True, first_delay=0.01) as (url, state):
        assert run(url, tmp_path / "up", "--concurrency", "1", "2") == 0
        assert run(url, tmp_path / "again", "--concurrency", "2", "1", "--seed", "2") == 0
    prompts = [json.dumps(body["messages"]) for body in state.bodies]
    assert len(set(prompts)) == len(prompts)
    firsts = {body["messages"][0]["content"].split()[0] for body in state.bodies}
    assert len(firsts) == len(prompts)
    for folder in ("up", "again"):
        assert not any(
            "dirty" in fault for faults in result_of(tmp_path / folder)["lints"].values() for fault in faults
        )


def test_the_same_seed_again_is_reported_as_a_dirty_cache(tmp_path: Path) -> None:
    with running_stub(prefix_cache=True, first_delay=0.01) as (url, _):
        run(url, tmp_path / "first", "--concurrency", "1")
        run(url, tmp_path / "second", "--concurrency", "1")
    assert any("dirty cache" in fault for fault in result_of(tmp_path / "second")["lints"]["sweep_c1.json"])


def test_waiting_in_the_client_is_shown_and_so_is_the_rate_reached(tmp_path: Path) -> None:
    with running_stub(serial=True, first_delay=0.06, chunks=["only"]) as (url, _):
        run(url, tmp_path, "--concurrency", "--rate", "60", "--max-in-flight", "1")
    faults = "\n".join(result_of(tmp_path)["lints"]["sweep_r60.json"])
    assert "client-side queueing" in faults
    assert "rate not reached" in faults


def test_a_server_that_dies_leaves_its_points_its_error_and_an_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with running_stub(first_delay=0.02, dies_after=12) as (url, _):
        assert run(url, tmp_path, "--concurrency", "1", "2") == 1
    text = capsys.readouterr().out
    assert len(result_of(tmp_path)["summaries"]) == 2
    assert "the first: HTTP 500" in text


def test_a_buffered_stream_is_said_of_its_point(tmp_path: Path) -> None:
    with running_stub(first_delay=0.02, together=True, chunks=["one", *[" two"] * 40]) as (url, _):
        run(url, tmp_path, "--concurrency", "1")
    assert any("buffered stream" in fault for fault in result_of(tmp_path)["lints"]["sweep_c1.json"])


def test_a_server_that_is_gone_ends_the_sweep_with_what_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server = ManagedServer([sys.executable, str(STUB), "--port", "{port}"], "stub")
    measured = sweep.run_point

    async def then_gone(*args: Any) -> dict[str, Any]:
        point = await measured(*args)
        server.stop()
        return point

    monkeypatch.setattr(sweep, "run_point", then_gone)
    with server:
        assert run(server.url, tmp_path, "--concurrency", "1", "2", "4", "8", "--rate", "5") == 1
    text, told = capsys.readouterr()
    assert "is gone (ConnectError): the sweep ends with what is measured" in told
    assert [(item["load"], item["completed"] > 0) for item in result_of(tmp_path)["summaries"]] == [
        (1.0, True),
        (2.0, False),
    ]
    assert "report:" in text


def test_a_gap_is_named_by_its_points_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with running_stub(gap=0.005) as (url, _):
        assert run(url, tmp_path, "--concurrency", "1", "--rate", "20") == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("p99 gap"))
    assert line.count("C=") == 1
    assert "20/s" in line


def test_scrapes_share_the_clock_of_the_requests(tmp_path: Path) -> None:
    with running_stub(first_delay=0.05) as (url, _):
        run(url, tmp_path, "--concurrency", "2")
    point = json.loads((tmp_path / "sweep_c2.json").read_text())
    times = [scrape["time"] for scrape in point["scrapes"]]
    last = max(request["finished"] for request in point["requests"])
    assert times == sorted(times)
    assert times[0] <= 0
    assert times[-1] >= last
    assert point["options"] == {"temperature": 0.0, "ignore_eos": True}


def test_a_server_without_metrics_is_swept_all_the_same(tmp_path: Path) -> None:
    with running_stub(unmetered=True) as (url, _):
        assert run(url, tmp_path, "--concurrency", "1") == 0
    assert result_of(tmp_path)["summaries"][0]["acceptance_length"] is None


def test_an_interrupt_keeps_the_finished_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = sweep.run_point

    async def second_is_interrupted(*args: Any, **kwargs: Any) -> dict[str, Any]:
        if args[3]["load"] == 2:
            raise KeyboardInterrupt
        return await plain(*args, **kwargs)

    monkeypatch.setattr(sweep, "run_point", second_is_interrupted)
    with running_stub() as (url, _):
        assert run(url, tmp_path, "--concurrency", "1", "2", "4") == 130
    assert [path.name for path in tmp_path.glob("sweep_*.json")] == ["sweep_c1.json"]
    assert len(result_of(tmp_path)["summaries"]) == 1
    assert threading.active_count() < 50


def test_a_fault_in_a_point_keeps_the_points_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = sweep.run_point

    async def second_fails(*args: Any, **kwargs: Any) -> dict[str, Any]:
        if args[3]["load"] == 2:
            raise RuntimeError("a client process ended early")
        return await plain(*args, **kwargs)

    monkeypatch.setattr(sweep, "run_point", second_fails)
    with running_stub() as (url, _):
        assert run(url, tmp_path, "--concurrency", "1", "2") == 1
    assert "a client process ended early" in capsys.readouterr().err
    assert [item["load"] for item in result_of(tmp_path)["summaries"]] == [1.0]


@pytest.mark.parametrize(
    ("text", "words"), [(None, "No such file"), ("{", "is no prediction"), ('{"a": 1}', "has no 'predictions'")]
)
def test_what_is_no_prediction_is_refused_before_anything_runs(
    text: str | None, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "prediction.json"
    if text is not None:
        path.write_text(text)
    assert run("http://127.0.0.1:9", tmp_path / "out", "--prediction", str(path)) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_replot_needs_no_server_and_a_used_folder_is_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with running_stub() as (url, _):
        run(url, tmp_path, "--concurrency", "1")
        before = result_of(tmp_path)
        assert run(url, tmp_path, "--concurrency", "1") == 2
    assert "already holds points" in capsys.readouterr().err
    (tmp_path / "report.html").unlink()
    assert sweep.main(["--out", str(tmp_path), "--replot"]) == 0
    assert (tmp_path / "report.html").is_file()
    assert result_of(tmp_path) == before


def test_a_prediction_written_before_is_scored_and_one_written_after_is_called_out(tmp_path: Path) -> None:
    path = tmp_path / "prediction.json"
    assert predict_main(["--model", "smollm2-135m", "--card", "h200", "--acceptance", "0.7", "--json", str(path)]) == 0
    with running_stub(first_delay=0.01, gap=0.01) as (url, _):
        run(url, tmp_path / "run", "--concurrency", "1", "--prediction", str(path))
    result = result_of(tmp_path / "run")
    assert result["prediction_faults"] == []
    rows = {row["what"]: row for row in result["score"]}
    assert rows["tok/s at C=1, decode only"]["error_percent"] > 0
    assert (tmp_path / "run" / "speedup.png").is_file()
    record = json.loads(path.read_text())
    assert "after the run began" in check_seal(record, record["time"] - 1)[0]


def test_a_changed_prediction_is_found_out() -> None:
    record = seal({"card": "t4"}, {"knee": 161.0}, now=100.0)
    assert check_seal(record, 200.0) == []
    record["predictions"]["knee"] = 160.0
    assert "hash does not match" in check_seal(record, 200.0)[0]
    assert record["time"] < time.time()


def test_predictions_agree_with_the_roofline_and_the_block_length_shrinks_with_the_batch() -> None:
    line = Roofline(load_shape("qwen3-8b"), load_card("a100-sxm"))
    made = predict(line, 1000, 1000, acceptance=0.8, batches=(1, 128))
    assert made["mean_live_context"] == 1500
    assert made["knee"] is None
    assert made["knee_text"].startswith("no knee")
    assert made["curve"]["64"] == line.throughput(64, 1500)
    assert made["serving_curve"]["64"] < made["curve"]["64"]
    best = made["speculation"]["best_block_length"]
    assert best["1"] > best["128"]
    rows = score({"predictions": made}, [{"mode": "closed", "load": 64.0, "tokens_per_second": 2504.6}])
    assert (rows[0]["predicted"], rows[0]["measured"]) == (made["curve"]["64"], 2504.6)
    assert rows[0]["error_percent"] == pytest.approx((made["curve"]["64"] / 2504.6 - 1) * 100)


def test_a_closed_point_can_be_run_again_as_an_open_loop_at_its_rate(tmp_path: Path) -> None:
    with running_stub(first_delay=0.02, gap=0.01) as (url, _):
        assert run(url, tmp_path, "--concurrency", "1", "2", "--open-like", "2") == 0
    closed, opened = result_of(tmp_path)["summaries"][1:]
    rows = json.loads((tmp_path / "sweep_c2.json").read_text())["requests"]
    finished = sum(0 <= row["finished"] < 0.4 for row in rows) / 0.4
    assert (closed["load"], opened["mode"]) == (2.0, "open")
    assert opened["load"] == pytest.approx(finished, rel=0.01)


def test_a_point_to_run_again_must_be_one_of_the_points(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run("http://127.0.0.1:9", tmp_path, "--concurrency", "1", "--open-like", "4")
    assert "--open-like 4 is not one of the points" in capsys.readouterr().err


def test_no_server_is_said_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("http://127.0.0.1:9", tmp_path, "--concurrency", "1") == 1
    assert capsys.readouterr().err.startswith("no model at http://127.0.0.1:9/v1/models: ConnectError")


def test_a_token_of_the_lab_note_is_split_into_weights_kv_prompts_and_the_rest() -> None:
    record = {"predictions": predict(Roofline(load_shape("qwen3-8b"), load_card("a100-sxm")), 1000, 1000)}
    tpot = {"mean": 0.0249, "p50": 0.0249, "p99": 0.0249}
    lines = step_lines(record, [{"mode": "closed", "load": 64.0, "tpot": tpot}])
    # 15.14 GB (without the input embedding) and 64 x 1,500 x 147,456 B over 2,039 GB/s; 64 prompts of 14.2 TFLOP at
    # 60 % of 312 TFLOPS, shared out over 1,000 tokens.
    assert lines[1] == "  C=64: 24.90 ms a token = weights 7.42, kv 6.94, prefill 4.85, rest 5.68"


@pytest.mark.parametrize(("most", "first"), [(8, "the sequence limit"), (256, "KV pages")])
def test_the_limit_that_binds_first_is_named(most: int, first: str) -> None:
    made = predict(Roofline(load_shape("qwen3-4b"), load_card("t4")), 1000, 1000)
    assert f"{first} binds first" in limits_text(made, most, 2048, 1000)
    wide = predict(Roofline(load_shape("qwen3-4b"), load_card("h200")), 8000, 1000)
    assert "the curve binds first" in limits_text(wide, 128, 8192, 8000)


def test_the_servers_kv_pages_and_the_ceiling_of_one_stream_are_scored() -> None:
    made = predict(Roofline(load_shape("qwen3-4b"), load_card("h200")), 256, 128, page=32)
    tpot = {"mean": 0.0028, "p50": 0.0028, "p99": 0.003}
    item = {"mode": "closed", "load": 1.0, "tokens_per_second": 350.0, "tpot": tpot,
            "ttft": {"p50": 0.02, "p99": 0.03}, "kv_pages": 28162}  # fmt: skip
    rows = {row["what"]: row for row in score({"predictions": made}, [item])}
    assert abs(rows["KV pages of the server"]["error_percent"]) < 1
    assert rows["ceiling of one stream, tok/s, decode"]["measured"] == pytest.approx(1 / 0.0028)


def test_how_it_was_sampled_is_part_of_the_record(tmp_path: Path) -> None:
    with running_stub() as (url, state):
        assert run(url, tmp_path, "--concurrency", "1", "--temperature", "0.8", "--top-p", "0.9", "--top-k", "7") == 0
    options = json.loads((tmp_path / "sweep_c1.json").read_text())["options"]
    assert options == {"temperature": 0.8, "top_p": 0.9, "top_k": 7, "ignore_eos": True}
    assert {body["top_k"] for body in state.bodies} == {7}
