// Puts the page together: views by the address, the theme, keys, and what is wrong with the connection.
import { activity } from "./activity.js";
import { contents } from "./contents.js";
import { askToken, showKeys } from "./dialogs.js";
import { h, say, tip } from "./dom.js";
import { duration } from "./format.js";
import { network } from "./network.js";
import { closeNode, openNode, updateNode } from "./node.js";
import { nodes } from "./nodes.js";
import { overview } from "./overview.js";
import { follow, store, subscribe } from "./store.js";

const MAKERS = { overview, nodes, network, contents, activity };
const VIEWS = Object.keys(MAKERS);
const made = {};
const main = document.getElementById("main");
const live = document.getElementById("live");
const lost = h("ul", { className: "notes" });
let view = "";

function show() {
  const name = location.hash.slice(1).split("?")[0];
  const wanted = VIEWS.includes(name) ? name : view || "overview"; // #main is the link that skips to the content of this view
  for (const link of document.querySelectorAll(".views a")) {
    if (link.dataset.view === wanted) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  tip("");
  if (wanted === view || !store.cluster) return;
  closeNode();
  const isFirst = !view;
  view = wanted;
  made[view] ??= MAKERS[view]({ openNode });
  document.title = view === "overview" ? "kvstore" : `kvstore: ${view}`;
  main.replaceChildren(lost, made[view].element);
  if (!isFirst) update();
  made[view].update(store);
  made[view].shown?.();
  if (!isFirst) { main.focus({ preventScroll: true }); scrollTo(0, 0); }
}

/** What views other than the overview, which tells all, are told of: that nothing can be seen or changed here, or that something broke. */
function worst() {
  if (view === "overview" || !store.cluster) return ["", ""];
  if (store.state.failure) return ["error", `The cluster does not answer: ${store.state.failure}`];
  const found = store.cluster.troubles.find((one) => one.level === "error");
  return found ? [found.level, found.text] : ["", ""];
}

const LIVE = { live: "Live", connecting: "Connecting", lost: "No connection" };
function update() {
  if (store.cluster) show();
  live.dataset.live = store.live;
  say(live.querySelector(".text"), LIVE[store.live]);
  document.body.classList.toggle("stale", store.live === "lost");
  const isAway = store.live === "lost" && !store.state?.failure;
  const age = store.heard ? `; what is shown is ${duration((Date.now() - store.heard) / 1000)} old` : "";
  const [level, text] = isAway ? ["error", `${store.why || "The console does not answer"}${age}. Trying again…`] : worst();
  if (lost.dataset.shown !== text) {
    lost.dataset.shown = text;
    lost.replaceChildren(...(text ? [h("li", { className: level }, text)] : []));
    lost.hidden = !text;
  }
  if (store.needsToken) askToken();
  const loading = document.getElementById("loading");
  if (loading) say(loading, store.needsToken ? "This cluster wants a token." : store.state?.failure || text || "Asking the cluster…");
  if (!store.cluster) return;
  made[view]?.update(store);
  updateNode(store);
  const { master } = store.cluster;
  say(document.getElementById("about"), `${master.name || "kvstore"}, version ${master.version}. ${store.access === "admin" ? "You may change things here." : "You may look."}`);
}

const THEMES = { system: "◐ Auto", light: "○ Light", dark: "● Dark" };
const dark = matchMedia("(prefers-color-scheme: dark)");
function theme(chosen) {
  const wanted = THEMES[chosen] ? chosen : "system";
  localStorage.setItem("theme", wanted);
  document.documentElement.dataset.theme = wanted === "system" ? (dark.matches ? "dark" : "light") : wanted;
  const button = document.getElementById("theme");
  say(button, THEMES[wanted]);
  button.ariaLabel = `Theme: ${wanted}`;
}
const nextTheme = () => { const names = Object.keys(THEMES); theme(names[(names.indexOf(localStorage.getItem("theme")) + 1) % names.length]); };
theme(localStorage.getItem("theme"));
dark.addEventListener("change", () => theme(localStorage.getItem("theme")));
document.getElementById("theme").addEventListener("click", nextTheme);
document.getElementById("help").addEventListener("click", showKeys);

/** At once, not when the browser tells of the new hash: the next key may be on its way, and is for the new view. */
function go(name) { location.hash = name; show(); }
addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest?.("input, select, textarea") || document.querySelector("dialog[open]")) return;
  if (event.key >= "1" && event.key <= String(VIEWS.length)) go(VIEWS[event.key - 1]);
  else if (event.key === "t") nextTheme();
  else if (event.key === "?") showKeys();
  else if (event.key === "/" && made[view]?.filter) { event.preventDefault(); made[view].filter.focus(); }
});
addEventListener("hashchange", show);
subscribe(update);
setInterval(() => { if (store.live === "lost") update(); }, 1000);
update();
follow();
