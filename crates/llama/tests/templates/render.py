#!/usr/bin/env python3
"""Renders a chat with each template of this folder, with Python's jinja2 as model libraries do, and writes renderings.json.

The templates are reduced ones with the shape of those that models of a family have.
"""

import json
import pathlib

import jinja2.ext
import jinja2.sandbox

HERE = pathlib.Path(__file__).parent
CHAT = [
    {"role": "system", "content": "You are a playwright."},
    {"role": "user", "content": "Is there a gun?"},
    {"role": "assistant", "content": "Above the fireplace."},
    {"role": "user", "content": "Who fires it?"},
]
# The first token of a prompt, and the tokens that end an answer.
TOKENS = {
    "chatml": ("", ["<|im_end|>"]),
    "command_r": ("<BOS_TOKEN>", ["<|END_OF_TURN_TOKEN|>"]),
    "deepseek": ("<｜begin▁of▁sentence｜>", ["<｜end▁of▁sentence｜>"]),
    "gemma": ("<bos>", ["<end_of_turn>", "<eos>"]),
    "gpt_oss": ("", ["<|return|>", "<|call|>"]),
    "llama3": ("<|begin_of_text|>", ["<|eot_id|>", "<|end_of_text|>"]),
    "mistral": ("<s>", ["</s>"]),
    "phi": ("", ["<|end|>", "<|endoftext|>"]),
    "qwen3": ("", ["<|im_end|>", "<|endoftext|>"]),
}


def raise_exception(message):
    raise jinja2.exceptions.TemplateError(message)


def main():
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.globals["raise_exception"] = raise_exception
    renderings = {}
    for name, (bos, end_tokens) in TOKENS.items():
        template = environment.from_string((HERE / f"{name}.jinja").read_text())
        known = {"add_generation_prompt": True, "bos_token": bos, "eos_token": end_tokens[0]}
        renderings[name] = {
            "bos": bos,
            "end_tokens": end_tokens,
            "chat": template.render(messages=CHAT, **known),
            "without_system": template.render(messages=CHAT[1:], **known),
            "without_thinking": template.render(messages=CHAT, enable_thinking=False, **known),
        }
    (HERE / "renderings.json").write_text(json.dumps(renderings, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
