// Lines and stacked areas over time, in SVG by hand. A chart is drawn anew with each look: at most a point a pixel.
import { h, s, say, swatch, tip } from "./dom.js";
import { clock } from "./format.js";

const LEFT = 64, BOTTOM = 20, TOP = 6, RIGHT = 8;

/** As many values as there is room for: the mean of those that fall together, null where none is known. */
function thinned(values, room) {
  if (values.length <= room) return values;
  const found = [];
  for (let place = 0; place < room; place += 1) {
    const some = values.slice(Math.floor((place * values.length) / room), Math.floor(((place + 1) * values.length) / room)).filter((value) => value !== null);
    found.push(some.length ? some.reduce((sum, value) => sum + value, 0) / some.length : null);
  }
  return found;
}

function line(values, x, y) {
  let path = "", isUp = true;
  values.forEach((value, index) => {
    if (value === null) { isUp = true; return; }
    path += `${isUp ? "M" : "L"}${x(index).toFixed(1)} ${y(value).toFixed(1)}`;
    isUp = false;
  });
  return path;
}

function area(values, floor, x, y) {
  let path = "", begin = -1;
  const close = (end) => {
    if (begin < 0) return;
    for (let index = end; index >= begin; index -= 1) path += `L${x(index).toFixed(1)} ${y(floor[index]).toFixed(1)}`;
    path += "Z";
    begin = -1;
  };
  values.forEach((value, index) => {
    if (value === null) { close(index - 1); return; }
    path += `${begin < 0 ? "M" : "L"}${x(index).toFixed(1)} ${y(value).toFixed(1)}`;
    if (begin < 0) begin = index;
  });
  close(values.length - 1);
  return path;
}

/** Round steps up to `most`: 1, 2 or 5 of a power, of 1024 for sizes. */
function ticks(most, base) {
  const unit = base === 1024 ? 1024 ** Math.max(0, Math.floor(Math.log(Math.max(most, 1)) / Math.log(1024))) : 1;
  const raw = most / unit / 4;
  const power = 10 ** Math.floor(Math.log10(raw || 1));
  const step = unit * power * ([1, 2, 5, 10].find((factor) => factor * power >= raw) || 10);
  const found = [];
  for (let value = 0; value <= most * 1.001 + step * 0.999 && found.length < 7; value += step) found.push(value);
  return found;
}

/** A chart of `series` [{name, label, className}]. `show` formats a value, `most` fixes the axis, `isStacked` stacks areas. */
export function chart({ title, series, show, base = 1000, most = null, isStacked = false }) {
  const svg = s("svg", { role: "img", "aria-label": title });
  const legend = h("ul", { className: "legend" });
  const figures = series.map((one) => h("b", {}));
  series.forEach((one, index) => legend.append(h("li", {}, swatch(one.className), one.label, " ", figures[index])));
  const box = h("div", { className: "chart" }, svg);
  let last = null, pointer = null;

  function draw() {
    const { width, height } = box.getBoundingClientRect();
    if (!last || width < 40) return;
    const { values, interval, end, samples } = last;
    const room = Math.max(2, Math.floor(width - LEFT - RIGHT));
    const columns = series.map((one) => {
      const known = (values[one.name] || []).slice(-samples);
      return thinned([...Array(Math.max(0, samples - known.length)).fill(null), ...known], room);
    });
    const points = columns[0]?.length || 0;
    const floors = columns.map(() => Array(points).fill(0));
    const tops = columns.map((column) => column.slice());
    if (isStacked) {
      const sum = Array(points).fill(0);
      columns.forEach((column, index) => column.forEach((value, place) => {
        floors[index][place] = sum[place];
        sum[place] += value ?? 0;
        const isKnown = columns.some((other) => other[place] !== null);
        tops[index][place] = isKnown ? sum[place] : null;
      }));
    }
    const highest = most ?? Math.max(...tops.flat().filter((value) => value !== null), base === 1024 ? 1024 : 1);
    const rules = most ? [0, most / 4, most / 2, (3 * most) / 4, most] : ticks(highest, base);
    const upmost = rules.at(-1);
    const x = (index) => LEFT + (index * (width - LEFT - RIGHT)) / Math.max(1, points - 1);
    const y = (value) => height - BOTTOM - (value * (height - BOTTOM - TOP)) / upmost;
    const parts = rules.map((value) => s("g", {}, s("line", { class: "rule", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }),
      s("text", { x: LEFT - 8, y: y(value) + 4, "text-anchor": "end" }, show(value))));
    const span = samples * interval;
    const marks = width < 420 ? 2 : 4;
    for (let mark = 0; mark <= marks; mark += 1) {
      const at = LEFT + (mark * (width - LEFT - RIGHT)) / marks;
      parts.push(s("text", { x: at, y: height - 4, "text-anchor": mark === 0 ? "start" : mark === marks ? "end" : "middle" }, clock(end - span + (mark * span) / marks, span < 600)));
    }
    columns.forEach((column, index) => {
      const { className } = series[index];
      if (isStacked) parts.push(s("path", { class: `area ${className}`, d: area(tops[index], floors[index], x, y) }));
      else parts.push(s("path", { class: className, d: line(tops[index], x, y) }));
    });
    if (pointer !== null && points > 1) {
      const place = Math.max(0, Math.min(points - 1, Math.round(((pointer.x - LEFT) / (width - LEFT - RIGHT)) * (points - 1))));
      parts.push(s("line", { class: "cursor", x1: x(place), x2: x(place), y1: TOP, y2: height - BOTTOM }));
      const told = series.map((one, index) => `${one.label}: ${show(columns[index][place])}`);
      tip([clock(end - span + ((place + 1) * span) / points), ...told].join("\n"), pointer.clientX, pointer.clientY);
    }
    svg.replaceChildren(...parts);
    const latest = series.map((one) => (values[one.name] || []).at(-1) ?? null);
    latest.forEach((value, index) => say(figures[index], show(value)));
    svg.setAttribute("aria-label", `${title}; now ${series.map((one, index) => `${one.label} ${show(latest[index])}`).join(", ")}`);
  }
  box.addEventListener("pointermove", (event) => { pointer = { x: event.clientX - box.getBoundingClientRect().left, clientX: event.clientX, clientY: event.clientY }; draw(); });
  box.addEventListener("pointerleave", () => { pointer = null; tip(""); draw(); });
  new ResizeObserver(draw).observe(box);
  return {
    element: h("div", { className: "figure-box" }, box), legend,
    /** The newest `samples` of `values` (a list a name), `interval` seconds apart, the last of them at `end`. */
    update(values, interval, end, samples) { last = { values, interval, end, samples }; draw(); },
  };
}

/** A small line without axes. */
export function sparkline(className) {
  const svg = s("svg", { viewBox: "0 0 200 36", preserveAspectRatio: "none", "aria-hidden": "true" });
  return {
    element: svg,
    update(values) {
      const known = thinned(values, 200);
      const most = Math.max(...known.filter((value) => value !== null), 1e-9) * 1.1;
      const x = (index) => (index * 200) / Math.max(1, known.length - 1);
      const y = (value) => 35 - (value * 32) / most;
      svg.replaceChildren(s("path", { class: `area ${className}`, d: area(known, known.map(() => 0), x, y) }), s("path", { class: className, d: line(known, x, y) }));
    },
  };
}
