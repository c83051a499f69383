"""Ollama's API: the real server with a script as its model."""

import json
import urllib.request

import pytest

from conftest import Server, wait_for


@pytest.fixture(scope="module")
def scripted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ollama")
    script = folder / "answers.txt"
    script.write_text("The lamp burns.\n---\nThe sea is calm.\n---\nThe ferry is late.")
    server = Server(folder / "data", model=f"scripted:{script}").start()
    yield server
    server.stop()
    assert server.process.returncode == 0, "".join(server.log)


def stream(server, path, body):
    """The objects of a stream, and the headers."""
    request = urllib.request.Request(server.url + path, json.dumps(body).encode(), method="POST")
    with urllib.request.urlopen(request, timeout=60) as response:
        return [json.loads(line) for line in response], response.headers


def test_ollama_chat_streams_and_is_stored(scripted):
    objects, headers = stream(scripted, "/api/chat", {"messages": [{"role": "user", "content": "Does the lamp burn?"}]})
    assert headers["content-type"] == "application/x-ndjson"
    text = "".join(part["message"]["content"] for part in objects)
    last = objects[-1]
    assert text.strip() == "The lamp burns." and last["done"] and last["done_reason"] == "stop", objects
    assert last["eval_count"] > 0 and last["total_duration"] > 0 and last["prompt_eval_count"] > 0, last
    name = headers["x-halo-conversation"]
    history = [
        {"role": "user", "content": "Does the lamp burn?"},
        {"role": "assistant", "content": text},
        {"role": "user", "content": "And the sea?"},
    ]
    status, answer = scripted.call("POST", "/api/chat", {"messages": history, "stream": False})
    assert status == 200 and answer["message"]["content"].strip() == "The sea is calm.", answer
    names = [conversation["name"] for conversation in scripted.halo("GET", "/conversations")[1]]
    assert names == [name], "both requests are one conversation"


def test_ollama_generate_stores_nothing(scripted):
    before = scripted.halo("GET", "/conversations")[1]
    body = {"prompt": "Where is the ferry?", "system": "Be brief.", "stream": False, "options": {"num_predict": 2}}
    status, answer = scripted.call("POST", "/api/generate", body)
    assert status == 200 and answer["response"] and answer["done"], answer
    assert scripted.halo("GET", "/conversations")[1] == before


def test_ollama_describes_the_model(scripted):
    model = scripted.call("GET", "/api/tags")[1]["models"][0]
    assert scripted.call("GET", "/api/ps")[1]["models"][0]["name"] == model["name"]
    status, shown = scripted.call("POST", "/api/show", {"model": model["name"]})
    assert status == 200 and "completion" in shown["capabilities"], shown
    assert scripted.call("POST", "/api/show", {"model": "llama3"})[0] == 404
    status, refused = scripted.call("POST", "/api/pull", {"model": "llama3"})
    assert status == 501 and "halo models" in refused["error"], refused


def test_ollama_mistakes_are_logged_without_text(scripted):
    secret = "Rumpelstilzchen"
    body = {"messages": [{"role": "user", "content": secret}], "options": {"top_p": 7}}
    status, refused = scripted.call("POST", "/api/chat", body)
    assert status == 400 and "options.top_p" in refused["error"], refused
    # The log is read by another thread.
    wait_for(lambda: "POST /api/chat: 400" in "".join(scripted.log))
    log = "".join(scripted.log)
    assert "POST /api/chat: 400 InvalidInput, parameter options" in log and secret not in log, log


def test_ollama_embeds(scripted):
    status, embedded = scripted.call("POST", "/api/embed", {"input": ["a lamp", "a ferry"], "dimensions": 64})
    assert status == 200 and [len(vector) for vector in embedded["embeddings"]] == [64, 64], embedded
    long = "The lamp burns. " * 400
    status, refused = scripted.call("POST", "/api/embed", {"input": long})
    assert status == 400 and "512" in refused["error"], refused
    status, split = scripted.call("POST", "/api/embed", {"input": long, "truncate": True})
    assert status == 200 and abs(sum(x * x for x in split["embeddings"][0]) - 1) < 1e-3, split
