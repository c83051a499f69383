"""Halo's own API: it matches its OpenAPI document, survives hostile requests, and enforces access control."""

import concurrent.futures
import http.client
import json
import os
import pathlib
import random
import re
import socket
import subprocess
import sys
import threading
import time

import hypothesis
import openapi_spec_validator
import pytest
import schemathesis
import trustme
from schemathesis.checks import CHECKS

from conftest import HALO, ROOT, Server

CASES = int(os.environ.get("HALO_CASES", "40"))


@pytest.fixture
def fast(tmp_path):
    """A server whose model is small, with random weights: what it answers does not matter."""
    settings = ("generation.max_tokens=24", "chunk.min_tokens=16", "model.context=4096")
    server = Server(tmp_path, *settings, model=ROOT / "target/models/tiny-llama.gguf").start()
    yield server
    server.stop()
    assert server.process.returncode == 0, "".join(server.log)


def test_routes_match_the_openapi_document(fast):
    """Random valid and invalid requests, generated from the document: no 5xx, no undocumented response."""
    fast.say("main", "Hello there.")
    schema = schemathesis.openapi.from_url(f"{fast.url}/api/halo/openapi.json").exclude(path_regex="/events$")
    problems, tried = [], 0
    checks = [
        check
        for check in CHECKS.get_all()
        if check.__name__
        in ("not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance")
    ]
    assert len(checks) == 4
    for operation in schema.get_all_operations():
        operation = operation.ok()

        @hypothesis.given(case=operation.as_strategy())
        @hypothesis.settings(
            max_examples=CASES,
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        def check_case(case):
            response = case.call(base_url=fast.url, timeout=60)
            # Messages of earlier requests may still be answered; the documented answer then is to wait.
            is_busy = response.status_code == 503 and "a message is being answered" in response.text
            expected = [check for check in checks if not is_busy or check.__name__ != "not_a_server_error"]
            case.validate_response(response, checks=expected)

        try:
            check_case()
        except (Exception, BaseExceptionGroup) as problem:
            problems += [f"{operation.label}: {one}" for one in (problem, *getattr(problem, "exceptions", ()))]
        tried += 1
    assert tried > 15 and not problems, "\n\n".join(problems)


def test_openapi_document_is_valid(server):
    document = server.call("GET", "/api/halo/openapi.json")[1]
    openapi_spec_validator.validate(document)
    assert set(document["components"]["securitySchemes"]) == {"bearer", "header"}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            where = f"{method} {path}"
            assert all(response["description"] for response in operation["responses"].values()), where
            assert "401" in operation["responses"], where
            for parameter in operation.get("parameters", []):
                in_path = "{" + parameter["name"] + "}" in path
                assert parameter["in"] == ("path" if in_path else "query"), f"{where}: {parameter}"
    names = re.findall(r'"propertyNames": *{"type": *"integer"', json.dumps(document))
    assert not names, "no JSON object has numbers as keys"


def test_openapi_document_generates_a_client(server, tmp_path):
    """A generated Python client imports, and can call the server."""
    document = tmp_path / "openapi.json"
    document.write_text(json.dumps(server.call("GET", "/api/halo/openapi.json")[1]))
    client = tmp_path / "client"
    generator = [sys.executable, "-m", "openapi_python_client", "generate", "--path", document, "--meta", "none"]
    command = [*generator, "--output-path", client]
    # The generator formats its code with the ruff of the same environment.
    env = {**os.environ, "PATH": f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    result = subprocess.run([str(part) for part in command], capture_output=True, text=True, cwd=tmp_path, env=env)
    assert result.returncode == 0, result.stdout + result.stderr
    # It has no type for the stream of events, a flattened enum.
    skipped = re.findall(r"WARNING parsing (\S+ \S+)", result.stdout)
    assert set(skipped) <= {"GET /api/halo/v1/events"}, result.stdout
    server.say("main", "Hello there.")
    program = (
        "import sys; from client import Client\n"
        "import pkgutil, importlib, client.api as api\n"
        "modules = [m.name for m in pkgutil.walk_packages(api.__path__, 'client.api.')]\n"
        "found = next(m for m in modules if m.endswith('.search_conversation'))\n"
        "hits = importlib.import_module(found).sync('main', client=Client(base_url=sys.argv[1]), q='hello')\n"
        "assert hits[0].chunk.id, hits\n"
        "assert all(importlib.import_module(m) for m in modules)\n"
    )
    result = subprocess.run([sys.executable, "-c", program, server.url], capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr


def test_hostile_requests_cause_no_server_error(fast):
    """Malformed requests, many at once: no 5xx, no leak, and the server keeps running."""
    document = fast.call("GET", "/api/halo/openapi.json")[1]
    routes = [
        (method, path)
        for path, methods in document["paths"].items()
        for method in methods
        if not path.endswith("/events")
    ]
    routes += [
        ("post", path)
        for path in (
            "/v1/chat/completions",
            "/chat/completions",
            "/v1/completions",
            "/v1/embeddings",
            "/v1/responses",
            "/v1/responses/{id}",
            "/v1/models/{model}",
            "/api/v1/generate",
            "/api/extra/generate/stream",
            "/api/v1/tokenize",
            "/api/v1/detokenize",
            "/api/extra/tokencount",
            "/api/v1/generate/preview",
            "/api/chat",
            "/api/generate",
            "/api/embed",
            "/api/show",
            "/api/extra/json_to_grammar",
            "/api/extra/embeddings",
            "/api/extra/generate/check",
            "/api/extra/last_logprobs",
            "/api/extra/abort",
            "/api/v1/config/soft_prompt",
            "/api/embeddings",
            "/api/delete",
            "/api/pull",
            "/completion",
            "/completions",
            "/embeddings",
            "/slots/{slot}",
            "/infill",
            "/tokenize",
            "/detokenize",
            "/apply-template",
            "/embedding",
            "/mcp",
        )
    ]
    rng = random.Random(7)
    path_values = [
        "",
        "..",
        "%00",
        "a" * 5000,
        "%F0%9F%A6%8A",
        "main",
        "u0.0",
        "-1",
        "99999999999999999999",
        "%2e%2e%2fetc%2fpasswd",
        "<script>",
    ]
    bodies = [
        b"",
        b"{}",
        b"[]",
        b"null",
        b"{",
        b'{"text":1}',
        b'{"text":""}',
        b'{"edit":"pin","chunks":["x"]}',
        b'{"edit":"pin","chunks":[]}',
        b'{"prompt":"","max_length":-5}',
        b'{"messages":[{}]}',
        b'{"input":[""]}',
        b'{"undo":-1}',
        b'{"value":"\\u0000"}',
        b"\xff\xfe",
        ("[" * 20000).encode(),
        b'{"ids":[4294967295]}',
        b'{"token_ids":[1e99]}',
        b'{"a":' * 500,
    ]

    def send_random_request(n):
        method, path = routes[n % len(routes)]
        path = re.sub(r"\{\w+\}", lambda _: rng.choice(path_values) or "x", path)
        status, result = fast.call(method.upper(), path, rng.choice(bodies) if method != "get" else None, timeout=30)
        return status, method, path, result

    memory = []
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for _ in range(2):
            for status, method, path, result in pool.map(send_random_request, range(CASES * len(routes) // 2)):
                # 501 is the answer of what the API of another program has and Halo does not.
                assert status < 500 or status == 501, (status, method, path, result)
                assert "panicked" not in str(result) and "RUST_BACKTRACE" not in str(result)
            memory.append(fast.memory())
    if memory[0]:
        assert memory[1] - memory[0] < 32 << 20, f"memory does not grow: {memory}"
    assert fast.call("GET", "/health")[0] == 200
    assert not any("panicked" in line for line in fast.log), "".join(fast.log)


def test_malformed_http_does_not_stop_the_server(server):
    host, port = server.listen.split(":")
    for request in (
        b"GET / HTTP/1.1\r\n",
        b"\x00" * 1000,
        b"GET /" + b"a" * 100000 + b" HTTP/1.1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\n\r\n",
        b"POST /api/halo/v1/conversations/main/messages HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
    ):
        with socket.create_connection((host, int(port)), timeout=5) as connection:
            connection.sendall(request)
            connection.settimeout(0.3)
            try:
                connection.recv(4096)
            except TimeoutError:
                pass
    assert server.call("GET", "/health")[0] == 200


def test_request_body_limit(server):
    status, result = server.call("POST", "/api/v1/tokenize", b'{"text":"' + b"a" * (17 << 20) + b'"}')
    assert status == 413, result


def test_event_subscribers_that_do_not_read_block_nobody(server):
    """Fifty subscribers that never read do not delay an answer."""
    host, port = server.listen.split(":")
    connections = []
    for _ in range(50):
        connection = socket.create_connection((host, int(port)))
        connection.sendall(b"GET /api/halo/v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        connections.append(connection)
    state = server.say("unread", "Say something, though nobody listens.")
    assert state["chunks"][-1]["role"] == "assistant" and state["chunks"][-1]["text"]
    for connection in connections:
        connection.close()


def listen(server, received, ready):
    host, port = server.listen.split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=60)
    connection.request("GET", "/api/halo/v1/events")
    response = connection.getresponse()
    for line in response:
        ready.set()
        if line.startswith(b"data: "):
            event = json.loads(line[6:])
            received.append(event)
            if event["type"] in ("done", "failed"):
                return


def test_event_subscribers_get_the_same_events(server):
    received, threads = [[], []], []
    for events in received:
        ready = threading.Event()
        threads.append(threading.Thread(target=listen, args=(server, events, ready)))
        threads[-1].start()
        assert ready.wait(10)
    server.say("both", "Who is there?")
    [thread.join(30) for thread in threads]
    assert (
        received[0] == received[1] and received[0][0]["type"] == "message_stored" and received[0][-1]["type"] == "done"
    )
    text = "".join(event["text"] for event in received[0] if event["type"] == "token")
    assert received[0][-1]["chunks"][0]["text"].strip() == text.strip()
    numbers = [event["number"] for event in received[0]]
    assert numbers == sorted(set(numbers))


def test_manual_edits_and_undo(small):
    small.say("main", "The red fox is called Rufus.")
    path = "/conversations/main"
    status, edit = small.halo("POST", f"{path}/edits", {"edit": "delete", "chunks": ["u0.0"]})
    assert status == 200 and set(edit["chunks"]) >= {"u0.0"}
    assert "Rufus." not in [chunk["text"] for chunk in small.halo("GET", path)[1]["chunks"]]
    assert small.halo("POST", f"{path}/undo", {"undo": edit["undo"]})[0] == 204
    assert small.halo("GET", path)[1]["chunks"][0]["text"] == "The red fox is called Rufus."
    assert small.halo("POST", f"{path}/undo", {"undo": 999})[0] == 404
    status, result = small.halo("POST", f"{path}/edits", {"edit": "merge", "chunks": ["u0.0"]})
    assert status == 422 and result["error"], "the first paragraph has no paragraph above it"
    # Pruned, found by search, and resurrected at its own position, pinned.
    assert small.halo("POST", f"{path}/edits", {"edit": "prune", "chunks": ["u0.0"]})[0] == 200
    state = small.halo("GET", path)[1]
    assert state["pruned"] > 0
    [fox] = [chunk for chunk in small.halo("GET", f"{path}/graveyard?q=fox")[1]["chunks"] if chunk["role"] == "user"]
    assert fox["text"] == "The red fox is called Rufus." and fox["reason"]
    assert small.halo("GET", f"{path}/search?q=fox")[1][0]["reason"]
    assert small.halo("POST", f"{path}/edits", {"edit": "resurrect", "chunks": [fox["id"]]})[0] == 200
    first = small.halo("GET", path)[1]["chunks"][0]
    assert first["id"] == "u0.0" and first["pinned"] and first["position"] == 0
    detail = small.halo("GET", f"{path}/chunks/u0.0")[1]
    assert [entry["action"] for entry in detail["history"]][-2:] == ["resurrected", "pinned"] and len(
        detail["tokens"]
    ) == first["tokens"]


def test_settings_that_leave_too_small_a_window_are_refused(tmp_path):
    server = Server(tmp_path, "context.max_tokens=400").start()
    status, result = server.halo("PUT", "/settings/generation.max_tokens", {"value": "390"})
    assert status == 422 and "the context window is too small" in result["error"], result
    assert "400" in result["error"] and "390" in result["error"], "the error shows the sum"
    assert server.halo("PUT", "/settings/generation.max_tokens", {"value": "90"})[0] == 200
    server.stop()


def test_context_is_at_most_what_the_model_was_trained_for(small):
    """Otherwise the next start would fail."""
    status, result = small.halo("PUT", "/settings/model.context", {"value": "9000"})
    assert status == 422 and "9000 tokens are more than the 8192" in result["error"], result
    assert small.halo("PUT", "/settings/model.context", {"value": "4096"})[0] == 200
    small.stop()
    small.start()
    assert small.halo("GET", "/status")[1]["context"] == 4096
    assert small.halo("PUT", "/settings/model.context", {"value": None})[0] == 200


def test_settings_survive_a_restart(small):
    def setting(key):
        return next(item for item in small.halo("GET", "/settings")[1] if item["key"] == key)

    assert small.halo("PUT", "/settings/chat.system", {"value": "You are a pirate."})[0] == 200
    assert (
        setting("chat.system")["value"] == "You are a pirate." and setting("chat.system")["origin"] == "settings file"
    )
    assert "You are a pirate." in small.say("new", "Hello.")["system_prompt"]
    status, result = small.halo("PUT", "/settings/generation.temperature", {"value": "hot"})
    assert status == 422 and "generation.temperature" in result["error"]
    status, result = small.halo("PUT", "/settings/context.max_tokens", {"value": "500"})
    assert status == 422 and "overrides" in result["error"], "the command line overrides it"
    assert small.halo("PUT", "/settings/no.such", {"value": "1"})[0] == 404
    small.stop()
    small.start()
    assert setting("chat.system")["value"] == "You are a pirate."
    assert small.halo("PUT", "/settings/chat.system", {"value": None})[0] == 200
    assert setting("chat.system")["value"] == setting("chat.system")["default"]


def test_messages_survive_shutdown_and_kill(small):
    import signal

    small.halo("POST", "/conversations/main/messages", {"text": "Tell me a story."})
    small.halo("POST", "/conversations/other/messages", {"text": "I wait in line."})
    time.sleep(0.5)
    small.stop(signal.SIGTERM)
    assert small.process.returncode == 0
    assert not (small.data / "halo.db-wal").exists(), "the write-ahead log was checkpointed"
    small.start()
    state = small.halo("GET", "/conversations/main")[1]
    assert state["chunks"][0]["text"] == "Tell me a story." and not state["running"]
    small.halo("POST", "/conversations/main/messages", {"text": "And another."})
    small.stop(signal.SIGKILL)
    small.start()
    assert "And another." in [chunk["text"] for chunk in small.halo("GET", "/conversations/main")[1]["chunks"]]


@pytest.fixture
def keyed(tmp_path):
    server = Server(
        tmp_path, "server.hosts=halo.test", env={"HALO_SERVER_KEY": "a secret of ours"}, listen="0.0.0.0:0"
    ).start()
    yield server
    server.stop()


def test_api_key_is_required(keyed):
    assert any("TLS" in line for line in keyed.log), "the log warns that the connection is not encrypted"
    key_header = {"Authorization": "Bearer a secret of ours"}
    for path in ("/api/halo/v1/status", "/v1/models", "/api/v1/model", "/metrics"):
        assert keyed.call("GET", path)[0] == 401
        assert keyed.call("GET", path, headers={"Authorization": "Bearer a secret of our"})[0] == 401
        assert keyed.call("GET", path, headers=key_header)[0] == 200
    assert keyed.call("GET", "/v1/models", headers={"x-api-key": "a secret of ours"})[0] == 200
    assert keyed.call("GET", "/v1/models")[1]["error"]["type"] == "authentication_error"
    assert keyed.call("GET", "/health")[0] == 200 and keyed.call("GET", "/")[0] == 200
    assert keyed.call("GET", "/health", headers={"Host": "halo.test"})[0] == 200
    assert keyed.call("GET", "/health", headers={"Host": "evil.example"})[0] == 403
    settings = keyed.halo("GET", "/settings", headers=key_header)[1]
    assert "a secret of ours" not in json.dumps(settings)


def test_api_cannot_change_access_settings(small):
    file = small.data / "config.toml"
    before = file.read_bytes() if file.exists() else None
    settings = small.halo("GET", "/settings")[1]
    by_hand = [s["key"] for s in settings if "set it in the settings file" in (s["read_only_reason"] or "")]
    assert {"server.key", "server.listen", "server.origins", "rooms.prompts", "rooms.models"} <= set(by_hand)
    assert all(s["read_only"] for s in settings if s["key"] in by_hand)
    for key in by_hand:
        for value in ("auto", "x", "1", None):
            status, result = small.halo("PUT", f"/settings/{key}", {"value": value})
            assert status == 403 and f"{key} cannot be changed over the API" in result["error"], (key, result)
    assert (file.read_bytes() if file.exists() else None) == before


def test_listening_beyond_loopback_needs_a_key(tmp_path):
    with pytest.raises(AssertionError, match="set a key first"):
        Server(tmp_path, listen="0.0.0.0:0").start()


def test_metrics(server):
    server.say("main", "One more.")
    text = server.call("GET", "/metrics")[1]
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(lines["halo_turns_total"]) >= 1 and float(lines["halo_tokens_total"]) >= 1
    assert float(lines['halo_stage_seconds_sum{stage="generate"}']) > 0
    ids = {row["name"]: row["id"] for row in server.halo("GET", "/conversations")[1]}
    assert f'halo_conversation_tokens{{conversation="{ids["main"]}",scope="live"}}' in lines


def test_tls(tmp_path):
    import ssl
    import urllib.request

    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1", "localhost")
    cert, key, root = (str(tmp_path / name) for name in ("cert.pem", "key.pem", "root.pem"))
    issued.cert_chain_pems[0].write_to_path(cert)
    issued.private_key_pem.write_to_path(key)
    authority.cert_pem.write_to_path(root)
    with pytest.raises(AssertionError, match="must be set together"):
        Server(tmp_path, f"server.cert={cert}").start()
    with pytest.raises(AssertionError, match="reading .*nowhere.pem for TLS"):
        Server(tmp_path, f"server.cert={cert}", "server.cert_key=nowhere.pem").start()
    server = Server(
        tmp_path,
        f"server.cert={cert}",
        f"server.cert_key={key}",
        env={"HALO_SERVER_KEY": "a secret of ours"},
        listen="0.0.0.0:0",
    ).start()
    try:
        assert not any("can be read on its way" in line for line in server.log), "no warning about encryption"
        trust = ssl.create_default_context(cafile=root)
        request = urllib.request.Request(
            f"{server.url}/v1/models", headers={"Authorization": "Bearer a secret of ours", "Origin": server.url}
        )
        with urllib.request.urlopen(request, context=trust, timeout=20) as response:
            assert response.status == 200 and json.load(response)["data"]
        with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
            urllib.request.urlopen(server.url, timeout=20)
        with pytest.raises((OSError, http.client.HTTPException)):
            urllib.request.urlopen(server.url.replace("https", "http"), timeout=20)
    finally:
        server.stop()


def test_otlp_traces_turns(tmp_path):
    import http.server

    from google.protobuf import json_format
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    received = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            received.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_):
            pass

    collector = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    server = Server(
        tmp_path, f"server.otlp=http://127.0.0.1:{collector.server_port}", "generation.max_tokens=8"
    ).start()
    try:
        server.say("main", "A word that must not leave this machine: hippopotamus.")
        deadline = time.time() + 20
        while not received and time.time() < deadline:
            time.sleep(0.05)
        [(path, body)] = received
        assert path == "/v1/traces" and b"hippopotamus" not in body
        result = json.loads(body)
        # Parsed with the official messages; OTLP writes ids in JSON as hexadecimal, not as base64.
        traces = json_format.ParseDict(result, ExportTraceServiceRequest())
        turn, *stages = traces.resource_spans[0].scope_spans[0].spans
        values = {attribute.key: attribute.value for attribute in turn.attributes}
        assert (
            values["gen_ai.usage.output_tokens"].int_value == 8
            and values["gen_ai.conversation.id"].string_value == server.halo("GET", "/conversations")[1][0]["id"]
        )
        ids = [span["spanId"] for span in result["resourceSpans"][0]["scopeSpans"][0]["spans"]]
        assert len(set(ids)) == len(ids) and all(len(bytes.fromhex(span_id)) == 8 for span_id in ids)
        assert {"generate", "recall", "store"} <= {span.name for span in stages}
        for span in stages:
            assert (
                turn.start_time_unix_nano
                <= span.start_time_unix_nano
                <= span.end_time_unix_nano
                <= turn.end_time_unix_nano
            )
            assert span.parent_span_id == turn.span_id and span.trace_id == turn.trace_id
        # A collector that has stopped does not block turns.
        collector.shutdown()
        collector.server_close()
        server.say("main", "Go on.")
    finally:
        server.stop()


def test_attention_recording(small):
    path = "/conversations/main"
    small.say("main", "The red fox is called Rufus.")
    listing = small.halo("GET", f"{path}/captures")[1]
    assert listing == {"recording": False, "supported": True, "captures": []}
    assert small.halo("PUT", f"{path}/recording", {"recording": True})[0] == 204
    small.say("main", "What is the fox called?")
    assert small.halo("PUT", f"{path}/recording", {"recording": False})[0] == 204
    small.say("main", "Thank you.")
    listing = small.halo("GET", f"{path}/captures")[1]
    [capture_row] = listing["captures"]
    assert not listing["recording"] and capture_row["turn"] == 3 and capture_row["steps"] == 16
    status, capture = small.halo("GET", f"{path}/captures/{capture_row['id']}")
    assert status == 200, capture
    chunks = [segment["chunk"] for segment in capture["segments"]]
    assert chunks[0] == "" and chunks[-1] == "" and {"u0.0", "a1.0", "u2.0"} <= set(chunks)
    assert capture["segments"][chunks.index("u0.0")]["text"] == "The red fox is called Rufus."
    assert len(capture["steps"]) == 16
    for step in capture["steps"]:
        assert len(step["shares"]) == len(chunks) and abs(sum(step["shares"]) - 1) < 0.02, step
    assert "".join(step["text"] for step in capture["steps"]) == capture["segments"][-1]["text"]
    assert small.halo("GET", f"{path}/captures/../../etc")[0] == 404
    assert small.halo("PUT", "/conversations/none/recording", {"recording": True})[0] == 404
    # `halo replay` reads the same capture.
    replay = subprocess.run([str(HALO), "replay", "--json", capture_row["path"]], capture_output=True, text=True)
    assert replay.returncode == 0 and json.loads(replay.stdout)["tokens"], replay.stderr
