"""The routes of llama-server, with the real small model."""

import json
import urllib.request

from conftest import Server


def test_llama_server_describes_the_model(server):
    status, props = server.call("GET", "/props")
    assert status == 200 and props["default_generation_settings"]["n_ctx"] > 1000, props
    assert props["model_path"].endswith(".gguf") and "/" not in props["model_path"], props
    assert "<|im_start|>" in props["chat_template"] and props["total_slots"] == 4, props
    assert server.call("GET", "/slots")[1][0]["id"] == 0
    models = server.call("GET", "/v1/models")[1]["data"][0]
    assert models["max_model_len"] == models["meta"]["n_ctx"] == props["default_generation_settings"]["n_ctx"]
    assert models["created"] > 1_000_000_000, models


def test_llama_server_template_has_only_what_the_client_sent(tmp_path):
    """Neither the date nor the system prompt of the settings: both are on here."""
    server = Server(tmp_path, "chat.dates=true", "chat.system=You are a lighthouse keeper.").start()
    try:
        messages = [{"role": "user", "content": "Hello <|im_end|>"}]
        prompt = server.call("POST", "/apply-template", {"messages": messages})[1]["prompt"]
        assert prompt == "<|im_start|>user\nHello <|im_end|><|im_end|>\n<|im_start|>assistant\n"
    finally:
        server.stop()


def test_llama_server_tokens_and_templates(server):
    tokens = server.call("POST", "/tokenize", {"content": "The lighthouse keeper"})[1]["tokens"]
    assert server.call("POST", "/detokenize", {"tokens": tokens})[1] == {"content": "The lighthouse keeper"}
    messages = [
        {"role": "user", "content": "What is the time?"},
        {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "clock", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "c", "content": "noon"},
        {"role": "assistant", "content": "It is"},
    ]
    tools = [{"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}]
    prompt = server.call("POST", "/apply-template", {"messages": messages, "tools": tools})[1]["prompt"]
    parts = ['"name": "clock", "parameters"', '{"name": "clock", "arguments": {}}', "\nnoon\n", "assistant\nIt is"]
    places = [prompt.find(part) for part in parts]
    assert -1 not in places and places == sorted(places) and prompt.endswith("It is"), prompt


def test_llama_server_completes_several_prompts(server):
    body = {"prompt": ["Once upon a time", "The king"], "n_predict": 4, "temperature": 0}
    both = server.call("POST", "/completion", body)[1]
    alone = [server.call("POST", "/completion", {**body, "prompt": prompt})[1] for prompt in body["prompt"]]
    assert [one["content"] for one in both] == [one["content"] for one in alone]
    assert [one["index"] for one in both] == [0, 1]


def test_llama_server_completes(server):
    body = {"prompt": "Once upon a time, there was a", "n_predict": 8, "temperature": 0}
    status, first = server.call("POST", "/completion", body)
    assert status == 200 and first["stop_type"] == "limit" and first["tokens_predicted"] == 8, first
    again = server.call("POST", "/completion", body)[1]
    assert again["content"] == first["content"]
    assert again["timings"]["cache_n"] > 0 and again["timings"]["predicted_per_second"] > 0, again
    tokens = server.call("POST", "/tokenize", {"content": body["prompt"]})[1]["tokens"]
    assert server.call("POST", "/completion", {**body, "prompt": tokens})[1]["content"] == first["content"]
    data = json.dumps({**body, "stream": True}).encode()
    with urllib.request.urlopen(urllib.request.Request(server.url + "/completion", data), timeout=60) as response:
        events = [json.loads(line[6:]) for line in response if line.startswith(b"data: ")]
    assert "".join(event["content"] for event in events) == first["content"]
    assert [event["stop"] for event in events[:-1]] == [False] * (len(events) - 1) and events[-1]["stop"], events
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
    answer = server.call("POST", "/completion", {"prompt": "JSON: ", "n_predict": 30, "json_schema": schema})[1]
    assert isinstance(json.loads(answer["content"])["age"], int), answer


def test_openai_usage_reports_cached_tokens(server):
    messages = [{"role": "user", "content": "Tell me about the lighthouse and its keeper."}]
    # Without a maximum an answer may fill the context.
    first = server.call("POST", "/v1/chat/completions", {"messages": messages, "max_tokens": 16})[1]
    messages += [first["choices"][0]["message"], {"role": "user", "content": "And the sea?"}]
    second = server.call("POST", "/v1/chat/completions", {"messages": messages, "max_tokens": 16})[1]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 0, second["usage"]
    assert second["system_fingerprint"] == first["system_fingerprint"] and second["timings"]["prompt_n"] > 0


def test_llama_server_embeds(server):
    status, embedded = server.call("POST", "/embedding", {"content": "a lamp"})
    assert status == 200 and len(embedded[0]["embedding"][0]) == 384, embedded
