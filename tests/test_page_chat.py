"""The chat view: variants and branches, names, states, focus, the context meter, imports, search over all chats, settings."""

import json
import re
import signal
import threading

import pytest
from playwright.sync_api import expect

from conftest import Server, wait_for

PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}
TABLET = {"viewport": {"width": 820, "height": 1180}, "has_touch": True}


def turn(page, text):
    return page.locator(".turn", has_text=text).first


def chunk(page, text):
    return page.locator(".chunk", has_text=text).first


def choose(page, message, item):
    message.hover()
    message.get_by_role("button", name="More").last.click()
    page.get_by_role("menuitem", name=item, exact=True).click()


@pytest.fixture
def talk(scripted):
    """A server with a chat of two exchanges."""
    server = scripted("A red fox.", "A grey wolf.", "A brown bear.", settings=("recall.mode=lexical",))
    server.say("main", "Name an animal.")
    server.say("main", "Name another one.")
    return server


def test_older_answer_is_regenerated_in_a_branch_and_every_answer_is_kept(talk, open_chat):
    page = open_chat(talk)
    first = page.locator(".turn.assistant").first
    expect(first).to_contain_text("A red fox.")
    first.hover()
    first.get_by_role("button", name="Regenerate").click()
    # The branch ends with another answer, and has the old one as a variant.
    expect(page.locator("#title")).to_have_text("main · branch")
    expect(page.locator("#stop")).to_be_hidden()
    expect(page.locator(".turn.assistant")).to_have_count(1)
    last = page.locator(".turn.assistant")
    expect(last.locator(".variants")).to_contain_text("2/2")
    new = last.locator(".body").inner_text()
    assert new != "A red fox.", new
    page.get_by_role("link", name="main", exact=True).click()
    expect(page.locator(".turn.assistant")).to_have_count(2)
    expect(first).to_contain_text("A red fox.")
    # In a chat where a regenerated answer has become an older one, its variants can be chosen, in a branch.
    page.get_by_role("link", name="main · branch", exact=True).click()
    expect(page.locator(".turn.assistant")).to_have_count(1)
    page.fill("#message", "And one more?")
    page.press("#message", "Enter")
    expect(page.locator(".turn.assistant")).to_have_count(2)
    expect(page.locator("#stop")).to_be_hidden()
    for reloaded in (False, True):
        if reloaded:
            page.reload()
        older = page.locator(".turn.assistant").first
        older.hover()
        expect(older.locator(".variants")).to_contain_text("2/2")
    older.get_by_role("button", name="Previous answer in a branch").click()
    expect(page.locator("#title")).to_have_text("main · branch 2")
    expect(page.locator(".turn.assistant")).to_have_count(1)
    expect(page.locator(".turn.assistant")).to_contain_text("A red fox.")
    expect(page.locator(".turn.assistant .variants")).to_contain_text("1/2")
    # The other one can be chosen there too.
    page.get_by_role("button", name="Next answer").click()
    expect(page.locator(".turn.assistant .body")).to_have_text(new)
    # Nothing was lost in the chats that were branched from.
    assert talk.halo("GET", "/conversations/main/transcript")[1]["total"] == 4


@pytest.mark.parametrize("screen", [PHONE, TABLET], ids=["phone", "tablet"])
def test_show_in_the_chat_closes_the_panel_that_covers_it(talk, open_chat, screen):
    page = open_chat(talk, **screen)
    expect(page.locator(".turn.assistant")).to_have_count(2)
    page.tap("#inspect")
    page.tap("#panel [data-panel=search]")
    page.fill("#search-q", "fox")
    page.press("#search-q", "Enter")
    page.locator("#panel .row", has_text="A red fox.").get_by_role("button", name="Show in the chat").tap()
    expect(page.locator("#panel")).to_be_hidden()
    expect(page.locator(".chunk.found", has_text="A red fox.")).to_be_in_viewport()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_names_of_a_chat_are_shown_and_told_to_the_model(talk, open_chat):
    page = open_chat(talk)
    before = talk.halo("GET", "/conversations/main/state")[1]["system_prompt_tokens"]
    page.click("#chat-options")
    page.fill("#own-user_name", "Anna")
    page.press("#own-user_name", "Tab")
    page.fill("#own-model_name", "Rufus")
    page.press("#own-model_name", "Tab")
    page.fill("#own-about_user", "She keeps bees.")
    page.press("#own-about_user", "Tab")
    expect(page.locator(".turn.user h2 b").first).to_have_text("Anna")
    expect(page.locator(".turn.assistant h2 b").first).to_have_text("Rufus")
    persona = {"user_name": "Anna", "model_name": "Rufus", "about_user": "She keeps bees."}
    wait_for(lambda: talk.halo("GET", "/conversations/main/state")[1]["persona"] == persona)
    state = talk.halo("GET", "/conversations/main/state")[1]
    assert state["system_prompt_tokens"] > before
    page.reload()
    expect(page.locator(".turn.user h2 b").first).to_have_text("Anna")
    # Another chat has no names.
    page.click("#new-chat")
    page.click("#chat-options")
    expect(page.locator("#own-user_name")).to_have_value("")


def test_speakers_of_an_import_are_shown(talk, open_chat):
    page = open_chat(talk)
    expect(page.locator(".turn.assistant")).to_have_count(2)
    lines = [
        {"user_name": "Nicolas", "character_name": "Nebraas", "create_date": "2026-01-02@03h04m05s"},
        {"name": "Nebraas", "is_user": False, "mes": "Good evening.", "send_date": "January 2, 2026 3:04am"},
        {"name": "Nicolas", "is_user": True, "mes": "Hello Nebraas.", "send_date": "January 2, 2026 3:05am"},
    ]
    content = "\n".join(json.dumps(line) for line in lines).encode()
    page.set_input_files("#import-files", files=[{"name": "tavern.jsonl", "mimeType": "text/plain", "buffer": content}])
    # The chat before it had two.
    expect(page.locator(".turn.assistant h2 b")).to_have_count(1)
    expect(page.locator(".turn.assistant h2 b")).to_have_text("Nebraas")
    expect(page.locator(".turn.user h2 b")).to_have_text("Nicolas")


IMPORTS = {
    "tavern.jsonl": "\n".join(
        json.dumps(line)
        for line in (
            {"user_name": "Nicolas", "character_name": "Nebraas"},
            {"name": "Nicolas", "is_user": True, "mes": "Words of a tavern.", "extra": {"image": "cat.png"}},
        )
    ),
    "conversations.json": json.dumps(
        [
            {
                "title": "From ChatGPT",
                "create_time": 1700000000.0,
                "current_node": "b",
                "mapping": {
                    "a": {"id": "a", "message": None, "parent": None, "children": ["b"]},
                    "b": {
                        "id": "b",
                        "parent": "a",
                        "children": [],
                        "message": {
                            "author": {"role": "user"},
                            "create_time": 1700000001.0,
                            "content": {"content_type": "text", "parts": ["Words of ChatGPT."]},
                        },
                    },
                },
            }
        ]
    ),
    "claude.json": json.dumps(
        [
            {
                "uuid": "1",
                "name": "From Claude",
                "created_at": "2026-01-02T03:04:05Z",
                "chat_messages": [
                    {"uuid": "2", "sender": "human", "text": "Words of Claude.", "created_at": "2026-01-02T03:04:05Z"}
                ],
            }
        ]
    ),
    "messages.json": json.dumps({"messages": [{"role": "user", "content": "Words of OpenAI."}]}),
}

DROP = """([name, text]) => {
  const transfer = new DataTransfer();
  transfer.items.add(new File([text], name, { type: "application/json" }));
  window.dispatchEvent(new DragEvent("drop", { dataTransfer: transfer, bubbles: true, cancelable: true }));
}"""


@pytest.mark.parametrize("way", ["button", "drop"])
@pytest.mark.parametrize("name", IMPORTS)
def test_files_of_other_programs_are_imported(talk, open_chat, name, way):
    page = open_chat(talk)
    expect(page.locator(".turn.assistant")).to_have_count(2)
    if way == "button":
        buffer = IMPORTS[name].encode()
        page.set_input_files("#import-files", files=[{"name": name, "mimeType": "text/plain", "buffer": buffer}])
    else:
        page.evaluate(DROP, [name, IMPORTS[name]])
    summary = page.locator(".toast", has_text="Imported 1 chat from a")
    expect(summary).to_be_visible()
    expect(page.locator(".turn.user .chunk")).to_contain_text("Words of")
    expect(page.locator(".toast.importing")).to_have_count(0)
    if name == "tavern.jsonl":
        # What is lost is named, and stays to be read.
        expect(summary).to_contain_text("Not imported:")
        page.wait_for_timeout(6500)
        expect(summary).to_be_visible()


def test_import_shows_progress_and_worlds(talk, open_chat):
    page = open_chat(talk)
    assert talk.halo("POST", "/worlds", {"name": "harbour"})[0] in (200, 201)
    page.evaluate(
        """async () => {
          const { importSummary } = await import("/js/sidebar.js");
          window.summary = importSummary({ format: "Halo", conversations: ["a", "b"], worlds: ["w"], losses: { images: 3 } });
        }"""
    )
    assert page.evaluate("summary") == (
        "Imported 2 chats and 1 world (under Rooms) from Halo. Not imported: images: 3."
    )
    # While the server reads the file, the page says so: the request is held until it was seen.
    held = []
    page.route("**/api/halo/v1/import?*", lambda route: held.append(route))
    buffer = IMPORTS["messages.json"].encode()
    page.set_input_files("#import-files", files=[{"name": "m.json", "mimeType": "text/plain", "buffer": buffer}])
    toast = page.locator(".toast.importing")
    expect(toast.locator("progress")).to_be_visible()
    wait_for(lambda: (page.wait_for_timeout(50), held)[1])
    upload = re.search(r"[?&]id=([^&]+)", held[0].request.url)[1]
    page.evaluate(
        "(id) => import('/js/state.js').then(({ handleEvent }) => handleEvent("
        "{ type: 'import_progress', conversation: '', number: 0, id, done: 3, all: 4 }))",
        upload,
    )
    expect(toast).to_contain_text("Reading m.json: 75 %")
    held[0].continue_()
    expect(page.locator(".toast", has_text="Imported 1 chat")).to_be_visible()


def test_file_larger_than_a_request_is_imported(scripted, open_chat, tmp_path):
    """`server.max_body` is 16 MiB; a file to import can have what `server.max_import` allows."""
    server = scripted("Yes.", settings=("recall.mode=lexical", "server.max_import=40 MiB"))
    page = open_chat(server)
    # As in an export of ChatGPT, most of it is about the messages, not their text.
    file = tmp_path / "large.json"

    def exported(n):
        content = {"content_type": "text", "parts": [f"Where is needle {n}?"]}
        message = {"author": {"role": "user"}, "content": content, "metadata": {"about": "x" * 1_000_000}}
        return {"title": f"Needle {n}", "mapping": {"a": {"message": message}}}

    file.write_text(json.dumps([exported(n) for n in range(20)]))
    assert file.stat().st_size > 16 << 20
    page.set_input_files("#import-files", str(file))
    expect(page.locator(".toast.importing")).to_contain_text(re.compile("(Sending|Reading) large.json"))
    expect(page.locator(".toast", has_text="Imported 20 chats")).to_be_visible(timeout=180_000)
    expect(page.locator(".turn.user")).to_contain_text("Where is needle")
    names = {chat["name"] for chat in server.halo("GET", "/conversations")[1]}
    assert names >= {f"Needle {n}" for n in range(20)}
    # What is larger still is refused before it is sent, with what can be done.
    sent = []
    page.on("request", lambda request: sent.append(request.url) if "/import" in request.url else None)
    page.evaluate("""() => {
      const files = new DataTransfer();
      files.items.add(new File([new Uint8Array(41 << 20)], "huge.json"));
      dispatchEvent(new DragEvent("drop", { dataTransfer: files, bubbles: true, cancelable: true }));
    }""")
    error = page.locator(".toast.error", has_text="huge.json was not imported")
    expect(error).to_contain_text("server.max_import")
    assert sent == []


def test_chat_in_use_elsewhere_is_read_only(browser, tmp_path, remote_model):
    """A server has a chat open while it answers, and another one on the same data can only read it."""
    looked = threading.Event()
    model = remote_model([["word ", "word ", looked, "word "]])
    first = Server(tmp_path, "recall.mode=lexical", model=model).start()
    second = Server(tmp_path, "recall.mode=lexical", model=model).start()
    page = browser.new_page()
    try:
        assert first.halo("POST", "/conversations/main/messages", {"text": "Go on."})[0] == 202
        assert second.halo("GET", "/conversations/main/state")[1]["in_use_by"] == first.process.pid
        assert first.halo("GET", "/conversations/main/state")[1]["in_use_by"] is None
        page.goto(f"{second.url}/#main")
        notice = page.locator("[data-notice=in-use]")
        expect(notice).to_contain_text(f"Another Halo (process {first.process.pid}) has this chat open")
        expect(page.locator("#message")).to_be_disabled()
        expect(page.locator(".turn.user .chunk")).to_contain_text("Go on.")
        looked.set()
        # When the other one is done, the chat can be written here.
        expect(notice).to_have_count(0, timeout=30_000)
        expect(page.locator("#message")).to_be_enabled()
        expect(page.locator(".turn.assistant")).to_contain_text("word word")
    finally:
        page.close()
        first.stop()
        second.stop()


def test_notices_and_a_missing_embedder_are_shown(scripted, open_chat, tmp_path):
    server = Server(tmp_path / "plain", "recall.embedder=auto", model=scripted("One two three.").model).start()
    try:
        server.say("main", "Count.")
        page = open_chat(server)
        embedder = page.locator("[data-notice=embedder]")
        expect(embedder).to_contain_text("search and memories go by words, not by meaning")
        expect(embedder.get_by_role("button", name=re.compile("^Download e5-small"))).to_be_visible()
        embedder.get_by_role("button", name="Close the notice").click()
        expect(embedder).to_have_count(0)
        page.reload()
        expect(page.locator(".turn.assistant")).to_have_count(1)
        expect(embedder).to_have_count(0)
    finally:
        server.stop()


def test_interrupted_answer_is_a_notice(browser, tmp_path, remote_model):
    address = remote_model([["word ", "word ", threading.Event()]])
    server = Server(tmp_path, "recall.mode=lexical", model=address).start()
    page = browser.new_page()
    try:
        assert server.halo("POST", "/conversations/main/messages", {"text": "Go on."})[0] == 202
        wait_for(lambda: (server.halo("GET", "/conversations/main/state")[1]["running"] or {}).get("chunks"))
        server.stop(signal.SIGKILL)
        server.start()
        # Opening the chat for writing finds the answer that was cut off.
        server.halo("PUT", "/conversations/main/options", {})
        page.goto(f"{server.url}/#main")
        notice = page.locator("[data-notice^='notice']")
        expect(notice).to_contain_text("was cut off when the program ended")
        notice.get_by_role("button", name="Close the notice").click()
        expect(notice).to_have_count(0)
        expect(page.locator("#message")).to_be_focused()
    finally:
        page.close()
        server.stop()


@pytest.mark.parametrize(
    "status, says", [(503, "busy or not available"), (500, "halo doctor"), (403, "does not let you read it")]
)
def test_load_errors_say_their_cause(talk, browser, status, says):
    page = browser.new_page()
    page.route(
        "**/conversations/main/state",
        lambda route: route.fulfill(status=status, json={"error": "opening 'main': it failed"}),
    )
    page.goto(f"{talk.url}/#main")
    error = page.locator(".load-error")
    expect(error).to_contain_text(says)
    expect(error).to_contain_text("opening 'main': it failed")
    expect(page.locator(".empty")).to_have_count(0)
    page.unroute("**/conversations/main/state")
    error.get_by_role("button", name="Try again").click()
    expect(page.locator(".turn.assistant")).to_have_count(2)
    page.close()


def test_focus_moves_on_after_delete_and_merge(scripted, open_chat):
    text = "First of all there was a garden.\n\nSecond there was a river.\n\nThird there was a wall."
    server = scripted("A wolf.", settings=("recall.mode=lexical", "chunk.min_tokens=2"))
    server.say("main", text)
    page = open_chat(server)
    paragraphs = page.locator(".turn.user .chunk")
    expect(paragraphs).to_have_count(3)
    paragraphs.nth(1).focus()
    page.keyboard.press("m")
    expect(paragraphs).to_have_count(2)
    expect(chunk(page, "Second there was a river.")).to_be_focused()
    # After a deletion, the next paragraph has the focus; at the end, the one before.
    page.locator(".turn.assistant .chunk").focus()
    page.keyboard.press("Delete")
    page.locator("dialog").get_by_role("button", name="Delete").click()
    expect(page.locator(".turn.assistant")).to_have_count(0)
    expect(chunk(page, "there was a wall.")).to_be_focused()


CONTRAST = """() => {
  const parse = (text) => {
    const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    canvas.fillStyle = text;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = (top, below) => [0, 1, 2].map((n) => top[n] * top[3] + below[n] * (1 - top[3])).concat(1);
  const ground = (node) => {
    const own = parse(getComputedStyle(node).backgroundColor);
    return own[3] === 1 || !node.parentElement ? own : over(own, ground(node.parentElement));
  };
  const light = (colour) => {
    const [r, g, b] = colour.map((v) => v / 255).map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const contrast = (one, other) => {
    const [high, low] = [light(one), light(other)].sort((a, b) => b - a);
    return (high + 0.05) / (low + 0.05);
  };
  document.querySelectorAll(".chunk").forEach((node) => node.style.setProperty("--attention", "1"));
  const found = {};
  for (const selector of [".turn.user .text", ".turn.assistant .text p", ".turn.assistant pre", ".text :not(pre) > code", ".text th"])
    for (const name of ["attended", "bright"])
      for (let level = 1; level <= 5; level += 1) {
        const node = document.querySelector(selector);
        const style = getComputedStyle(node, `::highlight(${name}-${level})`);
        const mark = parse(style.backgroundColor);
        found[`${selector} ${name}-${level}`] = [mark[3], contrast(parse(style.color), over(mark, ground(node)))];
      }
  return found;
}"""


@pytest.mark.parametrize("theme", ["dark", "light"])
def test_highlighted_words_can_be_read_on_every_ground(scripted, open_chat, theme):
    answer = "A word and `code`.\n\n```python\nprint(1)\n```\n\n| a | b |\n|---|---|\n| 1 | 2 |\n"
    server = scripted(answer, settings=("recall.mode=lexical",))
    server.say("main", "Show me.")
    page = open_chat(server, color_scheme=theme)
    expect(page.locator(".turn.assistant pre")).to_be_visible()
    found = page.evaluate(CONTRAST)
    assert len(found) == 50
    for place, (alpha, contrast) in found.items():
        assert 0.19 <= alpha <= 0.51, (place, alpha)
        assert contrast >= 4.5, (place, contrast)


@pytest.mark.parametrize("screen", [{}, PHONE], ids=["desktop", "phone"])
def test_context_meter_names_its_parts(talk, open_chat, screen):
    page = open_chat(talk, **screen)
    parts = page.locator("#meter-parts li")
    expect(parts).to_have_count(3)
    state = talk.halo("GET", "/conversations/main/state")[1]
    system, kept, room = (
        state["system_prompt_tokens"],
        state["live"] - state["system_prompt_tokens"],
        state["limit"] - state["budget_after_turn"],
    )
    for n, (label, tokens) in enumerate((("System prompt", system), ("Kept", kept), ("Room for the answer", room))):
        expect(parts.nth(n)).to_have_text(f"{label} {tokens:,}")
        expect(parts.nth(n)).to_be_in_viewport()
    meter = page.locator("#meter")
    assert meter.get_attribute("aria-valuenow") == str(state["live"])
    # A new chat has no figures yet.
    if not screen:
        page.click("#new-chat")
        expect(page.locator("#meter-parts")).to_be_hidden()


def test_line_leads_from_a_returned_paragraph_to_its_chip(browser, tmp_path, remote_model):
    settings = ("recall.mode=lexical", "chunk.min_tokens=2", "generation.max_tokens=200")
    address = remote_model([["Noted."], ["It is called Betsy."]])
    server = Server(tmp_path, *settings, model=address).start()
    try:
        server.say("main", "The gun on the wall is called Betsy.")
        assert server.halo("POST", "/conversations/main/edits", {"edit": "prune", "chunks": ["u0.0"]})[0] == 200
        server.say("main", "What is the gun on the wall called?")
        for motion in ("no-preference", "reduce"):
            page = browser.new_page(reduced_motion=motion, viewport={"width": 1280, "height": 800})
            page.goto(f"{server.url}/#main")
            chip = page.locator(".chip", has_text="Betsy").first
            expect(chip).to_be_visible()
            line = page.locator("#return-line")
            expect(line).not_to_have_class(re.compile("shown"))
            chip.hover()
            expect(line).to_have_class(re.compile("shown"))
            ends = page.evaluate("""() => {
              const path = document.querySelector("#return-line path");
              const stage = document.getElementById("stage").getBoundingClientRect();
              const at = (length) => {
                const { x, y } = path.getPointAtLength(length);
                return [x + stage.left, y + stage.top];
              };
              const box = (node) => { const { left, top, bottom } = node.getBoundingClientRect(); return { left, top, bottom }; };
              return {
                start: at(0), end: at(path.getTotalLength()),
                paragraph: box(document.querySelector(".chunk[data-chunk='u0.0']")), chip: box(document.querySelector(".chip")),
              };
            }""")
            for (x, y), box in ((ends["start"], ends["paragraph"]), (ends["end"], ends["chip"])):
                assert box["left"] - 30 < x < box["left"] and box["top"] < y < box["bottom"], ends
            page.mouse.move(5, 5)
            expect(line).not_to_have_class(re.compile("shown"))
            page.close()
    finally:
        server.stop()


def test_running_answer_shows_what_it_uses(browser, tmp_path, remote_model):
    looked = threading.Event()
    address = remote_model([["Noted."], ["word ", "word ", looked, "word "]])
    settings = ("recall.mode=lexical", "chunk.min_tokens=2", "generation.max_tokens=200")
    server = Server(tmp_path, *settings, model=address).start()
    page = browser.new_page()
    try:
        server.say("main", "The gun on the wall is called Betsy.")
        assert server.halo("POST", "/conversations/main/edits", {"edit": "prune", "chunks": ["u0.0"]})[0] == 200
        page.goto(f"{server.url}/#main")
        expect(page.locator(".chunk.ghost", has_text="Betsy")).to_be_visible()
        page.fill("#message", "What is the gun on the wall called?")
        page.press("#message", "Enter")
        chip = page.locator(".turn.running .chip", has_text="Betsy")
        expect(chip).to_be_visible()
        expect(page.locator("#stop")).to_be_visible()
        # It leads to the paragraph while the answer is generated.
        chip.click()
        expect(page.locator(".chunk.found", has_text="Betsy")).to_be_visible()
        looked.set()
        expect(page.locator("#stop")).to_be_hidden(timeout=30_000)
        expect(page.locator(".turn.assistant").last.locator(".chip", has_text="Betsy")).to_be_visible()
    finally:
        page.close()
        server.stop()


def test_search_over_all_chats_hides_deleted_ones(talk, open_chat):
    talk.say("other", "Wolves sing at night.")
    assert {one["name"] for one in talk.halo("GET", "/search?q=w")[1]["conversations"]} == {"main", "other"}
    assert talk.halo("DELETE", "/conversations/other?confirm=other")[0] in (200, 202)
    names = [one["name"] for one in talk.halo("GET", "/search?q=other")[1]["conversations"]]
    assert "other" not in names, names
    page = open_chat(talk)
    page.fill("#chat-search", "other")
    expect(page.locator("#chats")).to_contain_text("Name another one.")
    expect(page.locator(".chat-row", has_text=re.compile("^other"))).to_have_count(0)


def test_chat_and_paragraph_are_forgotten_for_good(talk, open_chat):
    page = open_chat(talk)
    choose(page, turn(page, "A grey wolf."), "Delete")
    page.locator("dialog").get_by_role("button", name="Delete").click()
    page.click("#inspect")
    page.click("#panel [data-panel=graveyard]")
    row = page.locator("#panel [data-deleted]", has_text="A grey wolf.")
    row.get_by_role("button", name="Forget for good…").click()
    page.locator("dialog").get_by_role("button", name="Forget for good").click()
    pending = page.locator("#panel [data-pending]")
    expect(pending).to_contain_text("1 paragraph, erased on")
    pending.get_by_role("button", name="Keep after all").click()
    expect(pending).to_have_count(0)
    assert talk.halo("GET", "/conversations/main/forget")[1] == []
    # A whole chat, now: its name and words are gone.
    page.get_by_role("button", name="Menu of main").click()
    page.get_by_role("menuitem", name="Forget for good…").click()
    page.locator("dialog").get_by_role("button", name="Cancel").click()
    expect(page.locator(".turn.assistant").first).to_be_visible()
    page.get_by_role("button", name="Menu of main").click()
    page.get_by_role("menuitem", name="Forget for good…").click()
    page.locator("dialog").get_by_role("button", name="Forget for good").click()
    expect(page.locator(".toast", has_text="Forgotten for good.")).to_be_visible()
    expect(page.locator(".chat-row a")).to_have_count(0)
    assert talk.halo("GET", "/conversations/main/state")[0] == 404
    assert talk.halo("GET", "/search?q=fox")[1]["conversations"] == []


def test_model_download_reports_its_failure(scripted, open_chat, tmp_path):
    fake_pip = {"PATH": str(tmp_path), "HF_ENDPOINT": "http://127.0.0.1:1"}
    source = scripted("One.")
    server = Server(tmp_path / "downloads", "recall.mode=lexical", model=source.model, env=fake_pip).start()
    try:
        assert server.halo("POST", "/models/download", {"name": "../x"})[0] == 404
        assert server.halo("POST", "/models/download", {"name": "http://example.com/a.gguf"})[0] == 404
        page = open_chat(server)
        page.click("#model")
        row = page.locator("#panel .row[data-model=smollm2]")
        row.locator("summary").click()
        expect(row.locator("code")).to_have_text(f"halo models pull --data {server.data} smollm2")
        row.get_by_role("button", name="Download").click()
        expect(row.locator(".error")).to_be_visible(timeout=30_000)
        expect(row.get_by_role("button", name="Try again")).to_be_enabled()
    finally:
        server.stop()


def test_download_progress_is_drawn(talk, open_chat):
    page = open_chat(talk)
    page.click("#model")
    row = page.locator("#panel .row[data-model]").last
    expect(row.get_by_role("button", name="Download")).to_be_visible()
    name = row.get_attribute("data-model")
    event = (
        "([name, more]) => import('/js/bus.js').then(({ emit }) => emit('download', { name, error: null, ...more }))"
    )
    page.evaluate(event, [name, {"done": 5_000_000, "all": 20_000_000, "finished": False}])
    expect(row.locator("progress")).to_have_attribute("value", "0.25")
    expect(row).to_contain_text("5 MB of 20 MB")
    page.evaluate(event, [name, {"done": 0, "all": 0, "finished": True}])
    expect(row.locator("progress")).to_have_count(0)


def test_settings_have_labels_groups_and_a_context_split(talk, open_chat):
    page = open_chat(talk)
    expect(page.locator(".turn.assistant")).to_have_count(2)
    page.click("#sidebar [data-panel=settings]")
    row = page.locator(".row", has=page.locator("[id='set-generation.max_tokens']"))
    expect(row.locator("label")).to_have_text("Longest answer")
    expect(row.locator(".key")).to_have_text("generation.max_tokens")
    expect(row.locator(".unit")).to_have_text("tokens")
    groups = page.locator("#panel summary").all_text_contents()
    assert groups == ["Appearance", "Model", "Sampling", "Context", "Memory", "Rooms", "Server", "Research"], groups
    # Found by the words of other programs and by the label.
    for words, key in (
        ("num_ctx", "context.max_tokens"),
        ("dark", "theme"),
        ("answer length", "generation.max_tokens"),
    ):
        page.fill("#settings-q", words)
        expect(page.locator(f"[id='set-{key}'], #{key.replace('.', '_')}").first).to_be_visible()
        assert page.locator("#panel .row:visible").count() <= 6, words
    page.fill("#settings-q", "no such words")
    expect(page.locator("#panel .row:visible")).to_have_count(0)
    page.fill("#settings-q", "context")
    split = page.locator(".split li")
    expect(split).to_have_count(3)
    widths = page.locator(".split-bar i").evaluate_all("all => all.map((one) => parseFloat(one.style.width))")
    assert 99 <= sum(widths) <= 101, widths


def test_own_values_have_sliders(talk, open_chat):
    page = open_chat(talk)
    page.click("#chat-options")
    slider = page.get_by_role("slider", name=re.compile("^Temperature"))
    right = "node => node.getBoundingClientRect().right"
    assert slider.evaluate(right) <= page.locator(".own-value").first.evaluate(right), "it ends with its row"
    slider.press("End")
    expect(page.locator("#own-temperature")).to_have_value("5")
    wait_for(lambda: talk.halo("GET", "/conversations/main/options")[1]["own"]["sampling"]["temperature"] == 5)


def test_options_that_are_opened_at_once_are_drawn_once(talk, browser):
    """The page loads the chat a moment after its buttons work; a value that is set then must not be lost."""
    page = browser.new_page()
    try:
        page.add_init_script("""
          const later = setTimeout;
          window.setTimeout = (task, wait, ...rest) => later(task, wait ?? 1000, ...rest);
        """)
        page.goto(f"{talk.url}/#main", wait_until="domcontentloaded")
        page.click("#chat-options")
        slider = page.get_by_role("slider", name=re.compile("^Temperature")).element_handle()
        expect(page.locator(".turn.assistant")).to_have_count(2)
        assert slider.evaluate("node => node.isConnected")
        expect(page.locator("#own-prompt")).to_be_focused()
    finally:
        page.close()


def test_title_is_renamed_by_keyboard(talk, open_chat):
    page = open_chat(talk)
    expect(page.locator(".turn.assistant")).to_have_count(2)
    page.keyboard.press("F2")
    page.fill("#ask-input", "Animals")
    page.keyboard.press("Enter")
    expect(page.locator("#title")).to_have_text("Animals")
    page.locator("#title").focus()
    page.keyboard.press("Enter")
    expect(page.locator("#ask-input")).to_have_value("Animals")
    page.keyboard.press("Escape")
    page.locator("#title").evaluate("node => node.blur()")
    page.keyboard.press("?")
    expect(page.locator("#panel")).to_contain_text("rename this chat")
    page.keyboard.press("Control+k")
    expect(page.locator("#chat-search")).to_be_focused()


def test_send_becomes_queue_while_an_answer_runs(browser, tmp_path, remote_model):
    server = Server(tmp_path, "recall.mode=lexical", model=remote_model([["word ", threading.Event()]])).start()
    page = browser.new_page()
    try:
        page.goto(f"{server.url}/#main")
        page.fill("#message", "Go on.")
        page.press("#message", "Enter")
        expect(page.locator("#stop")).to_be_visible()
        expect(page.locator("#send")).to_be_hidden()
        page.locator("#message").press_sequentially("a")
        expect(page.locator("#send")).to_have_text("Queue")
        page.press("#message", "Backspace")
        expect(page.locator("#send")).to_be_hidden()
        page.click("#stop")
        expect(page.locator("#send")).to_have_text("Send")
    finally:
        page.close()
        server.stop()


def test_conversation_is_created_with_its_first_messages(scripted):
    server = scripted("One.")
    body = {
        "system_prompt": "Be kind.",
        "messages": [{"role": "user", "text": "Do foxes swim?"}, {"role": "assistant", "text": "They do."}],
    }
    assert server.halo("POST", "/conversations", body) == (201, {"name": "Do foxes swim?", "messages": 2})
    assert server.halo("POST", "/conversations", body)[1]["name"] == "Do foxes swim? 2"
    texts = [
        "".join(chunk["text"] for chunk in message["chunks"]).strip()
        for message in server.halo("GET", "/conversations/Do%20foxes%20swim%3F/transcript")[1]["messages"]
    ]
    assert texts == ["Do foxes swim?", "They do."]
    options = server.halo("GET", "/conversations/Do%20foxes%20swim%3F/options")[1]
    assert options["own"]["system_prompt"] == "Be kind."
    assert server.halo("POST", "/conversations", {"name": "Do foxes swim?"})[0] == 409
    assert server.halo("POST", "/conversations", {})[0] == 400
    assert server.halo("POST", "/conversations", {"messages": [{"role": "user", "text": " "}]})[0] == 400
    assert server.halo("POST", "/conversations", {"messages": [{"role": "robot", "text": "x"}]})[0] == 400
