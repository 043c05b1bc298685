// Starts the page: who serves, the tabs, and the views.

import { getJson } from "./api.js";
import { CacheView } from "./cache.js";
import { Chat } from "./chat.js";
import { byId } from "./dom.js";
import { Live } from "./live.js";
import { RequestsView } from "./requests.js";

const TABS = ["chat", "cache", "requests"];
const WIDE = matchMedia("(min-width: 68rem)");

// On a wide window the chat stands beside the other two, so one of them is always shown.
function select(name, { focus = false } = {}) {
  const shown = WIDE.matches && name === "chat" ? "cache" : name;
  for (const each of TABS) {
    const isShown = each === shown;
    byId(each).hidden = !(isShown || (each === "chat" && WIDE.matches));
    byId(`tab-${each}`).setAttribute("aria-selected", String(isShown));
    byId(`tab-${each}`).tabIndex = isShown ? 0 : -1;
  }
  if (focus) byId(`tab-${shown}`).focus();
  return shown;
}

function connectTabs(onShow) {
  let current = select("chat");
  const go = (name, options) => {
    current = select(name, options);
    onShow();
  };
  for (const name of TABS) byId(`tab-${name}`).addEventListener("click", () => go(name));
  document.querySelector("nav").addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const names = TABS.filter((name) => !(WIDE.matches && name === "chat"));
    go(names[(names.indexOf(current) + step + names.length) % names.length], { focus: true });
  });
  WIDE.addEventListener("change", () => go(WIDE.matches ? current : "chat"));
}

function showState(live) {
  const badge = byId("state");
  const state = live.error ? (live.error.status ? live.error.message : "not reachable") : live.latest?.state ?? "connecting";
  badge.textContent = state;
  badge.classList.toggle("bad", state !== "ready");
}

async function serverInfo() {
  for (;;) {
    try {
      return await getJson("server_info");
    } catch (error) {
      byId("state").textContent = error.status === 503 ? "loading" : "not reachable";
      await new Promise((resolve) => setTimeout(resolve, 1000));
    }
  }
}

async function start() {
  const info = await serverInfo();
  const [model] = info.served_model_names;
  const window = info.window ? `, window ${info.window}` : "";
  const layers = info.layer_pattern.replace(/(.)\1{5,}/g, (run, letter) => `${letter}×${run.length}`);
  byId("model").textContent = `${model}: ${layers}${window}, ${info.dtype} on ${info.device}`;
  document.title = `${model} – Forkpoint`;
  const live = new Live();
  live.addEventListener("news", () => showState(live));
  const cache = new CacheView(byId("cache"), live, info);
  const requests = new RequestsView(byId("requests"), live);
  connectTabs(() => {
    cache.refresh();
    requests.onNews();
  });
  new Chat({ model, hasTemplate: info.has_chat_template }, async () => {
    await live.look();
    cache.refresh();
  });
}

start();
