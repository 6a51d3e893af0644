// Markdown as a tree whose leaves are slices of the source, so that every visible character keeps its token.
// Parsing only: offsets in, plain objects out. What is not understood stays text. Knows no DOM and no tokens.
//
// A block is {kind, start, end, ...}; inline content is a list of segments [start, end), prefixes of lines left out.

const FENCE = /^(\s*)(`{3,}|~{3,})\s*([\w+#.-]*)[^`]*$/;
const HEADING = /^( {0,3}(#{1,6})\s+)/;
const RULE = /^ {0,3}([-*_])(\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])(\s+)(?=\S)/;
const TABLE_RULE = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;

function splitLines(text) {
  const lines = [];
  for (let start = 0; start <= text.length;) {
    const found = text.indexOf("\n", start);
    const end = found < 0 ? text.length : found;
    lines.push({ start, end, text: text.slice(start, end) });
    start = end + 1;
  }
  return lines;
}

function parseBlocks(text) {
  const lines = splitLines(text);
  const blocks = [];
  let i = 0;
  const isTable = (at) =>
    lines[at].text.includes("|") && lines[at + 1]?.text.includes("|") && TABLE_RULE.test(lines[at + 1].text);
  const startsBlock = (at) => {
    const line = lines[at].text;
    return [FENCE, HEADING, RULE, QUOTE, ITEM].some((rule) => rule.test(line)) || isTable(at);
  };
  while (i < lines.length) {
    const line = lines[i];
    const first = i;
    let match;
    const add = (block) => blocks.push({ ...block, start: line.start, end: lines[i - 1].end });
    if (!line.text.trim()) {
      i++;
    } else if ((match = FENCE.exec(line.text))) {
      const [, indent, ticks, language] = match;
      const close = new RegExp(`^\\s*${ticks[0]}{${ticks.length},}\\s*$`);
      for (i++; i < lines.length && !close.test(lines[i].text);) i++;
      const body = lines.slice(first + 1, i);
      if (i < lines.length) i++;
      add({ kind: "code", language, segments: body.map((row) => codeLine(row, indent.length)) });
    } else if ((match = HEADING.exec(line.text))) {
      i++;
      add({ kind: "heading", level: match[2].length, segments: [[line.start + match[1].length, line.end]] });
    } else if (RULE.test(line.text)) {
      i++;
      add({ kind: "rule" });
    } else if (QUOTE.test(line.text)) {
      while (i < lines.length && QUOTE.test(lines[i].text)) i++;
      add({
        kind: "quote",
        segments: lines.slice(first, i).map((row) => [row.start + QUOTE.exec(row.text)[0].length, row.end]),
      });
    } else if (isTable(i)) {
      const rows = [cells(line)];
      for (i += 2; i < lines.length && lines[i].text.includes("|"); i++) rows.push(cells(lines[i]));
      add({ kind: "table", rows });
    } else if (ITEM.test(line.text)) {
      const items = [];
      for (; i < lines.length; i++) {
        const row = lines[i];
        if ((match = ITEM.exec(row.text)) && !RULE.test(row.text)) {
          const [whole, indent, marker] = match;
          const ordered = /\d/.test(marker);
          const segments = [[row.start + whole.length, row.end]];
          items.push({ indent: indent.length, ordered, number: parseInt(marker, 10), segments });
        } else if (row.text.trim() && !startsBlock(i)) {
          items.at(-1).segments.push([row.start + /^\s*/.exec(row.text)[0].length, row.end]);
        } else if (row.text.trim() || !ITEM.test(lines[i + 1]?.text ?? "")) {
          break; // something else, or a blank line with no item after it
        }
      }
      add({ kind: "list", items });
    } else {
      for (i++; i < lines.length && lines[i].text.trim() && !startsBlock(i);) i++;
      add({ kind: "paragraph", segments: [[line.start, lines[i - 1].end]] });
    }
  }
  return blocks;
}

// A line of code without the fence's own indent, its line break included.
function codeLine(row, indent) {
  const own = /^\s*/.exec(row.text)[0].length;
  return [row.start + Math.min(indent, own), row.end + 1];
}

function cells(row) {
  const found = [];
  let from = row.start;
  for (let at = row.start; at <= row.end; at++) {
    if (at === row.end || (row.text[at - row.start] === "|" && row.text[at - row.start - 1] !== "\\")) {
      const raw = row.text.slice(from - row.start, at - row.start);
      const left = raw.length - raw.trimStart().length;
      if (raw.trim() || (from > row.start && at < row.end)) found.push([[from + left, from + raw.trimEnd().length]]);
      from = at + 1;
    }
  }
  return found;
}

// Inline content: a list of nodes {kind: "text", from, to} and {kind, from, to, children, href?} over `source`, which is
// the segments' text joined by line breaks. Positions are in `source`.
const DELIMITERS = ["***", "**", "__", "~~", "*", "_"];
const KINDS = { "***": "strong", "**": "strong", __: "strong", "~~": "del", "*": "em", _: "em" };
const MAX_DEPTH = 12;

function parseInline(source, from = 0, to = source.length, depth = 0) {
  const nodes = [];
  const hopeless = new Set(); // delimiters with no end ahead: looked for once
  let plain = from;
  let at = from;
  const flush = () => plain < at && nodes.push({ kind: "text", from: plain, to: at });
  const push = (node, next) => {
    flush();
    nodes.push(node);
    plain = at = next;
  };
  while (at < to) {
    const character = source[at];
    let found;
    if (character === "\\" && at + 1 < to && /[!-/:-@[-`{-~]/.test(source[at + 1])) {
      flush();
      plain = at + 1;
      at += 2;
    } else if (character === "`") {
      let ticks = 1;
      while (at + ticks < to && source[at + ticks] === "`") ticks++;
      const end = hopeless.has(ticks) ? -1 : closingTicks(source, at + ticks, to, ticks);
      if (end < 0) {
        hopeless.add(ticks);
        at += ticks;
      } else {
        push({ kind: "code", children: [{ kind: "text", from: at + ticks, to: end }] }, end + ticks);
      }
    } else if (character === "[" && (found = linkAt(source, at, to))) {
      push(
        { kind: "link", href: found.href, children: parseInline(source, at + 1, found.close, depth + 1) },
        found.end,
      );
    } else if (character === "h" && (found = addressAt(source, at, to))) {
      push({ kind: "link", href: found.href, children: [{ kind: "text", from: at, to: found.end }] }, found.end);
    } else if (depth < MAX_DEPTH && (found = DELIMITERS.find((mark) => source.startsWith(mark, at)))) {
      const opens = !hopeless.has(found) && isOpening(source, at, to, found);
      const end = opens ? closingMark(source, at + found.length, to, found) : -1;
      if (end < 0) {
        if (opens) hopeless.add(found);
        at += found.length;
      } else {
        const children = parseInline(source, at + found.length, end, depth + 1);
        push({ kind: KINDS[found], children }, end + found.length);
      }
    } else {
      at++;
    }
  }
  flush();
  return nodes;
}

function closingTicks(source, from, to, count) {
  for (let at = source.indexOf("`", from); at >= 0 && at < to; at = source.indexOf("`", at)) {
    let end = at;
    while (end < to && source[end] === "`") end++;
    if (end - at === count) return at;
    at = end;
  }
  return -1;
}

const WORD = /[\p{L}\p{N}]/u;

function isOpening(source, at, to, mark) {
  const after = at + mark.length;
  return after < to && !/\s/.test(source[after]) && !(mark[0] === "_" && at > 0 && WORD.test(source[at - 1]));
}

function closingMark(source, from, to, mark) {
  for (
    let end = source.indexOf(mark, from + 1);
    end >= 0 && end + mark.length <= to;
    end = source.indexOf(mark, end + 1)
  ) {
    const next = source[end + mark.length] ?? " ";
    const doubled = mark.length === 1 && (next === mark || source[end - 1] === mark);
    if (!/\s/.test(source[end - 1]) && !doubled && !(mark[0] === "_" && WORD.test(next))) return end;
  }
  return -1;
}

// [text](address "title"), only with an address that safeAddress takes.
function linkAt(source, at, to) {
  const ahead = source.slice(at, Math.min(to, at + 1000)).indexOf("](");
  const close = at + ahead;
  if (ahead < 0) return null;
  if (source.slice(at + 1, close).includes("[") || source.slice(at, close).includes("\n\n")) return null;
  const match = /^\(\s*<?([^\s<>()]*(?:\([^\s<>()]*\)[^\s<>()]*)*)>?(?:\s+"[^"\n]*")?\s*\)/.exec(
    source.slice(close + 1, Math.min(to, close + 2049)),
  );
  const href = match && safeAddress(match[1]);
  return href ? { close, href, end: close + 1 + match[0].length } : null;
}

function addressAt(source, at, to) {
  if (/[\p{L}\p{N}]/u.test(source[at - 1] ?? " ")) return null;
  const match = /^https?:\/\/[^\s<>"'`[\]()*]+/.exec(source.slice(at, Math.min(to, at + 2048)));
  if (!match) return null;
  const shown = match[0].replace(/[.,;:!?_~]+$/, "");
  const href = safeAddress(shown);
  return href ? { href, end: at + shown.length } : null;
}

// The address when it is absolute http or https, else null: javascript:, data: and friends never become links.
function safeAddress(address) {
  if (!/^https?:\/\//i.test(address)) return null;
  try {
    const url = new URL(address);
    return url.protocol === "http:" || url.protocol === "https:" ? url.href : null;
  } catch {
    return null;
  }
}
