"""A path or a name that is wrong is said in one line, before anything is started or measured."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

from drafter_train.curves import main as curves
from eval import acceptance_report, fidelity


@pytest.mark.parametrize("command", ["ablate", "bench", "block_sweep", "naive", "paired"])
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
