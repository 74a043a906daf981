"""Where `make` gets PyTorch: from an index of its own where that serves, else the registry."""

from __future__ import annotations

import http.server
import io
import os
import runpy
import socket
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from weft.base.pace import patient

TOOL = Path(__file__).resolve().parent.parent / "tools/install-torch"


def wheel(name, version, needs=""):
    """A package of nothing but metadata."""
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    if needs:
        metadata += f"Requires-Dist: {needs}\n"
    files = {
        f"{info}/METADATA": metadata,
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": "",
    }
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    return content.getvalue()


class Index:
    """A simple index at a port of the loopback: its pages, its files, what it was asked for."""

    def __init__(self):
        self.pages = {}
        self.asked = []
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def add(self, name, version, needs=""):
        file = f"{name}-{version}-py3-none-any.whl"
        self.pages[f"/{name}/"] = f'<a href="/files/{file}">{file}</a>'.encode()
        self.pages[f"/files/{file}"] = wheel(name, version, needs)

    def _handler(self):
        index = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                path = self.path.replace("%2B", "+")
                index.asked.append(path)
                page = index.pages.get(path)
                self.send_response(404 if page is None else 200)
                self.send_header("Content-Type", "text/html")
                self.end_headers()
                self.wfile.write(page or b"")

            def log_message(self, *_):
                pass

        return Handler

    def close(self):
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def registry():
    found = Index()
    found.add("torch", "2.13.0", needs="jinja2")
    found.add("jinja2", "3.0")
    yield found
    found.close()


@pytest.fixture
def index():
    found = Index()
    yield found
    found.close()


def installed(url, registry, folder, constraint="torch==2.13.0"):
    """What the tool installs into a folder, on a machine whose package registry is `registry`."""
    (folder / "constraints.txt").write_text(f"{constraint}\n")
    env = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    env |= {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": registry.url, "PIP_NO_CACHE_DIR": "1"}
    env["PIP_DISABLE_PIP_VERSION_CHECK"] = "1"  # as the Makefile has it
    env |= {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    options = ["--constraint", "constraints.txt", "--target", "site"]
    command = [sys.executable, str(TOOL), url, *options]
    done = subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=patient(200.0)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return {path.stem for path in (folder / "site").glob("*.dist-info")}


def test_torch_alone_comes_from_its_own_index(index, registry, tmp_path):
    index.add("torch", "2.13.0+cpu", needs="jinja2")
    index.add("jinja2", "9.9")  # under a name of the registry's
    assert installed(index.url, registry, tmp_path) == {"torch-2.13.0+cpu"}
    assert {path for path in index.asked if "torch" not in path} == set()
    assert registry.asked == []


def test_a_nightly_build_comes_from_its_index(index, registry, tmp_path):
    index.add("torch", "2.16.0.dev20261124+cpu")
    text = (TOOL.parent.parent / "constraints-nightly.txt").read_text("utf-8")
    assert installed(index.url, registry, tmp_path, text) == {"torch-2.16.0.dev20261124+cpu"}


def test_an_empty_index_leaves_it_to_the_registry(index, registry, tmp_path):
    index.pages["/torch/"] = b"<html></html>"
    assert installed(index.url, registry, tmp_path) == {"torch-2.13.0", "jinja2-3.0"}


def test_an_index_without_torch_leaves_it_to_the_registry(index, registry, tmp_path):
    assert installed(index.url, registry, tmp_path) == {"torch-2.13.0", "jinja2-3.0"}
    assert index.asked == ["/torch/"], "pip asked an index that had said no"


def test_an_index_that_is_not_reachable_or_does_not_answer_is_as_one_without_torch(index):
    tool = runpy.run_path(str(TOOL))
    tool["answers"].__globals__["SECONDS"] = 0.5
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert not tool["answers"](url)
    assert not tool["answers"](url)  # nobody listens there any more
    assert not tool["answers"](index.url)
    index.add("torch", "2.13.0+cpu")
    assert tool["answers"](index.url)


def test_without_an_index_it_is_the_registry(registry, tmp_path):
    assert installed("", registry, tmp_path) == {"torch-2.13.0", "jinja2-3.0"}
