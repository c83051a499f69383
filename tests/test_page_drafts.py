"""What is typed and attached before it is sent: while the page loads, per chat, after a reload, by button, drop and paste."""

import json

import pytest
from playwright.sync_api import expect

API = "**/api/halo/v1"
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def talk(scripted):
    server = scripted("An answer.", settings=("recall.mode=lexical",))
    server.say("main", "Hello.")
    server.say("other", "Good evening.")
    return server


def user_texts(server, name="main"):
    _, transcript = server.halo("GET", f"/conversations/{name}/transcript")
    return [
        "".join(chunk["text"] for chunk in message["chunks"]).strip()
        for message in transcript["messages"]
        if message["role"] == "user"
    ]


def names(server):
    return sorted(chat["name"] for chat in server.halo("GET", "/conversations")[1])


class Held:
    """Requests that are answered when they are released: by the server, or with this status."""

    def __init__(self, page, pattern, status=None):
        self.routes, self.is_open, self.status = [], False, status
        page.route(pattern, self.handle)

    def handle(self, route):
        if not self.is_open:
            self.routes.append(route)
        elif self.status is None:
            route.continue_()
        else:
            route.fulfill(status=self.status, json={"error": "the store is busy"})

    def release(self):
        self.is_open = True
        for route in self.routes:
            self.handle(route)


def load_again(page):
    """The page is loaded again, and this does not wait for its scripts."""
    page.goto("about:blank")
    return lambda url: page.goto(url, wait_until="commit")


def test_text_typed_before_the_scripts_is_kept(talk, open_chat):
    page = open_chat(talk)
    expect(page.locator(".turn.user")).to_have_count(1)
    go = load_again(page)
    held = Held(page, "**/js/main.js")
    go(f"{talk.url}/#/main")
    page.locator("#message").press_sequentially("Typed too early")
    held.release()
    expect(page.locator(".turn.user")).to_have_count(1)
    expect(page.locator("#message")).to_have_value("Typed too early")
    # It is a draft as any other.
    page.reload()
    expect(page.locator(".turn.user")).to_have_count(1)
    expect(page.locator("#message")).to_have_value("Typed too early")
    page.press("#message", "Enter")
    expect(page.locator(".turn.user")).to_have_count(2)
    assert user_texts(talk) == ["Hello.", "Typed too early"]


@pytest.mark.parametrize("held_back", ["conversations", "conversations/main/state"])
def test_enter_before_the_chat_is_loaded_sends_once(talk, open_chat, held_back):
    page = open_chat(talk)
    expect(page.locator(".turn.user")).to_have_count(1)
    go = load_again(page)
    held = Held(page, f"{API}/{held_back}")
    go(f"{talk.url}/#/main")
    expect(page.locator("#composer")).to_be_visible()
    page.wait_for_function("() => document.title.startsWith('main')")
    page.fill("#message", "Sent too early.")
    page.press("#message", "Enter")
    expect(page.locator("#progress")).to_contain_text("as soon as the chat is loaded")
    expect(page.locator("#message")).to_have_value("Sent too early.")
    assert user_texts(talk) == ["Hello."]
    held.release()
    expect(page.locator(".turn.user", has_text="Sent too early.")).to_have_count(1)
    expect(page.locator("#message")).to_have_value("")
    expect(page.locator("#stop")).to_be_hidden()
    assert user_texts(talk) == ["Hello.", "Sent too early."]
    assert names(talk) == ["main", "other"]


def test_text_changed_before_the_chat_is_loaded_is_kept(talk, open_chat):
    page = open_chat(talk)
    expect(page.locator(".turn.user")).to_have_count(1)
    go = load_again(page)
    held = Held(page, f"{API}/conversations/main/state")
    go(f"{talk.url}/#/main")
    page.wait_for_function("() => document.title.startsWith('main')")
    page.fill("#message", "Wait")
    page.press("#message", "Enter")
    page.locator("#message").press_sequentially(", not yet")
    held.release()
    expect(page.locator(".turn.user")).to_have_count(1)
    page.wait_for_timeout(300)
    expect(page.locator("#message")).to_have_value("Wait, not yet")
    assert user_texts(talk) == ["Hello."]


def test_enter_before_a_chat_that_cannot_be_loaded_keeps_the_text(talk, browser):
    page = browser.new_page()
    held = Held(page, f"{API}/conversations/main/state", status=503)
    page.goto(f"{talk.url}/#/main", wait_until="commit")
    page.wait_for_function("() => document.title.startsWith('main')")
    page.fill("#message", "Keep me.")
    page.press("#message", "Enter")
    expect(page.locator("#progress")).to_contain_text("as soon as the chat is loaded")
    held.release()
    expect(page.locator(".load-error")).to_be_visible()
    expect(page.locator("#progress")).not_to_contain_text("as soon as")
    expect(page.locator("#message")).to_have_value("Keep me.")
    assert user_texts(talk) == ["Hello."]
    page.close()


def test_first_message_before_the_page_is_ready_names_the_chat(talk, open_chat):
    page = open_chat(talk)
    expect(page.locator(".turn.user")).to_have_count(1)
    page.click("#new-chat")
    expect(page.locator(".empty")).to_be_visible()
    go = load_again(page)
    held = Held(page, "**/js/sidebar.js")
    go(f"{talk.url}/#/New%20chat")
    page.locator("#message").press_sequentially("A brand new story")
    held.release()
    expect(page.locator(".empty")).to_be_visible()
    page.press("#message", "Enter")
    expect(page.locator("#title")).to_have_text("A brand new story")
    expect(page.locator(".turn.user")).to_have_count(1)
    assert names(talk) == ["A brand new story", "main", "other"]


def test_unknown_chat_is_opened_without_failed_requests(talk, open_chat):
    """Whatever order the requests of the start are answered in."""
    page = open_chat(talk, "unknown")
    expect(page.locator(".empty")).to_be_visible()
    page.evaluate("() => import('/js/state.js').then(({ refresh }) => refresh())")
    expect(page.locator(".empty")).to_be_visible()
    # It is found as soon as another program has stored it.
    talk.say("unknown", "Hello from elsewhere.")
    expect(page.locator(".turn.user")).to_contain_text("Hello from elsewhere.")


def test_drafts_are_kept_per_chat(talk, open_chat):
    page = open_chat(talk)
    box = page.locator("#message")
    expect(page.locator(".turn.user")).to_have_count(1)
    page.fill("#message", "A draft of main")
    attach(page, "notes.md", b"# Notes")
    expect(page.locator("#attached li")).to_have_count(1)
    page.get_by_role("link", name="other", exact=True).click()
    expect(page.locator(".turn.user")).to_contain_text("Good evening.")
    expect(box).to_have_value("")
    expect(page.locator("#attached")).to_be_hidden()
    page.fill("#message", "A draft of other")
    page.reload()
    expect(page.locator(".turn.user")).to_contain_text("Good evening.")
    expect(box).to_have_value("A draft of other")
    page.get_by_role("link", name="main", exact=True).click()
    expect(box).to_have_value("A draft of main")
    expect(page.locator("#attached li")).to_contain_text("notes.md")
    page.reload()
    expect(box).to_have_value("A draft of main")
    expect(page.locator("#attached li")).to_contain_text("notes.md")
    # A renamed chat keeps its draft, and sending empties it.
    page.click("#title")
    page.fill("#ask-input", "renamed")
    page.press("#ask-input", "Enter")
    expect(page.locator("#title")).to_have_text("renamed")
    expect(box).to_have_value("A draft of main")
    expect(page.locator("#attached li")).to_contain_text("notes.md")
    page.press("#message", "Enter")
    expect(page.locator(".turn.user")).to_have_count(2)
    expect(box).to_have_value("")
    page.reload()
    expect(page.locator(".turn.user")).to_have_count(2)
    expect(box).to_have_value("")
    expect(page.locator("#attached")).to_be_hidden()
    # What is forgotten for good leaves nothing in the browser either.
    page.fill("#message", "A secret")
    page.get_by_role("button", name="Menu of renamed").click()
    page.get_by_role("menuitem", name="Forget for good").click()
    page.locator("dialog").get_by_role("button", name="Forget for good").click()
    expect(page.locator(".toast", has_text="Forgotten for good")).to_be_visible()
    stored = page.evaluate("() => JSON.stringify(localStorage)")
    assert "A draft of other" in stored and "A secret" not in stored and "renamed" not in stored, stored


def attach(page, name, content, kind="text/plain"):
    page.locator("#attach-files").set_input_files([{"name": name, "mimeType": kind, "buffer": content}])


def drag(page, path, at):
    """Drags a file from the desktop onto a place of the page, as a user does."""
    session = page.context.new_cdp_session(page)
    data = {"items": [], "files": [str(path)], "dragOperationsMask": 1}
    for kind in ("dragEnter", "dragOver", "drop"):
        session.send("Input.dispatchDragEvent", {"type": kind, "x": at[0], "y": at[1], "data": data})
        if kind == "dragOver":
            expect(page.locator("body.dropping")).to_have_count(1)
    session.detach()


def middle(box):
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


def test_file_dropped_on_the_box_is_attached_and_elsewhere_imported(talk, open_chat, tmp_path):
    page = open_chat(talk)
    expect(page.locator(".turn.user")).to_have_count(1)
    (tmp_path / "data.csv").write_text("name,age\nRufus,3\n")
    (tmp_path / "chat.json").write_text(json.dumps({"messages": [{"role": "user", "content": "Words of a file."}]}))
    drag(page, tmp_path / "data.csv", middle(page.locator("#message").bounding_box()))
    expect(page.locator("#attached li")).to_contain_text("data.csv")
    expect(page.locator("body.dropping")).to_have_count(0)
    assert names(talk) == ["main", "other"]
    drag(page, tmp_path / "chat.json", middle(page.locator("#log").bounding_box()))
    expect(page.locator(".turn.user")).to_contain_text("Words of a file.")
    assert len(names(talk)) == 3


PASTE = """([name, type, bytes, text]) => {
  const transfer = new DataTransfer();
  if (name) transfer.items.add(new File([new Uint8Array(bytes)], name, { type }));
  if (text) transfer.setData("text/plain", text);
  const event = new ClipboardEvent("paste", { clipboardData: transfer, bubbles: true, cancelable: true });
  return document.getElementById("message").dispatchEvent(event);
}"""


def test_files_are_pasted(talk, open_chat):
    page = open_chat(talk)
    expect(page.locator(".turn.user")).to_have_count(1)
    # The result says whether the browser pastes the text itself.
    assert page.evaluate(PASTE, ["main.rs", "", list(b"fn main() {}\n"), ""]) is False
    expect(page.locator("#attached li")).to_contain_text("main.rs")
    assert page.evaluate(PASTE, ["image.png", "image/png", list(PNG), ""]) is False
    expect(page.locator(".toast.error")).to_contain_text("image.png is an image: this model reads text.")
    expect(page.locator("#attached li")).to_have_count(1)
    # Text from a document comes with a picture of it, and is pasted as text.
    assert page.evaluate(PASTE, ["image.png", "image/png", list(PNG), "Words"]) is True
    expect(page.locator(".toast.error")).to_have_count(1)
    page.press("#message", "Enter")
    expect(page.locator(".turn.user")).to_have_count(2)
    expect(page.locator("#stop")).to_be_hidden()
    assert user_texts(talk)[1] == "```rs file=main.rs\nfn main() {}\n```"


def test_drawing_is_text_and_all_files_have_a_limit(talk, open_chat):
    page = open_chat(talk)
    expect(page.locator(".turn.user")).to_have_count(1)
    attach(page, "icon.svg", b"<svg></svg>", "image/svg+xml")
    expect(page.locator("#attached li")).to_contain_text("icon.svg")
    # The name says it where the browser does not know the kind.
    attach(page, "photo.heic", b"ftypheic", "application/octet-stream")
    expect(page.locator(".toast.error")).to_contain_text("photo.heic is an image: this model reads text.")
    for n in range(4):
        attach(page, f"part{n}.txt", b"x" * 250_000)
    expect(page.locator(".toast.error", has_text="part3.txt is one too many")).to_contain_text("1000 kB together")
    expect(page.locator("#attached li")).to_have_count(4)
