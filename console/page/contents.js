// View "Contents": namespaces and tenants, and the prefix tree of one namespace: the largest prefixes, or the hottest.
import { act } from "./dialogs.js";
import { choice, h, say, swatch } from "./dom.js";
import { TIERS, count, duration, percent, share, size } from "./format.js";
import { icicle } from "./icicle.js";
import { get } from "./store.js";

const REFRESH_MS = 10000, REFRESH_HOT_MS = 5000;
const SEGMENTS = 400;
const LIMITS = { hbm_bytes: "HBM", dram_bytes: "DRAM", nvme_bytes: "NVMe", hbm_slabs: "HBM slabs", dram_slabs: "DRAM slabs", blocks: "blocks", requests_in_flight: "requests", connections: "connections", pins: "pins", reservations: "reservations" };

export function contents() {
  let found = null, chosen = null, loaded = 0, last = null, text = "", isLoading = false, by = "bytes", quotas = new Map();
  const rows = h("tbody", {}), tenants = h("tbody", {}), blank = h("p", { className: "blank" }, "Loading…"), note = h("span", { className: "note" });
  const filter = h("input", { type: "search", placeholder: "Filter by model, tenant, weights or user", ariaLabel: "Filter namespaces", oninput: () => { text = filter.value.toLowerCase(); draw(); } });
  const tree = icicle(), title = h("h2", {}, "Prefixes"), treeNote = h("span", { className: "note" });
  const head = (...names) => h("thead", {}, h("tr", {}, names.map(([name, isNumber]) => h("th", { scope: "col", className: isNumber ? "number" : "" }, name))));
  const region = (label, table) => h("div", { className: "scroll", tabIndex: 0, role: "region", ariaLabel: label }, table);
  const table = region("Table of namespaces", h("table", {}, head(["Namespace"], ["Tenant"], ["Weights"], ["Blocks", true], ["Size", true], ["In tiers"], ["Last read", true], ["Used by"], ["Actions", true]), rows));
  const keys = h("ul", { className: "legend" }, Object.entries({ ...TIERS, unknown: "tier unknown" }).map(([name, label]) => h("li", {}, swatch(name), label)));
  const which = choice("Order of prefixes", [["bytes", "Largest"], ["reads", "Hottest"]], by, (value) => { by = value; if (found) found.segments = []; draw(); load(); });
  const element = h("div", { className: "grid" }, h("h1", { className: "visually-hidden" }, "Contents"),
    h("section", { className: "panel roomy", ariaLabel: "Namespaces" }, h("header", {}, h("h2", {}, "Namespaces"), note, h("div", { className: "push" }, filter)), table, blank),
    h("section", { className: "panel roomy", ariaLabel: "Tenants" }, h("header", {}, h("h2", {}, "Tenants")), region("Table of tenants", h("table", {}, head(["Tenant"], ["Blocks", true], ["Pinned", true], ["Size", true], ["Share", true], ["Quota", true], ["Actions", true]), tenants))),
    h("section", { className: "panel", ariaLabel: "Prefixes" }, h("header", {}, title, treeNote, h("div", { className: "push" }, which)), tree.element, keys));

  /** The tenant's most used limit, as a share. */
  function quota(tenant) {
    const one = quotas.get(tenant);
    if (!one) return h("span", { className: "soft", title: "no limit" }, "–");
    const show = one.what.endsWith("_bytes") ? size : count, what = LIMITS[one.what];
    return h("span", { className: one.share >= 1 ? "pill dead" : one.share >= 0.9 ? "pill syncing" : "", title: `${what}: ${show(one.used)} of ${show(one.limit)}${one.at ? ` at ${one.at}` : ""}` }, `${percent(one.share)} of ${what}`);
  }
  function changeQuota(tenant) {
    const limit = h("select", { ariaLabel: "Limit" }, Object.entries(LIMITS).map(([value, label]) => h("option", { value }, label)));
    const value = h("input", { type: "text", autocomplete: "off", placeholder: "8GiB, 1000 or none", ariaLabel: "New value" });
    act("quota", { tenant }, { title: `Change the quota of ${tenant || "(none)"}?`, button: "Change", fields: { limit, value },
      text: "Overrides the quotas file. Leave empty to remove. Lowering it evicts the tenant's coldest blocks." });
  }
  /** Display name: the model if an engine reported it, else the namespace's name. */
  const name = (one) => one.model || one.namespace || "(none)";
  const isHash = (text) => /^[0-9a-f]{32}$/.test(text);
  /** Unique name for screen readers and dialogs: with layout and id for namespaces of one model. */
  const fullName = (one) => [name(one), ...(one.model ? [one.layout, `id ${one.namespace.slice(0, 8)}`] : [])].filter(Boolean).join(", ");
  function kind(one) {
    if (one.model) return h("span", { className: "soft small", title: one.namespace }, `${one.layout}; id ${one.namespace.slice(0, 8)}`);
    return isHash(one.namespace) ? h("span", { className: "soft small", title: "No engine reported its identity: docs/kvcache.md, What operators see" }, "not reported") : null;
  }
  const isSame = (one, other) => other && one.tenant === other.tenant && one.namespace === other.namespace;

  async function load() {
    if (isLoading) return;
    isLoading = true;
    loaded = Date.now();
    const asked = { segments: SEGMENTS, by, ...(chosen && { tenant: chosen.tenant, namespace: chosen.namespace }) };
    try {
      const [reply, tenants] = await Promise.all([get(`/api/prefixes?${new URLSearchParams(asked)}`), get("/api/tenants")]);
      found = reply;
      quotas = new Map(tenants.map((one) => [one.tenant, one]));
      if (!chosen && found.namespaces.length) { [chosen] = found.namespaces; isLoading = false; await load(); return; }
      if (by !== asked.by) { found.segments = []; isLoading = false; await load(); return; }
      draw();
    } catch (error) { say(blank, error.message); blank.hidden = false; } finally { isLoading = false; }
  }
  function bar(one) {
    const box = h("div", { className: "bar", role: "img", ariaLabel: Object.keys(TIERS).map((tier) => `${TIERS[tier]} ${percent(share(one[`${tier}_bytes`], one.bytes))}`).join(", ") });
    for (const tier of Object.keys(TIERS)) { const piece = h("i", { className: tier }); piece.style.width = `${100 * (share(one[`${tier}_bytes`], one.bytes) || 0)}%`; box.append(piece); }
    return box;
  }
  /** The version of the weights; of a long one the end, in which versions differ. */
  function weights(one) {
    if (!one.weights) return "–";
    const text = one.weights.length > 32 ? `…${one.weights.slice(-31)}` : one.weights;
    return h("span", { title: one.weights, className: one.is_retired ? "soft" : "" }, one.is_retired ? `${text} (retired)` : text);
  }
  const users = (one) => (one.is_used ? h("span", { title: one.users.join(", ") }, one.users.length > 2 ? `${one.users.slice(0, 2).join(", ")} and ${one.users.length - 2} more` : one.users.join(", ")) : "–");
  function actions(one) {
    if (last.access !== "admin") return [];
    const what = `${count(one.blocks)} blocks (${size(one.bytes)}) of ${fullName(one)}${one.tenant ? `, tenant ${one.tenant}` : ""}`, body = { tenant: one.tenant, namespace: one.namespace };
    const button = (label, className, then) => h("button", { type: "button", className, ariaLabel: `${label} ${fullName(one)}`, onclick: then }, label);
    return [button("Pin", "", () => act("pin", { ...body, pinned: true }, { title: `Pin ${name(one)}?`, text: `${what}, will neither be evicted nor removed until they are unpinned.`, button: "Pin" })), " ",
      one.pinned ? button("Unpin", "", () => act("pin", { ...body, pinned: false }, { title: `Unpin ${name(one)}?`, text: `Removes the pins of ${what}.`, button: "Unpin" })) : null, " ",
      button("Remove", "danger", () => act("remove", body, { title: `Remove ${name(one)}?`, text: `${what}, will be gone, but for those that are pinned. ${one.is_used ? `In use by ${one.users.join(", ")}: they compute it again.` : "No live engine is known to use it."}`, button: "Remove", isDangerous: true, word: one.model || (isHash(one.namespace) ? one.namespace.slice(0, 8) : one.namespace) || "remove" }))];
  }
  function draw() {
    if (!found || !last) return;
    const shown = found.namespaces.filter((one) => `${one.tenant} ${one.namespace} ${one.model} ${one.layout} ${one.weights} ${one.users.join(" ")}`.toLowerCase().includes(text));
    say(note, shown.length === found.namespaces.length ? count(shown.length) : `${shown.length} of ${found.namespaces.length}`);
    blank.hidden = Boolean(shown.length);
    table.hidden = !shown.length;
    say(blank, found.namespaces.length ? "No namespace is like that." : "Nothing is held yet.");
    const focused = rows.contains(document.activeElement) ? document.activeElement.ariaLabel : null;
    rows.replaceChildren(...shown.slice(0, 200).map((one) => h("tr", {}, h("td", {}, h("button", { type: "button", className: "name", ariaPressed: String(Boolean(isSame(one, chosen))), ariaLabel: `Show the prefixes of ${fullName(one)}`, title: one.namespace, onclick: () => { chosen = one; load(); } }, name(one)), kind(one)),
      h("td", {}, one.tenant || h("span", { className: "soft" }, "(none)")), h("td", {}, weights(one)), h("td", { className: "number" }, count(one.blocks)), h("td", { className: "number" }, size(one.bytes)), h("td", {}, bar(one)), h("td", { className: "number" }, one.read_age_s === null ? "–" : `${duration(one.read_age_s)} ago`), h("td", {}, users(one)), h("td", { className: "number" }, actions(one)))));
    if (focused) [...rows.querySelectorAll("button")].find((button) => button.ariaLabel === focused)?.focus({ preventScroll: true });
    const changed = tenants.contains(document.activeElement) ? document.activeElement.ariaLabel : null;
    const sums = new Map(), whole = found.namespaces.reduce((sum, one) => sum + one.bytes, 0);
    for (const one of found.namespaces) { const sum = sums.get(one.tenant) || { blocks: 0, bytes: 0, pinned: one.pinned }; sum.blocks += one.blocks; sum.bytes += one.bytes; sums.set(one.tenant, sum); }
    for (const tenant of quotas.keys()) if (!sums.has(tenant)) sums.set(tenant, { blocks: 0, bytes: 0, pinned: 0 });
    tenants.replaceChildren(...[...sums].sort((one, other) => other[1].bytes - one[1].bytes).slice(0, 100).map(([tenant, sum]) => h("tr", {}, h("td", {}, tenant || h("span", { className: "soft" }, "(none)")),
      ...[count(sum.blocks), count(sum.pinned), size(sum.bytes), percent(share(sum.bytes, whole))].map((cell) => h("td", { className: "number" }, cell)), h("td", { className: "number" }, quota(tenant)),
      h("td", { className: "number" }, last.access === "admin" && h("button", { type: "button", ariaLabel: `Change the quota of ${tenant || "(none)"}`, onclick: () => changeQuota(tenant) }, "Quota")))));
    if (changed) [...tenants.querySelectorAll("button")].find((button) => button.ariaLabel === changed)?.focus({ preventScroll: true });
    say(title, chosen ? `Prefixes of ${fullName(chosen)}` : "Prefixes");
    const isHot = by === "reads", reads = found.segments.reduce((sum, one) => sum + one.reads_per_s, 0);
    const order = isHot ? `hottest, ${count(reads)} blocks/s; over the last minute, counted while this view is open` : `the ${count(found.segments.length)} largest`;
    say(treeNote, found.segments.length ? `${order}; prompts begin at the top; width: bytes` : "");
    const none = isHot ? "No reads counted yet: nodes start counting when this view is opened, and report every 5 seconds." : "No prefixes are stored yet.";
    tree.update(found.segments, isHot, none);
  }
  return { element, filter, shown: load, update(store) { last = store; if (Date.now() - loaded > (by === "reads" ? REFRESH_HOT_MS : REFRESH_MS)) load(); } };
}
