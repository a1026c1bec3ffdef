// View "Overview": problems, key figures, charts, heat map of nodes, tiers, catalog and latest events.
import { banners, consoleTime, problemsOf } from "./banners.js";
import { chart, sparkline } from "./charts.js";
import { choice, h, say, swatch } from "./dom.js";
import { TIERS, count, countParts, countRate, duration, percent, size, sizeParts, sizeRate } from "./format.js";
import { happened } from "./activity.js";
import { heatMap, heatScale } from "./heat.js";
import { METRICS, fillsOf, fillsText, nodesOf } from "./nodes_model.js";
import { get } from "./store.js";

const MASTERS_MS = 5000;
const SPANS = [[300, "5 min"], [900, "15 min"], [3600, "1 h"]];

function tile(label, className, series) {
  const figure = h("span", {}), unit = h("span", { className: "unit" }), more = h("div", { className: "more" }), spark = sparkline(className);
  return {
    element: h("div", { className: "tile" }, h("div", { className: "name" }, label), h("div", { className: "figure" }, figure, unit), more, spark.element),
    update([text, word], detail, values, samples, name = series) { say(figure, text); say(unit, word); say(more, detail); more.title = detail; spark.update((values[name] || []).slice(-samples)); },
  };
}

export function overview({ openNode }) {
  const notes = banners("State of the cluster");
  const tiles = {
    nodes: tile("Nodes alive", "plainline", "alive"), full: tile("Fullest tier", "plainline", "used_bytes"), blocks: tile("Blocks", "plainline", "blocks"),
    ratio: tile("Hit ratio", "plainline", "hit_ratio"), reads: tile("Blocks read", "dram", "hits_per_s"), out: tile("Bytes out", "out", "out_bytes_per_s"), in: tile("Bytes in", "in", "in_bytes_per_s"),
  };
  let span = 900, metric = "share", last = null;
  const hits = chart({ title: "Requested blocks, by the tier that served them", show: countRate, isStacked: true, series: [
    { name: "hbm_hits_per_s", label: "HBM", className: "hbm" }, { name: "dram_hits_per_s", label: "DRAM", className: "dram" },
    { name: "nvme_hits_per_s", label: "NVMe", className: "nvme" }, { name: "misses_per_s", label: "missed", className: "miss" }] });
  const bytes = chart({ title: "Bytes moved by messages and the transfer engine", show: sizeRate, base: 1024, series: [
    { name: "out_bytes_per_s", label: "out of nodes", className: "out" }, { name: "in_bytes_per_s", label: "into nodes", className: "in" }] });
  const ratio = chart({ title: "Hit ratio", show: percent, most: 1, series: [{ name: "hit_ratio", label: "hits of all requested blocks", className: "plainline" }] });
  const evictions = chart({ title: "Evictions", show: countRate, isStacked: true, series: [
    { name: "hbm_evictions_per_s", label: "HBM", className: "hbm" }, { name: "dram_evictions_per_s", label: "DRAM", className: "dram" }, { name: "nvme_evictions_per_s", label: "NVMe", className: "nvme" }] });
  const charts = [hits, bytes, ratio, evictions];
  const tiers = h("div", { className: "tiers" });
  const map = heatMap(openNode), scale = heatScale();
  const select = h("select", { ariaLabel: "Colour nodes by", onchange: () => { metric = select.value; draw(); } },
    Object.entries(METRICS).map(([value, one]) => h("option", { value }, one.label)));
  const facts = h("dl", { className: "facts" }), masters = h("ul", { className: "masters", ariaLabel: "Masters" });
  let requestedAt = 0;
  const lately = h("ol", { className: "happened" });
  const mapNote = h("span", { className: "note" }), movesNote = h("span", { className: "note" }), moved = h("div", { className: "scroll", tabIndex: 0, role: "region", ariaLabel: "Table of moved blocks" });
  const panel = (width, title, note, push, ...children) =>
    h("section", { className: `panel ${width}`, ariaLabel: title }, h("header", {}, h("h2", {}, title), note, push && h("div", { className: "push" }, push)), children);
  const catalog = panel("w3", "Catalog", null, null, facts, masters);
  catalog.id = "catalog";
  const element = h("div", { className: "grid" }, h("h1", { className: "visually-hidden" }, "Overview"), notes.element, h("div", { className: "tiles" }, Object.values(tiles).map((one) => one.element)),
    panel("w6", "Requested blocks", null, choice("Span of the charts", SPANS, span, (value) => { span = value; draw(); }), hits.element, hits.legend),
    panel("w6", "Bytes moved", null, null, bytes.element, bytes.legend),
    panel("w8", "Nodes", mapNote, select, map.element, scale.element),
    panel("w4", "Tiers", null, null, tiers),
    panel("w3", "Hit ratio", null, null, ratio.element, ratio.legend),
    panel("w3", "Evictions", null, null, evictions.element, evictions.legend),
    catalog,
    panel("w3", "Latest events", null, h("a", { href: "#activity", className: "small" }, "All events"), lately),
    panel("", "What moved, and why", movesNote, null, moved));

  function draw() {
    if (!last?.cluster) return;
    const { cluster, history, state, events } = last;
    const { totals } = cluster, values = history.series, samples = Math.round(span / history.interval_s);
    const wrong = problemsOf({ state, cluster });
    notes.update(wrong.length ? wrong : [{ level: "ok", text: `No problems: ${totals.alive} of ${totals.nodes} nodes alive, the catalog ${cluster.catalog.health || "is not checked"}` }], consoleTime(last));
    const states = [[totals.nodes - totals.alive - totals.syncing - totals.stopped, "dead"], [totals.stopped, "stopped"], [totals.syncing, "syncing"], [totals.draining, "drained"]].filter(([number]) => number).map(([number, word]) => `${number} ${word}`);
    tiles.nodes.update([`${totals.alive}`, `of ${totals.nodes}`], states.join(", ") || "all", values, samples);
    const fills = fillsOf(cluster.tiers), [fullest] = fills;
    tiles.full.update(fullest ? [percent(fullest.share), TIERS[fullest.name] || fullest.name] : ["–", ""], fillsText(fills.slice(1)) || `${size(totals.used_bytes)} of ${size(totals.capacity_bytes)}`, values, samples, fullest && `${fullest.name}_used_bytes`);
    tiles.blocks.update(countParts(totals.blocks), `${count(totals.pinned)} pinned`, values, samples);
    tiles.ratio.update(parts(percent(totals.hit_ratio)), totals.hit_ratio === null ? "no requests now" : `${countRate(totals.misses_per_s)} missed`, values, samples);
    tiles.reads.update(rated(countParts(totals.hits_per_s)), `${count(totals.keys_per_s)} keys/s requested`, values, samples);
    tiles.out.update(rated(sizeParts(totals.out_bytes_per_s)), "messages, engine", values, samples);
    tiles.in.update(rated(sizeParts(totals.in_bytes_per_s)), `${countRate(totals.evictions_per_s)} evicted`, values, samples);
    for (const one of charts) one.update(values, history.interval_s, cluster.time_s, samples);
    const nodes = nodesOf(cluster);
    map.update(nodes, metric);
    scale.update(nodes, metric);
    say(mapNote, nodes.length ? "" : "none has joined yet");
    tiers.replaceChildren(...(fills.length ? fills.map(tierRow) : [h("p", { className: "blank" }, "No node has reported a tier.")]));
    showFacts(facts, cluster);
    say(movesNote, totals.local_ratio === null ? "" : `${percent(totals.local_ratio)} of reads are local`);
    showMoves(moved, cluster.moves);
    const newest = events.slice(-6).reverse();
    const key = newest.map((event) => event.number).join();
    if (lately.dataset.shown !== key) { lately.dataset.shown = key; lately.replaceChildren(...newest.map(happened)); }
  }
  /** Requests the masters' reports, only while this view is shown. */
  async function loadMasters() {
    if (Date.now() - requestedAt < MASTERS_MS) return;
    requestedAt = Infinity;  // one request at a time
    try { showMasters(masters, await get("/api/masters")); } catch { /* the rest stays; the banner on top reports connection errors */ } finally { requestedAt = Date.now(); }
  }
  return { element, update(store) { last = store; draw(); loadMasters(); } };
}

function showMasters(box, found) {
  const key = JSON.stringify(found);
  if (box.dataset.shown === key) return;
  box.dataset.shown = key;
  box.hidden = found.length < 2;
  box.replaceChildren(...found.map((one) => {
    const state = one.error ? "dead" : one.role === "owner" ? "alive" : one.behind ? "syncing" : "";
    const note = one.error || (one.behind ? `${count(one.behind)} blocks behind` : "");
    return h("li", {}, h("span", { className: `pill ${state}` }, one.error ? "no answer" : one.role), h("span", {}, ` ${one.name || one.address} `), h("span", { className: "soft small" }, note));
  }));
}

const parts = (text) => { const at = text.indexOf(" "); return at < 0 ? [text, ""] : [text.slice(0, at), text.slice(at + 1)]; };
const rated = ([text, unit]) => [text, text === "–" ? "" : `${unit}/s`];

function tierRow(tier) {
  const full = tier.share, bar = h("i", { className: tier.name });
  bar.style.width = `${100 * Math.min(1, full)}%`;
  return h("div", { className: "row" }, h("h3", {}, swatch(tier.name), TIERS[tier.name] || tier.name, h("span", { className: "soft small" }, ` ${count(tier.nodes)} ${tier.nodes === 1 ? "node" : "nodes"}`)), h("strong", {}, percent(full)),
    h("div", { className: "bar", role: "img", ariaLabel: `${TIERS[tier.name]}: ${percent(full)} full` }, bar),
    h("div", { className: "more" }, h("span", {}, `${size(tier.used_bytes)} of ${size(tier.capacity_bytes)}`), h("span", {}, `${count(tier.blocks)} blocks`), h("span", {}, `${countRate(tier.hits_per_s)} hit`),
      h("span", {}, `${countRate(tier.evictions_per_s)} evicted`), tier.promotions_per_s || tier.demotions_per_s ? h("span", {}, `${countRate(tier.promotions_per_s)} up, ${countRate(tier.demotions_per_s)} down`) : null));
}

function showMoves(box, { rows, without_home_copy: without }) {
  const missing = Object.entries(without).map(([text, blocks]) => `${count(blocks)} ${text}`).join(", ");
  box.replaceChildren(rows.length ? h("table", {}, h("thead", {}, h("tr", {}, ["Blocks", "Now", "Since the nodes started", "Bytes"].map((head, index) => h("th", { scope: "col", className: index ? "number" : "" }, head)))),
    h("tbody", {}, rows.map((row) => h("tr", {}, h("td", {}, row.text), [countRate(row.blocks_per_s), count(row.blocks), size(row.bytes)].map((cell) => h("td", { className: "number" }, cell))))))
    : h("p", { className: "blank" }, "No block has moved or left yet."), missing ? h("p", { className: "soft small" }, `Without a home copy: ${missing}`) : "");
}

function showFacts(box, { master, catalog }) {
  const { owner } = master;
  const rows = [["Address", catalog.address], ["Health", catalog.health || "unknown"], ["Records", count(catalog.records)],
    ...(catalog.partitions > 1 ? [[`Owners of ${catalog.partitions} partitions`, Object.entries(catalog.shares).map(([name, number]) => `${name}: ${number}`).join(", ") || "unknown"]]
      : [[catalog.shards > 1 ? `Owner of all ${catalog.shards} shards` : "Owner", owner.name ? `${owner.name}, epoch ${owner.epoch}` : "none"]]), ["This master", `${master.name || "unknown"}, ${master.role}`],
    ["Version", master.version], ["Up for", duration(master.uptime_s)], ["Memory", size(master.rss_bytes)]];
  const key = JSON.stringify(rows);
  if (box.dataset.shown === key) return;
  box.dataset.shown = key;
  box.replaceChildren(...rows.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
}
