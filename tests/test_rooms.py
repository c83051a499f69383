"""Rooms, in a real browser: a person joins, speaks, reacts, opens a door, and looks into an agent's mind."""

import json
import re
import socket
import threading
import time

import pytest
from axe_playwright_python.sync_playwright import Axe
from conftest import Server
from playwright.sync_api import expect
from test_page import browser, shot  # noqa: F401 (a fixture)

WORLD = """
[[models]]
name = "far"
at = "{at}"

[[agents]]
name = "Ada"
seed = "You are Ada, who keeps the lamp."
interval = 2.0

[agents.knowledge.character]
mood = "calm"

[[agents]]
name = "Ben"
seed = "You are Ben, who wants to see it."
interval = 3.0
input_format = "toon"

[[rooms]]
owner = "Ada"
billboard = "The lamp room"
keys = ["open"]
"""

ANSWERS = [
    {"responses": [{"room_id": 1, "message": "The lamp burns."}], "actions": [{"type": "append", "path": "log", "value": "lit"}]},
    {"responses": [], "actions": [{"type": "request_access", "room_id": 1, "key": "open"}, {"type": "leave_room", "room_id": 2}]},
    {"responses": [{"room_id": 1, "message": "[no response]"}], "actions": []},
]


@pytest.fixture
def rooms(tmp_path, far):
    at = far([[json.dumps(answer)] for answer in ANSWERS])
    server = Server(tmp_path, "rooms.max_tokens=160", f"rooms.models={at}").start()
    status, told = server.halo("POST", "/worlds", {"name": "lamp", "file": WORLD.format(at=at)})
    assert status == 201, told
    yield server
    server.stop()
    assert server.process.returncode == 0, "".join(server.log)


def test_a_person_takes_part(browser, rooms):  # noqa: F811
    wrong = []
    context = browser.new_context(color_scheme="dark", viewport={"width": 1280, "height": 800})
    page = context.new_page()
    page.set_default_timeout(30_000)
    page.on("console", lambda message: wrong.append(message.text) if message.type == "error" and not re.search("404|422", message.text) else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.goto(f"{rooms.url}/")
    page.click("a[href='rooms.html']")
    expect(page.locator("#rooms button")).to_have_count(2)
    page.click("#rooms button:has-text('Ada')")
    expect(page.locator("#board")).to_contain_text("The lamp room")
    # Nobody's heart beats until somebody says so.
    expect(page.locator("#run")).to_have_text("Run")
    page.click("#step")
    said = page.locator(".said", has_text="The lamp burns.")
    expect(said).to_be_visible()
    # The person joins, speaks, and feels something.
    page.click("#join")
    expect(page.locator("#leave")).to_be_visible()
    expect(page.locator(".said.system")).to_contain_text("The Architect (0) has joined.")
    page.fill("#message", "May Ben come in?")
    page.press("#message", "Enter")
    expect(page.locator(".said.mine p")).to_have_text("May Ben come in?")
    expect(page.locator("#message")).to_have_value("")
    said.hover()
    said.locator("[data-feeling=thumbs_up]").click()
    expect(said.locator("[data-feeling=thumbs_up]")).to_have_text("👍 1")
    expect(page.locator(".agent[data-agent='1']")).to_contain_text("every 1.6 s")
    # Ben asks to come in, and is let in.
    page.click("#step")
    request = page.locator(".request")
    expect(request).to_contain_text("Ben asks to come in, with the key “open”.")
    shot(page, "rooms-request")
    request.locator("button", has_text="Let in").click()
    expect(page.locator(".agent[data-agent='2']")).to_be_visible()
    expect(request).to_have_count(0)
    # What Ben attends to is a matter of a slider.
    slider = page.locator(".agent[data-agent='2'] input[type=range]")
    slider.focus()
    for _ in range(4):
        slider.press("ArrowRight")
    expect(page.locator(".agent[data-agent='2'] output")).to_have_text("70 %")
    page.locator(".agent[data-agent='2'] button", has_text="share what others leave").click()
    expect(page.locator(".agent[data-agent='2'] output")).to_have_text("50 % (shared)")
    # Ada's mind: what she knows, what she did, what she sees.
    page.click(".agent[data-agent='1'] > button")
    mind = page.locator("[data-mind='1']")
    expect(mind.locator(".known")).to_contain_text('"mood": "calm"')
    expect(mind.locator(".known")).to_contain_text('"lit"')
    expect(mind.locator(".did")).to_contain_text("append")
    expect(mind.locator(".hud")).to_contain_text('"directives": "## Rooms as Conversations')
    mind.locator("[data-format=toon]").click()
    expect(mind.locator(".hud")).to_contain_text("messages[")
    expect(mind.locator("[data-format=json]")).to_contain_text("★")
    shot(page, "rooms-mind")
    mind.locator("button[aria-label=Close]").click()
    # What was refused is told in the agent's own mind.
    page.click(".agent[data-agent='2'] > button")
    expect(page.locator("[data-mind='2'] .did .wrong")).to_contain_text("nobody leaves their own room")
    page.locator("[data-mind='2'] button", has_text="Pause").click()
    expect(page.locator("[data-mind='2'] button", has_text="Go on")).to_be_visible()
    page.locator("[data-mind='2'] button[aria-label=Close]").click()
    # Time goes on, and can be stopped.
    page.select_option("#speed", "10")
    page.click("#run")
    expect(page.locator("#run")).to_have_text("Pause")
    expect(page.locator(".agent[data-agent='1']")).to_contain_text(re.compile(r"[3-9]|\d\d beats"))
    page.click("#run")
    expect(page.locator("#run")).to_have_text("Run")
    found = Axe().run(page, options={"runOnly": ["wcag2a", "wcag2aa"]})
    assert found.violations_count == 0, found.generate_report()
    shot(page, "rooms")
    # A world of one's own begins with a click.
    page.click("#tabs button[aria-label='A new world']")
    page.fill("#asked", "second")
    page.click("dialog button[type=submit]")
    expect(page.locator("#tabs button[aria-current=true]")).to_have_text("second")
    expect(page.locator("#rooms button")).to_have_count(5)
    context.close()
    assert not wrong, wrong


def test_the_api_refuses_with_reasons(rooms):
    world = "/worlds/lamp"
    for method, path, body, status, part in [
        ("GET", "/worlds/none", None, 404, "there is no world 'none'"),
        ("POST", "/worlds", {"name": "lamp"}, 422, "there is one already"),
        ("POST", "/worlds", {"name": " "}, 422, "1 to 60 characters"),
        ("POST", "/worlds", {"name": "x", "file": "agents = 3"}, 422, "reading the world"),
        ("POST", "/worlds", {"name": "x", "file": "[[agents]]\nname = 'A'\nrole = 'x'"}, 400, "a bot has a role"),
        ("POST", "/worlds", {"name": "x", "file": WORLD.format(at="openai+https://elsewhere.example/v1#m")}, 400, "may not think with"),
        ("POST", f"{world}/wishes", {"wish": "say", "room": 1, "message": "x" * 2001}, 422, "2000 characters at most"),
        ("POST", f"{world}/wishes", {"wish": "fly"}, 400, "no JSON that fits"),
        ("POST", f"{world}/wishes", {"wish": "say", "room": 9, "message": "x"}, 422, "there is no room 9"),
        ("POST", f"{world}/wishes", {"wish": "grant", "room": 1, "request": 7}, 422, "nobody waits"),
        ("POST", f"{world}/wishes", {"wish": "attend", "agent": 1, "room": 1, "value": "200%"}, 422, "no share"),
        ("PUT", f"{world}/pace", {"speed": 0}, 400, "0.1 to 100"),
        ("GET", f"{world}/agents/9/hud", None, 404, "there is no agent 9"),
        ("GET", f"{world}/agents/1/hud?format=xml", None, 400, "there is json, compact_json"),
        ("GET", f"{world}/rooms/9/messages", None, 404, "there is no room 9"),
    ]:
        got, told = rooms.halo(method, path, body)
        assert got == status and part in told["error"], (method, path, got, told)
    # It is no conversation, and nobody can talk in it as if it were one.
    assert rooms.halo("GET", "/conversations")[1] == []
    status, told = rooms.halo("POST", "/conversations/world%3Alamp/say", {"text": "hello"})
    assert status >= 400 and "worlds of rooms" in told["error"], (status, told)
    # What is ended is gone.
    assert rooms.halo("DELETE", world)[0] == 204
    assert rooms.halo("GET", "/worlds")[1] == []


def test_what_a_model_kept_of_a_world_ends_with_it(rooms):
    world = '[[agents]]\nname = "Cal"\nseed = "You are Cal."\n\n[[agents]]\nname = "Dee"\nseed = "You are Dee."\ninput_format = "toon"\noutput_format = "toon"\n'
    status, told = rooms.halo("POST", "/worlds", {"name": "kept", "file": world})
    assert status == 201, told
    for beats in [1, 2, 3]:
        assert rooms.halo("PUT", "/worlds/kept/pace", {"step": True})[0] == 200
        waited(lambda: sum(agent["beats"] for agent in rooms.halo("GET", "/worlds/kept")[1]["agents"]) == beats)
    # Who thinks next takes what the last one saw out of the model's memory, and it is saved.
    saved = lambda: [path for path in (rooms.data / "kv").rglob("*.kv")]  # noqa: E731
    waited(lambda: saved())
    assert rooms.halo("DELETE", "/worlds/kept")[0] == 204
    waited(lambda: not saved())


def test_a_model_that_says_nothing_keeps_nobody_else_waiting(tmp_path):
    mute = socket.create_server(("127.0.0.1", 0))
    at = f"openai+http://127.0.0.1:{mute.getsockname()[1]}/v1"
    rooms = Server(tmp_path, f"rooms.models={at}").start()
    near = {"name": "near", "file": '[[agents]]\nname = "Cal"\nseed = "You are Cal."\n'}
    assert rooms.halo("POST", "/worlds", near)[0] == 201
    told = []
    asks = threading.Thread(
        target=lambda: told.append(rooms.halo("POST", "/worlds", {"name": "mute", "file": WORLD.format(at=at)}))
    )
    asks.start()
    mute.settimeout(60)
    called, _ = mute.accept()
    # While that one is waited for, others are opened and ended.
    assert rooms.halo("DELETE", "/worlds/near")[0] == 204
    assert rooms.halo("POST", "/worlds", near)[0] == 201
    assert {world["name"] for world in rooms.halo("GET", "/worlds")[1]} == {"mute", "near"}
    assert told == []
    asks.join(60)
    (status, why), = told
    assert status >= 400 and "the world 'mute' is made, and cannot be opened now" in why["error"], told
    called.close()
    mute.close()
    assert rooms.halo("DELETE", "/worlds/mute")[0] == 204
    rooms.stop()
    assert rooms.process.returncode == 0, "".join(rooms.log)


def waited(is_so, seconds=120):
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.2)
