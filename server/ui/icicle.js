// Where each node of the tree lies in the picture: x in tokens, y and height in pixels. Draws nothing.

export const MIN_ROW = 4; // pixels; rows below that are drawn together

// roots: as in /debug/cache. Returns {boxes, tokens}: boxes in the order of a walk from the roots, each
// {node, parent, children, start, end, y, height, live, more}; `more` counts the nodes that a box stands for
// beside its own (0 for a plain one). live: [from, to] ranges of positions whose sliding windows are kept.
export function layOut(roots, height) {
  const boxes = [];
  const measured = new Map();
  for (const root of roots) measure(root, 0, measured);
  const shown = roots.filter((root) => root.children.length || root.left_out);
  const whole = shown.reduce((sum, root) => sum + measured.get(root).leaves, 0);
  let y = 0;
  for (const root of shown) {
    const share = (height * measured.get(root).leaves) / whole;
    place(root, null, y, share, measured, boxes);
    y += share;
  }
  keepLiveRanges(boxes);
  return { boxes, tokens: Math.max(1, ...boxes.map((box) => box.end)) };
}

function measure(node, start, measured) {
  const end = start + node.tokens;
  const here = { start, end, leaves: node.left_out, deepest: end, nodes: 1 + node.left_out };
  for (const child of node.children) {
    const below = measure(child, end, measured);
    here.leaves += below.leaves;
    here.nodes += below.nodes;
    here.deepest = Math.max(here.deepest, below.deepest);
  }
  here.leaves = Math.max(1, here.leaves);
  measured.set(node, here);
  return here;
}

function place(node, parent, y, height, measured, boxes) {
  const { start, end, leaves } = measured.get(node);
  const box = { node, parent, children: [], start, end, y, height, live: [], more: 0 };
  boxes.push(box);
  parent?.children.push(box);
  let top = y;
  let small = [];
  const flush = () => {
    if (!small.length) return;
    placeTogether(small, box, top, measured, boxes);
    top += small.reduce((sum, each) => sum + each.height, 0);
    small = [];
  };
  for (const child of node.children) {
    const share = (height * measured.get(child).leaves) / leaves;
    if (share < MIN_ROW) {
      small.push({ node: child, height: share });
      continue;
    }
    flush();
    place(child, box, top, share, measured, boxes);
    top += share;
  }
  if (node.left_out) small.push({ node: null, height: (height * node.left_out) / leaves, left: node.left_out });
  flush();
}

// One box for neighbours that are too low to be seen: as long as the longest of them.
function placeTogether(small, parent, y, measured, boxes) {
  const known = small.filter((each) => each.node);
  const sum = (field) => known.reduce((total, each) => total + each.node[field], 0);
  const more = small.reduce((total, each) => total + (each.node ? measured.get(each.node).nodes : each.left), 0);
  const box = {
    node: { tokens: sum("tokens"), full: sum("full"), swa: sum("swa"), locked: sum("locked"), hits: sum("hits"),
      windows: [], children: [], left_out: 0 },
    parent, children: [], live: [], more, y,
    start: parent.end,
    end: Math.max(parent.end, ...known.map((each) => measured.get(each.node).deepest)),
    height: small.reduce((total, each) => total + each.height, 0),
  };
  parent.children.push(box);
  boxes.push(box);
}

// A window may reach over the node it ends in into those before: give each box its part.
function keepLiveRanges(boxes) {
  for (const box of boxes) {
    for (const window of box.node.windows) {
      const from = window.end - window.tokens;
      for (let at = box; at && at.end > from; at = at.parent) {
        const range = [Math.max(from, at.start), Math.min(window.end, at.end)];
        if (range[1] > range[0]) at.live.push(range);
      }
    }
  }
}

// The box at a point (x in tokens, y in pixels), or null.
export function boxAt(boxes, x, y) {
  return boxes.find((box) => x >= box.start && x < box.end && y >= box.y && y < box.y + box.height) ?? null;
}
