// Dialog of one node: facts, tiers, the last hour, the host, and actions.
import { chart } from "./charts.js";
import { act } from "./dialogs.js";
import { h, swatch } from "./dom.js";
import { TIERS, count, countRate, percent, share, size, sizeRate } from "./format.js";
import { hostDrawing } from "./hosts.js";
import { pill } from "./nodes.js";
import { isAway, nodesOf, victimText } from "./nodes_model.js";
import { get, store } from "./store.js";

let shown = null;
const REFRESH_MS = 10000;

export function closeNode() { shown?.dialog.close(); }

export function openNode(name) {
  closeNode();
  const head = h("h2", {}), facts = h("dl", { className: "facts" }), tiers = h("div", { className: "tiers" }), host = h("div", {}), buttons = h("div", { className: "buttons" });
  const reads = chart({ title: `Blocks read of ${name}`, show: countRate, series: [{ name: "hits_per_s", label: "read", className: "dram" }, { name: "misses_per_s", label: "missed", className: "evict" }] });
  const bytes = chart({ title: `Bytes moved of ${name}`, show: sizeRate, base: 1024, series: [{ name: "out_bytes_per_s", label: "out", className: "out" }, { name: "in_bytes_per_s", label: "in", className: "in" }] });
  const dialog = h("dialog", { ariaLabel: `Node ${name}` }, h("div", {}, head, facts, tiers, h("div", {}, h("h3", {}, "The last hour"), reads.element, reads.legend), h("div", {}, bytes.element, bytes.legend), host, buttons));
  dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
  dialog.addEventListener("close", () => { dialog.remove(); if (shown?.dialog === dialog) shown = null; });
  document.body.append(dialog);
  shown = { name, dialog, head, facts, tiers, buttons, charts: [reads, bytes], loaded: 0, key: "" };
  updateNode(store);
  dialog.showModal();
  get(`/api/hosts?node=${encodeURIComponent(name)}`).then(([one]) => {
    host.replaceChildren(h("h3", {}, `Host${one?.topology ? ` ${one.topology.host}` : ""}`), ...(one?.topology ? hostDrawing(one.topology) : [h("p", { className: "soft" }, one?.note || "unknown")]));
  }).catch((error) => host.replaceChildren(h("p", { className: "soft" }, error.message)));
}

async function loadHistory(to) {
  to.loaded = Date.now();
  try {
    const found = await get(`/api/history?node=${encodeURIComponent(to.name)}&samples=360`);
    for (const one of to.charts) one.update(found.series, found.interval_s, store.cluster.time_s, Math.round(3600 / found.interval_s));
  } catch { to.loaded = 0; }
}

export function updateNode({ cluster, access }) {
  if (!shown || !cluster) return;
  if (Date.now() - shown.loaded > REFRESH_MS) loadHistory(shown);
  const node = nodesOf(cluster).find((one) => one.name === shown.name);
  if (!node) { shown.head.replaceChildren(shown.name, h("span", { className: "pill" }, "forgotten")); shown.buttons.replaceChildren(close()); return; }
  const rows = [["Address", node.address || "none"], ["Transports", node.transports.join(", ") || "messages only"], ["Blocks", count(node.blocks)], ["Clients", `${count(node.connections)} connections`],
    ["Read", countRate(node.hits_per_s)], ["Evicted", countRate(node.evictions_per_s)],
    ["Home copies", `${count(node.home_copies_sent)} sent, ${count(node.home_copies_received)} received${node.home_copies_skipped ? `, ${count(node.home_copies_skipped)} not made` : ""}`], ["Version", node.version], ["Node id", String(node.id)],
    ["Last heartbeat", isAway(node) ? `none since it ${node.state === "dead" ? "died" : "stopped"}` : `${node.heartbeat_age_s.toFixed(1)} s ago`], ...(node.health ? [["Failed", node.health]] : [])];
  shown.facts.replaceChildren(...rows.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
  shown.tiers.replaceChildren(...Object.keys(TIERS).filter((tier) => node[`${tier}_capacity_bytes`]).map((tier) => {
    const full = share(node[`${tier}_used_bytes`], node[`${tier}_capacity_bytes`]), bar = h("i", { className: tier });
    const next = node.next_victims.find(([name]) => name === tier);
    bar.style.width = `${100 * full}%`;
    return h("div", { className: "row" }, h("h3", {}, swatch(tier), TIERS[tier]), h("span", {}, `${percent(full)} of ${size(node[`${tier}_capacity_bytes`])}`), h("div", { className: "bar", role: "img", ariaLabel: `${TIERS[tier]} ${percent(full)} full` }, bar),
      next ? h("div", { className: "more" }, `Evicts next: ${victimText(next)}`) : null);
  }));
  const key = `${node.standing} ${node.remaining_blocks} ${node.drain} ${access}`;
  if (key === shown.key) return;
  shown.key = key;
  shown.head.replaceChildren(node.name, pill(node));
  shown.buttons.replaceChildren(...(access === "admin" ? actions(node) : []), close());
}

const close = () => h("button", { type: "button", onclick: closeNode }, "Close");

function actions(node) {
  const button = (text, isDangerous, then) => h("button", { type: "button", className: isDangerous ? "danger" : "", onclick: then }, text);
  const found = [];
  if (node.drain) found.push(button("End the drain", false, () => act("drain", { node: node.name, cancel: true }, { title: `End the drain of ${node.name}?`, text: "It accepts new blocks again.", button: "End the drain" })));
  else if (!isAway(node)) found.push(button("Drain", false, () => act("drain", { node: node.name, to: "peers" }, { title: `Drain ${node.name}?`, text: "It gets no new blocks, and its last replicas are copied to other nodes. It stays readable, and stays drained until the drain is ended.", button: "Drain" })));
  if (isAway(node)) found.push(button("Forget", true, () => act("forget", { node: node.name }, { title: `Forget ${node.name}?`, text: "For a node that will not return: its last replicas are lost. If it is started again, it joins as a new node.", button: "Forget", isDangerous: true, word: node.name })));
  return found;
}
