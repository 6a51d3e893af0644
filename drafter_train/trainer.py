"""The training loop: batches in, a drafter folder out.

One optimiser step: the target runs over the batch, blocks start at random anchors, the drafter drafts them all, the
weighted loss through the frozen head gives gradients that are summed over micro batches and processes and divided by
the summed weight, so the split into either changes nothing but rounding. This file knows no command line.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drafter_train.chat import ChatTokenizer
from drafter_train.checkpoints import export_drafter, load_checkpoint, save_checkpoint
from drafter_train.cluster import Cluster
from drafter_train.corpus import Batch, BatchOrder, Corpus, load_corpus, make_batch
from drafter_train.loss import LossSums, Weighting
from drafter_train.optim import build_optimizers, lr_factor, set_lr
from drafter_train.progress import say
from drafter_train.recipe import Recipe
from drafter_train.simulate import simulate
from drafter_train.stepper import Stepper, flatten_gradients
from drafter_train.tapcache import TapCache
from drafter_train.target import Target
from drafter_train.tokens import TokenStore, write_atomically
from drafter_train.warmstart import build_drafter, draft_config
from serve.drafter.dflash import DFlashModel


class TrainingError(RuntimeError):
    """Training cannot go on or is not worth going on; the message says why."""


class Feed:
    """Batches of this process, made a few steps ahead in a thread."""

    def __init__(
        self, corpus: Corpus, recipe: Recipe, cluster: Cluster, start: int, cache: TapCache | None = None
    ) -> None:
        train = recipe.train
        self.order = BatchOrder(corpus.lengths, train.batch_sequences, train.seed)
        self._corpus, self._train, self._cluster, self._cache = corpus, train, cluster, cache
        self._pool = ThreadPoolExecutor(max_workers=1)
        self._next = start
        self._waiting: list[Future[tuple[Batch, Tensor | None]]] = [self._submit() for _ in range(6)]

    def _make(self, step: int) -> tuple[Batch, Tensor | None]:
        train, cluster, samples = self._train, self._cluster, self.order(step)
        batch = make_batch(
            self._corpus, samples, train.anchors, train.seed, step, cluster.rank, cluster.world, train.replay_weight
        )
        rows = self._cache.rows(samples[cluster.rank :: cluster.world], batch.ids.shape[1]) if self._cache else None
        return batch, rows

    def _submit(self) -> Future[tuple[Batch, Tensor | None]]:
        self._next += 1
        return self._pool.submit(self._make, self._next - 1)

    def take(self) -> tuple[Batch, Tensor | None]:
        """This process's share of the next step's batch, and where its taps are kept."""
        self._waiting.append(self._submit())
        return self._waiting.pop(0).result()

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


class Clock:
    """How far the run is, 0 to 1, from steps or from time, whichever is further. Seconds of earlier runs count."""

    def __init__(self, recipe: Recipe, steps_per_epoch: int, seconds: float, progress: float) -> None:
        train = recipe.train
        # A part of an epoch, however small, is a step: none at all would mean no limit.
        limits = [train.max_steps, max(1, int(train.epochs * steps_per_epoch)) if train.epochs else 0]
        self.max_steps = min([limit for limit in limits if limit], default=0)
        self.max_seconds = train.max_seconds
        self._before, self._started = seconds, time.monotonic()
        self._from: tuple[float, float] | None = None
        # With more time than the run had before, it is less far.
        self._resumed_at = min(progress, seconds / self.max_seconds) if self.max_seconds else progress

    def seconds(self) -> float:
        return self._before + time.monotonic() - self._started

    def first_step_done(self) -> None:
        """Time counts from here: compiling and loading do not eat the warm-up. The end stays where it was."""
        if self._from is None:
            self._from = (self.seconds(), self._resumed_at)

    def progress(self, step: int) -> float:
        by_steps = step / self.max_steps if self.max_steps else 0.0
        by_time = 0.0
        if self.max_seconds:
            start, done = self._from or (self.seconds(), self._resumed_at)
            left = max(self.max_seconds - start, 1e-9)
            by_time = done + (1 - done) * (self.seconds() - start) / left
        return max(by_steps, by_time)


def check_fingerprint(store: TokenStore, recipe: Recipe) -> dict[str, Any]:
    """The store must have been written with this target's template, mode and tokenizer. Raises TrainingError."""
    fingerprint = ChatTokenizer(recipe.target, recipe.data.thinking).fingerprint
    differences = fingerprint.differences(store.meta["fingerprint"])
    if differences:
        raise TrainingError(
            f"{store.folder} was written with another chat setup than {recipe.target}: {differences[0]}"
        )
    return fingerprint.to_json()


def check_processes(cluster: Cluster, recipe: Recipe, step: int, sequences: str) -> None:
    """All processes must go on from one step with one recipe and one corpus: a folder that is not shared, or that a
    node sees as it was some time ago, would train on quietly. Raises TrainingError in each of them."""
    for name, what in (
        ("recipe", repr(recipe)),
        (f"checkpoint in {recipe.train.output}", str(step)),
        (f"sequences in {recipe.data.tokens}", sequences),
    ):
        odd = cluster.odd_ones(what)
        if odd:
            raise TrainingError(
                f"process {odd[0]} finds another {name} than process 0: every node must see the same files"
            )


def train(
    recipe: Recipe, *, device: str | None = None, stop: Callable[[], bool] = lambda: False, stop_after: int = 0
) -> bool:
    """Run or continue the recipe. True when it is finished and exported, False when it was asked to stop and saved.
    Raises TrainingError, and ValueError for a recipe that does not fit the target."""
    settings = recipe.train
    output = Path(settings.output)
    output.mkdir(parents=True, exist_ok=True)
    cluster = Cluster(settings.trackers, str(output), device)
    precision = settings.precision
    if precision == "auto":
        precision = "bf16" if cluster.device.type == "cuda" else "fp32"
    torch.backends.cuda.matmul.allow_tf32 = True
    if cluster.device.type == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream())  # type: ignore[no-untyped-call]
    target = Target.load(recipe.target, cluster.device, torch.bfloat16 if precision == "bf16" else torch.float32)
    store = TokenStore(recipe.data.tokens)
    fingerprint = check_fingerprint(store, recipe)
    corpus = load_corpus(store, recipe.data.max_length, recipe.data.anchors_in_sampled)
    eval_store = TokenStore(recipe.data.eval_tokens)
    check_fingerprint(eval_store, recipe)
    held_out = load_corpus(eval_store, recipe.data.max_length)
    config = draft_config(recipe.draft, target.config)
    probe = _probe(corpus).to(cluster.device)
    model = build_drafter(config, recipe.init, target, probe, settings.seed)
    optimizers = build_optimizers(model, settings)
    state = load_checkpoint(output, model, optimizers, recipe.sha256())
    step = state["step"] if state else 0
    sequences = corpus.sha256()
    check_processes(cluster, recipe, step, sequences)
    cache = open_tap_cache(corpus, recipe, cluster, len(config.target_layer_ids), config.hidden_size, target.dtype)
    feed = Feed(corpus, recipe, cluster, step, cache)
    before = (state["seconds"], state["progress"]) if state else (0.0, 0.0)
    clock = Clock(recipe, feed.order.steps_per_epoch, *before)
    if cluster.is_main:
        count = sum(p.numel() for p in model.parameters())
        say(
            f"{recipe.name}: {len(corpus)} sequences ({corpus.dropped} dropped), {int(corpus.lengths.sum())} tokens, "
            f"{feed.order.steps_per_epoch} steps an epoch, {count / 1e6:.2f} M parameters, {cluster.world} processes, "
            f"{precision} on {cluster.device}, step {step}"
        )
        if state and state.get("sequences", sequences) != sequences:
            say(
                f"{store.folder} has changed since step {step} was saved: the order is that of the new sequences from "
                "here, so an epoch may hold some twice and others not"
            )
    log = Log(output, cluster, settings.trackers, recipe, state)
    gradients = flatten_gradients(model)
    stepper = Stepper(recipe, model, target, gradients, cache)
    weight = torch.zeros(1, device=cluster.device)
    saved_at, started_at, progress = time.monotonic(), step, before[1]
    eval_samples = list(range(min(settings.eval_sequences, len(held_out))))
    checked = False

    def save() -> None:
        if cluster.is_main:
            bad = [n for n, p in model.named_parameters() if not bool(torch.isfinite(p).all())]
            if bad:
                raise TrainingError(f"step {step}: {bad[0]} is not finite; the last good state is in {output}")
            entry = {
                "step": step,
                "seconds": clock.seconds(),
                "progress": progress,
                "recipe_sha256": recipe.sha256(),
                "recipe": recipe.to_json(),
                "sequences": sequences,
            }
            save_checkpoint(output, model, optimizers, entry, settings.keep_checkpoints)
        cluster.wait()

    try:
        while True:
            progress, saving, stopping = cluster.agree(
                clock.progress(step),
                time.monotonic() - saved_at > settings.save_every_seconds,
                stop() or (stop_after > 0 and step - started_at >= stop_after),
            )
            if saving or (stopping and progress < 1):
                save()
                saved_at = time.monotonic()
            if stopping and progress < 1:
                return False
            if progress >= 1:
                break
            weighting = Weighting(
                "decay" if settings.loss == "decay" or progress < settings.decay_until else "dpace",
                settings.dpace_alpha,
                settings.decay_gamma,
            )
            factor = lr_factor(progress, settings.warmup, settings.final_lr)
            set_lr(optimizers, factor)
            batch, rows = feed.take()
            weight.zero_()
            gradients.zero_()
            for start in range(0, len(batch), settings.micro_sequences):
                stop_at = start + settings.micro_sequences
                sums = stepper(batch.rows(start, stop_at), weighting, None if rows is None else rows[start:stop_at])
                weight += sums.weight
                log.add(sums)
            cluster.sum_([gradients])
            cluster.sum_([weight])
            gradients /= weight
            norm = torch.linalg.vector_norm(gradients)
            gradients *= (settings.clip / (norm + 1e-6)).clamp(max=1.0)
            for optimizer in optimizers:
                optimizer.step()
            step += 1
            clock.first_step_done()
            if step % settings.log_every == 0:
                log.write(step, progress, settings.lr * factor, float(norm), clock.seconds())
            if settings.eval_every and step % settings.eval_every == 0:
                if cluster.is_main:
                    report = log.evaluate(
                        step, simulate(model, target, held_out, eval_samples, recall=False, fused=stepper.fused)
                    )
                    if not checked and progress >= 0.2:
                        fail_fast(recipe, model, target, held_out, eval_samples, report)
                        checked = True
                cluster.wait()
    finally:
        feed.close()
    save()
    final = output / "final"
    if cluster.is_main and step == started_at and _exported_steps(final) == step:
        say(f"{final} is of this step already, and stays as it is")
    elif cluster.is_main:
        extra = {
            "training.json": {
                "recipe": recipe.to_json(),
                "fingerprint": fingerprint,
                "steps": step,
                "seconds": round(clock.seconds(), 1),
                "sequences": len(corpus),
                "tokens": int(corpus.lengths.sum()),
            }
        }
        export_drafter(final, model, extra)
        say(f"finished at step {step} after {clock.seconds():.0f} s: {final}")
    cluster.wait()
    log.close()
    cluster.close()
    return True


def _exported_steps(folder: Path) -> int:
    """How long the drafter in ``folder`` was trained; -1 without one. Its evaluation lies there too."""
    try:
        return int(json.loads((folder / "training.json").read_text(encoding="utf-8"))["steps"])
    except (OSError, ValueError, KeyError):
        return -1


def open_tap_cache(
    corpus: Corpus, recipe: Recipe, cluster: Cluster, taps: int, hidden_size: int, dtype: torch.dtype
) -> TapCache | None:
    """A cache for this process's share when the recipe wants one and it fits."""
    limit, size = recipe.train.tap_cache_gb, taps * hidden_size
    if not limit or cluster.device.type != "cuda":
        return None
    parts = taps if recipe.train.tap_cache_bits == 8 else 0
    best = recipe.train.kl_top if recipe.train.kl_weight > 0 else 0
    need = TapCache.gigabytes(corpus, cluster.rank, cluster.world, size, dtype, parts, best)
    if need > limit:
        say(f"the taps of this share need {need:.0f} GB, train.tap_cache_gb is {limit:.0f}: they are computed anew")
        return None
    say(f"keeping the taps of this share in {need:.0f} GB")
    return TapCache(corpus, cluster.rank, cluster.world, size, cluster.device, dtype, parts, best)


def _probe(corpus: Corpus) -> Tensor:
    """A few long sequences cut to one length, without padding."""
    longest = corpus.lengths.argsort()[-max(1, len(corpus) // 4) :][:8]
    width = int(min(256, corpus.lengths[longest].min()))
    return torch.stack([torch.from_numpy(corpus.row(int(i))[:width].astype("int64")) for i in longest])


def fail_fast(
    recipe: Recipe, model: DFlashModel, target: Target, corpus: Corpus, samples: list[int], report: dict[str, Any]
) -> None:
    """Two checks that catch a broken pipeline early. Raises TrainingError."""
    first = report["conditional_acceptance"][0]
    floor = recipe.train.first_position_floor
    if first < floor:
        raise TrainingError(
            f"after 20 % of training the first position is right {first:.2f} of the time, below "
            f"train.first_position_floor {floor}: check template, layer ids and data"
        )
    control = simulate(model, target, corpus, samples, shuffle_taps=True, recall=False)["acceptance_length"]
    own = report["acceptance_length"]
    say(f"control: acceptance length {control:.3f} with another sequence's taps, {own:.3f} with its own")
    if floor and control >= own:
        raise TrainingError(
            f"shuffled taps reach acceptance length {control:.3f}, the real ones {own:.3f}: "
            "the drafter does not use the target's states"
        )


class Log:
    """metrics.jsonl, the console and, when asked for, accelerate's trackers. Rank 0 writes."""

    def __init__(
        self, folder: Path, cluster: Cluster, trackers: tuple[str, ...], recipe: Recipe, state: dict[str, Any] | None
    ) -> None:
        self._path, self._cluster, self._trackers = folder / "metrics.jsonl", cluster, trackers
        size = recipe.draft.block_size - 1
        self._total = torch.zeros(4 + 2 * size, device=cluster.device)
        self._last = time.monotonic()
        self._steps = int(state["step"]) if state else 0
        if trackers:
            cluster.accelerator.init_trackers(recipe.name, config={"recipe_sha256": recipe.sha256()})
        if cluster.is_main and state is None and self._path.exists():
            self._path.unlink()
        elif cluster.is_main and state is not None and self._path.exists():
            lines = self._path.read_text(encoding="utf-8").splitlines()
            kept = [line for line in lines if _step_of(line) <= state["step"]]
            write_atomically(self._path, "".join(line + "\n" for line in kept).encode())

    def add(self, sums: LossSums) -> None:
        """Remember a micro batch without waiting for the device."""
        scalars = torch.stack([sums.loss.detach(), sums.weight, sums.accepted.float(), sums.blocks.float()])
        self._total += torch.cat([scalars, sums.correct.float(), sums.count.float()])

    def write(self, step: int, progress: float, lr: float, norm: float, seconds: float) -> None:
        """One line with the means since the last one. Raises TrainingError when the loss or the norm is no number."""
        self._cluster.sum_([self._total])
        values = self._total.tolist()
        self._total.zero_()
        size = (len(values) - 4) // 2
        loss = values[0] / max(values[1], 1e-9)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise TrainingError(
                f"step {step}: the loss is {loss}, the gradient's norm {norm}; the last good state is in "
                f"{self._path.parent}"
            )
        now = time.monotonic()
        steps, self._steps = step - self._steps, step
        record = {
            "step": step,
            "progress": round(progress, 4),
            "lr": lr,
            "loss": round(loss, 5),
            "grad_norm": round(norm, 4),
            "accepted": round(values[2] / max(values[3], 1), 4),
            "accuracy": [
                round(c / max(n, 1), 4) for c, n in zip(values[4 : 4 + size], values[4 + size :], strict=True)
            ],
            "blocks": int(values[3]),
            "seconds": round(seconds, 2),
            "steps_per_second": round(steps / max(now - self._last, 1e-9), 2),
        }
        self._last = now
        self._append(record)
        if self._cluster.is_main:
            first = " ".join(f"{x:.2f}" for x in record["accuracy"][:4])
            say(
                f"step {step} ({progress:.0%}) loss {loss:.3f} lr {lr:.2e} norm {norm:.2f} "
                f"accepted {record['accepted']} [{first}] {record['steps_per_second']} steps/s"
            )

    def evaluate(self, step: int, report: dict[str, Any]) -> dict[str, Any]:
        categories = {name: round(entry["acceptance_length"], 3) for name, entry in report["categories"].items()}
        record = {
            "step": step,
            "eval": {k: v for k, v in report.items() if k != "categories"},
            "categories": categories,
        }
        self._append(record)
        say(f"step {step} eval acceptance length {report['acceptance_length']:.3f} survival {report['survival'][:4]}")
        return report

    def _append(self, record: dict[str, Any]) -> None:
        if self._cluster.is_main:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        if self._trackers:
            flat = {k: v for k, v in record.items() if isinstance(v, (int, float))}
            if "eval" in record:
                flat["eval_acceptance_length"] = record["eval"]["acceptance_length"]
            self._cluster.accelerator.log(flat, step=record["step"])

    def close(self) -> None:
        if self._trackers:
            self._cluster.accelerator.end_training()


def _step_of(line: str) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return 1 << 62
