"""Damaged and lying model files: llama.cpp ends the process on some of them, and the server must go on.

`HALO_MODEL_FILES` sets how many files are tried (30), `HALO_MODEL_FILES_SEED` which ones.
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


def patched(data, at, width, number):
    copy = bytearray(data)
    copy[at : at + width] = (number % (1 << 8 * width)).to_bytes(width, "little")
    return bytes(copy)


def damaged_file(generator, sources):
    """What is wrong, and the bytes of the file."""
    source = generator.choice(sources)
    data = source.read_bytes()
    found, header_end = numbers(data)
    name, kind = source.stem.removeprefix("tiny-"), generator.randrange(8)
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


def choose(server, name):
    return server.halo("PUT", "/conversations/main/model", {"model": name}, timeout=120)


def test_damaged_model_files_do_not_end_the_server(scripted):
    """Each file is refused, or loaded; the server lives on and answers with its own model."""
    count = int(os.environ.get("HALO_MODEL_FILES", "30"))
    generator = random.Random(int(os.environ.get("HALO_MODEL_FILES_SEED", "1")))
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
        # 500 is the status of damaged data; the error says what is wrong with the file.
        assert status in (200, 400, 422, 503) or "cannot be used" in str(result), (what, status, result)
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
    report = os.environ.get("HALO_MODEL_FILES_REPORT")
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
