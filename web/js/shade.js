// Colours by brightness, relative to the paragraphs in the context now, so that bright and dim ones always differ. The bar
// beside a paragraph has the specified colours; its text has the same order, within what is readable on the page's background.

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
const gradient = ([low, middle, high], t) => (t < 0.5 ? mix(low, middle, t * 2) : mix(middle, high, t * 2 - 1));
const rgb = (colour, alpha = 1) => `rgba(${colour.join(",")},${alpha})`;

const prefersLight = matchMedia("(prefers-color-scheme: light)");

export const isLight = () =>
  (document.documentElement.dataset.theme ?? (prefersLight.matches ? "light" : "dark")) === "light";

// Where a value is between the least and the greatest, from 0 to 1; 0.5 where all are the same.
export function normalize(value, least, most) {
  return most > least ? (value - least) / (most - least) : 0.5;
}

const LEAST = 0.02;
const MOST = 20;

/**
 * Attention in ‰ per token as a level from 0 to 1, on a fixed logarithmic scale: a level means the same in every chat and at every
 * time. In a context of 2,000 tokens, the average is 0.5 ‰, just below the middle.
 */
export function attentionLevel(permille) {
  const level = Math.log(Math.max(permille, LEAST) / LEAST) / Math.log(MOST / LEAST);
  return Math.min(1, level);
}

// The colours of a paragraph whose relative brightness is t.
export function shadeStyle(t, light = isLight()) {
  const bar = rgb(gradient([DIM, MIDDLE, BRIGHT], t));
  // The brightest fifth also gets a background.
  if (t >= 0.8) return { bar, ...brightStyle((t - 0.8) / 0.2, light) };
  return { bar, colour: rgb(gradient(light ? LIGHT_TEXT : DARK_TEXT, t / 0.8)), ground: "transparent" };
}

// The colours of the brightest text: white on yellow. White cannot be read on yellow on a light page, so the text is dark there. `t`
// is the place among the brightest, from 0 to 1. The highlights in the style sheet have the same colours.
export function brightStyle(t, light = isLight()) {
  return { colour: light ? "#1c1500" : "#ffffff", ground: rgb([255, 200, 50], Number((0.2 + t * 0.3).toFixed(3))) };
}
