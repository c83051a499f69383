"""The page, in a real browser, on the real program with the real small model."""

import contextlib
import re
import signal
import threading
import urllib.request

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect

from conftest import SHOTS, Server, console_error

LONG = 120_000


@pytest.fixture
def open_page(browser, small):
    """Opens pages and fails the test on every console error."""
    contexts, errors = [], []

    def open_new_page(path="/#main", may_fail=False, **more):
        context = browser.new_context(**{"color_scheme": "dark", "viewport": {"width": 1280, "height": 800}, **more})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(30_000)
        if not may_fail:
            page.on(
                "console",
                lambda message: (
                    errors.append(console_error(message))
                    if message.type == "error" and "422" not in message.text
                    else None
                ),
            )
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(small.url + path)
        return page

    yield open_new_page
    for context in contexts:
        context.close()
    assert not errors, errors


@contextlib.contextmanager
def answered(page):
    """Waits until the page has received the end of an answer, also of a very short one."""
    page.evaluate(
        """async (longest) => {
      const [{ on }, { state }] = await Promise.all([import("/js/bus.js"), import("/js/state.js")]);
      const before = state.snapshot?.last_event ?? 0;
      window.answered = new Promise((resolve, reject) => {
        on("event", (event) => { if (event.type === "done") resolve(); });
        on("state", () => { if (!state.running && state.snapshot.last_event > before) resolve(); });
        setTimeout(() => reject(new Error("the answer did not complete")), longest);
      });
    }""",
        LONG,
    )
    yield
    page.evaluate("() => window.answered")
    expect(page.locator("#stop")).to_be_hidden()


def say(page, text):
    with answered(page):
        page.fill("#message", text)
        page.press("#message", "Enter")
    expect(page.locator("#message")).to_have_value("")


def shot(page, name):
    SHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SHOTS / f"{name}.png")


def chunk(page, text):
    return page.locator(".chunk", has_text=text).first


def turn(page, text):
    """The message with a text."""
    return page.locator(".turn", has_text=text).first


GHOST = re.compile(r"\bghost\b")
TABS = ("graveyard", "search", "stats", "past", "notes", "captures", "memories")


def open_panel(page, name):
    """Opens a view of the inspector, the settings or the help."""
    if name not in TABS:
        if page.locator("#open-sidebar").is_visible():
            page.click("#open-sidebar")
        page.click(f"#sidebar [data-panel={name}]")
        return
    if page.locator("#panel [role=tablist]").count() == 0:
        page.click("#inspect")
    page.click(f"#panel [data-panel={name}]")


def choose(page, message, item):
    """Chooses an item of the menu of a message."""
    message.hover()
    message.get_by_role("button", name="More").last.click()
    page.get_by_role("menuitem", name=item, exact=False).first.click()


# The story of crates/cli/tests/it/gun.rs.
GUN = "Good morning! I am cleaning the old hunting lodge today, and my gun is called Betsy."
FILLERS = (
    "It rains in Lisbon today, so the children stay at home and build a castle of chairs, blankets and old boxes.",
    "My sister plays the cello in the orchestra of our town; next week they will play a piece by Dvorak.",
    "The train to Rome is late again, and the people on the platform drink coffee and read their newspapers.",
    "I had soup for lunch, with bread, a little cheese from the market and a glass of water.",
    "The garden needs water: the tomatoes hang their leaves, and the roses have lost their petals in the heat.",
    "Our neighbour paints boats in the harbour; blue ones, green ones, and one that is as red as a poppy.",
    "The bakery on the corner closes at six, but on Fridays it stays open for the people who come from work.",
    "I read a book about bees, how they dance to tell the others where the flowers are, and how they keep warm.",
    "The clock in the hall is slow, it has lost five minutes since yesterday and nobody wants to wind it.",
    "The cat sleeps on the sofa all day long, and in the evening she walks along the wall of the garden to look for mice.",
)
LEFT = {
    "fifo": "Left because the context was full and it was the oldest",
    # A question leaves with the answer that has the least attention.
    "brightness": "Left (because the context was full and the model paid it least attention|"
    "together with the message that it belongs to, because the context was full)",
}


@pytest.mark.parametrize("small", ["brightness", "fifo"], indirect=True)
def test_paragraph_is_pruned_and_resurrected_at_its_position(open_page, small, request):
    page = open_page()
    left = LEFT[request.node.callspec.params["small"]]
    expect(page.locator(".empty")).to_be_visible()
    say(page, GUN)
    first = chunk(page, "called Betsy")
    expect(first).to_be_visible()
    shades = {}

    def record_shades():
        for name, shade in page.locator(".chunk").evaluate_all(
            "all => all.map((node) => [node.dataset.chunk, node.style.getPropertyValue('--bar')])"
        ):
            shades.setdefault(name, set()).add(shade)

    record_shades()
    for n in range(30):
        say(page, FILLERS[n % len(FILLERS)])
        record_shades()
        if page.locator(".chunk.ghost", has_text="called Betsy").count():
            break
    # It stays at its place, faint, and says why on demand.
    expect(first).to_have_class(GHOST)
    assert page.locator(".turn").first.get_attribute("data-turn") == "0"
    first.hover()
    first.get_by_role("button", name="Why").click()
    expect(first.locator(".ghost-reason")).to_have_text(re.compile(f"^{left}"))
    shot(page, "ghosts")
    assert any(len(colours) > 1 for colours in shades.values()), f"shades change: {shades}"
    # The panel gives the reason of the removal.
    open_panel(page, "graveyard")
    expect(page.locator("#pruned-count")).to_have_text(re.compile(r"\([1-9]\d*\)"))
    page.fill("#graveyard-q", "my gun is called")
    row = page.locator("#panel .row", has_text="called Betsy")
    expect(row).to_contain_text(re.compile(left))
    shot(page, "graveyard")
    page.keyboard.press("Escape")
    # The panel shows that the paragraph was in the context after turn 1.
    open_panel(page, "past")
    page.locator("#past-turn").fill("1")
    expect(page.locator("#panel .row", has_text="called Betsy")).to_contain_text("out of context now")
    shot(page, "past")
    page.click("[aria-label='Close the panel']")
    # A question about the paragraph resurrects it at its position, above all later messages.
    page.fill("#message", "What is my gun called?")
    page.press("#message", "Enter")
    page.locator(".chunk.resurrected", has_text="called Betsy").wait_for()
    # The running answer has no turn until its first token.
    turns = page.locator(".turn:not([data-turn=''])").evaluate_all(
        "turns => turns.map((turn) => Number(turn.dataset.turn))"
    )
    assert turns == sorted(turns) and turns[0] == 0, turns
    shot(page, "resurrected")
    expect(page.locator("#stop")).to_be_hidden(timeout=LONG)
    # The answer says what it used, also after a reload, and leads to it.
    page.reload()
    expect(page.locator(".turn.assistant").last).to_be_visible()
    # One element for each chunk, within the message of its turn and role.
    drawn = page.locator("#log .chunk").evaluate_all("""all => all.map((node) => {
      const turn = node.closest(".turn");
      return [node.dataset.chunk, turn.dataset.turn, turn.classList.contains("user") ? "u" : "a"];
    })""")
    _, transcript = small.halo("GET", "/conversations/main/transcript?limit=100")
    stored = [chunk["id"] for message in transcript["messages"] for chunk in message["chunks"]]
    assert drawn == [[name, name[1:].split(".")[0], name[0]] for name in stored], drawn
    chip = page.locator(".turn.assistant").last.locator(".chip", has_text="Good morning! I am cleaning")
    expect(chip).to_be_visible()
    chip.click()
    expect(page.locator(".chunk.found", has_text="called Betsy")).to_be_in_viewport()
    detail = small.halo("GET", "/conversations/main/chunks/u0.0")[1]
    assert "resurrected" in [entry["action"] for entry in detail["history"]]


@pytest.mark.parametrize("preset", ["halo", "halo_weave"])
def test_paragraph_pruned_by_brightness_comes_back(browser, tmp_path, preset):
    window = {"halo": 400, "halo_weave": 500}[preset]
    settings = (f"preset={preset}", f"context.max_tokens={window}", "generation.max_tokens=16")
    server = Server(tmp_path, *settings, "generation.temperature=0").start()
    server.say("main", GUN)
    for n in range(21):
        server.say("main", FILLERS[n % len(FILLERS)])
    before = server.halo("GET", "/conversations/main/chunks/u0.0")[1]
    assert before["history"][-1]["action"] == "pruned", before["history"]
    page = browser.new_context().new_page()
    page.goto(server.url + "/#main")
    expect(chunk(page, "called Betsy")).to_have_class(GHOST)
    page.fill("#message", "What is my gun called?")
    page.press("#message", "Enter")
    page.locator(".chunk.resurrected", has_text="called Betsy").wait_for(timeout=LONG)
    # The running answer has no turn until its first token.
    turns = page.locator(".turn:not([data-turn=''])").evaluate_all(
        "turns => turns.map((turn) => Number(turn.dataset.turn))"
    )
    assert turns == sorted(turns) and turns[0] == 0, turns
    expect(page.locator("#stop")).to_be_hidden(timeout=LONG)
    history = server.halo("GET", "/conversations/main/chunks/u0.0")[1]["history"]
    assert any("found by search, hit 1" in entry["reason"] for entry in history), history
    page.context.close()
    server.stop()


def test_manual_edits(open_page, small):
    page = open_page()
    say(page, "The red fox is called Rufus.")
    fox = chunk(page, "Rufus")
    choose(page, turn(page, "Rufus"), "Pin")
    expect(fox.locator(".mark")).to_be_visible()
    fox.focus()
    page.keyboard.press("p")
    expect(fox.locator(".mark")).to_have_count(0)
    expect(fox).to_be_focused()
    # Removed by a key, and brought back by a click. The focus stays at the paragraph.
    page.keyboard.press("x")
    expect(fox).to_have_class(GHOST)
    expect(fox).to_be_focused()
    open_panel(page, "graveyard")
    page.locator("#panel .row", has_text="Rufus").get_by_role("button", name="Bring back").click()
    expect(fox.locator(".mark")).to_be_visible()
    assert page.locator(".chunk").first.text_content().find("Rufus") >= 0, "at its own position"
    page.keyboard.press("Escape")
    # It is stored so: in the context, pinned, and every token with full brightness.
    revived = small.halo("GET", "/conversations/main/chunks/u0.0")[1]
    assert revived["chunk"]["live"] and revived["chunk"]["pinned"], revived["chunk"]
    assert {token["brightness"] for token in revived["tokens"]} == {10_000}, revived["tokens"]
    page.reload()
    expect(fox.locator(".mark")).to_be_visible()
    expect(fox).not_to_have_class(GHOST)
    # Deleted after a confirmation, and undone.
    fox.focus()
    page.keyboard.press("Delete")
    page.locator("dialog").get_by_role("button", name="Delete").click()
    expect(fox).to_have_count(0)
    page.locator(".toast", has_text="Deleted").get_by_role("button", name="Undo").click()
    expect(fox).to_be_visible()
    # Token by token.
    fox.focus()
    page.keyboard.press("Enter")
    expect(page.locator("#panel .token").first).to_have_attribute("title", re.compile("brightness"))
    expect(page.locator("#panel")).to_contain_text("History")
    shot(page, "chunk")
    # The attention of a token of the answer.
    page.locator(".turn.assistant .chunk").first.focus()
    page.keyboard.press("Enter")
    page.locator("#panel .token").nth(2).click()
    expect(page.locator("#panel svg.chart")).to_have_attribute(
        "aria-label", re.compile("attention of .*: system prompt")
    )
    expect(page.locator("#panel")).to_contain_text("Largest shares")
    shot(page, "attention")


def test_paragraphs_are_merged(open_page, small):
    page = open_page()
    say(
        page,
        "First of all there was a garden with a very old wall.\n\nSecond there was a river that ran behind it for many miles.",
    )
    paragraphs = page.locator(".turn.user .chunk")
    expect(paragraphs).to_have_count(2)
    paragraphs.nth(1).focus()
    page.keyboard.press("m")
    expect(paragraphs).to_have_count(1)
    page.locator(".toast", has_text="Merged").get_by_role("button", name="Undo").click()
    expect(paragraphs).to_have_count(2)


def test_tool_results_are_marked(browser, tmp_path, remote_model):
    call = ["I note it. ", "<tool>", """jq '.name = "Rufus"' notes.json > output""", "</tool>"]
    server = Server(
        tmp_path, "tools.enabled=true", "recall.mode=lexical", model=remote_model([call, [" Noted."]])
    ).start()
    page = browser.new_page(color_scheme="dark")
    try:
        page.goto(server.url + "/#main")
        say(page, "The fox is called Rufus.")
        result = page.locator(".chunk .tool")
        expect(result).to_contain_text("✓")
        assert result.evaluate("node => getComputedStyle(node).color") == "rgb(78, 205, 196)"
        expect(page.locator(".turn.assistant")).to_contain_text("Noted.")
        expect(page.locator("#summary")).to_contain_text("no attention data")
        shot(page, "tool")
        page.reload()
        expect(result).to_contain_text("✓")
        ground = result.evaluate("node => getComputedStyle(node).backgroundColor")
        assert re.search(r"/ 0\.08\)$", ground), ground
        page.emulate_media(color_scheme="light")
        assert result.evaluate("node => getComputedStyle(node).color") == "rgb(3, 98, 104)"
        exported = urllib.request.urlopen(f"{server.url}/api/halo/v1/conversations/main/export").read()
        status, imported = server.call("POST", "/api/halo/v1/import?file_name=x.jsonl&name=copy", exported)
        assert status == 201, imported
        page.goto(f"{server.url}/#copy")
        expect(result).to_contain_text("✓")
        page.goto(f"{server.url}/#main")
        open_panel(page, "notes")
        expect(page.locator("#note")).to_have_value(re.compile("Rufus"))
    finally:
        page.close()
        server.stop()


def test_shade_colours(open_page):
    page = open_page()
    expect(page.locator("#composer")).to_be_visible()
    shades = page.evaluate("""async () => {
      const { shadeStyle, normalize } = await import("/js/shade.js");
      const theme = (light) => [0, 0.5, 0.79, 0.8, 0.9, 1].map((t) => shadeStyle(t, light));
      return { dark: theme(false), light: theme(true),
               places: [normalize(3, 1, 5), normalize(1, 1, 5), normalize(10000, 9000, 10000), normalize(7, 7, 7)] };
    }""")
    for theme, colour in (("dark", "#ffffff"), ("light", "#1c1500")):
        styles = shades[theme]
        bars = [styles[n]["bar"] for n in (0, 1, 5)]
        assert bars == ["rgba(100,90,40,1)", "rgba(200,180,80,1)", "rgba(255,220,100,1)"], theme
        assert [style["ground"] for style in styles[:3]] == ["transparent"] * 3, theme
        grounds = [style["ground"] for style in styles[3:]]
        assert grounds == ["rgba(255,200,50,0.2)", "rgba(255,200,50,0.35)", "rgba(255,200,50,0.5)"], theme
        assert [style["colour"] for style in styles[3:]] == [colour] * 3, theme
    assert shades["places"] == [0.5, 0, 1, 0.5], "relative to the others"


SHADES = """async () => {
  const { state } = await import("/js/state.js");
  const { emit, on } = await import("/js/bus.js");
  document.getElementById("log").classList.add("filling");
  const frames = () => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
  const [chunk] = state.chunks.values();
  const node = document.querySelector(`[data-chunk="${chunk.id}"]`);
  const bars = [];
  for (const attention of [0.02, 0.02 * Math.sqrt(1000), 20]) {
    Object.assign(chunk, { attention, relative_brightness: 0.25 });
    emit("touch", chunk.turn);
    await frames();
    const { backgroundColor, width } = getComputedStyle(node, "::before");
    bars.push([backgroundColor, width]);
  }
  const words = [1, 2, 3, 4, 5].map((level) => {
    const { color, backgroundColor } = getComputedStyle(node, `::highlight(bright-${level})`);
    return [color, backgroundColor];
  });
  return { bars, words, title: node.title, plain: getComputedStyle(node).color };
}"""


def luminance(colour):
    """The relative luminance of a computed colour."""
    numbers = [float(number) for number in re.findall(r"[\d.]+", colour.replace("srgb", ""))[:3]]
    parts = numbers if colour.startswith("color(") else [number / 255 for number in numbers]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_drawn_shades_in_both_themes(browser, small):
    small.say("main", "The gun on the wall is called Betsy.")
    for theme, text in (("dark", "rgb(255, 255, 255)"), ("light", "rgb(28, 21, 0)")):
        page = browser.new_page(color_scheme=theme)
        page.goto(f"{small.url}/#main")
        expect(page.locator(".chunk").first).to_be_visible()
        drawn = page.evaluate(SHADES)
        colours, widths = zip(*drawn["bars"], strict=True)
        assert widths == ("1px", "2.5px", "4px"), theme
        if theme == "dark":
            assert colours == ("rgb(100, 90, 40)", "rgb(200, 180, 80)", "rgb(255, 220, 100)")
        else:
            # Gold on white: the brighter, the darker the bar, and even the dimmest is visible.
            levels = [luminance(colour) for colour in colours]
            assert levels == sorted(levels, reverse=True) and levels[0] < 0.75 and levels[2] < 0.2, colours
        assert [colour for colour, _ in drawn["words"]] == [text] * 5, theme
        grounds = [ground for _, ground in drawn["words"]]
        alphas = [float(ground.removesuffix(")").split(",")[-1]) for ground in grounds]
        assert alphas == pytest.approx([0.2, 0.275, 0.35, 0.425, 0.5], abs=0.003), theme
        assert all(ground.startswith("rgba(255, 200, 50, ") for ground in grounds), theme
        assert "brightness in this context: 25 of 100" in drawn["title"]
        page.close()


def test_bars_are_shown_once_something_is_pruned(browser, small):
    small.say("bars", "The gun on the wall is called Betsy.")
    small.say("bars", "Where is it?")
    page = browser.new_page()
    page.goto(f"{small.url}/#bars")
    bar = "() => getComputedStyle(document.querySelector('.chunk:not(.ghost)'), '::before').opacity"
    expect(page.locator(".turn.assistant .chunk")).to_have_count(2)
    assert page.evaluate(bar) == "0"
    assert small.halo("POST", "/conversations/bars/edits", {"edit": "prune", "chunks": ["u0.0"]})[0] == 200
    expect(page.locator(".chunk.ghost").first).to_be_visible()
    page.wait_for_function(f"() => ({bar})() === '1'")
    page.close()


def test_unchanged_paragraphs_are_not_drawn_again(open_page, small):
    page = open_page()
    say(page, "The gun on the wall is called Betsy.")
    counts = page.evaluate("""async () => {
      const { state } = await import("/js/state.js");
      const { emit, on } = await import("/js/bus.js");
      const frames = () => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
      const changed = new Set();
      let mutations = 0, drawn = 0;
      // What the end of the answer has changed is drawn first, however long that takes.
      await new Promise((done) => {
        let timer = setTimeout(done, 500);
        const settled = new MutationObserver(() => { clearTimeout(timer); timer = setTimeout(done, 500); });
        settled.observe(document.getElementById("log"), { subtree: true, childList: true, attributes: true });
      });
      const observer = new MutationObserver((records) => {
        mutations += records.length;
        for (const { target } of records) changed.add(target.dataset?.chunk ?? target.nodeName);
      });
      observer.observe(document.getElementById("log"),
        { subtree: true, childList: true, attributes: true, attributeFilter: ["style", "class", "title"] });
      on("drawn", () => { drawn += 1; });
      const turns = [...state.chunks.values()].map((chunk) => chunk.turn);
      for (let n = 0; n < 50; n += 1) for (const turn of turns) emit("touch", turn);
      await frames();
      const unchanged = mutations;
      const [chunk] = state.chunks.values();
      chunk.attention = 19;
      emit("touch", chunk.turn);
      await frames();
      return { unchanged, drawn, changed: [...changed], chunk: chunk.id };
    }""")
    assert counts["unchanged"] == 0, counts
    assert counts["drawn"] <= 3, f"drawn once a frame, not once an event: {counts}"
    assert counts["changed"] == [counts["chunk"]], counts


HIGHLIGHTS = """(name) => Object.fromEntries([1, 2, 3, 4, 5].map((level) => [level,
  [...(CSS.highlights.get(`${name}-${level}`) ?? [])].map((range) =>
    [range.startContainer.parentElement.closest(".chunk").dataset.chunk,
     range.startContainer.data.slice(range.startOffset, range.endOffset)])]))"""


def test_light_moves_while_an_answer_is_generated(open_page):
    page = open_page()
    say(page, "My sister Anna keeps bees in Lyon, and my brother Tom repairs old clocks in Turin.")
    page.evaluate(f"""async () => {{
      const {{ on }} = await import("/js/bus.js");
      const highlights = {HIGHLIGHTS};
      window.lights = [];
      on("event", (event) => {{
        if (event.type === "attention")
          requestAnimationFrame(() => requestAnimationFrame(() => window.lights.push(highlights("attended"))));
      }});
    }}""")
    with answered(page):
        page.fill("#message", "Tell me a long story about Anna and her bees.")
        page.press("#message", "Enter")
        for number in (1, 2, 3):
            page.wait_for_function(f"() => window.lights.length >= {number * 2}", timeout=LONG)
            shot(page, f"light-{number}")
    lights = page.evaluate("() => window.lights")
    drawn = [{tuple(token) for level in light.values() for token in level} for light in lights]
    assert len({frozenset(tokens) for tokens in drawn if tokens}) > 2, "the light moves"
    text = page.evaluate("""() => Object.fromEntries([...document.querySelectorAll(".chunk")].map((node) =>
      [node.dataset.chunk, node.textContent]))""")
    for tokens in drawn:
        assert all(token in text[chunk_id] for chunk_id, token in tokens), tokens
        assert not any(chunk_id.startswith("a3.") for chunk_id, _ in tokens), "only earlier messages are lit"
    assert any(light["5"] for light in lights), "the strongest token has the highest level"
    # The light goes out with the end of the answer.
    assert not any(page.evaluate(HIGHLIGHTS, "attended").values())
    assert page.locator(".chunk[style*='--attention']").count() == 0


def test_brightest_tokens_are_highlighted_in_the_chat(open_page, small):
    page = open_page()
    say(page, "My sister Anna keeps bees in Lyon.")
    say(page, "Where does Anna keep her bees?")
    say(page, "And what is her brother doing?")
    assert not any(page.evaluate(HIGHLIGHTS, "bright").values())
    page.click("#brightest")
    expect(page.locator("#brightest")).to_have_attribute("aria-pressed", "true")
    page.wait_for_function(f"() => Object.values(({HIGHLIGHTS})('bright')).some((level) => level.length)")
    shot(page, "brightest-dark")
    drawn = {tuple(token) for level in page.evaluate(HIGHLIGHTS, "bright").values() for token in level}
    _, window = small.halo("GET", "/conversations/main/brightness")
    _, conversation = small.halo("GET", "/conversations/main")
    texts = {chunk["id"]: chunk["text"].encode("utf-16-le") for chunk in conversation["chunks"]}
    wanted = {
        (row["chunk"], texts[row["chunk"]][2 * start : 2 * end].decode("utf-16-le"))
        for row in window["chunks"]
        for start, end, _ in row["tokens"]
    }
    # White space at the end of a line is not drawn.
    stripped = lambda tokens: {(chunk_id, token.strip()) for chunk_id, token in tokens}
    assert stripped(drawn) == stripped(wanted), "the tokens that the server lists"
    page.reload()
    expect(page.locator("#brightest")).to_have_attribute("aria-pressed", "true")
    page.click("#brightest")
    page.wait_for_function(f"() => !Object.values(({HIGHLIGHTS})('bright')).some((level) => level.length)")


def test_header_names_the_model(open_page):
    page = open_page()
    expect(page.locator("#model")).to_contain_text("SmolLM2")


def test_console_api(open_page, small):
    page = open_page()
    say(page, "My sister Anna keeps bees in Lyon.")
    stats = page.evaluate("() => halo.getStats()")
    assert stats == small.halo("GET", "/conversations/main/stats")[1]
    assert stats["live_tokens"] > 0 and stats["dead_tokens"] == 0 and stats["next_turn"] == 2
    assert stats["next_position"] == stats["live_tokens"]
    assert page.evaluate("() => [halo.isChunkAlive('u0.0'), halo.isChunkAlive('u9.0')]") == [True, False]
    assert "Anna keeps bees" in page.evaluate("() => halo.getSentences()")[0]["text"]
    assert page.evaluate("() => halo.search('bees')")[0]["chunk"]["id"] == "u0.0"
    assert page.evaluate("() => halo.checkPruning()")["limit"] == 400
    exported = page.evaluate("() => halo.exportState()")
    assert exported["conversation"]["chunks"][0]["id"] == "u0.0" and exported["pruned"] == []
    assert [chat["name"] for chat in page.evaluate("() => halo.getMetadata()")] == ["main"]
    assert set(page.evaluate("() => Object.keys(halo.help())")) == set(
        page.evaluate("() => Object.keys(halo).filter((name) => name !== 'help')")
    ) - {"_checkPruning", "store", "semanticIndex"}
    # The names of the first Halo.
    assert page.evaluate("() => halo._checkPruning()")["limit"] == 400
    assert page.evaluate("() => halo.store.getStats()") == {
        "liveTokens": stats["live_tokens"],
        "deadTokens": 0,
        "semanticEntries": stats["semantic_entries"],
        "nextPosition": stats["next_position"],
        "nextTurn": 2,
    }
    assert page.evaluate("() => halo.semanticIndex.getStats()") == {"entries": stats["semantic_entries"]}
    small.say("other", "Hello there.")
    page.evaluate("() => halo.clearAll('other')")
    assert small.halo("GET", "/conversations/other")[1]["chunks"] == []
    assert page.evaluate("() => { try { halo.clearAll(); } catch (error) { return error.message; } }")


def test_slider_sets_a_number(open_page):
    page = open_page()
    open_panel(page, "settings")
    page.fill("#settings-q", "generation.top_p")
    slider = page.get_by_role("slider", name=re.compile("^Top-p,"))
    slider.fill("0.5")
    expect(page.locator(".toast").last).to_contain_text("Top-p is now 0.5")
    expect(page.locator("[id='set-generation.top_p']")).to_have_value("0.5")
    # A wide range is logarithmic; its end is the largest number.
    page.fill("#settings-q", "trace.interval")
    page.get_by_role("slider", name=re.compile("^Interval,")).fill("1")
    expect(page.locator("[id='set-trace.interval']")).to_have_value("1000000000")


def test_settings_survive_a_reload(open_page):
    page = open_page()
    open_panel(page, "settings")
    page.fill("#settings-q", "temperature")
    box = page.locator("[id='set-generation.temperature']")
    box.fill("99")
    box.press("Enter")
    expect(page.locator("#panel .error:not(:empty)")).to_contain_text("generation.temperature")
    box.fill("0.3")
    box.press("Enter")
    expect(page.locator(".toast")).to_contain_text("Temperature is now 0.3")
    page.fill("#settings-q", "")
    page.select_option("#theme", "light")
    shot(page, "settings")
    page.reload()
    open_panel(page, "settings")
    expect(page.locator("[id='set-generation.temperature']")).to_have_value("0.3")
    assert page.evaluate("() => document.documentElement.dataset.theme") == "light"


def test_page_reconnects(open_page, small):
    page = open_page(may_fail=True)
    say(page, "Hello there.")
    small.stop(signal.SIGKILL)
    expect(page.locator("#offline")).to_be_visible()
    page.fill("#message", "I was typing this.")
    page.press("#message", "Enter")
    expect(page.locator(".toast.error")).to_contain_text("Not sent")
    expect(page.locator("#message")).to_have_value("I was typing this.")
    shot(page, "away")
    small.start()
    expect(page.locator("#offline")).to_be_hidden(timeout=30_000)
    expect(chunk(page, "Hello there.")).to_be_visible()
    page.press("#message", "Enter")
    expect(chunk(page, "I was typing this.")).to_be_visible(timeout=LONG)
    expect(page.locator("#stop")).to_be_hidden(timeout=LONG)


def test_two_pages_stay_in_sync(open_page):
    one, two = open_page(), open_page()
    say(one, "Can you both see this?")
    expect(chunk(two, "Can you both see this?")).to_be_visible()
    expect(two.locator(".turn")).to_have_count(2)
    fox = chunk(two, "Can you both")
    fox.focus()
    two.keyboard.press("p")
    expect(chunk(one, "Can you both").locator(".mark")).to_be_visible()
    assert one.locator("#log").inner_text().replace("\n", "") == two.locator("#log").inner_text().replace("\n", "")


def test_edit_and_regenerate(open_page):
    page = open_page()
    say(page, "Say one.")
    # The arrow key does not start editing. The button does, and shows a banner.
    page.press("#message", "ArrowUp")
    expect(page.locator("#editing")).to_be_hidden()
    page.fill("#message", "a draft")
    question = page.locator(".turn.user").last
    question.hover()
    question.get_by_role("button", name="Edit").click()
    expect(page.locator("#message")).to_have_value("Say one.")
    expect(page.locator("#editing")).to_contain_text("Editing your last message")
    expect(page.locator("#send")).to_have_text("Replace")
    page.fill("#message", "")
    page.wait_for_timeout(7000)
    expect(page.locator("#editing")).to_be_visible()
    shot(page, "editing")
    # After a cancelled edit the draft is restored, and the next message is a new message.
    page.press("#message", "Escape")
    expect(page.locator("#editing")).to_be_hidden()
    expect(page.locator("#message")).to_have_value("a draft")
    say(page, "Say more.")
    expect(page.locator(".turn.user")).to_have_count(2)
    question.hover()
    question.get_by_role("button", name="Edit").click()
    say(page, "Say two.")
    expect(page.locator("#editing")).to_be_hidden()
    expect(page.locator(".turn.user")).to_have_count(2)
    expect(page.locator(".turn.user").last).to_contain_text("Say two.")
    # The earlier version is a variant that can be chosen.
    variants = page.locator(".turn.last .variants")
    expect(variants).to_contain_text("2/2")
    page.get_by_role("button", name="Previous version").click()
    expect(page.locator(".turn.user").last).to_contain_text("Say more.")
    expect(variants).to_contain_text("1/2")
    with answered(page):
        page.locator(".turn.last").get_by_role("button", name="Regenerate").click()
    expect(page.locator(".turn")).to_have_count(4)
    expect(page.locator(".turn").last).to_have_class(re.compile(r"\bassistant\b"))
    expect(variants).to_contain_text("2/2")
    shot(page, "variants")
    # The first answer is kept and can be chosen again.
    second = page.locator(".turn.last .chunk").first.text_content()
    page.get_by_role("button", name="Previous answer").click()
    expect(variants).to_contain_text("1/2")
    page.get_by_role("button", name="Next answer").click()
    expect(page.locator(".turn.last .chunk").first).to_have_text(second)


def test_edit_of_an_earlier_message_makes_a_branch(open_page, small):
    page = open_page()
    for text in ("The red fox is called Rufus.", "And the blue one?", "And the green one?"):
        say(page, text)
    question = page.locator(".turn.user", has_text="the blue one")
    question.hover()
    question.get_by_role("button", name="Edit").click()
    expect(page.locator("#editing")).to_contain_text("makes a branch")
    say(page, "And the black one?")
    expect(page.locator("#title")).to_have_text("main · branch")
    expect(page.locator(".turn.user")).to_have_count(2)
    expect(page.locator(".turn.user").last).to_contain_text("the black one")
    original = small.halo("GET", "/conversations/main/transcript")[1]
    assert original["total"] == 6, "the chat stays as it is"


def test_branch_opens(open_page):
    page = open_page()
    say(page, "The red fox is called Rufus.")
    say(page, "And the green one?")
    first = page.locator(".turn.assistant").first
    first.hover()
    first.get_by_role("button", name="Branch").click()
    expect(page.locator(".chat-row.current")).to_contain_text("main · branch")
    expect(chunk(page, "Rufus")).to_be_visible()
    expect(page.locator(".turn")).to_have_count(2)
    say(page, "And the blue one?")
    expect(page.locator(".turn")).to_have_count(4)
    page.locator("#chats").get_by_role("link", name="main", exact=True).click()
    expect(page.locator(".turn.user").last).to_contain_text("the green one")


def test_load_error_is_not_drawn_as_an_empty_chat(open_page):
    page = open_page(may_fail=True)
    say(page, "The red fox is called Rufus.")
    page.route(
        "**/api/halo/v1/conversations/main/state",
        lambda route: route.fulfill(status=503, json={"error": "another Halo is using it"}),
    )
    page.reload()
    expect(page.locator(".load-error")).to_contain_text("another Halo is using it")
    expect(page.locator(".empty")).to_have_count(0)
    shot(page, "trouble")
    page.unroute("**/api/halo/v1/conversations/main/state")
    page.get_by_role("button", name="Try again").click()
    expect(chunk(page, "Rufus")).to_be_visible()
    expect(page.locator(".load-error")).to_have_count(0)


def test_delete_lists_dependents_and_can_be_undone(open_page):
    page = open_page()
    say(page, "The red fox is called Rufus.")
    answer = page.locator(".turn.assistant .chunk").first.text_content()
    chunk(page, "Rufus").focus()
    page.keyboard.press("Delete")
    expect(page.locator("dialog .dependents")).to_contain_text(f"Model: {answer.strip()[:20]}")
    shot(page, "delete")
    page.locator("dialog").get_by_role("button", name="Delete").click()
    expect(page.locator(".chunk")).to_have_count(0)
    expect(page.locator(".empty")).to_contain_text("not lost")
    # The offer to undo stays; after a reload the list has the paragraph.
    page.wait_for_timeout(7000)
    expect(page.locator(".toast", has_text="Deleted").get_by_role("button", name="Undo")).to_be_visible()
    page.reload()
    open_panel(page, "graveyard")
    expect(page.locator("#panel section[aria-label=Deleted]")).to_contain_text("deleted by the user")
    shot(page, "deleted")
    page.locator("#panel .row", has_text="Rufus").get_by_role("button", name="Restore").click()
    expect(chunk(page, "Rufus")).to_be_visible()
    expect(page.locator(".turn")).to_have_count(2)


def test_tap_on_a_paragraph_changes_nothing(open_page, small):
    page = open_page(viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    page.fill("#message", "The red fox is called Rufus.")
    # On a touch screen Enter begins a new line.
    page.press("#message", "Enter")
    assert page.input_value("#message").endswith("\n")
    with answered(page):
        page.locator("#send").tap()
    before = small.halo("GET", "/conversations/main")[1]["chunks"]
    fox = chunk(page, "Rufus")
    for _ in range(3):
        box = fox.bounding_box()
        page.touchscreen.tap(box["x"] + box["width"] / 2, box["y"] + min(box["height"], 30) / 2)
        page.wait_for_timeout(300)
    assert small.halo("GET", "/conversations/main")[1]["chunks"] == before
    # Only the menu is under the finger.
    message = turn(page, "Rufus")
    expect(message.get_by_role("button", name="Branch")).to_be_hidden()
    message.get_by_role("button", name="More").tap()
    shot(page, "phone-menu")
    page.get_by_role("menuitem", name="Remove from context").tap()
    expect(fox).to_have_class(GHOST)


def test_queued_message_is_sent_once(browser, tmp_path, remote_model):
    looked = threading.Event()
    answer = [*(f" word{n}" for n in range(30)), looked, " last"]
    server = Server(tmp_path, "recall.mode=lexical", model=remote_model([answer])).start()
    page = browser.new_page()
    page.goto(server.url + "/#main")
    page.fill("#message", "The first one.")
    page.press("#message", "Enter")
    expect(page.locator("#stop")).to_be_visible()
    page.fill("#message", "The second one.")
    page.press("#message", "Enter")
    expect(page.locator("#queue li", has_text="Queued")).to_contain_text("The second one.")
    page.reload()
    expect(page.locator("#queue li")).to_contain_text("The second one.")
    expect(page.locator("#message")).to_have_value("")
    looked.set()
    expect(page.locator(".turn.user", has_text="The second one.")).to_have_count(1, timeout=30_000)
    expect(page.locator("#stop")).to_be_hidden(timeout=30_000)
    user_texts = [
        chunk["text"].strip()
        for chunk in server.halo("GET", "/conversations/main")[1]["chunks"]
        if chunk["role"] == "user"
    ]
    assert user_texts == ["The first one.", "The second one."]
    server.stop()


def test_invalid_settings_are_rejected(open_page):
    page = open_page()
    open_panel(page, "settings")
    page.fill("#settings-q", "memory.delay")
    page.fill("[id='set-memory.delay']", "nonsense")
    page.press("[id='set-memory.delay']", "Enter")
    expect(page.locator("#panel .row", has_text="memory.delay").locator("[role=alert]")).to_contain_text(
        "must be a whole number"
    )


def test_settings_of_the_server_are_read_only(open_page):
    page = open_page()
    open_panel(page, "settings")
    for key in ("server.listen", "server.key", "rooms.prompts"):
        page.fill("#settings-q", key)
        expect(page.locator(f"[id='set-{key}']")).to_be_disabled()
        row = page.locator("#panel .row").filter(has=page.locator(f"[id='set-{key}']"))
        expect(row).to_contain_text("Read-only here: it decides who can reach the server")


def test_attention_recording_is_drawn(open_page):
    page = open_page()
    say(page, "The red fox is called Rufus.")
    open_panel(page, "captures")
    page.check("#recording")
    expect(page.locator(".toast", has_text="recorded from now on")).to_be_visible()
    say(page, "What is the fox called?")
    page.locator("#panel .row", has_text="message 4").get_by_role("button", name="Open").click()
    picture = page.locator("#panel canvas")
    expect(picture).to_be_visible()
    picture.focus()
    page.keyboard.press("ArrowDown")
    expect(page.locator("#panel .row", has_text="token by token").locator("[role=status]")).to_contain_text(
        "% of its attention on u0.0: The red fox is called Rufus."
    )
    shot(page, "captures")
    page.reload()
    open_panel(page, "captures")
    expect(page.locator("#recording")).to_be_checked()


def test_attention_distribution_is_drawn(open_page, small):
    page = open_page()
    say(page, "The red fox is called Rufus.")
    open_panel(page, "stats")
    page.wait_for_selector("#attention-histogram")
    bins = small.halo("GET", "/conversations/main/turns")[1][-1]["figures"]["attention"][-1]["histogram"]
    assert len(bins) == 16 and sum(bins) > 20, bins
    drawn = page.get_attribute("#attention-histogram", "aria-label")
    assert drawn == f"tokens by attention: {', '.join(map(str, bins))}"
    heights = page.eval_on_selector_all("#attention-histogram rect", "all => all.map(one => one.height.baseVal.value)")
    assert [height > 0 for height in heights] == [count > 0 for count in bins], heights


def test_several_chats(open_page):
    page = open_page()
    say(page, "This is the first one.")
    # A new chat in one click; its first message names it.
    page.click("#new-chat")
    expect(page.locator(".empty")).to_be_visible()
    expect(page.locator("#message")).to_be_focused()
    page.fill("#message", "<img src=x onerror=alert(1)> is only text.")
    page.press("#message", "Enter")
    expect(chunk(page, "<img src=x onerror=alert(1)> is only text.")).to_be_visible()
    expect(page.locator("#title")).to_have_text("<img src=x onerror=alert(1)> is only text.")
    expect(page.locator("#stop")).to_be_hidden(timeout=LONG)
    assert page.locator("#log img").count() == 0
    chats = page.locator("#chats")
    chats.get_by_role("link", name="main", exact=True).click()
    expect(chunk(page, "This is the first one.")).to_be_visible()
    page.reload()
    expect(page.locator(".chat-row")).to_have_count(2)
    # Renamed, with every sign.
    row = page.locator(".chat-row", has_text="is only text.")
    row.hover()
    row.get_by_role("button", name="Menu of").click()
    page.get_by_role("menuitem", name="Rename").click()
    page.fill("#ask-input", "a <b>second</b> & one")
    page.locator("dialog").get_by_role("button", name="OK").click()
    expect(page.locator(".chat-row", has_text="a <b>second</b> & one")).to_be_visible()
    # Search over all chats leads to the message.
    page.fill("#chat-search", "ONLY text")
    hit = page.locator(".chat-hit", has_text="is only text")
    expect(hit.locator("mark").first).to_be_visible()
    shot(page, "search-all")
    hit.click()
    expect(page.locator(".chunk.found", has_text="is only text")).to_be_visible()
    page.fill("#chat-search", "nothing has these words")
    expect(page.locator("#chats")).to_contain_text("No matches.")
    page.fill("#chat-search", "")
    expect(page.locator(".chat-row")).to_have_count(2)


def test_chat_is_deleted_and_restored(open_page, small):
    page = open_page()
    say(page, "The red fox is called Rufus.")
    row = page.locator(".chat-row", has_text="main")
    row.get_by_role("button", name="Menu of main").click()
    page.get_by_role("menuitem", name="Delete").click()
    expect(page.locator(".toast", has_text="Deleted “main”").get_by_role("button", name="Undo")).to_be_visible()
    expect(page.locator(".chat-row a")).to_have_count(0)
    assert small.halo("GET", "/conversations/main/transcript")[1]["total"] == 0
    # It is listed, also after a reload.
    page.reload()
    deleted = page.locator(".chat-row[data-deleted=main]")
    expect(deleted).to_be_visible()
    shot(page, "deleted-chat")
    deleted.get_by_role("button", name="Restore").click()
    expect(chunk(page, "Rufus")).to_be_visible()
    expect(page.locator(".chat-row a")).to_have_count(1)


def test_chat_is_exported_and_imported(open_page):
    # The browser logs the conflict of names, which the page resolves.
    page = open_page(may_fail=True)
    say(page, "The red fox is called Rufus.")
    files = {}
    for item, ending in (("Export for Halo", ".jsonl"), ("Export as Markdown", ".md")):
        page.get_by_role("button", name="Menu of main").click()
        with page.expect_download() as download:
            page.get_by_role("menuitem", name=item).click()
        assert download.value.suggested_filename == f"main{ending}"
        files[ending] = download.value.path().read_bytes()
    assert "## You\n\nThe red fox is called Rufus." in files[".md"].decode()
    # Imported by the button, and by dropping a file.
    page.set_input_files(
        "#import-files", files=[{"name": "main.jsonl", "mimeType": "text/plain", "buffer": files[".jsonl"]}]
    )
    expect(page.locator(".toast", has_text="Imported 1 chat")).to_be_visible()
    expect(page.locator("#title")).to_have_text("main 2")
    expect(chunk(page, "Rufus")).to_be_visible()
    page.evaluate(
        """async (text) => {
          const transfer = new DataTransfer();
          transfer.items.add(new File([text], "chat.md", { type: "text/markdown" }));
          window.dispatchEvent(new DragEvent("drop", { dataTransfer: transfer, bubbles: true, cancelable: true }));
        }""",
        files[".md"].decode(),
    )
    expect(page.locator(".chat-row a")).to_have_count(3)
    # A file that is no chat says so, and stores nothing.
    page.set_input_files("#import-files", files=[{"name": "a.zip", "mimeType": "x/y", "buffer": b"PK\x03\x04"}])
    expect(page.locator(".toast.error", has_text="a.zip was not imported")).to_contain_text("zip archive")
    expect(page.locator(".chat-row a")).to_have_count(3)


def test_phone_layout_and_accessibility(open_page):
    for name, more in (
        ("phone", {"viewport": {"width": 390, "height": 844}}),
        ("desk", {}),
        ("light", {"color_scheme": "light"}),
    ):
        page = open_page(**more)
        say(page, f"Hello from a {name}.")
        say(page, "And once more, so that there is something dimmer.")
        assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth"), "no horizontal scrolling"
        shot(page, name)
        for panel in (None, *TABS, "settings", "help"):
            if panel:
                open_panel(page, panel)
                page.wait_for_timeout(300)
            violations = Axe().run(page).response["violations"]
            found = [
                (violation["id"], violation["nodes"][0]["target"], violation["nodes"][0].get("failureSummary"))
                for violation in violations
            ]
            assert not found, (name, panel, found)
            if panel:
                page.click("[aria-label='Close the panel']")


def test_first_load_is_small_and_local(browser, small):
    page = browser.new_context().new_page()
    loaded = []
    page.on(
        "response",
        lambda response: loaded.append(
            (response.url, len(response.body()) if response.status == 200 and "/events" not in response.url else 0)
        ),
    )
    page.goto(small.url)
    expect(page.locator("#composer")).to_be_visible()
    page.wait_for_timeout(500)
    assert all(url.startswith(small.url) for url, _ in loaded), loaded
    assert sum(size for _, size in loaded) < 300_000, loaded


def test_memories_are_placed_where_their_range_was(browser, tmp_path):
    """Formed by the real model, drawn where they are placed, and edited by the user."""
    settings = (
        "memory.enabled=true",
        "memory.range_tokens=150",
        "memory.tokens=48",
        "memory.delay=1",
        "memory.share=0.5",
        "context.max_tokens=420",
        "generation.max_tokens=48",
        "chunk.min_tokens=16",
        "recall.mode=lexical",
        "resurrect.candidates=0",
        "prune.policy=fifo",
    )
    server = Server(tmp_path, *settings).start()
    page = browser.new_page(color_scheme="dark")
    try:
        page.goto(server.url + "/#main")
        open_panel(page, "memories")
        for text in (
            "The gun on the wall is called Betsy.",
            "Tell me something about cheese, please.",
            "Tell me something about trains, please.",
        ):
            say(page, text)
        # The memory is formed while the model is idle.
        row = page.locator("#panel .row[data-memory='1']")
        expect(row).to_contain_text("turns 0 to", timeout=LONG)
        for topic in ("winter", "music", "bread", "ships"):
            say(page, f"Tell me something about {topic}, please.")
        # The memory is placed where its range was, once the range is pruned, and quotes the user's messages.
        placed = page.locator("#log .memory").first
        expect(placed).to_contain_text("The user said: The gun on the wall is called Betsy.", timeout=LONG)
        turns = page.locator("#log article").evaluate_all("all => all.map((node) => Number(node.dataset.turn))")
        assert turns == sorted(turns), turns
        shot(page, "memory")
        row.get_by_role("button", name="Edit").click()
        row.locator("textarea").fill("Betsy is a gun. The door is open.")
        row.get_by_role("button", name="Save").click()
        expect(row).to_contain_text("edited")
        expect(row).to_contain_text("Betsy is a gun.")
        expect(page.locator("#log .memory").first).to_contain_text("Betsy is a gun.", timeout=LONG)
        row.get_by_role("button", name="Pin", exact=False).first.click()
        expect(row).to_contain_text("pinned")
        page.fill("#memory-q", "gun")
        expect(page.locator("#panel .row").first).to_have_attribute("data-memory", "1")
        page.fill("#memory-q", "")
        page.once("dialog", lambda dialog: dialog.accept())
        row.get_by_role("button", name="Delete").click()
        expect(row).to_have_count(0)
        listing = server.halo("GET", "/conversations/main/memories")[1]
        assert listing["enabled"] and all(memory["id"] != 1 for memory in listing["memories"])
        assert server.halo("DELETE", "/conversations/main/memories/1")[0] == 404
        assert server.halo("PUT", "/conversations/main/memories/1", {"pinned": True})[0] == 404
    finally:
        page.close()
        server.stop()


def test_false_premise_is_marked(browser, tmp_path, remote_model):
    server = Server(
        tmp_path, "premise.check=rules", "recall.mode=lexical", model=remote_model([[" Noted."], [" It did not."]])
    ).start()
    page = browser.new_page()
    try:
        page.goto(server.url + "/#main")
        say(page, "The server did not crash yesterday.")
        say(page, "Why did the server crash?")
        expect(page.locator("#log .turn.assistant").last).to_contain_text(
            "無 Your question assumes something that was contradicted: “the server crash”"
        )
        expect(page.locator("#log .turn.assistant").last).to_contain_text("It did not.")
        shot(page, "premise")
        page.reload()
        expect(page.locator("#log .turn.assistant").last).to_contain_text("The server did not crash yesterday.")
    finally:
        page.close()
        server.stop()
