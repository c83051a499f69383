"""Every case of tests/histories on a running server: which conversation a request belongs to, and what it replaces."""

import json
import pathlib
import subprocess
import tomllib
import urllib.parse

import pytest

from conftest import HALO, Server

CASES = tomllib.loads((pathlib.Path(__file__).parent / "histories/cases.toml").read_text())["case"]


def messages(lines):
    roles = {"s": "system", "u": "user", "a": "assistant"}
    return [{"role": roles[line[0]], "content": line[2:]} for line in lines]


class Client:
    def __init__(self, server, model):
        self.server, self.model = server, model

    def send(self, lines, answer, name=None):
        self.model.answer = answer
        headers = {"content-type": "application/json", **({"x-halo-conversation": name} if name else {})}
        body = json.dumps({"messages": messages(lines)}).encode()
        status, result = self.server.call("POST", "/v1/chat/completions", body, headers)
        assert status == 200 or answer is None, result
        return result

    def names(self):
        return {conversation["name"]: conversation for conversation in self.server.halo("GET", "/conversations")[1]}

    def get(self, name, path=""):
        status, result = self.server.halo("GET", f"/conversations/{urllib.parse.quote(name, safe='')}{path}")
        assert status == 200, result
        return result

    def store(self, case):
        """Sends the requests that lead to the stored state of the case."""
        stored, prompt = case["stored"], [f"s {case['system']}"] if case.get("system") else []
        for after, text in case.get("variants", []):
            self.send(prompt + stored[: after + 1], text[2:], "stored")
            self.send(prompt + stored[: after + 1], stored[after + 1][2:], "stored")
        if stored:
            answered = stored[-1].startswith("a ")
            self.send(prompt + (stored[:-1] if answered else stored), stored[-1][2:] if answered else None, "stored")


@pytest.mark.parametrize("case", CASES, ids=[f"{case['client']}: {case['what']}" for case in CASES])
def test_align_history(case, model, tmp_path):
    server = Server(tmp_path, "recall.mode=lexical", model=f"openai+http://127.0.0.1:{model.server_port}/v1").start()
    try:
        client = Client(server, model)
        client.store(case)
        before = client.names()
        state_before = client.get("stored") if before else None
        deleted_before = len(client.get("stored", "/deleted")["chunks"]) if before else 0
        client.send(case["sent"], "an answer that nobody has given before")
        after = client.names()
        new = set(after) - set(before)
        verdict = case["verdict"].split()
        if verdict[0] in ("new", "branch"):
            assert len(new) == 1
            if state_before:
                # The stored conversation is unchanged.
                assert after["stored"] == before["stored"]
                assert client.get("stored")["chunks"] == state_before["chunks"]
            [name] = new
            assert ("branch" in name) == (verdict[0] == "branch")
            if verdict[0] == "branch":
                shared = [line[2:].strip() for line in case["stored"] if not line.startswith("s ")][: int(verdict[1])]
                branch_text = " ".join(chunk["text"].strip() for chunk in client.get(name)["chunks"])
                assert all(" ".join(text.split()) in " ".join(branch_text.split()) for text in shared)
            return
        assert not new
        deleted = client.get("stored", "/deleted")["chunks"]
        if verdict[0] == "continue":
            assert len(deleted) == deleted_before
            return
        reasons = {
            "regenerate": "which the client asked for",
            "edit": "edited message",
            "variant": "another variant was chosen",
        }
        if verdict[0] == "regenerate" and case["stored"][-1].startswith("u "):
            assert len(deleted) == deleted_before
            return
        assert any(reasons[verdict[0]] in chunk["reason"] for chunk in deleted)
        if verdict[0] != "variant":
            assert len(client.get("stored", "/variants")) == 2
    finally:
        server.stop()


def test_align_imported_chat(model, tmp_path):
    """A client continues a chat that was imported from it."""
    case = CASES[0]
    file = tmp_path / "chat.json"
    file.write_text(json.dumps({"messages": messages(case["stored"])}))
    data = tmp_path / "data"
    subprocess.run(
        [str(HALO), "import", "--no-index", "-c", "stored", "--data", str(data), str(file)],
        check=True,
        capture_output=True,
    )
    server = Server(
        data,
        "recall.mode=lexical",
        f"chat.system={case['system']}",
        model=f"openai+http://127.0.0.1:{model.server_port}/v1",
    ).start()
    try:
        client = Client(server, model)
        client.send(case["sent"], "an answer that nobody has given before")
        assert client.names()["stored"]["turns"] == len(case["stored"]) + 2
    finally:
        server.stop()
