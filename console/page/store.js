// Client-side store of the page: last state, an hour of history, events, and the state of the stream. The stream uses fetch, because an
// EventSource cannot send a token.
export const store = { state: null, cluster: null, history: null, events: [], access: "none", live: "connecting", receivedAt: 0, lostAt: 0, needsToken: false, why: "" };
const listeners = new Set();
const MAX_EVENTS = 1000;
const QUIET_MS = 15000; // without a message for this long the connection is dead
if (location.hash.startsWith("#key=")) { // as `kvstore console` prints it; removed from the URL, which users copy
  sessionStorage.setItem("token", decodeURIComponent(location.hash.slice(5)));
  history.replaceState(null, "", location.pathname);
}
let token = sessionStorage.getItem("token") || "";
let stream = null;

export const subscribe = (listener) => listeners.add(listener);
const notify = () => { for (const listener of listeners) listener(store); };

export function useToken(text) {
  token = text;
  if (text) sessionStorage.setItem("token", text);
  else sessionStorage.removeItem("token");
  store.needsToken = false;
  stream?.abort();
}

/** Drops a refused token, so that it is not sent again. */
function forgetToken() {
  token = "";
  sessionStorage.removeItem("token");
}

async function request(path, options = {}) {
  const headers = { ...options.headers };
  if (token) headers.Authorization = `Bearer ${token}`;
  const response = await fetch(path, { ...options, headers, credentials: "omit", redirect: "error" });
  if (response.ok) return response;
  const body = await response.json().catch(() => ({}));
  const error = new Error(body.error || `${response.status} ${response.statusText}`);
  error.status = response.status;
  throw error;
}

export const get = async (path, signal) => (await request(path, { signal })).json();
export const post = async (path, body) =>
  (await request(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) })).json();

function remember(cluster) {
  const { series, interval_s: interval } = store.history;
  const figures = { ...cluster.totals };
  for (const tier of cluster.tiers) for (const [name, value] of Object.entries(tier)) figures[`${tier.name}_${name}`] = value;
  const missed = store.seen ? Math.round((cluster.time_s - store.seen) / interval) - 1 : 0;
  if (store.seen && missed < 0) return;
  store.seen = cluster.time_s;
  for (const [name, values] of Object.entries(series)) {
    const value = figures[name] ?? null;
    for (let index = 0; index < Math.min(missed, 3600); index += 1) values.push(missed <= 2 ? value : null); // a late poll is no gap
    values.push(value);
    if (values.length > 3600) values.splice(0, values.length - 3600);
  }
}

function take(name, data) {
  store.receivedAt = Date.now();
  if (name === "happened") {
    store.events.push(data);
    if (store.events.length > MAX_EVENTS) store.events.shift();
    return;
  }
  store.state = data;
  if (data.cluster && !data.failure) remember(data.cluster);
  store.cluster = data.cluster;
  store.live = data.failure ? "lost" : "live";
  notify();
}

async function read(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const [event, data] = part.split("\n");
      take(event.slice(7), JSON.parse(data.slice(6)));
    }
  }
}

/** Follows the cluster until the page is closed. */
export async function follow() {
  let wait = 1000;
  setInterval(() => { if (store.live === "live" && Date.now() - store.receivedAt > Math.max(QUIET_MS, 5000 * store.state.interval_s)) stream?.abort(); }, 2000);
  for (;;) {
    stream = new AbortController();
    try {
      store.access = (await get("/api/access", stream.signal)).access;
      store.history = await get("/api/history?samples=3600", stream.signal);
      store.seen = 0;
      const after = store.events.at(-1)?.number || 0;
      const response = await request(`/api/events?after=${after}`, { signal: stream.signal });
      wait = 1000;
      await read(response.body);
      throw new Error("the stream has ended");
    } catch (error) {
      store.needsToken = error.status === 401;
      if (store.live !== "lost") store.lostAt = Date.now();
      store.live = "lost";
      store.why = error.status && (token || !store.needsToken) ? error.message : "";
      if (store.needsToken) { store.access = "none"; forgetToken(); }
      notify();
    }
    if (store.needsToken) await new Promise((done) => { const id = setInterval(() => { if (!store.needsToken) { clearInterval(id); done(); } }, 200); });
    else { await new Promise((done) => setTimeout(done, wait)); wait = Math.min(2 * wait, 10000); }
  }
}
