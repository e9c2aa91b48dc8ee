# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""A Hub in memory: the HTTP endpoints that `huggingface_hub` uses to create, write and read model repositories.

Requests are answered as the Hub answers them, errors included, so that client code runs unchanged with ``HF_ENDPOINT``
set to `Hub.url`. Large files go through Git LFS (clients must run with ``HF_HUB_DISABLE_XET=1``).
"""

import base64
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

import yaml
from huggingface_hub.repocard import REGEX_YAML_BLOCK

USER, TOKEN = "tester", "hf_test"
PIPELINES = (
    "text-generation",
    "text-classification",
    "token-classification",
    "question-answering",
    "feature-extraction",
)
LICENSES = ("apache-2.0", "mit", "cc-by-4.0", "cc0-1.0", "llama3", "other")


@dataclass
class Repository:
    """A repository's settings, and its commits: newest last, each a mapping of path -> (content, whether it is LFS)."""

    private: bool
    commits: dict[str, dict[str, tuple[bytes, bool]]] = field(default_factory=dict)

    def commit(self, files: dict[str, tuple[bytes, bool]]) -> str:
        digest = hashlib.sha1(repr((len(self.commits), sorted(files))).encode()).hexdigest()
        self.commits[digest] = files
        return digest

    @property
    def head(self) -> str:
        return next(reversed(self.commits))

    def resolve(self, revision: str) -> str | None:
        return self.head if revision == "main" else revision if revision in self.commits else None

    @property
    def files(self) -> dict[str, bytes]:
        """Path -> content, as of the newest commit."""
        return {path: content for path, (content, _) in self.commits[self.head].items()}


def metadata_errors(content: str) -> list[str]:
    """What the Hub's specification of model cards (modelcard.md of its documentation) finds wrong with a README.md."""
    block = REGEX_YAML_BLOCK.search(content)
    data = yaml.safe_load(block.group(2)) if block else None
    if not isinstance(data, dict):
        return ["the YAML metadata block is missing or not a mapping"]

    def strings(value) -> bool:
        values = value if isinstance(value, list) else [value]
        return all(isinstance(item, str) and item for item in values)

    errors = [f"{key} must be a string or a list of strings" for key in ("language", "tags", "datasets", "metrics",
              "base_model", "library_name") if key in data and not strings(data[key])]  # fmt: skip
    for key, known in (("pipeline_tag", PIPELINES), ("license", LICENSES)):
        if key in data and data[key] not in known:
            errors.append(f"{key} {data[key]!r} is none of {', '.join(known)}")
    languages = data.get("language", [])
    for code in [languages] if isinstance(languages, str) else languages:
        if not re.fullmatch(r"[a-z]{2,3}|code|multilingual", code):
            errors.append(f"language {code!r} is no ISO 639 code")
    models = data.get("base_model", [])
    for name in [models] if isinstance(models, str) else models:
        if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
            errors.append(f"base_model {name!r} is no repository id")
    for model in data.get("model-index", []):
        if not model.get("name") or not isinstance(model.get("results"), list):
            errors.append("model-index needs name and results")
            continue
        for result in model["results"]:
            for section, keys in (("task", ("type",)), ("dataset", ("type", "name"))):
                errors += [f"model-index: {section}.{key} is required" for key in keys
                           if not isinstance(result.get(section, {}).get(key), str)]  # fmt: skip
            for metric in result.get("metrics") or [{}]:
                if not isinstance(metric.get("type"), str) or metric.get("value") is None:
                    errors.append("model-index: metrics need type and value")
    return errors


class Hub:
    """The server, in a thread of its own; a context manager."""

    def __init__(self):
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}  # LFS content by SHA-256
        self.requests: list[str] = []
        self.lock = threading.Lock()
        handler = type("Handler", (RequestHandler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> "Hub":
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def environment(self, home) -> dict[str, str]:
        """The environment variables of a client whose caches are under `home`."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HOME": str(home),
            "HF_MODULES_CACHE": str(home / "modules"),
            "HF_TOKEN": TOKEN,
        }


class RequestHandler(BaseHTTPRequestHandler):
    """One request, answered by the method that `ROUTES` names for its verb and path."""

    hub: Hub
    protocol_version = "HTTP/1.1"
    ROUTES = (
        ("POST", r"/api/repos/create", "create"),
        ("POST", r"/api/validate-yaml", "validate"),
        ("POST", r"/api/models/(?P<name>[^/]+/[^/]+)/preupload/(?P<revision>[^/]+)", "preupload"),
        ("POST", r"/api/models/(?P<name>[^/]+/[^/]+)/commit/(?P<revision>[^/]+)", "commit"),
        ("GET", r"/api/models/(?P<name>[^/]+/[^/]+)(/revision/(?P<revision>[^/]+))?", "info"),
        ("GET", r"/api/models/(?P<name>[^/]+/[^/]+)/tree/(?P<revision>[^/]+)(/(?P<path>.*))?", "tree"),
        ("POST", r"/(?P<name>[^/]+/[^/]+)\.git/info/lfs/objects/batch", "lfs_batch"),
        ("PUT", r"/lfs/(?P<digest>[0-9a-f]{64})", "lfs_put"),
        ("POST", r"/lfs/(?P<digest>[0-9a-f]{64})/verify", "lfs_verify"),
        ("HEAD", r"/(?P<name>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)", "resolve"),
        ("GET", r"/(?P<name>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)", "resolve"),
    )

    def log_message(self, *_) -> None:
        """Tests read `Hub.requests` instead."""

    def _handle(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        with self.hub.lock:
            self.hub.requests.append(f"{self.command} {path}")
            for verb, pattern, route in self.ROUTES:
                if verb == self.command and (match := re.fullmatch(pattern, path)):
                    getattr(self, f"_{route}")(**match.groupdict())
                    return
        self._fail(501, "NotImplemented", f"no such endpoint: {self.command} {path}")

    do_GET = do_HEAD = do_POST = do_PUT = _handle

    def _send(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _reply(self, value, status: int = 200) -> None:
        self._send(status, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _fail(self, status: int, code: str, message: str) -> None:
        headers = {"X-Error-Code": code, "X-Error-Message": message, "Content-Type": "application/json"}
        self._send(status, json.dumps({"error": message}).encode(), headers)

    def _may_write(self) -> bool:
        if self.headers.get("Authorization") == f"Bearer {TOKEN}":
            return True
        self._fail(401, "Unauthorized", "Invalid credentials in Authorization header")
        return False

    def _find(self, name: str, revision: str | None = None) -> tuple[Repository, str] | None:
        repository = self.hub.repositories.get(name)
        if repository is None:
            self._fail(404, "RepoNotFound", "Repository not found")
            return None
        digest = repository.resolve(revision or "main")
        if digest is None:
            self._fail(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return None
        return repository, digest

    def _create(self) -> None:
        if not self._may_write():
            return
        wanted = json.loads(self.body)
        name = f"{wanted.get('organization') or USER}/{wanted['name']}"
        if not name.startswith(f"{USER}/"):
            self._fail(403, "Forbidden", f"You don't have the rights to create a model under {name.split('/')[0]}")
            return
        reply = {"url": f"{self.hub.url}/{name}", "name": name}
        if name in self.hub.repositories:
            self._reply({"error": "You already created this model repo", **reply}, 409)
            return
        self.hub.repositories[name] = repository = Repository(private=wanted.get("visibility") == "private")
        repository.commit({".gitattributes": (b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n", False)})
        self._reply(reply)

    def _validate(self) -> None:
        errors = metadata_errors(json.loads(self.body)["content"])
        reply = {"errors": [{"message": error} for error in errors], "warnings": []}
        self._reply(reply, 400 if errors else 200)

    def _preupload(self, name: str, revision: str) -> None:
        if not self._may_write() or (found := self._find(name, revision)) is None:
            return
        repository, digest = found
        files = []
        for file in json.loads(self.body)["files"]:
            content, is_lfs = repository.commits[digest].get(file["path"], (None, False))
            # Of a plain file the id is that of its Git blob.
            oid = None
            if content is not None:
                git = b"blob %d\0" % len(content) + content
                oid = hashlib.sha256(content).hexdigest() if is_lfs else hashlib.sha1(git).hexdigest()
            mode = "lfs" if file["path"].endswith((".safetensors", ".bin", ".png")) else "regular"
            files.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        self._reply({"files": files})

    def _lfs_batch(self, name: str) -> None:
        if not self._may_write() or self._find(name) is None:
            return
        objects = []
        for item in json.loads(self.body)["objects"]:
            href = f"{self.hub.url}/lfs/{item['oid']}"
            actions = {} if item["oid"] in self.hub.objects else {
                "actions": {"upload": {"href": href}, "verify": {"href": f"{href}/verify"}}
            }  # fmt: skip
            objects.append({**item, **actions})
        self._reply({"transfer": "basic", "objects": objects})

    def _lfs_put(self, digest: str) -> None:
        if hashlib.sha256(self.body).hexdigest() != digest:
            self._fail(400, "BadDigest", "the content is not what its name says")
            return
        self.hub.objects[digest] = self.body
        self._send(200, b"")

    def _lfs_verify(self, digest: str) -> None:
        if len(self.hub.objects.get(digest, b"")) == json.loads(self.body)["size"]:
            self._send(200, b"")
        else:
            self._fail(404, "EntryNotFound", "the object was not uploaded")

    def _commit(self, name: str, revision: str) -> None:
        if not self._may_write() or (found := self._find(name, revision)) is None:
            return
        repository, digest = found
        files = dict(repository.commits[digest])
        for line in self.body.splitlines():
            operation = json.loads(line)
            value = operation["value"]
            if operation["key"] == "file":
                files[value["path"]] = (base64.b64decode(value["content"]), False)
            elif operation["key"] == "lfsFile":
                if value["oid"] not in self.hub.objects:
                    self._fail(400, "BadRequest", f"LFS object of {value['path']} was not uploaded")
                    return
                files[value["path"]] = (self.hub.objects[value["oid"]], True)
        if errors := metadata_errors(files["README.md"][0].decode()) if "README.md" in files else []:
            self._fail(400, "BadRequest", f"Invalid metadata in README.md: {'; '.join(errors)}")
            return
        oid = repository.commit(files)
        self._reply({"commitUrl": f"{self.hub.url}/{name}/commit/{oid}", "commitOid": oid})

    def _info(self, name: str, revision: str | None) -> None:
        if (found := self._find(name, revision)) is None:
            return
        repository, digest = found
        siblings = [{"rfilename": path} for path in repository.commits[digest]]
        self._reply({"id": name, "sha": digest, "private": repository.private, "siblings": siblings})

    def _tree(self, name: str, revision: str, path: str | None) -> None:
        if (found := self._find(name, revision)) is None:
            return
        repository, digest = found
        files = {n: c for n, c in repository.commits[digest].items() if not path or n.startswith(f"{path}/")}
        if path and not files:
            self._fail(404, "EntryNotFound", f"{path} does not exist on {revision}")
            return
        self._reply([
            {"type": "file", "path": file, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
            for file, (content, _) in files.items()
        ])  # fmt: skip

    def _resolve(self, name: str, revision: str, path: str) -> None:
        if (found := self._find(name, revision)) is None:
            return
        repository, digest = found
        if path not in repository.commits[digest]:
            self._fail(404, "EntryNotFound", "Entry not found")
            return
        content, _ = repository.commits[digest][path]
        etag = f'"{hashlib.sha256(content).hexdigest()}"'
        self._send(200, content, {"ETag": etag, "X-Linked-ETag": etag, "X-Linked-Size": str(len(content)),
                                  "X-Repo-Commit": digest})  # fmt: skip
