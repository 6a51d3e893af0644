"""API keys: where they come from and whether a request carries one.

Only SHA-256 digests are kept and compared, in constant time. It does not know which routes are open.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from pathlib import Path

ENVIRONMENT_NAME = "FORETOKEN_API_KEY"
MIN_KEY_CHARACTERS = 8


class KeyFileError(Exception):
    """The key file cannot be used; the message is the reason to show."""


class ApiKeys:
    """The keys that open the server; with none, it is open to everybody who reaches it."""

    def __init__(self, keys: set[str]) -> None:
        self._digests = tuple(hashlib.sha256(key.encode("utf-8")).digest() for key in sorted(keys))

    @classmethod
    def load(cls, key_file: str | None, environ: Mapping[str, str]) -> ApiKeys:
        """Keys of the file (one a line, ``#`` comments) and of the environment. KeyFileError when the file has none."""
        keys: set[str] = set()
        if environ.get(ENVIRONMENT_NAME):
            keys.add(environ[ENVIRONMENT_NAME].strip())
        if key_file is not None:
            try:
                lines = Path(key_file).read_text(encoding="utf-8").splitlines()
            except (OSError, UnicodeDecodeError) as error:
                raise KeyFileError(f"--api-key-file {key_file} cannot be read: {error}") from None
            from_file = {line.strip() for line in lines if line.strip() and not line.strip().startswith("#")}
            if not from_file:
                raise KeyFileError(f"--api-key-file {key_file} holds no key")
            keys |= from_file
        if any(len(key) < MIN_KEY_CHARACTERS for key in keys):
            raise KeyFileError(f"an API key is shorter than {MIN_KEY_CHARACTERS} characters")
        return cls(keys)

    def __bool__(self) -> bool:
        return bool(self._digests)

    def match(self, authorization: str | None) -> str | None:
        """A name for the key in ``Authorization: Bearer ...`` (it salts the prefix cache), None without a match."""
        scheme, _, key = (authorization or "").partition(" ")
        digest = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        found: str | None = None
        for known in self._digests:
            if hmac.compare_digest(known, digest):
                found = hashlib.sha256(b"cache salt" + known).hexdigest()[:32]
        return found if scheme.lower() == "bearer" else None
