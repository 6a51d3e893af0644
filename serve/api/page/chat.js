// The conversation: sending, streaming into the document, stopping, comparing. Knows the API by `api` only.

const HINT = "Left and right arrow keys walk through its rounds.";

class Chat {
  constructor(connection) {
    this.connection = connection;
    this.history = []; // messages of finished turns
    this.lastPrompt = "";
    this.running = null; // AbortController of what streams now
  }

  stop() {
    this.running?.abort();
  }

  clear() {
    this.stop();
    this.history = [];
    $("log").replaceChildren();
    this.welcome(true);
  }

  welcome(visible) {
    $("welcome").hidden = !visible;
    $("new").hidden = visible;
  }

  // The request's body without what changes between the two runs of a comparison.
  body(prompt) {
    const system = $("system").value.trim();
    const number = (id) => ($(id).value === "" ? undefined : Number($(id).value));
    const first = system ? [{ role: "system", content: system }] : [];
    const messages = [...first, ...this.history, { role: "user", content: prompt }];
    return { messages, temperature: number("temperature"), max_tokens: number("max-tokens") };
  }

  async send(prompt) {
    await this.turn(prompt, (host) => this.stream(host, this.body(prompt)));
  }

  // The same prompt without and with speculation, one after the other so that neither slows the other. Equal seeds, and
  // a cache salt each, so that neither finds the other's prompt in the prefix cache.
  async compare(prompt) {
    await this.turn(prompt, async (host) => {
      const seed = crypto.getRandomValues(new Uint32Array(1))[0];
      const columns = el("div", { class: "columns" });
      const result = el("div", { class: "result", role: "status" });
      const halves = ["Speculation off", "Speculation on"].map((title) => {
        const half = el("div", { class: "half" }, el("h3", {}, title));
        columns.append(half);
        return half;
      });
      follow(() => host.append(el("section", { class: "compare", "aria-label": "Comparison" }, columns, result)));
      const answers = [];
      for (const [i, half] of halves.entries()) {
        const salt = `${seed}/${i}`;
        const run = await this.stream(half, { ...this.body(prompt), seed, speculation: i === 1, cache_salt: salt });
        if (run.ended !== "complete") return run;
        answers.push(run.answer);
      }
      follow(() => result.append(...verdict(...answers)));
      return { answer: answers[1], ended: "complete" };
    });
  }

  // One turn: the prompt is shown, `run` answers it; what was answered becomes part of the conversation.
  async turn(prompt, run) {
    this.welcome(false);
    this.lastPrompt = prompt;
    const { history } = this; // a new chat starts a new one, whatever still ends here
    const host = el("div", { class: "turn" });
    $("log").append(host);
    this.running = new AbortController();
    setBusy(true);
    const question = el("div", { class: "question", dir: "auto" }, el("span", { class: "hidden" }, "You: "), prompt);
    host.append(question);
    scrollToEnd();
    const { answer, ended } = await run(host);
    this.running = null;
    setBusy(false);
    if (ended === "failed") {
      const again = () => {
        if (this.running) return;
        host.remove();
        this.turn(prompt, run);
      };
      follow(() => host.append(el("button", { type: "button", class: "quiet again", onclick: again }, "Try again")));
    } else if (answer.text) {
      history.push({ role: "user", content: prompt }, { role: "assistant", content: answer.text });
    }
  }

  // Streams one answer into `host`. ended: "complete", "stopped" or "failed".
  async stream(host, body) {
    const answer = new Answer();
    const label = `Answer. ${HINT}`;
    const text = el("div", { class: "body", tabindex: 0, role: "group", "aria-label": label });
    const foot = el("footer");
    const article = el("article", { class: "answer", "aria-label": "Answer", "aria-busy": "true" }, text, foot);
    follow(() => host.append(article));
    const view = new AnswerView(answer, text);
    watchRounds(view);
    const draw = () => {
      view.draw();
      foot.replaceChildren(...summary(answer));
    };
    let frame = 0;
    let ended = "complete";
    try {
      for await (const chunk of api.chat(body, this.running.signal)) {
        if (chunk.choices.length) answer.take(chunk.choices[0], performance.now());
        frame ||= requestAnimationFrame(() => {
          frame = 0;
          follow(draw);
        });
      }
    } catch (error) {
      ended = error.name === "AbortError" ? "stopped" : "failed";
      const note = ended === "stopped" ? "Stopped." : error.message;
      follow(() => article.append(el("p", { class: ended, role: ended === "failed" ? "alert" : "status" }, note)));
      if (ended === "failed") this.connection.look(error);
    }
    cancelAnimationFrame(frame);
    follow(() => {
      draw();
      if (answer.tokens.length) foot.append(rawButton(view));
    });
    article.setAttribute("aria-busy", "false");
    if (answer.tokens.length) showPositions("dot", answer.positions);
    if (ended === "complete") say(`Answer complete, ${plural(answer.tokens.length, "token")}`);
    return { answer, ended };
  }
}

// What an answer was made of, which is also the legend of its marks.
function summary(answer) {
  if (!answer.tokens.length) return [];
  const names = { block: "drafter", lookup: "lookup", target: "target" };
  const counts = Object.entries(names).flatMap(([source, name]) => {
    const count = answer.count(source);
    if (!count) return [];
    return [
      el(
        "span",
        { "data-count": source },
        el("span", { class: "t", "data-s": source, "aria-hidden": "true" }, "ab"),
        ` ${count} ${name}`,
      ),
    ];
  });
  const rounds = answer.decodeRounds.length;
  const limit = answer.finish === "length" ? " (the limit)" : "";
  const facts = [`${plural(answer.tokens.length, "token")}${limit} in ${plural(rounds, "round")}`];
  if (Number.isFinite(answer.rate)) facts.push(`${rateText(answer.rate)} tokens/s`);
  return [...counts, ...facts.map((fact) => el("span", {}, fact))];
}

function rawButton(view) {
  const toggle = (event) => {
    view.showRaw(!view.raw);
    event.currentTarget.setAttribute("aria-pressed", String(view.raw));
    view.body.classList.toggle("raw", view.raw);
  };
  const title = "Every token as it came, with the drafted and kept counts of each round";
  return el("button", { type: "button", class: "quiet", "aria-pressed": "false", title, onclick: toggle }, "Tokens");
}

// Speed and equality of the two answers of a comparison.
function verdict(off, on) {
  const ids = (answer) => answer.tokens.map((token) => token.id);
  const [a, b] = [ids(off), ids(on)];
  const differ = a.findIndex((id, i) => id !== b[i]);
  const equal = a.length === b.length && differ < 0 && off.text === on.text;
  const top = Math.max(off.rate, on.rate);
  const bar = (name, answer) => {
    const fill = el("i");
    fill.style.width = `${Math.max(1, (100 * answer.rate) / top)}%`;
    return el(
      "div",
      { class: "speed" },
      el("span", {}, name),
      el("span", { class: "track", "aria-hidden": "true" }, fill),
      el("b", {}, `${rateText(answer.rate)} tokens/s`),
    );
  };
  const ratio = on.rate / off.rate;
  const factor = Number.isFinite(ratio) ? `${ratio.toFixed(2)}× the speed. ` : "";
  const sameness = equal
    ? `The texts are equal, token by token (${a.length}).`
    : `The texts differ from token ${(differ < 0 ? Math.min(a.length, b.length) : differ) + 1} on.`;
  const line = el("p", { "data-equal": String(equal) }, el("b", {}, factor), sameness);
  return Number.isFinite(ratio) ? [bar("off", off), bar("on", on), line] : [line];
}

function setBusy(busy) {
  $("send").textContent = busy ? "Stop" : "Send";
  $("send").classList.toggle("stop", busy);
  $("compare").disabled = busy;
}

function scrollToEnd() {
  document.scrollingElement.scrollTop = document.scrollingElement.scrollHeight;
}

// Changes the conversation and stays at its end, unless the reader had scrolled up.
function follow(change, slack = 80) {
  const page = document.scrollingElement;
  const atEnd = page.scrollHeight - page.scrollTop - innerHeight < slack;
  change();
  if (atEnd) scrollToEnd();
}
