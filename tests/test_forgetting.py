"""Context pressure, forgetting cycles and retention in a server that stays up; salience; cooled prompts of a remote model."""

import re
import time

from conftest import Server, wait_for

FULL_WINDOW = (
    "context.max_tokens=300",
    "context.room_tokens=0",
    "context.recent_tokens=60",
    "generation.max_tokens=24",
)
LINES = [
    "My gun is called Betsy and it hangs on the wall above the fire in the old house.",
    "The cat sleeps on the sofa all day long, and at night it hunts in the garden.",
    "It rains in Lisbon today, and the trams are full of wet people with umbrellas.",
    "My sister plays the cello in an orchestra in the north of Wales every Sunday.",
    "The train to Rome is late again, because of snow in the passes of the Alps.",
]


def metrics(server):
    _, text = server.call("GET", "/metrics")
    return {name: float(value) for name, value in re.findall(r"^([^#\s]\S*) (\S+)$", text, re.MULTILINE)}


def database(folder):
    """The bytes of the database and of its write-ahead log."""
    return b"".join(path.read_bytes() for path in folder.glob("halo.db*") if path.is_file())


def test_forgetting_cycle_runs_under_pressure_in_a_server(browser, tmp_path):
    server = Server(tmp_path, *FULL_WINDOW).start()
    try:
        for line in LINES * 2:
            state = server.say("main", line)
            assert 0 < state["pressure"] and abs(state["pressure"] - state["live"] / state["limit"]) < 1e-9
        forgetting = wait_for(lambda: server.halo("GET", "/conversations/main")[1]["forgetting"])
        assert forgetting["runs"] >= 1 and forgetting["pruned"] >= 1 and forgetting["erased"] == 0
        assert forgetting["final_pressure"] <= 0.8 < forgetting["initial_pressure"]
        sampled = wait_for(lambda: metrics(server) if metrics(server).get("halo_forgetting_cycles_total") else None)
        pressures = [value for name, value in sampled.items() if name.startswith("halo_conversation_pressure{")]
        assert len(pressures) == 1 and 0 < pressures[0] <= 1
        assert sampled["halo_chunks_erased_total"] == 0
        turns = server.halo("GET", "/conversations/main/turns")[1]
        assert all(0 < turn["figures"]["pressure"] <= 1 for turn in turns)
        assert any(turn["forgetting"] for turn in turns)
        page = browser.new_page()
        page.goto(f"{server.url}/#main")
        page.click("#inspect")
        page.get_by_role("tab", name="Statistics").click()
        page.get_by_text("context pressure").wait_for()
        page.get_by_text("forgetting cycles").wait_for()
        page.close()
    finally:
        server.stop()


def test_old_text_is_erased_while_the_server_runs(tmp_path):
    server = Server(tmp_path, "generation.max_tokens=8", "lethe.interval_minutes=0.02").start()
    try:
        server.say("main", "The safe opens with 4711 4712.")
        status, _ = server.halo("PUT", "/settings/lethe.warm_days", {"value": "0"})
        assert status == 200
        server.halo("PUT", "/settings/lethe.hot_days", {"value": "0"})
        time.sleep(4)
        assert b"4711" in database(tmp_path), "nothing is erased by age unless lethe.enabled is true"
        server.halo("PUT", "/settings/lethe.enabled", {"value": "true"})
        wait_for(lambda: b"4711" not in database(tmp_path))
        assert wait_for(lambda: metrics(server)["halo_chunks_erased_total"]) >= 1
        state = server.say("main", "Are you still there?")
        assert state["live"] > 0, "the conversation goes on"
    finally:
        server.stop()


def test_prompts_of_a_remote_model_are_cooled_by_setting(browser, tmp_path, remote_model):
    answer = "The harbour is full of boats, and the lamps are lit. " * 30
    for setting, cooled in (("model.cooling_tokens=0", False), ("model.cooling_tokens=300", True)):
        address = remote_model([[answer]])
        server = Server(
            tmp_path / str(cooled), "recall.mode=lexical", "context.max_tokens=0", setting, model=address
        ).start()
        try:
            question = "What do you see from the window of the lighthouse tonight?"
            for _ in range(3):
                server.say("main", question)
            # What was shortened is counted with the turn and in the metrics.
            figures = [turn["figures"] for turn in server.halo("GET", "/conversations/main/turns")[1]]
            counted = sum(turn["cooled_messages"] for turn in figures)
            assert (counted > 0) == cooled and figures[0]["cooled_messages"] == 0, figures
            assert metrics(server)["halo_answers_cooled_total"] == counted
            page = browser.new_page()
            page.goto(f"{server.url}/#main")
            page.click("#inspect")
            page.get_by_role("tab", name="Statistics").click()
            page.get_by_text("Context after each answer").wait_for()
            assert page.get_by_text("shortened in prompts").count() == int(cooled)
            page.close()
        finally:
            server.stop()
        messages = remote_model.models[-1].requests[-1]["messages"]
        asked = [message["content"] for message in messages if message["role"] == "user"]
        said = [message["content"] for message in messages if message["role"] == "assistant"]
        assert len(asked) == 3 and all(question in text for text in asked), "messages of the user are whole"
        characters = sum(len(message["content"]) for message in messages)
        assert len(said) == 2 and all(answer.startswith(text) for text in said)
        assert (characters <= 300 * 4 + 16) == cooled, characters
        assert (said[0] == answer) != cooled


def test_prompts_are_cooled_above_4096_tokens(tmp_path, remote_model):
    """With the limit of the founding document, a prompt of 4,096 tokens is sent as it is, and one more token is cut off."""

    def estimate(messages):
        # As the founding document counts: four characters are a token.
        return sum(len(message["content"]) // 4 for message in messages)

    def second_prompt(name, answer):
        address = remote_model([[answer]])
        sizes = ("context.max_tokens=0", "generation.max_tokens=10000", "model.cooling_tokens=4096")
        server = Server(tmp_path / name, "recall.mode=lexical", *sizes, model=address).start()
        try:
            server.say("main", "What do you see from the lighthouse?")
            server.say("main", "And tonight?")
            figures = server.halo("GET", "/conversations/main/turns")[1][-1]["figures"]
        finally:
            server.stop()
        messages = remote_model.models[-1].requests[-1]["messages"]
        assert [message["role"] for message in messages][-3:] == ["user", "assistant", "user"]
        return messages, messages[-2]["content"], figures["cooled_messages"]

    messages, said, _ = second_prompt("short", "boat")
    assert said == "boat"
    room = 4096 - (estimate(messages) - 1)
    boats = "A boat is in the harbour. " * 1000
    whole = boats[: room * 4 + 2] + "."
    messages, said, cooled = second_prompt("whole", whole)
    assert (said == whole, cooled, estimate(messages)) == (True, 0, 4096)
    longer = boats[: room * 4 + 3] + "."
    messages, said, cooled = second_prompt("longer", longer)
    assert (said, cooled, estimate(messages)) == (longer[: room * 4], 1, 4096)


def test_salience_of_pruned_text_has_the_weights_of_the_document(scripted):
    """The weights of the founding document, in the reasons of one prune: recency 0.3, from the first of the twelve paragraphs to
    the last, a name 0.3, a reference to the user 0.2, structure 0.2 (a heading all of it, other text 0.3 of it)."""
    settings = (
        "recall.mode=lexical",
        "prune.policy=salience",
        "prune.fill=false",
        "context.recent_tokens=0",
        "context.sink_tokens=0",
        "context.room_tokens=0",
        "generation.max_tokens=8",
    )
    server = scripted("so it is, and so it will be.", settings=settings)

    def limit(tokens):
        status, answer = server.halo("PUT", "/settings/context.max_tokens", {"value": tokens})
        assert status == 200, answer

    limit("0")
    for text in (
        "hello there and welcome",
        "# Plan of the week for all of us",
        "as your friend told them it is late",
        "we met Anna and Otto in the town",
        "it rains today and nobody goes out",
        "Here is your note on Anna and Otto",
    ):
        server.say("main", text)
    limit("60")
    server.say("main", "a last word")
    plain, heading, user, name = 0.2 * 0.3, 0.2, 0.2, 0.3
    expected = {
        # A question has the salience of its answer where that is higher.
        "u0.0": 0.3 * 1 / 11 + plain,
        "u2.0": 0.3 * 2 / 11 + heading,
        "a3.0": 0.3 * 3 / 11 + plain,
        "u4.0": 0.3 * 4 / 11 + user + plain,
        "a5.0": 0.3 * 5 / 11 + plain,
        "u6.0": 0.3 * 6 / 11 + name + plain,
        "a7.0": 0.3 * 7 / 11 + plain,
        "u8.0": 0.3 * 9 / 11 + plain,
    }
    for chunk, salience in expected.items():
        history = server.halo("GET", f"/conversations/main/chunks/{chunk}")[1]["history"]
        assert f"salience of its text {salience:.2f}" in history[-1]["reason"], (chunk, history)
    kept = server.halo("GET", "/conversations/main/chunks/u10.0")[1]
    assert kept["chunk"]["live"] and kept["history"] == [], "a name and the user: it stays"
