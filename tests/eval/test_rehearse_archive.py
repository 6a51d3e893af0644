from __future__ import annotations

import pickle
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from eval.rehearse_archive import FILE_LIMIT, TOTAL_LIMIT, check_archive
from eval.servers import ROOT
from tests.eval.archives import GOOD, START, link, write

HEX = "0123456789abcdef" * 2 + "01234567"
SAFETENSORS = (50).to_bytes(8, "little") + b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}' + b"\0" * 4


def pinned(revision: str) -> str:
    return f'{{"drafter_hf_repo": "me/drafter", "revision": "{revision}"}}'


# The seeded faults that need no drafter: name -> files that replace or join those of a good archive.
SEEDED: dict[str, dict[str, str | bytes]] = {
    "bashism": {"start_server.sh": START + '[[ -n "$PORT" ]] || exit 1\n'},
    "CRLF": {"start_server.sh": START.replace("\n", "\r\n")},
    "wheel inside": {"vendor/torch-2.6-py3-none-any.whl": b"PK\x03\x04"},
    "weights inside": {"models/drafter.safetensors": SAFETENSORS},
    "pickle inside": {"cache/table.pkl": pickle.dumps({"a": 1})},
    "unpinned manifest": {"manifest.json": pinned("main")},
    "forbidden engine": {"server/engine.py": "def run():\n    from vllm import LLM\n    return LLM\n"},
    "absolute path": {"/etc/start.conf": "a = 1\n"},
}


def kinds(path: Path) -> set[str]:
    return {fault.kind for fault in check_archive(path).faults}


def test_a_good_archive_has_no_fault(tmp_path: Path) -> None:
    archive = check_archive(write(tmp_path / "a.tgz", {**GOOD, "manifest.json": pinned(HEX)}))
    assert archive.faults == ()
    assert archive.manifest is not None
    assert (archive.manifest.repo, archive.manifest.revision) == ("me/drafter", HEX)
    assert set(archive.files) == {*GOOD, "manifest.json"}


@pytest.mark.parametrize("kind", SEEDED)
def test_a_seeded_fault_is_named_and_nothing_else_is(kind: str, tmp_path: Path) -> None:
    (fault,) = check_archive(write(tmp_path / "a.tar.gz", {**GOOD, **SEEDED[kind]})).faults
    assert fault.kind == kind
    assert fault.line().startswith(f"{kind}: ")
    assert fault.where.split(" ")[0] in {name.rstrip("\r") for name in SEEDED[kind]}


def test_a_nested_root_is_named_with_the_folder_to_pack_from(tmp_path: Path) -> None:
    nested = {f"my_project/{name}": content for name, content in GOOD.items()}
    (fault,) = check_archive(write(tmp_path / "a.tar.gz", nested)).faults
    assert fault.kind == "nested root"
    assert "tar -C my_project ." in fault.message


def test_an_archive_that_starts_nothing_is_missing_its_run(tmp_path: Path) -> None:
    files = {name: content for name, content in GOOD.items() if name != "start_server.sh"}
    assert kinds(write(tmp_path / "a.tar.gz", files)) == {"missing run"}


@pytest.mark.parametrize(
    ("name", "target", "kind"),
    [
        ("server/model", "/models/qwen3-4b", tarfile.SYMTYPE),
        ("server/up", "../../secrets", tarfile.SYMTYPE),
        ("twin", "../start_server.sh", tarfile.LNKTYPE),
    ],
)
def test_a_link_that_leads_outside_is_named(name: str, target: str, kind: bytes, tmp_path: Path) -> None:
    (fault,) = check_archive(write(tmp_path / "a.tar.gz", GOOD, link(name, target, kind))).faults
    assert (fault.kind, fault.where) == ("symlink outside", name)
    assert target in fault.message


def test_links_inside_the_archive_are_fine(tmp_path: Path) -> None:
    assert kinds(write(tmp_path / "a.tar.gz", GOOD, link("server/run", "../start_server.sh"))) == set()


@pytest.mark.parametrize(
    ("name", "data", "kind"),
    [
        ("server/notes.txt", SAFETENSORS, "weights inside"),
        ("server/model.dat", b"GGUF\x03\0\0\0", "weights inside"),
        ("server/state.dat", pickle.dumps([1, 2], protocol=4) + b"\0", "pickle inside"),
        ("server/lib.txt", b"\x7fELF\x02\0", "binary inside"),
        ("server/kernels.cubin", b"\x7fELF", "binary inside"),
        ("server/lib.py", b"\xff\xfe\0x", "binary inside"),
        ("server/src.txt", b"PK\x03\x04\0\0", "archive inside"),
        ("server/__pycache__/a.cpython-311.pyc", b"\0", "cache inside"),
        ("._start_server.sh", b"\0\5\x16\7", "cache inside"),
        ("server/big.py", b"# " + b"x" * FILE_LIMIT, "too large"),
        ("server/new.py", b"def f(:\n", "broken python"),
        ("server/new.py", b"type X = int\n", "broken python"),
        ("server/run.py", b"import importlib\nimportlib.import_module('sglang.srt')\n", "forbidden engine"),
        ("scripts/tool.sh", b"#!/bin/sh\nfunction f {\n:\n}\n", "bashism"),
        ("scripts/tool.sh", b"#!/bin/sh\nif true; then\n", "bashism"),
        ("setup.sh", b"#!/bin/sh\npip install triton\n", "download"),
        ("start_server.sh", b"#!/bin/sh\npython3 -m pip install torch && exec python3 -m server\n", "download"),
        ("start_server.sh", b"#!/bin/sh\nset -o pipefail\n", "bashism"),
    ],
)
def test_what_is_not_source_or_would_not_run_is_named(name: str, data: bytes, kind: str, tmp_path: Path) -> None:
    assert kind in kinds(write(tmp_path / "a.tar.gz", {**GOOD, name: data}))


def test_torch_files_are_seen_through_another_name(tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    with zipfile.ZipFile(inner, "w") as file:
        file.writestr("archive/data.pkl", b"\x80\x02}.")
    assert kinds(write(tmp_path / "a.tar.gz", {**GOOD, "server/notes.md": inner.read_bytes()})) == {"archive inside"}


def test_too_much_source_is_refused_without_reading_it_all(tmp_path: Path) -> None:
    filler = {f"server/part{i}.txt": "x" * (FILE_LIMIT - 1) for i in range(TOTAL_LIMIT // FILE_LIMIT + 2)}
    assert kinds(write(tmp_path / "a.tar.gz", {**GOOD, **filler})) == {"too large"}


def test_members_twice_outside_and_special_are_named(tmp_path: Path) -> None:
    fifo = tarfile.TarInfo("pipe")
    fifo.type = tarfile.FIFOTYPE
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as tar:
        for name in ("start_server.sh", "start_server.sh", "../escape.txt"):
            tar.addfile(tarfile.TarInfo(name))
        tar.addfile(fifo)
    assert kinds(tmp_path / "a.tar.gz") == {"double member", "path outside", "special file"}


def test_what_is_no_gzipped_tar_is_said_at_once(tmp_path: Path) -> None:
    assert kinds(write(tmp_path / "a.tar", GOOD, mode="w")) == {"not gzip"}
    whole = write(tmp_path / "b.tar.gz", GOOD).read_bytes()
    (tmp_path / "c.tar.gz").write_bytes(whole[: len(whole) // 2])
    assert "broken archive" in kinds(tmp_path / "c.tar.gz")


@pytest.mark.parametrize(
    "text",
    [
        pinned("v1.0"),
        pinned(HEX[:12]),
        pinned(HEX.upper()),
        '{"drafter_hf_repo": "drafter", "revision": "' + HEX + '"}',
        '{"drafter_hf_repo": "me/drafter"}',
        '{"drafter_hf_repo": "me/d", "revision": "' + HEX + '", "token": "x"}',
        "[]",
        "{",
    ],
)
def test_a_manifest_that_pins_nothing_is_a_fault(text: str, tmp_path: Path) -> None:
    assert kinds(write(tmp_path / "a.tar.gz", {**GOOD, "manifest.json": text})) == {"unpinned manifest"}


def test_the_check_needs_nothing_but_the_standard_library(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tar.gz", GOOD)
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from pathlib import Path\nfrom eval.rehearse_archive import check_archive\n"
        "assert check_archive(Path(sys.argv[1])).faults == ()\n"
    )
    done = subprocess.run([sys.executable, "-S", "-c", code, str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
