"""Functions, reasoning and the Responses API with OpenAI's own client, against the real program."""

import json
import os
import pathlib

import openai
import pytest

from conftest import MODEL, Server

# A model that was trained to call functions, if there is one; the small test model is constrained by the grammar.
TOOL_MODEL = os.environ.get("HALO_TEST_TOOL_MODEL")

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a town",
        "parameters": {
            "type": "object",
            "properties": {"town": {"type": "string", "enum": ["Lindau", "Bregenz"]}},
            "required": ["town"],
            "additionalProperties": False,
        },
    },
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"town": "Lindau"}}\n</tool_call>'


@pytest.fixture
def scripted(scripted):
    """Clients of servers whose model gives these answers."""
    return lambda *answers: client(scripted(*answers))


def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_call_and_result_round_trip(scripted):
    api = scripted(CALL, "It is sunny in Lindau.", "You are welcome.")
    messages = [{"role": "user", "content": "How is the weather in Lindau today?"}]
    first = api.chat.completions.create(model="any", messages=messages, tools=[WEATHER])
    assert first.choices[0].finish_reason == "tool_calls"
    call = first.choices[0].message.tool_calls[0]
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"town": "Lindau"})
    messages += [first.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    second = api.chat.completions.with_raw_response.create(model="any", messages=messages, tools=[WEATHER])
    assert second.parse().choices[0].message.content.strip() == "It is sunny in Lindau."
    conversation = second.headers["x-halo-conversation"]
    messages += [second.parse().choices[0].message, {"role": "user", "content": "Thanks."}]
    third = api.chat.completions.with_raw_response.create(model="any", messages=messages, tools=[WEATHER])
    assert third.headers["x-halo-conversation"] == conversation


def test_changed_functions_are_read_again(tmp_path):
    """Cells that were computed behind other functions make a model call those."""
    server = Server(tmp_path, "recall.mode=lexical").start()
    try:
        api = client(server)
        options = {"model": "any", "temperature": 0, "max_tokens": 6}

        def ask(messages, **more):
            response = api.chat.completions.create(messages=messages, **options, **more)
            return response.choices[0].message, response.usage.prompt_tokens_details.cached_tokens

        messages = [{"role": "user", "content": "Count from one to ten."}]
        offered = {"tools": [WEATHER], "tool_choice": "auto"}
        first, _ = ask(messages, **offered)
        messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": "Go on."}]
        again, cached = ask(messages, **offered)
        assert cached > 20, "the same functions"
        messages += [{"role": "assistant", "content": again.content}, {"role": "user", "content": "And on."}]
        without, cached = ask(messages)
        assert cached == 0, "the functions are gone"
        messages += [{"role": "assistant", "content": without.content}, {"role": "user", "content": "And on."}]
        # What the functions were is stored with the chat.
        server.stop()
        server.start()
        api = client(server)
        kept, cached = ask(messages)
        assert cached > 20, "there were none before the restart"
        assert kept.content == ask(messages, extra_body={"store": False})[0].content
    finally:
        server.stop()


def test_calls_are_streamed(scripted):
    api = scripted(f"I look. {CALL}")
    messages = [{"role": "user", "content": "How is the weather in Lindau today?"}]
    with api.chat.completions.stream(model="any", messages=messages, tools=[WEATHER]) as stream:
        for _ in stream:
            pass
        message = stream.get_final_completion().choices[0].message
    assert message.content.strip() == "I look."
    assert json.loads(message.tool_calls[0].function.arguments) == {"town": "Lindau"}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_forced_calls_follow_their_schema(tmp_path, choice):
    server = Server(tmp_path, "generation.max_tokens=64", model=TOOL_MODEL or MODEL).start()
    try:
        answer = client(server).chat.completions.create(
            model="any",
            messages=[{"role": "user", "content": "How is the weather in Lindau?"}],
            tools=[WEATHER],
            tool_choice=choice,
            parallel_tool_calls=False,
            temperature=0,
        )
    finally:
        server.stop()
    assert answer.choices[0].finish_reason == "tool_calls", answer
    call = answer.choices[0].message.tool_calls[0]
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments)["town"] in ("Lindau", "Bregenz")


@pytest.mark.skipif(not TOOL_MODEL, reason="HALO_TEST_TOOL_MODEL names no model that calls functions")
def test_model_calls_a_function_by_itself(tmp_path):
    assert pathlib.Path(TOOL_MODEL).exists()
    server = Server(tmp_path, "generation.max_tokens=128", model=TOOL_MODEL).start()
    try:
        api = client(server)
        messages = [{"role": "user", "content": "Use the function to find out how the weather in Lindau is."}]
        first = api.chat.completions.create(model="any", messages=messages, tools=[WEATHER], temperature=0)
        call = first.choices[0].message.tool_calls[0]
        assert json.loads(call.function.arguments) == {"town": "Lindau"}
        messages += [first.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "hail, 3 degrees"}]
        second = api.chat.completions.create(model="any", messages=messages, tools=[WEATHER], temperature=0)
        assert "hail" in second.choices[0].message.content.lower(), second
    finally:
        server.stop()


def test_prefill_is_continued(server):
    answer = client(server).chat.completions.create(
        model="any",
        messages=[
            {"role": "user", "content": "Which colour is the sky on a clear day?"},
            {"role": "assistant", "content": "The colour of the sky is"},
        ],
        max_tokens=8,
        temperature=0,
    )
    assert answer.choices[0].message.content and "The colour of the sky is" not in answer.choices[0].message.content


def test_responses_continue_each_other(scripted):
    api = scripted("The Nile.", "In Africa.", CALL, "It is sunny.")
    first = api.responses.create(model="any", input="Which is the longest river?", instructions="Be brief.")
    assert first.output_text.strip() == "The Nile."
    second = api.responses.create(model="any", input="Where is it?", previous_response_id=first.id)
    assert second.output_text.strip() == "In Africa."
    assert api.responses.retrieve(first.id).output_text.strip() == "The Nile."
    items = api.responses.input_items.list(second.id, order="asc").data
    assert items[0].content[0].text == "Where is it?"
    tool = {"type": "function", "strict": True, **WEATHER["function"]}
    third = api.responses.create(model="any", input="And the weather?", previous_response_id=second.id, tools=[tool])
    call = next(item for item in third.output if item.type == "function_call")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    fourth = api.responses.create(model="any", input=[result], previous_response_id=third.id, tools=[tool])
    assert fourth.output_text.strip() == "It is sunny."
    api.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        api.responses.retrieve(first.id)


def test_responses_are_streamed(scripted):
    api = scripted("Good day to you.")
    with api.responses.stream(model="any", input="Hello") as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert text.strip() == final.output_text.strip() == "Good day to you."
    assert final.usage.output_tokens > 0
