"""``python -m eval.fidelity``: how far each weight format is from float32, measured on a model, not assumed.

float32 continues some questions greedily; then every format reads the same tokens, and at each position its next token
and its distribution are compared with float32's: greedy agreement, and the Kullback-Leibler divergence from float32 in
nats. Runs the server's own model code in this process; the card's formats also on a CPU (``--card``), with
input-channel scales, and with prompts in int8 x int8 or fp8 x fp8. Knows no serving.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from eval.card_twin import CardTwin
from eval.json_report import write_report
from serve.kernels.formats import CARD_FORMATS, HOST_FORMATS
from serve.kernels.kv_cache import KVCache
from serve.model.batch import FlatBatch
from serve.model.channel_scales import NO_SCALES, read_channel_scales
from serve.model.config import load_model_config
from serve.model.errors import ModelError
from serve.model.loader import Storage, load_target
from serve.model.target import TargetModel
from serve.model.weights_map import WeightsMap, read_weights_map
from serve.tokenizer import TokenizerError, load_tokenizer

PAGE = 32
KINDS = {"w8a8": (2, "gated rows in int8"), "fp8": (1, "gated rows in 16 bits")}
"""Ways of a prompt in 8 bits: bytes of the gated rows as they are served, and the name of the other choice."""
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


def next_token_logs(model: TargetModel, text: Text, prompt: int = 0) -> Tensor:
    """log P of the next token after the question's last token and after every token of the answer but the last. prompt:
    so many of the text's tokens come as a card's prompt would, in 8 bits (a CardTwin's)."""
    cache, table = _room(model, len(text.ids))
    ids, parts = text.ids[:-1], []
    for first, stop in ((0, min(prompt, len(ids))), (min(prompt, len(ids)), len(ids))):
        if isinstance(model, CardTwin):
            model.switch.on = first < prompt
        if first < stop:
            parts.append(_forward(model, ids[first:stop], first, cache, table, last_only=False))
    return torch.cat(parts)[text.question - 1 :].log_softmax(1).cpu()


def compare(weights: str, kernel: str, want: Sequence[Tensor], got: Sequence[Tensor]) -> Fidelity:
    """want and got: log probabilities [positions, vocabulary] of each text."""
    reference, other = torch.cat(list(want)), torch.cat(list(got))
    same = (reference.argmax(1) == other.argmax(1)).float()
    divergence = (reference.exp() * (reference - other)).sum(1)
    return Fidelity(weights, len(same), float(same.mean()), float(divergence.mean()), float(divergence.max()), kernel)


@dataclass(frozen=True)
class Choice:
    """What is measured: a format's name or the path of a weights map, maybe with a file of scales. prompts: "" or what
    goes through 8 bits, "questions" or "all"; kind: ``w8a8`` or ``fp8``; halves: bytes of the gated rows there."""

    weights: str
    card: bool = False
    scales: Path | None = None
    prompts: str = ""
    kind: str = "w8a8"
    halves: int = 2

    @property
    def map_path(self) -> Path | None:
        return Path(self.weights) if self.weights.endswith(".json") else None

    @property
    def label(self) -> str:
        served, other = KINDS[self.kind]
        more = [
            self.map_path.name if self.map_path is not None else self.weights,
            "scaled" if self.scales is not None else "",
            f"{self.kind} {self.prompts}" if self.prompts else "",
            other if self.prompts and self.halves != served else "",
        ]
        return ", ".join(filter(None, more))

    def load(self, model_dir: Path, device: torch.device) -> TargetModel:
        """Raises ModelError."""
        if not self.card:
            storage = Storage("auto" if self.map_path else self.weights, self.map_path)
            return load_target(model_dir, device=device, storage=storage)
        config = load_model_config(model_dir)
        if self.map_path is not None:
            plan = read_weights_map(self.map_path, config.num_layers, CARD_FORMATS, None)
        elif self.weights in CARD_FORMATS:
            plan = WeightsMap(self.weights)
        else:
            raise ModelError(f"--formats: {self.weights!r} is none of {', '.join(CARD_FORMATS)}")
        path = self.scales or plan.scales
        model = CardTwin(model_dir, plan, read_channel_scales(path, config) if path else NO_SCALES)
        model.switch.kind, model.switch.halves = self.kind, self.halves
        return model

    def prompt_tokens(self, text: Text) -> int:
        return {"": 0, "questions": text.question, "all": len(text.ids)}[self.prompts]


def choices(formats: Sequence[str], card: bool, scales: Path | None, kinds: Sequence[str]) -> list[Choice]:
    """Every format, with scales too where there are some, and with prompts in 8 bits of each kind."""
    found = []
    for weights in formats:
        variants = [Choice(weights, card)]
        if scales is not None:
            variants.append(Choice(weights, card, scales))
        found += variants + [
            replace(one, prompts=which, kind=kind, halves=halves)
            for kind in kinds
            for one in variants
            for which, halves in (("questions", KINDS[kind][0]), ("all", KINDS[kind][0]), ("all", 3 - KINDS[kind][0]))
        ]
    return found


def measure(
    model_dir: Path, wanted: Sequence[Choice], device: torch.device, questions: int, tokens: int
) -> list[Fidelity]:
    """Every choice in turn, one model in memory at a time; after Ctrl-C those that are finished. A format that the
    device does not serve says why."""
    tokenizer = load_tokenizer(model_dir)
    reference = load_target(model_dir, device=device, weights="fp32")
    texts = [
        continue_text(reference, tokenizer.encode(question, add_special_tokens=True), tokens)
        for question in QUESTIONS[:questions]
    ]
    want = [next_token_logs(reference, text) for text in texts]
    del reference
    found: list[Fidelity] = []
    for choice in wanted:
        try:
            model = choice.load(model_dir, device)
            got = [next_token_logs(model, text, choice.prompt_tokens(text)) for text in texts]
        except ModelError as reason:
            found.append(Fidelity(choice.label, 0, float("nan"), float("nan"), float("nan"), str(reason)))
            continue
        except KeyboardInterrupt:
            print(f"interrupted: {len(found)} of {len(wanted)} formats are kept", file=sys.stderr)
            break
        found.append(compare(choice.label, model.kernel_path, want, got))
        del model
    return found


def table(found: Sequence[Fidelity]) -> list[str]:
    width = max(8, *(len(one.weights) + 1 for one in found))
    lines = [f"{'weights':{width}}{'positions':>10}{'agreement':>11}{'KL':>10}{'worst KL':>10}  kernel"]
    for one in found:
        figures = f"{one.agreement:>11.4f}{one.kl:>10.5f}{one.worst_kl:>10.4f}" if one.positions else f"{'-':>31}"
        lines.append(f"{one.weights:{width}}{one.positions:>10}{figures}  {one.kernel}")
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
    parser.add_argument(
        "--formats", default="int8,int4", help="formats, or weights maps (*.json), comma-separated (default: int8,int4)"
    )
    parser.add_argument(
        "--card", action="store_true", help="a CUDA card's formats by what their codes stand for, on this CPU"
    )
    parser.add_argument("--scales", type=Path, help="with --card: each format also with these input-channel scales")
    parser.add_argument("--w8a8", action="store_true", help="with --card: each format also with prompts in int8 x int8")
    parser.add_argument("--fp8", action="store_true", help="with --card: each format also with prompts in fp8 x fp8")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where to run (default: cpu)")
    parser.add_argument("--questions", type=int, default=len(QUESTIONS), help=f"1 to {len(QUESTIONS)} (default: all)")
    parser.add_argument("--tokens", type=int, default=60, help="tokens of each answer (default: 60)")
    parser.add_argument("--json", type=Path, help="write the result here")
    args = parser.parse_args(argv)
    if not 1 <= args.questions <= len(QUESTIONS):
        parser.error(f"--questions must be 1 to {len(QUESTIONS)}, got {args.questions}")
    if args.tokens < 1:
        parser.error(f"--tokens must be at least 1, got {args.tokens}")
    if args.card and args.device == "cuda":
        parser.error("--card is for a CPU; on a card its formats are measured without it")
    kinds = [kind for kind in KINDS if getattr(args, kind)]
    if not args.card and (args.scales or kinds):
        parser.error("--scales, --w8a8 and --fp8 need --card (a weights map may name scales anywhere)")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: no CUDA card is visible")
    named = args.formats.split(",")
    if strange := [name for name in named if not name.endswith(".json") and name not in (*HOST_FORMATS, *CARD_FORMATS)]:
        parser.error(f"--formats: {strange[0]!r} is none of {', '.join(CARD_FORMATS)}, and no weights map (*.json)")
    wanted = choices(named, args.card, args.scales, kinds)
    try:
        found = measure(args.model, wanted, torch.device(args.device), args.questions, args.tokens)
    except (ModelError, TokenizerError, OSError) as fault:
        parser.error(str(fault))
    print(f"{args.model} against float32, next tokens of its own greedy answers:")
    print("\n".join(table(found)))
    if args.json:
        record = {"model": str(args.model), "tokens": args.tokens, "formats": [asdict(one) for one in found]}
        write_report(args.json, record)
    return 0 if len(found) == len(wanted) else 130


if __name__ == "__main__":
    sys.exit(main())
