"""`halo chat` in a terminal."""

import base64
import fcntl
import os
import pty
import re
import select
import subprocess
import termios
import time

import pytest

from conftest import HALO

TAB, ALT_ENTER, CTRL_C, CTRL_D = "\t", "\x1b\r", "\x03", "\x04"
PROMPT = "› "
# More than a pseudoterminal holds: it is not printed to its end before it is read.
LONG_ANSWER = ("word" * 10 + " ") * 4000


class Terminal:
    """A chat in a pseudoterminal of 60 columns."""

    def __init__(self, data, answers, *settings, columns=60):
        data.mkdir(exist_ok=True)
        script = data / "answers.txt"
        script.write_text("\n---\n".join(answers))
        self.master, slave = pty.openpty()
        termios.tcsetwinsize(slave, (40, columns))
        flags = [part for setting in ("recall.mode=lexical", *settings) for part in ("--set", setting)]
        command = [HALO, "--data", data / "store", "--model", f"scripted:{script}", *flags, "chat"]
        environment = {**os.environ, "TERM": "xterm-256color"}
        self.process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environment,
            start_new_session=True,
            # Ctrl-C is a signal for the programs of a controlling terminal.
            preexec_fn=lambda: fcntl.ioctl(slave, termios.TIOCSCTTY, 0),
        )
        self.slave = slave
        self.output = ""
        self.seen = 0

    def read_until(self, pattern, seconds=20):
        """The output since the last call, through what matches."""
        end = time.monotonic() + seconds
        while not (found := re.search(pattern, self.output[self.seen :])):
            assert time.monotonic() < end, f"{pattern!r} is not in {self.output[self.seen :]!r}"
            if select.select([self.master], [], [], 0.1)[0]:
                self.output += os.read(self.master, 1 << 16).decode(errors="replace")
        part = self.output[self.seen : self.seen + found.end()]
        self.seen += found.end()
        return part

    def type(self, text):
        os.write(self.master, text.encode())

    def say(self, text):
        self.read_until(PROMPT)
        self.type(text + "\r")
        return self.read_until(r"tok/s[^\n]*\n")

    def order(self, text, pattern):
        self.read_until(PROMPT)
        self.type(text + "\r")
        self.read_until(r"\n")
        return self.read_until(pattern)

    def echoes(self):
        return bool(termios.tcgetattr(self.slave)[3] & termios.ECHO)

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self.master)
        os.close(self.slave)


@pytest.fixture
def terminal(tmp_path):
    opened = []

    def start(*answers, **more):
        opened.append(Terminal(tmp_path, answers, **more))
        return opened[-1]

    yield start
    for one in opened:
        one.close()


def plain(text):
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r", "")


def test_answers_are_wrapped_and_formatted(terminal):
    chat = terminal(
        "The **bold** word and `code`.\n\n- one two three four five six seven eight nine ten eleven twelve\n"
    )
    shown = chat.say("Hello")
    assert "\x1b[0;1mbold" in shown and "\x1b[0;36mcode" in shown, shown
    assert "- one two three four five six seven eight nine ten eleven\n  twelve" in plain(shown), plain(shown)


def test_tab_completes_commands_chunks_and_names(terminal):
    chat = terminal("Hi.", "Hi again.")
    chat.say("Hello")
    chat.read_until(PROMPT)
    chat.type("/resu" + TAB)
    chat.read_until("/resurrect")
    chat.type(" u0" + TAB + "\r")
    assert "u0.0" in chat.read_until(r"\n[^\n]*u0\.0[^\n]*\n")
    chat.order("/new Tea time", "a new conversation, 'Tea time'")
    chat.say("Hello")
    chat.read_until(PROMPT)
    chat.type("/switch m" + TAB + "\r")
    assert "'main': 2 messages" in plain(chat.read_until("/help lists"))


def test_conversations_models_and_settings_change(terminal):
    chat = terminal("First answer.", "Second answer.", "Third answer.")
    chat.say("One")
    assert "new conversation, 'chat 20" in chat.order("/new", "/help lists")
    assert "* chat 20" in chat.order("/switch", "goes on")
    assert "'mian'" in chat.order("/switch mian", "did you mean 'main'")
    # The last question and answer are shown when a conversation is opened.
    opened = plain(chat.order("/switch main", "First answer."))
    assert "› One" in opened, opened
    assert "there is no setting" in chat.order("/set no.such=1", r"setting[^\n]*\n")
    chat.order("/set generation.max_tokens=1", "/help lists")
    assert "cut at generation.max_tokens: /continue" in chat.say("Two")
    assert "no model" in chat.order("/model nosuchmodel", r"no model[^\n]*\n")
    # The chat stays as it was where a model cannot be opened.
    assert "Third" in chat.say("Three")


def test_last_answer_is_copied_found_and_edited(terminal):
    chat = terminal("The kettle is blue.", "It is **still** blue.")
    chat.say("What colour is it?")
    copied = chat.order("/copy", "characters copied")
    encoded = re.search(r"\x1b\]52;c;([A-Za-z0-9+/=]+)\x07", copied).group(1)
    assert base64.b64decode(encoded).decode() == "The kettle is blue."
    assert "a1.0" in chat.order("/search kettle", r"kettle[^\n]*\n")
    chat.read_until(PROMPT)
    chat.type("/edit\r")
    chat.read_until("/edit What colour is it\\?")
    chat.type(" Say it again.\r")
    assert "\x1b[0;1mstill" in chat.read_until(r"tok/s[^\n]*\n")


def test_deleted_messages_are_neither_copied_nor_shown(terminal):
    chat = terminal("The kettle is blue.", "The \x1b]0;title\x07cup is red.")
    chat.say("What colour is it?")
    chat.say("And the cup?")
    assert "\x1b]0;" not in chat.order("/context", "cup is red")
    chat.order("/delete a3.0", r"deleted[^\n]*\n")
    copied = chat.order("/copy", "characters copied")
    encoded = re.search(r"\x1b\]52;c;([A-Za-z0-9+/=]+)\x07", copied).group(1)
    assert base64.b64decode(encoded).decode() == "The kettle is blue."
    assert "cup is red" not in chat.order("/set generation.max_tokens=5", r"/help lists[\s\S]*" + PROMPT)


def test_stopped_continuation_keeps_the_answer(terminal):
    chat = terminal("one two three", LONG_ANSWER)
    chat.say("Count")
    chat.order("/continue", "wordword")
    chat.type(CTRL_C)
    chat.read_until(r"stopped[^\n]*\n")
    assert "one two three" in plain(chat.order("/context", PROMPT)).replace("\n", " ")


def test_lines_of_a_message(terminal):
    chat = terminal("Yes.", "Yes.")
    chat.read_until(PROMPT)
    chat.type("one" + ALT_ENTER + "two\r")
    chat.read_until("tok/s")
    # A paste is one message.
    chat.read_until(PROMPT)
    chat.type("\x1b[200~three\rfour\x1b[201~\r")
    chat.read_until("tok/s")
    page = plain(chat.order("/context", PROMPT))
    assert "one\ntwo" in page and "three\nfour" in page, page


def test_what_is_typed_during_an_answer_is_kept(terminal):
    chat = terminal(LONG_ANSWER, "Second.", "Third.")
    chat.read_until(PROMPT)
    chat.type("Go\r")
    chat.read_until("wordword")
    assert not chat.echoes()
    chat.type("next one\runfinished")
    chat.type("\x1b[200~ as\rpasted\x1b[201~")
    time.sleep(0.2)
    chat.type(CTRL_C)
    rest = chat.read_until(r"tok/s[^\n]*\n")
    assert "next" not in rest and "unfinished" not in rest, rest
    chat.read_until("› next one")
    chat.read_until("Second.")
    chat.read_until("› .*unfinished as[^p]*pasted")
    chat.type("\r")
    chat.read_until("Third.")
    chat.read_until(PROMPT)
    chat.type(CTRL_D)
    assert chat.process.wait(20) == 0
    assert chat.echoes()
