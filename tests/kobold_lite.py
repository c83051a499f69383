"""Kobold Lite in Chromium, the program itself: connecting, streamed, polled and whole answers, retry, undo, redo, continue, memory, world
info, abort and log-probabilities, without an error on the page, in a response or in the log of Halo.

Run by scripts/kobold-lite with the file of the program."""

import functools
import http.server
import json
import pathlib
import sys
import tempfile
import threading
import urllib.parse

from playwright.sync_api import sync_playwright

from conftest import CHROMIUM, ROOT, Server, wait_for

SECRET = "The password of the boat house is heron."


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


class Lite:
    """A user of the page."""

    def __init__(self, browser, page_url, server):
        self.server, self.requests, self.problems = server, [], []
        self.page = browser.new_page(viewport={"width": 1200, "height": 900})
        self.page.set_default_timeout(120_000)
        self.page.on("request", self.record_request)
        self.page.on("response", self.check_response)
        self.page.on("pageerror", self.record_error)
        self.page.on("dialog", lambda dialog: dialog.accept())
        host, port = server.listen.rsplit(":", 1)
        self.page.goto(f"{page_url}?local=1&host={host}&port={port}")
        self.page.wait_for_function("() => custom_kobold_endpoint && selected_models.length > 0")
        self.wait_until_idle()

    def record_request(self, request):
        if request.url.startswith(self.server.url):
            self.requests.append((request.method, request.url.removeprefix(self.server.url), request.post_data))

    def record_error(self, error):
        # The program does not catch what its own abort throws.
        if "signal is aborted" not in str(error):
            self.problems.append(str(error))

    def check_response(self, response):
        if response.url.startswith(self.server.url) and response.status >= 400:
            self.problems.append(f"{response.status} {response.url}")

    def set(self, **settings):
        self.page.evaluate("settings => Object.assign(localsettings, settings)", settings)

    def turns(self):
        return self.page.evaluate("() => [...gametext_arr]")

    def story(self):
        return "".join(self.turns())

    def wait_until_idle(self):
        self.page.wait_for_function("() => pending_response_id === '' && !document.querySelector('#btnsend').disabled")
        self.page.wait_for_timeout(300)

    def press(self, button):
        self.page.evaluate(f"document.querySelector('{button}').click()")
        self.page.wait_for_timeout(300)
        self.wait_until_idle()

    def send(self, text):
        """Returns the body of the request to generate."""
        before = self.story()
        count = len(self.requests)
        self.page.evaluate("text => { document.querySelector('#input_text').value = text; }", text)
        self.press("#btnsend")
        wait_for(lambda: any("generate" in path for _, path, _ in self.requests[count:]), 60)
        self.wait_until_idle()
        story = self.story()
        assert text in story and len(story) > len(before) + len(text), story
        return self.last_body()

    def last_body(self):
        bodies = [body for _, path, body in self.requests if path in ("/api/v1/generate", "/api/extra/generate/stream")]
        return json.loads(bodies[-1])

    def paths(self):
        return [path for _, path, _ in self.requests]


def use_everything(lite):
    page, server = lite.page, lite.server
    connected = lite.paths()
    for path in ("/api/v1/model", "/api/v1/info/version", "/api/extra/version", "/api/extra/preloadstory"):
        assert path in connected, connected
    lite.set(max_length=24)
    body = lite.send("Good evening. Who are you?")
    assert lite.paths()[-1] != "" and "/api/extra/generate/stream" in lite.paths(), "it streams by default"
    assert "{{[INPUT]}}" in body["prompt"], "the chat template is left to the server"
    assert "<|im_" not in lite.story() and "{{[" not in lite.turns()[-1], lite.story()
    print("connected, and an answer is streamed")

    first = lite.turns()
    lite.press("#btn_actretry")
    second = lite.turns()
    assert len(second) == len(first) and second[-1].strip() and second[-1] != first[-1], "an answer is regenerated"
    lite.press("#btn_actundo")
    assert lite.turns() == first, "undo brings back the first answer"
    lite.press("#btn_actredo")
    assert lite.turns() == second
    before = lite.story()
    page.evaluate("document.querySelector('#input_text').value = ''")
    lite.press("#btnsend")
    assert lite.story().startswith(before[: len(before) // 2]), "an answer is continued"
    print("retry, undo, redo, continue")

    lite.press("#btn_actmem")
    page.fill("#memorytext", SECRET)
    page.locator("#memorycontainerfooter button").first.evaluate("button => button.click()")
    body = lite.send("What is the password?")
    assert SECRET in body["memory"] + body["prompt"], body
    page.evaluate(
        "() => { current_wi.push({ key: 'lighthouse', keysecondary: '', keyanti: '', content: 'It is red.', comment: '', folder: null,"
        " selective: false, constant: false, probability: 100, wigroup: '', widisabled: false }); }"
    )
    body = lite.send("What do you know of the lighthouse?")
    assert "It is red." in body["memory"] + body["prompt"], body
    print("memory and world info")

    for mode, path in ((1, "/api/extra/generate/check"), (0, "/api/v1/generate")):
        lite.requests.clear()
        lite.set(tokenstreammode=mode)
        lite.send("And then?")
        assert path in lite.paths() and "/api/extra/generate/stream" not in lite.paths(), lite.paths()
    lite.set(tokenstreammode=2)
    print("polled and whole answers")

    lite.set(request_logprobs=True)
    lite.send("And what else?")
    page.evaluate("show_last_logprobs()")
    page.wait_for_timeout(500)
    assert page.locator(".logprobstable tr").count() > 2, "the table of log-probabilities"
    page.evaluate("hide_popups(); hide_msgbox()")
    lite.set(request_logprobs=False)
    print("log-probabilities")

    is_busy = lambda: any(slot["is_processing"] for slot in server.call("GET", "/slots")[1])
    lite.set(max_length=800)
    page.evaluate("document.querySelector('#input_text').value = 'Tell me a very long story of the forest.'")
    page.evaluate("document.querySelector('#btnsend').click()")
    wait_for(is_busy, 60)
    page.wait_for_timeout(1500)
    assert is_busy(), "the answer is still being written"
    page.evaluate("document.querySelector('#abortgen').click()")
    wait_for(lambda: not is_busy(), 5)
    lite.wait_until_idle()
    assert "/api/extra/abort" in lite.paths()
    lite.set(max_length=24)
    print("abort")


def main(file):
    file = pathlib.Path(file).resolve()
    handler = functools.partial(QuietHandler, directory=file.parent)
    pages = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=pages.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory(prefix="halo-lite-") as work, sync_playwright() as playwright:
        server = Server(pathlib.Path(work) / "halo", "recall.mode=lexical").start()
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            lite = Lite(browser, f"http://127.0.0.1:{pages.server_port}/{urllib.parse.quote(file.name)}", server)
            try:
                use_everything(lite)
            except BaseException:
                print("".join(server.log[-60:]), lite.problems, lite.requests[-3:], flush=True)
                lite.page.screenshot(path=str(ROOT / "target/kobold-lite.png"))
                raise
            refused = [line for line in server.log if "refused" in line or "failed" in line]
            assert not refused and not lite.problems, (refused, lite.problems)
            print(f"{len(lite.requests)} requests, none refused")
        finally:
            browser.close()
            server.stop()
            pages.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
