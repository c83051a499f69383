"""What a chat has of its own in a real browser: the choice of a model, its system prompt and sampling, edited answers."""

import http.server
import json
import shutil
import threading
import urllib.parse

import pytest
from playwright.sync_api import expect

from conftest import ROOT, wait_for
from test_transcript import shot


class ModelServer(http.server.BaseHTTPRequestHandler):
    """Answers as Ollama does to somebody who asks what it is."""

    def do_GET(self):
        found = {
            "/api/version": {"version": "0.9.0"},
            "/v1/models": {"data": [{"id": "llama3.2:3b"}, {"id": "qwen3:8b"}]},
        }.get(self.path)
        body = json.dumps(found or {"error": "not found"}).encode()
        self.send_response(200 if found else 404)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for part in ("I am ", "the other one."):
            delta = {"choices": [{"index": 0, "delta": {"content": part}}]}
            self.wfile.write(f"data: {json.dumps(delta)}\n\n".encode())
        self.wfile.write(b'data: {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n')

    def log_message(self, *_):
        pass


@pytest.fixture
def ollama():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), ModelServer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def options(server, name="main"):
    status, view = server.halo("GET", f"/conversations/{urllib.parse.quote(name)}/options")
    assert status == 200, view
    return view


def test_model_picker_lists_models_and_tests_addresses(scripted, open_chat, ollama):
    server = scripted("Hello.")
    server.say("main", "Hello.")
    page = open_chat(server, permissions=["clipboard-read", "clipboard-write"])
    page.click("#model")
    panel = page.locator("#panel")
    expect(panel.locator("#model-current")).to_contain_text("The model that the server was started with.")
    # The catalogue: size, whether it fits, and how to get it.
    row = panel.locator("[data-model='smollm2']")
    expect(row).to_contain_text("to download")
    expect(row).to_contain_text("fits this machine")
    expect(row.get_by_role("button", name="Download")).to_be_enabled()
    row.locator("summary").click()
    row.get_by_role("button", name="Copy").click()
    copied = page.evaluate("() => navigator.clipboard.readText()")
    assert copied == f"halo models pull --data {server.data} smollm2"
    # A server that answers.
    panel.get_by_role("button", name="Ollama").click()
    expect(page.locator("#model-address")).to_have_value("http://127.0.0.1:11434")
    page.fill("#model-address", ollama)
    panel.get_by_role("button", name="Test connection").click()
    result = page.locator("#test-result")
    expect(result).to_contain_text("Connected. Ollama answered in", timeout=30_000)
    shot(page, "models")
    result.locator("[data-model='qwen3:8b']").get_by_role("button", name="Use in this chat").click()
    expect(panel.locator("#model-current b")).to_have_text(f"openai+{ollama}/v1#qwen3:8b")
    assert options(server)["model"] == f"openai+{ollama}/v1#qwen3:8b"
    expect(page.locator("#model")).to_contain_text("qwen3:8b")
    # The chat is still there, and the model answers in it.
    page.fill("#message", "Who are you?")
    page.click("#send")
    expect(page.locator(".turn.assistant .text").last).to_have_text("I am the other one.", timeout=30_000)
    expect(page.locator(".turn .text").first).to_have_text("Hello.")
    panel.locator("#model-current button").click()
    expect(panel.locator("#model-current")).to_contain_text("The model that the server was started with.")
    assert options(server)["model"] is None


def test_new_chat_with_another_model(scripted, open_chat, ollama):
    """The choice is made before the chat exists, and is stored with its first message."""
    server = scripted("Hello.")
    page = open_chat(server)
    page.click("#new-chat")
    page.click("#model")
    page.fill("#model-address", ollama)
    page.locator("#panel").get_by_role("button", name="Test connection").click()
    page.locator("#test-result [data-model='qwen3:8b']").get_by_role("button", name="Use in this chat").click()
    page.fill("#message", "Who are you?")
    page.click("#send")
    expect(page.locator(".turn.assistant .text").last).to_have_text("I am the other one.", timeout=30_000)
    _, chats = server.halo("GET", "/conversations")
    assert [options(server, chat["name"])["model"] for chat in chats] == [f"openai+{ollama}/v1#qwen3:8b"], chats


@pytest.mark.parametrize(
    ("model", "status"),
    [
        ("no-such-model", 404),
        ("/etc/passwd", 422),
        ("../x.gguf", 422),
        ("scripted:/etc/passwd", 422),
        ("openai+http://8.8.8.8/v1#x", 403),
        ("openai+http://127.0.0.1:9/v1#x", 503),
    ],
)
def test_model_that_cannot_be_used_changes_nothing(scripted, model, status):
    server = scripted("Hello.", "Still here.")
    server.say("main", "Hello.")
    found, result = server.halo("PUT", "/conversations/main/model", {"model": model})
    assert found == status, (found, result)
    assert options(server)["model"] is None
    server.say("main", "Are you there?")


def test_chat_switches_to_a_local_model_and_back(scripted):
    """The text stays the same under both models, and a file that ends llama.cpp does not end the server."""
    server = scripted("Hello.", "Back again.")
    models = server.data / "models"
    models.mkdir(parents=True, exist_ok=True)
    shutil.copy(ROOT / "target/models/tiny-llama.gguf", models / "tiny-llama.gguf")
    whole = (models / "tiny-llama.gguf").read_bytes()
    # The header is right, and the numbers of the last tensor are missing.
    (models / "cut.gguf").write_bytes(whole[: len(whole) * 3 // 4])
    server.say("main", "Which colour is the sky?")
    before = texts(server)
    status, result = server.halo("PUT", "/conversations/main/model", {"model": "cut"})
    assert status >= 400 and options(server)["model"] is None, (status, result)
    status, result = server.halo("PUT", "/conversations/main/model", {"model": "tiny-llama"})
    assert status == 200, result
    status, state = server.halo("GET", "/conversations/main/state")
    assert state["model"] == "tiny-llama", state
    server.halo("PUT", "/conversations/main/options", {"sampling": {"max_tokens": 4}})
    server.say("main", "And the sea?")
    assert texts(server)[:2] == before
    status, result = server.halo("PUT", "/conversations/main/model", {"model": None})
    assert status == 200, result
    answers = texts(server)
    server.say("main", "Are you back?")
    assert texts(server)[:4] == answers and texts(server)[-1] == "Back again."
    assert server.process.poll() is None


def switched_chat(scripted):
    """A server with a chat that has answers of two models, and the name of the original that was kept."""
    server = scripted("Hello.")
    models = server.data / "models"
    models.mkdir(parents=True, exist_ok=True)
    shutil.copy(ROOT / "target/models/tiny-llama.gguf", models / "tiny-llama.gguf")
    server.say("main", "Which colour is the sky?")
    assert server.halo("PUT", "/conversations/main/model", {"model": "tiny-llama"})[0] == 200
    server.halo("PUT", "/conversations/main/options", {"sampling": {"max_tokens": 4}})
    server.say("main", "And the sea?")
    assert len(originals(server)) == 2
    (original,) = [name for name, of in originals(server).items() if of == "main"]
    return server, original


def originals(server):
    return {chat["name"]: chat["original_of"] for chat in server.halo("GET", "/conversations")[1]}


def test_kept_original_is_one_row_with_its_chat(scripted, open_chat):
    server, original = switched_chat(scripted)
    page = open_chat(server)
    rows = page.locator("#chats .chat-row")
    expect(page.locator(".turn.user").first).to_contain_text("Which colour")
    expect(rows).to_have_count(1)
    page.click("#title")
    page.fill("#ask-input", "The sky")
    page.press("#ask-input", "Enter")
    expect(page.locator("#title")).to_have_text("The sky")
    expect(rows).to_have_count(1)
    expect(rows.locator("a")).to_have_text("The sky")
    assert originals(server)[original] == "The sky"
    # A chat with the name of an original that is nobody's has a row.
    words = {"messages": [{"role": "user", "text": "A song of the sea."}]}
    assert server.halo("POST", "/conversations", {"name": "The sea (original)", **words})[0] == 201
    page.reload()
    expect(rows).to_have_count(2)


def test_kept_original_is_deleted_and_restored_with_its_chat(scripted, open_chat):
    server, original = switched_chat(scripted)
    page = open_chat(server)
    rows, deleted = page.locator("#chats .chat-row a"), page.locator("[data-deleted]")
    expect(rows).to_have_text("main")
    page.get_by_role("button", name="Menu of main").click()
    page.get_by_role("menuitem", name="Delete").click()
    expect(page.locator(".toast", has_text="Deleted")).to_be_visible()
    page.reload()
    expect(deleted).to_have_count(1)
    expect(deleted).to_contain_text("main")
    expect(rows).to_have_count(0)
    assert server.halo("GET", f"/conversations/{urllib.parse.quote(original)}")[1]["chunks"] == []
    deleted.get_by_role("button", name="Restore").click()
    expect(deleted).to_have_count(0)
    expect(rows).to_have_text("main")
    expect(page.locator(".turn.user").first).to_contain_text("Which colour")
    assert len(originals(server)) == 2 and originals(server)[original] == "main"
    restored = server.halo("GET", f"/conversations/{urllib.parse.quote(original)}/transcript")[1]
    assert restored["total"] == 2, restored


def texts(server):
    status, transcript = server.halo("GET", "/conversations/main/transcript")
    assert status == 200, transcript
    return ["".join(chunk["text"] for chunk in message["chunks"]).strip() for message in transcript["messages"]]


@pytest.mark.parametrize(
    ("address", "status", "reason"),
    [
        ("http://8.8.8.8", 403, "model.servers"),
        ("http://169.254.169.254/latest", 403, "model.servers"),
        ("https://example.org", 403, "model.servers"),
        ("http://192.168.1.7:5001", 403, "only model servers at localhost can be used"),
        ("http://10.255.255.1", 403, "model.servers"),
        ("http://[fd00::1]:11434", 403, "model.servers"),
        ("http://user:secret@127.0.0.1", 422, "user name or password"),
        ("ftp://127.0.0.1", 422, "only http and https"),
        ("http://127.0.0.1:9", 503, ""),
    ],
)
def test_server_is_no_open_proxy(scripted, address, status, reason):
    server = scripted("Hello.")
    found, result = server.halo("POST", "/models/test", {"address": address})
    assert found == status and reason in result["error"] and "secret" not in result["error"], (found, result)


def test_chat_has_its_own_system_prompt_and_sampling(scripted, open_chat):
    server = scripted("Hello.")
    server.say("main", "Hello.")
    server.say("other", "Hello.")
    page = open_chat(server)
    page.click("#chat-options")
    page.fill("#own-prompt", "You are a pirate.")
    page.press("#own-prompt", "Tab")
    expect(page.locator("#panel [role=status]")).to_contain_text("Saved.")
    page.get_by_role("button", name="Creative").click()
    expect(page.get_by_role("button", name="Creative")).to_have_attribute("aria-pressed", "true")
    expect(page.locator("#own-temperature")).to_have_value("1.1")
    page.fill("#own-max_tokens", "77")
    page.press("#own-max_tokens", "Tab")
    # “Saved.” still stands there from the change before.
    wait_for(lambda: options(server)["own"]["sampling"]["max_tokens"] == 77)
    assert options(server)["own"]["system_prompt"] == "You are a pirate."
    assert options(server, "other")["own"]["system_prompt"] is None
    shot(page, "options")
    # A value out of range is refused, and nothing is stored.
    page.fill("#own-temperature", "9")
    page.press("#own-temperature", "Tab")
    expect(page.locator("#panel [role=status]")).to_contain_text("Temperature must be a number from 0 to 5.")
    assert abs(options(server)["own"]["sampling"]["temperature"] - 1.1) < 1e-6
    page.click("#reset-options")
    expect(page.locator("#own-prompt")).to_have_value("")
    own = options(server)["own"]
    assert own["system_prompt"] is None and own["sampling"]["max_tokens"] is None, own


def test_answers_can_be_edited(scripted, open_chat):
    server = scripted("It is red.", "It is round.")
    for text in ("Which colour?", "Which shape?"):
        server.say("main", text)
    page = open_chat(server)
    answer = page.locator(".turn.assistant").last
    answer.get_by_role("button", name="Edit").click()
    expect(page.locator("#editing")).to_contain_text("Editing the last answer.")
    page.fill("#message", "It is square.")
    page.click("#send")
    expect(page.locator("#editing")).to_be_hidden()
    expect(page.locator(".turn.assistant").last.locator(".text")).to_have_text("It is square.")
    expect(page.locator(".turn.assistant").last.locator(".variants")).to_contain_text("2/2")
    # An earlier answer is edited in a branch.
    first = page.locator(".turn.assistant").first
    first.hover()
    first.get_by_role("button", name="Edit").click()
    expect(page.locator("#editing")).to_contain_text("Sending makes a branch")
    page.fill("#message", "It is blue.")
    page.click("#send")
    expect(page.locator("#title")).to_have_text("main · branch")
    expect(page.locator(".turn.assistant .text")).to_have_text(["It is blue."])
    _, transcript = server.halo("GET", "/conversations/main/transcript")
    assert transcript["total"] == 4
