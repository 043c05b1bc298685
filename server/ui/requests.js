// The requests' view: a bar for each step, a row for each request under way.

import { getJson } from "./api.js";
import { stackedBars } from "./charts.js";
import { byId, count, element, legend } from "./dom.js";
import { bar } from "./reuse.js";

const SHOWN_STEPS = 200;
const LEGEND = [["computed", "prompt rows"], ["rebuilt", "rebuild rows"], ["cached", "decode rows (one for each answer)"]];
const STATES = { waiting: "waiting", prefill: "reading the prompt", decode: "answering" };

export class RequestsView {
  constructor(panel, live) {
    this.panel = panel;
    this.live = live;
    this.isAsking = false;
    legend(byId("step-legend"), LEGEND);
    live.addEventListener("news", () => this.onNews());
  }

  onNews() {
    if (!this.live.latest || !this.panel.checkVisibility() || document.hidden) return;
    this.showSteps();
    this.showRequests();
  }

  showSteps() {
    const steps = this.live.steps.slice(-SHOWN_STEPS);
    const columns = steps.map((step) => [step.decode_rows, step.rebuild_rows, step.prefill_rows]);
    const top = stackedBars(byId("steps"), columns, ["cached", "rebuilt", "computed"], { slots: SHOWN_STEPS });
    const times = steps.map((step) => step.seconds).sort((one, other) => one - other);
    const middle = times[Math.floor(times.length / 2)];
    byId("steps-detail").textContent = steps.length
      ? `The latest ${count(steps.length)} steps. Upper edge: ${count(top)} rows. A step took ${(1000 * middle).toFixed(1)} ms in the middle, ${(1000 * times.at(-1)).toFixed(1)} ms at most.`
      : "No step yet.";
  }

  async showRequests() {
    const { running, waiting } = this.live.latest;
    byId("requests-summary").textContent = `${count(running)} sequences run, ${count(waiting)} wait.`;
    if (this.isAsking) return;
    this.isAsking = true;
    try {
      const { requests, left_out: left } = await getJson("debug/requests");
      byId("request-rows").replaceChildren(...requests.map(row));
      if (!requests.length) byId("request-rows").append(element("tr", {}, element("td", { colspan: "6", className: "muted", text: "No request is under way." })));
      if (left) byId("requests-summary").textContent += ` The oldest ${count(requests.length)} requests are listed, ${count(left)} are not.`;
    } catch (error) {
      byId("requests-summary").textContent = error.message;
    } finally {
      this.isAsking = false;
    }
  }
}

function row(request) {
  const reuse = element("td");
  if (request.state !== "waiting") {
    reuse.append(bar({ prompt: request.prompt_tokens, cached: request.cached_tokens, rebuilt: request.rebuilt_tokens }));
  }
  return element("tr", {},
    element("td", { text: request.id.slice(0, 12), title: request.id }),
    element("td", { text: STATES[request.state] }),
    element("td", { text: `${request.age_s.toFixed(1)} s` }),
    element("td", { text: count(request.prompt_tokens) }),
    reuse,
    element("td", { text: count(request.completion_tokens) }));
}
