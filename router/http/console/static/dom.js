// Elements without markup in strings: what comes from requests and nodes is always text.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

export function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) set(element, name, value);
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

// Sets an attribute if it differs; null and false remove it. Functions are listeners.
export function set(element, name, value) {
  if (typeof value === "function") element.addEventListener(name, value);
  else if (value === null || value === undefined || value === false) element.removeAttribute(name);
  else if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value === true ? "" : value);
}

export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// Makes the children of `parent` one element for each item, in order. Elements stay as long as their item does, so that
// focus, selection and animations survive an update.
export function keyed(parent, items, keyOf, create, update) {
  const old = parent.keyedChildren ?? new Map();
  const current = new Map();
  let previous = null;
  for (const item of items) {
    const key = keyOf(item);
    const element = old.get(key) ?? create(item);
    old.delete(key);
    current.set(key, element);
    update(element, item);
    const next = previous ? previous.nextSibling : parent.firstChild;
    if (next !== element) parent.insertBefore(element, next);
    previous = element;
  }
  for (const element of old.values()) element.remove();
  parent.keyedChildren = current;
}
