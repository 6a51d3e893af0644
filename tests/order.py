"""Which test files share a process of pytest-xdist, and which begin first. It knows names of files and no test.

A file stays whole, as with ``--dist loadfile``. Files that talk to the same costly servers go to one process, where
those start once; the longest files begin first, so that no process is left with one at the end.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

TOGETHER = {
    "the default model": ("e2e/test_default_model", "e2e/test_reports_of_"),
    "the browser": ("page/",),
}
"""Name of a group -> how the paths of its files begin, below tests/."""
LONGEST = (
    *(beginning for group in TOGETHER.values() for beginning in group),
    "eval/test_chaos_slice",
    "e2e/test_submission_of_this_project",
    "e2e/test_life_cycle_of_a_real_server",
    "scripts/test_slurm_training",
    "serve/parallel/test_rank_processes",
    "drafter_train/test_resume",
    "drafter_train/test_generate_ray",
    "scripts/cluster/test_cluster_contract",
    "serve/model/test_triton_layers",
)
"""Half a minute and more, the longest first."""


def _file(nodeid: str) -> str:
    return nodeid.partition("::")[0].removeprefix("tests/")


def group(nodeid: str) -> str:
    """Tests with the same group run in the same process: those of a file, or of files that belong together."""
    file = _file(nodeid)
    return next((name for name, beginnings in TOGETHER.items() if file.startswith(beginnings)), file)


def place(nodeid: str) -> int:
    """Tests run in the order of their places, and within one as they were found."""
    file = _file(nodeid)
    return next((place for place, beginning in enumerate(LONGEST) if file.startswith(beginning)), len(LONGEST))


def scheduler(config: pytest.Config, log: object) -> object:
    """A scheduler of pytest-xdist that hands out whole groups in the order in which they were found."""
    from xdist.scheduler import LoadFileScheduling

    config.option.loadscopereorder = False
    made = LoadFileScheduling(config, log)
    made._split_scope = group
    return made


def sort(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: place(item.nodeid))


def unknown(files: Sequence[str]) -> list[str]:
    """Beginnings that no file has."""
    return [beginning for beginning in LONGEST if not any(file.startswith(beginning) for file in files)]
