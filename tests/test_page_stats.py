"""The statistics of a chat in a real browser: axes, values, and what came back for which question."""

import re
import threading

from playwright.sync_api import expect

from conftest import Server
from test_transcript import shot

TALK = ["The gun on the wall of the lodge is called Betsy."] + [
    f"Please tell me something long about {topic} today." for topic in ("cheese", "trains", "winter", "bread", "ships")
]


def test_statistics_have_axes_and_values(scripted, open_chat):
    settings = ("context.max_tokens=300", "generation.max_tokens=60", "chunk.min_tokens=8", "prune.policy=fifo")
    server = scripted(*[f"{'Word ' * 30}number {n}." for n in range(8)], settings=settings)
    for text in [*TALK, "What is the gun on the wall called?"]:
        server.say("main", text)
    _, turns = server.halo("GET", "/conversations/main/turns")
    returned = turns[-1]["figures"]["resurrected"]
    assert returned > 0 and sum(turn["figures"]["pruned"] for turn in turns) > 0, turns
    page = open_chat(server)
    page.click("#inspect")
    page.get_by_role("tab", name="Statistics").click()
    # Round numbers at the axis, the limit, and the unit.
    context = page.locator("#context-chart")
    expect(context.locator("text", has_text=re.compile("^300$")).first).to_be_visible()
    expect(context).to_contain_text("limit 300")
    figure = page.locator("figure", has=context)
    expect(figure.locator(".chart-value")).to_have_text("tokens in the context")
    # The value under the pointer, and by the arrow keys.
    box = context.bounding_box()
    page.mouse.move(box["x"] + box["width"] - 12, box["y"] + box["height"] / 2)
    last = f"message {turns[-1]['turn'] + 1}: {turns[-1]['figures']['live']} tokens"
    expect(figure.locator(".chart-value")).to_have_text(last)
    page.mouse.move(5, 5)
    expect(figure.locator(".chart-value")).to_have_text("tokens in the context")
    context.focus()
    page.keyboard.press("End")
    expect(figure.locator(".chart-value")).to_have_text(last)
    page.keyboard.press("ArrowLeft")
    expect(figure.locator(".chart-value")).to_contain_text(f"message {turns[-2]['turn'] + 1}: ")
    # What came back for which question; a click leads there.
    row = page.locator("#returns .return").first
    expect(row).to_contain_text("What is the gun on the wall called?")
    row.get_by_role("button", name="The gun on the wall").click()
    expect(page.locator(".chunk", has_text="called Betsy").first).to_be_in_viewport()
    shot(page, "stats")
    # The sentences with the most attention, word for word; a click leads there.
    page.get_by_role("button", name="Extract").click()
    items = page.locator("#extract li")
    expect(items.first).to_be_visible()
    _, extracted = server.halo("GET", "/conversations/main/extract")
    assert items.all_inner_texts() == [sentence["text"].strip() for sentence in extracted]
    said = [
        chunk["text"]
        for chunk in server.halo("GET", "/conversations/main/transcript?limit=50")[1]["messages"]
        for chunk in chunk["chunks"]
    ]
    assert all(any(sentence["text"].strip() in text for text in said) for sentence in extracted)
    items.first.get_by_role("button").click()
    expect(page.locator(f"[data-chunk='{extracted[0]['chunk']}']")).to_be_in_viewport()


def test_statistics_before_the_first_answer(open_chat, tmp_path, remote_model):
    looked = threading.Event()
    server = Server(tmp_path, "recall.mode=lexical", model=remote_model([[" word", " word", looked, " word"]])).start()
    try:
        page = open_chat(server)
        page.fill("#message", "Tell me a story.")
        page.press("#message", "Enter")
        expect(page.locator("#stop")).to_be_visible()
        expect(page.locator(".turn.user")).to_have_count(1)
        page.click("#inspect")
        page.click("#panel [data-panel=stats]")
        expect(page.locator("#panel-body")).to_have_text("No answer yet.")
        looked.set()
        expect(page.locator("#panel svg.chart").first).to_be_visible(timeout=30_000)
        page.close()
    finally:
        server.stop()
