// A small conversation with a model. It lives in this page alone.

import { events, post } from "./api.js";
import { count, number, seconds } from "./format.js";
import { element } from "./plot.js";

const KEPT = 60; // messages that stay on the page, and are sent

const part = (name) => document.getElementById(`chat-${name}`);
const [form, text, log, empty, send, stop, model] = ["form", "text", "log", "empty", "send", "stop", "model"].map(part);

let messages = [];
let running = null; // AbortController of the reply under way

export function startChat(onLocked) {
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (!running && text.value.trim()) turn(text.value.trim(), onLocked);
  });
  text.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    form.requestSubmit();
  });
  stop.addEventListener("click", () => running?.abort());
  part("new").addEventListener("click", () => {
    running?.abort();
    messages = [];
    log.replaceChildren(empty);
    text.focus();
  });
}

export function offerModels(data) {
  const names = data.filter((one) => one.state !== "failed").map((one) => one.id);
  if (names.join("\n") === [...model.options].map((option) => option.value).join("\n")) return;
  const chosen = model.value;
  model.replaceChildren(...names.map((name) => new Option(name, name, false, name === chosen)));
}

async function turn(question, onLocked) {
  const mine = (running = new AbortController());
  const conversation = messages;
  conversation.push({ role: "user", content: question });
  text.value = "";
  empty.remove();
  bubble("user", "You").body.append(question);
  const reply = bubble("assistant", model.value || "Model");
  busy(true);
  const answer = new Answer(reply);
  try {
    const body = { model: model.value, messages: conversation.slice(-KEPT), stream: true };
    const response = await post("v1/chat/completions", { ...body, stream_options: { include_usage: true } }, mine.signal);
    for await (const event of events(response)) answer.take(event);
    answer.end();
  } catch (error) {
    answer.end(error.name === "AbortError" ? "stopped" : error.message, error.name !== "AbortError");
    if (error.status === 401) onLocked();
  } finally {
    if (answer.content) conversation.push({ role: "assistant", content: answer.content });
    else conversation.pop();
    if (running === mine) running = null;
    busy(running !== null);
  }
}

// A reader hears the reply when it is whole, not token by token.
function busy(yes) {
  log.setAttribute("aria-busy", String(yes));
  const moved = document.activeElement === (yes ? send : stop);
  send.hidden = yes;
  stop.hidden = !yes;
  if (moved) (yes ? stop : text).focus();
}

function bubble(role, name) {
  const body = element("div", { className: "body" });
  const note = element("p", { className: "note" });
  const made = element("article", { className: `bubble ${role}` }, element("p", { className: "who", textContent: name }), body, note);
  log.append(made);
  while (log.children.length > KEPT) log.firstChild.remove();
  log.scrollTop = log.scrollHeight;
  return { body, note };
}

// Text is gathered and shown once a frame.
class Answer {
  constructor({ body, note }) {
    Object.assign(this, { body, note, content: "", finish: null, usage: null, first: null, last: null });
    this.began = performance.now();
    this.fresh = { content: "", thought: "" };
    this.nodes = {};
    this.due = false;
  }

  take(event) {
    if (event.error) throw new Error(event.error.message);
    this.usage = event.usage ?? this.usage;
    const choice = event.choices?.[0];
    if (!choice) return;
    this.finish = choice.finish_reason ?? this.finish;
    const { content, reasoning_content: thought } = choice.delta ?? {};
    if (!content && !thought) return;
    this.last = performance.now();
    this.first ??= this.last;
    this.content += content ?? "";
    this.fresh.content += content ?? "";
    this.fresh.thought += thought ?? "";
    if (!this.due) {
      this.due = true;
      setTimeout(() => this.show(), 33);
    }
  }

  show() {
    this.due = false;
    const end = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
    for (const kind of ["thought", "content"]) {
      if (this.fresh[kind]) (this.nodes[kind] ??= this.node(kind)).appendData(this.fresh[kind]);
      this.fresh[kind] = "";
    }
    if (end) log.scrollTop = log.scrollHeight;
  }

  node(kind) {
    const made = document.createTextNode("");
    if (kind === "content") this.body.append(made);
    else this.body.prepend(element("details", {}, element("summary", { textContent: "Reasoning" }), made));
    return made;
  }

  end(why = null, failed = false) {
    this.show();
    const made = this.usage?.completion_tokens;
    const rate = made > 1 && this.last > this.first ? (1000 * (made - 1)) / (this.last - this.first) : null;
    const told = [
      why ?? this.finish,
      made && `${count(made)} tokens`,
      this.first && `first after ${seconds((this.first - this.began) / 1000)}`,
      rate && `${number(rate)} tok/s`,
    ];
    this.note.textContent = told.filter(Boolean).join(" · ");
    this.note.classList.toggle("problem", failed);
    log.scrollTop = log.scrollHeight;
  }
}
