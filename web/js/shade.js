// How bright a chunk is drawn: by what decides who leaves, on the scale of what is in the window now, so that light and dim are always told
// apart. The bar beside a chunk has the colours that the founding documents name; its text has the same order within what can
// be read on the ground of the page.

const DIM = [100, 90, 40],
  MIDDLE = [200, 180, 80],
  BRIGHT = [255, 220, 100];
const DARK_TEXT = [
  [146, 135, 90],
  [210, 194, 120],
  [255, 232, 150],
];
const LIGHT_TEXT = [
  [112, 104, 76],
  [82, 70, 24],
  [48, 36, 0],
];

const mix = (a, b, t) => a.map((from, n) => Math.round(from + (b[n] - from) * t));
/** @type {(stops: number[][], t: number) => number[]} */
const along = ([low, middle, high], t) => (t < 0.5 ? mix(low, middle, t * 2) : mix(middle, high, t * 2 - 1));
const rgb = (colour, alpha = 1) => `rgba(${colour.join(",")},${alpha})`;

const wantsLight = matchMedia("(prefers-color-scheme: light)");

export const isLight = () =>
  (document.documentElement.dataset.theme ?? (wantsLight.matches ? "light" : "dark")) === "light";

// Where a peak stands between the least and the greatest, from 0 to 1; in the middle, where all are the same.
export function place(peak, least, most) {
  return most > least ? (peak - least) / (most - least) : 0.5;
}

// What a chunk at that place looks like.
export function look(t, light = isLight()) {
  const bar = rgb(along([DIM, MIDDLE, BRIGHT], t));
  if (t >= 0.8) {
    // The top fifth is lit from behind.
    const alpha = 0.2 + ((t - 0.8) / 0.2) * 0.3;
    return { bar, colour: light ? "#1c1500" : "#ffffff", ground: rgb([255, 220, 100], light ? alpha : alpha * 0.55) };
  }
  return { bar, colour: rgb(along(light ? LIGHT_TEXT : DARK_TEXT, t / 0.8)), ground: "transparent" };
}
