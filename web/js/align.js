// Where each character of a paragraph's source is in its rendered text. Markdown leaves characters out (`**`, `](url)`), and a
// token of the model is a range of the source, so a highlight needs both.

/** How much of the source may be left out before a word, unless the word after it confirms its place. */
const NEAR = 24;

/**
 * For each character of `rendered`, its index in `source`; -1 where it has none.
 * @param {string} source
 * @param {string} rendered
 */
export function align(source, rendered) {
  const places = new Int32Array(rendered.length).fill(-1);
  const parts = [...rendered.matchAll(/\s+|\S+/g)];
  let at = 0;
  const place = (from, length, found) => {
    for (let n = 0; n < length; n += 1) places[from + n] = found + n;
    at = found + length;
  };
  parts.forEach((part, n) => {
    const [text] = part;
    if (/^\s/.test(text)) {
      for (let char = 0; char < text.length && /\s/.test(source[at] ?? "x"); char += 1) place(part.index + char, 1, at);
      return;
    }
    const found = source.indexOf(text, at);
    const next = parts[n + 2]?.[0];
    const isNear = found - at <= NEAR;
    const isConfirmed = () => !next || source.slice(found + text.length, found + text.length + NEAR).includes(next);
    if (found >= 0 && (isNear || isConfirmed())) place(part.index, text.length, found);
    else alignChars(part.index, text);
  });
  // A word with markup within it: `**bo**ld`.
  function alignChars(from, word) {
    for (let n = 0; n < word.length; n += 1) {
      const found = source.indexOf(word[n], at);
      if (found >= 0 && found - at <= NEAR) place(from + n, 1, found);
    }
  }
  return places;
}

/**
 * The range of the rendered text that shows a range of the source; null if none of it is rendered.
 * @param {Int32Array} places
 */
export function renderedRange(places, start, end) {
  let from = -1;
  let to = -1;
  for (let n = 0; n < places.length; n += 1) {
    if (places[n] < start || places[n] >= end) continue;
    if (from < 0) from = n;
    to = n + 1;
  }
  return from < 0 ? null : [from, to];
}
