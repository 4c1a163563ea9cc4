// Two tables with a bounded number of rows, which are kept and changed in place: a focused button stays focused.

import { ask } from "./api.js";
import { field } from "./cards.js";
import { bytes, count, duration, number, share } from "./format.js";
import { element } from "./plot.js";

const MOST = 50;

const live = document.getElementById("live");
const entries = document.getElementById("entries");
const rows = new Map(); // id -> row
const NUMBER = "number";
const SPARE = "spare";

export function showLive(requests, tell) {
  const listed = requests.slice(0, MOST);
  const ids = new Set(listed.map((one) => one.id));
  for (const [id, row] of rows) {
    if (!ids.has(id)) drop(id, row);
  }
  listed.forEach((one, i) => {
    const row = rows.get(one.id) ?? add(one, tell);
    if (live.children[i] !== row) live.insertBefore(row, live.children[i] ?? null);
    fill(row, [one.id, one.model, stage(one), count(one.prompt_tokens), count(one.cached_tokens), count(one.generated_tokens),
      number(one.tokens_per_s), duration(one.age_s)]);
    row.dataset.state = one.state;
  });
  document.getElementById("live-empty").hidden = requests.length > 0;
  field("live-count", requests.length > MOST ? `${MOST} of ${count(requests.length)}` : count(requests.length));
}

function stage(one) {
  const done = { skim: one.prompt_skimmed, prefill: one.prompt_computed }[one.state];
  return done !== undefined && one.prompt_tokens > 0 ? `${one.state} ${share(done / one.prompt_tokens)}` : one.state;
}

function add(one, tell) {
  const button = element("button", { type: "button", textContent: "Cancel" });
  button.setAttribute("aria-label", `Cancel request ${one.id}`);
  button.addEventListener("click", () => cancel(one, button, tell));
  const classes = ["id", SPARE, "", `${NUMBER} ${SPARE}`, `${NUMBER} ${SPARE}`, NUMBER, `${NUMBER} ${SPARE}`, `${NUMBER} ${SPARE}`];
  const row = element("tr", {}, ...classes.map((className) => element("td", { className })));
  row.firstChild.title = one.id;
  row.append(element("td", { className: "act" }, button));
  rows.set(one.id, row);
  return row;
}

// Whoever stood on a row that goes is put on its neighbour, or on the table's heading.
function drop(id, row) {
  if (row.contains(document.activeElement)) {
    const next = row.nextElementSibling ?? row.previousElementSibling;
    (next?.querySelector("button") ?? document.getElementById("live-title")).focus();
  }
  rows.delete(id);
  row.remove();
}

async function cancel(one, button, tell) {
  if (button.ariaDisabled === "true") return;
  button.ariaDisabled = "true"; // and not `disabled`, which would lose the focus
  try {
    await ask(`v1/requests/${encodeURIComponent(one.job)}/cancel`, { method: "POST" });
    tell(`Request ${one.id} is cancelled.`);
  } catch (error) {
    button.ariaDisabled = "false";
    tell(`Not cancelled: ${error.message}`);
  }
}

export function showEntries(report) {
  const listed = report.entries.slice(0, MOST);
  while (entries.children.length > listed.length) entries.lastChild.remove();
  listed.forEach((one, i) => {
    const row = entries.children[i] ?? entries.appendChild(entryRow());
    const where = one.has_images ? `${one.tier}, with images` : one.tier;
    fill(row, [count(one.tokens), bytes(one.bytes), count(one.hits), `${duration(one.age_s)} ago`, where]);
  });
  const { entries: all, tokens } = report.totals;
  const empty = document.getElementById("entries-empty");
  empty.hidden = all > 0;
  empty.textContent = report.enabled ? "Nothing is stored yet." : "The prefix cache is off.";
  field("entry-count", all ? `${all > MOST ? `${MOST} of ` : ""}${count(all)}, ${count(tokens)} tokens` : "");
}

function entryRow() {
  const classes = [NUMBER, NUMBER, NUMBER, NUMBER, ""];
  return element("tr", {}, ...classes.map((className) => element("td", { className })));
}

function fill(row, texts) {
  texts.forEach((text, i) => {
    const cell = row.children[i];
    if (cell.textContent !== text) cell.textContent = text;
  });
}
