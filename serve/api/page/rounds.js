// Walking through the rounds of an answer, by pointer or by keyboard: the round is marked and told in a few words.

function showRound(view, index, anchor) {
  hideRound();
  const marked = view.body.querySelectorAll(`[data-r="${index}"]`);
  marked.forEach((node) => node.classList.add("on"));
  const near = anchor ?? marked[0];
  const tip = $("tip");
  tip.textContent = describeRound(view.answer, index);
  tip.hidden = false;
  if (!near) return;
  const box = near.getClientRects()[0] ?? near.getBoundingClientRect();
  const left = Math.min(Math.max(8, box.left), document.documentElement.clientWidth - tip.offsetWidth - 8);
  tip.style.left = `${left}px`;
  tip.style.top = `${box.top > tip.offsetHeight + 12 ? box.top - tip.offsetHeight - 8 : box.bottom + 8}px`;
}

function hideRound() {
  $("tip").hidden = true;
  document.querySelectorAll(".t.on").forEach((node) => node.classList.remove("on"));
}

function watchRounds(view) {
  const { body, answer } = view;
  let current = -1;
  const over = (event) => {
    const token = event.target.closest?.(".t");
    if (token) showRound(view, (current = Number(token.dataset.r)), token);
    else hideRound();
  };
  body.addEventListener("pointerover", over);
  body.addEventListener("pointerdown", over);
  body.addEventListener("pointerleave", hideRound);
  body.addEventListener("blur", hideRound);
  body.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key === "Escape") hideRound();
    if (!step || event.target !== body || !answer.rounds.length) return;
    event.preventDefault();
    current = Math.min(Math.max(0, current + step), answer.rounds.length - 1);
    const { first, last } = answer.rounds[current];
    showRound(view, current);
    body.querySelector(`[data-r="${current}"]`)?.scrollIntoView({ block: "nearest" });
    const from = answer.tokens[first]?.start ?? 0;
    say(`${describeRound(answer, current)}. ${answer.text.slice(from, answer.tokens[last - 1]?.end ?? from)}`);
  });
}
