"""The audit finds nothing on a sound engine and something on an unsound one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import serve.engine.engine
from serve.config import ServeConfig
from serve.engine.build import build_engine
from verify.lossless import main, margin_at


def last_line(text: str) -> dict[str, object]:
    report: dict[str, object] = json.loads(text.strip().splitlines()[-1])
    return report


def test_a_sound_engine_has_no_mismatch(tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model-dir", str(tiny_model_dir), "--prompts", "10", "--max-new", "24", "--threads", "1"]
    assert main(arguments) == 0
    report = last_line(capsys.readouterr().out)
    assert report["mismatches"] == 0
    assert report["compared"] == 80
    assert report["preemptions"]
    assert report["prefix_hit_tokens"]


def test_a_draft_kept_against_the_target_is_found_and_shown(
    tiny_model_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def credulous(draft: tuple[int, ...], sampled: list[int]) -> list[int]:
        return [*draft[:1], *sampled[1:2]] if len(draft) > 1 and len(sampled) > 1 else list(draft[:1]) + sampled[-1:]

    monkeypatch.setattr(serve.engine.engine, "accept", credulous)
    arguments = ["--model-dir", str(tiny_model_dir), "--prompts", "3", "--max-new", "12", "--threads", "1"]
    assert main(arguments) == 1
    out = capsys.readouterr().out
    assert "MISMATCH" in out
    assert "margin=" in out
    assert last_line(out)["mismatches"]


def test_a_margin_that_the_engine_cannot_say_is_none(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = build_engine(ServeConfig(model_dir=str(tiny_model_dir), threads=1))
    assert (margin_at(engine, [5, 6, 7]) or 0.0) > 0
    monkeypatch.setattr(engine.runner.model, "forward", lambda *_, **__: 1 / 0)
    assert margin_at(engine, [5, 6, 7]) is None


def test_a_wrong_folder_is_an_error_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model-dir", str(tmp_path)]) == 2
    assert "cannot start" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "No such file"),
        ("", "nothing to audit"),
        ('{"prompt": "one"}\n', "nothing to audit"),
        ('{"prompt": "one"}\n{"text": "two"}\n', "line 2"),
        ('{"prompt": "one"}\nplain text\n', "line 2 is not JSON"),
        ("[1]\n", "line 1"),
    ],
)
def test_no_audit_without_prompts_to_audit(
    tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, complaint: str
) -> None:
    path = tmp_path / "prompts.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(SystemExit) as ended:
        main(["--model-dir", str(tiny_model_dir), "--prompts-file", str(path), "--first", "1"])
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err


def test_answers_that_do_not_fit_the_context_are_refused_by_name(
    tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--model-dir", str(tiny_model_dir), "--prompts", "1", "--max-new", "100000", "--threads", "1"]) == 2
    assert "--max-new 100000" in capsys.readouterr().err
