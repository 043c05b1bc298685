// Small helpers. Text goes in as text: nothing from a model or a prompt is ever read as markup.

export const byId = (id) => document.getElementById(id);
export const count = (number) => Math.round(number).toLocaleString("en-US");
export const percent = (part, whole) => (whole ? `${((100 * part) / whole).toFixed(part === whole ? 0 : 1)} %` : "–");

export function element(name, { className, text, ...attributes } = {}, ...children) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

export function legend(list, entries) {
  list.replaceChildren(...entries.map(([swatch, text]) =>
    element("li", {}, element("span", { className: `swatch ${swatch}` }), text)));
}

// A 2D context whose unit is a CSS pixel, and the size in them; null while the canvas is not shown.
export function surface(canvas) {
  const width = canvas.clientWidth;
  const height = canvas.clientHeight;
  if (!width || !height) return null;
  const scale = window.devicePixelRatio || 1;
  const [wide, high] = [Math.round(width * scale), Math.round(height * scale)];
  if (canvas.width !== wide || canvas.height !== high) {
    canvas.width = wide;
    canvas.height = high;
  }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}

export function colours(...names) {
  const style = getComputedStyle(document.documentElement);
  return Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
}
