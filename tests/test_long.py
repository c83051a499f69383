"""The page with 30,000 tokens in the context and an answer at 200 tokens per second, and with a chat of 100,000 messages."""

import json
import os
import pathlib
import subprocess

import pytest
from playwright.sync_api import expect

from conftest import HALO, SHOTS, Server
from test_page import shot

TOKENS = 400
ANSWER = [f" word{n}" + (".\n\n" if n % 50 == 49 else "") for n in range(TOKENS)]
PACE = 200  # tokens per second


@pytest.fixture
def long_conversation(tmp_path, remote_model):
    """A server with a conversation of 30,000 live tokens."""
    model = remote_model([ANSWER], 1 / PACE)
    messages = []
    for n in range(280):
        role = "user" if n % 2 == 0 else "assistant"
        parts = [
            f"Paragraph {n}.{m} of what was said long ago, about hills, rivers, trains, and the weather of day {n * 7 + m}, "
            * 2
            for m in range(2)
        ]
        messages.append({"role": role, "content": "\n\n".join(parts)})
    file = tmp_path / "chat.json"
    file.write_text(json.dumps({"messages": messages}))
    data = tmp_path / "data"
    settings = ["--set", "recall.mode=lexical", "--set", "context.max_tokens=0", "--model", model, "--data", str(data)]
    subprocess.run(
        [str(HALO), "import", "--no-index", "-c", "main", *settings, str(file)], check=True, capture_output=True
    )
    server = Server(
        data, "recall.mode=lexical", "context.max_tokens=0", "generation.max_tokens=1000", model=model
    ).start()
    # Reading does not open a conversation. A write does, and opening tokenizes it.
    assert server.halo("PUT", "/conversations/main/notes", {"file": "notes.json", "text": "{}"})[0] == 204
    yield server
    server.stop()


def test_page_draws_an_answer_in_less_time_than_it_takes(browser, tmp_path, remote_model):
    """In a context of 500 tokens, scripts, styles and layout take at most 5 ms for a token, the time that the founding document
    has for everything but the model: so the page keeps up with 200 tokens per second. It is time of a core, whatever else
    runs on the machine."""
    model = remote_model([[" word"] * 470, ANSWER], 1 / PACE)
    server = Server(tmp_path, "recall.mode=lexical", "generation.max_tokens=1000", model=model).start()
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    try:
        assert 450 <= server.say("main", "Say many words.")["live"] <= 550
        page.goto(server.url + "/#main")
        expect(page.locator(".turn.assistant")).to_be_visible(timeout=60_000)
        session = page.context.new_cdp_session(page)
        session.send("Performance.enable", {"timeDomain": "threadTicks"})

        def spent_ms():
            metrics = {metric["name"]: metric["value"] for metric in session.send("Performance.getMetrics")["metrics"]}
            return 1000 * sum(metrics[name] for name in ("ScriptDuration", "RecalcStyleDuration", "LayoutDuration"))

        before = spent_ms()
        page.fill("#message", "Tell me more.")
        page.press("#message", "Enter")
        expect(page.locator(".chunk", has_text="word399")).to_be_visible(timeout=120_000)
        per_token = (spent_ms() - before) / TOKENS
        # The light of one step of attention, as often as the browser draws a frame.
        before = spent_ms()
        page.evaluate(LIGHT)
        light = (spent_ms() - before) / 100
        print(f"{per_token:.2f} ms of a core for a token, {light:.2f} ms for its light")
        # Where the machine is slower, each frame has fewer tokens.
        slack = float(os.environ.get("HALO_SLOW", "1"))
        assert per_token > 0.01 and light > 0.01 and per_token + light <= 5 * slack
    finally:
        page.close()
        server.stop()


LIGHT = """async () => {
  const { paintAttention } = await import("/js/light.js");
  const names = [...document.querySelectorAll(".chunk")].map((node) => node.dataset.chunk);
  for (let n = 0; n < 100; n += 1) {
    const tokens = Array.from({ length: 24 }, (_, at) => (
      { chunk: names[(n + at) % names.length], start: at, end: at + 1, share: 0.5 / (at + 1) }));
    await new Promise((done) => requestAnimationFrame(done));
    paintAttention({ tokens, chunks: names.map((name, at) => [name, ((n + at) % 10) / 10]) });
  }
}"""

WATCH = """
window.slow = [];
new PerformanceObserver((list) => list.getEntries().forEach((e) => slow.push(Math.round(e.duration)))).observe({ type: "longtask", buffered: true });
window.watch = () => {
  window.touched = new Map();
  window.changes = 0;
  new MutationObserver((all) => {
    for (const change of all) {
      changes += 1;
      const at = change.target.nodeType === 1 ? change.target : change.target.parentElement;
      const name = at.closest("[data-chunk]")?.dataset.chunk ?? "else";
      touched.set(name, (touched.get(name) ?? 0) + 1);
    }
  }).observe(document.getElementById("log"), { subtree: true, childList: true, characterData: true, attributes: true });
};
"""


def test_page_with_30000_tokens(browser, long_conversation):
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    page.add_init_script(WATCH)
    page.goto(long_conversation.url + "/#main")
    status, state = long_conversation.halo("GET", "/conversations/main")
    assert status == 200 and state["live"] >= 30_000, state["live"]
    expect(page.locator(".chunk").last).to_be_in_viewport(timeout=60_000)
    # What is near the end is drawn, in order; the rest is drawn when it comes into view.
    positions = page.locator(".chunk").evaluate_all("all => all.map((one) => Number(one.dataset.position))")
    assert positions == sorted(positions) and positions[-1] == state["chunks"][-1]["position"]
    assert len(positions) < len(state["chunks"]), "not everything is drawn"
    page.evaluate("() => { document.getElementById('log').scrollTop = 0; }")
    expect(page.locator(f".chunk[data-chunk='{state['chunks'][0]['id']}']")).to_be_in_viewport()
    page.click("#to-end")
    expect(page.locator(f".chunk[data-chunk='{state['chunks'][-1]['id']}']")).to_be_in_viewport()
    loaded = page.evaluate("slow.splice(0)")
    page.fill("#message", "Tell me more.")
    page.press("#message", "Enter")
    # Until then the question is drawn, and again when it is stored.
    expect(page.locator(".chunk", has_text="word20 ")).to_be_visible(timeout=60_000)
    page.evaluate("watch()")
    expect(page.locator(".chunk", has_text="word300")).to_be_visible(timeout=60_000)
    # During an answer, only the growing paragraph changes, at most once per frame.
    touched, changes = page.evaluate("[[...touched], changes]")
    changed_chunks = {name for name, _ in touched if name != "else"}
    new = changed_chunks - {chunk["id"] for chunk in state["chunks"]}
    # The number of new paragraphs depends on the progress of the answer; all of them belong to it.
    assert changed_chunks == new and len({name.split(".")[0] for name in new}) == 1, touched
    assert changes <= 2 * TOKENS, changes
    expect(page.locator("#stop")).to_be_hidden(timeout=60_000)
    expect(page.locator(".chunk", has_text="word399")).to_be_visible()
    status, state = long_conversation.halo("GET", "/conversations/main")
    turn_record = [turn for turn in long_conversation.halo("GET", "/conversations/main/turns")[1]][-1]["figures"]
    result = {
        "live": state["live"],
        "chunks": len(state["chunks"]),
        "long_tasks_while_loading": loaded,
        "long_tasks_while_generating": page.evaluate("slow"),
        "changes": changes,
        "turn": turn_record["ms"],
    }
    SHOTS.mkdir(parents=True, exist_ok=True)
    pathlib.Path(SHOTS / "long.json").write_text(json.dumps(result, indent=1))
    shot(page, "long")
    page.close()


MESSAGES = 100_000

OPEN = """() => {
  const start = performance.now();
  location.hash = "#/main";
  const look = () => {
    const last = [...document.querySelectorAll(".turn")].at(-1);
    if (last?.textContent.includes("number 100000 ") && last.getBoundingClientRect().bottom < innerHeight)
      window.openedAfter = performance.now() - start;
    else requestAnimationFrame(look);
  };
  look();
}"""

SCROLL = """async () => {
  const log = document.getElementById("log");
  const frames = [];
  let last = performance.now();
  for (const end = last + 5000; performance.now() < end; ) {
    log.scrollTop -= 100;
    await new Promise(requestAnimationFrame);
    const now = performance.now();
    frames.push(now - last);
    last = now;
  }
  frames.sort((a, b) => a - b);
  return { median: frames[frames.length >> 1], p95: frames[Math.floor(frames.length * 0.95)], frames: frames.length };
}"""

VISIBLE = """() => [...document.querySelectorAll(".turn")]
  .filter((node) => { const box = node.getBoundingClientRect(); return box.bottom > 60 && box.top < innerHeight - 150; })
  .map((node) => Number(/number (\\d+)/.exec(node.textContent)[1]))"""


def test_page_with_100000_messages(browser, tmp_path):
    script = tmp_path / "answers.txt"
    script.write_text("Yes.")
    roles = ("user", "assistant")
    messages = [
        {"role": roles[n % 2], "content": f"Message number {n + 1} of this very long talk about the sea."}
        for n in range(MESSAGES)
    ]
    file = tmp_path / "chat.json"
    file.write_text(json.dumps({"messages": messages}))
    model = f"scripted:{script}"
    settings = ["--set", "recall.mode=lexical", "--model", model, "--data", str(tmp_path / "data")]
    subprocess.run(
        [str(HALO), "import", "--no-index", "-c", "main", *settings, str(file)], check=True, capture_output=True
    )
    server = Server(tmp_path / "data", "recall.mode=lexical", model=model).start()
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    try:
        page.goto(server.url)
        expect(page.locator(".empty")).to_be_visible()
        page.evaluate(OPEN)
        page.wait_for_function("() => window.openedAfter", timeout=60_000)
        opened = page.evaluate("() => window.openedAfter")
        page.wait_for_timeout(500)
        scrolled = page.evaluate(SCROLL)
        seen = page.evaluate(VISIBLE)
        assert seen and seen == list(range(seen[0], seen[0] + len(seen))) and seen[0] < MESSAGES, seen
        session = page.context.new_cdp_session(page)
        session.send("HeapProfiler.collectGarbage")
        heap = page.evaluate("() => performance.memory.usedJSHeapSize") / 1e6
        turns = page.locator(".turn").count()
        result = {"opened_ms": opened, "scroll": scrolled, "heap_mb": heap, "turns_in_the_document": turns}
        SHOTS.mkdir(parents=True, exist_ok=True)
        pathlib.Path(SHOTS / "long-100000.json").write_text(json.dumps(result, indent=1))
        # The middle, by a jump of the scroll bar.
        page.evaluate("() => { const log = document.getElementById('log'); log.scrollTop = log.scrollHeight / 2; }")
        page.wait_for_function(f"() => {{ const seen = ({VISIBLE})(); return seen.length > 3 && seen[0] > 30000; }}")
        seen = page.evaluate(VISIBLE)
        assert seen == list(range(seen[0], seen[0] + len(seen))) and 30_000 < seen[0] < 70_000, seen
        assert turns < 400, result
        assert heap <= 50, result
        # A machine with other work is slower; the figures above say how slow.
        slack = float(os.environ.get("HALO_SLOW", "1"))
        # The goal is one second on an idle machine; here other tests run at the same time.
        assert opened <= 3000 * slack, result
        # Frames come at the rate of the display, 16.7 ms, if the page needs less.
        assert scrolled["median"] <= 17 * slack, result
    finally:
        page.close()
        server.stop()
