"""Two writers do not share a folder, and one that was killed leaves it free."""

from __future__ import annotations

import errno
import fcntl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from drafter_train import generate, train
from drafter_train.folder_lock import FolderBusy, only_writer
from tests.drafter_train.tiny_runs import ROOT, write_run

HOLDER = """
import sys, time
from pathlib import Path
from drafter_train.folder_lock import only_writer
with only_writer(Path(sys.argv[1]), sys.argv[2]):
    print("held", flush=True)
    time.sleep(600)
"""


@contextmanager
def holding(folder: Path, name: str) -> Iterator[int]:
    """A process that holds the lock until it is killed; its pid."""
    command = [sys.executable, "-c", HOLDER, str(folder), name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            yield process.pid
        finally:
            process.kill()


def test_a_second_trainer_is_refused_with_the_firsts_pid_until_that_is_gone_by_any_way(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = write_run(tmp_path, name="run")
    with holding(tmp_path / "run", ".lock") as first:
        assert train.main(["--config", str(recipe), "--device", "cpu"]) == 1
        said = capsys.readouterr().err
        assert f"run is being written by another process (pid {first} on " in said
    with only_writer(tmp_path / "run"), pytest.raises(FolderBusy), only_writer(tmp_path / "run"):
        pass


def test_a_shard_of_a_token_store_has_one_writer_and_other_shards_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = write_run(tmp_path, name="run")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a"}\n')
    options = ["--config", str(recipe), "--device", "cpu", "--slots", "1"]
    for setting in (f"prompts={prompts}", f"tokens={tmp_path / 'store'}", "max_new_tokens=2"):
        options += ["--set", f"data.{setting}"]
    with holding(tmp_path / "store", ".lock-000of002"):
        assert generate.main([*options, "--shard", "0/2"]) == 1
        assert f"generation not started: {tmp_path / 'store'} is being written" in capsys.readouterr().err
        assert generate.main([*options, "--shard", "1/2"]) == 0


def test_a_file_system_without_locks_does_not_stop_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(file: int, how: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", unknown)
    with only_writer(tmp_path / "new"), only_writer(tmp_path / "new"):
        assert (tmp_path / "new" / ".lock").read_text() == ""
