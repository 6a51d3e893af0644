"""The names by which a client may ask for the one served model.

A client that is not told the name writes the one it knows the model by: its repository, or the folder it was given.
With ``--served-model-name`` only that name counts. It does not know the routes.
"""

from __future__ import annotations

import re
from pathlib import Path

from serve.config import ServeConfig, readable_path

_HUB_FOLDER = re.compile(r"models--([^/]+?)--([^/]+)/snapshots/[^/]+")
"""How the hub's client lays out what it has fetched: ``models--OWNER--NAME/snapshots/COMMIT``."""


def shown_name(config: ServeConfig) -> str:
    """The name in replies, the model list and the metrics."""
    return readable_path(config.served_model_name or Path(config.model_dir).resolve().name)


def accepted_names(config: ServeConfig, known_as: str | None) -> frozenset[str]:
    """Every name that is answered. ``known_as``: the repository whose model the folder was found to hold, or None."""
    if config.served_model_name:
        return frozenset({shown_name(config)})
    folder = Path(config.model_dir)
    resolved = folder.resolve()
    names = {shown_name(config), config.model_dir, str(folder), str(resolved)}
    in_hub_cache = _HUB_FOLDER.search(f"{folder.absolute()}\n{resolved}")
    repositories = {known_as, f"{in_hub_cache[1]}/{in_hub_cache[2]}" if in_hub_cache else None} - {None}
    for repository in repositories:
        names |= {str(repository), str(repository).rpartition("/")[2]}
    return frozenset(map(readable_path, names))
