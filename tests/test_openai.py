"""OpenAI's own Python client, unchanged, against the real program."""

import json
import threading
import time
import urllib.parse
import urllib.request

import openai
import pytest


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def conversations(server):
    return {chat["name"]: chat for chat in server.halo("GET", "/conversations")[1]}


def test_models(client, server):
    [model] = client.models.list().data
    assert model.id == server.halo("GET", "/status")[1]["model"]
    assert client.models.retrieve(model.id).id == model.id
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-9")


def test_chat_continues_one_conversation_when_history_is_dropped(client, server):
    before = set(conversations(server))
    messages = [
        {"role": "system", "content": "You are a gardener."},
        {"role": "user", "content": "My apple tree is called Emma."},
    ]
    for next_message in ("How old can it get?", "What does it need in spring?"):
        answer = client.chat.completions.create(model="any", messages=messages, max_completion_tokens=12)
        assert answer.choices[0].message.role == "assistant" and answer.choices[0].finish_reason in ("length", "stop")
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
        messages += [
            {"role": "assistant", "content": answer.choices[0].message.content},
            {"role": "user", "content": next_message},
        ]
    [name] = set(conversations(server)) - before
    assert name == "My apple tree is called Emma."
    assert conversations(server)[name]["turns"] == 4
    # The client drops the oldest messages: the conversation is the same, and it still has them.
    answer = client.chat.completions.create(
        model="any", messages=messages[:1] + messages[-2:], max_completion_tokens=12
    )
    assert set(conversations(server)) - before == {name} and conversations(server)[name]["turns"] == 6
    state = server.halo("GET", f"/conversations/{urllib.parse.quote(name)}")[1]
    user_texts = [chunk["text"].strip() for chunk in state["chunks"] if chunk["role"] == "user"]
    assert user_texts == ["My apple tree is called Emma.", "How old can it get?", "What does it need in spring?"]
    assert "You are a gardener." in state["system_prompt"]
    # The same last message again: the answer is regenerated and replaced.
    regenerated = client.chat.completions.create(
        model="any", messages=messages[:1] + messages[-2:], max_completion_tokens=12, seed=99
    )
    texts = [
        chunk["text"].strip() for chunk in server.halo("GET", f"/conversations/{urllib.parse.quote(name)}")[1]["chunks"]
    ]
    assert (
        texts.count("What does it need in spring?") == 1 and texts[-1] == regenerated.choices[0].message.content.strip()
    )
    # An edited message replaces the last one.
    edited = messages[:1] + messages[-2:-1] + [{"role": "user", "content": "And in autumn?"}]
    client.chat.completions.create(model="any", messages=edited, max_completion_tokens=12)
    texts = [
        chunk["text"].strip() for chunk in server.halo("GET", f"/conversations/{urllib.parse.quote(name)}")[1]["chunks"]
    ]
    assert "What does it need in spring?" not in texts and "And in autumn?" in texts
    # A request with another system prompt continues the same conversation.
    client.chat.completions.create(
        model="any", messages=[{"role": "system", "content": "You are a cook."}, *edited[1:]], max_completion_tokens=4
    )
    assert set(conversations(server)) - before == {name}
    assert "You are a cook." in server.halo("GET", f"/conversations/{urllib.parse.quote(name)}")[1]["system_prompt"]


def test_chat_stream(client, server):
    messages = [{"role": "user", "content": "Count to five, please."}]
    options = {"include_usage": True}
    chunks = list(
        client.chat.completions.create(
            model="any", messages=messages, stream=True, stream_options=options, temperature=0, max_tokens=16
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    finish = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert finish[-1] in ("length", "stop") and set(finish[:-1]) == {None}
    assert chunks[-1].usage.completion_tokens > 0 and len({chunk.id for chunk in chunks}) == 1
    unstreamed = client.chat.completions.create(model="any", messages=messages, temperature=0, max_tokens=16)
    assert unstreamed.choices[0].message.content == text, "the same text as without streaming"
    stop = text.split()[1]
    stopped = client.chat.completions.create(model="any", messages=messages, temperature=0, max_tokens=16, stop=[stop])
    assert stop not in stopped.choices[0].message.content and text.startswith(stopped.choices[0].message.content)


def test_chat_conversation_header(client, server):
    name = {"x-halo-conversation": "Garten %E2%82%AC"}
    for text in ("Hello there.", "What did I just say?"):
        raw = client.chat.completions.with_raw_response.create(
            model="any", messages=[{"role": "user", "content": text}], max_tokens=4, extra_headers=name
        )
        assert raw.headers["x-halo-conversation"] == "Garten %E2%82%AC"
    assert conversations(server)["Garten €"]["turns"] == 4


def test_chat_disconnect_stops_the_answer(client, server):
    stream = client.chat.completions.create(
        model="any", messages=[{"role": "user", "content": "Tell me a very long story."}], max_tokens=2000, stream=True
    )
    for n, _ in enumerate(stream):
        if n == 3:
            break
    stream.close()
    deadline = time.time() + 20
    while server.halo("GET", "/status")[1]["busy"]:
        assert time.time() < deadline, "the server is still generating"
        time.sleep(0.05)
    state = server.halo("GET", "/conversations/Tell%20me%20a%20very%20long%20story.")[1]
    assert state["finish_reasons"] == {"1": "aborted"} and state["chunks"][-1]["text"], "the tokens so far are stored"


def test_chat_json_schema(client):
    schema = {
        "type": "object",
        "properties": {"age": {"type": "integer"}},
        "required": ["age"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model="any",
        messages=[{"role": "user", "content": "How old is Anna, who is twelve?"}],
        max_tokens=40,
        response_format={"type": "json_schema", "json_schema": {"name": "age", "schema": schema}},
    )
    assert isinstance(json.loads(answer.choices[0].message.content)["age"], int)


def test_completions(client):
    unstreamed = client.completions.create(model="any", prompt="The capital of France is", max_tokens=6, temperature=0)
    text = unstreamed.choices[0].text
    assert text and unstreamed.usage.completion_tokens <= 6
    streamed = client.completions.create(
        model="any", prompt="The capital of France is", max_tokens=6, temperature=0, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in streamed) == text
    ids = client.completions.create(model="any", prompt=[504, 3575, 282], max_tokens=2, echo=True)
    assert ids.choices[0].text


def test_embeddings(client):
    result = client.embeddings.create(
        model="any", input=["a red apple", "an apple that is red", "quarterly tax report"]
    )
    a, b, c = (item.embedding for item in result.data)
    dot = lambda x, y: sum(p * q for p, q in zip(x, y))
    assert len(a) == 384 and abs(dot(a, a) - 1) < 1e-3 and dot(a, b) > dot(a, c)
    plain = client.embeddings.create(model="any", input="a red apple", encoding_format="float").data[0].embedding
    assert max(abs(p - q) for p, q in zip(plain, a)) < 1e-6
    # "hello world" in the vocabulary of OpenAI's embedding models, as clients send it that tokenize themselves.
    ids = client.embeddings.create(model="any", input=[[15339, 1917]]).data[0].embedding
    text = client.embeddings.create(model="any", input="hello world").data[0].embedding
    assert dot(ids, text) > 0.9999
    with pytest.raises(openai.BadRequestError) as error:
        client.embeddings.create(model="any", input=[[4_000_000_000]])
    assert error.value.param == "input" and "cl100k_base" in str(error.value)
    with pytest.raises(openai.BadRequestError):
        client.embeddings.create(model="any", input=[])


@pytest.mark.parametrize(
    "request_body, expected",
    [
        ({"messages": []}, "last message"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "role"),
        ({"messages": [{"role": "user", "content": "  "}]}, "last message"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "image_url"),
        ({"messages": [{"role": "user", "content": "x"}], "n": 99}, "n is 99"),
        ({"messages": [{"role": "user", "content": "x"}], "frequency_penalty": 3}, "frequency_penalty"),
        ({"messages": [{"role": "user", "content": "x"}], "extra_body": {"banned_strings": ["x"]}}, "banned_strings"),
        ({"messages": [{"role": "user", "content": "x"}], "temperature": 9}, "temperature"),
        ({"messages": [{"role": "user", "content": "x"}], "max_tokens": 0}, "max_tokens"),
        ({"messages": [{"role": "user", "content": "word " * 9000}]}, "context length exceeded"),
    ],
)
def test_invalid_requests_have_an_error_message(client, server, request_body, expected):
    before = conversations(server)
    with pytest.raises(openai.BadRequestError) as result:
        client.chat.completions.create(model="any", **request_body)
    assert expected in result.value.body["message"] and result.value.body["type"] == "invalid_request_error"
    assert (result.value.code == "context_length_exceeded") == (expected == "context length exceeded")
    assert conversations(server) == before, "nothing was stored"
    if expected in ("temperature", "max_tokens", "frequency_penalty", "banned_strings"):
        assert result.value.param == expected


def test_completions_follow_the_samplers_of_other_programs(client):
    """M5: SillyTavern's KoboldCPP mode sends its samplers to /v1/completions."""

    def complete(**extra):
        prompt = "She smiles. She smiles. She smiles. She smiles."
        answer = client.completions.create(model="any", prompt=prompt, max_tokens=16, temperature=0, extra_body=extra)
        return answer.choices[0].text

    plain = complete()
    assert complete(rep_pen=1.0, tfs=1, top_a=0, typical=1, banned_strings=[]) == plain, "neutral values change nothing"
    assert complete(rep_pen=1.8) == complete(repetition_penalty=1.8) != plain
    assert complete(dry_multiplier=5, dry_allowed_length=1) != plain
    assert complete(presence_penalty=2) != plain and complete(banned_tokens=["smiles"]) != plain
    hot = [complete(temperature=2, top_k=1, sampler_seed=seed) for seed in (1, 2, 3)]
    assert hot == [plain] * 3
    assert complete(grammar='root ::= "yes" | "no"') in ("yes", "no")


def test_answers_without_a_maximum_end_by_themselves(client):
    """M2: the server's `generation.max_tokens` is 24."""
    answer = client.completions.create(
        model="any", prompt="1, 2, 3,", temperature=0, extra_body={"grammar": 'root ::= " 4" (", " [0-9]+){40} "."'}
    )
    assert answer.choices[0].finish_reason == "stop" and answer.usage.completion_tokens > 40


def test_choices_and_logprobs(client, server):
    before = set(conversations(server))
    messages = [{"role": "user", "content": "Name any animal that you like, and say why."}]
    answer = client.chat.completions.create(
        model="any", messages=messages, n=3, max_tokens=8, temperature=1.5, seed=3, logprobs=True, top_logprobs=2
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) > 1, "the choices differ"
    for choice in answer.choices:
        tokens = choice.logprobs.content
        assert "".join(token.token for token in tokens) == choice.message.content
        assert all(token.logprob <= 0 and len(token.top_logprobs) == 2 for token in tokens)
    [name] = set(conversations(server)) - before
    assert conversations(server)[name]["turns"] == 2, "only the first choice is stored"
    completion = client.completions.create(model="any", prompt=["One, two,", "A, B,"], max_tokens=3, n=2, logprobs=1)
    assert [choice.index for choice in completion.choices] == [0, 1, 2, 3]
    logprobs = completion.choices[0].logprobs
    assert "".join(logprobs.tokens) == completion.choices[0].text and len(logprobs.token_logprobs) == 3
    streamed = client.completions.create(
        model="any", prompt="One, two,", max_tokens=3, stream=True, stream_options={"include_usage": True}
    )
    *_, last = list(streamed)
    assert last.choices == [] and last.usage.completion_tokens == 3


@pytest.fixture
def prefills(server):
    """The `prefilled` event of each answer: tokens reused, restored, recomputed and prefilled in the KV cache."""
    events, response = [], urllib.request.urlopen(f"{server.url}/api/halo/v1/events")

    def listen():
        for line in response:
            if line.startswith(b"data: "):
                event = json.loads(line[6:])
                if event["type"] == "prefilled":
                    events.append(event)

    threading.Thread(target=listen, daemon=True).start()
    yield events
    # The response is not closed: that would wait for the reading thread, which ends with the server.


def test_branch_and_new_system_prompt_reuse_kv_cells(client, server, prefills):
    def ask(system, *lines):
        roles = ["user", "assistant"]
        messages = [{"role": "system", "content": system}] + [
            {"role": roles[n % 2], "content": line} for n, line in enumerate(lines)
        ]
        answer = client.chat.completions.with_raw_response.create(
            model="any", messages=messages, max_completion_tokens=10
        )
        return answer.headers["x-halo-conversation"], answer.parse().choices[0].message.content

    story = (
        "The lighthouse keeper of Lindau counts the ships that pass in the fog, and writes each of them down with its bearing. "
        * 3
    )
    system = "You tell stories about the sea."
    name, first = ask(system, story)
    _, second = ask(system, story, first, "What does he count?")
    _, third = ask(system, story, first, "What does he count?", second, "And where does he write it?")
    # A branch at the first answer: the shared tokens are not prefilled again.
    branch, _ = ask(system, story, first, "Who lives with him in the tower?")
    assert branch != name and "branch" in branch
    shared = prefills[1]["reused"] + prefills[1]["restored"]
    assert prefills[-1]["recomputed"] == 0 and prefills[-1]["reused"] + prefills[-1]["restored"] >= shared - 4, (
        prefills,
        shared,
    )
    assert prefills[-1]["prefilled"] < 40, prefills[-1]
    # Another system prompt: it is prefilled, and the cells after it are reused.
    continued, _ = ask(
        "You tell stories about the sea. Today it is foggy.",
        story,
        first,
        "What does he count?",
        second,
        "And where does he write it?",
        third,
        "With a pen?",
    )
    assert continued == name
    last = prefills[-1]
    assert last["reused"] + last["restored"] > 100 and last["recomputed"] < 40, last
