"""More clients of other programs, unchanged, and the calls of Open WebUI.

`make soak` runs it: these packages are too large for every test run, and some of these tests are long.
"""

import json
import os
import subprocess

import hypothesis
import pytest
import schemathesis
from schemathesis.checks import CHECKS

from conftest import ROOT

CLIENTS = ROOT / "target/clients"
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"town": "Lindau"}}\n</tool_call>'
BIRD = '{"name": "heron", "legs": 2}'
BIRD_CALL = f'<tool_call>\n{{"name": "Bird", "arguments": {BIRD}}}\n</tool_call>'
CHAT = ["I am a heron.", "I live by the lake."]
CASES = int(os.environ.get("HALO_CASES", "100"))


@pytest.fixture(scope="module", autouse=True)
def packages():
    subprocess.run([ROOT / "scripts/client-packages", "soak"], check=True)


def run(command, server, **more):
    """Runs a client, which fails where it gets something else than it expects."""
    command = [str(part) for part in command]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, **more)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}\n{''.join(server.log[-20:])}"
    return result.stdout


def run_script(name, server):
    output = run([CLIENTS / "venv-soak/bin/python", ROOT / "tests/clients" / name, server.url], server)
    assert output.strip().endswith("ok"), output


def test_instructor(scripted):
    # While it streams, instructor names the function after the partial object.
    partial = BIRD_CALL.replace('"Bird"', '"PartialBird"')
    run_script("instructor_client.py", scripted(BIRD_CALL, BIRD, BIRD, partial, BIRD))


def test_llama_index(scripted):
    run_script("llama_index_client.py", scripted(*CHAT, CALL, BIRD_CALL, BIRD))


def test_langchain_sends_token_ids_for_embeddings(server):
    """The default of LangChain: ids of OpenAI's vocabulary, which litellm's package has, in the place of texts."""
    vocabulary = next((CLIENTS / "venv-soak").glob("lib/*/site-packages/litellm/litellm_core_utils/tokenizers"))
    program = (
        "import sys; from langchain_openai import OpenAIEmbeddings\n"
        "make = lambda **more: OpenAIEmbeddings(base_url=sys.argv[1] + '/v1', api_key='none', **more)\n"
        "texts = ['The heron stands in the lake.', 'Müller trinkt Tee.']\n"
        "ids, plain = make(), make(check_embedding_ctx_length=False)\n"
        "for a, b in zip(ids.embed_documents(texts), plain.embed_documents(texts)):\n"
        "    assert sum(x * y for x, y in zip(a, b)) > 0.9999\n"
    )
    env = {**os.environ, "TIKTOKEN_CACHE_DIR": str(vocabulary)}
    run([CLIENTS / "venv/bin/python", "-c", program, server.url], server, env=env)


def test_litellm(scripted):
    run_script("litellm_client.py", scripted(*CHAT, *CHAT, CALL, CALL, BIRD, BIRD))


@pytest.mark.parametrize("stream", [False, True])
def test_aider_edits_a_file(stream, scripted, tmp_path):
    server = scripted("heron.py\n```\nprint('I am a heron.')\n```")
    work = tmp_path / "work"
    work.mkdir()
    (work / "heron.py").write_text("print('nobody')\n")
    flags = "--no-git --yes-always --no-check-update --no-show-model-warnings --no-analytics --map-tokens 0"
    streaming = "--stream" if stream else "--no-stream"
    run(
        [
            *(
                CLIENTS / "venv-aider/bin/aider",
                *flags.split(),
                streaming,
                "--edit-format",
                "whole",
                "--model",
                "openai/any",
            ),
            *("--openai-api-base", f"{server.url}/v1", "--openai-api-key", "none"),
            *("--message", "Say who you are.", "heron.py"),
        ],
        server,
        cwd=work,
        env={**os.environ, "HOME": str(tmp_path)},
    )
    assert (work / "heron.py").read_text() == "print('I am a heron.')\n"


# The requests of Open WebUI 0.6 to an Ollama server: on connecting, for a chat, for its title and tags, and for documents.
def test_open_webui_calls_of_ollama(scripted):
    server = scripted(*CHAT, '{ "title": "A heron" }')
    version = server.call("GET", "/api/version")[1]["version"]
    assert [int(part) for part in version.split(".")] >= [0, 5, 0], version
    [model] = server.call("GET", "/api/tags")[1]["models"]
    [running] = server.call("GET", "/api/ps")[1]["models"]
    assert running["name"] == model["name"] == model["model"]
    shown = server.call("POST", "/api/show", {"name": model["model"]})[1]
    assert "completion" in shown["capabilities"] and shown["model_info"]["general.architecture"]
    messages = [{"role": "user", "content": "Who are you, and where do you live?"}]
    options = {"temperature": 0.8, "num_ctx": 4096, "repeat_penalty": 1.1, "top_k": 40, "seed": 1, "stop": ["<end>"]}
    body = {"model": model["model"], "messages": messages, "stream": True, "keep_alive": "5m", "options": options}
    status, lines = server.call("POST", "/api/chat", body)
    assert status == 200, lines
    objects = [json.loads(line) for line in lines.splitlines()]
    assert "".join(o["message"]["content"] for o in objects).strip() == CHAT[0]
    assert objects[-1]["done"] and objects[-1]["eval_count"] > 0 and objects[-1]["total_duration"] > 0
    messages += [
        {"role": "assistant", "content": CHAT[0]},
        {"role": "user", "content": "And where is that?", "images": []},
    ]
    status, second = server.call("POST", "/api/chat", {**body, "messages": messages, "stream": False})
    assert status == 200 and second["message"]["content"].strip() == CHAT[1], second
    assert len(server.halo("GET", "/conversations")[1]) == 1, "both messages are one chat"
    task = {"model": model["model"], "messages": [{"role": "user", "content": "Generate a title"}], "stream": False}
    title = server.call("POST", "/api/chat", {**task, "options": {"num_predict": 1000}})[1]
    assert json.loads(title["message"]["content"])["title"] == "A heron"
    embedded = server.call("POST", "/api/embed", {"model": model["model"], "input": ["a heron", "a lake"]})[1]
    assert len(embedded["embeddings"]) == 2


# The requests of Open WebUI 0.6 to a server with OpenAI's API.
def test_open_webui_calls_of_openai(scripted):
    server = scripted(*CHAT, '{ "tags": ["birds"] }')
    [model] = server.call("GET", "/v1/models")[1]["data"]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who are you, and where?"}]
    body = {"model": model["id"], "messages": messages, "stream": True, "stream_options": {"include_usage": True}}
    headers = {"Content-Type": "application/json", "Authorization": "Bearer none"}
    status, text = server.call("POST", "/v1/chat/completions", body, headers=headers)
    assert status == 200, text
    events = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    answer = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
    assert answer.strip() == CHAT[0] and chunks[-1]["usage"]["completion_tokens"] > 0
    messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "And where is that?"}]
    second = server.call("POST", "/v1/chat/completions", {"model": model["id"], "messages": messages, "stream": False})[
        1
    ]
    assert second["choices"][0]["message"]["content"].strip() == CHAT[1]
    task = {
        "model": model["id"],
        "messages": [{"role": "user", "content": "Generate tags"}],
        "max_completion_tokens": 1000,
    }
    tags = server.call("POST", "/v1/chat/completions", {**task, "stream": False})[1]
    assert json.loads(tags["choices"][0]["message"]["content"])["tags"] == ["birds"]
    embedded = server.call("POST", "/v1/embeddings", {"model": model["id"], "input": ["a heron"]})[1]
    assert len(embedded["data"]) == 1


TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a town",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
    },
}
QUESTION = {"role": "user", "content": "How is the weather in Lindau?"}


# A tool of Open WebUI with "native" function calling: it runs the function itself, and streams both requests.
def test_open_webui_tools_of_openai(scripted):
    server = scripted(CALL, "It is sunny in Lindau.")

    def ask(messages):
        body = {"model": "any", "messages": messages, "tools": [TOOL], "stream": True}
        status, text = server.call("POST", "/v1/chat/completions", body)
        assert status == 200, text
        events = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
        assert events[-1] == "[DONE]"
        choices = [choice for event in events[:-1] for choice in json.loads(event)["choices"]]
        calls = {}
        for delta in (call for choice in choices for call in choice["delta"].get("tool_calls") or []):
            call = calls.setdefault(
                delta["index"], {"index": delta["index"], "function": {"name": "", "arguments": ""}}
            )
            call.update({name: delta[name] for name in ("id", "type") if delta.get(name)})
            for name in ("name", "arguments"):
                call["function"][name] += delta["function"].get(name) or ""
        text = "".join(choice["delta"].get("content") or "" for choice in choices)
        return text.strip(), list(calls.values()), choices[-1]["finish_reason"]

    text, [call], finish = ask([QUESTION])
    assert (text, finish, call["function"]["name"]) == ("", "tool_calls", "get_weather")
    assert json.loads(call["function"]["arguments"]) == {"town": "Lindau"}, call
    history = [
        QUESTION,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "sunny"},
    ]
    assert ask(history) == ("It is sunny in Lindau.", [], "stop")
    assert len(server.halo("GET", "/conversations")[1]) == 1, "the call and its result are one chat"


def test_open_webui_tools_of_ollama(scripted):
    server = scripted(CALL, "It is sunny in Lindau.", BIRD)

    def ask(messages, **more):
        status, text = server.call("POST", "/api/chat", {"model": "any", "messages": messages, "stream": True, **more})
        assert status == 200, text
        objects = [json.loads(line) for line in text.splitlines()] if isinstance(text, str) else [text]
        calls = [call for part in objects for call in part["message"].get("tool_calls") or []]
        return "".join(part["message"]["content"] for part in objects).strip(), calls

    text, [call] = ask([QUESTION], tools=[TOOL])
    assert text == "" and call["function"] == {"name": "get_weather", "arguments": {"town": "Lindau"}}, call
    history = [
        QUESTION,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "sunny", "tool_name": "get_weather"},
    ]
    assert ask(history, tools=[TOOL]) == ("It is sunny in Lindau.", [])
    assert len(server.halo("GET", "/conversations")[1]) == 1, "the call and its result are one chat"
    # The parameter "format" of its models.
    text, calls = ask([{"role": "user", "content": "A bird as JSON"}], format="json")
    assert json.loads(text) == json.loads(BIRD) and not calls, text


def openai_document():
    """The bodies of OpenAI's API as far as they matter here: what is generated may be valid or not, but the server answers it."""
    text = {"type": "string", "maxLength": 40}
    role = {"enum": ["system", "user", "assistant", "tool", "developer", "nobody"]}
    part = {"type": "object", "properties": {"type": {"enum": ["text", "image_url"]}, "text": text}}
    content = {"anyOf": [text, {"type": "null"}, {"type": "array", "items": part, "maxItems": 2}]}
    message = {"type": "object", "properties": {"role": role, "content": content}, "required": ["role"]}
    numbers = {
        name: {"type": ["number", "null"]}
        for name in ("temperature", "top_p", "min_p", "top_k", "presence_penalty", "frequency_penalty", "seed", "n")
    }
    sampling = {
        **numbers,
        "max_tokens": {"type": "integer", "maximum": 8},
        "stop": {"type": ["string", "array", "null"]},
    }
    tool = {"type": "object", "properties": {"type": {"const": "function"}, "function": {"type": "object"}}}
    bodies = {
        "/v1/chat/completions": {
            **sampling,
            "messages": {"type": "array", "items": message, "maxItems": 4},
            "tools": {"type": "array", "items": tool, "maxItems": 2},
            "store": {"type": ["boolean", "null"]},
            "response_format": {"type": ["object", "null"]},
        },
        "/v1/completions": {**sampling, "prompt": {"type": ["string", "array", "null"]}, "logprobs": {}},
        "/v1/embeddings": {"input": {"type": ["string", "array", "null"]}, "dimensions": {}},
        "/v1/responses": {"input": {"anyOf": [text, {"type": "array", "items": message}]}, "instructions": text},
    }
    paths = {
        path: {
            "post": {
                "requestBody": {
                    "required": True,
                    "content": {"application/json": {"schema": {"type": "object", "properties": properties}}},
                },
                "responses": {"default": {"description": "an answer or an error"}},
            }
        }
        for path, properties in bodies.items()
    }
    return {"openapi": "3.1.0", "info": {"title": "OpenAI", "version": "1"}, "paths": paths}


def test_openai_routes_have_no_server_errors(scripted):
    server = scripted("A short answer.")
    schema = schemathesis.openapi.from_dict(openai_document())
    [no_server_error] = [check for check in CHECKS.get_all() if check.__name__ == "not_a_server_error"]
    for operation in schema.get_all_operations():

        @hypothesis.given(case=operation.ok().as_strategy())
        @hypothesis.settings(
            max_examples=CASES,
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        def check_case(case):
            response = case.call(base_url=server.url, timeout=60)
            case.validate_response(response, checks=[no_server_error])

        check_case()
    assert server.call("GET", "/health")[0] == 200
