"""KoboldCPP's API with attention, used exactly as the Halo Weave front end uses it."""

import base64
import http.client
import json
import struct
import threading
import time
import uuid

ORIGIN = {"Origin": "http://localhost:8080"}
STOPS = ["<|im_start|>user", "<|im_start|>system", ")  user\n", ")  system\n", "</tool>"]


def connect(server):
    host, port = server.listen.rsplit(":", 1)
    return http.client.HTTPConnection(host, int(port), timeout=60)


def tokenize(server, text):
    """The front end sends text/plain, so that the browser needs no preflight, and times out after five seconds."""
    body = json.dumps({"text": text, "add_special_tokens": False}).encode()
    started = time.time()
    status, result = server.call(
        "POST", "/api/v1/tokenize", body, headers={"Content-Type": "text/plain", **ORIGIN}, timeout=5
    )
    assert status == 200 and time.time() - started < 5
    return result["tokens"]


def request(ids, **more):
    return {
        "input_ids": ids,
        "max_length": 12,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 40,
        "rep_pen": 1.0,
        "output_attentions": True,
        "request_id": str(uuid.uuid4()),
        "sampler_seed": -1,
        "stop_sequence": STOPS,
        **more,
    }


def start_stream(server, body):
    connection = connect(server)
    headers = {"Content-Type": "application/json", "Accept": "text/event-stream", **ORIGIN}
    connection.request("POST", "/api/extra/generate/stream", json.dumps(body), headers)
    return connection, connection.getresponse()


def events(response):
    """The events of the stream: one JSON object in each line that begins with 'data: '."""
    for line in response:
        if line.startswith(b"data: "):
            yield json.loads(line[6:])


def prompt(server, text="Tell me about winter."):
    parts = [
        "<|im_start|>system\nYou are brief.<|im_end|>\n",
        f"(2026-11-15_10:00:00) <|im_start|>user\n{text}<|im_end|>\n",
        "(2026-11-15_10:00:01) <|im_start|>Qwen\n",
    ]
    return [token["token_id"] for part in parts for token in tokenize(server, part)]


def test_model_has_all_fields(server):
    status, model = server.call("GET", "/api/v1/model", headers=ORIGIN)
    fields = (
        "result model_name vocab_size num_layers num_attention_heads num_key_value_heads embedding_size max_context_length "
        "max_trained_context bos_token_id eos_token_id eot_token_id rope_freq_base rope_freq_scale"
    )
    assert status == 200 and set(fields.split()) == set(model)
    expected = {
        "vocab_size": 49152,
        "num_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "embedding_size": 576,
        "max_context_length": 8192,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "eot_token_id": -1,
        "rope_freq_base": 100000.0,
    }
    assert {key: model[key] for key in expected} == expected


def test_preflight_and_origins(server):
    connection = connect(server)
    preflight = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
    connection.request("OPTIONS", "/api/extra/generate/stream", headers={**ORIGIN, **preflight})
    response = connection.getresponse()
    assert response.status in (200, 204)
    assert response.headers["Access-Control-Allow-Origin"] == ORIGIN["Origin"]
    assert "POST" in response.headers["Access-Control-Allow-Methods"]
    assert "content-type" in response.headers["Access-Control-Allow-Headers"]
    status, result = server.call("GET", "/api/v1/model", headers={"Origin": "https://evil.example"})
    assert status == 403 and "server.origins" in result["error"]


def test_tokenize_special_tokens_are_single_and_have_no_text(server):
    tokens = tokenize(server, "<|im_start|>user\nHi<|im_end|>\n")
    assert [token["token_id"] for token in tokens][0] == 1 and tokens[0]["text"] == ""
    assert "".join(token["text"] for token in tokens) == "user\nHi\n"
    emoji = tokenize(server, "a 🦊 b")
    assert "".join(token["text"] for token in emoji) == "a 🦊 b", "a character of several tokens is returned complete"
    ids = [token["token_id"] for token in emoji]
    assert server.call("POST", "/api/v1/detokenize", {"token_ids": ids}) == (200, {"text": "a 🦊 b"})
    assert server.call("POST", "/api/extra/detokenize", {"ids": ids}) == (200, {"result": "a 🦊 b", "success": True})
    assert server.call("POST", "/api/extra/tokencount", {"prompt": "a 🦊 b"}) == (200, {"value": len(ids), "ids": ids})


def test_stream_with_attention(server):
    ids = prompt(server)
    body = request(ids)
    connection, response = start_stream(server, body)
    assert response.status == 200 and response.headers["Content-Type"].startswith("text/event-stream")
    assert response.headers["Access-Control-Allow-Origin"] == ORIGIN["Origin"]
    assert response.headers["Cache-Control"] == "no-cache" and response.headers["X-Accel-Buffering"] == "no"
    result = list(events(response))
    *tokens, done = result
    assert done == {
        "type": "done",
        "finish_reason": done["finish_reason"],
        "total_tokens": len(ids) + len(tokens),
        "request_id": body["request_id"],
    }
    assert done["finish_reason"] in ("length", "stop") and 0 < len(tokens) <= 12
    for n, token in enumerate(tokens):
        assert token["type"] == "token" and token["request_id"] == body["request_id"]
        assert isinstance(token["token"]["token_id"], int) and isinstance(token["token"]["text"], str)
        attention = token["attention"]
        if n == 0 and attention is None:
            continue
        assert (
            attention["format"] == "aggregated"
            and attention["encoding"] == "base64"
            and attention["dtype"] == "float32"
        )
        raw = base64.b64decode(attention["data"])
        row = struct.unpack(f"<{len(raw) // 4}f", raw)
        assert attention["shape"] == [len(row)] and attention["context_length"] == len(row)
        assert len(ids) + n <= len(row), "one value per token of the context"
        assert abs(sum(row) - 1) < 1e-2 and min(row) >= 0, "probabilities"
    # The client sends the generated ids back, with a part removed as pruning does.
    generated = [token["token"]["token_id"] for token in tokens]
    for input_ids in (ids + generated, ids[:4] + ids[12:] + generated, ids + generated):
        _, response = start_stream(server, request(input_ids))
        assert list(events(response))[-1]["type"] == "done"


def test_stream_with_attention_per_layer(server):
    """The row of every head of every layer; their mean is the row of the aggregated format."""
    ids = prompt(server)
    rows = {}
    for name in ("per_layer", "aggregated"):
        body = request(ids, max_length=3, temperature=0, attention_format=name)
        _, response = start_stream(server, body)
        rows[name] = [token["attention"] for token in events(response) if token["type"] == "token"][1:]
    assert len(rows["per_layer"]) == len(rows["aggregated"]) == 2
    for by_layer, aggregated in zip(rows["per_layer"], rows["aggregated"], strict=True):
        length = aggregated["context_length"]
        assert by_layer["format"] == "per_layer" and by_layer["shape"] == [30, 9, length]
        assert by_layer["context_length"] == length
        assert by_layer["encoding"] == "base64" and by_layer["dtype"] == "float32"
        values = struct.unpack(f"<{30 * 9 * length}f", base64.b64decode(by_layer["data"]))
        heads = [values[start : start + length] for start in range(0, len(values), length)]
        assert all(abs(sum(head) - 1) < 1e-2 and min(head) >= 0 for head in heads), "probabilities"
        mean = struct.unpack(f"<{length}f", base64.b64decode(aggregated["data"]))
        means = [sum(head[slot] for head in heads) / len(heads) for slot in range(length)]
        assert max(abs(a - b) for a, b in zip(means, mean, strict=True)) < 1e-3
    _, response = start_stream(server, request(ids, attention_format="raw"))
    assert response.status == 400, "an unknown format is refused"


def test_stream_with_attention_sends_stop_sequences(server):
    ids = prompt(server)
    word = None
    _, response = start_stream(server, request(ids, sampler_seed=7))
    full_text = "".join(event["token"]["text"] for event in events(response) if event["type"] == "token")
    word = full_text.split()[1]
    _, response = start_stream(server, request(ids, sampler_seed=7, stop_sequence=[word]))
    *tokens, done = events(response)
    text = "".join(event["token"]["text"] for event in tokens)
    assert word in text and done["finish_reason"] == "stop", "clients find tool calls by their closing tag"
    assert full_text.startswith(text)


def test_tokenize_does_not_wait_for_generation(server):
    _, response = start_stream(server, request(prompt(server), max_length=200, stop_sequence=[]))
    received = events(response)
    next(received)
    for _ in range(5):
        tokenize(server, "Is anybody there?")
    assert server.call("POST", "/api/extra/abort", {})[1] == {"success": "true", "done": "true"}, (
        "strings, not booleans"
    )
    list(received)
    tokenize(server, "<|im_end|>\n")


def test_disconnect_stops_generation(server):
    connection, response = start_stream(server, request(prompt(server), max_length=4000, stop_sequence=[]))
    next(events(response))
    connection.sock.close()
    response.close()
    deadline = time.time() + 20
    while server.halo("GET", "/status")[1]["busy"]:
        assert time.time() < deadline, "the server is still generating"
        time.sleep(0.05)


def test_generate_without_attention(server):
    body = {"prompt": "Once upon a time", "max_length": 8, "sampler_seed": 3}
    status, result = server.call("POST", "/api/v1/generate", body)
    text = result["results"][0]["text"]
    assert status == 200 and text
    assert server.call("GET", "/api/extra/generate/check")[1] == {"results": [{"text": text}]}
    connection, response = start_stream(server, body)
    result = list(events(response))
    assert "".join(event["token"] for event in result) == text, "the same seed gives the same text"
    assert result[-1]["finish_reason"] in ("length", "stop") and result[0]["finish_reason"] is None
    stop = text.split()[2]
    result = server.call("POST", "/api/v1/generate", {**body, "stop_sequence": [stop]})[1]["results"][0]
    assert stop not in result["text"] and text.startswith(result["text"]) and result["finish_reason"] == "stop"


def test_memory_comes_before_the_prompt(server):
    """M6: a client of KoboldCPP sends its character and world in `memory`."""
    memory, prompt = "The password of the boat house is heron.\n", "\nThe password of the boat house is"
    body = {"max_length": 6, "temperature": 0}

    def call(**more):
        return server.call("POST", "/api/v1/generate", {**body, **more})[1]["results"][0]

    joined = call(prompt=memory + prompt)
    assert call(memory=memory, prompt=prompt)["text"] == joined["text"]
    cut = call(memory=memory, prompt="word " * 12_000 + prompt, max_context_length=512)
    assert cut["prompt_tokens"] <= 512 - 6 and cut["completion_tokens"] <= 6


def test_figures_and_logprobs_of_a_generation(server):
    body = {"prompt": "Once upon a time", "max_length": 4, "sampler_seed": 3, "logprobs": 2, "genkey": "KCPP1"}
    result = server.call("POST", "/api/v1/generate", body)[1]["results"][0]
    perf = server.call("GET", "/api/extra/perf")[1]
    assert perf["last_token_count"] == result["completion_tokens"] and perf["last_seed"] == 3
    assert perf["last_eval"] > 0 and perf["stop_reason"] in (0, 1) and perf["total_gens"] > 0
    logprobs = server.call("POST", "/api/extra/last_logprobs", {"genkey": "KCPP1"})[1]["logprobs"]
    assert "".join(logprobs["tokens"]) == result["text"] and len(logprobs["content"][0]["top_logprobs"]) == 2
    assert server.call("POST", "/api/extra/generate/check", {"genkey": "KCPP2"})[1] == {"results": [{"text": ""}]}


def test_abort_without_a_key_stops_a_chat(server):
    message = {"role": "user", "content": "Tell me a very long story of the sea."}
    body, result = {"messages": [message], "max_tokens": 2000, "ignore_eos": True}, []
    thread = threading.Thread(target=lambda: result.append(server.call("POST", "/v1/chat/completions", body)))
    thread.start()
    deadline = time.time() + 60
    while server.call("POST", "/api/extra/abort", {})[1]["success"] != "true":
        assert time.time() < deadline
        time.sleep(0.2)
    thread.join(timeout=30)
    assert result[0][1]["usage"]["completion_tokens"] < 2000


def test_preview_stores_nothing(server):
    ids = prompt(server)
    list(events(start_stream(server, request(ids, max_length=2))[1]))
    append = [{"token_id": token["token_id"], "text": token["text"]} for token in tokenize(server, "And spring?")]
    result = [
        server.call("POST", "/api/v1/generate/preview", {"append_tokens": append, "max_tokens": 6, "temperature": 0.0})
        for _ in range(2)
    ]
    assert all(status == 200 for status, _ in result)
    assert result[0][1]["text"] == result[1][1]["text"] and result[0][1]["cache_hit"] is True


def test_version_and_context_length(server):
    assert server.call("GET", "/api/v1/info/version") == (200, {"result": "1.2.5"})
    assert server.call("GET", "/api/extra/version")[1]["result"] == "KoboldCpp"
    for path in ("/api/v1/config/max_context_length", "/api/extra/true_max_context_length"):
        assert server.call("GET", path) == (200, {"value": 8192})


def test_invalid_requests_have_an_error_message(server):
    for body, expected in [
        (b"{", "invalid JSON"),
        ({"max_length": 3}, "empty"),
        ({"prompt": "a", "max_length": 0}, "max_length"),
        ({"input_ids": [99999999]}, "no token"),
        ({"prompt": "word " * 9000}, "context length exceeded"),
    ]:
        status, result = server.call("POST", "/api/extra/generate/stream", body)
        assert status == 400 and expected in result["error"], result


def test_concurrent_requests_are_answered(server):
    texts = [None, None]

    def generate(n):
        texts[n] = server.call(
            "POST", "/api/v1/generate", {"prompt": f"Number {n} is", "max_length": 20, "sampler_seed": n}
        )[1]["results"][0]["text"]

    threads = [threading.Thread(target=generate, args=(n,)) for n in range(2)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert all(texts)


# What Kobold Lite sends with its default settings, in instruct mode with "KoboldCppAutomatic".
LITE_KEY = "KCPP4711"
LITE_REQUEST = {
    "n": 1,
    "max_context_length": 4096,
    "max_length": 12,
    "rep_pen": 1.07,
    "temperature": 0.75,
    "top_p": 0.92,
    "top_k": 100,
    "top_a": 0,
    "typical": 1,
    "tfs": 1,
    "rep_pen_range": 360,
    "rep_pen_slope": 0.7,
    "sampler_order": [6, 0, 1, 3, 4, 2, 5],
    "memory": "{{[SYSTEM]}}The password of the boat house is heron.{{[SYSTEM_END]}}",
    "trim_stop": True,
    "genkey": LITE_KEY,
    "min_p": 0,
    "dynatemp_range": 0,
    "dynatemp_exponent": 1,
    "smoothing_factor": 0,
    "nsigma": 0,
    "banned_tokens": [],
    "render_special": False,
    "logprobs": True,
    "replace_instruct_placeholders": True,
    "presence_penalty": 0,
    "logit_bias": {},
    "quiet": True,
    "stop_sequence": ["{{[INPUT]}}", "{{[OUTPUT]}}"],
    "use_default_badwordsids": False,
    "bypass_eos": False,
    "prompt": "{{[INPUT]}}Hello there.{{[INPUT_END]}}{{[OUTPUT]}}",
}


def test_kobold_lite_requests_are_answered(server):
    """Kobold Lite's own requests, in its order: connecting, a streamed answer, a polled one, aborting, and what it asks afterwards."""

    def get(path):
        status, result = server.call("GET", path, headers=ORIGIN)
        assert status == 200, (path, result)
        return result

    def post(path, body, **more):
        status, result = server.call("POST", path, body, headers=ORIGIN, **more)
        assert status == 200, (path, result)
        return result

    assert get("/api/v1/model")["result"].startswith("koboldcpp/")
    assert get("/api/v1/info/version")["result"]
    assert get("/api/extra/version")["result"] == "KoboldCpp"
    assert get("/api/v1/config/max_context_length")["value"] >= 512
    assert get("/api/v1/config/max_length")["value"] > 0
    assert get("/api/extra/true_max_context_length")["value"] >= 512
    assert get("/api/extra/preloadstory") == {}
    assert get("/sdapi/v1/sd-models") == []

    connection, response = start_stream(server, LITE_REQUEST)
    assert response.status == 200 and response.headers["Content-Type"].startswith("text/event-stream")
    received = list(events(response))
    connection.close()
    streamed = "".join(event["token"] for event in received)
    assert received[-1]["finish_reason"] in ("length", "stop")
    assert "<|im_" not in streamed and "{{[" not in streamed
    assert post("/api/extra/generate/check", {"genkey": LITE_KEY})["results"][0]["text"].startswith(streamed[:4])
    assert post("/api/extra/last_logprobs", {"genkey": LITE_KEY})["logprobs"]["content"]

    # The placeholders became the template of the model: the same prompt by hand has as many tokens, and a prompt without them others.
    whole = post("/api/v1/generate", {**LITE_REQUEST, "max_length": 1})["results"][0]
    by_hand = {
        **LITE_REQUEST,
        "max_length": 1,
        "memory": "<|im_start|>system\nThe password of the boat house is heron.<|im_end|>\n",
        "prompt": "<|im_start|>user\nHello there.<|im_end|>\n<|im_start|>assistant\n",
    }
    assert post("/api/v1/generate", by_hand)["results"][0]["prompt_tokens"] == whole["prompt_tokens"]
    literal = {**LITE_REQUEST, "max_length": 1, "replace_instruct_placeholders": False}
    assert post("/api/v1/generate", literal)["results"][0]["prompt_tokens"] != whole["prompt_tokens"]

    results = {}
    long = {**LITE_REQUEST, "max_length": 400, "bypass_eos": False, "use_default_badwordsids": True}
    polled = threading.Thread(target=lambda: results.update(post("/api/v1/generate", long, timeout=120)))
    polled.start()
    deadline = time.time() + 30
    while time.time() < deadline:
        if len(post("/api/extra/generate/check", {"genkey": LITE_KEY})["results"][0]["text"]) > 20:
            break
        time.sleep(0.1)
    assert post("/api/extra/abort", {"genkey": LITE_KEY})["success"] == "true"
    polled.join(30)
    assert not polled.is_alive() and results["results"][0]["completion_tokens"] < 400
    perf = get("/api/extra/perf")
    assert perf["last_token_count"] > 0 and perf["last_eval_speed"] > 0
    assert post("/api/extra/tokencount", {"prompt": LITE_REQUEST["prompt"]})["value"] > 0
