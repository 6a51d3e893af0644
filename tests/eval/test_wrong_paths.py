"""A path or a name that is wrong is said in one line, before anything is started or measured."""

from __future__ import annotations

import signal
from importlib import import_module
from pathlib import Path

import pytest

from drafter_train.curves import main as curves
from eval import acceptance_report, device_speculation, fidelity, soak


@pytest.mark.parametrize("command", ["ablate", "bench", "block_sweep", "device_speculation", "naive", "paired", "soak"])
def test_a_folder_without_a_tokenizer_is_refused_by_the_options_name(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        import_module(f"eval.{command}").main(["--model-dir", str(tmp_path)])
    said = capsys.readouterr().err
    assert end.value.code == 2
    assert "--model-dir" in said
    assert f"{tmp_path} has no tokenizer.json" in said


def test_a_format_that_there_is_not_is_refused_before_the_reference_is_made(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        fidelity.main(["--formats", "int8,int3"])
    assert "--formats: 'int3' is none of" in capsys.readouterr().err


def test_files_that_are_not_there_are_said_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = str(tmp_path / "missing")
    assert acceptance_report.main([missing]) == 1
    assert missing in capsys.readouterr().err
    with pytest.raises(SystemExit):
        curves([str(tmp_path / "stem"), f"run={missing}"])
    assert missing in capsys.readouterr().err


def test_what_speculation_on_the_device_cannot_read_is_said_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tokenizer.json").touch()
    prompts = tmp_path / "prompts.jsonl"
    options = ["--device", "cpu", "--model-dir", str(tmp_path), "--drafter-dir", str(tmp_path / "missing")]
    for lines, expected in (
        ('{"prompt": 1}\n', f"{prompts} line 1"),
        ("", "no prompt"),
        ('{"prompt": "a"}\n', "token"),
    ):
        prompts.write_text(lines)
        with pytest.raises(SystemExit) as end:
            device_speculation.main([*options, "--prompts", str(prompts)])
        assert end.value.code == 2
        assert expected in capsys.readouterr().err.splitlines()[-1]


def test_a_server_of_a_soak_that_does_not_start_is_said_without_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tokenizer.json").touch()
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert soak.main(["--model-dir", str(tmp_path)]) == 1
    finally:
        signal.signal(signal.SIGTERM, before)
    assert "cannot start" in capsys.readouterr().err
