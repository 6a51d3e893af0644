// The /metrics page as numbers, and what the last seconds of it say: tiles, the spark line, the chart. Knows no chat.

// {name: [{labels, value}]} of Prometheus text.
function parseMetrics(text) {
  const found = {};
  for (const line of text.split("\n")) {
    const match = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$/.exec(line);
    if (!match) continue;
    const labels = {};
    for (const [, name, value] of (match[2] ?? "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)) labels[name] = value;
    (found[match[1]] ??= []).push({ labels, value: Number(match[3]) });
  }
  return found;
}

const WINDOW_SECONDS = 10;
const SPARK_POINTS = 60;

class Gauges {
  constructor() {
    this.samples = [];
    this.rates = [];
  }

  // One scrape at time `now` in seconds.
  take(metrics, now) {
    const one = (name) => metrics[name]?.[0]?.value ?? NaN;
    const by = (name, label) => Object.fromEntries((metrics[name] ?? []).map((s) => [s.labels[label], s.value]));
    const sample = {
      now,
      tokens: one("vllm:generation_tokens_total"),
      drafts: one("vllm:spec_decode_num_drafts_total"),
      accepted: one("vllm:spec_decode_num_accepted_tokens_total"),
      lengths: by("foretoken:block_length_rounds_total", "block_length"),
    };
    const before = this.samples.at(-1);
    if (before && sample.tokens < before.tokens) this.samples = []; // the counters began anew: another engine
    this.samples.push(sample);
    while (this.samples[0].now < now - WINDOW_SECONDS) this.samples.shift();
    this.rates.push(before && this.samples.length > 1 ? (sample.tokens - before.tokens) / (now - before.now) : 0);
    this.rates = this.rates.slice(-SPARK_POINTS);
    this.show(one, this.samples[0], sample);
    const positions = by("vllm:spec_decode_num_accepted_tokens_per_pos_total", "position");
    showPositions(
      "bar",
      Object.values(positions).map((count) => count / sample.drafts),
    );
  }

  show(one, first, last) {
    const drafts = last.drafts - first.drafts;
    const rounds = Object.entries(last.lengths).map(([length, count]) => [
      length,
      count - (first.lengths[length] ?? 0),
    ]);
    const played = rounds.reduce((sum, [, count]) => sum + count, 0);
    const drafted = rounds.reduce((sum, [length, count]) => sum + length * count, 0);
    setTile("tile-rate", rateText(this.rates.at(-1)), false);
    // What the last seconds do not say stays as it was, paler.
    setTile("tile-tau", drafts ? decimals(1 + (last.accepted - first.accepted) / drafts, 2) : null, !drafts);
    setTile("tile-block", played ? decimals(drafted / played, 1) : null, !played);
    setTile("tile-queue", `${one("vllm:num_requests_running")} · ${one("vllm:num_requests_waiting")}`, false);
    const usage = one("vllm:kv_cache_usage_perc");
    setTile("tile-kv", `${decimals(100 * usage, usage < 0.1 ? 1 : 0)} %`, false);
    $("kv-bar").style.width = `${100 * usage}%`;
    const top = Math.max(1, ...this.rates);
    const points = this.rates.map(
      (rate, i) => `${((SPARK_POINTS - this.rates.length + i) * 120) / (SPARK_POINTS - 1)},${26 - (24 * rate) / top}`,
    );
    $("spark").firstElementChild.setAttribute("points", points.join(" "));
  }
}

function setTile(id, text, stale) {
  if (text !== null) $(id).textContent = text;
  $(id).classList.toggle("stale", stale);
}

// The chart: bars for the server, dots for the last answer; shares from 0 to 1 by position.
const shown = { bar: [], dot: [] };

function showPositions(kind, shares) {
  const finite = shares.map((share) => (Number.isFinite(share) ? share : 0));
  while (finite.at(-1) === 0) finite.pop();
  if (JSON.stringify(finite) === JSON.stringify(shown[kind])) return;
  shown[kind] = finite;
  const count = Math.max(shown.bar.length, shown.dot.length, 7);
  const width = 252 / count;
  const y = (share) => 92 - 80 * share;
  const marks = [];
  for (const share of [0, 0.5, 1]) {
    marks.push(svg("line", { x1: 26, x2: 280, y1: y(share), y2: y(share), class: "grid" }));
    marks.push(svg("text", { x: 22, y: y(share) + 3, class: "right" }, `${100 * share}`));
  }
  for (let i = 0; i < count; i++) {
    const left = 27 + i * width;
    const middle = left + width / 2;
    const size = Math.min(width * 0.62, 22);
    const bar = shown.bar[i] ?? 0;
    marks.push(
      svg("rect", { x: middle - size / 2, y: y(bar), width: size, height: 92 - y(bar), rx: 1.5, class: "bar" }),
    );
    if (i < shown.dot.length) marks.push(svg("circle", { cx: middle, cy: y(shown.dot[i]), r: 3.2, class: "dot" }));
    if (count <= 8 || i % 2 === 0) marks.push(svg("text", { x: middle, y: 106, class: "middle" }, `${i + 1}`));
  }
  $("chart").replaceChildren(...marks);
  const told = (shares) => shares.map((share, i) => `position ${i + 1} ${Math.round(100 * share)} percent`).join(", ");
  const answer = shown.dot.length ? `; last answer: ${told(shown.dot)}` : "";
  $("chart").setAttribute(
    "aria-label",
    `Share of drafted tokens accepted since the start: ${told(shown.bar) || "none"}${answer}`,
  );
}
