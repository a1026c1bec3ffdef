// Icicle chart of a prefix tree: roots on top, continuations of a block below it, with widths by the bytes of the subtree. For the hottest
// prefixes only the shown blocks count: cold continuations would leave no space for them.
import { h, s, say, tip } from "./dom.js";
import { TIERS, count, countRate, size } from "./format.js";

const ROW = 26, MAX_DEPTH = 14;

function warmest(one) {
  const tiers = Object.keys(TIERS);
  const most = tiers.reduce((best, tier) => (one[`${tier}_bytes`] > (one[`${best}_bytes`] ?? 0) ? tier : best), "unknown");
  return most;
}

const label = (one) => `block ${one.key.slice(0, 32)}${one.key.length > 32 ? "…" : ""}\n${count(one.blocks)} blocks in a row, ${size(one.bytes)}\nwith all behind them ${size(one.subtree_bytes)}\n${Object.keys(TIERS).filter((tier) => one[`${tier}_bytes`]).map((tier) => `${TIERS[tier]} ${size(one[`${tier}_bytes`])}`).join(", ")}${one.subtree_reads_per_s ? `\nread ${count(one.reads_per_s)} blocks/s, with all behind them ${count(one.subtree_reads_per_s)} blocks/s` : ""}${one.branches ? `\n${count(one.branches)} branches` : ""}`;

export function icicle() {
  const svg = s("svg", { role: "img", "aria-label": "No prefixes" });
  const blank = h("p", { className: "blank" });
  const box = h("div", { className: "icicle", tabIndex: 0, role: "group", ariaLabel: "Tree of prefixes; arrows go from part to part" }, svg, blank);
  let segments = [], widths = [], isHot = false, places = [], active = -1, zoom = null;

  function lay() {
    const children = segments.map(() => []), roots = [];
    segments.forEach((one, index) => (one.parent === null ? roots : children[one.parent]).push(index));
    const top = zoom !== null && segments[zoom] ? [zoom] : roots;
    const whole = top.reduce((sum, index) => sum + widths[index], 0);
    places = [];
    const put = (index, x, depth) => {
      if (depth >= MAX_DEPTH) return;
      const width = widths[index] / whole;
      places.push({ index, x, width, depth });
      let at = x;
      for (const child of children[index]) { put(child, at, depth + 1); at += widths[child] / whole; }
    };
    let at = 0;
    for (const index of top) { put(index, at, 0); at += widths[index] / whole; }
  }
  function draw() {
    const { width } = box.getBoundingClientRect();
    svg.toggleAttribute("hidden", !segments.length);
    blank.hidden = Boolean(segments.length);
    if (!segments.length || width < 40) return;
    lay();
    const depth = Math.max(...places.map((place) => place.depth)) + 1;
    svg.setAttribute("viewBox", `0 0 ${width} ${depth * ROW}`);
    svg.setAttribute("height", depth * ROW);
    svg.setAttribute("aria-label", `${segments.length} parts of prompts, ${depth} deep; the largest: ${size(Math.max(...segments.map((one) => one.subtree_bytes)))}`);
    svg.replaceChildren(...places.filter((place) => place.width * width >= 1).map((place) => {
      const one = segments[place.index], pixels = place.width * width, tier = warmest(one);
      const text = pixels < 74 ? "" : isHot ? countRate(one.reads_per_s) : `${count(one.blocks)} × ${size(one.bytes / Math.max(1, one.blocks))}`;
      return s("g", { "data-index": place.index, class: place.index === active ? "active" : "" }, s("rect", { class: tier, x: place.x * width, y: place.depth * ROW, width: pixels, height: ROW - 2, rx: Math.min(3, pixels / 3) }),
        text && s("text", { class: tier === "dram" ? "" : "dark", x: place.x * width + 6, y: place.depth * ROW + 16 }, text));
    }));
  }
  const at = (event) => { const group = event.target.closest?.("g[data-index]"); return group ? Number(group.dataset.index) : -1; };
  box.addEventListener("pointermove", (event) => { const index = at(event); tip(index < 0 ? "" : label(segments[index]), event.clientX, event.clientY); });
  box.addEventListener("pointerleave", () => tip(""));
  box.addEventListener("click", (event) => { const index = at(event); if (index >= 0) { zoom = zoom === index ? segments[index].parent : index; draw(); } });
  box.addEventListener("keydown", (event) => {
    const place = places.findIndex((one) => one.index === active);
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (step && places.length) {
      event.preventDefault();
      active = places[Math.max(0, Math.min(places.length - 1, place + step))].index;
      draw();
      const shown = box.querySelector("g.active")?.getBoundingClientRect();
      if (shown) tip(label(segments[active]), shown.left, shown.bottom);
    } else if (event.key === "Enter" && active >= 0) { zoom = zoom === active ? segments[active].parent : active; draw(); }
    else if (event.key === "Escape" && zoom !== null) { zoom = null; draw(); }
  });
  box.addEventListener("blur", () => { active = -1; tip(""); draw(); });
  new ResizeObserver(draw).observe(box);
  return {
    element: box,
    /** `none` is shown if `found` is empty. */
    update(found, byReads = false, none = "") {
      if (byReads !== isHot) { zoom = null; active = -1; }
      segments = found; isHot = byReads;
      say(blank, none);
      widths = segments.map((one) => (isHot ? one.bytes : one.subtree_bytes));
      if (isHot) for (let index = segments.length - 1; index >= 0; index -= 1) if (segments[index].parent !== null) widths[segments[index].parent] += widths[index];
      if (zoom !== null && !segments[zoom]) zoom = null;
      draw();
    },
  };
}
