"""The message box in a real browser: attachments, and messages that wait for the running answer."""

import threading

import pytest
from playwright.sync_api import expect

from conftest import Server


def attach(page, *files):
    page.locator("#attach-files").set_input_files(
        [{"name": name, "mimeType": kind, "buffer": content} for name, kind, content in files]
    )


def user_texts(server, name="main"):
    _, transcript = server.halo("GET", f"/conversations/{name}/transcript")
    return [
        "".join(chunk["text"] for chunk in message["chunks"]).strip()
        for message in transcript["messages"]
        if message["role"] == "user"
    ]


def test_text_files_are_attached_and_folded(scripted, open_chat):
    server = scripted("Hello.", "I have read it.")
    server.say("main", "Hello.")
    page = open_chat(server)
    attach(
        page,
        ("notes.md", "text/markdown", b"# Notes\n\n```js\nlet x = 1;\n```\n\nThe fox is Rufus."),
        ("data.csv", "text/csv", b"name,age\nRufus,3\n"),
    )
    expect(page.locator("#attached li")).to_have_count(2)
    page.get_by_role("button", name="Remove data.csv").click()
    expect(page.locator("#attached li")).to_have_text(["notes.md1 kB×"])
    page.fill("#message", "What is in it?")
    page.press("#message", "Enter")
    expect(page.locator("#attached")).to_be_hidden()
    expect(page.locator("#message")).to_have_value("")
    question = page.locator(".turn.user").last
    expect(question).to_contain_text("What is in it?")
    expect(question.locator("details.attachment summary").first).to_have_text("File: notes.md")
    expect(question.get_by_text("The fox is Rufus.")).to_be_hidden()
    for fold in question.locator("details.attachment summary").all():
        fold.click()
    expect(question.get_by_text("The fox is Rufus.")).to_be_visible()
    # The model gets the whole file, and the fence is longer than those within it.
    expect(page.locator(".turn.assistant").last).to_contain_text("I have read it.")
    assert user_texts(server)[1:] == [
        "What is in it?\n\n````md file=notes.md\n# Notes\n\n```js\nlet x = 1;\n```\n\nThe fox is Rufus.\n````"
    ]


@pytest.mark.parametrize(
    ("name", "kind", "content", "reason"),
    [
        ("photo.png", "image/png", b"\x89PNG", "photo.png is an image: this model reads text."),
        ("song.mp3", "audio/mpeg", b"ID3", "song.mp3 is not a text file: this model reads text."),
        ("paper.pdf", "application/pdf", b"%PDF-1.7\n\xff\xfe\x00", "paper.pdf is not a text file"),
        ("empty.txt", "text/plain", b" \n", "empty.txt is empty."),
        ("huge.txt", "text/plain", b"x" * 300_000, "huge.txt is too large: 300 kB; at most 256 kB"),
    ],
)
def test_other_files_are_refused_with_a_reason(scripted, open_chat, name, kind, content, reason):
    server = scripted("Yes.")
    server.say("main", "Hello.")
    page = open_chat(server)
    attach(page, (name, kind, content))
    expect(page.locator(".toast.error")).to_contain_text(reason)
    expect(page.locator("#attached")).to_be_hidden()


def test_queued_messages_can_be_edited_and_removed(browser, tmp_path, remote_model):
    looked = threading.Event()
    server = Server(tmp_path, "recall.mode=lexical", model=remote_model([[" word", " word", looked, " word"]])).start()
    page = browser.new_page()
    try:
        page.goto(server.url + "/#main")
        page.fill("#message", "The first one.")
        page.press("#message", "Enter")
        expect(page.locator("#stop")).to_be_visible()
        for text in ("The second one.", "The third one.", "The fourth one."):
            page.fill("#message", text)
            page.press("#message", "Enter")
        queue = page.locator("#queue li")
        expect(queue).to_have_count(3)
        queue.nth(1).get_by_role("button", name="Remove").click()
        queue.nth(1).get_by_role("button", name="Edit").click()
        expect(page.locator("#message")).to_have_value("The fourth one.")
        expect(queue).to_have_count(1)
        page.fill("#message", "The last one.")
        page.press("#message", "Enter")
        expect(queue).to_have_count(2)
        # A stopped answer does not send what waits for it.
        page.click("#stop")
        expect(queue.first).to_contain_text("Not sent")
        assert user_texts(server) == ["The first one."]
        looked.set()
        queue.first.get_by_role("button", name="Send now").click()
        expect(page.locator(".turn.user")).to_have_count(3, timeout=60_000)
        expect(page.locator("#queue")).to_be_hidden()
        assert user_texts(server) == ["The first one.", "The second one.", "The last one."]
    finally:
        page.close()
        server.stop()
