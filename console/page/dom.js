// Creates elements by function, never from HTML text, which the page's Content-Security-Policy forbids.
const SVG = "http://www.w3.org/2000/svg";

function fill(element, properties, children) {
  for (const [name, value] of Object.entries(properties || {})) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, text] of Object.entries(value)) element.style.setProperty(key, text);
    else if (name in element && !(element instanceof SVGElement) && name !== "list") element[name] = value;
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export const h = (tag, properties, ...children) => fill(document.createElement(tag), properties, children);
export const s = (tag, properties, ...children) => fill(document.createElementNS(SVG, tag), properties, children);

/** Sets the text of an element. Equal text is left alone, to keep a selection. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export const swatch = (name) => h("span", { className: `swatch ${name}`, ariaHidden: "true" });

/** A switch of a few choices, as pressed buttons. */
export function choice(label, options, chosen, change) {
  const buttons = options.map(([value, text]) =>
    h("button", { type: "button", ariaPressed: String(value === chosen), onclick: () => {
      for (const [index, button] of buttons.entries()) button.ariaPressed = String(options[index][0] === value);
      change(value);
    } }, text));
  return h("div", { className: "chosen", role: "group", ariaLabel: label }, buttons);
}

/** Shows `text` as a tooltip at a position; "" hides it. */
export function tip(text, x = 0, y = 0) {
  const box = document.getElementById("tip");
  box.hidden = !text;
  if (!text) return;
  say(box, text);
  const { width, height } = box.getBoundingClientRect();
  box.style.left = `${Math.max(8, Math.min(x + 14, innerWidth - width - 8))}px`;
  box.style.top = `${Math.max(8, y + 18 + height > innerHeight ? y - height - 12 : y + 18)}px`;
}

let hiding = 0;
export function toast(text, isError = false) {
  const box = document.getElementById("toast");
  clearTimeout(hiding);
  box.className = isError ? "toast error" : "toast";
  box.hidden = false;
  say(box, text);
  hiding = setTimeout(() => { box.hidden = true; }, isError ? 12000 : 6000);
}
