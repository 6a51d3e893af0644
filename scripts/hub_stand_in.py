"""A model hub on this machine: the part of its HTTP API that huggingface_hub calls to publish and fetch a repository,
and that ``datasets`` calls to stream a data set (``Store.put_dataset``).

``python -m scripts.hub_stand_in FOLDER COMMAND ...`` runs a command with ``HF_ENDPOINT`` and ``HF_TOKEN`` set to it and
keeps what was published in FOLDER, for the next command. Faults are switched on by name, so that a test says what goes
wrong: see ``Faults``. It checks no licence, keeps one user, and listens on 127.0.0.1 only.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_goodtoken"


@dataclass
class Faults:
    """``busy``: how many requests are answered 503 first. ``lose_upload``: objects cannot be stored. ``spoil``: name of
    a file that comes back with other bytes."""

    busy: int = 0
    lose_upload: bool = False
    spoil: str = ""


@dataclass
class Store:
    """One user's repositories: every commit is a whole tree of name -> bytes. With a ``folder`` they are kept there."""

    folder: Path | None = None
    faults: Faults = field(default_factory=Faults)
    role: str = "write"
    commits: dict[str, list[tuple[str, dict[str, bytes]]]] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    private: dict[str, bool] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    requests: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.folder is None or not (self.folder / "store.json").exists():
            return
        kept = json.loads((self.folder / "store.json").read_text(encoding="utf-8"))
        self.private = kept["private"]
        for repo, history in kept["commits"].items():
            self.commits[repo] = [
                (sha, {name: (self.folder / digest).read_bytes() for name, digest in files.items()})
                for sha, files in history
            ]
        for history in self.commits.values():
            for _, files in history:
                self.objects |= {_sha256(data): data for data in files.values()}

    def _keep(self) -> None:
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        for history in self.commits.values():
            for data in (data for _, files in history for data in files.values()):
                path = self.folder / _sha256(data)
                if not path.exists():
                    path.write_bytes(data)
        commits = {
            repo: [(sha, {name: _sha256(data) for name, data in files.items()}) for sha, files in history]
            for repo, history in self.commits.items()
        }
        part = self.folder / ".store.json.part"
        part.write_text(json.dumps({"private": self.private, "commits": commits}), encoding="utf-8")
        os.replace(part, self.folder / "store.json")

    def tree(self, repo: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        history = self.commits.get(repo, [])
        if revision == "main":
            return history[-1] if history else None
        return next((commit for commit in history if commit[0] == revision), None)

    def put_dataset(self, repo: str, files: dict[str, bytes]) -> str:
        """Publish a data set as OWNER/NAME (kept under datasets/OWNER/NAME); the commit."""
        self.private[f"datasets/{repo}"] = False
        return self.commit(f"datasets/{repo}", files)

    def commit(self, repo: str, changes: dict[str, bytes]) -> str:
        history = self.commits.setdefault(repo, [])
        files = {**(history[-1][1] if history else {}), **changes}
        text = repr((len(history), sorted((n, _sha256(d)) for n, d in files.items())))
        sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
        history.append((sha, files))
        self._keep()
        return sha


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    store: Store

    def log_message(self, *_: Any) -> None:
        pass

    def _send(self, code: int, body: Any = None, headers: dict[str, str] | None = None) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body if body is not None else {}).encode()
        self.send_response(code)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            data = b""
            while size := int(self.rfile.readline().split(b";")[0], 16):
                data += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return data
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _handle(self) -> None:
        body = self._body()
        path = unquote(urlsplit(self.path).path)
        if path == "/api/agent-harnesses":  # huggingface_hub describes who runs it; not part of publishing
            return self._send(404)
        self.store.requests.append(f"{self.command} {path}")
        if self.store.faults.busy > 0:
            self.store.faults.busy -= 1
            return self._send(503, {"error": "busy"})
        if not path.startswith("/objects/") and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._send(401, {"error": "Invalid credentials"})
        return self._route(path, body)

    do_GET = do_POST = do_PUT = do_HEAD = _handle

    def _route(self, path: str, body: bytes) -> None:
        parts = path.strip("/").split("/")
        if path == "/api/whoami-v2":
            me = {"name": "student", "type": "user", "orgs": [{"name": "lab"}]}
            return self._send(200, {**me, "auth": {"accessToken": {"role": self.store.role}}})
        if path == "/api/validate-yaml":
            return self._send(200, {"errors": [], "warnings": []})
        if path == "/api/repos/create":
            asked = json.loads(body)
            repo = f"{asked.get('organization') or 'student'}/{asked['name']}"
            if repo in self.store.private:
                return self._send(409, {"error": "exists", "url": f"http://{self.headers['Host']}/{repo}"})
            self.store.private[repo] = asked.get("visibility") == "private" or bool(asked.get("private"))
            self.store.commit(repo, {".gitattributes": b"*.safetensors filter=lfs\n"})
            return self._send(200, {"url": f"http://{self.headers['Host']}/{repo}"})
        if parts[:2] == ["api", "models"] and len(parts) >= 4:
            return self._repo(f"{parts[2]}/{parts[3]}", parts[4:], body)
        if parts[:2] == ["api", "datasets"] and len(parts) >= 4:
            return self._repo(f"datasets/{parts[2]}/{parts[3]}", parts[4:], body)
        if path.endswith(".git/info/lfs/objects/batch"):
            return self._batch(json.loads(body))
        if parts[0] == "objects":
            if self.store.faults.lose_upload:
                return self._send(400, {"error": "storage is full"})
            self.store.objects[parts[1]] = body
            return self._send(200)
        if parts[0] == "datasets" and len(parts) >= 6 and parts[3] == "resolve":
            return self._resolve("/".join(parts[:3]), parts[4], "/".join(parts[5:]))
        if len(parts) >= 5 and parts[2] == "resolve":
            return self._resolve(f"{parts[0]}/{parts[1]}", parts[3], "/".join(parts[4:]))
        return self._send(404, {"error": f"the stand-in has no {self.command} {path}"})

    def _batch(self, asked: dict[str, Any]) -> None:
        objects = []
        for item in asked["objects"]:
            entry: dict[str, Any] = {"oid": item["oid"], "size": item["size"]}
            if item["oid"] not in self.store.objects:
                entry["actions"] = {"upload": {"href": f"http://{self.headers['Host']}/objects/{item['oid']}"}}
            objects.append(entry)
        self._send(200, {"transfer": "basic", "objects": objects})

    def _repo(self, repo: str, rest: list[str], body: bytes) -> None:
        if repo not in self.store.private:
            return self._send(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
        if rest[:1] == ["preupload"]:
            modes = [
                {
                    "path": item["path"],
                    "uploadMode": "lfs" if item["path"].endswith(".safetensors") else "regular",
                    "shouldIgnore": False,
                }
                for item in json.loads(body)["files"]
            ]
            return self._send(200, {"files": modes})
        if rest[:1] == ["commit"]:
            changes: dict[str, bytes] = {}
            for line in body.decode().splitlines():
                entry = json.loads(line)
                value = entry["value"]
                if entry["key"] == "file":
                    changes[value["path"]] = base64.b64decode(value["content"])
                elif entry["key"] == "lfsFile":
                    changes[value["path"]] = self.store.objects[value["oid"]]
            sha = self.store.commit(repo, changes)
            url = f"http://{self.headers['Host']}/{repo}/commit/{sha}"
            return self._send(200, {"success": True, "commitOid": sha, "commitUrl": url})
        revision = rest[1] if rest[:1] in (["revision"], ["tree"]) else "main"
        found = self.store.tree(repo, revision)
        if found is None:
            return self._send(404, {"error": "Invalid rev id"}, {"X-Error-Code": "RevisionNotFound"})
        sha, files = found
        if rest[:1] == ["tree"]:
            return self._tree(files, "/".join(rest[2:]))
        siblings = [
            {"rfilename": n, "size": len(d), "blobId": _blob(d), **_lfs(n, d)} for n, d in sorted(files.items())
        ]
        gated = "manual" if repo in self.store.gated else False
        about = {"id": repo, "sha": sha, "private": self.store.private[repo], "gated": gated}
        return self._send(200, {**about, "siblings": siblings})

    def _tree(self, files: dict[str, bytes], folder: str) -> None:
        """What lies in ``folder``, which must have something: files and folders, or all files below it if so asked."""
        inside = f"{folder}/" if folder else ""
        below = {name: data for name, data in files.items() if name.startswith(inside)}
        if not below:
            return self._send(404, {"error": f"{folder} does not exist"}, {"X-Error-Code": "EntryNotFound"})
        deep = parse_qs(urlsplit(self.path).query).get("recursive", ["false"])[0].lower() == "true"
        found: dict[str, dict[str, Any]] = {}
        for name, data in sorted(below.items()):
            first, slash, _ = name.removeprefix(inside).partition("/")
            if slash and not deep:
                found[first] = {"type": "directory", "path": inside + first, "size": 0, "oid": _blob(first.encode())}
            else:
                found[name] = {"type": "file", "path": name, "size": len(data), "oid": _blob(data)}
        return self._send(200, list(found.values()))

    def _resolve(self, repo: str, revision: str, name: str) -> None:
        found = self.store.tree(repo, revision)
        if found is None or name not in found[1]:
            return self._send(404, {"error": "Entry not found"}, {"X-Error-Code": "EntryNotFound"})
        sha, files = found
        data = files[name]
        if name == self.store.faults.spoil:
            data = data[:-1] + bytes([data[-1] ^ 1])
        headers = {"ETag": f'"{_blob(data)}"', "X-Repo-Commit": sha, "Accept-Ranges": "bytes"}
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if asked is None:
            return self._send(200, data, headers)
        first, last = int(asked[1]), min(int(asked[2] or len(data)), len(data) - 1)
        if first > last:
            return self._send(416, {"error": "no such bytes"}, {"Content-Range": f"bytes */{len(data)}"})
        headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
        return self._send(206, data[first : last + 1], headers)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _lfs(name: str, data: bytes) -> dict[str, Any]:
    """What the hub says of a large file besides its name and size."""
    if not name.endswith(".safetensors"):
        return {}
    return {"lfs": {"sha256": _sha256(data), "size": len(data), "pointerSize": 130}}


def _blob(data: bytes) -> str:
    return hashlib.sha1(f"blob {len(data)}\0".encode() + data, usedforsecurity=False).hexdigest()


class HubStandIn:
    """``with HubStandIn() as hub: hub.url, hub.store``. With a folder it starts with what was published there."""

    def __init__(self, folder: Path | None = None) -> None:
        self.store = Store(folder)
        handler = type("Handler", (_Handler,), {"store": self.store})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> HubStandIn:
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.hub_stand_in", description=__doc__)
    parser.add_argument("folder", type=Path, help="where what is published is kept")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND", help="what to run against it")
    args = parser.parse_args(argv)
    if not args.command:
        parser.error("COMMAND is missing: what is to run against the hub?")
    with HubStandIn(args.folder) as hub:
        # Its files go over plain HTTP; a hub's other ways of transfer are not spoken here.
        environment = {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
        return subprocess.run(args.command, env={**os.environ, **environment}).returncode


if __name__ == "__main__":
    sys.exit(main())
