// Heat map of nodes: one cell per node, coloured by one metric. A single tab stop: arrows move between cells, Enter opens a node.
import { h, tip } from "./dom.js";
import { METRICS, isAway, summary } from "./nodes_model.js";

export function heatMap(open) {
  const box = h("div", { className: "heat", tabIndex: 0, role: "listbox", ariaLabel: "Nodes" });
  let nodes = [], metric = "share", active = -1, cells = [];

  function mark(index, isShown = true) {
    cells[active]?.classList.remove("active");
    active = Math.max(0, Math.min(nodes.length - 1, index));
    const cell = cells[active];
    if (!cell) return;
    cell.classList.add("active");
    box.setAttribute("aria-activedescendant", cell.id);
    cell.scrollIntoView({ block: "nearest" });
    const place = cell.getBoundingClientRect();
    if (isShown) tip(summary(nodes[active], metric), place.left, place.bottom);
  }
  box.addEventListener("keydown", (event) => {
    const columns = getComputedStyle(box).gridTemplateColumns.split(" ").length;
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns, Home: -nodes.length, End: nodes.length }[event.key];
    if (step) { event.preventDefault(); mark(active + step); }
    else if ((event.key === "Enter" || event.key === " ") && nodes[active]) { event.preventDefault(); open(nodes[active].name); }
  });
  box.addEventListener("focus", () => { if (box.matches(":focus-visible")) mark(Math.max(active, 0)); });
  box.addEventListener("blur", () => { cells[active]?.classList.remove("active"); tip(""); });
  const at = (event) => cells.indexOf(event.target.closest(".cell"));
  box.addEventListener("pointermove", (event) => { const index = at(event); tip(index < 0 ? "" : summary(nodes[index], metric), event.clientX, event.clientY); });
  box.addEventListener("pointerleave", () => tip(""));
  box.addEventListener("click", (event) => { const index = at(event); if (index >= 0) open(nodes[index].name); });

  return {
    element: box,
    update(found, by) {
      nodes = found; metric = by;
      const isLarge = nodes.length <= 24;
      box.classList.toggle("large", isLarge);
      box.style.setProperty("--cell", isLarge ? "132px" : nodes.length <= 120 ? "32px" : nodes.length <= 400 ? "22px" : "16px");
      if (cells.length !== nodes.length) {
        cells = nodes.map((_node, index) => h("div", { className: "cell", id: `cell-${index}`, role: "option", ariaSelected: "false" }));
        box.replaceChildren(...cells);
      }
      const most = METRICS[metric].isShare ? 1 : Math.max(...nodes.map((node) => node[metric] || 0), 1e-9);
      nodes.forEach((node, index) => {
        const cell = cells[index];
        const heat = String(isAway(node) ? 0 : Math.min(9, Math.ceil(((node[metric] || 0) / most) * 9)));
        if (cell.dataset.heat !== heat) cell.dataset.heat = heat;
        if (cell.dataset.state !== node.standing) cell.dataset.state = node.standing;
        const label = `${node.name}: ${node.standing}, ${METRICS[metric].label} ${METRICS[metric].show(node[metric])}`;
        if (cell.ariaLabel !== label) cell.ariaLabel = label;
        const text = isLarge ? node.name : "";
        if (cell.textContent !== text) cell.replaceChildren(...(text ? [h("span", {}, text)] : []));
      });
    },
  };
}

/** Legend of the colours. */
export function heatScale() {
  const key = (standing, text) => h("span", { className: "key" }, h("span", { className: "cell", "data-state": standing }), text);
  const steps = h("span", { className: "steps" }, Array.from({ length: 10 }, (_one, index) => h("span", { className: "cell", "data-heat": index })));
  const most = h("span", {});
  return {
    element: h("div", { className: "scale" }, "0", steps, most, key("dead", "dead"), key("syncing", "syncing or failed"), key("draining", "drained")),
    update(nodes, metric) {
      const { isShare, show } = METRICS[metric];
      most.textContent = show(isShare ? 1 : Math.max(...nodes.map((node) => node[metric] || 0), 0));
    },
  };
}
