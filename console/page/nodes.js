// View "Nodes": table with filter, sort order and pages.
import { h, say, swatch } from "./dom.js";
import { TIERS, count, countRate, duration, size, sizeRate } from "./format.js";
import { STANDINGS, byName, fillsText, isAway, nodesOf } from "./nodes_model.js";

const PAGE = 50;
const ORDER = ["dead", "failed", "syncing", "draining", "drained", "stopped", "alive"];
const COLUMNS = [
  ["name", "Node"], ["standing", "State"], ["share", "Fullest tier"], ["blocks", "Blocks", true], ["hits_per_s", "Read", true], ["misses_per_s", "Missed", true],
  ["out_bytes_per_s", "Out", true], ["in_bytes_per_s", "In", true], ["evictions_per_s", "Evicted", true], ["next_s", "Victim unread", true], ["heartbeat_age_s", "Heartbeat", true],
];

export const pill = (node) => h("span", { className: `pill ${node.standing}`, title: node.health }, node.standing === "draining" ? `draining, ${count(node.remaining_blocks)} left` : STANDINGS[node.standing]);

/** Bars of the node's tiers, fullest first. */
export function fillBars(node) {
  return h("div", { className: "fills", role: "img", ariaLabel: `full: ${fillsText(node.fills)}` }, node.fills.map((tier) => {
    const piece = h("i", { className: tier.name });
    piece.style.width = `${100 * Math.min(1, tier.share)}%`;
    return h("div", { className: "bar" }, piece);
  }));
}

export function nodes({ openNode }) {
  let text = "", standing = "", sort = "name", isDown = false, page = 0, last = null;
  const body = h("tbody", {}), note = h("span", { className: "note" }), where = h("span", {});
  const filter = h("input", { type: "search", placeholder: "Filter by name, address, transport", ariaLabel: "Filter nodes", oninput: () => { text = filter.value.toLowerCase(); page = 0; draw(); } });
  const states = h("select", { ariaLabel: "Only nodes in this state", onchange: () => { standing = states.value; page = 0; draw(); } },
    h("option", { value: "" }, "Any state"), Object.entries(STANDINGS).map(([value, label]) => h("option", { value }, label)));
  const heads = COLUMNS.map(([key, label, isNumber]) => h("th", { scope: "col", className: isNumber ? "number" : "" },
    h("button", { type: "button", onclick: () => { isDown = sort === key ? !isDown : Boolean(isNumber) || key === "share"; sort = key; page = 0; draw(); } }, label)));
  const turn = (by) => () => { page += by; draw(); };
  const before = h("button", { type: "button", onclick: turn(-1) }, "Previous"), after = h("button", { type: "button", onclick: turn(1) }, "Next");
  const pages = h("nav", { className: "pages", ariaLabel: "Pages of nodes" }, where, before, after);
  const blank = h("p", { className: "blank" });
  const table = h("div", { className: "scroll", tabIndex: 0, role: "region", ariaLabel: "Table of nodes" }, h("table", {}, h("thead", {}, h("tr", {}, heads)), body));
  const element = h("div", { className: "grid" }, h("section", { className: "panel", ariaLabel: "Nodes" },
    h("header", {}, h("h1", { className: "visually-hidden" }, "Nodes"), h("h2", {}, "Nodes"), note, h("div", { className: "push" }, h("span", { className: "legend" }, Object.entries(TIERS).map(([name, label]) => h("span", { className: "small" }, swatch(name), ` ${label}`))), filter, states)), table, blank, pages));

  const value = (node) => (sort === "standing" ? ORDER.indexOf(node.standing) : node[sort] ?? -1);
  function draw() {
    if (!last?.cluster) return;
    const all = nodesOf(last.cluster);
    const found = all.filter((node) => (!standing || node.standing === standing) && `${node.name} ${node.address} ${node.transports.join(" ")} ${node.version}`.toLowerCase().includes(text));
    found.sort((one, other) => (sort === "name" ? byName(one.name, other.name) : value(one) - value(other) || byName(one.name, other.name)) * (isDown ? -1 : 1));
    page = Math.max(0, Math.min(page, Math.ceil(found.length / PAGE) - 1));
    const shown = found.slice(page * PAGE, (page + 1) * PAGE);
    heads.forEach((head, index) => { if (COLUMNS[index][0] === sort) head.ariaSort = isDown ? "descending" : "ascending"; else head.removeAttribute("aria-sort"); });
    fill(shown);
    say(note, found.length === all.length ? `${count(all.length)}` : `${count(found.length)} of ${count(all.length)}`);
    blank.hidden = Boolean(shown.length);
    table.hidden = !shown.length;
    say(blank, all.length ? "No node matches." : "No node has joined yet. Start one: kvstore-node --master HOST:PORT");
    pages.hidden = found.length <= PAGE;
    say(where, `${page * PAGE + 1} to ${page * PAGE + shown.length} of ${count(found.length)}`);
    before.disabled = page === 0;
    after.disabled = (page + 1) * PAGE >= found.length;
  }
  /** Rebuilds the rows, and keeps the focus at its node. */
  function fill(shown) {
    const focused = body.contains(document.activeElement) ? document.activeElement.textContent : null;
    body.replaceChildren(...shown.map((node) => h("tr", { className: "link", onclick: () => openNode(node.name) },
      h("td", {}, h("button", { type: "button", className: "name" }, node.name)), h("td", {}, pill(node)),
      h("td", { title: `${size(node.used_bytes)} of ${size(node.capacity_bytes)}` }, fillBars(node), h("span", { className: "small soft" }, fillsText(node.fills.slice(0, 1)) || "no tier")),
      ...[count(node.blocks), countRate(node.hits_per_s), countRate(node.misses_per_s), sizeRate(node.out_bytes_per_s), sizeRate(node.in_bytes_per_s), countRate(node.evictions_per_s), node.next_s === null ? "–" : duration(node.next_s),
        isAway(node) ? "–" : `${node.heartbeat_age_s.toFixed(1)} s ago`].map((cell) => h("td", { className: "number" }, cell)))));
    if (focused) [...body.querySelectorAll("button.name")].find((button) => button.textContent === focused)?.focus({ preventScroll: true });
  }
  /** `query` of the URL's hash: links of banners have the state to filter by. */
  function shown(query) {
    const state = new URLSearchParams(query).get("state");
    if (!state) return;
    standing = states.value = STANDINGS[state] ? state : "";
    page = 0;
    draw();
  }
  return { element, filter, shown, update(store) { last = store; draw(); } };
}
