// The worlds and the rooms of the open world; what is shown without a world.

import { api } from "./api.js";
import { $, ask, count, el, render, toast } from "./dom.js";
import { ARCHITECT } from "./rooms_reducers.js";
import { attempt, goToRoom, openWorld, refresh, rooms } from "./rooms_store.js";

export function drawBanner() {
  const text = !rooms.connected
    ? "Server unreachable; reconnecting… Your draft is kept on this page."
    : rooms.loadError
      ? rooms.world && `This world may have changed since it was loaded: ${rooms.loadError}`
      : rooms.world?.runs_elsewhere &&
        "Another program runs this world: it controls the clock, and your commands are queued until no agent is thinking.";
  $("offline").hidden = !text;
  if ($("offline").textContent !== (text || "")) $("offline").textContent = text || "";
}

export function drawNoWorld() {
  for (const id of ["rooms", "billboard", "panel", "hints", "replying"]) render($(id));
  const show = (...parts) => render($("log"), el("div", { class: "empty" }, parts));
  if (rooms.loadError)
    show(el("p", { role: "status" }, rooms.loadError), el("button", { type: "button", onclick: refresh }, "Try again"));
  else if (rooms.worlds?.length === 0) {
    show(
      el(
        "p",
        {},
        "A world has rooms and agents. Each agent has a room of its own, remembers only what it writes down, and thinks at its own interval.",
      ),
      el("button", { type: "button", id: "create-example", onclick: newWorld }, "Create example world"),
    );
  } else show(el("p", {}, "…"));
}

export function drawWorlds() {
  render(
    $("tabs"),
    (rooms.worlds ?? []).map((world) =>
      el(
        "button",
        {
          type: "button",
          "aria-current": String(world.name === rooms.name),
          data: { key: world.name },
          onclick: () => openWorld(world.name),
        },
        world.name,
      ),
    ),
    el("button", { type: "button", title: "New world", "aria-label": "New world", onclick: newWorld }, "+"),
  );
}

async function newWorld() {
  const file = el("input", { type: "file", id: "world-file", accept: ".toml,text/plain" });
  let name = rooms.worlds?.length ? "" : "harbour";
  let about = "Without a file, the example world is created: five agents at a harbour.";
  // The dialog opens again with the same name until the world can be created.
  for (;;) {
    name = await ask("New world", {
      label: "Name",
      value: name,
      confirm: "Create",
      about,
      more: el("label", {}, "World file, TOML (optional) ", file),
    });
    if (!name) return;
    const exists = () => rooms.worlds?.some((world) => world.name === name.trim());
    const existed = exists();
    try {
      const text = file.files.length ? await file.files[0].text() : undefined;
      openWorld((await api.createWorld(name.trim(), text)).name);
      return;
    } catch (error) {
      about = error.message;
      // It may have been created although its model cannot be reached.
      await refresh();
      if (exists() && !existed) {
        toast(about, { error: true });
        openWorld(name.trim());
        return;
      }
    }
  }
}

async function deleteWorld() {
  const { name } = rooms;
  if (
    !(await ask(`Delete ${name} for good?`, {
      confirm: "Delete",
      about: "All of its agents and messages are deleted.",
    }))
  )
    return;
  await attempt(api.deleteWorld(name));
  refresh();
}

export function drawRooms() {
  render(
    $("rooms"),
    rooms.world.rooms.map((room) => {
      if (room.id === rooms.room || !rooms.lastRead.has(room.id)) rooms.lastRead.set(room.id, room.last_message);
      const unread = room.last_message > rooms.lastRead.get(room.id);
      return el(
        "button",
        {
          type: "button",
          data: { room: room.id, key: `room-${room.id}` },
          "aria-current": String(room.id === rooms.room),
          class: unread ? "new" : "",
          onclick: () => goToRoom(room.id),
        },
        room.id === ARCHITECT ? "Your room" : `${room.owner}'s room`,
        room.requests.length ? " 🔔" : "",
        el("small", {}, room.billboard ?? count(room.members.length, "member")),
      );
    }),
    el(
      "button",
      { type: "button", class: "link", id: "delete-world", data: { key: "delete-world" }, onclick: deleteWorld },
      "Delete this world…",
    ),
  );
}
