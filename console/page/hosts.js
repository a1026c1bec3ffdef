// Drawing of a node's host: in each NUMA node memory and GPUs on the left, NICs on the right, lines to the preferred rails. `showFlows` adds
// the traffic of the NICs.
import { h, s, say } from "./dom.js";
import { percent, sizeRate } from "./format.js";

const RDMA = ["infiniband", "roce"];
const speed = (nic) => (nic.speed_gbit_s ? `${nic.speed_gbit_s} Gbit/s` : "speed unknown");

/** Show the traffic of `links` (NIC name -> rates, from /api/flows) in the drawing within `box`. */
export function showFlows(box, links) {
  for (const place of box.querySelectorAll("[data-nic]")) {
    const link = links[place.dataset.nic], full = Number(place.dataset.speed) * 1.25e8;
    const most = link && full ? Math.max(link.in_bytes_per_s, link.out_bytes_per_s) / full : 0;
    say(place.querySelector("span"), link ? `in ${sizeRate(link.in_bytes_per_s)}, out ${sizeRate(link.out_bytes_per_s)}` : "");
    place.title = link ? `${place.dataset.nic}: in ${sizeRate(link.in_bytes_per_s)}, out ${sizeRate(link.out_bytes_per_s)}, of all programs${full ? `; ${percent(most)} of its speed in one direction` : ""}; transfers of the node ${sizeRate(link.transfer_bytes_per_s)}` : "";
    place.querySelector("i").style.width = `${100 * Math.min(1, most)}%`;
    place.hidden = !link;
  }
}

export function hostDrawing(topology) {
  const numbers = topology.numa_nodes.map((node) => node.number);
  const boxes = numbers.map((number) => numaBox(topology, `NUMA node ${number}`, number, (one) => one.numa_node === number));
  const isElsewhere = (one) => !numbers.includes(one.numa_node);
  if ([...topology.nics, ...topology.gpus].some(isElsewhere)) boxes.push(numaBox(topology, "On no NUMA node", null, isElsewhere));
  return boxes;
}

function numaBox(topology, title, number, isHere) {
  const memory = new Map(), cards = new Map();
  if (number !== null) memory.set(`cpu:${number}`, h("li", {}, h("b", {}, `cpu:${number}`), h("span", {}, "processor, memory")));
  for (const gpu of topology.gpus.filter(isHere)) memory.set(`cuda:${gpu.index}`, h("li", { className: "gpu" }, h("b", {}, `cuda:${gpu.index}`), h("span", { title: gpu.name }, gpu.name || "GPU")));
  const rails = new Set(Object.values(topology.matrix).flat(2));
  for (const nic of topology.nics.filter(isHere)) {
    const isRail = rails.has(nic.name) || !nic.is_up; // one that is down is in no list, and may be a rail
    cards.set(nic.name, h("li", { className: `${!nic.is_up ? "down" : RDMA.includes(nic.kind) ? "rdma" : ""}${isRail ? "" : " norail"}`, title: isRail ? "" : "No transfer uses it" }, h("b", { title: nic.interface }, nic.name),
      h("span", { className: "state" }, `${nic.is_up ? speed(nic) : "down"}${isRail ? "" : ", no rail"}`), h("span", { title: nic.addresses.join(", ") }, [nic.kind, ...nic.addresses].join(", ")),
      h("div", { className: "carried", "data-nic": nic.name, "data-speed": String(nic.speed_gbit_s), hidden: true }, h("span", {}), h("div", { className: "bar", ariaHidden: "true" }, h("i", { className: "in" })))));
  }
  const lines = s("svg", { "aria-hidden": "true" });
  const box = h("div", { className: "numa" }, h("h4", {}, title), lines, h("ul", {}, [...memory.values()]), h("ul", {}, cards.size ? [...cards.values()] : h("li", {}, h("span", {}, "no NIC"))));
  new ResizeObserver(() => {
    const ground = box.getBoundingClientRect();
    lines.replaceChildren(...[...memory].flatMap(([location, from]) => (topology.matrix[location]?.[0] || []).filter((name) => cards.has(name)).map((name) => {
      const left = from.getBoundingClientRect(), right = cards.get(name).getBoundingClientRect();
      const x1 = left.right - ground.left, x2 = right.left - ground.left, y1 = left.top + left.height / 2 - ground.top, y2 = right.top + right.height / 2 - ground.top;
      return s("path", { class: location.startsWith("cuda") ? "gpu" : "", d: `M${x1} ${y1}C${(x1 + x2) / 2} ${y1} ${(x1 + x2) / 2} ${y2} ${x2} ${y2}` });
    })));
  }).observe(box);
  return box;
}
