// Entry point of the page: views by the URL's hash, theme, keys, and the state of the connection.
import { activity } from "./activity.js";
import { banners, consoleTime, problemsOf } from "./banners.js";
import { contents } from "./contents.js";
import { askToken, showKeys } from "./dialogs.js";
import { say, tip } from "./dom.js";
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
const lost = banners("Problems");
let view = "", last;

function show() {
  const [name, query] = location.hash.slice(1).split("?");
  const target = VIEWS.includes(name) ? name : view || "overview"; // #main is the skip link to the content of this view
  for (const link of document.querySelectorAll(".views a")) {
    if (link.dataset.view === target) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  tip("");
  if (!store.cluster) return;
  if (target === view) { if (query && query !== last) made[view].shown?.(query); last = query; return; }
  last = query;
  closeNode();
  const isFirst = !view;
  view = target;
  made[view] ??= MAKERS[view]({ openNode });
  document.title = view === "overview" ? "kvstore" : `kvstore: ${view}`;
  main.replaceChildren(lost.element, made[view].element);
  if (!isFirst) update();
  made[view].update(store);
  made[view].shown?.(query);
  if (!isFirst) { main.focus({ preventScroll: true }); scrollTo(0, 0); }
}

const isAway = () => store.live === "lost" && !store.state?.failure;

/** The banner above a view: that the console is unreachable; else the worst problem, except in the overview, which has them all. */
function worst() {
  if (isAway() && !store.needsToken) {
    return [{ level: "error", text: store.why || "The console does not answer", since_s: store.lostAt / 1000, todo: "Check that the master runs and that this host can reach it. The page keeps trying; the figures are old." }];
  }
  return view === "overview" || !store.cluster ? [] : problemsOf(store).filter((one) => one.level === "error").slice(0, 1);
}

const LIVE = { live: "Live", connecting: "Connecting", lost: "No connection", locked: "Needs a token" };
function update() {
  if (store.cluster) show();
  live.dataset.live = store.needsToken ? "locked" : store.live;
  say(live.querySelector(".text"), LIVE[live.dataset.live]);
  document.body.classList.toggle("stale", store.live === "lost");
  const above = worst();
  lost.update(above, isAway() ? Date.now() / 1000 : consoleTime(store));
  if (store.needsToken) askToken(store.why);
  const loading = document.getElementById("loading");
  if (loading) say(loading, store.needsToken ? "This cluster needs an operator's token." : store.state?.failure || above[0]?.text || "Connecting to the cluster…");
  if (!store.cluster) return;
  made[view]?.update(store);
  updateNode(store);
  const { master } = store.cluster;
  say(document.getElementById("about"), `${master.name || "kvstore"}, version ${master.version}. ${store.access === "admin" ? "Administrator access." : "Read-only access."}`);
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

/** Shows the view at once, not at the hashchange event: the next key may arrive before that, and is for the new view. */
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
