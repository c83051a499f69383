"""The page of a world in a real browser, and the routes of worlds."""

import json
import re
import signal
import socket
import subprocess
import threading
import time

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect

from conftest import HALO, MODEL, ROOT, Server, console_error
from test_page import shot

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
    {
        "responses": [{"room_id": 1, "message": "The lamp burns."}],
        "actions": [{"type": "append", "path": "log", "value": "lit"}],
    },
    {
        "responses": [],
        "actions": [{"type": "request_access", "room_id": 1, "key": "open"}, {"type": "leave_room", "room_id": 2}],
    },
    {"responses": [{"room_id": 1, "message": "[no response]"}], "actions": []},
]


@pytest.fixture
def rooms(tmp_path, remote_model):
    at = remote_model([[json.dumps(answer)] for answer in ANSWERS])
    server = Server(tmp_path, "rooms.max_tokens=160", "server.idle=2", f"rooms.models={at}").start()
    status, result = server.halo("POST", "/worlds", {"name": "lamp", "file": WORLD.format(at=at)})
    assert status == 201, result
    yield server
    server.stop()
    assert server.process.returncode == 0, "".join(server.log)


@pytest.fixture
def open_page(browser, rooms):
    """Opens pages and fails the test on every console error, except those that match `ignored_errors`."""
    contexts, errors = [], []

    def open_new_page(url, ignored_errors="404|409|422"):
        context = browser.new_context(color_scheme="dark", viewport={"width": 1280, "height": 800})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(30_000)
        page.on(
            "console",
            lambda message: (
                errors.append(console_error(message))
                if message.type == "error" and not re.search(ignored_errors, message.text)
                else None
            ),
        )
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(url)
        return page

    yield open_new_page
    for context in contexts:
        context.close()
    assert not errors, errors


def test_rooms_page(open_page, rooms):
    page = open_page(f"{rooms.url}/")
    page.click("a[href='rooms.html']")
    expect(page.locator("#rooms button[data-room]")).to_have_count(2)
    page.click("#rooms button:has-text('Ada')")
    expect(page.locator("#billboard")).to_contain_text("The lamp room")
    # A world is paused until the user runs it.
    expect(page.locator("#run")).to_have_text("Run")
    page.click("#step")
    message = page.locator(".message", has_text="The lamp burns.")
    expect(message).to_be_visible()
    # The user joins, sends a message, and reacts.
    page.click("#join")
    expect(page.locator("#leave")).to_be_visible()
    expect(page.locator(".message.system")).to_contain_text("The Architect (0) has joined.")
    page.fill("#message", "May Ben come in?")
    page.press("#message", "Enter")
    expect(page.locator(".message.mine p")).to_have_text("May Ben come in?")
    # A draft stays in its room.
    page.fill("#message", "half a thought")
    page.click("#rooms button:has-text('Ben')")
    expect(page.locator("#message")).to_have_value("")
    page.click("#rooms button:has-text('Ada')")
    expect(page.locator("#message")).to_have_value("half a thought")
    page.fill("#message", "")
    expect(page.locator("#message")).to_have_value("")
    message.hover()
    message.locator("[data-reaction=thumbs_up]").click()
    expect(message.locator("[data-reaction=thumbs_up]")).to_have_text("👍 1")
    expect(page.locator(".agent[data-agent='1']")).to_contain_text("every 1.6 s")
    # A reply shows the message that it replies to.
    message.locator("button.reply").click()
    expect(page.locator("#replying")).to_contain_text("↳ Ada: The lamp burns.")
    page.fill("#message", "Does it?")
    page.press("#message", "Enter")
    expect(page.locator(".message.mine", has_text="Does it?").locator(".reply-to")).to_have_text(
        "↳ Ada: The lamp burns."
    )
    expect(page.locator("#replying")).to_be_hidden()
    # Ben asks to join, and the user accepts.
    page.click("#step")
    request = page.locator(".request")
    expect(request).to_contain_text("Ben asks to join with the key “open”.")
    shot(page, "rooms-request")
    request.locator("button", has_text="Accept").click()
    expect(page.locator(".agent[data-agent='2']")).to_be_visible()
    expect(request).to_have_count(0)
    # A slider sets the attention of Ben.
    slider = page.locator(".agent[data-agent='2'] input[type=range]")
    slider.focus()
    for _ in range(4):
        slider.press("ArrowRight")
    expect(page.locator(".agent[data-agent='2'] output")).to_have_text("70 %")
    page.locator(".agent[data-agent='2'] button", has_text="Auto").click()
    expect(page.locator(".agent[data-agent='2'] output")).to_have_text("50 % (auto)")
    # Ada's knowledge, recent actions and HUD.
    page.click(".agent[data-agent='1'] > button")
    mind = page.locator("[data-mind='1']")
    expect(mind.locator(".knowledge")).to_contain_text('"mood": "calm"')
    expect(mind.locator(".knowledge")).to_contain_text('"lit"')
    expect(mind.locator(".recent-actions")).to_contain_text("append")
    expect(mind.locator(".hud")).to_contain_text('"directives": "## Rooms as Conversations')
    mind.locator("[data-format=toon]").click()
    expect(mind.locator(".hud")).to_contain_text("messages[")
    expect(mind.locator("[data-format=json]")).to_contain_text("★")
    # “Think now” works while the world is paused, and the scroll position of the HUD stays.
    mind.locator(".hud").evaluate("hud => { hud.scrollTop = 100; hud.marked = true; }")
    beats = mind.locator(".quiet").first.inner_text()
    mind.locator("button", has_text="Think now").click()
    expect(mind.locator(".quiet").first).not_to_have_text(beats)
    expect(mind.locator(".usage")).to_contain_text("prompt tokens")
    assert mind.locator(".hud").evaluate("hud => [hud.scrollTop, hud.marked]") == [100, True]
    mind.locator("button[aria-label=Close]").focus()
    report = Axe().run(page, options={"runOnly": ["wcag2a", "wcag2aa"]})
    assert report.violations_count == 0, report.generate_report()
    shot(page, "rooms-mind")
    mind.locator("button[aria-label=Close]").click()
    # A refused action is shown with its reason.
    page.click(".agent[data-agent='2'] > button")
    expect(page.locator("[data-mind='2'] .recent-actions .error")).to_contain_text("you cannot leave your own room")
    page.locator("[data-mind='2'] button", has_text="Pause").click()
    expect(page.locator("[data-mind='2'] button", has_text="Resume")).to_be_visible()
    page.locator("[data-mind='2'] button[aria-label=Close]").click()
    # The world runs and is paused.
    page.select_option("#speed", "10")
    page.click("#run")
    expect(page.locator("#run")).to_have_text("Pause")
    # The keyboard focus does not move.
    page.focus(".agent[data-agent='1'] > button")
    expect(page.locator(".agent[data-agent='1']")).to_contain_text(re.compile(r"\b([4-9]|\d\d) heartbeats"))
    assert page.evaluate("document.activeElement.closest('[data-agent]')?.dataset.agent") == "1"
    page.click("#run")
    expect(page.locator("#run")).to_have_text("Run")
    report = Axe().run(page, options={"runOnly": ["wcag2a", "wcag2aa"]})
    assert report.violations_count == 0, report.generate_report()
    shot(page, "rooms")
    # A new world.
    page.click("#tabs button[aria-label='New world']")
    page.fill("#ask-input", "second")
    page.click("dialog button[type=submit]")
    expect(page.locator("#tabs button[aria-current=true]")).to_have_text("second")
    expect(page.locator("#rooms button[data-room]")).to_have_count(5)
    # An error is shown in the dialog, and the name stays.
    page.click("#tabs button[aria-label='New world']")
    page.fill("#ask-input", "second")
    page.click("dialog button[type=submit]")
    expect(page.locator("dialog")).to_contain_text("a world of that name exists")
    expect(page.locator("#ask-input")).to_have_value("second")
    page.click("dialog button[type=button]")
    # A world from a file; another page sees it created and deleted.
    other = open_page(f"{rooms.url}/rooms.html#lamp")
    expect(other.locator("#tabs button")).to_have_count(3)
    page.click("#tabs button[aria-label='New world']")
    page.fill("#ask-input", "third")
    page.set_input_files(
        "#world-file", {"name": "w.toml", "mimeType": "text/plain", "buffer": b'[[agents]]\nname = "Cal"\nseed = "x"\n'}
    )
    page.click("dialog button[type=submit]")
    expect(page.locator("#rooms button[data-room]")).to_have_text(["Cal's room1 member"])
    expect(other.locator("#tabs button")).to_have_count(4)
    page.click("#delete-world")
    page.click("dialog button[type=submit]")
    expect(page.locator("#tabs button")).to_have_count(3)
    expect(other.locator("#tabs button")).to_have_count(3)
    expect(other.locator("#tabs button[aria-current=true]")).to_have_text("lamp")


def test_rooms_page_creates_changes_and_retires_agents(open_page, rooms):
    agents = lambda: {agent["name"]: agent for agent in rooms.halo("GET", "/worlds/lamp")[1]["agents"]}
    page = open_page(f"{rooms.url}/rooms.html#lamp")
    page.click("#rooms button:has-text('Ada')")
    page.click("#new-agent")
    page.fill("#agent-name", "Ada")
    page.select_option("#agent-kind", "bot")
    page.fill("#agent-prompt", "Counts the ships that pass.")
    page.check("#agent-manages")
    page.click("dialog button[type=submit]")
    # An error stays in the dialog, with what was written.
    expect(page.locator("dialog .error")).to_contain_text("the name 'Ada' is taken")
    expect(page.locator("#agent-prompt")).to_have_value("Counts the ships that pass.")
    report = Axe().run(page, options={"runOnly": ["wcag2a", "wcag2aa"]})
    assert report.violations_count == 0, report.generate_report()
    page.fill("#agent-name", "Cleo")
    page.click("dialog button[type=submit]")
    expect(page.locator("dialog")).to_be_hidden()
    expect(page.locator(".agent[data-agent='3']")).to_contain_text("Cleo")
    cleo = agents()["Cleo"]
    assert (cleo["kind"], cleo["prompt"], cleo["model"], cleo["can_create_agents"]) == (
        "bot",
        "Counts the ships that pass.",
        "far",
        True,
    )
    # Its name and its rights are changed; what is not changed stays.
    page.click(".agent[data-agent='3'] > button")
    mind = page.locator("[data-mind='3']")
    expect(mind).to_contain_text("May create, change and retire agents.")
    expect(mind.locator(".hud")).to_contain_text("agent_management")
    mind.locator("button", has_text="Change…").click()
    expect(page.locator("#agent-manages")).to_be_checked()
    page.fill("#agent-name", "Clio")
    page.fill("#agent-interval", "2.5")
    page.uncheck("#agent-manages")
    page.click("dialog button[type=submit]")
    expect(mind.locator("h2")).to_contain_text("Clio")
    expect(mind.locator("[data-key=rights]")).to_have_count(0)
    expect(mind.locator(".hud")).not_to_contain_text("agent_management")
    clio = agents()["Clio"]
    assert (clio["interval"], clio["can_create_agents"], clio["prompt"]) == (2.5, False, cleo["prompt"])
    # Its heartbeats have a history by section and by format.
    expect(mind.locator("[data-key=no-telemetry]")).to_be_visible()
    for beats in [1, 2]:
        mind.locator("button", has_text="Think now").click()
        expect(mind.locator("figure.telemetry")).to_have_attribute("data-beats", str(beats))
    expect(mind.locator("figure.telemetry g")).to_have_count(2)
    expect(mind.locator("figure.telemetry figcaption")).to_contain_text("rooms ")
    expect(mind.locator(".managed")).to_have_text(re.compile(r"^The last HUD filled \d+ % of its budget\.$"))
    expect(mind.locator("table.formats tbody tr")).to_have_count(4)
    expect(mind.locator("table.formats tr[data-measured=json]")).to_contain_text("0 %")
    shot(page, "rooms-telemetry")
    mind.locator("button[aria-label=Close]").click()
    # An agent is invited to a room, and removed from it.
    page.click("#rooms button:has-text('Clio')")
    page.select_option("#invite", label="Ben")
    expect(page.locator(".agent[data-agent='2']")).to_be_visible()
    page.click(".agent[data-agent='2'] .remove")
    expect(page.locator(".agent[data-agent='2']")).to_have_count(0)
    # It retires.
    page.click(".agent[data-agent='3'] > button")
    mind.locator("button", has_text="Retire").click()
    page.click("dialog button[type=submit]")
    expect(page.locator("#rooms button:has-text('Clio')")).to_have_count(0)
    assert set(agents()) == {"Ada", "Ben"}


def test_rooms_page_reconnects(open_page, rooms):
    page = open_page(f"{rooms.url}/rooms.html", ignored_errors="404|422|ERR_CONNECTION|ERR_INCOMPLETE")
    page.click("#rooms button:has-text('Ada')")
    page.fill("#message", "Are you there?")
    page.press("#message", "Enter")
    expect(page.locator(".message.mine p")).to_have_text("Are you there?")
    page.fill("#message", "half a thought")
    rooms.stop(signal.SIGKILL)
    expect(page.locator("#offline")).to_contain_text("Server unreachable")
    time.sleep(3)
    # Messages and the draft stay.
    expect(page.locator(".message.mine p")).to_have_text("Are you there?")
    expect(page.locator("#message")).to_have_value("half a thought")
    rooms.start()
    expect(page.locator("#offline")).to_be_hidden()
    page.press("#message", "Enter")
    expect(page.locator(".message.mine p")).to_have_text(["Are you there?", "half a thought"])


def test_rooms_page_fits_narrow_windows(open_page, rooms):
    for n in range(20):
        rooms.halo("POST", "/worlds/lamp/commands", {"command": "say", "room": 1, "message": f"word {n} " * 20})
    page = open_page(f"{rooms.url}/rooms.html#lamp")
    for width in [420, 700]:
        page.set_viewport_size({"width": width, "height": 800})
        page.click("#rooms button:has-text('Ada')")
        expect(page.locator(".message.mine")).to_have_count(20)
        heights = page.evaluate(
            "[document.documentElement.scrollHeight, ...['rooms', 'log', 'panel', 'composer'].map(id => document.getElementById(id).getBoundingClientRect().height)]"
        )
        assert heights[0] <= 800 and heights[1] > 40 and heights[2] > 150 and heights[3] > 100 and heights[4] > 30, (
            width,
            heights,
        )
        shot(page, f"rooms-{width}")


def test_long_room_log_has_no_gaps(open_page, rooms):
    for n in range(230):
        status, result = rooms.halo(
            "POST", "/worlds/lamp/commands", {"command": "say", "room": 1, "message": f"word {n}"}
        )
        assert status == 200, result
    page = open_page(f"{rooms.url}/rooms.html#lamp")
    page.click("#rooms button:has-text('Ada')")
    expect(page.locator(".message.mine")).to_have_count(100)
    page.click("#log .gap")
    expect(page.locator(".message.mine")).to_have_count(200)
    # More messages arrive in the meantime than one response has.
    page.click("#rooms button:has-text('Ben')")
    for n in range(230, 360):
        rooms.halo("POST", "/worlds/lamp/commands", {"command": "say", "room": 1, "message": f"word {n}"})
    page.click("#rooms button:has-text('Ada')")
    expect(page.locator(".message.mine").last).to_contain_text("word 359")
    while page.locator("#log .gap").count():
        before = page.locator(".message.mine").count()
        page.click("#log .gap")
        expect(page.locator(".message.mine")).not_to_have_count(before)
    assert page.locator(".message.mine p").all_inner_texts() == [f"word {n}" for n in range(360)]
    # The oldest message is shown.
    joined = page.locator(".message", has_text="has joined")
    expect(joined).to_have_count(1)


def test_world_run_by_another_program(open_page, rooms, tmp_path):
    world = lambda: rooms.halo("GET", "/worlds/lamp")[1]
    command = [HALO, "rooms", "run", "lamp", "--data", rooms.data, "--model", MODEL, "--json"]
    page = open_page(f"{rooms.url}/rooms.html#lamp", ignored_errors="404|422|503")
    expect(page.locator("#rooms button")).to_have_count(3)
    # Reading does not open the world. A command opens it; the server closes it when it is idle.
    rooms.halo("PUT", "/worlds/lamp/clock", {"step": True})
    wait_until(lambda: world()["open"] and sum(agent["beats"] for agent in world()["agents"]) == 1)
    wait_until(lambda: not world()["open"], 30)
    runner = subprocess.Popen(
        [str(part) for part in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        runner.stdout.readline()
        page.click("#rooms button:has-text('Ada')")
        expect(page.locator(".message", has_text="The lamp burns.")).to_have_count(1)
        # A message is queued for the other program, which sends it.
        page.fill("#message", "Who runs this?")
        page.press("#message", "Enter")
        expect(page.locator(".toast")).to_contain_text("Queued for the program that runs this world")
        expect(page.locator("#offline")).to_contain_text("Another program runs this world")
        expect(page.locator(".message.mine p")).to_have_text("Who runs this?", timeout=30_000)
        expect(page.locator("#run")).to_be_disabled()
        assert rooms.halo("PUT", "/worlds/lamp/clock", {"paused": False})[0] == 503
        # The panel of an agent shows why it cannot be loaded.
        page.click(".agent[data-agent='1'] > button")
        expect(page.locator("[data-mind='1'] .error")).to_contain_text("another Halo")
        page.click("[data-mind='1'] button[aria-label=Close]")
    finally:
        runner.send_signal(signal.SIGINT)
        assert runner.wait(60) == 0, runner.stderr.read()
    expect(page.locator("#offline")).to_be_hidden()
    page.click("#run")
    expect(page.locator("#run")).to_have_text("Pause")


def test_agent_mind_without_a_fitting_format(rooms):
    small = "[budgets]\ntotal = 1300\nstatic = 1280\nmessages = 20\nknowledge = 100\n"
    rooms.halo(
        "POST",
        "/worlds",
        {"name": "tight", "file": small + '[[agents]]\nname = "Cal"\nseed = "You are Cal."\ninput_format = "toon"\n'},
    )
    status, result = rooms.halo("GET", "/worlds/tight/agents/1/hud")
    assert status == 200 and result["hud"]["format"] == "toon", result
    assert result["tokens_by_format"]["json"] is None and result["tokens_by_format"]["toon"] <= 1300, result[
        "tokens_by_format"
    ]
    status, result = rooms.halo("GET", "/worlds/tight/agents/1/hud?format=json")
    assert status == 200 and result["hud"] is None and "must see" in result["error"], result


def test_world_errors(rooms):
    world = "/worlds/lamp"
    for method, path, body, status, expected in [
        ("GET", "/worlds/none", None, 404, "there is no world 'none'"),
        ("POST", "/worlds", {"name": "lamp"}, 409, "a world of that name exists"),
        ("POST", "/worlds", {"name": " "}, 400, "1 to 60 characters"),
        ("POST", "/worlds", {"name": "x", "file": "agents = 3"}, 422, "reading the world"),
        ("POST", "/worlds", {"name": "x", "file": "[[agents]]\nname = 'A'\nrole = 'x'"}, 400, "a bot has a role"),
        (
            "POST",
            "/worlds",
            {"name": "x", "file": WORLD.format(at="openai+https://elsewhere.example/v1#m")},
            400,
            "may not use the model",
        ),
        (
            "POST",
            f"{world}/commands",
            {"command": "say", "room": 1, "message": "x" * 2001},
            422,
            "2000 characters at most",
        ),
        ("POST", f"{world}/commands", {"command": "fly"}, 400, "invalid JSON body"),
        ("POST", f"{world}/commands", {"command": "say", "room": 9, "message": "x"}, 422, "there is no room 9"),
        ("POST", f"{world}/commands", {"command": "grant", "room": 1, "request": 7}, 422, "no access request 7"),
        (
            "POST",
            f"{world}/commands",
            {"command": "attend", "agent": 1, "room": 1, "value": "200%"},
            422,
            "not a share",
        ),
        ("PUT", f"{world}/clock", {"speed": 0}, 400, "0.1 to 100"),
        ("GET", f"{world}/agents/9/hud", None, 404, "there is no agent 9"),
        ("GET", f"{world}/agents/1/hud?format=xml", None, 400, "use one of json, compact_json"),
        ("GET", f"{world}/rooms/9/messages", None, 404, "there is no room 9"),
    ]:
        actual, result = rooms.halo(method, path, body)
        assert actual == status and expected in result["error"], (method, path, actual, result)
    # A world is not a conversation and cannot be used as one.
    assert rooms.halo("GET", "/conversations")[1] == []
    status, result = rooms.halo("POST", "/conversations/world%3Alamp/messages", {"text": "hello"})
    assert status == 400 and "worlds of rooms" in result["error"], (status, result)
    # The world is deleted.
    assert rooms.halo("DELETE", world)[0] == 204
    assert rooms.halo("GET", "/worlds")[1] == []


def test_deleting_a_world_deletes_its_kv_archive(tmp_path):
    """The model is a small one with random weights: three HUDs of thousands of tokens are prefilled in no time."""
    world = '[[agents]]\nname = "Cal"\nseed = "You are Cal."\n\n[[agents]]\nname = "Dee"\nseed = "You are Dee."\ninput_format = "toon"\noutput_format = "toon"\n'
    model = ROOT / "target/models/tiny-llama.gguf"
    rooms = Server(tmp_path, "rooms.max_tokens=160", "recall.mode=lexical", "model.context=8192", model=model).start()
    try:
        status, result = rooms.halo("POST", "/worlds", {"name": "kept", "file": world})
        assert status == 201, result
        for beats in [1, 2, 3]:
            assert rooms.halo("PUT", "/worlds/kept/clock", {"step": True})[0] == 200
            agents = lambda: rooms.halo("GET", "/worlds/kept")[1]["agents"]
            wait_until(lambda beats=beats: sum(agent["beats"] for agent in agents()) == beats)
        # The next agent evicts the KV cells of the last one, and they are saved in the archive.
        saved_files = lambda: [path for path in (rooms.data / "kv").rglob("*.kv")]
        wait_until(lambda: saved_files())
        assert rooms.halo("DELETE", "/worlds/kept")[0] == 204
        wait_until(lambda: not saved_files())
    finally:
        rooms.stop()


def test_silent_model_does_not_block_other_worlds(tmp_path):
    silent_model = socket.create_server(("127.0.0.1", 0))
    at = f"openai+http://127.0.0.1:{silent_model.getsockname()[1]}/v1"
    rooms = Server(tmp_path, f"rooms.models={at}").start()
    local_world = {"name": "near", "file": '[[agents]]\nname = "Cal"\nseed = "You are Cal."\n'}
    assert rooms.halo("POST", "/worlds", local_world)[0] == 201
    result = []
    creation = threading.Thread(
        target=lambda: result.append(rooms.halo("POST", "/worlds", {"name": "mute", "file": WORLD.format(at=at)}))
    )
    creation.start()
    silent_model.settimeout(60)
    connection, _ = silent_model.accept()
    # Meanwhile other worlds can be created and deleted.
    assert rooms.halo("DELETE", "/worlds/near")[0] == 204
    assert rooms.halo("POST", "/worlds", local_world)[0] == 201
    assert {world["name"] for world in rooms.halo("GET", "/worlds")[1]} == {"mute", "near"}
    assert result == []
    creation.join(60)
    ((status, body),) = result
    assert status >= 400 and "the world 'mute' was created, but it cannot be opened now" in body["error"], result
    connection.close()
    silent_model.close()
    assert rooms.halo("DELETE", "/worlds/mute")[0] == 204
    rooms.stop()
    assert rooms.process.returncode == 0, "".join(rooms.log)


def wait_until(condition, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition was not reached in time"
        time.sleep(0.2)


def test_shortened_messages_of_agents_are_shown_and_counted(browser, tmp_path, remote_model):
    long = "The boats came in late, and everybody was tired of the wind. " * 6
    answer = json.dumps({"responses": [{"room_id": 1, "message": long.strip()}], "actions": []})
    at = remote_model([[answer]])
    settings = ("rooms.max_tokens=400", f"rooms.models={at}", "rooms.cooling_tokens=3000", "rooms.summaries=truncate")
    messages = "".join(f'\n[[rooms.messages]]\nsender = "Ben"\ncontent = "{n}. {long}"\n' for n in range(150))
    server = Server(tmp_path, *settings).start()
    try:
        world = {"name": "lamp", "file": WORLD.format(at=at) + messages}
        status, result = server.halo("POST", "/worlds", world)
        assert status == 201, result
        page = browser.new_page()
        page.goto(f"{server.url}/rooms.html#lamp")
        page.click("#rooms button:has-text('Ada')")
        page.click(".agent[data-agent='1'] > button")
        mind = page.locator("[data-mind='1']")
        mind.locator("button", has_text="Think now").click()
        expect(mind.locator(".managed")).to_contain_text("messages shortened in HUDs.", timeout=20_000)
        telemetry = server.halo("GET", "/worlds/lamp/telemetry")[1]["heartbeats"]
        cooled = sum(beat["cooled_messages"] for beat in telemetry)
        summarized = sum(beat["summarized_messages"] for beat in telemetry)
        assert cooled > 0 and all(beat["pressure_percent"] > 0 for beat in telemetry), telemetry
        _, text = server.call("GET", "/metrics")
        assert f"halo_agent_messages_cooled_total {cooled}\n" in text
        assert f"halo_agent_messages_summarized_total {summarized}\n" in text
        page.close()
    finally:
        server.stop()
