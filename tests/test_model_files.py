"""Damaged and lying model files: llama.cpp ends the process on some of them, and the server must go on.

`HALO_DAMAGED_FILES` sets how many files are tried (30), `HALO_DAMAGED_FILES_SEED` which ones.
"""

import os
import pathlib
import random
import struct

from conftest import ROOT

SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
INTEGERS, STRING, ARRAY = {0, 1, 2, 3, 4, 5, 7, 10, 11}, 8, 9
TINY = sorted((ROOT / "target/models").glob("tiny-*.gguf"))

# Each made llama.cpp end the process: model, key, value.
FATAL = [
    # The rotated part of a key is longer than the key: an assertion when the tensors are created.
    ("deepseek2", "rope.dimension_count", 24),
    # Assertions when the graph is built.
    ("gemma2", "rope.dimension_count", 7),
    ("qwen2vl", "rope.dimension_count", 0),
    ("granitehybrid", "ssm.inner_size", 64),
]


def numbers(data):
    """The keys of a GGUF file with the place and the width of each integer; of a list the first entries."""
    at, found = 24, {}

    def value(key, kind):
        nonlocal at
        if kind in SIZES:
            if kind in INTEGERS:
                found.setdefault(key, []).append((at, SIZES[kind]))
            at += SIZES[kind]
        elif kind == STRING:
            at += 8 + struct.unpack_from("<Q", data, at)[0]
        else:
            inner, count = struct.unpack_from("<IQ", data, at)
            at += 12
            if inner in SIZES and count > 64:
                at += SIZES[inner] * count
            else:
                for _ in range(count):
                    value(key, inner)

    for _ in range(struct.unpack_from("<Q", data, 16)[0]):
        length = struct.unpack_from("<Q", data, at)[0]
        key = data[at + 8 : at + 8 + length].decode()
        kind = struct.unpack_from("<I", data, at + 8 + length)[0]
        at += 12 + length
        value(key, kind)
    return found, at


def tensors(data, at):
    """Where the numbers of each tensor begin: the count of its dimensions, the dimensions, its type and its offset."""
    found = []
    for _ in range(struct.unpack_from("<Q", data, 8)[0]):
        at += 8 + struct.unpack_from("<Q", data, at)[0]
        count = struct.unpack_from("<I", data, at)[0]
        dimensions = [at + 4 + 8 * n for n in range(count)]
        found.append({"count": at, "dimensions": dimensions, "type": at + 4 + 8 * count, "offset": at + 8 + 8 * count})
        at += 16 + 8 * count
    return found


def strings(data):
    """The keys of a GGUF file with the place of each text."""
    at, found = 24, {}
    for _ in range(struct.unpack_from("<Q", data, 16)[0]):
        length = struct.unpack_from("<Q", data, at)[0]
        key = data[at + 8 : at + 8 + length].decode()
        kind = struct.unpack_from("<I", data, at + 8 + length)[0]
        at += 12 + length
        if kind in SIZES:
            at += SIZES[kind]
        elif kind == STRING:
            found[key] = at
            at += 8 + struct.unpack_from("<Q", data, at)[0]
        else:
            inner, count = struct.unpack_from("<IQ", data, at)
            at += 12
            if inner in SIZES:
                at += SIZES[inner] * count
            else:
                for _ in range(count):
                    at += 8 + struct.unpack_from("<Q", data, at)[0]
    return found


def with_text(data, key, text):
    """The file with another text, of another length. The tensors are moved to the next multiple of 32."""
    at, end = strings(data)[key], numbers(data)[1]
    for tensor in tensors(data, end)[-1:]:
        end = tensor["offset"] + 8
    old = struct.unpack_from("<Q", data, at)[0]
    head = data[:at] + struct.pack("<Q", len(text)) + text + data[at + 8 + old : end]
    return head + bytes(-len(head) % 32) + data[-(-end // 32) * 32 :]


TEMPLATES = [
    b"{% for a in range(100000) %}{% for b in range(100000) %}{{ b }}{% endfor %}{% endfor %}",
    b"{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
    b"{{ 'x' * 2000000000 }}",
    b"{% set x = namespace(v='ab') %}{% for i in range(60) %}{% set x.v = x.v + x.v %}{% endfor %}{{ x.v }}",
    b"{{ raise_exception('no') }}",
    b"{% if %}" + b"{{" * 5000,
    b"\xff\xfe{{ messages }}",
    b"(" * 100_000,
]
# An embedding model (bert) is not among the chat models that a client may choose.
NAMES = [
    b"",
    b"llama",
    b"gpt2",
    b"mamba",
    b"qwen35moe",
    b"deepseek4",
    b"clip",
    b"t5",
    b"rwkv7",
    b"x" * 5000,
    b"../../x",
    b"%s%n",
]


def patched(data, at, width, number):
    copy = bytearray(data)
    copy[at : at + width] = (number % (1 << 8 * width)).to_bytes(width, "little")
    return bytes(copy)


def damaged_file(generator, sources):
    """What is wrong, and the bytes of the file."""
    source = generator.choice(sources)
    data = source.read_bytes()
    found, header_end = numbers(data)
    name, kind = source.stem.removeprefix("tiny-"), generator.randrange(12)
    if kind == 0:
        length = generator.randrange(len(data))
        return f"{name}, cut to {length} bytes", data[:length]
    if kind == 1:
        places = [generator.randrange(len(data)) for _ in range(generator.randrange(1, 9))]
        for place in places:
            data = patched(data, place, 1, data[place] ^ (1 << generator.randrange(8)))
        return f"{name}, bits flipped at {places}", data
    if kind == 2:
        # Names, dimensions, types and offsets of tensors.
        places = [generator.randrange(header_end, header_end + 3000) for _ in range(generator.randrange(1, 4))]
        for place in places:
            data = patched(data, place, 1, generator.randrange(256))
        return f"{name}, bytes of tensors changed at {places}", data
    if kind == 8:
        # The counts of tensors and of keys.
        at, number = generator.choice([8, 16]), generator.choice([0, 1, 1 << 16, 1 << 32, (1 << 64) - 1, -1, +1])
        old = struct.unpack_from("<Q", data, at)[0]
        number = old + number if number in (-1, 1) else number
        return f"{name}, the count at {at} is {number} instead of {old}", patched(data, at, 8, number)
    if kind == 9:
        # A tensor that lies about its shape, its type or its place; often so that the file stays long enough.
        changes = []
        for tensor in generator.sample(tensors(data, header_end), generator.randrange(1, 4)):
            field = generator.choice(["count", "dimensions", "dimensions", "type", "type", "offset"])
            at = generator.choice(tensor[field]) if field == "dimensions" else tensor[field]
            width = 4 if field in ("count", "type") else 8
            old = int.from_bytes(data[at : at + width], "little")
            number = {
                "count": generator.randrange(6),
                "dimensions": generator.choice([0, 1, old // 2, old - 1, old + 1, old * 2, 1 << 31, (1 << 62) + 1]),
                "type": generator.randrange(45),
                "offset": generator.choice([0, 32, old + 1, old + 32, max(0, old - 32), 1 << 40, (1 << 64) - 32]),
            }[field]
            data = patched(data, at, width, number)
            changes.append(f"{field} at {at} = {number} instead of {old}")
        return f"{name}, {', '.join(changes)}", data
    if kind == 10:
        text = generator.choice(TEMPLATES)
        return f"{name}, the chat template is {text[:60]!r}", with_text(data, "tokenizer.chat_template", text)
    if kind == 11:
        key = generator.choice(["general.architecture", "tokenizer.ggml.model", "tokenizer.ggml.pre", "general.name"])
        text = generator.choice(NAMES)
        key = key if key in strings(data) else "general.architecture"
        return f"{name}, {key} is {text[:60]!r}", with_text(data, key, text)
    changes = []
    keys = [key for key in found if not key.startswith(("general.", "tokenizer."))]
    for key in generator.sample(keys, 1 if kind < 7 else 3):
        at, width = generator.choice(found[key])
        old = int.from_bytes(data[at : at + width], "little")
        odd = [0, 1, 2, 3, 5, 7, 24, 63, 100, 1000, 65_535, 1 << 31, (1 << 32) - 1]
        number = generator.choice([*odd, old - 1, old + 1, old * 2, old // 2, old * 3, old * 16])
        data = patched(data, at, width, number)
        changes.append(f"{key} = {number} instead of {old}")
    return f"{name}, {', '.join(changes)}", data


def fatal_file(architecture, key, number):
    data = (ROOT / f"target/models/tiny-{architecture}.gguf").read_bytes()
    at, width = numbers(data)[0][f"{architecture}.{key}"][0]
    return patched(data, at, width, number)


# What an error tells the user to do.
ADVICE = [
    "download it again",
    "choose another",
    "only versions 2 and 3 are supported",
    "it is not a GGUF file",
    "lower it",
    "set model.context",
    "set it to",
    "use a smaller model",
    "choose a smaller model",
    "model.memory",
    "set kv.type",
]


def choose(server, name):
    return server.halo("PUT", "/conversations/main/model", {"model": name}, timeout=120)


def test_damaged_model_files_do_not_end_the_server(scripted):
    """Each file is refused, or loaded; the server lives on and answers with its own model."""
    count = int(os.environ.get("HALO_DAMAGED_FILES", "30"))
    generator = random.Random(int(os.environ.get("HALO_DAMAGED_FILES_SEED", "1")))
    # Models that were loaded are unloaded again soon.
    answers = ["Still here."] * (2 + count // 50)
    server = scripted(*answers, settings=("model.context=512", "model.unload_after=0.02"))
    models = server.data / "models"
    models.mkdir(parents=True, exist_ok=True)
    server.say("main", "Hello.")
    results = {"loaded": 0, "refused": 0, "ended llama.cpp": 0}
    for number in range(count):
        what, data = damaged_file(generator, TINY)
        # A model that was loaded is known by its name, so every file has its own.
        file = models / f"damaged-{number}.gguf"
        file.write_bytes(data)
        status, result = choose(server, file.stem)
        assert server.process.poll() is None, f"file {number} ended the server: {what}"
        # 500 is the status of damaged data.
        assert status in (200, 400, 422, 500, 503), (what, status, result)
        if status != 200:
            # The error names the file, and says what to do.
            error = str(result)
            assert file.stem in error, (what, error)
            assert any(advice in error for advice in ADVICE), (what, error)
        if status == 200:
            results["loaded"] += 1
            assert choose(server, None)[0] == 200
        elif "llama.cpp cannot load it: the file is damaged" in str(result):
            results["ended llama.cpp"] += 1
        else:
            results["refused"] += 1
        file.unlink()
        if number % 50 == 49:
            server.say("main", "Are you there?")
    server.say("main", "Are you there?")
    print(f"{count} files: {results}")
    report = os.environ.get("HALO_DAMAGED_FILES_REPORT")
    if report:
        pathlib.Path(report).write_text(f"{count} files: {results}\n")


def test_file_that_ends_llama_cpp_does_not_end_the_server(scripted):
    server = scripted("Hello.", "Still here.")
    models = server.data / "models"
    models.mkdir(parents=True, exist_ok=True)
    server.say("main", "Hello.")
    for number, (architecture, key, value) in enumerate(FATAL):
        (models / f"fatal-{number}.gguf").write_bytes(fatal_file(architecture, key, value))
        status, result = choose(server, f"fatal-{number}")
        assert server.process.poll() is None, (architecture, key, value)
        # The process that loads the file first has ended: the error is not one that llama.cpp returns.
        assert status in (400, 422) and "llama.cpp cannot load it: the file is damaged" in str(result), (status, result)
    server.say("main", "Are you there?")
