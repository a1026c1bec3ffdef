// Nodes as objects, of the rows that the state has, and what they can be looked at by.
import { count, countRate, percent, share, size, sizeRate } from "./format.js";

export function nodesOf(cluster) {
  const { fields, rows } = cluster.nodes;
  const nodes = rows.map((row) => {
    const node = {};
    fields.forEach((field, index) => { node[field] = row[index]; });
    node.share = share(node.used_bytes, node.capacity_bytes);
    node.standing = node.state !== "alive" ? node.state : node.health ? "failed" : node.drain || "alive";
    return node;
  });
  return nodes.sort((one, other) => byName(one.name, other.name));
}

/** node-2 before node-10 */
export const byName = new Intl.Collator("en", { numeric: true }).compare;

export const STANDINGS = { alive: "alive", syncing: "telling what it has", dead: "dead", draining: "draining", drained: "drained", failed: "a tier failed" };

/** By what nodes are coloured: a share of all there is, or of the highest. */
export const METRICS = {
  share: { label: "Occupancy", show: percent, isShare: true },
  hits_per_s: { label: "Blocks read", show: countRate },
  misses_per_s: { label: "Misses", show: countRate },
  out_bytes_per_s: { label: "Bytes out", show: sizeRate },
  in_bytes_per_s: { label: "Bytes in", show: sizeRate },
  evictions_per_s: { label: "Evictions", show: countRate },
};

export function summary(node, metric) {
  const { label, show } = METRICS[metric];
  return `${node.name}, ${STANDINGS[node.standing]}\n${label}: ${show(node[metric])}\n${count(node.blocks)} blocks, ${size(node.used_bytes)} of ${size(node.capacity_bytes)}`;
}
