// Node objects from the rows of the state, and the metrics to colour them by.
import { TIERS, count, countRate, duration, percent, share, size, sizeRate } from "./format.js";

export function nodesOf(cluster) {
  const { fields, rows } = cluster.nodes;
  const nodes = rows.map((row) => {
    const node = {};
    fields.forEach((field, index) => { node[field] = row[index]; });
    node.fills = fillsOf(Object.keys(TIERS).map((name) => ({ name, used_bytes: node[`${name}_used_bytes`], capacity_bytes: node[`${name}_capacity_bytes`] })));
    node.share = node.fills[0]?.share ?? null;
    node.next_s = node.next_victims.at(-1)?.[2] ?? null;  // of the slowest tier, whose victims leave the node
    node.standing = node.state !== "alive" ? node.state : node.health ? "failed" : node.drain || "alive";
    return node;
  });
  return nodes.sort((one, other) => byName(one.name, other.name));
}

/** [tier, reason, seconds unread, hits per second of a GiB] as text: what the tier would evict next, and why it is first. */
export function victimText([, reason, unread, worth]) {
  return [`unread for ${duration(unread)}`, reason, worth === null ? "" : `${Number(worth.toPrecision(2))} hits/s a GiB`].filter(Boolean).join(", ");
}

/** Tiers with a capacity, each with its `share`, fullest first: a large empty tier must not hide a small full one. */
export function fillsOf(tiers) {
  return tiers.filter((tier) => tier.capacity_bytes).map((tier) => ({ ...tier, share: share(tier.used_bytes, tier.capacity_bytes) })).sort((one, other) => other.share - one.share);
}
export const fillsText = (fills) => fills.map((tier) => `${TIERS[tier.name] || tier.name} ${tier.share >= 0.1 ? `${Math.round(100 * tier.share)} %` : percent(tier.share)}`).join(", ");

/** The node's process has ended: stopped or dead. */
export const isAway = (node) => node.state === "dead" || node.state === "stopped";

/** node-2 before node-10 */
export const byName = new Intl.Collator("en", { numeric: true }).compare;

export const STANDINGS = { alive: "alive", syncing: "syncing", dead: "dead", stopped: "stopped", draining: "draining", drained: "drained", failed: "a tier failed" };

/** Metrics for the colour of nodes: shares of 1, or values relative to the highest. */
export const METRICS = {
  share: { label: "Fullest tier", show: percent, isShare: true },
  hits_per_s: { label: "Blocks read", show: countRate },
  misses_per_s: { label: "Misses", show: countRate },
  out_bytes_per_s: { label: "Bytes out", show: sizeRate },
  in_bytes_per_s: { label: "Bytes in", show: sizeRate },
  evictions_per_s: { label: "Evictions", show: countRate },
};

export function summary(node, metric) {
  const { label, show } = METRICS[metric];
  return `${node.name}, ${STANDINGS[node.standing]}\n${label}: ${show(node[metric])}\n${count(node.blocks)} blocks, ${size(node.used_bytes)}\n${fillsText(node.fills)}`;
}
