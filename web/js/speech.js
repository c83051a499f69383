// Reads a message aloud, with the voices of this device: those of a server would be sent the text.

import { on } from "./bus.js";
import { plainText } from "./markdown.js";

let reading = null; // the turn of the message that is read

const voices = () => globalThis.speechSynthesis?.getVoices().filter((voice) => voice.localService) ?? [];

export function init() {
  voices(); // browsers load them at the first call
  on("conversation", stop);
  addEventListener("pagehide", stop);
}

export const canRead = () => voices().length > 0;

export const isReading = (turn) => reading === turn;

export function stop() {
  if (reading === null) return;
  reading = null;
  speechSynthesis.cancel();
}

/** The sentences of a message. Reasoning, results of tools and code are not read. */
export function sentencesOf(text) {
  const spoken = plainText(
    text
      .replace(/<(think|tool)>[\s\S]*?(?:<\/\1>|$)/g, " ")
      .replace(/^[ \t]*(`{3,}|~{3,})[^\n]*\n[\s\S]*?(?:^[ \t]*\1[ \t]*$|(?![\s\S]))/gm, " "),
  );
  return [...new Intl.Segmenter(undefined, { granularity: "sentence" }).segment(spoken)]
    .map(({ segment }) => segment.trim())
    .filter(Boolean);
}

/** Reads a message; one that is being read ends. Sentence by sentence, because some engines stop within a long text. */
export function readAloud(turn, text) {
  stop();
  const all = voices();
  const language = navigator.language.split("-")[0];
  const spoken = all.filter((voice) => voice.lang.split(/[-_]/)[0] === language);
  const voice = spoken.find((one) => one.default) ?? spoken[0] ?? all[0];
  const sentences = sentencesOf(text);
  reading = sentences.length > 0 ? turn : null;
  const last = sentences.length - 1;
  for (const [n, sentence] of sentences.entries()) {
    const utterance = new SpeechSynthesisUtterance(sentence);
    utterance.voice = voice;
    utterance.lang = voice.lang;
    if (n === last)
      utterance.onend = () => {
        if (reading === turn) reading = null;
      };
    speechSynthesis.speak(utterance);
  }
}
