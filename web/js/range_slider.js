// A slider beside the field of a number. Wide ranges are logarithmic, so that small numbers can be chosen too.

import { el, number } from "./dom.js";

/**
 * @param {{ min: number, max: number, whole: boolean }} range
 * @param {(value: number) => void} onMove while it is dragged
 * @param {(value: number) => void} onChoose when it is released
 */
export function rangeSlider({ min, max, whole }, label, onMove, onChoose) {
  const logarithmic = min >= 0 && max - min > 1000;
  const toPlace = (value) =>
    logarithmic ? Math.log1p(value - min) / Math.log1p(max - min) : (value - min) / (max - min || 1);
  const toValue = (place) => {
    const value = logarithmic ? min + Math.expm1(place * Math.log1p(max - min)) : min + place * (max - min);
    if (whole || value >= 100) return Math.round(value);
    return Number(value.toPrecision(2));
  };
  const node = el("input", {
    type: "range",
    min: "0",
    max: "1",
    step: whole && !logarithmic ? String(1 / (max - min || 1)) : "0.005",
    "aria-label": `${label}, from ${number(min)} to ${number(max)}`,
  });
  // A value that is loaded while the slider is moved must not move it back: then the browser would report no change.
  let moving = false;
  const show = (value) => {
    if (moving) return;
    node.value = String(Number.isNaN(Number(value)) ? 0 : toPlace(Number(value)));
    node.setAttribute("aria-valuetext", String(value));
  };
  node.addEventListener("input", () => {
    moving = true;
    onMove(toValue(Number(node.value)));
  });
  node.addEventListener("change", () => {
    moving = false;
    onChoose(toValue(Number(node.value)));
  });
  // A slider that is moved back to where it was changes nothing.
  for (const type of ["pointerup", "keyup", "blur"])
    node.addEventListener(type, () =>
      setTimeout(() => {
        moving = false;
      }),
    );
  return { node, show };
}
