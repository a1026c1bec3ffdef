// Number formats. null is unknown, shown as a dash.
const NONE = "–";
const SIZES = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

function digits(value) {
  return value >= 100 || Number.isInteger(value) ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(2);
}

/** [figure, unit] */
export function sizeParts(bytes) {
  if (bytes === null || bytes === undefined) return [NONE, ""];
  let value = bytes, unit = 0;
  while (Math.abs(value) >= 1023.5 && unit < SIZES.length - 1) { value /= 1024; unit += 1; }
  return [unit === 0 ? value.toFixed(0) : digits(value), SIZES[unit]];
}
export const size = (bytes) => sizeParts(bytes).join(" ").trim();
export const sizeRate = (bytes) => (bytes === null || bytes === undefined ? NONE : `${size(bytes)}/s`);

/** [figure, unit]: 12,345 as it is, 1.23 M */
export function countParts(value) {
  if (value === null || value === undefined) return [NONE, ""];
  if (value >= 1e9) return [digits(value / 1e9), "G"];
  if (value >= 1e6) return [digits(value / 1e6), "M"];
  if (value >= 1e4) return [digits(value / 1e3), "k"];
  if (value >= 1000) return [Math.round(value).toLocaleString("en"), ""];
  return [Number.isInteger(value) ? String(value) : digits(value), ""];
}
export const count = (value) => countParts(value).join(" ").trim();
export const countRate = (value) => (value === null || value === undefined ? NONE : `${count(value)}/s`);
export const percent = (share) => (share === null || share === undefined || Number.isNaN(share) ? NONE : `${(100 * share).toFixed(1)} %`);
export const share = (part, whole) => (whole ? part / whole : null);

export function duration(seconds) {
  const whole = Math.floor(seconds);
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min`;
  if (whole < 86400) return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
  return `${Math.floor(whole / 86400)} d ${Math.floor((whole % 86400) / 3600)} h`;
}

/** 85 us, 1.2 ms, 3.4 s */
export function latency(seconds) {
  if (seconds === null || seconds === undefined) return NONE;
  if (seconds >= 1) return `${digits(seconds)} s`;
  return seconds >= 0.001 ? `${digits(1000 * seconds)} ms` : `${Math.round(1e6 * seconds)} µs`;
}

export const clock = (seconds, withSeconds = true) => new Date(seconds * 1000).toLocaleTimeString("en-GB", withSeconds ? {} : { hour: "2-digit", minute: "2-digit" });
export const TIERS = { hbm: "HBM", dram: "DRAM", nvme: "NVMe" };
