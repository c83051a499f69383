"""Back and forward: every chat and every view of the inspector is a step of the browser's history."""

import pytest
from playwright.sync_api import expect

from test_page import open_panel

PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}


@pytest.fixture
def talk(scripted):
    server = scripted("An answer.", settings=("recall.mode=lexical",))
    for name in ("one", "two", "three"):
        server.say(name, f"This is chat {name}.")
    return server


def in_chat(page, name):
    expect(page.locator("#title")).to_have_text(name)
    expect(page.locator(".turn.user .chunk")).to_contain_text(f"This is chat {name}.")
    expect(page.locator(".chat-row.current")).to_have_text(f"{name}⋯")


def open_row(page, name):
    if page.locator("#open-sidebar").is_visible():
        page.click("#open-sidebar")
    page.get_by_role("link", name=name, exact=True).click()


@pytest.mark.parametrize("screen", [{}, PHONE], ids=["desktop", "phone"])
def test_back_and_forward_between_chats(talk, open_chat, screen):
    page = open_chat(talk, "one", **screen)
    in_chat(page, "one")
    for name in ("two", "three"):
        open_row(page, name)
        in_chat(page, name)
    # Each step back is one chat, and nothing is in between.
    for step, name in (("back", "two"), ("back", "one"), ("forward", "two"), ("forward", "three")):
        page.evaluate(f"history.{step}()")
        in_chat(page, name)
    # The one that is open after a reload is the one that was.
    page.go_back()
    in_chat(page, "two")
    page.reload()
    in_chat(page, "two")
    page.go_forward()
    in_chat(page, "three")


def panel_is(page, title):
    if title is None:
        expect(page.locator("#panel")).to_be_hidden()
        return
    expect(page.locator("#panel h2")).to_have_text(title)
    expect(page.locator("#panel [role=tab][aria-selected=true]")).to_have_count(1)


@pytest.mark.parametrize("screen", [{}, PHONE], ids=["desktop", "phone"])
def test_back_and_forward_between_views(talk, open_chat, screen):
    page = open_chat(talk, "one", **screen)
    in_chat(page, "one")
    panel_is(page, None)
    page.click("#inspect")
    panel_is(page, "Out of context")
    open_panel(page, "stats")
    panel_is(page, "Statistics")
    open_panel(page, "memories")
    panel_is(page, "Memories")
    for step, title in (
        ("back", "Statistics"),
        ("back", "Out of context"),
        ("back", None),
        ("forward", "Out of context"),
        ("forward", "Statistics"),
        ("forward", "Memories"),
        ("back", "Statistics"),
    ):
        page.evaluate(f"history.{step}()")
        panel_is(page, title)
    # The buttons of the page show the same.
    expect(page.locator("#inspect")).to_have_attribute("aria-pressed", "true")
    page.click("[aria-label='Close the panel']")
    panel_is(page, None)
    in_chat(page, "one")


def test_view_stays_open_beside_the_next_chat(talk, open_chat):
    page = open_chat(talk, "one")
    in_chat(page, "one")
    page.click("#inspect")
    panel_is(page, "Out of context")
    open_row(page, "two")
    in_chat(page, "two")
    panel_is(page, "Out of context")
    open_panel(page, "stats")
    panel_is(page, "Statistics")
    for step, name, title in (
        ("back", "two", "Out of context"),
        ("back", "one", "Out of context"),
        ("back", "one", None),
        ("forward", "one", "Out of context"),
        ("forward", "two", "Out of context"),
        ("forward", "two", "Statistics"),
    ):
        page.evaluate(f"history.{step}()")
        in_chat(page, name)
        panel_is(page, title)


def test_views_of_a_new_chat_are_empty_until_something_is_said(talk, open_chat):
    """Without failed requests: the server has nothing of it yet."""
    page = open_chat(talk, "one")
    in_chat(page, "one")
    page.click("#inspect")
    panel_is(page, "Out of context")
    page.click("#new-chat")
    expect(page.locator(".empty")).to_be_visible()
    for name in ("graveyard", "search", "stats", "past", "notes", "captures", "memories"):
        page.click(f"#panel [data-panel={name}]")
        expect(page.locator("#panel-body")).to_have_text("Nothing has been said in this chat yet.")
    page.click("#panel [data-panel=stats]")
    page.fill("#message", "The first words.")
    page.press("#message", "Enter")
    expect(page.locator("#panel svg.chart").first).to_be_visible()
    expect(page.locator("#panel-body")).not_to_contain_text("Nothing has been said")
