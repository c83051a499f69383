"""instructor. The argument is the address of a server whose model answers as tests/soak_clients.py says."""

import sys

import instructor
import openai
from pydantic import BaseModel


class Bird(BaseModel):
    """A bird."""

    name: str
    legs: int


api = openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0)
messages = [{"role": "user", "content": "A bird as JSON"}]
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA, instructor.Mode.JSON):
    client = instructor.from_openai(api, mode=mode)
    bird = client.chat.completions.create(model="any", response_model=Bird, messages=messages, max_retries=0)
    assert bird.model_dump() == {"name": "heron", "legs": 2}, (mode, bird)
# While an answer is streamed, its fields arrive one after the other.
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(api, mode=mode)
    parts = list(
        client.chat.completions.create_partial(model="any", response_model=Bird, messages=messages, max_retries=0)
    )
    assert parts[-1].model_dump() == {"name": "heron", "legs": 2}, (mode, parts)
    assert len(parts) > 1, (mode, parts)
print("ok")
