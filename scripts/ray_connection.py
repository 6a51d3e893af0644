"""Joins a running Ray cluster, or starts one of one's own on this machine. Knows nothing of what runs on it.

Import it before Ray: it says what Ray reads at its import.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

# Nothing is reported to anybody; and whoever reaches a cluster's own ports could run code in it, so they ask for a
# token (RAY_AUTH_TOKEN, or the file that Ray makes in the home folder).
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_AUTH_MODE", "token")

_OBJECT_STORE_BYTES = 80 * 1024 * 1024


def connect(address: str | None, own: Mapping[str, Any], joined: Mapping[str, Any]) -> None:
    """Join the cluster at ``address``, or with None start one that ends with us. own, joined: further options of
    ``ray.init`` in the one case and in the other."""
    # Ray is slow to import, and bad options should be refused at once.
    import ray

    if address is not None:
        ray.init(address, **joined)
        return
    # "local": not the cluster of somebody else that may run on this machine, which Ray would look for.
    ray.init("local", include_dashboard=False, object_store_memory=_OBJECT_STORE_BYTES, **own)
