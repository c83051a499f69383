"""The page with 30,000 tokens in the context, and an answer at 200 tokens per second."""

import json
import pathlib
import subprocess

import pytest
from playwright.sync_api import expect

from conftest import HALO, SHOTS, Server
from test_page import shot

TOKENS = 400
ANSWER = [f" word{n}" + (".\n\n" if n % 50 == 49 else "") for n in range(TOKENS)]
PACE = 200  # a second


@pytest.fixture
def long(tmp_path, remote_model):
    """A server with a conversation of 30,000 live tokens."""
    model = remote_model([ANSWER], 1 / PACE)
    said = []
    for n in range(280):
        who = "user" if n % 2 == 0 else "assistant"
        parts = [
            f"Paragraph {n}.{m} of what was said long ago, about hills, rivers, trains, and the weather of day {n * 7 + m}, "
            * 2
            for m in range(2)
        ]
        said.append({"role": who, "content": "\n\n".join(parts)})
    file = tmp_path / "said.json"
    file.write_text(json.dumps({"messages": said}))
    data = tmp_path / "data"
    settings = ["--set", "recall.mode=lexical", "--set", "context.max_tokens=0", "--model", model, "--data", str(data)]
    subprocess.run(
        [str(HALO), "import", "--no-index", "-c", "main", *settings, str(file)], check=True, capture_output=True
    )
    server = Server(
        data, "recall.mode=lexical", "context.max_tokens=0", "generation.max_tokens=1000", model=model
    ).start()
    # Reading opens nothing; a write opens the conversation, which tokenizes it.
    assert server.halo("PUT", "/conversations/main/notes", {"file": "notes.json", "text": "{}"})[0] == 204
    yield server
    server.stop()


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


def test_page_with_30000_tokens(browser, long):
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    page.add_init_script(WATCH)
    page.goto(long.url)
    status, state = long.halo("GET", "/conversations/main")
    assert status == 200 and state["live"] >= 30_000, state["live"]
    expect(page.locator(".chunk")).to_have_count(len(state["chunks"]), timeout=60_000)
    expect(page.locator(".chunk").last).to_be_in_viewport()
    # They are in order, although the latest are drawn first.
    places = page.locator(".chunk").evaluate_all("all => all.map((one) => Number(one.dataset.position))")
    assert places == sorted(places)
    loaded = page.evaluate("slow.splice(0)")
    page.fill("#message", "Tell me more.")
    page.press("#message", "Enter")
    expect(page.locator(".chunk", has_text="word0 ")).to_be_visible(timeout=60_000)
    page.evaluate("watch()")
    expect(page.locator(".chunk", has_text="word300")).to_be_visible(timeout=60_000)
    # While it answers, only the growing paragraph is touched, at most once a frame.
    touched, changes = page.evaluate("[[...touched], changes]")
    answered = {name for name, _ in touched if name != "else"}
    new = answered - {chunk["id"] for chunk in state["chunks"]}
    # Their number depends on the progress; all of them belong to the answer.
    assert answered == new and len({name.split(".")[0] for name in new}) == 1, touched
    assert changes <= 2 * TOKENS, changes
    expect(page.locator("#stop")).to_be_hidden(timeout=60_000)
    expect(page.locator(".chunk", has_text="word399")).to_be_visible()
    status, state = long.halo("GET", "/conversations/main")
    took = [turn for turn in long.halo("GET", "/conversations/main/turns")[1]][-1]["figures"]
    result = {
        "live": state["live"],
        "chunks": len(state["chunks"]),
        "long_tasks_while_loading": loaded,
        "long_tasks_while_speaking": page.evaluate("slow"),
        "changes": changes,
        "turn": took["ms"],
    }
    SHOTS.mkdir(parents=True, exist_ok=True)
    pathlib.Path(SHOTS / "long.json").write_text(json.dumps(result, indent=1))
    shot(page, "long")
    page.close()
