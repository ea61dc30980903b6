// Sending: each request has an id made here, or says what it undoes, so that it counts once; it is sent again until the
// server has answered.

const PATIENCE = 20_000; // milliseconds, after which a connection has gone that nobody closed

let busy = false;
export const isBusy = () => busy;

// `tell` shows a text to the rater.
export async function send(what, button, seconds, tell) {
  busy = true;
  document.documentElement.setAttribute("aria-busy", "true");
  const fields = new FormData(what, button);
  if (fields.has("request")) fields.set("request", newId());
  if (fields.has("seconds")) fields.set("seconds", seconds.toFixed(1));
  const body = new URLSearchParams(fields);
  for (let wait = 500; ; wait = Math.min(2 * wait, 8000)) {
    let status = 0;
    let text = "The server does not answer.";
    try {
      const signal = AbortSignal.timeout(PATIENCE);
      const answer = await fetch(what.action, { method: "POST", body, headers: { Accept: "text/plain" }, signal });
      status = answer.status;
      text = await answer.text();
    } catch {
      status = 0; // no answer, or half of one
    }
    if (status === 200) return location.replace("/");
    if (status === 0 || status >= 500) {
      tell(`${text} Yours is kept here and sent again …`);
      await new Promise((done) => setTimeout(done, wait));
      continue;
    }
    busy = false;
    document.documentElement.removeAttribute("aria-busy");
    tell(text);
    return;
  }
}

function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(16)); // randomUUID is for https and this machine alone
  bytes[6] = (bytes[6] & 0x0f) | 0x40;
  bytes[8] = (bytes[8] & 0x3f) | 0x80;
  const hex = [...bytes].map((byte) => byte.toString(16).padStart(2, "0")).join("");
  return hex.replace(/^(.{8})(.{4})(.{4})(.{4})(.{12})$/, "$1-$2-$3-$4-$5");
}
