"""Local server with the few requests of the Hugging Face Hub that an upload and a download of a run need.

The requests are those that huggingface_hub 2.4 sends: creation of a repository, its information, validation
of the model card, pre-upload, Git LFS (batch, transfer ``basic``), commits, and ``resolve`` with a redirect
to another host for LFS files. Storage by Xet is left out. Repositories are kept in memory, and each commit
holds all files. A test can make the server lie: announce other sizes, interrupt a transfer, or answer with
another status.
"""

import base64
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

from huggingface_hub import ModelCard, constants

TOKEN = "hf_" + "t" * 34
"""The only valid token; it may write everywhere, except in the namespace "others"."""
ROUTES = {
    "POST": {
        r"/api/repos/create": "create",
        r"/api/validate-yaml": "validate",
        r"/api/models/(?P<repo>[^/]+/[^/]+)/preupload/[^/]+": "preupload",
        r"/api/models/(?P<repo>[^/]+/[^/]+)/commit/[^/]+": "commit",
        r"/(?P<repo>[^/]+/[^/]+)\.git/info/lfs/objects/batch": "lfs_batch",
    },
    "PUT": {r"/lfs/(?P<oid>\w+)": "lfs_upload"},
    "GET": {
        r"/api/models/(?P<repo>[^/]+/[^/]+)(/revision/(?P<revision>.+))?": "info",
        r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<name>.+)": "resolve",
        r"/cdn/(?P<oid>\w+)/(?P<name>.+)": "cdn",
    },
}
ROUTES["HEAD"] = ROUTES["GET"]


@dataclass
class Repository:
    """Repository with its commits.

    Args:
        private: whether it needs the token.
        commits: hash of each commit -> its files, in order.
        refs: branch or tag -> hash.
        sizes: names of files -> announced sizes that differ from the true ones.
        interrupted: names of files whose transfer ends early.
        library: announced library; None for that of the model card.
    """

    private: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    sizes: dict[str, int | None] = field(default_factory=dict)
    interrupted: set[str] = field(default_factory=set)
    library: str | None = None

    def commit(self, files: dict[str, bytes]) -> str:
        """Add a commit to the main branch and return its hash."""
        sha = hashlib.sha1(f"{len(self.commits)}{sorted(files)}".encode()).hexdigest()
        self.commits[sha] = files
        self.refs["main"] = sha
        return sha

    @property
    def files(self) -> dict[str, bytes]:
        """Files of the main branch."""
        return self.commits[self.refs["main"]]


class HubServer:
    """Server on a free port of this machine, as a context manager.

    Attributes:
        repositories: repositories by name.
        requests: method and path of each request.
        failing: status with which all requests are answered; None for the usual answers.
    """

    def __init__(self):
        self.repositories: dict[str, Repository] = {}
        self.requests: list[str] = []
        self.lfs: dict[str, bytes] = {}
        self.failing: int | None = None
        server = self

        class Handler(_Handler):
            hub = server

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self.cdn_url = (
            f"http://localhost:{self._server.server_port}/cdn"  # another host, as the CDN of the Hub
        )

    def __enter__(self) -> "HubServer":
        threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        ).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def add(self, name: str, files: dict[str, bytes], **attributes: object) -> Repository:
        """Create a repository with one commit."""
        repository = Repository(**attributes)
        repository.commit(files)
        self.repositories[name] = repository
        return repository


def use(server_url: str, monkeypatch) -> None:
    """Make huggingface_hub use a server with the valid token, without Xet, and no state of this user."""
    template = "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", server_url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{server_url}{template}")
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", "/nonexistent/token")
    monkeypatch.setenv("HF_TOKEN", TOKEN)


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def _route(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.hub.requests.append(f"{self.command} {self.path}")
        path = unquote(urlsplit(self.path).path)
        for pattern, name in ROUTES[self.command].items():
            if self.hub.failing is None and (match := re.fullmatch(pattern, path)):
                getattr(self, f"_{name}")(**match.groupdict())
                return
        self._answer(self.hub.failing or 404, b"<html>not the Hub</html>")

    do_GET = do_HEAD = do_POST = do_PUT = _route  # noqa: N815 - names of http.server

    def _answer(self, status: int, content: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in ({"Content_Length": str(len(content))} | headers).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _json(self, document: object) -> None:
        self._answer(200, json.dumps(document).encode(), Content_Type="application/json")

    def _error(self, status: int, code: str, message: str) -> None:
        self._answer(status, b"", X_Error_Code=code, X_Error_Message=message)

    @property
    def _authorized(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def _repository(self, name: str) -> Repository | None:
        """Return a repository; None, after the answer of the Hub, if it is missing or not visible."""
        found = self.hub.repositories.get(name)
        if found is None or (found.private and not self._authorized):
            self._error(404 if self._authorized else 401, "RepoNotFound", "Repository not found")
            return None
        return found

    def _create(self) -> None:
        request = json.loads(self.body)
        name = f"{request['organization']}/{request['name']}"
        if not self._authorized:
            self._error(401, "", "Invalid username or password.")
        elif request["organization"] == "others":
            self._error(403, "", 'You don\'t have the rights to create a model under the namespace "others"')
        elif name in self.hub.repositories:
            self._answer(409, json.dumps({"url": f"{self.hub.url}/{name}"}).encode())
        else:
            private = request.get("visibility") == "private" or bool(request.get("private"))
            self.hub.add(name, {".gitattributes": b"*.zip filter=lfs\n"}, private=private)
            self._json({"url": f"{self.hub.url}/{name}", "name": name})

    def _validate(self) -> None:
        """Answer whether the header of a model card is valid: the Hub also checks the licence and so on."""
        card = ModelCard(json.loads(self.body)["content"])
        errors = [] if card.data.library_name else [{"message": "library_name is missing"}]
        self._json({"errors": errors, "warnings": []})

    def _info(self, repo: str, revision: str | None) -> None:
        repository = self._repository(repo)
        if repository is None:
            return
        sha = self._resolve_revision(repository, revision or "main")
        if sha is None:
            return
        files = repository.commits[sha]
        sizes = {name: len(data) for name, data in files.items()} | repository.sizes
        blobs = "blobs" in self.path
        siblings = [{"rfilename": name} | ({"size": sizes[name]} if blobs else {}) for name in files]
        library = repository.library or _library(files)
        document = {"id": repo, "sha": sha, "private": repository.private, "siblings": siblings, "tags": []}
        self._json(document | ({"library_name": library} if library else {}))

    def _resolve_revision(self, repository: Repository, revision: str) -> str | None:
        sha = repository.refs.get(revision, revision)
        if sha not in repository.commits:
            self._error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return None
        return sha

    def _preupload(self, repo: str) -> None:
        files = json.loads(self.body)["files"]
        modes = {
            file["path"]: "lfs" if file["path"].endswith((".zip", ".gif")) else "regular" for file in files
        }
        self._json(
            {
                "files": [
                    {"path": p, "uploadMode": m, "shouldIgnore": False, "oid": None} for p, m in modes.items()
                ]
            }
        )

    def _lfs_batch(self, repo: str) -> None:
        objects = [{"oid": each["oid"], "size": each["size"]} for each in json.loads(self.body)["objects"]]
        for each in objects:
            if each["oid"] not in self.hub.lfs:
                each["actions"] = {"upload": {"href": f"{self.hub.url}/lfs/{each['oid']}"}}
        self._json({"transfer": "basic", "objects": objects})

    def _lfs_upload(self, oid: str) -> None:
        assert hashlib.sha256(self.body).hexdigest() == oid
        self.hub.lfs[oid] = self.body
        self._answer(200)

    def _commit(self, repo: str) -> None:
        if not self._authorized:
            self._error(403, "", "Authorization error.")
            return
        repository = self.hub.repositories[repo]
        files = dict(repository.files)
        for line in self.body.splitlines():
            operation = json.loads(line)
            value = operation["value"]
            if operation["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif operation["key"] == "lfsFile":
                files[value["path"]] = self.hub.lfs[value["oid"]]
            elif operation["key"] == "deletedFile":
                del files[value["path"]]
        sha = repository.commit(files)
        self._json({"commitUrl": f"{self.hub.url}/{repo}/commit/{sha}", "commitOid": sha})

    def _resolve(self, repo: str, revision: str, name: str) -> None:
        repository = self._repository(repo)
        if repository is None:
            return
        sha = self._resolve_revision(repository, revision)
        if sha is None:
            return
        if name not in repository.commits[sha]:
            self._error(404, "EntryNotFound", "Entry not found")
            return
        content = repository.commits[sha][name]
        digest = hashlib.sha256(content).hexdigest()
        headers = {"X_Repo_Commit": sha, "ETag": f'"{digest}"'}
        if name in repository.interrupted:
            self._interrupt(content, headers)
        elif name.endswith(".zip"):
            self.hub.lfs[digest] = content
            headers |= {"X_Linked_Size": str(len(content)), "X_Linked_ETag": f'"{digest}"'}
            self._answer(302, b"", Location=f"{self.hub.cdn_url}/{digest}/{name}", **headers)
        else:
            self._answer(200, content, **headers)

    def _interrupt(self, content: bytes, headers: dict[str, str]) -> None:
        """Close the connection in the middle of a transfer, and refuse to resume it."""
        if "Range" in self.headers:
            self._answer(503, b"")
        elif self.command == "HEAD":
            self._answer(200, content, **headers)
        else:
            self._answer(200, content[: len(content) // 2], Content_Length=str(len(content)), **headers)
            self.close_connection = True

    def _cdn(self, oid: str, name: str) -> None:
        self._answer(200, self.hub.lfs[oid])


def _library(files: dict[str, bytes]) -> str | None:
    """Return the library that the model card names."""
    text = files.get("README.md", b"").decode()
    return ModelCard(text).data.library_name if text.startswith("---") else None
