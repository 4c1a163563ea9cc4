// Asks for the API key where the server wants one.

import { key } from "./api.js";

const dialog = document.getElementById("key-dialog");
const form = document.getElementById("key-form");
const input = document.getElementById("key");
const problem = document.getElementById("key-problem");
const forget = document.getElementById("forget");

export function startLock(onKey) {
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    key.set(input.value.trim());
    input.value = "";
    dialog.close();
    onKey();
  });
  dialog.addEventListener("cancel", (event) => event.preventDefault()); // behind it is nothing to see
  forget.addEventListener("click", () => {
    key.forget();
    location.reload();
  });
  unlocked();
}

export function locked() {
  problem.textContent = key.get() ? "The server did not accept this key." : "";
  key.forget();
  forget.hidden = true;
  if (!dialog.open) dialog.showModal();
}

export function unlocked() {
  forget.hidden = key.get() === null;
}
