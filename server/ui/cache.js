// The cache's view: figures, the tree, the pools over time.

import { getJson } from "./api.js";
import { stackedBars } from "./charts.js";
import { byId, count, element, legend, percent } from "./dom.js";
import { TreeView } from "./tree_view.js";

const SAMPLES = 300;
// The engine takes up to 25 us for a node: with this pause the picture costs it less than one per cent.
const PAUSE_MS_PER_NODE = 3;
const MIN_PAUSE_MS = 2000;

const POOL_LEGEND = [
  ["leased", "running requests"], ["tree", "cached"], ["free", "free"],
];

export class CacheView {
  // panel: shown or not. live: see live.js. info: of /server_info.
  constructor(panel, live, info) {
    this.capacities = { full: info.full_tokens, swa: info.swa_tokens };
    this.hasWindows = info.window !== null;
    this.panel = panel;
    this.live = live;
    this.tree = new TreeView(this.hasWindows);
    this.drawnSteps = -1;
    this.nextMs = 0;
    legend(byId("pool-legend"), POOL_LEGEND);
    byId("max-nodes").addEventListener("change", () => this.refresh());
    live.addEventListener("news", () => this.onNews());
  }

  get isSeen() {
    return this.panel.checkVisibility() && !document.hidden;
  }

  refresh() {
    this.drawnSteps = -1;
    this.nextMs = 0;
    this.onNews();
  }

  onNews() {
    const { latest } = this.live;
    if (!latest || !this.isSeen) return;
    this.showTotals(latest);
    this.showPools();
    // Nothing ran since the last look: the tree is the same.
    if (latest.totals.num_steps !== this.drawnSteps && performance.now() >= this.nextMs) this.showTree(latest);
  }

  async showTree(latest) {
    this.nextMs = Infinity; // one question at a time
    let nodes = 0;
    try {
      const view = await getJson(`debug/cache?max_nodes=${byId("max-nodes").value}`);
      nodes = view.nodes;
      this.drawnSteps = latest.totals.num_steps;
      this.tree.show(view);
    } catch (error) {
      byId("tree-size").textContent = error.message;
    }
    this.nextMs = performance.now() + Math.max(MIN_PAUSE_MS, nodes * PAUSE_MS_PER_NODE);
  }

  showTotals({ totals, pools }) {
    const { prompt_tokens: prompt, cached_tokens: cached, rebuilt_tokens: rebuilt } = totals;
    const figures = [
      ["Prompt tokens reused", percent(cached + rebuilt, prompt)],
      ["From the cache", count(cached)],
      ["Rebuilt", count(rebuilt)],
      ["Computed", count(totals.computed_tokens)],
    ];
    if (this.hasWindows) figures.push(
      ["Windows kept", count(totals.windows_kept)],
      ["Windows evicted", count(totals.windows_evicted)],
      ["Windows rebuilt", count(totals.windows_rebuilt)],
      ["Branch points hit", count(totals.branch_points_hit)],
    );
    byId("totals").replaceChildren(...figures.map(([name, value]) =>
      element("div", {}, element("dt", { text: name }), element("dd", { text: value }))));
    for (const [name, title] of [["full", "Full attention"], ["swa", "Sliding windows"]]) {
      const { tree, leased } = pools[name];
      const capacity = this.capacities[name];
      byId(`${name}-caption`).textContent = capacity
        ? `${title}: ${count(tree + leased)} of ${count(capacity)} slots`
        : `${title}: this model has none`;
    }
  }

  showPools() {
    const { samples } = this.live;
    for (const name of ["full", "swa"]) {
      const columns = samples.map(({ pools }) => [pools[name].leased, pools[name].tree, pools[name].free]);
      stackedBars(byId(`${name}-pool`), columns, ["leased", "tree", "free"],
        { top: Math.max(1, this.capacities[name]), slots: SAMPLES });
    }
    const rates = samples.map((sample, index) => {
      const before = samples[Math.max(0, index - 10)].totals;
      const part = (field) => sample.totals[field] - before[field];
      const prompt = part("prompt_tokens");
      return prompt > 0 ? [part("cached_tokens") / prompt, part("rebuilt_tokens") / prompt, part("computed_tokens") / prompt] : [0, 0, 0];
    });
    stackedBars(byId("hit-rate"), rates, ["cached", "rebuilt", "free"], { top: 1, slots: SAMPLES });
  }
}
