// Names of chats. A new chat is open before it has a name; its first message gives it one. No chat is stored without.

const UNTITLED = "New chat";
const MAX_CHARS = 48;

export const untitledName = () => UNTITLED;

export const isUntitled = (name) => name === UNTITLED;

/** The name of a chat that begins with this message: its first words, as the server names chats. */
export function titleOf(message) {
  const line = message
    .replace(/[\p{Cc}\p{Cf}]/gu, " ")
    .replace(/\s+/g, " ")
    .trim();
  const short = [...line].slice(0, MAX_CHARS).join("").trim();
  // Names that begin with `world:` belong to rooms.
  const title = short.replace(/^world:/i, "world");
  return !title || isUntitled(title) ? "Chat" : title;
}
