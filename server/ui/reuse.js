// What was reused of a prompt: a bar, the numbers, and a sentence that says why.

import { count, element } from "./dom.js";

// account: {prompt, cached, rebuilt}, in tokens. Together with the computed ones they make the prompt.
export function bar({ prompt, cached, rebuilt }) {
  const computed = prompt - cached - rebuilt;
  const label = `${count(cached)} tokens from the cache, ${count(rebuilt)} rebuilt, ${count(computed)} computed`;
  const made = element("div", { className: "bar", role: "img", "aria-label": label, title: label });
  for (const [name, tokens] of [["cached", cached], ["rebuilt", rebuilt], ["computed", computed]]) {
    if (tokens <= 0) continue;
    const part = element("span", { className: name });
    part.style.flex = `${tokens} 0 0`;
    made.append(part);
  }
  return made;
}

// before: {prompt} of the answer before in this conversation, if any. isAgain: the same question once more.
export function why({ prompt, cached, rebuilt }, { before, isAgain }) {
  const served = cached + rebuilt;
  if (!served) {
    return before
      ? "Nothing was reused: what the cache held of this conversation is gone."
      : "Nothing was reused: no earlier request began like this one. The next that does will reuse it.";
  }
  let what = "the beginning that it shares with an earlier request";
  if (isAgain && served >= prompt - 64) what = "the whole prompt but its end: it has been asked before";
  else if (before && served >= before.prompt - 64) what = "the conversation so far; only what is new was computed";
  const how = rebuilt
    ? ` The sliding windows at its end were gone, so ${count(rebuilt)} positions were rebuilt, exactly.`
    : "";
  return `Reused: ${what}.${how}`;
}

export function reuseReport(account, context, speeds) {
  const { prompt, cached, rebuilt } = account;
  const numbers = element("p", { className: "numbers" });
  const parts = [["cached", cached, "from the cache"], ["rebuilt", rebuilt, "rebuilt"],
    ["computed", prompt - cached - rebuilt, "computed"]];
  for (const [name, tokens, text] of parts) {
    numbers.append(element("span", {}, element("span", { className: `swatch ${name}` }),
      `${count(tokens)} ${text}`));
  }
  for (const speed of speeds) numbers.append(element("span", { text: speed }));
  return element("div", { className: "reuse" },
    element("p", { text: `Your prompt had ${count(prompt)} tokens.` }),
    bar(account), numbers, element("p", { className: "why", text: why(account, context) }));
}
