// Elements from tag, properties and children. Text always arrives as text nodes: nothing here parses markup.

const $ = (id) => document.getElementById(id);

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== undefined && child !== null));
  return node;
}

const el = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes = {}, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

const decimals = (value, places) => (Number.isFinite(value) ? value.toFixed(places) : "–");
const rateText = (value) => decimals(value, value && value < 10 ? 1 : 0);
const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;

// For screen readers: a short sentence when something ended or was walked to.
function say(sentence) {
  $("say").textContent = sentence;
}
