// Asks /debug/steps once a second while the page is seen, and keeps five minutes of what it says.

import { getJson } from "./api.js";

const INTERVAL_MS = 1000;
const KEPT_SAMPLES = 300;
const KEPT_STEPS = 600;

export class Live extends EventTarget {
  constructor() {
    super();
    this.samples = []; // {now, pools, totals, running, waiting}
    this.steps = [];
    this.last = 0;
    this.error = null;
    this.loop();
  }

  get latest() {
    return this.samples.at(-1);
  }

  async loop() {
    for (;;) {
      if (!document.hidden) await this.look();
      await new Promise((resolve) => setTimeout(resolve, INTERVAL_MS));
    }
  }

  async look() {
    try {
      const news = await getJson(`debug/steps?after=${this.last}`);
      if (news.last < this.last) this.steps = []; // another server answers at this address
      this.last = news.last;
      this.steps = [...this.steps, ...news.steps].slice(-KEPT_STEPS);
      this.samples = [...this.samples, news].slice(-KEPT_SAMPLES);
      this.error = null;
    } catch (error) {
      this.error = error;
    }
    this.dispatchEvent(new Event("news"));
  }
}
