// The server's routes, with the key that this tab was given.

const STORE = "treadle.key";

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const key = {
  get: () => sessionStorage.getItem(STORE),
  set: (value) => sessionStorage.setItem(STORE, value),
  forget: () => sessionStorage.removeItem(STORE),
};

// Lets the browser answer people before more is done.
export const turn = () => new Promise((done) => setTimeout(done));

// Throws ApiError for every answer but a good one (status 0: there was none), and AbortError for a stopped one.
export async function ask(path, options = {}) {
  const headers = { ...options.headers };
  if (key.get()) headers.authorization = `Bearer ${key.get()}`;
  const response = await fetch(path, { ...options, headers, cache: "no-store" }).catch(unanswered);
  if (!response.ok) throw new ApiError(response.status, await reason(response));
  return response;
}

export const get = async (path, options) => (await ask(path, options)).json();

export function post(path, body, signal) {
  const headers = { "content-type": "application/json" };
  return ask(path, { method: "POST", headers, body: JSON.stringify(body), signal });
}

// The objects of a server-sent event stream.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      const data = line.startsWith("data:") ? line.slice(5).trim() : "";
      if (data === "[DONE]") return;
      if (data) yield JSON.parse(data);
    }
  }
}

function unanswered(error) {
  if (error.name === "AbortError") throw error;
  throw new ApiError(0, "The server does not answer.");
}

async function reason(response) {
  const text = await response.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return text.slice(0, 200) || response.statusText;
  }
}
