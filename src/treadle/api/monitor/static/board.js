// All charts. Each is drawn in a turn of its own, so that the page answers in between, and only while it is seen.

import { Plot } from "./plot.js";
import { PLOTS } from "./plots.js";

const turn = () => new Promise((done) => setTimeout(done));

export class Board {
  constructor(root, history) {
    this.history = history;
    this.span = 300;
    this.stats = null;
    this.seen = new Set();
    this.waiting = new Set();
    this.plots = new Map();
    this.drawing = false;
    this.watch = new IntersectionObserver((changes) => this.onSeen(changes), { rootMargin: "100px" });
    for (const spec of PLOTS) {
      const plot = new Plot(spec);
      plot.card.hidden = Boolean(spec.wanted);
      this.plots.set(plot.card, plot);
      root.append(plot.card);
      this.watch.observe(plot.card);
    }
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.repaint());
  }

  show(stats) {
    this.stats = stats;
    for (const plot of this.plots.values()) {
      if (plot.spec.wanted) plot.card.hidden = !plot.spec.wanted(this.history);
    }
    this.draw(this.seen);
  }

  zoom(span) {
    this.span = span;
    this.draw(this.seen);
  }

  repaint() {
    for (const plot of this.plots.values()) {
      plot.chart?.destroy();
      plot.chart = null;
    }
    this.draw(this.seen);
  }

  onSeen(changes) {
    for (const { target, isIntersecting } of changes) {
      if (isIntersecting) this.seen.add(target);
      else this.seen.delete(target);
    }
    this.draw(changes.filter((change) => change.isIntersecting).map((change) => change.target));
  }

  async draw(cards) {
    for (const card of cards) this.waiting.add(card);
    if (this.drawing) return;
    this.drawing = true;
    try {
      while (this.stats && this.waiting.size) {
        const [card] = this.waiting;
        this.waiting.delete(card);
        const plot = this.plots.get(card);
        if (!plot.chart) plot.create(palette());
        plot.update(this.history, this.stats, this.span);
        await turn();
      }
    } finally {
      this.drawing = false;
    }
  }
}

function palette() {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  const numbered = Object.fromEntries([1, 2, 3, 4].map((n) => [n, colour(`--c${n}`)]));
  return { ...numbered, line: colour("--line"), soft: colour("--soft"), faint: colour("--faint") };
}
