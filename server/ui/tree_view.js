// Draws the prefix tree, and says in words what the pointer or the arrow keys are on.

import { byId, colours, count, element, legend, surface } from "./dom.js";
import { boxAt, layOut } from "./icicle.js";

const CLASSES = {
  system_anchor: ["anchor", "anchor (end of a system prompt)"],
  message_anchor: ["anchor", "anchor (end of a message)"],
  branch: ["branch", "branch point (requests parted here)"],
  prompt_tail: ["tail", "end of a prompt"],
  finish_tail: ["tail", "end of an answer"],
};
const LEGEND = [
  ["live", "full and sliding-window KV: can be resumed or read on"],
  ["scrap", "both, but kept by nobody"],
  ["full", "full KV only (tombstone): windows here would be rebuilt"],
  ["locked", "a running request needs it"],
  ["marker anchor", "anchor"], ["marker branch", "branch point"], ["marker tail", "end of a prompt or answer"],
];

const PLAIN_LEGEND = [["live", "KV is there"], ["locked", "a running request needs it"]];

export class TreeView {
  // hasWindows: whether the model has sliding-window layers at all.
  constructor(hasWindows) {
    this.hasWindows = hasWindows;
    this.canvas = byId("tree");
    this.view = null;
    this.layout = { boxes: [], tokens: 1 };
    this.selected = null;
    this.zoomed = null; // [from, to] in tokens
    legend(byId("legend"), hasWindows ? LEGEND : PLAIN_LEGEND);
    this.canvas.addEventListener("pointermove", (event) => this.select(this.boxOf(event)));
    this.canvas.addEventListener("click", (event) => this.zoomTo(this.boxOf(event)));
    this.canvas.addEventListener("keydown", (event) => this.onKey(event));
    byId("zoom-out").addEventListener("click", () => this.zoomTo(null));
    new ResizeObserver(() => this.draw()).observe(this.canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  show(view) {
    this.view = view;
    this.draw();
    this.list();
    const { nodes, omitted } = view;
    const left = omitted.nodes ? `, ${count(omitted.nodes)} more not shown` : "";
    byId("tree-size").textContent = nodes ? `${count(nodes)} nodes${left}` : "Nothing is cached yet: ask something.";
  }

  draw() {
    const drawing = surface(this.canvas);
    if (!drawing || !this.view) return;
    const { context, width, height } = drawing;
    const path = this.selected && pathOf(this.selected);
    this.layout = layOut(this.view.tree, height - 18);
    this.selected = path && follow(this.layout.boxes, path);
    const [from, to] = this.zoomed ?? [0, this.layout.tokens];
    const x = (tokens) => ((tokens - from) * width) / (to - from);
    this.colours = colours("full", "live", "scrap", "locked", "anchor", "branch", "tail", "line", "muted", "text", "accent", "raised");
    for (const box of this.layout.boxes) if (box.end > box.start) this.drawBox(context, box, x);
    // Markers last: a box would hide those at its beginning.
    for (const box of this.layout.boxes) this.drawMarkers(context, box, x);
    if (this.selected) {
      context.strokeStyle = this.colours.accent;
      context.lineWidth = 3;
      context.strokeRect(x(this.selected.start), this.selected.y, x(this.selected.end) - x(this.selected.start), this.selected.height);
    }
    this.drawScale(context, from, to, width, height);
  }

  drawBox(context, box, x) {
    const { node, start, end, y, height } = box;
    const left = x(start);
    const wide = Math.max(1, x(end) - left);
    const inner = Math.max(1, height - 1);
    context.fillStyle = this.colours.full;
    context.fillRect(left, y, wide, inner);
    const ranges = this.hasWindows ? merged(box.live) : [[start, end]];
    const kept = ranges.reduce((sum, [from, to]) => sum + to - from, 0);
    // What is live beside the kept windows lies somewhere in the node; running requests have it at the end.
    const scrap = Math.min(end - start, Math.max(0, node.swa - kept));
    if (scrap) {
      context.fillStyle = this.colours.scrap;
      context.fillRect(x(end - scrap), y, x(end) - x(end - scrap), inner);
    }
    context.fillStyle = this.colours.live;
    for (const [from, to] of ranges) context.fillRect(x(from), y, Math.max(1, x(to) - x(from)), inner);
    context.lineWidth = node.locked ? 2 : 1;
    context.strokeStyle = node.locked ? this.colours.locked : this.colours.raised;
    context.strokeRect(left + 0.5, y + 0.5, wide - 1, inner - 1);
    if (height >= 14 && wide > 60) {
      const label = box.more ? `${count(box.more)} nodes` : count(node.tokens);
      const place = left + 6;
      context.font = "11px system-ui, sans-serif";
      const size = context.measureText(label).width;
      context.fillStyle = this.colours.raised;
      context.fillRect(place - 2, y + height / 2 - 7, size + 4, 13);
      context.fillStyle = this.colours.text;
      context.fillText(label, place, y + height / 2 + 3.5);
    }
  }

  drawMarkers(context, { node, y, height }, x) {
    for (const window of node.windows) {
      context.fillStyle = this.colours[CLASSES[window.window_class]?.[0] ?? "tail"];
      context.fillRect(x(window.end) - 3, y, 3, Math.max(2, height - 1));
    }
  }

  drawScale(context, from, to, width, height) {
    const step = 10 ** Math.floor(Math.log10((to - from) / 2 || 1));
    context.fillStyle = this.colours.muted;
    context.font = "11px system-ui, sans-serif";
    const every = (to - from) / step > 8 ? step * 2 : step;
    for (let at = Math.ceil(from / every) * every; at < to; at += every) {
      const place = ((at - from) * width) / (to - from);
      context.fillRect(place, height - 16, 1, 4);
      context.fillText(count(at), place + 3, height - 4);
    }
  }

  boxOf(event) {
    const area = this.canvas.getBoundingClientRect();
    const [from, to] = this.zoomed ?? [0, this.layout.tokens];
    const tokens = from + ((event.clientX - area.left) * (to - from)) / area.width;
    return boxAt(this.layout.boxes, tokens, event.clientY - area.top);
  }

  select(box) {
    if (box === this.selected) return;
    this.selected = box;
    byId("tree-detail").textContent = box ? this.describe(box) : "";
    this.draw();
  }

  zoomTo(box) {
    this.zoomed = box ? [box.start, Math.max(box.end, ...deepest(box))] : null;
    byId("zoom-out").disabled = !this.zoomed;
    this.draw();
  }

  onKey(event) {
    const box = this.selected;
    const boxes = this.layout.boxes.filter((each) => each.end > each.start);
    const next = {
      ArrowRight: () => (box ? box.children[0] : boxes[0]),
      ArrowLeft: () => box?.parent?.parent && box.parent,
      ArrowDown: () => neighbour(boxes, box, 1),
      ArrowUp: () => neighbour(boxes, box, -1),
      Enter: () => (this.zoomTo(box), box),
      Escape: () => (this.zoomTo(null), null),
    }[event.key];
    if (!next) return;
    event.preventDefault();
    const found = next();
    if (found !== undefined && found !== false) this.select(found ?? null);
  }

  list() {
    const entries = [];
    for (const box of this.layout.boxes) {
      if (box.node.hits && !box.more && box.end > box.start) entries.push(box);
    }
    entries.sort((one, other) => other.node.hits - one.node.hits);
    byId("tree-list").replaceChildren(...entries.slice(0, 30).map((box) => element("li", { text: this.describe(box) })));
  }

  describe(box) {
    const { node, start, end, more } = box;
    if (more) return `${count(more)} small nodes together, ${count(node.tokens)} tokens or more; ${count(node.hits)} times reused.`;
    const told = [`Positions ${count(start)} to ${count(end)}: ${count(node.tokens)} tokens, reused ${count(node.hits)} times.`];
    if (this.hasWindows) told.push(...describeWindows(node));
    if (node.locked) told.push("A running request needs it.");
    if (box.children.length > 1) told.push(`${count(box.children.length)} ways go on from its end.`);
    return told.join(" ");
  }
}

function describeWindows(node) {
  const told = [];
  if (node.swa === node.tokens) told.push("Full and sliding-window KV are all there.");
  else if (node.swa) told.push(`Full KV is there; sliding-window KV of ${count(node.swa)} tokens.`);
  else told.push("Full KV is there, the sliding windows are gone (tombstone): a request that parts here has its window rebuilt.");
  for (const window of node.windows) {
    told.push(`Window kept at ${count(window.end)}: ${CLASSES[window.window_class]?.[1] ?? window.window_class}, used ${count(window.hits)} times.`);
  }
  return told;
}

function merged(ranges) {
  const result = [];
  for (const [from, to] of [...ranges].sort((one, other) => one[0] - other[0])) {
    const last = result.at(-1);
    if (last && from <= last[1]) last[1] = Math.max(last[1], to);
    else result.push([from, to]);
  }
  return result;
}

// The way from the root to a box, as places among siblings: it outlives a new layout.
function pathOf(box) {
  const path = [];
  for (let at = box; at.parent; at = at.parent) path.unshift(at.parent.children.indexOf(at));
  return path;
}

function follow(boxes, path) {
  let at = boxes.find((box) => !box.parent);
  for (const index of path) at = at?.children[index];
  return at ?? null;
}

function neighbour(boxes, box, step) {
  if (!box) return boxes[0];
  const siblings = box.parent ? box.parent.children : boxes.filter((each) => !each.parent);
  return siblings[siblings.indexOf(box) + step] ?? false;
}

function* deepest(box) {
  yield box.end;
  for (const child of box.children) yield* deepest(child);
}
