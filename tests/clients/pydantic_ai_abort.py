"""pydantic-ai leaves an answer at its first words. The argument is the address of a server with a model that would go on."""

import asyncio
import sys

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

model = OpenAIChatModel("any", provider=OpenAIProvider(base_url=f"{sys.argv[1]}/v1", api_key="none"))


async def leave_stream():
    async with Agent(model, retries=0).run_stream("Tell me everything about herons.") as result:
        async for _ in result.stream_text(delta=True, debounce_by=None):
            break


asyncio.run(leave_stream())
print("ok")
