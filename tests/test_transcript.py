"""The transcript of the page in a real browser, on the real program with scripted answers: Markdown, attention, long chats, keys."""

import json
import re
import threading
import time

import pytest
from playwright.sync_api import expect

from conftest import SHOTS, Server, wait_for

GHOST = re.compile(r"\bghost\b")

MARKDOWN = """# A title

Some **bold** and `code`, and 2 < 3.

```python
print("hello")
```

| place | opens |
|---|---|
| castle | 9:00 |

See [the page](https://example.org/a), [not this](javascript:alert(1)) and ![a picture](https://example.org/i.png).

<script>alert(1)</script><img src=x onerror=alert(1)>

The mean is $\\bar{x}$, and it costs $5 or $10.

1. one
2. two
"""


@pytest.fixture
def scripted(scripted):
    """Starts servers whose model gives these answers. They search by words."""
    return lambda *answers, settings=(): scripted(*answers, settings=("recall.mode=lexical", *settings))


def shot(page, name):
    SHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SHOTS / f"{name}.png")


def test_markdown_is_rendered_and_nothing_runs(scripted, open_chat):
    server = scripted(MARKDOWN, settings=("generation.max_tokens=400",))
    server.say("main", "Show me **everything**.")
    page = open_chat(server, permissions=["clipboard-read", "clipboard-write"])
    answer = page.locator(".turn.assistant")
    expect(answer.locator("h1")).to_have_text("A title")
    expect(answer.locator("strong").first).to_have_text("bold")
    expect(page.locator(".turn.user strong")).to_have_text("everything")
    expect(answer.locator("pre .hljs-string")).to_have_text('"hello"')
    expect(answer.locator("table td").first).to_have_text("castle")
    expect(answer.locator("ol li")).to_have_count(2)
    expect(answer.locator("math")).to_have_count(1)
    expect(answer).to_contain_text("it costs $5 or $10")
    # HTML is text, addresses are safe, pictures are not fetched.
    expect(answer).to_contain_text("<script>alert(1)</script><img src=x onerror=alert(1)>")
    assert page.locator("#log script, #log img, #log iframe, #log [onerror]").count() == 0
    links = answer.locator("a").evaluate_all("all => all.map((one) => [one.getAttribute('href'), one.rel])")
    assert links == [
        ["https://example.org/a", "noopener noreferrer"],
        ["https://example.org/i.png", "noopener noreferrer"],
    ]
    shot(page, "markdown")
    answer.locator(".copy-code").click()
    assert page.evaluate("() => navigator.clipboard.readText()") == 'print("hello")'
    answer.hover()
    answer.get_by_role("button", name="Copy", exact=True).last.click()
    assert page.evaluate("() => navigator.clipboard.readText()").startswith("# A title\n\nSome **bold**")


def test_streamed_markdown_keeps_its_blocks(browser, tmp_path, remote_model):
    marked, looked = threading.Event(), threading.Event()
    words = [
        "First ",
        "paragraph.\n\n",
        marked,
        "```js\n",
        "let x",
        " = 1;\n",
        looked,
        "```\n\n",
        "Last ",
        "**bold",
        "** word.",
    ]
    server = Server(tmp_path, "recall.mode=lexical", model=remote_model([words])).start()
    page = browser.new_page()
    try:
        page.goto(server.url + "/#main")
        page.fill("#message", "Go on.")
        page.press("#message", "Enter")
        page.wait_for_selector(".turn.assistant p")
        # The first paragraph is the same element until the answer is complete.
        page.evaluate("() => { document.querySelector('.turn.assistant p').marked = true; }")
        marked.set()
        page.wait_for_selector(".turn.running .code-box")
        assert page.evaluate("() => document.querySelector('.turn.running p')?.marked === true")
        looked.set()
        expect(page.locator(".turn.assistant strong")).to_have_text("bold")
        expect(page.locator("#announcer")).to_contain_text("First paragraph.")
    finally:
        page.close()
        server.stop()


def test_reasoning_is_folded_and_text_has_its_direction(scripted, open_chat):
    server = scripted("<think>They say hello.</think>\u0645\u0631\u062d\u0628\u0627.")
    server.say("main", "Hello.")
    page = open_chat(server)
    answer = page.locator(".turn.assistant")
    expect(answer.locator("details summary")).to_have_text("Reasoning")
    expect(answer.get_by_text("They say hello.")).to_be_hidden()
    answer.locator("summary").click()
    expect(answer.get_by_text("They say hello.")).to_be_visible()
    assert answer.locator(".text").get_attribute("dir") == "auto"


LIT = """() => [1, 2, 3, 4, 5].flatMap((level) => [...(CSS.highlights.get(`attended-${level}`) ?? [])]
  .map((range) => [range.startContainer.parentElement.closest(".chunk").dataset.chunk,
                   range.startContainer.data.slice(range.startOffset, range.endOffset).trim()]))"""


def point_at(page, message, word):
    """Moves the pointer to a word of a message."""
    box = message.evaluate(
        """(node, word) => {
      const walker = document.createTreeWalker(node.querySelector(".text"), NodeFilter.SHOW_TEXT);
      while (walker.nextNode()) {
        const at = walker.currentNode.data.indexOf(word);
        if (at < 0) continue;
        const range = document.createRange();
        range.setStart(walker.currentNode, at + 1);
        range.setEnd(walker.currentNode, at + word.length - 1);
        const { x, y, width, height } = range.getBoundingClientRect();
        return { x: x + width / 2, y: y + height / 2 };
      }
    }""",
        word,
    )
    page.mouse.move(box["x"] - 3, box["y"])
    page.mouse.move(box["x"], box["y"])


def test_word_of_an_answer_lights_what_it_attended_to(scripted, open_chat):
    server = scripted("Hello.", "The **red fox** is called Rufus, as you said.", "A grey wolf.")
    page = open_chat(server)
    for text in ("The red fox is called Rufus.", "What is the fox called?"):
        server.say("main", text)
    answer = page.locator(".turn.assistant").last
    expect(answer).to_contain_text("as you said")
    point_at(page, answer, "Rufus")
    page.wait_for_function(f"() => ({LIT})().length > 0")
    assert any(chunk == "u0.0" and "Rufus" in text for chunk, text in page.evaluate(LIT)), page.evaluate(LIT)
    shot(page, "hover")
    page.mouse.move(5, 5)
    page.wait_for_function(f"() => ({LIT})().length === 0")
    # An older answer, after a restart, although what it attended to has left the context.
    server.say("main", "Name another animal.")
    assert server.halo("POST", "/conversations/main/edits", {"edit": "prune", "chunks": ["u0.0"]})[0] == 200
    page.goto("about:blank")
    server.stop()
    server.start()
    page.goto(f"{server.url}/#/main")
    older = page.locator(".turn.assistant", has_text="as you said")
    expect(older).to_be_visible()
    expect(page.locator(".chunk.ghost", has_text="Rufus").first).to_be_visible()
    point_at(page, older, "Rufus")
    page.wait_for_function(f"() => ({LIT})().length > 0")
    assert any(chunk == "u0.0" and "Rufus" in text for chunk, text in page.evaluate(LIT)), page.evaluate(LIT)


def test_words_without_stored_attention_light_nothing_and_ask_nothing(scripted, open_chat):
    server = scripted("The red fox is called Rufus.", settings=("trace.attention=0",))
    server.say("main", "What is the red fox called?")
    page = open_chat(server)
    answer = page.locator(".turn.assistant")
    expect(answer).to_contain_text("Rufus")
    requests = []
    page.on("request", lambda request: requests.append(request.url))
    with page.expect_event("requestfinished", lambda request: "/state" in request.url):
        point_at(page, answer, "Rufus")
        page.wait_for_timeout(600)
        page.evaluate("() => import('/js/state.js').then(({ refresh }) => refresh())")
    assert not any("/attention/" in url for url in requests), requests
    assert page.evaluate(LIT) == []


VOICES = """() => {
  window.spoken = [];
  const voices = [{ name: "cloud", lang: "en-US", localService: false }, { name: "device", lang: "en-GB", localService: true }];
  Object.defineProperty(window, "SpeechSynthesisUtterance", { value: class { constructor(text) { this.text = text; } } });
  Object.defineProperty(window, "speechSynthesis", { value: {
    getVoices: () => window.withoutLocal ? voices.slice(0, 1) : voices,
    speak: (utterance) => window.spoken.push(utterance),
    cancel: () => window.spoken.push("cancel"),
  } });
}"""


def test_messages_are_read_aloud_by_voices_of_the_device(scripted, open_chat):
    answer = "<think>They ask for bread.</think>**Flour** and water. Bake it.\n\n```sh\nrm -r bread\n```\n\nEnjoy it!"
    server = scripted(answer)
    server.say("main", "How is bread made?")
    page = open_chat(server)
    page.add_init_script(f"({VOICES})()")
    page.reload()
    more = page.locator(".turn.assistant").get_by_role("button", name="More")
    more.click()
    page.get_by_role("menuitem", name="Read aloud").click()
    spoken = page.evaluate("() => spoken.map(({ text, voice }) => [text, voice.name])")
    assert spoken == [["Flour and water.", "device"], ["Bake it.", "device"], ["Enjoy it!", "device"]], spoken
    more.click()
    page.get_by_role("menuitem", name="Stop reading").click()
    assert page.evaluate("() => spoken.at(-1)") == "cancel"
    page.evaluate("() => { window.withoutLocal = true; }")
    more.click()
    expect(page.get_by_role("menuitem", name="Branch from here")).to_be_visible()
    expect(page.get_by_role("menuitem", name="Read aloud")).to_have_count(0)


def import_messages(server, count, name="long.json"):
    """Imports a chat of messages that are numbered from 1."""
    roles = ("user", "assistant")
    messages = [
        {"role": roles[n % 2], "content": f"Message number {n + 1} of this very long talk about the sea."}
        for n in range(count)
    ]
    status, result = server.call(
        "POST", f"/api/halo/v1/import?file_name={name}", json.dumps({"messages": messages}).encode(), timeout=300
    )
    assert status == 201, result
    return result["conversations"][0]


def test_long_chat_opens_at_its_end_and_scrolls(scripted, open_chat):
    server = scripted("Yes.")
    name = import_messages(server, 3000)
    page = open_chat(server, name)
    expect(page.locator(".turn", has_text="Message number 3000 ")).to_be_in_viewport(timeout=60_000)
    drawn = page.locator(".turn").count()
    assert drawn < 400, f"only what is near is drawn: {drawn}"
    # To the beginning by the rail, and to the middle by scrolling.
    page.locator("#rail").focus()
    page.keyboard.press("Home")
    expect(page.locator(".turn", has_text=re.compile("Message number 1 "))).to_be_in_viewport()
    assert page.locator("#rail").get_attribute("aria-valuetext") == "Message 1 of 3000"
    page.evaluate("() => { const log = document.getElementById('log'); log.scrollTop = log.scrollHeight / 2; }")
    # The messages in view, once they are loaded and drawn: one after the other, from the middle.
    in_view = """all => all.filter((node) => {
      const { top, bottom } = node.getBoundingClientRect();
      return bottom > 60 && top < innerHeight - 150;
    }).map((node) => Number(/number (\\d+)/.exec(node.textContent)[1]))"""

    def middle():
        texts = page.locator(".turn").evaluate_all(in_view)
        return len(texts) > 1 and texts == list(range(texts[0], texts[0] + len(texts))) and 500 < texts[0] < 2500

    wait_for(middle, 60)
    assert page.locator(".turn").count() < 600
    shot(page, "long")
    page.click("#to-end")
    expect(page.locator(".turn", has_text="Message number 3000 ")).to_be_in_viewport()


def test_empty_chat_begins_with_its_heading_on_a_phone(scripted, browser):
    context = browser.new_context(viewport={"width": 390, "height": 640})
    page = context.new_page()
    page.goto(scripted("Hello.").url)
    expect(page.get_by_role("heading", name="What shall we talk about?")).to_be_in_viewport()
    assert page.evaluate("document.getElementById('log').scrollHeight > document.getElementById('log').clientHeight")
    context.close()


def test_keyboard_alone(scripted, open_chat):
    server = scripted("One.", "Two.", "Three.")
    for text in ("First question.", "Second question."):
        server.say("main", text)
    page = open_chat(server)
    last = page.locator(".chunk").last
    expect(last).to_be_visible()
    # One paragraph is in the tab order; arrow keys move.
    assert page.locator(".chunk[tabindex='0']").count() == 1
    last.focus()
    page.keyboard.press("ArrowUp")
    question = page.locator(".chunk", has_text="Second question.")
    expect(question).to_be_focused()
    page.keyboard.press(".")
    expect(page.get_by_role("menuitem", name="Copy")).to_be_focused()
    page.keyboard.press("Escape")
    expect(question).to_be_focused()
    page.keyboard.press("e")
    expect(page.locator("#message")).to_have_value("Second question.")
    page.keyboard.press("Escape")
    expect(page.locator("#editing")).to_be_hidden()
    # The inspector is a step of the history, and gives the focus back.
    question.focus()
    page.keyboard.press("Enter")
    expect(page.locator("#panel")).to_be_visible()
    page.go_back()
    expect(page.locator("#panel")).to_be_hidden()
    expect(question).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.locator("#message")).to_be_focused()


def test_continue_after_the_length_limit(scripted, open_chat):
    server = scripted("One two three four five six seven eight.", "Nine.", settings=("generation.max_tokens=3",))
    server.say("main", "Count.")
    page = open_chat(server)
    answer = page.locator(".turn.assistant").first
    expect(answer).to_contain_text("Stopped at the length limit")
    before = answer.locator(".text").inner_text().strip()
    assert before and before != "One two three four five six seven eight."
    answer.get_by_role("button", name="Continue").click()
    # The answer goes on in the same message; the one that was cut is a variant.
    answer = page.locator(".turn.assistant")
    expect(answer).to_have_count(1)
    expect(answer.locator(".text")).to_have_text(re.compile(f"^{re.escape(before)}Nine"))
    expect(page.locator(".turn")).to_have_count(2)
    expect(answer.locator(".variants")).to_contain_text("2/2")
    answer.get_by_role("button", name="Previous answer").click()
    expect(answer.locator(".text")).to_have_text(before)


def test_bars_appear_when_the_context_fills(scripted, open_chat):
    server = scripted("word " * 60, settings=("context.max_tokens=400", "generation.max_tokens=80"))
    server.say("main", "Begin.")
    page = open_chat(server)
    expect(page.locator("#log .chunk").first).to_be_visible()
    expect(page.locator("#log")).not_to_have_class(re.compile("filling"))
    for n in range(3):
        server.say("main", f"Go on with part {n}.")
        time.sleep(0.2)
    expect(page.locator("#log")).to_have_class(re.compile("filling"))


def test_folds_stay_open_while_the_answer_grows_and_after_it(browser, tmp_path, remote_model):
    pressed, looked = threading.Event(), threading.Event()
    thoughts = [f" thought{n}" for n in range(40)]
    answer = ["<think>They want", " an animal.", *thoughts[:10], pressed, *thoughts[10:30], looked, *thoughts[30:]]
    model = remote_model([[*answer, "</think>", "A red fox."]])
    server = Server(tmp_path, "recall.mode=lexical", model=model).start()
    page = browser.new_page()
    try:
        page.goto(f"{server.url}/#main")
        page.fill("#message", "Name an animal.")
        page.press("#message", "Enter")
        fold = page.locator(".turn.running details.fold").first
        expect(fold.locator("summary")).to_have_text("Reasoning")
        expect(fold.get_by_text("They want")).to_be_hidden()
        # The text grows between the press and the release of the button.
        fold.locator("summary").hover()
        page.mouse.down()
        pressed.set()
        expect(fold).to_contain_text("thought25")
        page.mouse.up()
        # It grows on, and stays as the reader has set it.
        expect(fold.get_by_text("thought12")).to_be_visible()
        looked.set()
        expect(page.locator("#stop")).to_be_hidden()
        stored = page.locator(".turn.assistant:not(.running) details.fold").first
        expect(stored.get_by_text("thought39")).to_be_visible()
        # A change of the paragraph draws it again.
        page.locator(".turn.assistant .chunk").first.focus()
        page.keyboard.press("p")
        expect(page.locator(".turn.assistant .mark").first).to_be_visible()
        expect(stored.get_by_text("thought39")).to_be_visible()
        stored.locator("summary").click()
        page.locator(".turn.assistant .chunk").first.focus()
        page.keyboard.press("p")
        expect(page.locator(".turn.assistant .mark")).to_have_count(0)
        expect(stored.get_by_text("thought39")).to_be_hidden()
    finally:
        page.close()
        server.stop()


def test_bars_and_rings_have_the_same_width_for_the_same_attention(scripted, open_chat):
    """Whatever else is on the screen: the values are absolute."""
    server = scripted("An answer.", settings=("chunk.min_tokens=2",))
    server.say("main", "One paragraph is here.\n\nAnd there is another one.")
    page = open_chat(server)
    expect(page.locator(".turn.user .chunk")).to_have_count(2)
    drawn = page.evaluate(
        """async () => {
          const [{ state }, { emit }, { paintAttention }] = await Promise.all(
            ["state", "bus", "light"].map((name) => import(`/js/${name}.js`)));
          const frames = () => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
          document.getElementById("log").classList.add("filling");
          const [one, other] = [...document.querySelectorAll(".turn.user .chunk")];
          const width = () => getComputedStyle(one, "::before").width;
          const seen = [];
          for (const rest of [0.02, 20]) {
            state.chunks.get(one.dataset.chunk).attention = 0.5;
            state.chunks.get(other.dataset.chunk).attention = rest;
            emit("touch", 0);
            await frames();
            const shares = [[one.dataset.chunk, 0.04], [other.dataset.chunk, rest / 25]];
            paintAttention({ tokens: [], chunks: shares });
            seen.push([width(), getComputedStyle(other, "::before").width, one.style.getPropertyValue("--attention")]);
          }
          return seen;
        }"""
    )
    (one, least, ring), (same, most, same_ring) = drawn
    assert (one, ring) == (same, same_ring) and ring == "0.20", drawn
    assert (least, most) == ("1px", "4px"), drawn
