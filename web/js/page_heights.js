// The heights of the pages of the transcript, with sums in logarithmic time (a Fenwick tree): a chat of 100,000 messages has
// 2,500 pages, and each scroll event asks which of them are in view. No DOM here, so that `node --test` runs it.

export class PageHeights {
  /** @param {(page: number) => number} estimate the height of a page that was never drawn */
  constructor(estimate) {
    this.estimate = estimate;
    /** @type {number[]} */
    this.heights = [];
    this.sums = [0];
  }

  get length() {
    return this.heights.length;
  }

  /** The height of all pages. */
  get total() {
    return this.top(this.heights.length);
  }

  /** Adds or removes pages at the end. */
  resize(length) {
    while (this.heights.length > length) {
      this.heights.pop();
      this.sums.pop();
    }
    while (this.heights.length < length) {
      const height = this.estimate(this.heights.length);
      this.heights.push(height);
      const at = this.heights.length;
      let sum = height;
      // The sum of a node is its own height and the sums of the nodes below it.
      for (let step = 1; step < (at & -at); step *= 2) sum += this.sums[at - step];
      this.sums.push(sum);
    }
  }

  get(page) {
    return this.heights[page];
  }

  set(page, height) {
    const change = height - this.heights[page];
    if (!change) return;
    this.heights[page] = height;
    for (let at = page + 1; at < this.sums.length; at += at & -at) this.sums[at] += change;
  }

  /** Where a page begins. */
  top(page) {
    let sum = 0;
    for (let at = Math.min(page, this.heights.length); at > 0; at -= at & -at) sum += this.sums[at];
    return sum;
  }

  /** The page at a distance from the beginning. */
  pageAt(y) {
    let at = 0;
    let rest = y;
    let step = 1;
    while (step * 2 < this.sums.length) step *= 2;
    for (; step > 0; step >>= 1) {
      if (at + step < this.sums.length && this.sums[at + step] <= rest) {
        at += step;
        rest -= this.sums[at];
      }
    }
    return Math.max(0, Math.min(at, this.heights.length - 1));
  }
}
