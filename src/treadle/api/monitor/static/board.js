// All charts. Each is drawn in a turn of its own, so that the page answers in between, and only while it is seen.

import { turn } from "./api.js";
import { Plot } from "./plot.js";
import { PLOTS } from "./plots.js";

export class Board {
  constructor(root, history) {
    this.root = root;
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
    this.arrange();
    this.draw(this.seen);
  }

  // No row of a wide screen is left with a single chart.
  arrange() {
    const shown = [...this.plots.keys()].filter((card) => !card.hidden);
    this.root.style.setProperty("--columns", String([4, 3, 5][shown.length - 8] ?? 4));
    shown.forEach((card, i) => card.classList.toggle("alone", i % 2 === 0 && i === shown.length - 1));
  }

  zoom(span) {
    this.span = span;
    this.draw(this.seen);
  }

  repaint() {
    for (const plot of this.plots.values()) {
      if (plot.chart) plot.paint(palette());
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
    await turn();
    try {
      while (this.stats && this.waiting.size) {
        const [card] = this.waiting;
        this.waiting.delete(card);
        const plot = this.plots.get(card);
        if (!plot.chart) {
          plot.paint(palette());
          await turn();
        }
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
  const family = getComputedStyle(document.body).fontFamily;
  return { ...numbered, family, line: colour("--line"), soft: colour("--soft"), faint: colour("--faint") };
}
