// One chart on its card: made once, then changed in place.

import { clock, count, known, moment, seconds } from "./format.js";
import { REQUESTS } from "./history.js";

const FEW = 60; // values of a line that are seen as points too
const LEAST_S = 60; // that a chart shows, however new the server is

export function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

export class Plot {
  constructor(spec) {
    this.spec = spec;
    this.value = element("p", { className: "value", textContent: "–" });
    this.empty = element("p", { className: "empty", textContent: "Nothing to show yet" });
    this.canvas = element("canvas");
    this.canvas.setAttribute("role", "img");
    this.legend = element("ul", { className: "legend" });
    const title = element("h2", { textContent: spec.title });
    const frame = element("div", { className: "frame" }, this.canvas, this.empty);
    this.card = element("article", { className: "card plot", id: `plot-${spec.id}` });
    this.card.append(element("div", { className: "title" }, title, this.value), frame, this.legend);
    this.chart = null;
  }

  // Colours come from the style sheet, which knows light from dark.
  paint(palette) {
    if (this.chart) {
      paint(this.chart.config.type, this.chart.data.datasets, this.chart.options.scales, palette);
      return;
    }
    const made = this.spec.bars ? bars(this.spec) : lines(this.spec);
    paint(made.type, made.data.datasets, made.options.scales, palette);
    this.legend.replaceChildren(...made.data.datasets.map((set) => entry(set)));
    this.chart = new Chart(this.canvas, made);
  }

  // `history` is the page's own and grows in place; `span` is in seconds.
  update(history, stats, span) {
    const said = this.spec.bars ? this.updateBars(history) : this.updateLines(history, stats, span);
    this.empty.hidden = said !== null;
    const text = said ?? "–";
    if (this.value.textContent !== text) {
      this.value.textContent = text;
      this.canvas.setAttribute("aria-label", `${this.spec.title}: ${said ?? "nothing to show yet"}`);
    }
    this.chart.update("none");
  }

  updateLines(history, stats, span) {
    const { lines, level, form } = this.spec;
    const { data, options } = this.chart;
    const end = history.since;
    const begin = end - Math.min(span, Math.max(LEAST_S, end - (history.times[0] ?? end)));
    options.scales.x.min = begin;
    options.scales.x.max = end;
    options.scales.x.ticks.stepSize = step(end - begin);
    lines.forEach((line, i) => {
      const points = (data.datasets[i].data = history.points(line.series));
      const few = points.length <= FEW || points[points.length - FEW].x < begin;
      data.datasets[i].pointRadius = line.rare && few ? 1.75 : 0;
    });
    const most = level?.of(stats);
    if (level) data.datasets.at(-1).data = known(most) ? [{ x: begin, y: most }, { x: end, y: most }] : [];
    const newest = history.newest(lines[0].series, span);
    if (newest === null) return null;
    return known(most) ? `${form(newest)} of ${form(most)}` : form(newest);
  }

  updateBars(history) {
    const { data } = this.chart;
    const finished = history.finished;
    data.requests = finished;
    for (let i = 0; i < REQUESTS; i++) {
      const one = finished[finished.length - REQUESTS + i];
      data.datasets[0].data[i] = one ? one.cached_tokens : null;
      data.datasets[1].data[i] = one ? one.computed_tokens : null;
    }
    const last = finished.at(-1);
    return last ? `${count(last.cached_tokens)}/${count(last.prompt_tokens)} cached` : null;
  }
}

// Chart.js calls it on the scale.
function hour(unix) {
  return this.options.ticks.stepSize < 60 ? moment(unix) : clock(unix);
}

const step = (span) => (span <= 75 ? 15 : span <= 200 ? 30 : span <= 360 ? 60 : 180);

function lines(spec) {
  const datasets = spec.lines.map((line) => ({
    label: line.name, colour: line.colour, data: [], fill: Boolean(line.filled), stepped: Boolean(line.stepped),
    spanGaps: line.rare ?? 3, pointRadius: 0, clip: 5,
  }));
  if (spec.level) datasets.push({ label: spec.level.name, data: [], borderDash: [5, 4], spanGaps: true, pointRadius: 0 });
  const options = common();
  Object.assign(options.scales.x, { type: "linear" });
  Object.assign(options.scales.x.ticks, { callback: hour, includeBounds: false, maxRotation: 0 });
  Object.assign(options.scales.y, { suggestedMax: spec.top ?? (spec.whole ? 1 : undefined), max: spec.top });
  options.scales.y.ticks.callback = (value) => spec.form(value).replace(" tok/s", "");
  if (spec.id === "load") options.scales.y.ticks.precision = 0;
  options.plugins.tooltip.callbacks = {
    title: ([item]) => (item ? moment(item.parsed.x) : ""),
    label: (item) => ` ${item.dataset.label}: ${spec.form(item.parsed.y)}`,
  };
  return { type: "line", data: { datasets }, options: { ...options, parsing: false, normalized: true } };
}

function bars(spec) {
  const datasets = ["cached", "computed"].map((label, i) => ({ label, colour: i ? 1 : 3, data: [], categoryPercentage: 0.9 }));
  const options = common();
  options.scales.x.stacked = options.scales.y.stacked = true;
  options.scales.x.ticks.display = false;
  options.scales.y.ticks.callback = spec.form;
  options.plugins.tooltip.callbacks = {
    title: ([item]) => request(item)?.id ?? "",
    label: (item) => ` ${item.dataset.label}: ${count(item.parsed.y)} tokens`,
    afterBody: ([item]) => about(request(item)),
  };
  return { type: "bar", data: { labels: Array(REQUESTS).fill(""), datasets }, options };
}

function request(item) {
  const finished = item?.chart.data.requests ?? [];
  return finished[finished.length - REQUESTS + (item?.dataIndex ?? 0)];
}

function about(one) {
  if (!one) return "";
  return `${one.finish}, ${count(one.generated_tokens)} made, first token ${seconds(one.ttft_s)}`;
}

function common() {
  return {
    animation: false,
    responsive: true,
    maintainAspectRatio: false,
    interaction: { mode: "index", intersect: false },
    elements: { line: { borderWidth: 1.75 }, point: { hitRadius: 6 } },
    plugins: { legend: { display: false }, tooltip: {} },
    scales: {
      x: { grid: { display: false }, ticks: {}, border: {} },
      y: { beginAtZero: true, grid: {}, ticks: { maxTicksLimit: 5 }, border: { display: false } },
    },
  };
}

function paint(type, datasets, { x, y }, palette) {
  for (const set of datasets) {
    set.borderColor = set.colour ? palette[set.colour] : palette.faint;
    set.backgroundColor = type === "bar" ? set.borderColor : `${set.borderColor}26`;
    set.pointBackgroundColor = set.borderColor;
  }
  for (const scale of [x, y]) {
    scale.grid.color = palette.line;
    scale.border.color = palette.line;
    Object.assign(scale.ticks, { color: palette.soft, font: { size: 11, family: palette.family } });
  }
}

function entry(set) {
  const mark = element("span", { className: set.colour ? `mark c${set.colour}` : "mark dashed" });
  mark.setAttribute("aria-hidden", "true");
  return element("li", {}, mark, set.label);
}
