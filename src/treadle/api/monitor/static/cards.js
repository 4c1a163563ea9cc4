// The cards above the charts: text that is changed only where it differs.

import { bytes, count, duration, known, seconds, share } from "./format.js";
import { element } from "./plot.js";

const MODELS = 12; // most that are listed
const KINDS = ["exact", "prefix", "supersequence", "branch", "miss"];

let offered = new Map(); // id -> what `/v1/models` tells of it

const fields = new Map([...document.querySelectorAll("[data-field]")].map((node) => [node.dataset.field, node]));
const state = document.getElementById("state");
const models = document.getElementById("models");
const hits = document.getElementById("hits");
const bar = document.getElementById("hits-bar");

export function field(name, text) {
  const node = fields.get(name);
  if (node.textContent !== text) node.textContent = text;
}

export function showState(name) {
  if (state.textContent === name) return;
  state.textContent = name;
  state.dataset.state = name;
}

export function showCards(stats) {
  const { server, device, memory, latency, totals } = stats;
  showState(server.state);
  state.title = server.failure ?? "";
  field("uptime", duration(server.uptime_s));
  field("device", device ? `${device.name} (${device.backend})` : "–");
  const short = stats.pressure && stats.pressure.level !== "calm" ? ` · short: ${stats.pressure.level}` : "";
  field("memory", bytes(memory?.active_bytes) + short);
  field("peak", bytes(memory?.peak_bytes));
  field("version", server.version);
  field("ttft50", seconds(latency.ttft_s.p50));
  field("ttft95", seconds(latency.ttft_s.p95));
  field("gap50", seconds(latency.inter_token_s.p50));
  field("gap95", seconds(latency.inter_token_s.p95));
  field("queue95", seconds(latency.queue_s.p95));
  field("running", count(stats.running));
  field("waiting", count(stats.waiting));
  showTotals(totals);
  showModels(stats);
  showCache(stats.cache, totals.tokens);
}

// KV formats change with a load alone, so they come with the list of models.
export function showOffer(data) {
  offered = new Map(data.map((model) => [model.id, model]));
}

function showTotals({ finished, tokens, faults }) {
  const done = (finished.stop ?? 0) + (finished.length ?? 0);
  const others = [
    [finished.abort, "cancelled"],
    [finished.error, "failed"],
    [faults, "faults"],
  ];
  const told = others.filter(([n]) => n).map(([n, what]) => `${count(n)} ${what}`);
  field("finished", count(done));
  field("otherwise", told.join(", ") || "none");
  field("generated", count(tokens.generated));
}

function showModels(stats) {
  const listed = stats.models.slice(0, MODELS);
  while (models.children.length > listed.length) models.lastChild.remove();
  listed.forEach((model, i) => {
    const item = models.children[i] ?? models.appendChild(modelItem());
    const [name, pill, about] = item.children;
    for (const [node, text] of [[name, model.id], [pill, model.state], [about, facts(model, stats)]]) {
      if (node.textContent !== text) node.textContent = text;
    }
    pill.dataset.state = model.state;
  });
}

function modelItem() {
  const parts = [element("strong"), element("span", { className: "pill small" }), element("span", { className: "about" })];
  return element("li", {}, ...parts);
}

function facts(model, stats) {
  const told = [
    model.failure,
    known(model.context_length) && `${count(model.context_length)} tokens of context`,
    model.weight_bytes > 0 && `${bytes(model.weight_bytes)} of weights`,
    kv(offered.get(model.id)?.kv),
    drafts(stats.speculation?.[model.id]),
    model.pinned && "pinned",
    `${count(model.requests)} requests, ${count(model.tokens)} tokens made`,
  ];
  return told.filter(Boolean).join(" · ");
}

function drafts(counts) {
  if (!known(counts?.rate)) return null;
  const speed = known(counts.speed_up) ? `, ${counts.speed_up.toFixed(2)} × the plain speed` : "";
  return `drafts: ${share(counts.rate)} accepted${speed}`;
}

function kv(format) {
  if (!format) return null;
  const bits = format.bits === "16" ? "KV exact" : `KV in ${format.bits} bits`;
  const delta = format.delta_percent; // of perplexity, where it was measured
  return known(delta) ? `${bits} (${delta < 0 ? "−" : "+"}${Math.abs(delta).toFixed(2)} % perplexity)` : bits;
}

function showCache(cache, tokens) {
  field("prompt", count(tokens.prompt));
  field("cached", tokens.prompt ? share(tokens.cached / tokens.prompt) : "–");
  field("bits", !cache ? "off" : cache.bits === null ? "exact" : `${cache.bits} bits while idle`);
  if (!hits.children.length) {
    hits.append(...KINDS.map((kind) => element("li", {}, element("span", { className: `mark k-${kind}` }), "")));
    bar.append(...KINDS.map((kind) => element("span", { className: `k-${kind}` })));
  }
  KINDS.forEach((kind, i) => {
    const n = cache?.hits[kind] ?? 0;
    const text = `${kind} ${count(n)}`;
    if (hits.children[i].lastChild.data !== text) hits.children[i].lastChild.data = text;
    bar.children[i].style.flexGrow = String(n);
  });
}
