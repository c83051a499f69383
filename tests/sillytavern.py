"""SillyTavern 1.19 in Chromium. Chat completion: each chat is its own conversation, and only replaced answers are deleted; functions.
Chat completion, and text completion as KoboldCpp, llama.cpp and Ollama: all buttons, a lorebook, vector storage, token probabilities
and a group, without an error on the page or in the log of Halo.

Run by scripts/sillytavern; `scripts/sillytavern text` runs text completion only, and other words other parts."""

import contextlib
import json
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request

from playwright.sync_api import sync_playwright

from conftest import CHROMIUM, MODEL, ROOT, Server, wait_for

PORT = 8123
CHATS = [
    ["I am Otto, a baker from Lindau.", "What do you sell here?", "And bread?"],
    ["I am Karl, a sailor from Hamburg.", "Where is the harbour?"],
    ["Hello, I am Barnaby.", "Do you have a bed for me tonight?"],
]
LORE = "The password of the boat house is heron."
GROUP = ["Who of you two has seen the baker's cat this morning?", "And the dog?", "Thank you both."]


CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"town": "Lindau"}}\n</tool_call>'
CREATE_GROUP = """async () => {
    const context = SillyTavern.getContext();
    const ask = async (path, body) => await fetch(path, { method: "POST", headers: context.getRequestHeaders(), body: JSON.stringify(body) });
    await ask("/api/characters/duplicate", { avatar_url: context.characters[0].avatar });
    const members = (await (await ask("/api/characters/all", {})).json()).map((one) => one.avatar).slice(0, 2);
    return (await ask("/api/groups/create", { name: "Both", members, avatar_url: "", allow_self_responses: false, activation_strategy: 1,
        generation_mode: 0, disabled_members: [], chat_metadata: {}, fav: false, chat_id: "group", chats: ["group"] })).status;
}"""
REGISTER_FUNCTION = """() => {
    window.towns_ = [];
    SillyTavern.getContext().registerFunctionTool({
        name: "get_weather",
        displayName: "Weather",
        description: "The weather in a town",
        parameters: { type: "object", properties: { town: { type: "string" } }, required: ["town"] },
        action: async ({ town }) => {
            window.towns_.push(town);
            return "hail, 3 degrees";
        },
        formatMessage: () => "",
    });
}"""
# Messages of errors vanish after some seconds.
REPORT_ERRORS = """new MutationObserver((changes) => {
    for (const node of changes.flatMap((change) => [...change.addedNodes])) {
        if (node.classList?.contains("toast-error")) window.reportError_(node.textContent);
    }
}).observe(document, { childList: true, subtree: true });"""


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
        if self.process and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(20)

    def change_settings(self, change):
        """SillyTavern has written its settings at its first start."""
        file = self.data / "default-user/settings.json"
        settings = json.loads(file.read_text())
        settings.update(firstRun=False, username="Otto")
        settings["power_user"].update(auto_connect=True)
        change(settings)
        file.write_text(json.dumps(settings))

    def configure_chat(self, url, with_functions=False):
        """Chat completion."""

        def change(settings):
            settings.update(main_api="openai")
            settings["oai_settings"].update(
                chat_completion_source="custom",
                custom_url=f"{url}/v1",
                custom_model="any",
                openai_max_tokens=24,
                stream_openai=True,
                function_calling=with_functions,
            )

        self.change_settings(change)

    def configure_text(self, url, kind, model):
        """Text completion with a server of this kind."""

        def change(settings):
            # Ollama has no tokenizer for clients: SillyTavern's own counts more tokens, and the chat would not fit beside the card.
            context = 1536 if kind == "ollama" else 1024
            settings.update(main_api="textgenerationwebui", amount_gen=24, max_context=context)
            text = settings.setdefault("textgenerationwebui_settings", {})
            text.update(type=kind, streaming=True, server_urls={kind: url}, ollama_model=model)

        self.change_settings(change)

    def configure_features(self, url, vectors, model):
        """Token probabilities, a lorebook, and vector storage with this source."""

        def change(settings):
            settings["power_user"].update(request_token_probabilities=True)
            world_info = {"world_info": {"globalSelect": ["Lake"]}}
            settings["world_info_settings"] = {**settings.get("world_info_settings", {}), **world_info}
            settings.setdefault("extension_settings", {})["vectors"] = {
                "source": vectors,
                "use_alt_endpoint": True,
                "alt_endpoint_url": url,
                "ollama_model": model,
                "enabled_chats": True,
                "protect": 2,
                "score_threshold": 0,
            }

        self.change_settings(change)
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
        # The requests for text, and the messages of errors.
        self.sent, self.errors = [], []
        is_text = lambda request: request.url.endswith("-completions/generate")
        self.page.on("request", lambda request: self.sent.append(request.post_data) if is_text(request) else None)
        self.page.expose_function("reportError_", lambda text: self.errors.append(text))
        self.page.add_init_script(REPORT_ERRORS)
        self.open()

    def open(self):
        self.page.goto(f"http://127.0.0.1:{PORT}/")
        self.page.wait_for_timeout(9000)
        # While SillyTavern loads, a dialog that it hides is over the page.
        self.page.wait_for_function("() => !document.querySelector('#loader') && !document.querySelector('#preloader')")
        question = self.page.locator("dialog[open] .popup-button-ok:visible")
        if question.count():
            question.first.click()
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

    def click_in_message(self, message, *buttons):
        """Clicks buttons of a message, which are shown while the pointer is over it only."""
        for button in buttons:
            message.locator(button).first.evaluate("button => button.click()")
            self.page.wait_for_timeout(500)

    def edit_last_of_user(self, text):
        message = self.page.locator('#chat .mes[is_user="true"]').last
        self.click_in_message(message, ".mes_edit")
        self.page.fill("#curEditTextarea", text)
        self.click_in_message(message, ".mes_edit_done")
        assert text in message.locator(".mes_text").inner_text()

    def delete_last(self):
        message = self.page.locator("#chat .last_mes")
        self.click_in_message(message, ".mes_edit", ".mes_edit_delete")
        confirmation = self.page.locator("dialog[open] .popup-button-ok")
        if confirmation.count():
            confirmation.first.click()
        self.page.wait_for_timeout(1500)

    def set_answer_length(self, tokens):
        self.page.evaluate("n => $('#amount_gen, #openai_max_tokens').val(n).trigger('input')", tokens)

    def stop_answer(self, server, text):
        """Stops an answer while it is written: the model is free long before the answer would have ended."""
        self.set_answer_length(800)
        self.page.fill("#send_textarea", text)
        self.page.press("#send_textarea", "Enter")
        self.page.wait_for_function("() => getComputedStyle(document.querySelector('#mes_stop')).display !== 'none'")
        is_busy = lambda: any(slot["is_processing"] for slot in server.call("GET", "/slots")[1])
        wait_for(is_busy, 60)
        self.page.wait_for_timeout(1500)
        assert is_busy(), "the answer is still being written"
        self.page.locator("#mes_stop").click(force=True)
        self.wait_until_idle()
        wait_for(lambda: not is_busy(), 5)
        self.set_answer_length(24)

    def open_probabilities(self):
        self.page.evaluate("document.querySelector('#option_toggle_logprobs').click()")
        self.page.wait_for_timeout(1500)
        tokens = self.page.locator("#logprobs_generation_output span[class*=logprobs]")
        assert tokens.count() > 2, self.page.locator("#logprobs_generation_output").inner_text()
        self.page.evaluate("document.querySelector('#option_toggle_logprobs').click()")

    def make_group(self):
        """A group of Seraphina and a copy of her."""
        status = self.page.evaluate(CREATE_GROUP)
        assert status == 200, status
        self.open()


def press_buttons(person, server, mode):
    """All that a chat can do. `mode` is what SillyTavern calls the API."""
    page, sent = person.page, person.sent
    last = lambda: page.locator("#chat .last_mes .mes_text").last.inner_text()
    person.send_command("/go Seraphina")
    person.say("Good evening. Who are you?")
    count = person.messages()
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
    assert page.input_value("#send_textarea").strip(), "impersonation writes into the message box"
    page.fill("#send_textarea", "")
    person.say("What do you know of the boat house?")
    assert LORE in sent[-1], "the lorebook is in the prompt"
    person.edit_last_of_user("What do you know of the boat house and of its owner?")
    person.send_command("/regenerate", 3000)
    person.wait_until_idle()
    assert "and of its owner?" in sent[-1], f"an edited message is sent, not {sent[-1]}"
    count = person.messages()
    person.delete_last()
    assert person.messages() == count - 1, "a message is deleted"
    person.stop_answer(server, "Tell me a very long story of the forest.")
    person.say("And good night.")
    person.say("Which boat house did I ask you about?")
    assert "Past events:" in sent[-1], "vector storage has found earlier messages"
    if mode != "ollama":
        assert any('"n_probs"' in body or '"logprobs"' in body for body in sent), sent[-1]
        person.open_probabilities()
    person.make_group()
    person.send_command("/go Both", 5000)
    for line in GROUP[:2]:
        person.say(line, answers=2)
    assert GROUP[0] in sent[-1] and GROUP[1] in sent[-1]
    refused = [line for line in server.log if "refused" in line or "failed" in line]
    assert not refused and not person.errors, (refused, person.errors)
    print(f"{mode}: {len(sent)} requests, none refused", flush=True)


class Setup:
    """SillyTavern, Halo and a browser."""

    def __init__(self, folder, work, model):
        self.server = Server(work / "halo", "generation.max_tokens=40", "recall.mode=lexical", model=model)
        self.tavern = Tavern(folder, work)
        self.person = None


@contextlib.contextmanager
def running(folder, configure, model=MODEL):
    """`configure` gets SillyTavern and the server of Halo before the browser opens the page."""
    with tempfile.TemporaryDirectory(prefix="halo-tavern-") as work, contextlib.ExitStack() as ends:
        setup = Setup(folder, pathlib.Path(work), model)
        ends.callback(setup.server.stop)
        setup.server.start()
        ends.callback(setup.tavern.stop)
        setup.tavern.start()
        setup.tavern.stop()
        configure(setup.tavern, setup.server)
        setup.tavern.start()
        playwright = ends.enter_context(sync_playwright())
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        ends.callback(browser.close)
        setup.person = Person(browser)
        try:
            yield setup
        except BaseException:
            print("".join(setup.server.log[-60:]), setup.person.errors, flush=True)
            setup.person.page.screenshot(path=str(ROOT / "target/sillytavern.png"))
            raise


def test_buttons(folder, mode):
    """`mode` is `chat`, or the type of a server for text completion."""

    def configure(tavern, server):
        model = server.call("GET", "/api/tags")[1]["models"][0]["name"]
        if mode == "chat":
            tavern.configure_chat(server.url)
        else:
            tavern.configure_text(server.url, mode, model)
        tavern.configure_features(server.url, "llamacpp" if mode == "chat" else mode, model)

    with running(folder, configure) as setup:
        press_buttons(setup.person, setup.server, mode)


def test_functions(folder):
    """A function of an extension is called, and its result is answered."""
    configure = lambda tavern, server: tavern.configure_chat(server.url, with_functions=True)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as script, contextlib.ExitStack() as ends:
        script.write(f"{CALL}\n---\nIt is sunny in Lindau.\n---\nGood night.")
        script.flush()
        setup = ends.enter_context(running(folder, configure, f"scripted:{script.name}"))
        person = setup.person
        person.page.evaluate(REGISTER_FUNCTION)
        person.send_command("/go Seraphina")
        person.page.fill("#send_textarea", "How is the weather in Lindau?")
        person.page.press("#send_textarea", "Enter")
        person.page.get_by_text("It is sunny in Lindau.").first.wait_for()
        person.wait_until_idle()
        assert person.page.evaluate("window.towns_") == ["Lindau"]
        assert '"tool_calls"' in person.sent[-1] and "hail, 3 degrees" in person.sent[-1], person.sent[-1]
        person.say("And good night.")
        assert len(Halo(setup.server).conversations()) == 1, "the call and its result are one conversation"
        assert not person.errors, person.errors
        print("chat: a function of an extension is called")


def test_conversations(folder):
    regenerated = "replaced by another answer, which the client asked for"
    with running(folder, lambda tavern, server: tavern.configure_chat(server.url)) as setup:
        halo, person = Halo(setup.server), setup.person
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
        person.make_group()
        person.send_command("/go Both", 5000)
        for line in GROUP:
            person.say(line, answers=2)
        new = set(halo.conversations()) - set(names)
        assert new == {GROUP[0][:48]}, new
        assert not halo.deleted(new.pop()), "nothing is deleted in a group"
        print("a group of two: one conversation, nothing deleted")


def main(folder, *parts):
    """`parts` are `conversations`, `functions`, `chat` and `text`; none: all of them."""
    parts = parts or ("conversations", "functions", "chat", "text")
    if "conversations" in parts:
        test_conversations(folder)
    if "functions" in parts:
        test_functions(folder)
    for mode in ("chat", "koboldcpp", "llamacpp", "ollama"):
        if mode in parts or ("text" in parts and mode != "chat"):
            test_buttons(folder, mode)


if __name__ == "__main__":
    main(*sys.argv[1:])
