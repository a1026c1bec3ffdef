// Dialogs: list of keys, prompt for the token, confirmation of actions.
import { h, toast } from "./dom.js";
import { post, useToken } from "./store.js";

function open(className, label, ...children) {
  const dialog = h("dialog", { className, ariaLabel: label }, children);
  dialog.addEventListener("close", () => dialog.remove());
  dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
  document.body.append(dialog);
  dialog.showModal();
  return dialog;
}
const closer = (text = "Close") => h("button", { type: "button", onclick: (event) => event.target.closest("dialog").close() }, text);

const KEYS = [["1 – 5", "views, from left to right"], ["/", "filter the list"], ["t", "light, dark or system theme"], ["← ↑ → ↓", "move between nodes in the map"], ["Enter", "open the node"], ["Esc", "close"], ["?", "this list"]];
export function showKeys() {
  open("narrow", "Keys", h("div", {}, h("h2", {}, "Keys"), h("dl", { className: "facts" }, KEYS.flatMap(([key, text]) => [h("dt", {}, h("kbd", {}, key)), h("dd", {}, text)])), h("div", { className: "buttons" }, closer())));
}

/** Prompts for an operator's token; `why` is the reason why the last one was refused, or "". */
export function askToken(why) {
  if (document.querySelector("dialog[open]")) return;
  const field = h("input", { type: "password", autocomplete: "current-password", required: true, ariaLabel: "Token" });
  const form = h("form", { onsubmit: (event) => { event.preventDefault(); useToken(field.value.trim()); dialog.close(); } }, h("h2", {}, "This cluster needs a token"),
    why ? h("p", { className: "refused", role: "alert" }, why) : null,
    h("p", { className: "soft" }, "An operator's token: one of [admins] in the masters' tokens file, or the key at the end of the URL that kvstore console printed. It is kept in this tab only."), h("label", {}, "Token", field), h("div", { className: "buttons" }, h("button", { className: "primary" }, "Continue")));
  const dialog = open("narrow", "Token", form);
}

/** Asks for confirmation, posts the action and shows the result or the error. `word` must be typed for actions that cannot be undone.
    `fields`: name in the body -> control to fill in. */
export function act(name, body, { title, text, button, isDangerous = false, word = "", fields = {} }) {
  const field = word && h("input", { type: "text", autocomplete: "off", ariaLabel: `Type ${word}`, oninput: () => { go.disabled = field.value !== word; } });
  const go = h("button", { className: isDangerous ? "danger" : "primary", disabled: Boolean(word) }, button);
  const form = h("form", { onsubmit: async (event) => {
    event.preventDefault();
    go.disabled = true;
    try { toast((await post(`/api/actions/${name}`, { ...body, ...Object.fromEntries(Object.entries(fields).map(([field, control]) => [field, control.value])) })).text); } catch (error) { toast(error.message, true); }
    dialog.close();
  } }, h("h2", {}, title), h("p", {}, text), Object.values(fields).map((control) => h("label", {}, control.ariaLabel, control)), word && h("label", {}, `To confirm type ${word}`, field), h("div", { className: "buttons" }, closer("Cancel"), go));
  const dialog = open("narrow", title, form);
}
