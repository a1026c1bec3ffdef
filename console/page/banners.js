// Banners: what is wrong, since when, what to do, and where the page shows it. Colour follows the severity alone.
import { h, say } from "./dom.js";
import { clock, duration } from "./format.js";

const LINKS = { nodes: "Show the nodes", activity: "Show what happened", overview: "Show the masters" };
const ANCHORS = { overview: "catalog" };

function since(one, nowS) {
  const at = `${nowS - one.since_s > 86400 ? `${new Date(one.since_s * 1000).toLocaleDateString("en-GB")} ` : ""}${clock(one.since_s)}`;
  return `since ${at}${one.is_older ? " or before" : ""}, for ${duration(Math.max(0, nowS - one.since_s))}`;
}

/** A list of banners, those of `update`. Rows are made anew only when what they say changes: what is focused or unfolded stays so. */
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
      one.detail ? h("details", {}, h("summary", {}, "What was reported"), raw) : null);
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

/** What is wrong with the cluster, the worst first; of a console that no master answers that alone comes first. */
/** The time of day where the console runs, which a browser's clock need not have. */
export const consoleTime = ({ state, heard }) => (state ? state.time_s + (Date.now() - heard) / 1000 : Date.now() / 1000);

export const troublesOf = ({ state, cluster }) => [...(state?.banner ? [state.banner] : []), ...(cluster?.troubles || [])];
