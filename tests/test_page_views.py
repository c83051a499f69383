"""Every view and state of the page: accessible in both themes, on a desktop and on a touch phone; and controls that are used rarely."""

import json
import re
import struct
import urllib.parse
import urllib.request

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect

from conftest import ROOT, Server
from test_page import open_panel, shot

PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}
TABLET = {"viewport": {"width": 820, "height": 1180}, "has_touch": True}

TALK = (
    "My sister Anna keeps two cats.\n\nShe has an old boat too.",
    "Here is code:\n\n```python\nprint('boat')\n```\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\nAnd a [link](https://example.com).",
)


@pytest.fixture
def talk(scripted):
    server = scripted(TALK[1], "A second answer.", settings=("recall.mode=lexical", "chunk.min_tokens=2"))
    server.say("main", TALK[0])
    server.say("main", "And then?")
    server.say("other", "Boats and cats.")
    return server


# Rules that axe does not run unless it is told to.
STRICT = {"rules": {name: {"enabled": True} for name in ("label-content-name-mismatch", "target-size")}}


def assert_accessible(page, where):
    page.wait_for_timeout(350)
    response = Axe().run(page, options=STRICT).response
    ran = {one["id"] for kind in ("violations", "passes", "incomplete", "inapplicable") for one in response[kind]}
    assert STRICT["rules"].keys() <= ran, ran
    found = [
        (one["id"], node["target"], node.get("failureSummary"))
        for one in response["violations"]
        for node in one["nodes"]
    ]
    assert not found, (where, found)
    assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth"), (where, "scrolls sideways")


@pytest.mark.parametrize("theme", ["dark", "light"])
@pytest.mark.parametrize("screen", [{}, PHONE], ids=["desktop", "phone"])
def test_every_view_is_accessible(talk, open_chat, screen, theme):
    """In the order in which a user could open them; each state is left as it was."""
    page = open_chat(talk, color_scheme=theme, **screen)
    expect(page.locator(".turn.assistant")).to_have_count(2)
    assert_accessible(page, "chat")
    for panel in ("graveyard", "search", "stats", "past", "notes", "captures", "memories", "settings", "help"):
        open_panel(page, panel)
        page.locator("#panel-body > *").first.wait_for()
        assert_accessible(page, panel)
        page.click("[aria-label='Close the panel']")
    open_panel(page, "settings")
    page.locator("#panel details").first.wait_for()
    page.evaluate("document.querySelectorAll('#panel details').forEach((one) => { one.open = true; })")
    assert_accessible(page, "all settings")
    page.click("[aria-label='Close the panel']")
    for button in ("#model", "#chat-options"):
        page.click(button)
        page.locator("#panel-body input").first.wait_for()
        assert_accessible(page, button)
        page.click("[aria-label='Close the panel']")
    # A paragraph token by token, then out of context.
    first = page.locator(".turn.user .chunk").first
    first.focus()
    page.keyboard.press("Enter")
    page.locator("#panel .token").first.wait_for()
    assert_accessible(page, "paragraph")
    page.click("[aria-label='Close the panel']")
    first.focus()
    page.keyboard.press("x")
    expect(first).to_have_class(re.compile("ghost"))
    assert_accessible(page, "ghost")
    open_panel(page, "graveyard")
    page.locator("#panel .row").first.wait_for()
    assert_accessible(page, "a paragraph out of context")
    page.click("[aria-label='Close the panel']")
    # A menu, a dialog, the banner of an edit.
    last = page.locator(".turn.assistant").last
    last.hover()
    last.get_by_role("button", name="More").last.click()
    assert_accessible(page, "menu")
    page.get_by_role("menuitem", name="Edit", exact=True).click()
    assert_accessible(page, "editing")
    page.click("#cancel-edit")
    page.click("#title")
    assert_accessible(page, "dialog")
    page.locator("dialog").get_by_role("button", name="Cancel").click()
    # The list of chats with hits and a deleted chat; a new chat.
    talk.halo("DELETE", "/conversations/other?confirm=other")
    page.reload()
    expect(page.locator(".turn.assistant")).to_have_count(2)
    if screen:
        page.click("#open-sidebar")
    expect(page.locator("[data-deleted]")).to_be_visible()
    assert_accessible(page, "list of chats")
    page.fill("#chat-search", "boat")
    page.locator(".chat-hit").first.wait_for()
    assert_accessible(page, "search over all chats")
    page.fill("#chat-search", "")
    page.click("#new-chat")
    expect(page.locator(".empty")).to_be_visible()
    assert_accessible(page, "new chat")


STATES = {
    "in use elsewhere": {"in_use_by": 4711},
    "missing model": {"missing_model": "gone"},
    "notice": {"notices": ["the answer of turn 3 was cut off when the program ended"]},
}


@pytest.mark.parametrize("theme", ["dark", "light"])
@pytest.mark.parametrize("name", [*STATES, "load error", "running answer"])
def test_every_state_is_accessible(talk, browser, theme, name):
    context = browser.new_context(color_scheme=theme, **PHONE)
    page = context.new_page()

    def answer(route):
        state = route.fetch().json()
        if name == "load error":
            return route.fulfill(status=503, json={"error": "the store is busy"})
        if name == "running answer":
            state["running"] = {"ahead": 0, "chunks": [["a9.0", "An answer that has **begun**"]]}
        return route.fulfill(json={**state, **STATES.get(name, {})})

    page.route("**/conversations/main/state", answer)
    page.goto(f"{talk.url}/#main")
    shown = {"load error": ".load-error", "running answer": ".turn.running"}.get(name, "#notices .notice")
    expect(page.locator(shown)).to_be_visible()
    if name == "missing model":
        expect(page.locator(shown)).to_contain_text("gone, is not installed any more")
    assert_accessible(page, name)
    if name == "missing model":
        page.get_by_role("button", name="Choose a model").click()
        expect(page.locator("#panel h2")).to_have_text("Model")
    # A chat in use elsewhere is loaded every few seconds: a request may be under way.
    page.unroute_all(behavior="wait")
    context.close()


@pytest.mark.parametrize("theme", ["dark", "light"])
@pytest.mark.parametrize("screen", [{}, PHONE], ids=["desktop", "phone"])
def test_rooms_are_accessible_and_explain_their_words(talk, open_chat, browser, screen, theme):
    context = browser.new_context(color_scheme=theme, **{"viewport": {"width": 1280, "height": 800}, **screen})
    page = context.new_page()
    page.goto(f"{talk.url}/rooms.html")
    expect(page.locator("#create-example")).to_be_visible()
    assert_accessible(page, "no world")
    assert talk.halo("POST", "/worlds", {"name": "harbour"})[0] == 201
    page.reload()
    expect(page.locator("#members, .agent").first).to_be_visible()
    # Time stands still until it is started, and the page says so.
    expect(page.locator("#hints")).to_contain_text("Time stands still")
    expect(page.locator("#run")).to_have_text("Run")
    assert_accessible(page, "world")
    page.click("#explain")
    for word in ("Heartbeat", "Billboard", "The Architect", "Key"):
        expect(page.locator("#words dt", has_text=word).first).to_be_visible()
    assert_accessible(page, "words")
    assert page.locator("link[rel=manifest]").get_attribute("href") == "halo.webmanifest"
    page.keyboard.press("Escape")
    expect(page.locator("#words")).to_be_hidden()
    page.locator("#panel .agent button").first.click()
    expect(page.locator(".mind")).to_be_visible()
    assert_accessible(page, "mind")
    context.close()


def test_rooms_have_the_size_and_the_colours_of_the_page(talk, open_chat):
    seen = []
    for address in ("", "rooms.html"):
        page = open_chat(talk)
        page.evaluate("localStorage.setItem('size', '20')")
        page.goto(f"{talk.url}/{address}")
        page.locator("#composer").wait_for()
        expect(page.locator("html")).to_have_css("font-size", "20px")
        seen.append(
            page.evaluate(
                """() => {
                  const { color, backgroundColor, fontFamily, fontSize, lineHeight } = getComputedStyle(document.body);
                  return [color, backgroundColor, fontFamily, fontSize, lineHeight];
                }"""
            )
        )
    assert seen[0] == seen[1], seen


def test_page_can_be_installed(talk):
    """The manifest and the icons that it names are there, as large as it says."""
    status, text = talk.call("GET", "/halo.webmanifest")
    manifest = text if isinstance(text, dict) else json.loads(text)
    assert status == 200 and manifest["start_url"] == "/" and manifest["display"] == "standalone"
    purposes = {(icon["sizes"], icon["purpose"]) for icon in manifest["icons"]}
    assert {("192x192", "any"), ("512x512", "any"), ("512x512", "maskable")} <= purposes
    icons = [(icon["src"], icon["type"], icon["sizes"]) for icon in manifest["icons"]]
    for source, kind, sizes in [*icons, ("icon-apple-180.png", "image/png", "180x180")]:
        with urllib.request.urlopen(f"{talk.url}/{source}") as response:
            assert response.headers["Content-Type"] == kind, source
            picture = response.read()
        if kind == "image/png":
            # Width and height stand after the signature and the name of the first block.
            width, height = struct.unpack(">II", picture[16:24])
            assert f"{width}x{height}" == sizes, (source, width, height)
    for path in ("/", "/rooms.html"):
        assert 'rel="apple-touch-icon" href="icon-apple-180.png"' in talk.call("GET", path)[1]


DOCS = ROOT / "docs"
DOC_PAGES = re.findall(r"\]\((.+\.md)\)", (DOCS / "SUMMARY.md").read_text())


@pytest.mark.parametrize("theme", ["dark", "light"])
@pytest.mark.parametrize("screen", [{}, PHONE], ids=["desktop", "phone"])
def test_documentation_is_read_in_the_program(talk, browser, screen, theme):
    context = browser.new_context(color_scheme=theme, **{"viewport": {"width": 1280, "height": 800}, **screen})
    page = context.new_page()
    problems = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.goto(f"{talk.url}/docs")
    expect(page).to_have_url(f"{talk.url}/docs.html")
    expect(page.locator("#doc-page h1")).to_have_text("Halo")
    assert_accessible(page, "first page")
    contents = page.locator("#doc-contents a")
    if screen:
        expect(page.locator("#doc-contents")).to_be_hidden()
        page.click("#doc-open")
    expect(contents).to_have_count(len(DOC_PAGES))
    assert_accessible(page, "contents")
    # A search leads to the heading above the line that it finds.
    page.fill("#doc-search", "xylophone")
    expect(page.locator("#doc-contents [role=status]")).to_have_text("0 places")
    page.fill("#doc-search", "sillytavern address")
    hit = page.locator("#doc-contents a.hit").first
    expect(hit).to_be_visible()
    assert_accessible(page, "search")
    hit.click()
    expect(page).to_have_url(re.compile(r"docs\.html#[\w/.-]+\.md#[\w-]+$"))
    expect(page.locator("#doc-page")).to_contain_text("SillyTavern")
    # The arrows lead through all pages.
    page.goto(f"{talk.url}/docs.html#getting-started.md")
    page.reload()
    expect(page.locator("#doc-page h1")).to_have_text("Getting started")
    page.locator(".turn-page a").last.click()
    expect(page.locator("#doc-page h1")).to_have_text("Connect your client")
    shot(page, f"docs-{'phone' if screen else 'desktop'}-{theme}")
    page.goto(f"{talk.url}/docs.html#nowhere.md")
    expect(page.locator("#doc-page [role=alert]")).to_have_text("There is no page nowhere.md.")
    context.close()
    assert [problem for problem in problems if "404" not in problem] == []


def test_every_page_of_the_documentation_is_drawn(talk, open_chat):
    """Each has its title, its pictures and headings for its links; what a link names is there."""
    page = open_chat(talk)
    page.goto(f"{talk.url}/docs.html")
    expect(page.locator("#doc-contents a")).to_have_count(len(DOC_PAGES))
    anchors, links = {}, []
    for path in DOC_PAGES:
        page.evaluate("path => { location.hash = path; }", path)
        expect(page.locator("#doc-page")).to_have_attribute("data-path", path)
        title = re.search(r"^# (.+)$", (DOCS / path).read_text(), re.MULTILINE)[1]
        assert page.locator("#doc-page h1").first.text_content() == re.sub(r"[`*]", "", title)
        found = page.evaluate("""async () => {
          const pictures = [...document.querySelectorAll("#doc-page img")];
          await Promise.all(pictures.map((picture) => picture.decode()));
          const ids = [...document.querySelectorAll("#doc-page [id]")].map((node) => node.id);
          const targets = [...document.querySelectorAll("#doc-page a")].map((link) => link.getAttribute("href"));
          return { ids, targets };
        }""")
        anchors[path] = set(found["ids"])
        links += [(path, target) for target in found["targets"] if target.startswith("#")]
    for path, target in links:
        to, _, anchor = urllib.parse.unquote(target[1:]).partition("#")
        assert to in anchors and (not anchor or anchor in anchors[to]), (path, target)
    assert len(links) > 100


def test_rooms_do_not_poll(talk, open_chat):
    assert talk.halo("POST", "/worlds", {"name": "harbour"})[0] == 201
    page = open_chat(talk)
    page.goto(f"{talk.url}/rooms.html")
    expect(page.locator("#hints")).to_contain_text("Time stands still")
    page.wait_for_timeout(500)
    requests = []
    page.on("request", lambda request: requests.append(request.url))
    page.wait_for_timeout(7000)
    assert requests == [], requests


def test_chat_is_duplicated(talk, open_chat):
    page = open_chat(talk)
    expect(page.locator(".turn.assistant")).to_have_count(2)
    page.get_by_role("button", name="Menu of main").click()
    page.get_by_role("menuitem", name="Duplicate").click()
    expect(page.locator("#title")).to_have_text("main copy")
    expect(page.locator(".turn.assistant")).to_have_count(2)
    assert talk.halo("GET", "/conversations/main%20copy/transcript")[1]["total"] == 4


def test_example_prompt_is_put_into_the_box(talk, open_chat):
    page = open_chat(talk, "new")
    examples = page.locator(".examples button")
    expect(examples).to_have_count(4)
    text = examples.nth(2).text_content()
    examples.nth(2).click()
    expect(page.locator("#message")).to_have_value(text)
    expect(page.locator("#message")).to_be_focused()
    page.press("#message", "Enter")
    expect(page.locator(".turn.user .chunk")).to_contain_text(text)


def test_hint_of_a_tiny_model_leads_to_the_picker(talk, open_chat):
    page = open_chat(talk, "new")
    status = {"model": "SmolLM2-135M", "context": 2048, "attention": True, "busy": False, "queued": 0, "embedder": True}
    page.route("**/api/halo/v1/status", lambda route: route.fulfill(json={"version": "0", **status}))
    page.reload()
    page.get_by_role("button", name="Choose a better model").click()
    expect(page.locator("#panel h2")).to_have_text("Model")


def test_rail_is_clicked_and_dragged(scripted, open_chat):
    server = scripted("word " * 60, settings=("recall.mode=lexical",))
    server.halo(
        "POST",
        "/conversations",
        {
            "name": "main",
            "messages": [
                {"role": "user" if n % 2 == 0 else "assistant", "text": f"Message {n}. " + "word " * 40}
                for n in range(120)
            ],
        },
    )
    page = open_chat(server)
    expect(page.locator(".turn", has_text="Message 119.")).to_be_in_viewport()
    rail = page.locator("#rail").bounding_box()
    x = rail["x"] + rail["width"] / 2
    page.mouse.click(x, rail["y"] + 2)
    expect(page.locator(".turn", has_text="Message 0.")).to_be_in_viewport()
    expect(page.locator("#rail")).to_have_attribute("aria-valuetext", re.compile("Message [1-3] of 120"))
    page.mouse.down()
    page.mouse.move(x, rail["y"] + rail["height"] * 0.5, steps=4)
    page.mouse.up()
    expect(page.locator("#rail")).to_have_attribute("aria-valuetext", re.compile("Message (5[5-9]|6[0-5]) of 120"))
    expect(page.locator(".turn", has_text=re.compile(r"Message 6[0-3]\.")).first).to_be_in_viewport()


def test_tool_calls_are_folded(browser, tmp_path, remote_model):
    call = ["I note it. ", "<tool>", """jq '.name = "Rufus"' notes.json > output""", "</tool>"]
    settings = ("tools.enabled=true", "recall.mode=lexical")
    server = Server(tmp_path, *settings, model=remote_model([call, [" Noted."]])).start()
    page = browser.new_page()
    try:
        server.say("main", "The fox is called Rufus.")
        page.goto(f"{server.url}/#main")
        fold = page.locator(".turn.assistant details.fold", has_text="Tool call").first
        expect(fold.locator("summary")).to_have_text("Tool call ✓")
        expect(fold.locator("pre")).to_be_hidden()
        fold.locator("summary").click()
        expect(fold.locator("pre")).to_contain_text("notes.json")
        expect(fold.locator(".tool")).to_be_visible()
    finally:
        page.close()
        server.stop()


def test_panel_is_a_step_of_the_history_forward_and_back(talk, open_chat):
    page = open_chat(talk)
    expect(page.locator(".turn.assistant")).to_have_count(2)
    open_panel(page, "stats")
    expect(page.locator("#panel h2")).to_have_text("Statistics")
    page.go_back()
    page.go_back()
    expect(page.locator("#panel")).to_be_hidden()
    page.go_forward()
    page.go_forward()
    expect(page.locator("#panel h2")).to_have_text("Statistics")
    expect(page.locator("#title")).to_have_text("main")


def test_tablet_has_the_list_behind_a_button_and_the_panel_over_the_chat(talk, open_chat):
    page = open_chat(talk, **TABLET)
    expect(page.locator(".turn.assistant")).to_have_count(2)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    expect(page.locator("#sidebar")).to_be_hidden()
    page.tap("#open-sidebar")
    expect(page.locator("#sidebar")).to_be_in_viewport()
    page.tap(".chat-row a:text-is('other')")
    expect(page.locator("#title")).to_have_text("other")
    expect(page.locator("#sidebar")).to_be_hidden()
    # Everything that can be tapped is large enough.
    small = page.evaluate(
        """() => [...document.querySelectorAll("#main > header button, .acts button, #composer button")]
             .filter((one) => one.offsetParent && one.getBoundingClientRect().height < 36)
             .map((one) => one.outerHTML)"""
    )
    assert small == [], small


@pytest.mark.parametrize("motion", ["reduce", "no-preference"])
def test_reduced_motion_stops_every_animation(talk, open_chat, motion):
    page = open_chat(talk, reduced_motion=motion)
    expect(page.locator(".turn.assistant")).to_have_count(2)
    durations = page.evaluate(
        """() => {
          const chunk = document.querySelector(".chunk");
          chunk.classList.add("found");
          const style = getComputedStyle(chunk);
          const root = getComputedStyle(document.documentElement);
          return [style.animationName, root.getPropertyValue("--slow").trim(), root.getPropertyValue("--glow").trim()];
        }"""
    )
    still = ["none", "0ms", "0ms"]
    assert (durations == still) == (motion == "reduce"), durations
    running = page.evaluate("document.getAnimations().filter((one) => one.playState === 'running').length")
    assert (running == 0) == (motion == "reduce"), running


def test_openapi_documents_what_the_page_uses(talk):
    document = talk.call("GET", "/api/halo/openapi.json")[1]
    text = json.dumps(document)
    assert "post" in document["paths"]["/api/halo/v1/conversations"]
    assert "file=notes.md" in text, "attachments"
    for path in ("/api/halo/v1/models/download", "/api/halo/v1/conversations/{name}/forget"):
        assert "post" in document["paths"][path]
