// Bars over time, newest at the right.

import { colours, surface } from "./dom.js";

// columns: [[value per layer], ...], oldest first. layers: colour names, from the bottom up. top: the value at
// the upper edge; null: the largest sum. Returns the value at the upper edge.
export function stackedBars(canvas, columns, layers, { top = null, slots = columns.length } = {}) {
  const drawing = surface(canvas);
  if (!drawing) return 0;
  const { context, width, height } = drawing;
  const palette = colours(...layers);
  const limit = top ?? Math.max(1, ...columns.map((column) => column.reduce((sum, value) => sum + value, 0)));
  const wide = width / slots;
  columns.forEach((column, index) => {
    const left = width - (columns.length - index) * wide;
    let bottom = height;
    column.forEach((value, layer) => {
      // What is there is seen, however little it is beside the rest.
      const high = value > 0 ? Math.max(2, (value * height) / limit) : 0;
      context.fillStyle = palette[layers[layer]];
      context.fillRect(left, bottom - high, Math.max(0.5, wide > 3 ? wide - 1 : wide), high);
      bottom -= high;
    });
  });
  return limit;
}
