// View "Activity": slowest operations and requests, and the event log, newest first.
import { choice, h } from "./dom.js";
import { clock, countRate, latency } from "./format.js";
import { get } from "./store.js";

export function happened(event) {
  const time = h("time", { dateTime: new Date(event.time_s * 1000).toISOString(), title: new Date(event.time_s * 1000).toLocaleString("en-GB") }, clock(event.time_s));
  const level = event.level === "info" ? null : h("span", { className: "visually-hidden" }, `${event.level}: `);
  return h("li", { className: event.level }, time, h("span", {}, level, event.text));
}

const LEVELS = { all: ["info", "warning", "error"], warnings: ["warning", "error"], errors: ["error"] };
const SHOWN = 300;
const SLOW_MS = 5000, SLOW_SHOWN = 20;

export function activity() {
  let level = "all", text = "", last = null, shown = "";
  const list = h("ol", { className: "happened" });
  const note = h("span", { className: "note" });
  const filter = h("input", { type: "search", placeholder: "Filter by text", ariaLabel: "Filter events by text", oninput: () => { text = filter.value.toLowerCase(); draw(); } });
  const slow = h("tbody", {}), noSlow = h("p", { className: "blank" }, "No requests yet.");
  const heads = [["Operation"], ["At"], ["Rate", true], ["Mean", true], ["Slowest", true], ["Slowest at"]].map(([name, isNumber]) => h("th", { scope: "col", className: isNumber ? "number" : "" }, name));
  const table = h("div", { className: "scroll", tabIndex: 0, role: "region", ariaLabel: "Table of operations" }, h("table", {}, h("thead", {}, h("tr", {}, heads)), slow));
  const element = h("div", { className: "grid" }, h("section", { className: "panel", ariaLabel: "Operations" },
    h("header", {}, h("h2", {}, "Slowest operations"), h("span", { className: "note" }, "by the slowest of the last minute; means of the last second")), table, noSlow),
    h("section", { className: "panel", ariaLabel: "Events" },
    h("header", {}, h("h1", { className: "visually-hidden" }, "Activity"), h("h2", {}, "Events"), note, h("div", { className: "push" }, filter,
      choice("Level of events", [["all", "All"], ["warnings", "Warnings"], ["errors", "Errors"]], level, (value) => { level = value; draw(); }))), list));
  const requests = h("tbody", {}), noRequests = h("p", { className: "blank" }, "No request took 1 ms or more in the last 10 minutes.");
  const columns = [["Took", true], ["Operation"], ["Tenant"], ["At"], ["Client"], ["Time"]].map(([name, isNumber]) => h("th", { scope: "col", className: isNumber ? "number" : "" }, name));
  const requestTable = h("div", { className: "scroll", tabIndex: 0, role: "region", ariaLabel: "Table of slow requests" }, h("table", {}, h("thead", {}, h("tr", {}, columns)), requests));
  requestTable.hidden = true;
  element.lastChild.before(h("section", { className: "panel", ariaLabel: "Slow requests" },
    h("header", {}, h("h2", {}, "Slowest requests"), h("span", { className: "note" }, "the slowest of each minute by tenant and operation, of the last 10 minutes")), requestTable, noRequests));
  let requestedAt = 0;
  /** Requests the slow requests, only while this view is shown. */
  async function loadSlow() {
    if (Date.now() - requestedAt < SLOW_MS) return;
    requestedAt = Infinity;  // one request at a time
    try {
      const found = await get("/api/slow");
      requestTable.hidden = !found.length;
      noRequests.hidden = Boolean(found.length);
      requests.replaceChildren(...found.slice(0, SLOW_SHOWN).map((one) => h("tr", {}, h("td", { className: "number" }, latency(one.duration_s)),
        ...[one.operation.replaceAll("_", " "), one.tenant || "–", one.at, one.peer || "–", clock(one.time_s)].map((text) => h("td", {}, text)))));
    } catch { /* the rest stays; the banner on top reports connection errors */ } finally { requestedAt = Date.now(); }
  }
  function draw() {
    if (!last?.cluster) return;
    const { operations } = last.cluster;
    table.hidden = !operations.length;
    noSlow.hidden = Boolean(operations.length);
    slow.replaceChildren(...operations.slice(0, 12).map((one) => h("tr", {}, h("td", {}, one.operation.replaceAll("_", " ")), h("td", {}, one.where),
      ...[countRate(one.per_s), latency(one.mean_s), latency(one.slowest_s)].map((cell) => h("td", { className: "number" }, cell)), h("td", {}, one.slowest_at))));
    const found = last.events.filter((event) => LEVELS[level].includes(event.level) && event.text.toLowerCase().includes(text));
    const key = `${level} ${text} ${found.at(-1)?.number} ${found.length}`;
    if (key === shown) return;
    shown = key;
    note.textContent = `${found.length} of ${last.events.length}; for operators' actions see kvstore audit`;
    list.replaceChildren(...found.slice(-SHOWN).reverse().map(happened), ...(found.length ? [] : [h("li", { className: "info" }, h("span", {}), h("span", { className: "soft" }, "No such events."))]));
  }
  return { element, filter, update(store) { last = store; draw(); loadSlow(); } };
}
