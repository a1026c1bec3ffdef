// View "Network": hosts with their rails and traffic, and measured rates between nodes.
import { h, say } from "./dom.js";
import { count, sizeRate } from "./format.js";
import { hostDrawing, showFlows } from "./hosts.js";
import { pill } from "./nodes.js";
import { nodesOf } from "./nodes_model.js";
import { get } from "./store.js";

const PAGE = 12, FLOWS_MS = 3000;

export function network({ openNode }) {
  let text = "", page = 0, last = null, drawn = null, flows = new Map(), requestedAt = 0;
  const hosts = h("div", { className: "hosts" }), where = h("span", {}), note = h("span", { className: "note" });
  const filter = h("input", { type: "search", placeholder: "Filter by name or transport", ariaLabel: "Filter hosts", oninput: () => { text = filter.value.toLowerCase(); page = 0; draw(); } });
  const turn = (by) => () => { page += by; draw(); };
  const before = h("button", { type: "button", onclick: turn(-1) }, "Previous"), after = h("button", { type: "button", onclick: turn(1) }, "Next");
  const pages = h("nav", { className: "pages", ariaLabel: "Pages of hosts" }, where, before, after);
  const paths = h("tbody", {}), pathsBox = h("div", { className: "scroll", tabIndex: 0, role: "region", ariaLabel: "Measured paths" }, h("table", {}, h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "From"), h("th", { scope: "col" }, "To"), h("th", { scope: "col", className: "number" }, "Measured"))), paths));
  const noPaths = h("p", { className: "blank" }, "No large enough transfer between nodes lately.");
  const element = h("div", { className: "grid" },
    h("section", { className: "panel", ariaLabel: "Hosts" }, h("header", {}, h("h1", { className: "visually-hidden" }, "Network"), h("h2", {}, "Hosts and rails"), note, h("div", { className: "push" }, filter)),
      h("p", { className: "soft small" }, "Lines lead from memory to its preferred rails. Green edge: RDMA; amber: GPU; red: link down; grey: not a rail. At a NIC: traffic of all programs of its host, and utilisation."), hosts, pages),
    h("section", { className: "panel", ariaLabel: "Between nodes" }, h("header", {}, h("h2", {}, "Between nodes"), h("span", { className: "note" }, "measured while blocks were fetched, slowest first")), pathsBox, noPaths));

  async function load(shown) {
    const key = shown.map((node) => node.name).join();
    if (key === drawn) return;
    drawn = key;
    flows = new Map();
    if (!shown.length) { hosts.replaceChildren(h("p", { className: "blank" }, last.cluster.nodes.rows.length ? "No host matches." : "No node has joined yet.")); return; }
    try {
      const found = await get(`/api/hosts?${shown.map((node) => `node=${encodeURIComponent(node.name)}`).join("&")}`);
      if (key !== drawn) return;
      hosts.replaceChildren(...found.map((one) => {
        const flow = h("span", { className: "soft small" }), state = h("span", {});
        const article = h("article", { className: "host" }, h("h3", {}, h("button", { type: "button", onclick: () => openNode(one.node) }, one.node), state, flow), one.topology ? hostDrawing(one.topology) : h("p", { className: "soft" }, one.note));
        flows.set(one.node, { flow, state, article });
        return article;
      }));
      requestedAt = 0;
      flow();
    } catch (error) { drawn = null; hosts.replaceChildren(h("p", { className: "blank" }, error.message)); }
  }
  function flow() {
    for (const node of nodesOf(last.cluster)) {
      const shown = flows.get(node.name);
      if (!shown) continue;
      say(shown.flow, `out ${sizeRate(node.out_bytes_per_s)}, in ${sizeRate(node.in_bytes_per_s)}${node.transports.length ? `; by ${node.transports.join(", ")}` : ""}`);
      if (shown.state.textContent !== pill(node).textContent) shown.state.replaceChildren(pill(node));
    }
  }
  /** Requests the traffic of the hosts on this page, only while this view is shown. */
  async function loadFlows() {
    if (Date.now() - requestedAt < FLOWS_MS || !flows.size) return;
    requestedAt = Infinity;  // one request at a time
    try {
      const found = await get(`/api/flows?${[...flows.keys()].map((name) => `node=${encodeURIComponent(name)}`).join("&")}`);
      for (const one of found) if (flows.has(one.node)) showFlows(flows.get(one.node).article, one.links);
    } catch { /* the hosts stay; the banner on top reports connection errors */ } finally { requestedAt = Date.now(); }
  }
  function draw() {
    if (!last?.cluster) return;
    const found = nodesOf(last.cluster).filter((node) => `${node.name} ${node.transports.join(" ")} ${node.address}`.toLowerCase().includes(text));
    page = Math.max(0, Math.min(page, Math.ceil(found.length / PAGE) - 1));
    const shown = found.slice(page * PAGE, (page + 1) * PAGE);
    say(note, count(found.length));
    pages.hidden = found.length <= PAGE;
    say(where, `${page * PAGE + 1} to ${page * PAGE + shown.length} of ${count(found.length)}`);
    before.disabled = page === 0;
    after.disabled = (page + 1) * PAGE >= found.length;
    load(shown).then(loadFlows);
    flow();
    const slow = last.cluster.paths.slice(0, 50);
    noPaths.hidden = Boolean(slow.length);
    pathsBox.hidden = !slow.length;
    paths.replaceChildren(...slow.map((path) => h("tr", {}, h("td", {}, path.from), h("td", {}, path.to), h("td", { className: "number" }, sizeRate(path.bytes_per_s)))));
  }
  return { element, filter, update(store) { last = store; draw(); } };
}
