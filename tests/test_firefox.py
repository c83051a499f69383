"""The main path of the page in Firefox: send, read, prune, bring back, search, settings, phone."""

import shutil

import pytest

from bidi import Firefox
from conftest import SHOTS, Server

FIREFOX = shutil.which("firefox-esr") or shutil.which("firefox")

pytestmark = pytest.mark.skipif(
    not FIREFOX,
    reason="Firefox is missing: `scripts/setup` installs firefox-esr where Debian's packages can be reached",
)

ANSWER = "The fox is **Rufus**.\n\n```python\nprint('fox')\n```\n"


@pytest.fixture
def firefox(tmp_path):
    profile = tmp_path / "profile"
    profile.mkdir()
    # Without a display, Firefox reports a touch screen; a fine pointer that can hover is 4 + 2.
    prefs = ("ui.primaryPointerCapabilities", "ui.allPointerCapabilities")
    (profile / "user.js").write_text("".join(f'user_pref("{pref}", 6);\n' for pref in prefs))
    browser = Firefox(FIREFOX, profile)
    yield browser
    errors = browser.errors
    browser.close()
    assert not errors, errors


@pytest.fixture
def server(tmp_path):
    script = tmp_path / "answers.txt"
    script.write_text(ANSWER)
    server = Server(tmp_path / "data", "recall.mode=lexical", model=f"scripted:{script}").start()
    yield server
    server.stop()


def test_main_path_in_firefox(firefox, server):
    firefox.resize(1280, 800)
    firefox.open(f"{server.url}/#main")
    firefox.wait_for("document.querySelector('.empty') !== null")
    firefox.evaluate("document.getElementById('message').focus()")
    firefox.type("The red fox is called Rufus.\ue007")
    # Markdown and highlighted code.
    firefox.wait_for("document.querySelector('.turn.assistant strong')?.textContent === 'Rufus'")
    firefox.wait_for("document.querySelector('.turn.assistant pre .hljs-string') !== null")
    firefox.wait_for("document.getElementById('stop').hidden")
    firefox.screenshot(SHOTS / "firefox.png")
    # A paragraph leaves the context, stays in place, and comes back.
    firefox.evaluate("document.querySelector('.turn.user .chunk').focus()")
    firefox.type("x")
    firefox.wait_for("document.querySelector('.turn.user .chunk.ghost') !== null")
    firefox.evaluate("document.querySelector('.turn.user .chunk.ghost').focus()")
    firefox.type("x")
    firefox.wait_for("document.querySelector('.turn.user .chunk:not(.ghost)') !== null")
    # Search over all chats.
    firefox.evaluate("document.getElementById('chat-search').focus()")
    firefox.type("Rufus")
    firefox.wait_for("document.querySelector('.chat-hit mark')?.textContent === 'Rufus'")
    # The settings.
    firefox.evaluate("document.querySelector('#sidebar [data-panel=settings]').click()")
    firefox.wait_for("document.getElementById('set-generation.temperature') !== null")
    # On a phone, the list of chats slides in.
    firefox.resize(390, 844)
    firefox.evaluate("history.back()")
    firefox.wait_for("document.getElementById('panel').hidden")
    assert firefox.evaluate("document.documentElement.scrollWidth <= 390")
    firefox.evaluate("document.getElementById('open-sidebar').click()")
    firefox.wait_for("document.body.classList.contains('sidebar-open')")
    firefox.screenshot(SHOTS / "firefox-phone.png")


def click(firefox, selector, text=""):
    """Clicks the first element that matches and contains this text."""
    found = f"[...document.querySelectorAll({selector!r})].find((one) => one.textContent.includes({text!r}))"
    firefox.wait_for(f"!!({found})")
    firefox.evaluate(f"({found}).click()")


def has(firefox, selector, text):
    firefox.wait_for(f"[...document.querySelectorAll({selector!r})].some((one) => one.textContent.includes({text!r}))")


def regenerate_and_choose(firefox):
    click(firefox, ".turn.last .acts button", "Regenerate")
    has(firefox, ".turn.last .variants", "2/2")
    click(firefox, '[aria-label="Previous answer"]')
    has(firefox, ".turn.last .variants", "1/2")


def regenerate_an_older_answer_in_a_branch(firefox):
    click(firefox, ".turn.assistant:not(.last) .acts button", "Regenerate")
    has(firefox, "#title", "main · branch")
    firefox.wait_for("document.querySelectorAll('.turn.assistant').length === 1")
    has(firefox, ".turn.last .variants", "2/2")


def edit_the_last_message(firefox):
    firefox.evaluate(
        "[...[...document.querySelectorAll('.turn.user')].at(-1).querySelectorAll('.acts button')]"
        ".find((one) => one.textContent === 'Edit').click()"
    )
    has(firefox, "#editing", "Editing your last message")
    firefox.evaluate("document.getElementById('message').select()")
    firefox.type("The blue fox.\ue007")
    has(firefox, ".turn.user .chunk", "The blue fox.")
    firefox.wait_for("document.getElementById('editing').hidden")


def delete_and_undo(firefox):
    firefox.evaluate("document.querySelector('.turn.assistant .chunk').focus()")
    firefox.type("\ue017")
    click(firefox, "dialog button", "Delete")
    firefox.wait_for("document.querySelectorAll('.turn.assistant').length === 1")
    click(firefox, ".toast button", "Undo")
    firefox.wait_for("document.querySelectorAll('.turn.assistant').length === 2")


def names_of_the_chat(firefox):
    click(firefox, "#chat-options")
    firefox.wait_for("document.getElementById('own-user_name') !== null")
    firefox.evaluate("document.getElementById('own-user_name').focus()")
    # A headless window is never active, so a field is not left: Enter confirms it.
    firefox.type("Anna\ue007")
    has(firefox, ".turn.user h2 b", "Anna")


def import_by_dropping_a_file(firefox):
    firefox.evaluate(
        """(() => {
          const transfer = new DataTransfer();
          const text = JSON.stringify({ messages: [{ role: "user", content: "Words of OpenAI." }] });
          transfer.items.add(new File([text], "m.json", { type: "application/json" }));
          window.dispatchEvent(new DragEvent("drop", { dataTransfer: transfer, bubbles: true, cancelable: true }));
        })()"""
    )
    has(firefox, ".toast", "Imported 1 chat from a")
    has(firefox, ".turn.user .chunk", "Words of OpenAI.")


def context_meter_and_its_split(firefox):
    has(firefox, "#meter-parts", "Room for the answer")
    click(firefox, "#sidebar [data-panel=settings]")
    firefox.wait_for("document.querySelectorAll('.split li').length === 3")
    has(firefox, "#panel label", "Longest answer")


def inspect_closes_with_back_and_opens_with_forward(firefox):
    click(firefox, "#inspect")
    firefox.wait_for("!document.getElementById('panel').hidden")
    firefox.evaluate("history.back()")
    firefox.wait_for("document.getElementById('panel').hidden")
    firefox.evaluate("history.forward()")
    firefox.wait_for("!document.getElementById('panel').hidden")


def rail_shows_the_whole_chat(firefox):
    firefox.wait_for("document.querySelector('#rail canvas').width > 0")


def text_typed_too_early_is_kept_and_sent_once(firefox):
    url = firefox.evaluate("location.origin")
    firefox.open(f"{url}/rooms.html")
    firefox.open(f"{url}/#/main")
    firefox.evaluate("document.getElementById('message').focus()")
    firefox.type("Too early\ue007")
    firefox.wait_for("document.querySelectorAll('.turn.user').length === 3")
    firefox.wait_for("document.getElementById('stop').hidden")
    firefox.wait_for("document.getElementById('message').value === ''")
    assert firefox.evaluate("document.querySelectorAll('.turn.user').length") == 3


def drafts_and_attachments_are_kept_per_chat(firefox):
    firefox.evaluate("document.getElementById('message').focus()")
    firefox.type("A draft")
    firefox.evaluate(
        """(() => {
          const transfer = new DataTransfer();
          transfer.items.add(new File(["# Notes"], "notes.md", { type: "text/markdown" }));
          const drop = new DragEvent("drop", { dataTransfer: transfer, bubbles: true, cancelable: true });
          document.getElementById("composer").dispatchEvent(drop);
        })()"""
    )
    has(firefox, "#attached li", "notes.md")
    firefox.evaluate("document.getElementById('new-chat').click()")
    firefox.wait_for("document.querySelector('.empty') !== null")
    firefox.wait_for("document.getElementById('message').value === '' && document.getElementById('attached').hidden")
    click(firefox, ".chat-row a", "main")
    firefox.wait_for("document.getElementById('message').value === 'A draft'")
    has(firefox, "#attached li", "notes.md")


def chat_is_renamed_deleted_and_restored(firefox):
    click(firefox, "#title")
    firefox.wait_for("document.getElementById('ask-input') !== null")
    firefox.evaluate("document.getElementById('ask-input').select()")
    firefox.type("foxes\ue007")
    has(firefox, "#title", "foxes")
    click(firefox, ".chat-row.current button", "⋯")
    click(firefox, "[role=menuitem]", "Delete")
    has(firefox, "[data-deleted]", "foxes")
    click(firefox, "[data-deleted] button", "Restore")
    has(firefox, "#title", "foxes")
    firefox.wait_for("document.querySelectorAll('.turn.user').length === 3")


def every_view_of_inspect_opens(firefox):
    click(firefox, "#inspect")
    for name in ("graveyard", "search", "stats", "past", "notes", "captures", "memories"):
        firefox.evaluate(f"document.querySelector('#panel [role=tab][data-panel={name}]').click()")
        firefox.wait_for(f"document.querySelector('#panel [aria-selected=true]').dataset.panel === '{name}'")
        firefox.wait_for("document.getElementById('panel-body').childElementCount > 0")
        assert not firefox.evaluate("document.querySelector('#panel-body .error')?.textContent ?? ''")


def setting_is_changed(firefox):
    click(firefox, "#sidebar [data-panel=settings]")
    firefox.wait_for("document.getElementById('set-generation.temperature') !== null")
    firefox.evaluate("document.getElementById('set-generation.temperature').focus()")
    firefox.evaluate("document.getElementById('set-generation.temperature').select()")
    firefox.type("1.25\ue007")
    stored = (
        "fetch('/api/halo/v1/settings').then((answer) => answer.json())"
        ".then((all) => JSON.stringify(all).includes('1.25') && (window.isStored = true)).catch(() => {})"
    )
    firefox.wait_for(f"({stored}, window.isStored === true)")


def chats_are_steps_of_the_history(firefox):
    click(firefox, "#new-chat")
    firefox.wait_for("document.querySelector('.empty') !== null")
    firefox.evaluate("history.back()")
    has(firefox, "#title", "main")
    firefox.wait_for("document.querySelectorAll('.turn.user').length === 2")
    firefox.evaluate("history.forward()")
    firefox.wait_for("document.querySelector('.empty') !== null")


def rooms_explain_their_words(firefox):
    firefox.open(firefox.evaluate("location.origin") + "/rooms.html")
    firefox.wait_for("document.getElementById('create-example') !== null")
    click(firefox, "#explain")
    firefox.wait_for("document.querySelector('#words dt')?.offsetParent !== null")


FEATURES = [
    regenerate_and_choose,
    regenerate_an_older_answer_in_a_branch,
    edit_the_last_message,
    delete_and_undo,
    names_of_the_chat,
    import_by_dropping_a_file,
    context_meter_and_its_split,
    inspect_closes_with_back_and_opens_with_forward,
    rail_shows_the_whole_chat,
    rooms_explain_their_words,
]


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.__name__)
@pytest.mark.parametrize("width", [1280, 390], ids=["desktop", "phone"])
def test_feature_in_firefox(firefox, server, feature, width):
    server.say("main", "The red fox is called Rufus.")
    server.say("main", "And the wolf?")
    firefox.resize(width, 844)
    firefox.open(f"{server.url}/#main")
    firefox.wait_for("document.querySelectorAll('.turn.assistant').length === 2")
    feature(firefox)
    assert firefox.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize("width", [1280, 390], ids=["desktop", "phone"])
def test_everyday_use_in_firefox(firefox, server, width):
    """One after the other in one browser, because starting it takes longer than all of them."""
    server.say("main", "The red fox is called Rufus.")
    server.say("main", "And the wolf?")
    firefox.resize(width, 844)
    for feature in (
        every_view_of_inspect_opens,
        setting_is_changed,
        chats_are_steps_of_the_history,
        drafts_and_attachments_are_kept_per_chat,
        text_typed_too_early_is_kept_and_sent_once,
        chat_is_renamed_deleted_and_restored,
    ):
        firefox.open(f"{server.url}/rooms.html")
        firefox.evaluate("localStorage.clear()")
        firefox.open(f"{server.url}/#main")
        firefox.wait_for("document.querySelectorAll('.turn.assistant').length >= 2")
        feature(firefox)
        assert firefox.evaluate("document.documentElement.scrollWidth <= innerWidth"), feature.__name__
