"""Fixtures: the real program with the real small model, on a free port, and fake remote models."""

import http.server
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request

import pytest
from playwright.sync_api import expect, sync_playwright

ROOT = pathlib.Path(__file__).parent.parent
HALO = os.environ.get("HALO_BIN", ROOT / "target/debug/halo")
MODEL = os.environ.get("HALO_TEST_MODEL", ROOT / "target/models/SmolLM2-135M-Instruct.Q4_1.gguf")
SHOTS = pathlib.Path(os.environ.get("HALO_SHOTS", pathlib.Path(__file__).parent.parent / "target/screenshots"))
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
EMBEDDER = os.environ.get("HALO_TEST_EMBEDDER", ROOT / "target/models/e5-small")


# A condition that comes true late on a machine with other work is not a failure; one that never comes true is.
expect.set_options(timeout=30_000)


class Server:
    """A server process that can be killed and restarted."""

    def __init__(self, data, *settings, env=None, listen="127.0.0.1:0", model=MODEL):
        self.data, self.settings, self.env, self.listen, self.model = data, settings, env or {}, listen, model
        self.process, self.log, self.stopped = None, [], False

    def start(self):
        self.stopped = False
        sets = [
            part
            for setting in ("generation.seed=5", "chat.dates=false", f"recall.embedder={EMBEDDER}", *self.settings)
            for part in ("--set", setting)
        ]
        command = [HALO, "serve", "--data", self.data, "--model", self.model, "--listen", self.listen, *sets]
        # Models that are installed for this user, as `make run` does, are not those of the tests.
        env = {**os.environ, "XDG_DATA_HOME": str(self.data), **self.env}
        self.process = subprocess.Popen([str(part) for part in command], stderr=subprocess.PIPE, text=True, env=env)
        for line in self.process.stderr:
            self.log.append(line)
            match = re.search(r"listening on (https?)://(\S+)", line)
            if match:
                self.listen = match[2]
                self.url = f"{match[1]}://{match[2]}"
                break
        else:
            raise AssertionError(f"the server did not start: {''.join(self.log)}")
        threading.Thread(target=lambda: self.log.extend(self.process.stderr), daemon=True).start()
        return self

    def stop(self, signal_number=signal.SIGTERM):
        self.stopped = True
        if self.process and self.process.poll() is None:
            self.process.send_signal(signal_number)
            self.process.wait(30)

    def memory(self):
        """Resident memory in bytes; 0 if it is unknown."""
        try:
            status = pathlib.Path(f"/proc/{self.process.pid}/status").read_text()
        except OSError:
            return 0
        return int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) << 10

    def call(self, method, path, body=None, headers=None, timeout=60):
        """Sends a request; returns the status and the JSON or text."""
        data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers or {}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=timeout) as response:
                status, text = response.status, response.read()
        except urllib.error.HTTPError as error:
            status, text = error.code, error.read()
        try:
            return status, json.loads(text) if text else None
        except ValueError:
            return status, text.decode()

    def halo(self, method, path, body=None, **more):
        return self.call(method, f"/api/halo/v1{path}", body, **more)

    def say(self, name, text, timeout=180):
        """Sends a message and waits until the answer is complete."""
        quoted = urllib.parse.quote(name, safe="")
        status, body = self.halo("POST", f"/conversations/{quoted}/messages", {"text": text})
        assert status == 202, body
        deadline = time.time() + timeout
        while time.time() < deadline:
            status, state = self.halo("GET", f"/conversations/{quoted}")
            assert status == 200, state
            if not state["running"]:
                return state
            time.sleep(0.05)
        raise AssertionError("the answer did not complete")


class ScriptedModel(http.server.BaseHTTPRequestHandler):
    """A remote model that streams scripted answers, for tests that the small model is too weak for."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        body = json.dumps({"data": [{"id": "far", "context_length": 40_000}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self):
        self.server.requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        for token in self.server.answers.pop(0) if len(self.server.answers) > 1 else self.server.answers[0]:
            if isinstance(token, threading.Event):
                token.wait(300)
                continue
            self.send_event({"choices": [{"index": 0, "delta": {"content": token}, "finish_reason": None}]})
            time.sleep(self.server.pause)
        self.send_event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def send_event(self, event):
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.flush()

    def log_message(self, *_):
        pass


@pytest.fixture
def remote_model():
    """Starts a scripted model and returns its address. The last answer is repeated. An event among the tokens holds the answer
    until the test sets it, so that a test does not race with it."""
    models = []

    def start(answers, pause=0.0):
        model = http.server.ThreadingHTTPServer(("127.0.0.1", 0), ScriptedModel)
        model.answers, model.pause, model.requests = list(answers), pause, []
        models.append(model)
        threading.Thread(target=model.serve_forever, daemon=True).start()
        return f"openai+http://127.0.0.1:{model.server_port}/v1"

    start.models = models
    yield start
    for model in models:
        model.shutdown()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("data"), "generation.max_tokens=24", "chunk.min_tokens=16").start()
    yield server
    server.stop()
    assert server.process.returncode == 0, "".join(server.log)


@pytest.fixture
def small(tmp_path, request):
    """A server with a small context window, so that paragraphs are pruned after a few turns: the oldest first, so that tests
    are short, or by another policy that the test names as the parameter of this fixture."""
    policy = getattr(request, "param", None)
    settings = ["context.max_tokens=400", "generation.max_tokens=16", "chunk.min_tokens=8"]
    settings += [f"prune.policy={policy}", "generation.temperature=0"] if policy else ["prune.policy=fifo"]
    server = Server(tmp_path, *settings).start()
    yield server
    server.stop()


@pytest.fixture
def scripted(tmp_path):
    """Starts servers whose model gives these answers, and returns them."""
    servers = []

    def start(*answers, settings=()):
        script = tmp_path / f"answers{len(servers)}.txt"
        script.write_text("\n---\n".join(answers))
        data = tmp_path / f"data{len(servers)}"
        servers.append(Server(data, *settings, model=f"scripted:{script}").start())
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@pytest.fixture(scope="module")
def browser():
    assert CHROMIUM, "Chromium is missing: `make setup` installs it"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_chat(browser):
    """Opens pages and fails the test on every console error, dialog and request to another server."""
    contexts, problems = [], []

    def open_page(server, name="main", **more):
        context = browser.new_context(**{"color_scheme": "dark", "viewport": {"width": 1280, "height": 800}, **more})
        contexts.append(context)
        page = context.new_page()

        def record(message):
            # A page that outlives the server of its test tries to connect again.
            is_refused = server.stopped and "ERR_CONNECTION" in message.text
            if message.type == "error" and not is_refused:
                problems.append(console_error(message))

        page.on("console", record)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("dialog", lambda dialog: (problems.append(dialog.message), dialog.dismiss()))
        page.on("request", lambda request: problems.append(request.url) if not is_local(request.url, server) else None)
        page.goto(f"{server.url}/#{name}")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not problems, problems


def console_error(message):
    """The text of an error in the console, with the address of the request or script that it is about."""
    url = message.location.get("url", "")
    return f"{message.text} ({url})" if url else message.text


def is_local(url, server):
    return url.startswith((server.url, "data:", "blob:"))


class OneAnswerModel(http.server.BaseHTTPRequestHandler):
    """A remote model that always gives the same answer; without an answer it fails."""

    protocol_version = "HTTP/1.1"

    def reply(self, status, body, kind):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.reply(200, json.dumps({"data": [{"id": "far", "context_length": 40_000}]}).encode(), "application/json")

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        answer = self.server.answer
        if answer is None:
            return self.reply(500, b'{"error": {"message": "the model failed"}}', "application/json")
        tokens = [
            {"choices": [{"index": 0, "delta": {"content": answer}, "finish_reason": None}]},
            {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
        ]
        body = "".join(f"data: {json.dumps(token)}\n\n" for token in tokens) + "data: [DONE]\n\n"
        self.reply(200, body.encode(), "text/event-stream")

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def model():
    model = http.server.ThreadingHTTPServer(("127.0.0.1", 0), OneAnswerModel)
    model.answer = "something else entirely"
    threading.Thread(target=model.serve_forever, daemon=True).start()
    yield model
    model.shutdown()


def wait_for(condition, seconds=20):
    deadline = time.time() + seconds
    while time.time() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(0.1)
    raise AssertionError("it did not happen")
