"""What a job script needs to know of a cluster: ``Site``, read from a small YAML file and changed by options.

``doctor --write`` proposes the file; nothing here knows any cluster. Names go into ``#SBATCH`` lines, so they are
checked for what does not belong there.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

NAME = re.compile(r"[A-Za-z0-9_.,:@+&|!*/%\[\]()=-]*")
_TIME = re.compile(r"(\d+-)?\d{1,2}(:\d{2}){0,2}")


class SiteError(ValueError):
    """A setting is missing or wrong; the message names it."""


@dataclass(frozen=True)
class Site:
    """One cluster and one person's place on it. ``gpu`` is the GPU type as ``--gres`` names it, or ``none``; counts of
    CPUs and memory (GiB) are per GPU, or of the whole job for steps without one. ``setup`` are shell lines that come
    first (modules); ``prefix`` goes before python (a container's exec). Empty texts leave their option out."""

    scratch: str
    partition: str = ""
    cpu_partition: str = ""
    account: str = ""
    qos: str = ""
    gpu: str = ""
    constraint: str = ""
    exclude: str = ""
    time: str = "02:59:00"
    cpus: int = 8
    memory_gb: int = 64
    offline: bool = False
    python: str = ""
    prefix: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("partition", "cpu_partition", "account", "qos", "gpu", "constraint", "exclude"):
            value = getattr(self, name)
            if not NAME.fullmatch(value):
                raise SiteError(f"{name} must be a name as Slurm knows it, got {value!r}")
        if not _TIME.fullmatch(self.time):
            raise SiteError(f"time must be [DAYS-]HH:MM:SS, got {self.time!r}")
        for name in ("cpus", "memory_gb"):
            if getattr(self, name) < 1:
                raise SiteError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not Path(self.scratch).is_absolute():
            raise SiteError(f"scratch must be an absolute path, got {self.scratch!r}")
        if any("\n" in line for line in self.setup):
            raise SiteError("setup must be a list of single lines")


def _typed(name: str, value: Any, kind: str) -> Any:
    if kind.startswith("tuple"):
        if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) for item in value):
            raise SiteError(f"{name} must be a list of texts, got {value!r}")
        return tuple(value)
    # YAML 1.1 reads 2:59:00 without quotes as a number of seconds.
    if name == "time" and isinstance(value, int) and not isinstance(value, bool):
        return f"{value // 3600:02d}:{value // 60 % 60:02d}:{value % 60:02d}"
    wanted = {"str": str, "int": int, "bool": bool}[kind]
    if not isinstance(value, wanted) or (wanted is int and isinstance(value, bool)):
        raise SiteError(f"{name} must be {kind}, got {value!r}")
    return value


def load_site(path: Path | None, changes: dict[str, Any]) -> Site:
    """The site of a YAML file (None: defaults alone) with ``changes`` on top; a change of None changes nothing. Raises
    SiteError or OSError."""
    data: Any = {}
    if path is not None:
        try:
            data = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
        except yaml.YAMLError as error:
            raise SiteError(f"{path} is not YAML: {error}") from None
        if not isinstance(data, dict):
            raise SiteError(f"{path} must hold a mapping")
    kinds = {field.name: str(field.type) for field in dataclasses.fields(Site)}
    data |= {name: value for name, value in changes.items() if value is not None}
    unknown = sorted(set(data) - set(kinds))
    if unknown:
        raise SiteError(f"unknown setting {unknown[0]}; known: {', '.join(kinds)}")
    if "scratch" not in data:
        raise SiteError("scratch is missing: a fast folder for caches, --scratch or in the site file")
    return Site(**{name: _typed(name, value, kinds[name]) for name, value in data.items()})
