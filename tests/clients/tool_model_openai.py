"""OpenAI's own client with a model that was trained to call functions, whole and streamed, and with the Responses API."""

import json
import sys

import openai

QUESTION = "What is the weather in Lindau?"
FUNCTION = {
    "name": "get_weather",
    "description": "The weather in a town",
    "parameters": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
}
TOOLS = [{"type": "function", "function": FUNCTION}]
RESULT = "hail, 3 degrees"

api = openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0)
options = {"model": "any", "tools": TOOLS, "temperature": 0}

messages = [{"role": "user", "content": QUESTION}]
first = api.chat.completions.create(messages=messages, parallel_tool_calls=False, **options).choices[0]
assert first.finish_reason == "tool_calls" and len(first.message.tool_calls) == 1, first
call = first.message.tool_calls[0]
assert json.loads(call.function.arguments) == {"town": "Lindau"}, call
messages += [first.message, {"role": "tool", "tool_call_id": call.id, "content": RESULT}]
# The model is too small to stop calling by itself.
answer = api.chat.completions.create(messages=messages, tool_choice="none", **options).choices[0].message.content
assert "hail" in answer.lower(), answer

with api.chat.completions.stream(messages=messages[:1], **options) as stream:
    for _ in stream:
        pass
    streamed = stream.get_final_completion().choices[0].message
assert [json.loads(call.function.arguments) for call in streamed.tool_calls] == [{"town": "Lindau"}], streamed

tool = {"type": "function", "strict": False, **FUNCTION}
response = api.responses.create(model="any", input=QUESTION, tools=[tool], temperature=0)
call = next(item for item in response.output if item.type == "function_call")
assert json.loads(call.arguments) == {"town": "Lindau"}, call
output = {"type": "function_call_output", "call_id": call.call_id, "output": RESULT}
response = api.responses.create(
    model="any", input=[output], previous_response_id=response.id, tools=[tool], tool_choice="none", temperature=0
)
assert "hail" in response.output_text.lower(), response
print("ok")
