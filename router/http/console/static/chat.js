// The chat box: a streamed answer, and the stages of its request when it has ended.

import { getJson, post } from "./api.js";
import { openDetails } from "./details.js";
import { byId, h, keyed, setText } from "./dom.js";
import { count, seconds } from "./format.js";
import { events } from "./sse.js";
import { drawBar, stageBar } from "./stages.js";

export class Chat {
  constructor() {
    this.messages = [];
    this.running = null;
    this.log = byId("chat-log");
    byId("chat-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    byId("chat-text").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        byId("chat-form").requestSubmit();
      }
    });
    byId("chat-stop").addEventListener("click", () => this.running?.abort());
    byId("chat-clear").addEventListener("click", () => this.clear());
  }

  showModels(models) {
    keyed(byId("chat-model"), models, (name) => name, (name) => h("option", { value: name }, name), () => {});
  }

  clear() {
    this.running?.abort();
    this.messages = [];
    this.log.replaceChildren();
    byId("chat-text").focus();
  }

  async send() {
    const text = byId("chat-text").value.trim();
    if (!text || this.running) return;
    byId("chat-text").value = "";
    const messages = this.messages;
    messages.push({ role: "user", content: text });
    this.say("user", text);
    const answer = this.say("assistant", "");
    await this.answer(messages, answer);
  }

  // Streams into `element`. The log is busy meanwhile, so that a screen reader reads the answer once, whole.
  async answer(messages, element) {
    const running = new AbortController();
    this.setRunning(running);
    const body = { model: byId("chat-model").value || undefined, messages, stream: true,
      max_tokens: Number(byId("chat-tokens").value) || undefined };
    const paragraph = element.querySelector("p");
    let text = "";
    try {
      const response = await post("v1/chat/completions", body, running.signal);
      const id = response.headers.get("x-request-id");
      for await (const event of events(response)) {
        if (event.error) throw new Error(event.error.message);
        text += event.choices?.[0]?.delta?.content ?? "";
        setText(paragraph, text);
        this.log.scrollTop = this.log.scrollHeight;
      }
      await this.showStages(element, id);
    } catch (error) {
      element.append(h("p", { class: "notice" }, running.signal.aborted ? "stopped" : error.message));
    } finally {
      if (text) messages.push({ role: "assistant", content: text });
      else messages.pop();
      this.setRunning(null);
    }
  }

  setRunning(running) {
    this.running = running;
    this.log.setAttribute("aria-busy", String(Boolean(running)));
    byId("chat-send").disabled = Boolean(running);
    byId("chat-stop").disabled = !running;
  }

  say(role, text) {
    const element = h("div", { class: `said ${role}` }, h("span", { class: "by" }, role === "user" ? "You" : "Answer"), h("p", {}, text));
    this.log.append(element);
    this.log.scrollTop = this.log.scrollHeight;
    return element;
  }

  async showStages(element, id) {
    const { requests } = await getJson(`debug/requests/${encodeURIComponent(id)}`);
    const [request] = requests;
    const bar = stageBar();
    drawBar(bar, request.stages_s, request.first_token_s || 1);
    const sum = `First token after ${seconds(request.first_token_s)}, all ${count(request.num_output_tokens)} after `
      + `${seconds(request.total_s)}. `;
    const more = h("button", { type: "button", class: "link-button", click: () => openDetails(request.request_id) }, "Details");
    element.append(bar, h("span", { class: "by" }, sum, more));
    this.log.scrollTop = this.log.scrollHeight;
  }
}
