"""Clients of other programs, unchanged, against the real program. Each is a small program in tests/clients, which checks what it
gets; the model answers with a script, so that every step has one right result."""

import contextlib
import json
import os
import signal
import subprocess
import urllib.parse

import pytest

from conftest import ROOT, Server, wait_for

CLIENTS = ROOT / "target/clients"
PYTHON = CLIENTS / "venv/bin/python"
LLM = CLIENTS / "venv/bin/llm"
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"town": "Lindau"}}\n</tool_call>'
BIRD = '{"name": "heron", "legs": 2}'
CHAT = ["I am a heron.", "I live by the lake."]
WEATHER = [CALL, "It is sunny in Lindau."]


def bird_call(function):
    return f'<tool_call>\n{{"name": "{function}", "arguments": {BIRD}}}\n</tool_call>'


@pytest.fixture(scope="module", autouse=True)
def packages():
    subprocess.run([ROOT / "scripts/client-packages"], check=True)


def run(command, server, **env):
    """Runs a client, which fails where it gets something else than it expects."""
    result = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=120, env={**os.environ, **env}
    )
    log = "".join(server.log[-20:])
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}\n{log}"
    return result.stdout


def run_script(name, server):
    # Node looks for packages beside a script, so it is run from where they are.
    script = ROOT / "tests/clients" / name
    if script.suffix == ".mjs":
        copy = CLIENTS / name
        copy.write_text(script.read_text())
        command = ["node", copy, server.url]
    else:
        command = [PYTHON, script, server.url]
    assert run(command, server).strip().endswith("ok")


def test_openai_npm(scripted):
    run_script("openai_npm.mjs", scripted(*CHAT, *WEATHER, BIRD, "Hello.", "Hello again.", "word " * 200))


def test_vercel_ai(scripted):
    run_script("vercel_ai.mjs", scripted(*CHAT, *WEATHER, *WEATHER, BIRD))


def test_vercel_openai(scripted):
    run_script("vercel_openai.mjs", scripted(*CHAT, *WEATHER, *WEATHER, BIRD, "Hello.", "Hello again."))


def test_openapi_typescript(server, tmp_path):
    """A generator of another language reads the document, and TypeScript accepts what it writes."""
    types = tmp_path / "halo.d.ts"
    bin = CLIENTS / "node_modules/.bin"
    run([bin / "openapi-typescript", f"{server.url}/api/halo/openapi.json", "-o", types], server)
    text = types.read_text()
    assert "AllSearchResult: {" in text and '"/api/halo/v1/conversations/{name}/messages"' in text
    run([bin / "tsc", "--noEmit", "--strict", "--skipLibCheck", types], server)


def test_langchain(scripted):
    run_script("langchain_client.py", scripted(*CHAT, *WEATHER, BIRD, bird_call("Bird"), "word " * 2000, "I am here."))


def test_pydantic_ai(scripted):
    run_script("pydantic_ai_client.py", scripted(*WEATHER, bird_call("final_result"), BIRD, CHAT[1]))


def wait_until_aborted(server, name):
    """The server notices that the client has left: nothing is generated any more, and what there is of the answer is stored."""
    wait_for(lambda: not server.halo("GET", "/status")[1]["busy"])

    def state():
        return server.halo("GET", f"/conversations/{urllib.parse.quote(name)}")[1]

    # The reason is stored with the end of the turn, after the model is free.
    wait_for(lambda: state()["finish_reasons"], seconds=60)
    assert state()["finish_reasons"] == {"1": "aborted"} and state()["chunks"][-1]["text"], state()


@pytest.fixture
def talkative(tmp_path, remote_model):
    """A server whose answers take a hundred seconds: on a busy machine it takes a client twenty to leave."""
    server = Server(tmp_path / "data", "recall.mode=lexical", model=remote_model([["word "] * 2000], 0.05)).start()
    yield server
    server.stop()


def test_pydantic_ai_leaves_a_stream(talkative):
    run_script("pydantic_ai_abort.py", talkative)
    wait_until_aborted(talkative, "Tell me everything about herons.")


def llm_environment(server, folder):
    """The settings of `llm` for this server, which is also OpenAI's own server for it."""
    folder.mkdir()
    (folder / "extra-openai-models.yaml").write_text(
        f"- model_id: halo\n  model_name: any\n  api_base: {server.url}/v1\n"
        "  supports_tools: true\n  supports_schema: true\n"
    )
    return {
        "LLM_USER_PATH": str(folder),
        "OPENAI_API_KEY": "none",
        "OPENAI_BASE_URL": f"{server.url}/v1",
        "LLM_LOAD_PLUGINS": "",
    }


def test_llm(scripted, tmp_path):
    server = scripted("I am a heron.", "I live by the lake.", BIRD, *WEATHER)
    env = llm_environment(server, tmp_path / "llm")
    functions = tmp_path / "weather.py"
    functions.write_text('def get_weather(town: str) -> str:\n    "The weather in a town"\n    return "sunny"\n')

    def llm(*arguments):
        return run([LLM, "prompt", "-m", "halo", "--key", "none", *arguments], server, **env).strip()

    assert llm("Who are you, and where do you live?") == "I am a heron."
    assert llm("-c", "And where is that?") == "I live by the lake."
    assert llm("--schema", "name, legs int", "A bird as JSON").replace(" ", "") == BIRD.replace(" ", "")
    assert llm("--functions", functions, "How is the weather in Lindau?").endswith("It is sunny in Lindau.")
    vector = json.loads(run([LLM, "embed", "-m", "3-large-256", "-c", "a heron"], server, **env))
    assert len(vector) == 256 and abs(sum(x * x for x in vector) - 1) < 1e-3, len(vector)


def test_llm_leaves_a_stream(talkative, tmp_path):
    """Ctrl+C while `llm` writes the answer."""
    env = {**os.environ, **llm_environment(talkative, tmp_path / "llm"), "PYTHONUNBUFFERED": "1"}
    question = "Tell me everything about lakes."
    command = [str(part) for part in (LLM, "prompt", "-m", "halo", "--key", "none", question)]
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        assert process.stdout.read(1), "the first words"
        # A signal that comes while its HTTP library is busy is swallowed now and then: a user presses again.
        for _ in range(4):
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
                break
        assert process.poll() is not None, "it ends"
    finally:
        process.kill()
    wait_until_aborted(talkative, question)
