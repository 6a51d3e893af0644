"""Every call to the model hub in one place: who may write where, upload, what a revision holds, download of that.

Errors are HubError with one sentence that says what to do. A call that fails for a passing reason (connection, 429,
5xx) is tried again a few times; a refusal is not. ``HF_ENDPOINT`` and ``HF_TOKEN`` work as everywhere else. This file
knows nothing of drafters.
"""

from __future__ import annotations

import fnmatch
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from drafter_train.progress import say

T = TypeVar("T")
UPLOAD_PATTERNS = ("*.safetensors", "*.json", "*.txt", "README.md")
GRADER_PATTERNS = ("*.safetensors", "*.json", "tokenizer*", "*.txt")
GRADER_LIMIT_BYTES = 2_500_000_000
_PASSING = (408, 425, 429, 500, 502, 503, 504)


class HubError(RuntimeError):
    """The hub refused, cannot be reached or does not hold what it should; the message says what to do."""


@dataclass(frozen=True)
class Patience:
    """How often a call is tried, and the pause before the second try, doubled before each further one."""

    attempts: int = 4
    pause_seconds: float = 2.0


@dataclass(frozen=True)
class RepoFile:
    """size in bytes; sha256 of the content where the hub keeps it (large files)."""

    size: int
    sha256: str | None


class Hub:
    """One endpoint and token. Nothing is asked of it before ``check_token``."""

    def __init__(self, token: str | None = None, patience: Patience | None = None) -> None:
        from huggingface_hub import HfApi, constants

        self.endpoint: str = os.environ.get("HF_ENDPOINT", constants.ENDPOINT).rstrip("/")
        self._api: Any = HfApi(endpoint=self.endpoint, token=token)
        self._patience = patience or Patience()

    def _call(self, what: str, run: Callable[[], T]) -> T:
        import httpx
        from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

        for attempt in range(1, self._patience.attempts + 1):
            try:
                return run()
            except LocalTokenNotFoundError:
                raise HubError(f"{what}: no token; set HF_TOKEN or run: hf auth login") from None
            except (httpx.HTTPError, OSError, RuntimeError) as error:
                # An upload's workers wrap what happened to one file in a RuntimeError.
                cause = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ else error
                code = cause.response.status_code if isinstance(cause, HfHubHTTPError) else None
                if code in (401, 403):
                    raise HubError(
                        f"{what}: {self.endpoint} refused the token (HTTP {code}); it needs write access"
                    ) from error
                if code is not None and code not in _PASSING:
                    raise HubError(f"{what}: {self.endpoint} answered HTTP {code}: {error}") from error
                reason = f"HTTP {code}" if code else f"{type(error).__name__}: {error}"
                if attempt == self._patience.attempts:
                    raise HubError(f"{what}: {self.endpoint} failed {attempt} times, last with {reason}") from error
                pause = self._patience.pause_seconds * 2 ** (attempt - 1)
                say(f"{what}: {reason}; trying again in {pause:.0f} s")
                time.sleep(pause)
        raise AssertionError("attempts is at least 1")

    def check_token(self, repo: str) -> str:
        """The name behind the token, once it is sure that it may write to ``repo`` (OWNER/NAME). Raises HubError."""
        owner, slash, name = repo.partition("/")
        if not (owner and slash and name) or "/" in name:
            raise HubError(f"the repository must be OWNER/NAME, got {repo!r}")
        me = self._call("checking the token", self._api.whoami)
        role = ((me.get("auth") or {}).get("accessToken") or {}).get("role")
        if role == "read":
            raise HubError("the token may only read; make one with write access")
        owners = [me["name"], *(org["name"] for org in me.get("orgs", []))]
        if owner not in owners:
            raise HubError(f"the token belongs to {me['name']}, who cannot write to {owner} (may: {', '.join(owners)})")
        return str(me["name"])

    def create(self, repo: str, private: bool) -> None:
        """Make the repository; one that is there stays as it is, and is refused where only some can read it and that
        was not asked for."""
        self._call(f"creating {repo}", lambda: self._api.create_repo(repo, private=private, exist_ok=True))
        info = self._call(f"reading {repo}", lambda: self._api.repo_info(repo))
        if not private and (info.private or info.gated):
            raise HubError(
                f"{repo} is {'private' if info.private else 'gated'}, and a grader cannot read it: open it on the hub, "
                "or publish with --private"
            )

    def upload(self, repo: str, folder: Path, message: str) -> None:
        """Upload what belongs to a drafter folder. May be several commits; what is there already is not sent again."""
        self._call(
            f"uploading to {repo}",
            lambda: self._api.upload_folder(
                repo_id=repo, folder_path=folder, allow_patterns=list(UPLOAD_PATTERNS), commit_message=message
            ),
        )

    def final_revision(self, repo: str) -> str:
        """The commit that ``main`` is at now: 40 hex digits."""
        info = self._call(f"reading {repo}", lambda: self._api.repo_info(repo, revision="main"))
        sha = str(info.sha)
        if len(sha) != 40 or set(sha) - set("0123456789abcdef"):
            raise HubError(f"{repo}: main is at {sha!r}, which is not a commit of 40 hex digits")
        return sha

    def files(self, repo: str, revision: str) -> dict[str, RepoFile]:
        """What a grader would fetch of ``revision``: weights, config and tokenizer files by name."""
        info = self._call(
            f"reading {repo} at {revision}",
            lambda: self._api.repo_info(repo, revision=revision, files_metadata=True),
        )
        return {
            item.rfilename: RepoFile(item.size or 0, item.lfs.sha256 if item.lfs else None)
            for item in info.siblings
            if belongs(item.rfilename, GRADER_PATTERNS)
        }

    def download(self, repo: str, revision: str, folder: Path) -> list[str]:
        """Fetch ``revision`` into ``folder`` as a grader would: weights, config and tokenizer only, at most 2.5 GB.
        Returns the names that came."""
        wanted = self.files(repo, revision)
        total = sum(file.size for file in wanted.values())
        if total > GRADER_LIMIT_BYTES:
            raise HubError(f"{repo} at {revision} holds {total} bytes of weights and config, over {GRADER_LIMIT_BYTES}")
        self._call(
            f"downloading {repo} at {revision}",
            lambda: self._api.snapshot_download(
                repo, revision=revision, local_dir=folder, allow_patterns=list(GRADER_PATTERNS)
            ),
        )
        return sorted(wanted)


def belongs(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)
