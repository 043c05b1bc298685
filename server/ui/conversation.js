// Conversations of this tab. They are kept until it is closed, and sent nowhere but to the server.

const STORE = "forkpoint.conversations";

// A conversation: {id, system, turns: [{question, answer, reasoning, account, failed}]}.
function empty(system = "") {
  return { id: crypto.randomUUID ? crypto.randomUUID() : String(Math.random()), system, turns: [] };
}

export function title(conversation, index) {
  const first = conversation.turns[0]?.question ?? "empty";
  return `${index + 1}: ${first.length > 40 ? `${first.slice(0, 40)}…` : first}`;
}

export class Conversations {
  constructor() {
    this.all = [empty()];
    this.index = 0;
    try {
      const kept = JSON.parse(sessionStorage.getItem(STORE));
      if (Array.isArray(kept?.all) && kept.all.length) {
        this.all = kept.all;
        this.index = Math.min(kept.index, kept.all.length - 1);
      }
    } catch {
      sessionStorage.removeItem(STORE);
    }
  }

  get current() {
    return this.all[this.index];
  }

  save() {
    try {
      sessionStorage.setItem(STORE, JSON.stringify({ all: this.all, index: this.index }));
    } catch {
      // Longer than the browser keeps: the conversation goes on, a reload forgets it.
    }
  }

  select(index) {
    this.index = index;
    this.save();
  }

  // The new one keeps the system prompt: that is what shows a fork.
  add() {
    this.all.push(empty(this.current.system));
    this.select(this.all.length - 1);
  }

  copy() {
    this.all.push({ ...structuredClone(this.current), id: empty().id });
    this.select(this.all.length - 1);
  }

  remove() {
    this.all.splice(this.index, 1);
    if (!this.all.length) this.all.push(empty());
    this.select(Math.max(0, this.index - 1));
  }
}
