// The beat of the page: a snapshot a second while somebody looks.

import { ApiError, get, turn } from "./api.js";
import { Board } from "./board.js";
import { showCards, showOffer, showState } from "./cards.js";
import { offerModels, startChat } from "./chat.js";
import { History } from "./history.js";
import { locked, startLock, unlocked } from "./lock.js";
import { showEntries, showLive } from "./tables.js";

const BEAT_MS = 1000;
const SLOW_BEATS = 4; // the cache's entries and the list of models are asked for less often
const LIMIT_MS = 10_000; // for an answer

const history = new History();
const board = new Board(document.getElementById("charts"), history);
const banner = document.getElementById("banner");
const news = document.getElementById("news");
const pause = document.getElementById("pause");

let beats = 0;
let timer = null;
let paused = false;
let asking = false;

const limited = () => ({ signal: AbortSignal.timeout(LIMIT_MS) });
const tell = (text) => (news.textContent = text);

async function beat() {
  timer = null;
  if (asking || paused || document.hidden) return;
  asking = true;
  let again = true;
  try {
    again = await look();
  } finally {
    asking = false;
  }
  if (again) schedule(BEAT_MS);
}

// Whether to look again by itself: not before there is a key.
async function look() {
  try {
    const stats = await get(`v1/stats?since=${history.since}`, limited());
    history.merge(stats);
    showCards(stats);
    await turn();
    showLive(stats.live, tell);
    await turn();
    board.show(stats);
    unlocked();
    trouble(stats.server.failure);
    if (beats++ % SLOW_BEATS === 0) await lookSlowly(stats);
  } catch (error) {
    if (error.status === 401) {
      locked();
      return false;
    }
    if (!(error instanceof ApiError)) {
      trouble("This page has failed; please load it again.");
      throw error;
    }
    showState(error.status ? "error" : "no connection");
    trouble(error.status ? error.message : `${error.message} Trying again.`);
  }
  return true;
}

async function lookSlowly(stats) {
  const { data } = await get("v1/models", limited());
  offerModels(data);
  showOffer(data);
  if (stats.server.state === "ready") showEntries(await get("v1/cache", limited()));
}

function trouble(text) {
  banner.hidden = !text;
  if (banner.textContent !== (text ?? "")) banner.textContent = text ?? "";
}

function schedule(ms) {
  clearTimeout(timer);
  timer = setTimeout(beat, ms);
}

pause.addEventListener("click", () => {
  paused = !paused;
  pause.setAttribute("aria-pressed", String(paused));
  if (!paused) schedule(0);
});
document.addEventListener("visibilitychange", () => schedule(0));
for (const radio of document.querySelectorAll("input[name=window]")) {
  radio.addEventListener("change", () => board.zoom(Number(radio.value)));
}
startLock(() => {
  beats = 0;
  schedule(0);
});
startChat(locked);
schedule(0);
