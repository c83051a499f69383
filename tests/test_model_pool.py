"""Local models of a running server: loaded when they are needed, unloaded when idle and when others need the memory."""

import http.server
import json
import pathlib
import shutil
import threading

import pytest

from conftest import ROOT, ScriptedModel, Server, wait_for


def install(server, *architectures):
    models = server.data / "models"
    models.mkdir(parents=True, exist_ok=True)
    for architecture in architectures:
        shutil.copy(ROOT / f"target/models/tiny-{architecture}.gguf", models)


def loaded(server):
    """How many models are loaded: their files are mapped into the memory of the server."""
    maps = pathlib.Path(f"/proc/{server.process.pid}/maps").read_text()
    return len({line.split()[-1] for line in maps.splitlines() if line.endswith(".gguf")})


def choose(server, name, architecture):
    status, result = server.halo("PUT", f"/conversations/{name}/model", {"model": f"tiny-{architecture}"})
    assert status == 200, result
    server.halo("PUT", f"/conversations/{name}/options", {"sampling": {"max_tokens": 4}})


def texts(server, name):
    status, transcript = server.halo("GET", f"/conversations/{name}/transcript")
    assert status == 200, transcript
    return ["".join(chunk["text"] for chunk in message["chunks"]).strip() for message in transcript["messages"]]


def test_idle_model_is_unloaded_and_loaded_again(scripted):
    server = scripted("Hello.", settings=("model.context=512", "model.unload_after=0.02"))
    install(server, "llama")
    server.say("main", "Which colour is the sky?")
    choose(server, "main", "llama")
    server.say("main", "And the sea?")
    before = texts(server, "main")
    assert len(before) == 4, before
    wait_for(lambda: loaded(server) == 0)
    assert texts(server, "main") == before, "reading loads no model"
    assert loaded(server) == 0
    server.say("main", "And the grass?")
    assert texts(server, "main")[:4] == before and len(texts(server, "main")) == 6
    wait_for(lambda: loaded(server) == 0)


def test_models_share_a_memory_budget(scripted):
    """Two models of 9 MB do not fit 12 MiB at once: each makes room for the other, and both answer."""
    server = scripted("Hello.", "Hello.", settings=("model.context=512", "model.memory=12 MiB"))
    install(server, "llama", "qwen2")
    for name, architecture in (("a", "llama"), ("b", "qwen2")):
        server.say(name, "Which colour is the sky?")
        choose(server, name, architecture)
    for name in ("a", "b", "a"):
        server.say(name, "And the sea?")
        assert loaded(server) == 1
    assert (len(texts(server, "a")), len(texts(server, "b"))) == (6, 4)
    install(server, "gpt-oss")
    status, result = server.halo("PUT", "/conversations/a/model", {"model": "tiny-gpt-oss"})
    assert status == 503 and "model.memory" in str(result), (status, result)


def test_chat_is_read_without_loading_its_model(scripted):
    server = scripted("Hello.", settings=("model.context=512",))
    install(server, "llama")
    server.say("main", "Which colour is the sky?")
    choose(server, "main", "llama")
    server.say("main", "And the sea?")
    before = texts(server, "main")
    server.stop()
    server.start()
    assert texts(server, "main") == before
    assert loaded(server) == 0
    server.say("main", "And the grass?")
    assert texts(server, "main")[:4] == before and loaded(server) == 1


class KeyedModel(ScriptedModel):
    """A scripted model that notes the keys that it is sent."""

    def do_GET(self):
        self.server.keys.add(self.headers["Authorization"])
        super().do_GET()

    def do_POST(self):
        self.server.keys.add(self.headers["Authorization"])
        super().do_POST()


@pytest.fixture
def keyed_model():
    model = http.server.ThreadingHTTPServer(("127.0.0.1", 0), KeyedModel)
    model.answers, model.pause, model.requests, model.keys = [["Hello."]], 0, [], set()
    threading.Thread(target=model.serve_forever, daemon=True).start()
    yield model
    model.shutdown()


@pytest.mark.parametrize("by_hand", [True, False])
def test_key_is_sent_to_addresses_that_were_set_by_hand(tmp_path, keyed_model, by_hand):
    """Any client may choose an address of this machine as the model of a chat, also one that it listens on itself."""
    script = tmp_path / "answers.txt"
    script.write_text("Hello.")
    address = f"openai+http://127.0.0.1:{keyed_model.server_port}/v1"
    model = address if by_hand else f"scripted:{script}"
    server = Server(tmp_path / "data", model=model, env={"OPENAI_API_KEY": "sk-of-the-owner"}).start()
    server.say("main", "Which colour is the sky?")
    if not by_hand:
        status, result = server.halo("POST", "/models/test", {"address": address})
        assert status == 200, result
        status, result = server.halo("PUT", "/conversations/main/model", {"model": address})
        assert status == 200, result
        server.say("main", "And the sea?")
    server.stop()
    assert keyed_model.requests and json.dumps(keyed_model.requests).count("sk-of-the-owner") == 0
    assert keyed_model.keys == ({"Bearer sk-of-the-owner"} if by_hand else {None})


def test_retokenized_chat_is_found_by_its_history(scripted):
    """The original that is kept has the same messages, but the chat in its place goes on."""
    server = scripted("The sky is blue.", settings=("model.context=512",))
    install(server, "llama")
    server.say("main", "Which colour is the sky?")
    choose(server, "main", "llama")
    names = {chat["name"] for chat in server.halo("GET", "/conversations?originals=true")[1]}
    assert names == {"main", "main (scripted:answers0.txt)"}, names
    question, answer = texts(server, "main")
    messages = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": "And the sea?"},
    ]
    status, result = server.call("POST", "/v1/chat/completions", {"messages": messages, "max_tokens": 4})
    assert status == 200, result
    assert texts(server, "main")[:3] == [question, answer, "And the sea?"]


def test_embedding_model_is_refused_for_chats(scripted):
    server = scripted("Hello.")
    (server.data / "models").mkdir(parents=True, exist_ok=True)
    (server.data / "models/e5-small").symlink_to(ROOT / "target/models/e5-small")
    server.say("main", "Which colour is the sky?")
    status, result = server.halo("PUT", "/conversations/main/model", {"model": "e5-small"})
    assert status == 422 and "e5-small is an embedding model" in str(result), (status, result)
