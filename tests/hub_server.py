"""A server on this machine that speaks the hub's protocol, as far as huggingface_hub uses it to
create a repository, to commit files to it, without git LFS, and to download them."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from huggingface_hub import constants

USER = 'me'


class Hub(ThreadingHTTPServer):
    """Repositories: for each name, the files of its only branch."""

    def __init__(self) -> None:
        super().__init__(('127.0.0.1', 0), Handler)
        self.url = f'http://127.0.0.1:{self.server_port}'
        self.repos: dict[str, dict[str, bytes]] = {}


class Handler(BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'
    server: Hub

    def log_message(self, *_args: object) -> None:
        pass

    def body(self) -> bytes:
        if self.headers.get('Transfer-Encoding') == 'chunked':
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b''.join(parts)
        return self.rfile.read(int(self.headers.get('Content-Length', 0)))

    def answer(self, content: bytes = b'', status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in {'Content-Length': str(len(content)), **headers}.items():
            self.send_header(name.replace('_', '-'), value)
        self.end_headers()
        if self.command != 'HEAD':
            self.wfile.write(content)

    def answer_json(self, value: object) -> None:
        self.answer(json.dumps(value).encode(), Content_Type='application/json')

    def commit_of(self, repo: str) -> str:
        files = self.server.repos[repo].items()
        hashes = sorted((name, hashlib.sha256(content).hexdigest()) for name, content in files)
        return hashlib.sha1(repr(hashes).encode()).hexdigest()

    def do_POST(self) -> None:  # noqa: N802 the name that http.server calls
        path, body, hub = urlsplit(self.path).path, self.body(), self.server
        if path == '/api/repos/create':
            asked = json.loads(body)
            repo = f'{asked["organization"] or USER}/{asked["name"]}'
            hub.repos.setdefault(repo, {})
            self.answer_json(dict(url=f'{hub.url}/{repo}', name=repo, id=repo))
        elif path == '/api/validate-yaml':
            self.answer_json(dict(errors=[], warnings=[]))
        elif '/preupload/' in path:
            answer = dict(uploadMode='regular', shouldIgnore=False, oid=None)
            files = [dict(answer, path=file['path']) for file in json.loads(body)['files']]
            self.answer_json(dict(files=files))
        elif '/commit/' in path:
            repo = path.removeprefix('/api/models/').partition('/commit/')[0]
            for entry in map(json.loads, body.splitlines()):
                value = entry['value']
                if entry['key'] == 'file':
                    hub.repos[repo][value['path']] = base64.b64decode(value['content'])
            commit = self.commit_of(repo)
            url = f'{hub.url}/{repo}/commit/{commit}'
            self.answer_json(dict(success=True, commitOid=commit, commitUrl=url, hookOutput=''))
        else:
            self.answer(status=404)

    def do_GET(self) -> None:  # noqa: N802
        repo, _, rest = urlsplit(self.path).path.strip('/').partition('/resolve/')
        files = self.server.repos.get(repo)
        if files is None:
            self.answer(status=404, X_Error_Code='RepoNotFound')
            return
        name = rest.partition('/')[2]
        commit, content = self.commit_of(repo), files.get(name, b'')
        etag = f'"{hashlib.sha256(content).hexdigest()}"'
        if name in files:
            self.answer(content, ETag=etag, X_Repo_Commit=commit)
        else:
            self.answer(status=404, X_Error_Code='EntryNotFound', X_Repo_Commit=commit)

    do_HEAD = do_GET


@contextmanager
def serve_hub(monkeypatch: pytest.MonkeyPatch, cache: Path) -> Iterator[Hub]:
    """A server that huggingface_hub takes for the hub, with a cache of its own.

    The constants are those that HF_ENDPOINT, HF_HUB_CACHE and HF_HUB_DISABLE_XET set.
    """
    with Hub() as hub:
        threading.Thread(target=hub.serve_forever, args=[0.01], daemon=True).start()
        template = hub.url + '/{repo_id}/resolve/{revision}/{filename}'
        monkeypatch.setattr(constants, 'ENDPOINT', hub.url)
        monkeypatch.setattr(constants, 'HUGGINGFACE_CO_URL_TEMPLATE', template)
        monkeypatch.setattr(constants, 'HF_HUB_CACHE', str(cache))
        monkeypatch.setattr(constants, 'HF_HUB_DISABLE_XET', True)
        yield hub
        hub.shutdown()
