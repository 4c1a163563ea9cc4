// Asks for the API key where the server wants one.

import { key } from "./api.js";

const dialog = document.getElementById("key-dialog");
const form = document.getElementById("key-form");
const input = document.getElementById("key");
const problem = document.getElementById("key-problem");
const button = document.getElementById("keys"); // "Enter key" or "Forget key", whichever there is to do

export function startLock(onKey) {
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    key.set(input.value.trim());
    input.value = "";
    dialog.close();
    onKey();
  });
  button.addEventListener("click", () => {
    if (!key.get()) dialog.showModal();
    else {
      key.forget();
      location.reload(); // nothing that was shown with it stays
    }
  });
}

export function locked() {
  problem.textContent = key.get() ? "The server did not accept this key." : "";
  key.forget();
  button.hidden = false;
  button.textContent = "Enter key";
  if (!dialog.open) dialog.showModal();
}

export function unlocked() {
  button.hidden = key.get() === null;
  button.textContent = "Forget key";
}
