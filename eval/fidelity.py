"""``python -m eval.fidelity``: how far each weight format is from float32, measured on a model, not assumed.

float32 continues some questions greedily; then every format reads the same tokens, and at each position its next token
and its distribution are compared with float32's: greedy agreement, and the Kullback-Leibler divergence from float32 in
nats. Runs the server's own model code in this process. Knows no serving.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from serve.kernels.kv_cache import KVCache
from serve.model.batch import FlatBatch
from serve.model.errors import ModelError
from serve.model.loader import load_target
from serve.model.target import TargetModel
from serve.tokenizer import TokenizerError, load_tokenizer

PAGE = 32
DEFAULT_MODEL = Path(__file__).resolve().parent.parent / "models" / "smollm2-135m-instruct"
QUESTIONS = (
    "What keeps a bicycle upright while it moves?",
    "Write a function that returns the median of a list.",
    "Why does Australia have its capital in Canberra?",
    "Name three causes of the French Revolution.",
    "How do I make pancakes for four people?",
    "What does a vaccine teach the body?",
    "Write four lines about a harbour in winter.",
    "Which numbers between 100 and 120 are prime?",
    "Ask my manager for a day off, in two sentences.",
    "What is the difference between weather and climate?",
)


@dataclass(frozen=True)
class Text:
    """One continued question: its tokens, and how many of them are the question."""

    ids: tuple[int, ...]
    question: int


@dataclass(frozen=True)
class Fidelity:
    """One format against float32 over ``positions`` next tokens. agreement: share with the same best token; kl: mean
    nats; worst_kl: the largest of one position; kernel: what ran, or why the format did not."""

    weights: str
    positions: int
    agreement: float
    kl: float
    worst_kl: float
    kernel: str


def continue_text(model: TargetModel, ids: Sequence[int], count: int) -> Text:
    """Greedy, ``count`` tokens, through an end-of-text token too: only the distributions matter."""
    cache, table = _room(model, len(ids) + count)
    tokens, done = list(ids), 0
    for _ in range(count):
        logits = _forward(model, tokens[done:], done, cache, table, last_only=True)
        done = len(tokens)
        tokens.append(int(logits[0].argmax()))
    return Text(tuple(tokens), len(ids))


def next_token_logs(model: TargetModel, text: Text) -> Tensor:
    """log P of the next token after the question's last token and after every token of the answer but the last."""
    cache, table = _room(model, len(text.ids))
    logits = _forward(model, text.ids[:-1], 0, cache, table, last_only=False)
    return logits[text.question - 1 :].log_softmax(1).cpu()


def compare(weights: str, kernel: str, want: Sequence[Tensor], got: Sequence[Tensor]) -> Fidelity:
    """want and got: log probabilities [positions, vocabulary] of each text."""
    reference, other = torch.cat(list(want)), torch.cat(list(got))
    same = (reference.argmax(1) == other.argmax(1)).float()
    divergence = (reference.exp() * (reference - other)).sum(1)
    return Fidelity(weights, len(same), float(same.mean()), float(divergence.mean()), float(divergence.max()), kernel)


def measure(
    model_dir: Path, formats: Sequence[str], device: torch.device, questions: int, tokens: int
) -> list[Fidelity]:
    """Every format in turn, one model in memory at a time. A format that the device does not serve says why."""
    tokenizer = load_tokenizer(model_dir)
    reference = load_target(model_dir, device=device, weights="fp32")
    texts = [
        continue_text(reference, tokenizer.encode(question, add_special_tokens=True), tokens)
        for question in QUESTIONS[:questions]
    ]
    want = [next_token_logs(reference, text) for text in texts]
    del reference
    found = []
    for weights in formats:
        try:
            model = load_target(model_dir, device=device, weights=weights)
        except ModelError as reason:
            found.append(Fidelity(weights, 0, float("nan"), float("nan"), float("nan"), str(reason)))
            continue
        found.append(compare(weights, model.kernel_path, want, [next_token_logs(model, text) for text in texts]))
        del model
    return found


def table(found: Sequence[Fidelity]) -> list[str]:
    lines = [f"{'weights':8}{'positions':>10}{'agreement':>11}{'KL':>10}{'worst KL':>10}  kernel"]
    for one in found:
        figures = f"{one.agreement:>11.4f}{one.kl:>10.5f}{one.worst_kl:>10.4f}" if one.positions else f"{'-':>31}"
        lines.append(f"{one.weights:8}{one.positions:>10}{figures}  {one.kernel}")
    return lines


def _room(model: TargetModel, tokens: int) -> tuple[KVCache, tuple[int, ...]]:
    pages = -(-tokens // PAGE)
    return model.allocate_cache(pages, PAGE), tuple(range(pages))


def _forward(
    model: TargetModel, ids: Sequence[int], first: int, cache: KVCache, table: tuple[int, ...], last_only: bool
) -> Tensor:
    """Logits [rows, vocabulary] of one sequence's tokens from position ``first`` on, or of the last alone."""
    device = model.device
    positions = torch.arange(first, first + len(ids), device=device)
    rows = torch.arange(len(ids), device=device)
    batch = FlatBatch(
        token_ids=torch.tensor(ids, device=device),
        positions=positions,
        slots=positions,
        visible=positions + 1,
        query_starts=(0, len(ids)),
        page_tables=(table,),
        logit_rows=rows[-1:] if last_only else rows,
    )
    return model.forward(batch, cache).logits


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m eval.fidelity", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL, help="model folder (default: the default model)")
    parser.add_argument("--formats", default="int8,int4", help="weight formats, comma-separated (default: int8,int4)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where to run (default: cpu)")
    parser.add_argument("--questions", type=int, default=len(QUESTIONS), help=f"1 to {len(QUESTIONS)} (default: all)")
    parser.add_argument("--tokens", type=int, default=60, help="tokens of each answer (default: 60)")
    parser.add_argument("--json", type=Path, help="write the result here")
    args = parser.parse_args(argv)
    if not 1 <= args.questions <= len(QUESTIONS):
        parser.error(f"--questions must be 1 to {len(QUESTIONS)}, got {args.questions}")
    if args.tokens < 1:
        parser.error(f"--tokens must be at least 1, got {args.tokens}")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: no CUDA card is visible")
    try:
        found = measure(args.model, args.formats.split(","), torch.device(args.device), args.questions, args.tokens)
    except (ModelError, TokenizerError, OSError) as fault:
        parser.error(str(fault))
    print(f"{args.model} against float32, next tokens of its own greedy answers:")
    print("\n".join(table(found)))
    if args.json:
        record = {"model": str(args.model), "tokens": args.tokens, "formats": [asdict(one) for one in found]}
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
