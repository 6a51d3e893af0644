// What one answer is made of: its text, its tokens with their sources, and the rounds that made them. Knows no DOM.

class Answer {
  constructor() {
    this.text = "";
    this.tokens = []; // {start, end, id, source, round}: the part of text that belongs to a token; start == end for none
    this.rounds = []; // {proposer, drafted, accepted, first, last}: tokens first to last (exclusive); drafted null: prompt pass
    this.finish = null;
    this.firstAt = null; // milliseconds, performance.now()
    this.lastAt = null;
    this.firstCount = 0; // tokens of the first chunk: what came after them took lastAt - firstAt
  }

  // One chunk's choice.
  take(choice, now) {
    let at = this.text.length;
    this.text += choice.delta.content ?? "";
    for (const entry of choice.provenance ?? []) {
      const round = entry.round ?? { proposer: null, drafted: null, accepted: 0 };
      this.rounds.push({ ...round, first: this.tokens.length, last: this.tokens.length + entry.tokens.length });
      for (const token of entry.tokens) {
        const end = at + token.text.length;
        this.tokens.push({ start: at, end, id: token.id, source: token.source, round: this.rounds.length - 1 });
        at = end;
      }
    }
    this.finish = choice.finish_reason ?? this.finish;
    if (this.firstAt === null) {
      this.firstAt = now;
      this.firstCount = this.tokens.length;
    }
    this.lastAt = now;
  }

  count(source) {
    return this.tokens.filter((token) => token.source === source).length;
  }

  get decodeRounds() {
    return this.rounds.filter((round) => round.drafted !== null);
  }

  // Tokens a second after the first chunk; NaN when what came after it was too short to say.
  get rate() {
    const seconds = (this.lastAt - this.firstAt) / 1000;
    return seconds > 0.05 ? (this.tokens.length - this.firstCount) / seconds : NaN;
  }

  // Share of the rounds with a draft that kept position i, for i from 0: what the server's counters say for all answers.
  get positions() {
    const drafts = this.rounds.filter((round) => round.drafted);
    const longest = Math.max(0, ...drafts.map((round) => round.accepted));
    return Array.from(
      { length: longest },
      (_, i) => drafts.filter((round) => round.accepted > i).length / drafts.length,
    );
  }

  // Index of the first token that ends after position `at` of the text.
  tokenAfter(at) {
    let low = 0;
    let high = this.tokens.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.tokens[middle].end > at) high = middle;
      else low = middle + 1;
    }
    return low;
  }
}

const PROPOSERS = { block: "block drafter", lookup: "prompt lookup" };

function describeRound(answer, index) {
  const round = answer.rounds[index];
  if (round.drafted === null) return "From the prompt pass: the target’s own";
  const name = `Round ${answer.rounds.slice(0, index + 1).filter((r) => r.drafted !== null).length}`;
  if (!round.drafted) return `${name}: nothing drafted, the target’s own`;
  return `${name}: ${PROPOSERS[round.proposer] ?? round.proposer} drafted ${round.drafted}, kept ${round.accepted}`;
}
