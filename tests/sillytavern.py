"""SillyTavern 1.19 in Chromium. Chat completion: each chat is its own conversation, and only replaced answers are deleted. Text
completion, as KoboldCpp, llama.cpp and Ollama: its buttons, a lorebook and token probabilities, without an error in the log of Halo.

Run by scripts/sillytavern; `scripts/sillytavern text` runs text completion only."""

import json
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request

from playwright.sync_api import sync_playwright

from conftest import ROOT, Server

PORT = 8123
CHATS = [
    ["I am Otto, a baker from Lindau.", "What do you sell here?", "And bread?"],
    ["I am Karl, a sailor from Hamburg.", "Where is the harbour?"],
    ["Hello, I am Barnaby.", "Do you have a bed for me tonight?"],
]
LORE = "The password of the boat house is heron."
GROUP = ["Who of you two has seen the baker's cat this morning?", "And the dog?", "Thank you both."]


class Tavern:
    """SillyTavern with a data folder of its own."""

    def __init__(self, folder, work):
        self.data = work / "tavern"
        command = [
            "node",
            "server.js",
            "--port",
            str(PORT),
            "--dataRoot",
            self.data,
            "--configPath",
            work / "config.yaml",
            "--disableCsrf",
            "true",
            "--browserLaunchEnabled",
            "false",
        ]
        self.command = [str(part) for part in command]
        self.folder = pathlib.Path(folder).resolve() / "node_modules/sillytavern"
        self.process = None

    def start(self):
        self.process = subprocess.Popen(
            self.command, cwd=self.folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        for _ in range(240):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{PORT}/", timeout=2)
                return
            except OSError:
                time.sleep(0.5)
        raise AssertionError("SillyTavern did not start")

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(20)

    def configure_text(self, url, kind, model):
        """Text completion with a server of this kind."""
        file = self.data / "default-user/settings.json"
        settings = json.loads(file.read_text())
        settings.update(
            firstRun=False, main_api="textgenerationwebui", username="Otto", amount_gen=24, max_context=1024
        )
        text = settings.setdefault("textgenerationwebui_settings", {})
        text.update(type=kind, streaming=True, server_urls={kind: url}, ollama_model=model)
        settings["power_user"].update(auto_connect=True, request_token_probabilities=True)
        settings["world_info_settings"] = {
            **settings.get("world_info_settings", {}),
            "world_info": {"globalSelect": ["Lake"]},
        }
        file.write_text(json.dumps(settings))
        entry = {
            "uid": 0,
            "key": ["boat house"],
            "keysecondary": [],
            "comment": "",
            "content": LORE,
            "constant": False,
            "selective": False,
            "order": 100,
            "position": 0,
            "disable": False,
            "probability": 100,
            "useProbability": True,
            "depth": 4,
        }
        worlds = self.data / "default-user/worlds"
        worlds.mkdir(exist_ok=True)
        (worlds / "Lake.json").write_text(json.dumps({"entries": {"0": entry}}))

    def configure(self, url):
        file = self.data / "default-user/settings.json"
        settings = json.loads(file.read_text())
        settings.update(firstRun=False, main_api="openai", username="Otto")
        settings["oai_settings"].update(
            chat_completion_source="custom",
            custom_url=f"{url}/v1",
            custom_model="any",
            openai_max_tokens=24,
            stream_openai=True,
        )
        settings["power_user"].update(auto_connect=True)
        file.write_text(json.dumps(settings))


class Halo:
    def __init__(self, server):
        self.server = server

    def conversations(self):
        return {
            conversation["name"]: conversation["turns"] for conversation in self.server.halo("GET", "/conversations")[1]
        }

    def deleted(self, name):
        result = self.server.halo("GET", f"/conversations/{urllib.parse.quote(name, safe='')}/deleted")[1]
        return sorted(chunk["reason"] for chunk in result["chunks"])

    def all_deleted(self):
        return {name: self.deleted(name) for name in self.conversations()}


class Person:
    """A user of the page."""

    def __init__(self, browser):
        self.page = browser.new_page(viewport={"width": 1400, "height": 900})
        self.page.set_default_timeout(60_000)
        self.open()

    def open(self):
        self.page.goto(f"http://127.0.0.1:{PORT}/")
        self.page.wait_for_timeout(9000)
        if self.page.locator("dialog[open] .popup-button-ok").count():
            self.page.locator("dialog[open] .popup-button-ok").first.click()
            self.page.wait_for_timeout(1000)

    def send_command(self, text, wait=4000):
        self.page.fill("#send_textarea", text)
        self.page.press("#send_textarea", "Enter")
        self.page.wait_for_timeout(wait)

    def messages(self):
        return self.page.locator("#chat .mes").count()

    def wait_until_idle(self):
        self.page.wait_for_function(
            "() => { const b = document.querySelector('#mes_stop'); return !b || getComputedStyle(b).display === 'none' }",
            timeout=120_000,
        )
        self.page.wait_for_timeout(800)

    def say(self, text, answers=1):
        expected_count = self.messages() + 1 + answers
        self.page.fill("#send_textarea", text)
        self.page.press("#send_textarea", "Enter")
        self.page.wait_for_function(
            f"() => document.querySelectorAll('#chat .mes').length >= {expected_count}", timeout=120_000
        )
        self.page.wait_for_timeout(1500)
        self.wait_until_idle()

    def swipe(self, direction):
        self.page.locator(f"#chat .last_mes .swipe_{direction}").last.click(force=True)
        self.page.wait_for_timeout(1500)
        self.wait_until_idle()


def press_text_buttons(person, server, kind):
    """All that a chat of text completion can do. Returns the requests for text that SillyTavern has sent."""
    sent = []
    is_text = lambda request: "/text-completions/generate" in request.url
    person.page.on("request", lambda request: sent.append(request.post_data or "") if is_text(request) else None)
    page = person.page
    person.send_command("/go Seraphina")
    person.say("Good evening. Who are you?")
    count = person.messages()
    last = lambda: page.locator("#chat .last_mes .mes_text").last.inner_text()
    person.send_command("/regenerate", 3000)
    person.wait_until_idle()
    assert person.messages() == count and last().strip(), "an answer is regenerated"
    person.swipe("right")
    assert person.messages() == count and last().strip(), "a swipe is another answer"
    before = last()
    person.send_command("/continue", 3000)
    person.wait_until_idle()
    assert last().startswith(before[:10]), "an answer is continued"
    page.fill("#send_textarea", "")
    person.send_command("/impersonate", 3000)
    person.wait_until_idle()
    assert person.messages() == count, "nothing is said by impersonation"
    page.fill("#send_textarea", "")
    person.say("What do you know of the boat house?")
    assert LORE in sent[-1], "the lorebook is in the prompt"
    count = person.messages()
    person.send_command("/cut {{lastMessageId}}", 1500)
    assert person.messages() == count - 1, "a message is deleted"
    # The answer is stopped while it is written.
    page.fill("#send_textarea", "Tell me a very long story of the forest.")
    page.press("#send_textarea", "Enter")
    page.wait_for_function("() => getComputedStyle(document.querySelector('#mes_stop')).display !== 'none'")
    page.wait_for_timeout(600)
    page.locator("#mes_stop").click(force=True)
    person.wait_until_idle()
    deadline = time.time() + 20
    while server.call("GET", "/slots")[1][0]["is_processing"]:
        assert time.time() < deadline, "the model is free after the stop"
        time.sleep(0.2)
    person.say("And good night.")
    if kind != "ollama":
        assert any('"n_probs"' in body or '"logprobs"' in body for body in sent), sent[-1]
    refused = [line for line in server.log if "refused" in line or "failed" in line]
    assert not refused, refused
    print(f"text completion as {kind}: {len(sent)} requests, none refused")
    return sent


def test_text_completion(folder, kind):
    work = pathlib.Path(tempfile.mkdtemp(prefix="halo-tavern-"))
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    server = Server(work / "halo", "generation.max_tokens=40", "recall.mode=lexical").start()
    tavern = Tavern(folder, work)
    tavern.start()
    tavern.stop()
    model = server.call("GET", "/api/tags")[1]["models"][0]["name"]
    tavern.configure_text(server.url, kind, model)
    tavern.start()
    try:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            press_text_buttons(Person(browser), server, kind)
            browser.close()
    finally:
        tavern.stop()
        server.stop()
        shutil.rmtree(work, ignore_errors=True)


def main(folder):
    work = pathlib.Path(tempfile.mkdtemp(prefix="halo-tavern-"))
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    server = Server(work / "halo", "generation.max_tokens=40", "recall.mode=lexical").start()
    halo, tavern = Halo(server), Tavern(folder, work)
    # SillyTavern writes its settings at its first start.
    tavern.start()
    tavern.stop()
    tavern.configure(server.url)
    tavern.start()
    regenerated = "replaced by another answer, which the client asked for"
    try:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            person = Person(browser)
            person.send_command("/go Seraphina")
            for n, lines in enumerate(CHATS):
                if n:
                    person.send_command("/newchat")
                for line in lines:
                    person.say(line)
            names = [lines[0] for lines in CHATS]
            assert halo.conversations() == {lines[0]: 1 + 2 * len(lines) for lines in CHATS}, halo.conversations()
            assert not any(halo.all_deleted().values()), halo.all_deleted()
            print("three chats with one character: three conversations, nothing deleted")
            person.swipe("right")
            person.swipe("right")
            assert halo.all_deleted() == {names[0]: [], names[1]: [], names[2]: [regenerated] * 2}, halo.all_deleted()
            person.swipe("left")
            person.say("Thank you, and good night.")
            assert halo.deleted(names[2]) == sorted([regenerated, "another variant was chosen"]), halo.deleted(names[2])
            print("swipes and a swipe back: variants of one answer")
            for _ in range(2):
                person.send_command("/cut {{lastMessageId}}", 1500)
            person.say("Thank you, and good morning to you.")
            assert halo.deleted(names[2]).count("replaced by the client's edited message") == 2, halo.deleted(names[2])
            assert set(halo.conversations()) == set(names)
            print("the last message edited: a variant of the exchange")
            status = person.page.evaluate("""async () => {
                const context = SillyTavern.getContext();
                const ask = async (path, body) => await fetch(path, { method: "POST", headers: context.getRequestHeaders(), body: JSON.stringify(body) });
                await ask("/api/characters/duplicate", { avatar_url: context.characters[0].avatar });
                const members = (await (await ask("/api/characters/all", {})).json()).map((one) => one.avatar).slice(0, 2);
                return (await ask("/api/groups/create", { name: "Both", members, avatar_url: "", allow_self_responses: false, activation_strategy: 1,
                    generation_mode: 0, disabled_members: [], chat_metadata: {}, fav: false, chat_id: "group", chats: ["group"] })).status;
            }""")
            assert status == 200, status
            person.open()
            person.send_command("/go Both", 5000)
            for line in GROUP:
                person.say(line, answers=2)
            new = set(halo.conversations()) - set(names)
            assert new == {GROUP[0][:48]}, new
            assert not halo.deleted(new.pop()), "nothing is deleted in a group"
            print("a group of two: one conversation, nothing deleted")
            browser.close()
    finally:
        tavern.stop()
        server.stop()
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "tests"))
    if "text" not in sys.argv[2:]:
        main(sys.argv[1])
    for kind in ("koboldcpp", "llamacpp", "ollama"):
        test_text_completion(sys.argv[1], kind)
