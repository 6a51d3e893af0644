"""The tarball of a graded run, built from small projects laid out like this one, and once from this one."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from eval.rehearse_archive import check_archive
from scripts.submission import CONTENTS, ROOT, SubmissionError, build, drafter_lines, list_files, pack

HEX = "0123456789abcdef" * 2 + "01234567"


def git(folder: Path, *command: str) -> None:
    who = ("-c", "user.name=t", "-c", "user.email=t@t.invalid")
    subprocess.run(["git", "-C", str(folder), *who, *command], check=True, capture_output=True)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A repository with the files that belong into a submission and some that do not."""
    root = tmp_path / "project"
    files = {
        "start_server.sh": "#!/bin/sh\nexec python3 -m serve\n",
        "setup.sh": "#!/bin/sh\nexit 0\n",
        "LICENSE": "text\n",
        "serve/__main__.py": "import torch\n",
        "serve/kernels/layer.c": "int x;\n",
        "verify/audit.py": "x = 1\n",
        "requirements/serve.txt": "torch\n",
        "scripts/setup_venv.sh": "#!/bin/sh\n",
        "scripts/fetch_default_model.py": "x = 1\n",
        "scripts/convert_gguf.py": "x = 1\n",
        "scripts/train.sh": "#!/bin/bash\n[[ a ]]\n",
        "tests/test_a.py": "def test_a(): pass\n",
        "eval/client.py": "x = 1\n",
        "drafter_train/releases/d/model.safetensors": "weights\n",
        "README.md": "# x\n",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    git(tmp_path, "init", "-q", str(root))
    git(root, "add", ".")
    git(root, "commit", "-qm", "all")
    return root


def members(path: Path) -> list[str]:
    with tarfile.open(path) as tar:
        return tar.getnames()


def test_only_what_serves_is_packed_with_the_start_at_the_root(project: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.tar.gz"
    build(project, out, with_manifest=True)
    names = members(out)
    assert names == sorted(names)
    assert {"start_server.sh", "setup.sh", "serve/__main__.py", "verify/audit.py"} <= set(names)
    assert all(name.startswith(CONTENTS) for name in names)
    assert not any(word in name for name in names for word in ("tests", "eval", "safetensors", "train.sh", "README"))


def test_the_same_files_give_the_same_bytes_wherever_and_whenever(project: Path, tmp_path: Path) -> None:
    first, _ = build(project, tmp_path / "one.tar.gz", with_manifest=True)
    copy = tmp_path / "elsewhere" / "copy"
    shutil.copytree(project, copy, ignore=shutil.ignore_patterns(".git"), copy_function=shutil.copyfile)
    (copy / "serve" / "__pycache__").mkdir()
    (copy / "serve" / "__pycache__" / "a.pyc").write_bytes(b"\0")
    for path in copy.rglob("*"):
        os.utime(path, (1, 1))
    second, listing = build(copy, tmp_path / "two.tgz", with_manifest=True)
    assert first == second
    assert any("no git here" in note for note in listing.notes)


def test_owner_time_and_mode_of_every_member_are_fixed(project: Path, tmp_path: Path) -> None:
    build(project, tmp_path / "out.tar.gz", with_manifest=True)
    with tarfile.open(tmp_path / "out.tar.gz") as tar:
        for entry in tar:
            assert (entry.uid, entry.gid, entry.uname, entry.gname, entry.mtime) == (0, 0, "", "", 315_532_800)
            assert entry.mode == (0o755 if entry.name.endswith(".sh") else 0o644)
    header = (tmp_path / "out.tar.gz").read_bytes()[:10]
    assert header[3] & 8 == 0, "no file name in the gzip header"
    assert header[4:8] == b"\0\0\0\0", "no time in the gzip header"


def test_untracked_and_changed_files_are_said(project: Path) -> None:
    (project / "serve" / "new.py").write_text("x = 1\n")
    (project / "verify" / "audit.py").write_text("x = 2\n")
    listing = list_files(project)
    assert "serve/new.py" not in listing.names
    assert any("left out: serve/new.py" in note for note in listing.notes)
    assert any("not as committed: verify/audit.py" in note for note in listing.notes)


def test_a_pinned_manifest_goes_in_and_an_unpinned_one_stops_the_build(project: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.tar.gz"
    manifest = project / "manifest.json"
    manifest.write_text(json.dumps({"drafter_hf_repo": "me/d", "revision": HEX}))
    build(project, out, with_manifest=True)
    assert "manifest.json" in members(out)
    before = out.read_bytes()
    manifest.write_text(json.dumps({"drafter_hf_repo": "me/d", "revision": "main"}))
    with pytest.raises(SubmissionError, match=r"unpinned manifest.*'main'.*--no-drafter"):
        build(project, out, with_manifest=True)
    assert out.read_bytes() == before
    build(project, out, with_manifest=False)
    assert "manifest.json" not in members(out)
    elsewhere = tmp_path / "pinned.json"
    elsewhere.write_text(json.dumps({"drafter_hf_repo": "me/other", "revision": HEX}))
    build(project, out, with_manifest=True, manifest=elsewhere)
    with tarfile.open(out) as tar:
        packed = tar.extractfile("manifest.json")
        assert packed is not None
        assert packed.read() == elsewhere.read_bytes()


def test_an_archive_that_would_not_pass_is_not_written(project: Path, tmp_path: Path) -> None:
    (project / "serve" / "weights.safetensors").write_bytes(b"\0" * 10)
    git(project, "add", ".")
    with pytest.raises(SubmissionError, match=r"weights inside: serve/weights\.safetensors"):
        build(project, tmp_path / "out.tar.gz", with_manifest=True)
    assert list(tmp_path.glob("*.gz*")) == list(tmp_path.glob(".out*")) == []


def test_the_drafter_is_named_with_the_hash_of_its_weights(project: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.tar.gz"
    (project / "manifest.json").write_text(json.dumps({"drafter_hf_repo": "me/d", "revision": HEX}))
    build(project, out, with_manifest=True)
    drafter = tmp_path / "drafter"
    drafter.mkdir()
    (drafter / "config.json").write_text("{}")
    (drafter / "model.safetensors").write_bytes(b"abc")
    text = "\n".join(drafter_lines(out, drafter))
    assert f"me/d at {HEX}" in text
    assert "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad" in text


def test_links_are_not_followed_into_the_archive(project: Path) -> None:
    (project / "serve" / "link.py").symlink_to("/etc/hostname")
    git(project, "add", ".")
    with pytest.raises(SubmissionError, match=r"serve/link\.py is not a plain file"):
        pack(project, list_files(project).names)


def test_this_project_builds_an_archive_without_a_fault(tmp_path: Path) -> None:
    out = tmp_path / "submission.tar.gz"
    command = ["sh", str(ROOT / "scripts" / "make_submission.sh"), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    archive = check_archive(out)
    assert archive.faults == ()
    assert {"start_server.sh", "setup.sh", "serve/__main__.py", "verify/acceptance.py"} <= set(archive.files)
    assert len(gzip.decompress(out.read_bytes())) < 3_000_000
    for part in ("sha256 ", "files, ", "drafter: "):
        assert part in done.stdout


def test_a_name_that_is_no_tarball_is_refused(tmp_path: Path) -> None:
    command = ["sh", str(ROOT / "scripts" / "make_submission.sh"), str(tmp_path / "out.zip")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "must end in .tar.gz or .tgz" in done.stderr
