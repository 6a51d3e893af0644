// An answer on the screen: markdown or raw tokens, every visible character in a span that names its token's source.
// Text reaches the document as text nodes only.

// The part [start, end) of the answer's text, cut at token borders.
function emit(parent, answer, start, end) {
  const stop = Math.min(end, answer.text.length);
  let index = answer.tokenAfter(start);
  for (let at = start; at < stop; index++) {
    const token = answer.tokens[index];
    if (token && token.end <= at) continue;
    const until = token ? Math.min(stop, token.end) : stop;
    const piece = answer.text.slice(at, until);
    parent.append(token ? tokenSpan(answer, index, piece) : piece);
    at = until;
  }
}

function tokenSpan(answer, index, piece) {
  const token = answer.tokens[index];
  const begins = answer.rounds[token.round].first === index;
  return el(
    "span",
    { class: begins ? "t begins" : "t", "data-s": token.source, "data-r": token.round, "data-i": index },
    piece,
  );
}

// Inline markdown of some segments of the text.
function emitInline(parent, answer, segments) {
  const last = segments.length - 1;
  const source = segments.map(([start, end]) => answer.text.slice(start, end)).join("\n");
  const text = (node, from, to) => {
    let base = 0;
    segments.forEach(([start, end], i) => {
      const size = end - start + (i < last ? 1 : 0); // the line break belongs to its line
      const left = Math.max(from, base);
      const right = Math.min(to, base + size);
      if (left < right) emit(node, answer, start + left - base, start + right - base);
      base += size;
    });
  };
  const walk = (node, children) => {
    for (const child of children) {
      if (child.kind === "text") text(node, child.from, child.to);
      else {
        const link = { href: child.href, rel: "noopener noreferrer nofollow", target: "_blank" };
        const inner = child.kind === "link" ? el("a", link) : el(child.kind);
        walk(inner, child.children);
        node.append(inner);
      }
    }
  };
  walk(parent, parseInline(source));
  return parent;
}

const BLOCKS = {
  paragraph: (answer, block) => emitInline(el("p"), answer, block.segments),
  heading: (answer, block) => emitInline(el(`h${Math.min(6, block.level + 2)}`), answer, block.segments),
  quote: (answer, block) => emitInline(el("blockquote"), answer, block.segments),
  rule: () => el("hr"),
  code: codeBlock,
  list: listBlock,
  table: (answer, block) => {
    const row = (tag, cells) => el("tr", {}, ...cells.map((segments) => emitInline(el(tag), answer, segments)));
    const [head, ...rest] = block.rows;
    const body = el("tbody", {}, ...rest.map((cells) => row("td", cells)));
    const table = el("table", {}, el("thead", {}, row("th", head)), body);
    return el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Table" }, table);
  },
};

function codeBlock(answer, block) {
  const code = el("code");
  for (const [start, end] of block.segments) emit(code, answer, start, end);
  const head = el("div", { class: "code-head" }, el("span", {}, block.language || "code"));
  if (navigator.clipboard) {
    const copy = () => navigator.clipboard.writeText(code.textContent).then(() => say("Copied"));
    head.append(el("button", { type: "button", class: "quiet", onclick: copy }, "Copy"));
  }
  return el("div", { class: "code" }, head, el("pre", { tabindex: 0, role: "region", "aria-label": "Code" }, code));
}

function listBlock(answer, block) {
  const levels = []; // {indent, list}: the lists that are open, innermost last
  for (const item of block.items) {
    while (levels.length > 1 && item.indent < levels.at(-1).indent) levels.pop();
    let level = levels.at(-1);
    if (!level || item.indent > level.indent + 1) {
      const list = item.ordered ? el("ol", { start: item.number }) : el("ul");
      (level?.list.lastElementChild ?? level?.list)?.append(list);
      level = { indent: item.indent, list };
      levels.push(level);
    }
    level.list.append(emitInline(el("li"), answer, item.segments));
  }
  return levels[0].list;
}

// Keeps the document in step with an answer that only grows: finished blocks stay as they are.
class AnswerView {
  constructor(answer, body) {
    this.answer = answer;
    this.body = body;
    this.raw = false;
    this.drawn = []; // {key, node}
  }

  showRaw(raw) {
    this.raw = raw;
    this.drawn = [];
    this.body.replaceChildren();
    this.draw();
  }

  draw() {
    const parts = this.raw ? this.rawParts() : this.markdownParts();
    let same = 0;
    while (same < parts.length && this.drawn[same]?.key === parts[same].key) same++;
    for (const { node } of this.drawn.splice(same)) node.remove();
    for (const { key, make } of parts.slice(same)) {
      const node = make();
      node.setAttribute("dir", "auto");
      this.body.append(node);
      this.drawn.push({ key, node });
    }
  }

  markdownParts() {
    return parseBlocks(this.answer.text).map((block) => ({
      key: `${block.kind} ${block.start} ${block.end}`,
      make: () => BLOCKS[block.kind](this.answer, block),
    }));
  }

  // Every token, also those without text; one element a round.
  rawParts() {
    return this.answer.rounds.map((round, index) => ({
      key: `${index}`,
      make: () => {
        const label = round.drafted ? `${round.accepted}/${round.drafted}` : undefined;
        const node = el("span", { class: "round", "data-label": label });
        for (let i = round.first; i < round.last; i++) {
          const token = this.answer.tokens[i];
          const piece = this.answer.text.slice(token.start, token.end);
          node.append(tokenSpan(this.answer, i, piece.replaceAll("\n", "↵\n") || "∅"));
        }
        return node;
      },
    }));
  }
}
