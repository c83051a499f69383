"""Memories in a server: formed after a turn while the model is idle, traced, carried, and their conflicts decided."""

import time

import pytest

from conftest import Server

SETTINGS = (
    "memory.enabled=true",
    "memory.range_tokens=60",
    "memory.tokens=60",
    "memory.delay=0",
    "recall.mode=lexical",
    "context.max_tokens=2000",
    "generation.max_tokens=64",
)
LONG = " and so it goes on and on in the old house by the river" * 3


@pytest.fixture
def scripted(tmp_path, remote_model):
    """A server whose model answers and remembers as scripted; the last answer is repeated."""
    servers = []

    def start(answers):
        server = Server(tmp_path, *SETTINGS, model=remote_model([[answer] for answer in answers])).start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.stop()


def memories(server, name, count, seconds=20):
    """The memories of a chat, once there are so many."""
    deadline = time.time() + seconds
    while time.time() < deadline:
        found = server.halo("GET", f"/conversations/{name}/memories")[1]["memories"]
        if len(found) >= count:
            return sorted(found, key=lambda memory: memory["id"])
        time.sleep(0.1)
    raise AssertionError(f"{len(found)} memories, not {count}")


def test_memory_is_formed_after_the_turn_and_traced(scripted, browser):
    server = scripted([f"The gun is Betsy{LONG}.", "The gun is called Betsy."])
    server.say("main", f"The gun on the wall is called Betsy{LONG}")
    # Nothing is asked of the server but to read: the memory is formed because the model is idle.
    [memory] = memories(server, "main", 1)
    assert memory["text"] == "The gun is called Betsy." and (memory["first_turn"], memory["last_turn"]) == (0, 1)
    status, origins = server.halo("GET", "/conversations/main/memories/1/origins")
    assert status == 200
    covered = [byte for span in origins["spans"] for byte in range(span["start"], span["end"])]
    assert covered == list(range(len(origins["text"].encode()))), "every byte has one origin"
    assert [span["kind"] for span in origins["spans"]] == ["model"]
    assert origins["spans"][0]["chunk"] in ("u0.0", "a1.0") and origins["spans"][0]["overlap"] >= 0.3
    assert [segment["block"] for segment in origins["segments"]] == ["instructions", "turn-0", "turn-1"]
    assert all(segment["tokens"] > 0 and segment["facets"] for segment in origins["segments"])
    assert server.halo("GET", "/conversations/main/memories/9/origins")[0] == 404
    page = browser.new_page()
    page.goto(f"{server.url}/#main")
    page.click("#inspect")
    page.get_by_role("tab", name="Memories").click()
    page.get_by_role("button", name="Where from: memory 1").click()
    page.locator(".origins").get_by_text("The model saw: instructions, turn-0, turn-1").wait_for()
    assert page.locator(".origins").get_by_text("The gun is called Betsy.").count() == 1
    page.close()


def test_memories_are_carried_into_a_new_chat(scripted):
    server = scripted([f"Noted{LONG}.", "The gun is called Betsy.", "Hello."])
    server.say("main", f"The gun on the wall is called Betsy{LONG}")
    memories(server, "main", 1)
    request = {"memories": [{"conversation": "main", "id": 1}]}
    assert server.halo("POST", "/conversations/new/memories/carry", {"memories": []})[0] == 422
    unknown = {"memories": [{"conversation": "main", "id": 7}]}
    assert server.halo("POST", "/conversations/new/memories/carry", unknown)[0] == 404
    assert server.halo("POST", "/conversations/new/memories/carry", request) == (200, {"ids": [1]})
    state = server.say("new", "Hi")
    assert "The gun is called Betsy." in state["system_prompt"]
    [carried] = memories(server, "new", 1)[:1]
    assert carried["carried"] and not carried["placed"]
    origins = server.halo("GET", "/conversations/new/memories/1/origins")[1]
    expected = {"conversation": "main", "memory": 1, "first_turn": 0, "last_turn": 1}
    assert origins["carried_from"] == [expected]
    assert server.halo("PUT", "/conversations/new/memories/1", {"disabled": True})[0] == 204
    assert "Betsy" not in server.halo("GET", "/conversations/new")[1]["system_prompt"]


def test_memory_is_carried_on_the_page(scripted, browser):
    server = scripted([f"Noted{LONG}.", "The gun is called Betsy.", "Hello."])
    server.say("main", f"The gun on the wall is called Betsy{LONG}")
    memories(server, "main", 1)
    page = browser.new_page()
    page.goto(f"{server.url}/#main")
    page.click("#inspect")
    page.get_by_role("tab", name="Memories").click()
    page.get_by_role("button", name="Carry: memory 1").click()
    page.fill("#ask-input", "next chat")
    page.locator("#ask button[type=submit]").click()
    page.locator(".toast").get_by_role("button", name="Open").click()
    page.wait_for_function("() => decodeURIComponent(location.hash).includes('next chat')")
    page.close()
    [carried] = memories(server, "next%20chat", 1)
    assert carried["carried"] and carried["text"] == "The gun is called Betsy."
    assert "The gun is called Betsy." in server.say("next chat", "Hi")["system_prompt"]


def test_conflicts_between_memories_are_put_to_the_user(scripted, browser):
    answers = [f"Yes{LONG}.", "The door is open. Tea is good.", f"No{LONG}.", "The door is closed.", "Well."]
    server = scripted(answers)
    for count in (1, 2):
        server.say("main", f"Message {count}{LONG}")
        memories(server, "main", count)
    status, [conflict] = server.halo("GET", "/conversations/main/memories/conflicts")
    assert status == 200 and (conflict["first"], conflict["second"]) == (1, 2)
    assert (conflict["first_sentence"], conflict["second_sentence"]) == ("The door is open.", "The door is closed.")
    wrong = {"first": 1, "second": 2, "keep": "neither"}
    assert server.halo("POST", "/conversations/main/memories/conflicts", wrong)[0] in (400, 422)
    page = browser.new_page()
    page.goto(f"{server.url}/#main")
    page.click("#inspect")
    page.get_by_role("tab", name="Memories").click()
    page.locator("[data-conflict='1-2']").get_by_role("button", name="The second").click()
    page.locator("[data-conflict='1-2']").wait_for(state="detached")
    page.close()
    assert server.halo("GET", "/conversations/main/memories/conflicts") == (200, [])
    first = memories(server, "main", 2)[0]
    assert first["retracted"] == ["The door is open."] and first["conflicts"] == []
