"""The drafter of a submission as a grader sees it: which files, how many bytes, which hash, and what rules it breaks.

From a local folder or from the pinned revision of a hub repository. It knows no archive and loads no weights.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from drafter_train.hub import GRADER_LIMIT_BYTES, GRADER_PATTERNS, Hub, Patience, belongs
from eval.rehearse_archive import Fault, Manifest


@dataclass(frozen=True)
class DrafterFacts:
    """``files``: name -> bytes of what a grader fetches; ``weights_sha256``: hash of each weights file, None where the
    hub does not tell."""

    source: str
    files: dict[str, int]
    weights_sha256: dict[str, str | None]

    def lines(self) -> list[str]:
        total = sum(self.files.values())
        text = [f"drafter {self.source}: {len(self.files)} files, {total:,} bytes (limit {GRADER_LIMIT_BYTES:,})"]
        for name, digest in sorted(self.weights_sha256.items()):
            text.append(f"  {name} sha256 {digest or 'not told by the hub'}")
        return text

    def faults(self) -> list[Fault]:
        found = []
        total = sum(self.files.values())
        if total > GRADER_LIMIT_BYTES:
            found.append(Fault("oversized drafter", self.source, f"{total} bytes, over {GRADER_LIMIT_BYTES}"))
        if not self.weights_sha256:
            found.append(Fault("drafter without weights", self.source, "no *.safetensors file would be fetched"))
        if "config.json" not in self.files:
            found.append(Fault("drafter without config", self.source, "no config.json would be fetched"))
        return found


def local_drafter(folder: Path) -> DrafterFacts:
    """Facts of a folder. An oversized one is not hashed. Raises OSError."""
    names = sorted(path.name for path in folder.iterdir() if path.is_file() and belongs(path.name, GRADER_PATTERNS))
    files = {name: (folder / name).stat().st_size for name in names}
    hashed = sum(files.values()) <= GRADER_LIMIT_BYTES
    weights = {name: _sha256(folder / name) if hashed else None for name in names if name.endswith(".safetensors")}
    return DrafterFacts(str(folder), files, weights)


def hub_drafter(manifest: Manifest) -> DrafterFacts:
    """Facts of a pinned revision. Raises HubError when the hub cannot be asked."""
    found = Hub(patience=Patience(2, 1.0)).files(manifest.repo, manifest.revision)
    weights = {name: file.sha256 for name, file in found.items() if name.endswith(".safetensors")}
    return DrafterFacts(
        f"{manifest.repo}@{manifest.revision}", {name: file.size for name, file in found.items()}, weights
    )


def code_faults(folder: Path) -> list[Fault]:
    """A config that needs code from its repository: a grader fetches none."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return [Fault("drafter without config", str(folder), str(error))]
    if isinstance(config, dict) and config.get("auto_map"):
        return [Fault("drafter with code", "config.json", "auto_map asks for code, which a grader never fetches")]
    return []


def fetch(manifest: Manifest | None, local: Path | None, target: Path) -> None:
    """Put what a grader would mount into ``target``: copied from ``local`` where given, else from the hub.

    Raises HubError or OSError.
    """
    target.mkdir(parents=True)
    if local is not None:
        for name in local_drafter(local).files:
            shutil.copyfile(local / name, target / name)
    elif manifest is not None:
        Hub(patience=Patience(2, 1.0)).download(manifest.repo, manifest.revision, target)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
