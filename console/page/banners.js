// Banners: problems of the cluster, since when, advice, and a link to the view with details. Colour follows the severity alone.
import { h, say } from "./dom.js";
import { clock, duration } from "./format.js";

const LINKS = { nodes: "Show the nodes", activity: "Show events", overview: "Show the masters" };
const ANCHORS = { overview: "catalog" };

function since(one, nowS) {
  const at = `${nowS - one.since_s > 86400 ? `${new Date(one.since_s * 1000).toLocaleDateString("en-GB")} ` : ""}${clock(one.since_s)}`;
  return `since ${at}${one.is_older ? " or before" : ""}, for ${duration(Math.max(0, nowS - one.since_s))}`;
}

/** A list of banners, set by `update`. Rows are rebuilt only if their text changes, to keep the focus and unfolded details. */
export function banners(label) {
  const list = h("ul", { className: "notes", ariaLabel: label });
  let shown = "", times = [], details = [];

  function row(one) {
    const time = h("span", { className: "since" }), raw = h("p", { className: "mono" }), [view] = (one.view || "").split("?");
    times.push(time);
    details.push(raw);
    const go = LINKS[view] && h("a", { href: `#${one.view}`, onclick: () => document.getElementById(ANCHORS[view])?.scrollIntoView() }, LINKS[view]);
    return h("li", { className: one.level }, h("div", { className: "what" }, h("span", { className: "visually-hidden" }, `${one.level}: `), h("strong", {}, one.text), " ", one.since_s ? time : null),
      one.todo || go ? h("div", { className: "todo" }, one.todo, one.todo && go ? " " : null, go || null) : null,
      one.detail ? h("details", {}, h("summary", {}, "Details"), raw) : null);
  }
  return {
    element: list,
    update(found, nowS) {
      const key = JSON.stringify(found.map(({ level, text, todo, view, detail, since_s: at }) => [level, text, todo, view, Boolean(detail), Boolean(at)]));
      if (key !== shown) {
        shown = key;
        times = [];
        details = [];
        list.replaceChildren(...found.map(row));
      }
      list.hidden = !found.length;
      found.forEach((one, index) => { if (one.since_s) say(times[index], since(one, nowS)); if (one.detail) say(details[index], one.detail); });
    },
  };
}

/** Time of day of the console's host; the browser's clock may differ. */
export const consoleTime = ({ state, receivedAt }) => (state ? state.time_s + (Date.now() - receivedAt) / 1000 : Date.now() / 1000);

/** The cluster's problems, worst first. A banner that the console cannot reach a master precedes them. */
export const problemsOf = ({ state, cluster }) => [...(state?.banner ? [state.banner] : []), ...(cluster?.problems || [])];
