// Requests to this server: JSON, and streams of events. The API key lives in this tab only.

const KEY = "forkpoint.key";
let asking = null;

export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

function headers() {
  const key = sessionStorage.getItem(KEY);
  return key ? { authorization: `Bearer ${key}` } : {};
}

// One dialog, however many requests find out at once that a key is wanted.
function askForKey() {
  if (asking) return asking;
  const dialog = document.getElementById("key-dialog");
  const field = document.getElementById("key");
  asking = new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      sessionStorage.setItem(KEY, field.value.trim());
      field.value = "";
      asking = null;
      resolve();
    }, { once: true });
  });
  dialog.showModal();
  return asking;
}

async function send(path, options = {}) {
  for (;;) {
    const response = await fetch(path, { ...options, headers: { ...options.headers, ...headers() } });
    if (response.status === 401) {
      await askForKey();
      continue;
    }
    if (response.ok) return response;
    let message = `${response.status} ${response.statusText}`;
    try {
      message = (await response.json()).error.message ?? message;
    } catch {
      // No envelope: the status says what there is to say.
    }
    throw new ApiError(message, response.status);
  }
}

export async function getJson(path) {
  return (await send(path)).json();
}

// Yields the parsed events of a streamed answer up to [DONE]. An event with an error throws ApiError.
export async function* streamEvents(path, body, signal) {
  const response = await send(path, {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new ApiError("the answer was cut off", 0);
    const frames = (rest + value).split(/\r?\n\r?\n/);
    rest = frames.pop();
    for (const frame of frames) {
      const data = frame.split(/\r?\n/).filter((line) => line.startsWith("data:"))
        .map((line) => line.slice(5).trimStart()).join("\n");
      if (!data) continue; // a comment that keeps the connection alive
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new ApiError(event.error.message, event.error.code);
      yield event;
    }
  }
}
