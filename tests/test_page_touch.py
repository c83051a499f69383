"""A phone: 390 pixels and a finger. A tap changes nothing by itself; what can be done is behind “⋯”."""

import re

import pytest
from playwright.sync_api import expect

PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}


@pytest.fixture
def phone(scripted, open_chat):
    """A chat of two exchanges, of which the first has a paragraph out of context."""
    server = scripted("A red fox.", "A grey wolf.", settings=("recall.mode=lexical", "chunk.min_tokens=2"))
    server.say("main", "My sister Anna lives in Lindau.\n\nShe has two cats.")
    server.say("main", "Name an animal.")
    assert server.halo("POST", "/conversations/main/edits", {"edit": "prune", "chunks": ["u0.0"]})[0] == 200
    page = open_chat(server, **PHONE)
    expect(page.locator(".turn.assistant")).to_have_count(2)
    expect(page.locator(".chunk.ghost").first).to_be_visible()
    return server, page


def chunks(server):
    _, transcript = server.halo("GET", "/conversations/main/transcript")
    return [
        (chunk["id"], chunk["live"], chunk["pinned"], chunk["text"])
        for message in transcript["messages"]
        for chunk in message["chunks"]
    ]


def tap(page, locator, at=0.5):
    locator.scroll_into_view_if_needed()
    box = locator.bounding_box()
    page.touchscreen.tap(box["x"] + box["width"] * at, box["y"] + min(box["height"] / 2, 20))
    page.wait_for_timeout(120)


def test_taps_change_nothing(phone):
    server, page = phone
    before = chunks(server)
    for kind in (".chunk:not(.ghost)", ".chunk.ghost .text", ".turn h2"):
        for at in (0.1, 0.5, 0.9):
            tap(page, page.locator(kind).first, at)
            tap(page, page.locator(kind).last, at)
    assert chunks(server) == before
    expect(page.locator("dialog[open], .menu, .toast")).to_have_count(0)
    expect(page.locator("#editing")).to_be_hidden()


def test_menu_has_everything_and_asks_before_it_deletes(phone):
    server, page = phone
    before = chunks(server)
    answer = page.locator(".turn.assistant").last
    # One button is under the finger, and it is large enough.
    expect(answer.locator(".acts").get_by_role("button", name="Branch")).to_be_hidden()
    more = answer.get_by_role("button", name="More")
    size = more.bounding_box()
    assert size["width"] >= 40 and size["height"] >= 40, size
    more.tap()
    items = page.get_by_role("menuitem").all_text_contents()
    for wanted in ("Copy", "Regenerate", "Edit", "Branch from here", "Pin", "Remove from context", "Why", "Delete"):
        assert any(item.startswith(wanted) for item in items), (wanted, items)
    heights = [item.bounding_box()["height"] for item in page.get_by_role("menuitem").all()]
    assert min(heights) >= 40, heights
    # A tap beside the menu closes it, and does no more.
    page.touchscreen.tap(5, 300)
    expect(page.get_by_role("menuitem")).to_have_count(0)
    more.tap()
    page.get_by_role("menuitem", name="Delete").tap()
    page.locator("dialog").get_by_role("button", name="Cancel").tap()
    expect(page.locator("dialog[open]")).to_have_count(0)
    assert chunks(server) == before
    more.tap()
    page.get_by_role("menuitem", name="Remove from context").tap()
    expect(answer.locator(".chunk")).to_have_class(re.compile(r"\bghost\b"))
    page.locator(".toast").get_by_role("button", name="Undo").tap()
    expect(answer.locator(".chunk")).not_to_have_class(re.compile(r"\bghost\b"))
    assert chunks(server) == before


def test_ghost_is_read_and_brought_back_by_its_menu(phone):
    server, page = phone
    ghost = page.locator(".chunk.ghost").first
    tap(page, ghost.locator(".text"))
    expect(page.locator(".chunk.ghost.read")).to_have_count(1)
    assert not chunks(server)[0][1]
    # Its buttons are in its menu.
    expect(page.get_by_role("button", name="Bring back")).to_have_count(0)
    more = page.locator(".chunk.ghost").first.get_by_role("button", name="More")
    more.tap()
    page.get_by_role("menuitem", name="Why").tap()
    expect(page.locator("#panel")).to_contain_text("You removed it from the context")
    page.go_back()
    expect(page.locator("#panel")).to_be_hidden()
    more.tap()
    page.get_by_role("menuitem", name="Bring back").tap()
    expect(page.locator(".chunk.ghost")).to_have_count(0)
    assert chunks(server)[0][1]


def test_list_of_chats_and_panel_cover_the_chat_and_close(phone):
    server, page = phone
    server.say("other", "Good evening.")
    page.tap("#open-sidebar")
    expect(page.locator("#sidebar")).to_be_in_viewport()
    page.get_by_role("button", name="Menu of other").tap()
    expect(page.get_by_role("menuitem", name="Rename")).to_be_visible()
    page.touchscreen.tap(380, 830)
    expect(page.get_by_role("menuitem")).to_have_count(0)
    if page.locator("#sidebar").is_visible():
        page.touchscreen.tap(380, 830)
    expect(page.locator("#sidebar")).to_be_hidden()
    page.tap("#open-sidebar")
    page.get_by_role("link", name="other", exact=True).tap()
    expect(page.locator("#title")).to_have_text("other")
    expect(page.locator("#sidebar")).to_be_hidden()
    page.tap("#inspect")
    expect(page.locator("#panel")).to_be_in_viewport()
    # Its cross stays in view however far it is scrolled, and “back” closes it.
    page.locator("#panel-body").evaluate("node => node.scrollTo(0, 99999)")
    expect(page.get_by_role("button", name="Close the panel")).to_be_in_viewport()
    page.go_back()
    expect(page.locator("#panel")).to_be_hidden()
    expect(page.locator("#title")).to_have_text("other")
    # A message is sent by the button; Enter begins a new line.
    page.fill("#message", "One line")
    page.press("#message", "Enter")
    page.locator("#message").press_sequentially("and another")
    page.locator("#send").tap()
    expect(page.locator(".turn.user").last).to_contain_text("and another")
    expect(page.locator("#message")).to_have_value("")
    assert page.evaluate("document.documentElement.scrollWidth <= 390")
