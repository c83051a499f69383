"""Local models of a running server: loaded when they are needed, unloaded when idle and when others need the memory."""

import pathlib
import shutil

from conftest import ROOT, wait_for


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
