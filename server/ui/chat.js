// The chat: conversations, streaming, stop, regenerate, edit; what was reused stands under each answer.

import { ApiError, streamEvents } from "./api.js";
import { Conversations, title } from "./conversation.js";
import { byId, count, element } from "./dom.js";
import { reuseReport } from "./reuse.js";

const NUMBERS = ["temperature", "top_p", "top_k", "max_tokens", "seed"];

export class Chat {
  // server: {model, hasTemplate}. afterAnswer: called when an answer ended, in whatever way.
  constructor(server, afterAnswer) {
    this.server = server;
    this.afterAnswer = afterAnswer;
    this.conversations = new Conversations();
    this.running = null;
    this.connect();
    this.show();
  }

  connect() {
    const { conversations } = this;
    byId("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      const question = byId("question").value;
      if (!question.trim() || this.running) return;
      byId("question").value = "";
      this.ask(question);
    });
    byId("question").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        byId("ask").requestSubmit();
      }
    });
    byId("stop").addEventListener("click", () => this.running?.abort());
    byId("system").addEventListener("input", () => {
      conversations.current.system = byId("system").value;
      conversations.save();
    });
    byId("conversations").addEventListener("change", (event) => {
      conversations.select(event.target.selectedIndex);
      this.show();
    });
    for (const [id, act] of [["new", "add"], ["fork", "copy"], ["delete", "remove"]]) {
      byId(`${id}-conversation`).addEventListener("click", () => {
        this.running?.abort();
        conversations[act]();
        this.show();
        byId("question").focus();
      });
    }
    if (!this.server.hasTemplate) {
      byId("question").placeholder = "This is a base model: it continues your text";
    }
  }

  ask(question) {
    this.conversations.current.turns.push({ question, answer: "", reasoning: "" });
    return this.answerLast({});
  }

  // Ask the question of turn `index` again; what came after it goes.
  regenerate(index) {
    if (this.running) return;
    const { turns } = this.conversations.current;
    turns.length = index + 1;
    turns[index] = { question: turns[index].question, answer: "", reasoning: "" };
    this.answerLast({ isAgain: true });
  }

  edit(index, question) {
    if (this.running) return;
    const { turns } = this.conversations.current;
    turns.length = index;
    turns.push({ question, answer: "", reasoning: "" });
    this.answerLast({});
  }

  async answerLast({ isAgain = false }) {
    const conversation = this.conversations.current;
    const turn = conversation.turns.at(-1);
    turn.isAgain = isAgain;
    const stop = new AbortController();
    this.running = stop;
    this.show();
    this.setBusy(true);
    const begin = performance.now();
    let first = null;
    let last = null;
    try {
      for await (const event of streamEvents(...this.request(conversation), stop.signal)) {
        const choice = event.choices?.[0];
        const text = choice?.delta?.content ?? choice?.text ?? "";
        const reasoning = choice?.delta?.reasoning_content ?? "";
        if (text || reasoning) {
          last = performance.now();
          first ??= last;
          turn.answer += text;
          turn.reasoning += reasoning;
          this.showAnswer(turn);
        }
        if (choice?.finish_reason) turn.finish = choice.finish_reason;
        if (event.usage) turn.account = account(event.usage, begin, first, last);
      }
    } catch (error) {
      if (error.name === "AbortError") turn.finish = "stopped";
      else if (error instanceof ApiError || error instanceof TypeError) turn.failed = error.message;
      else throw error;
    } finally {
      this.running = null;
      this.setBusy(false);
      this.conversations.save();
      if (this.conversations.current === conversation) this.show();
      this.afterAnswer();
    }
  }

  request(conversation) {
    const body = { model: this.server.model, stream: true, stream_options: { include_usage: true } };
    for (const name of NUMBERS) {
      const value = byId(name).value;
      if (value !== "") body[name] = Number(value);
    }
    const { system, turns } = conversation;
    if (!this.server.hasTemplate) {
      const text = [system, ...turns.flatMap((turn) => [turn.question, turn.answer])].join("");
      return ["v1/completions", { max_tokens: 256, ...body, prompt: text }];
    }
    const messages = system ? [{ role: "system", content: system }] : [];
    for (const turn of turns) {
      messages.push({ role: "user", content: turn.question });
      if (turn !== turns.at(-1)) messages.push({ role: "assistant", content: turn.answer });
    }
    return ["v1/chat/completions", { ...body, messages }];
  }

  setBusy(isBusy) {
    byId("messages").setAttribute("aria-busy", String(isBusy));
    byId("send").disabled = isBusy;
    byId("stop").hidden = !isBusy;
    byId("chat-status").textContent = isBusy ? "Answering…" : "";
  }

  show() {
    const { conversations } = this;
    byId("conversations").replaceChildren(
      ...conversations.all.map((each, index) => element("option", { text: title(each, index) })));
    byId("conversations").selectedIndex = conversations.index;
    byId("system").value = conversations.current.system;
    const { turns } = conversations.current;
    byId("messages").replaceChildren(...turns.flatMap((turn, index) =>
      [this.questionBox(turn, index), this.answerBox(turn, index, turns[index - 1])]));
    byId("messages").scrollTop = byId("messages").scrollHeight;
  }

  showAnswer(turn) {
    if (this.conversations.current.turns.at(-1) !== turn) return; // another conversation is shown
    const box = byId("messages").lastElementChild;
    const isAtEnd = byId("messages").scrollHeight - byId("messages").scrollTop - byId("messages").clientHeight < 60;
    box.querySelector(".text").textContent = turn.answer;
    box.querySelector(".reasoning").textContent = turn.reasoning;
    box.querySelector(".reasoning").hidden = !turn.reasoning;
    if (isAtEnd) byId("messages").scrollTop = byId("messages").scrollHeight;
  }

  questionBox(turn, index) {
    const text = element("div", { className: "text", text: turn.question });
    const actions = element("div", { className: "actions" });
    const box = element("article", { className: "message user" }, element("h3", { text: "You" }), text, actions);
    const change = element("button", { text: "Edit", "aria-label": `Edit message ${index + 1}` });
    change.addEventListener("click", () => {
      const field = element("textarea", { rows: "3", "aria-label": "Edited message" });
      field.value = turn.question;
      const ask = element("button", { className: "primary", text: "Ask this instead" });
      ask.addEventListener("click", () => field.value.trim() && this.edit(index, field.value));
      const leave = element("button", { text: "Leave it", onclick: () => this.show() });
      text.replaceWith(field);
      actions.replaceChildren(ask, leave);
      field.focus();
    });
    actions.append(change);
    return box;
  }

  answerBox(turn, index, before) {
    const box = element("article", { className: turn.failed ? "message failed" : "message" },
      element("h3", { text: this.server.model }),
      element("div", { className: "reasoning", text: turn.reasoning }),
      element("div", { className: "text", text: turn.answer }));
    box.querySelector(".reasoning").hidden = !turn.reasoning;
    const ends = { length: "Ended by the limit of tokens.", stopped: "Stopped by you." };
    if (ends[turn.finish]) box.append(element("p", { className: "muted", text: ends[turn.finish] }));
    if (turn.failed) box.append(element("p", { role: "alert", text: `Failed: ${turn.failed}` }));
    const isRunning = this.running && turn === this.conversations.current.turns.at(-1);
    if (turn.account) {
      const context = { before: before?.account, isAgain: turn.isAgain };
      box.append(reuseReport(turn.account, context, speeds(turn.account)));
    }
    if (!isRunning) {
      box.append(element("div", { className: "actions" }, element("button", {
        text: "Regenerate", "aria-label": `Regenerate answer ${index + 1}`,
        onclick: () => this.regenerate(index) })));
    }
    return box;
  }
}

function account(usage, begin, first, last) {
  const details = usage.prompt_tokens_details ?? {};
  return {
    prompt: usage.prompt_tokens,
    cached: details.cached_tokens ?? 0,
    rebuilt: details.rebuilt_tokens ?? 0,
    answer: usage.completion_tokens,
    firstMs: first === null ? null : first - begin,
    perSecond: last > first ? ((usage.completion_tokens - 1) * 1000) / (last - first) : null,
  };
}

function speeds({ answer, firstMs, perSecond }) {
  const told = [`${count(answer)} answered`];
  if (firstMs !== null) told.push(`first after ${firstMs < 1000 ? `${count(firstMs)} ms` : `${(firstMs / 1000).toFixed(1)} s`}`);
  if (perSecond) told.push(`${perSecond.toFixed(1)} tokens/s`);
  return told;
}
