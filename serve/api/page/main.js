// Wiring: the connection with its status, the key dialog, the composer.

const POLL_MILLISECONDS = 1000;
const LONGEST_WAIT_SECONDS = 16;

class Connection {
  constructor(gauges) {
    this.gauges = gauges;
    this.failures = 0;
    this.known = false; // facts about the server are on the page
    this.timer = 0;
  }

  // Scrapes now and again later: every second while it answers, ever later while it does not.
  async poll() {
    clearTimeout(this.timer);
    let wait = POLL_MILLISECONDS;
    try {
      if (!document.hidden) await this.scrape();
      this.failures = 0;
    } catch (error) {
      wait = this.failed(error);
    }
    clearTimeout(this.timer);
    if (wait) this.timer = setTimeout(() => this.poll(), wait);
  }

  async scrape() {
    const metrics = parseMetrics(await api.text("metrics"));
    const up = metrics["foretoken:up"]?.[0]?.value === 1;
    if (!up) {
      await api.json("health"); // throws the reason
      return;
    }
    this.show("ready", "ready");
    this.gauges.take(metrics, performance.now() / 1000);
    if (!this.known) await this.introduce();
  }

  async introduce() {
    const { data } = await api.json("v1/models");
    const { version, engine } = await api.json("version");
    $("model").textContent = data[0].id;
    const drafter = engine.drafter ? "block drafter" : null;
    const facts = [
      `Foretoken ${version}`,
      engine.device,
      engine.weights,
      drafter,
      engine.proposer?.includes("lookup") && "prompt lookup",
    ];
    $("facts").textContent = [...facts.filter(Boolean), `${data[0].max_model_len} tokens of context`].join(" · ");
    this.known = true;
  }

  // Shows what went wrong; the milliseconds until the next try, 0 to wait for the reader.
  failed(error) {
    if (error.status === 401) {
      this.show("key", "key needed", "This server asks for an API key.", "Enter key");
      askForKey();
      return 0;
    }
    if (error.status) {
      const loading = error.message.includes("loading");
      this.show(
        loading ? "wait" : "down",
        loading ? "loading" : "not answering",
        `The server cannot answer now: ${error.message}`,
      );
      this.known = false;
      return POLL_MILLISECONDS;
    }
    if (!(error instanceof ServerError)) {
      console.error(error);
      this.show("down", "unclear", `The page cannot read what the server says: ${error.message}`);
      return 1000 * LONGEST_WAIT_SECONDS;
    }
    const seconds = Math.min(2 ** this.failures++, LONGEST_WAIT_SECONDS);
    this.known = false;
    this.show("down", "offline", `No connection to the server. Next try in ${plural(seconds, "second")}.`);
    return 1000 * seconds;
  }

  // A request has just failed: see at once what is wrong.
  look(error) {
    if (error.status === 401) this.failed(error);
    else this.poll();
  }

  show(state, word, banner = "", button = "Try now") {
    $("status").dataset.state = state;
    if ($("status-text").textContent !== word) $("status-text").textContent = word;
    if ($("banner-text").textContent !== banner) $("banner-text").textContent = banner;
    $("banner").hidden = !banner;
    $("retry").textContent = button;
    document.documentElement.style.setProperty("--top", `${$("top").offsetHeight}px`);
  }
}

function askForKey(told = "") {
  $("key-error").textContent = told;
  if (!$("key-dialog").open) $("key-dialog").showModal();
  $("key").focus();
}

async function useKey(connection) {
  api.setKey($("key").value);
  $("key").value = "";
  try {
    await api.json("version");
  } catch (error) {
    if (error.status === 401) return askForKey("That key was refused.");
  }
  $("key-dialog").close();
  $("prompt").focus();
  connection.poll();
}

function start() {
  const connection = new Connection(new Gauges());
  const chat = new Chat(connection);
  const prompt = $("prompt");
  const fit = () => {
    prompt.style.height = "auto";
    prompt.style.height = `${Math.min(prompt.scrollHeight, 200)}px`;
  };
  const take = () => {
    const text = prompt.value.trim();
    prompt.value = "";
    fit();
    return text;
  };
  $("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    if (chat.running) return chat.stop();
    const text = take();
    if (text) chat.send(text);
  });
  $("compare").addEventListener("click", () => {
    const text = take() || chat.lastPrompt;
    if (text) chat.compare(text);
    else prompt.focus();
  });
  prompt.addEventListener("input", fit);
  prompt.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      if (!chat.running) $("composer").requestSubmit();
    }
  });
  document.addEventListener("keydown", (event) => event.key === "Escape" && chat.stop());
  document.addEventListener("scroll", hideRound, { passive: true });
  $("settings").addEventListener("toggle", () => follow(() => {}, 300));
  $("new").addEventListener("click", () => {
    chat.clear();
    prompt.focus();
  });
  for (const button of document.querySelectorAll(".try")) {
    button.addEventListener("click", () => chat.running || chat.send(button.textContent));
  }
  $("retry").addEventListener("click", () => ($("status").dataset.state === "key" ? askForKey() : connection.poll()));
  $("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    useKey(connection);
  });
  document.addEventListener("visibilitychange", () => document.hidden || connection.poll());
  const wide = matchMedia("(min-width: 60rem)");
  const unfold = () => ($("more").open = wide.matches);
  wide.addEventListener("change", unfold);
  unfold();
  showPositions("bar", []);
  prompt.focus();
  if (document.body.dataset.needsKey === "true") connection.failed(new ServerError("", 401));
  else connection.poll();
}

start();
