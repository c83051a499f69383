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
