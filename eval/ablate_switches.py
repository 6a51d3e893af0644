"""The server's optimisations as a table: how each is switched off, and what that should cost.

A prediction is a ratio for each measure, time without over time with (2.0: twice as slow without it), worked out from
what the full server measured of itself: the cost of its passes, the tokens it keeps a round. Each says its reasoning in
one line. It starts nothing and measures nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from eval.roofline import acceptance_length
from verify.costs import CostTable

# measure -> (title, unit, whether more is better)
MEASURES: dict[str, tuple[str, str, bool]] = {
    "chat": ("TPOT of a chat", "s/token", False),
    "copy": ("TPOT of a copying task", "s/token", False),
    "long": ("TTFT of a long prompt", "s", False),
    "again": ("TTFT of the same prompt again", "s", False),
    "stall": ("longest gap of a chat while a long prompt arrives", "s", False),
    "burst": ("burst", "tok/s", True),
}
SMALL_OP_SECONDS = 8e-6
"""One small torch call on a CPU, dispatch included."""
SMALL_OPS_A_LAYER = 25
"""Norms, rotary, cache writes, attention pieces and additions that the C layers do in one call."""
LAUNCH_SECONDS = 4e-6
LAUNCHES_A_LAYER = 9
DEFAULT_CHUNK = 256

Prediction = dict[str, float]


@dataclass(frozen=True)
class Facts:
    """What the full server said and did. ``tau``: tokens a round, ``drafted``: tokens drafted a round, by measure;
    ``values``: the measures themselves."""

    costs: CostTable
    engine: dict[str, Any]
    values: dict[str, float]
    tau: dict[str, float]
    drafted: dict[str, float]
    burst: int
    long_tokens: int
    layers: int

    @property
    def on_cuda(self) -> bool:
        return str(self.engine.get("device", "")).startswith("cuda")

    def round_seconds(self, measure: str, sequences: int = 1) -> float:
        """A round as it was: verify rows and draft pass."""
        rows = round(sequences * (1 + self.drafted.get(measure, 0.0)))
        drafting = self.costs.draft_seconds(sequences) if self.drafted.get(measure) else 0.0
        return self.costs.verify_seconds(max(1, rows)) + drafting

    def token_seconds(self, measure: str, sequences: int = 1) -> float:
        """Seconds a token of one sequence, as the costs have it."""
        return self.round_seconds(measure, sequences) / self.tau.get(measure, 1.0)

    def plain_seconds(self, sequences: int = 1) -> float:
        """Seconds a token of one sequence without any draft."""
        return self.costs.verify_seconds(sequences)


@dataclass(frozen=True)
class Switch:
    """One optimisation. ``arguments`` and ``environ`` switch it off; ``reason`` explains ``predict``."""

    name: str
    arguments: tuple[str, ...]
    reason: str
    predict: Callable[[Facts], Prediction]
    environ: dict[str, str] = field(default_factory=dict)
    needs: Callable[[Facts], str] = lambda facts: ""
    """Why this switch means nothing on this server, or an empty text."""


def _speculation(facts: Facts) -> Prediction:
    return {
        measure: facts.plain_seconds(count) / facts.token_seconds(measure, count)
        for measure, count in (("chat", 1), ("copy", 1), ("burst", facts.burst))
    }


def _drafter(facts: Facts) -> Prediction:
    # Chats repeat little: what the drafter does there, lookup cannot do. Copying stays with lookup.
    return {**_speculation(facts), "copy": 1.0}


def _lookup(facts: Facts) -> Prediction:
    if not facts.engine.get("drafter"):
        return {"copy": _speculation(facts)["copy"]}
    return {"copy": facts.token_seconds("chat") / facts.token_seconds("copy")}


def _controller(facts: Facts) -> Prediction:
    longest = int(facts.engine.get("block_length_max") or 0)
    found: Prediction = {}
    for measure, count in (("chat", 1), ("burst", facts.burst)):
        acceptance = acceptance_of(facts.tau.get(measure, 1.0), facts.drafted.get(measure, 0.0))
        drafting = facts.costs.draft_seconds(count)
        round_seconds = facts.costs.verify_seconds(count * (1 + longest)) + drafting
        found[measure] = round_seconds / acceptance_length(acceptance, longest) / facts.token_seconds(measure, count)
    return found


def acceptance_of(tau: float, drafted: float) -> float:
    """The chance that one drafted token is kept, from tokens and drafts a round (each kept independently)."""
    if drafted <= 0 or tau <= 1:
        return 0.0
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        whole = int(drafted)
        part = drafted - whole
        length = acceptance_length(middle, whole) * (1 - part) + acceptance_length(middle, whole + 1) * part
        low, high = (middle, high) if length < tau else (low, middle)
    return (low + high) / 2


def _weights(facts: Facts) -> Prediction:
    wide, narrow = (2.0 if facts.on_cuda else 4.0), {"int8": 1.0, "int4": 0.5625}.get(str(facts.engine["weights"]), 2.0)
    ratio = max(1.0, wide / narrow)
    return {
        "chat": ratio,
        "copy": ratio,
        "burst": 1.0 if facts.on_cuda else ratio,
        "long": 1.0 if facts.on_cuda else ratio,
    }


def _native(facts: Facts) -> Prediction:
    added = facts.layers * SMALL_OPS_A_LAYER * SMALL_OP_SECONDS
    return {
        "chat": 1 + added / facts.round_seconds("chat"),
        "copy": 1 + added / facts.round_seconds("copy"),
        "burst": 1 + added / facts.round_seconds("burst", facts.burst),
    }


def _graphs(facts: Facts) -> Prediction:
    added = facts.layers * LAUNCHES_A_LAYER * LAUNCH_SECONDS
    return {
        "chat": 1 + added / facts.round_seconds("chat"),
        "burst": 1 + added / facts.round_seconds("burst", facts.burst),
    }


def _prefix_cache(facts: Facts) -> Prediction:
    return {"again": facts.values["long"] / facts.values["again"]}


def _chunks(facts: Facts) -> Prediction:
    chunks = max(1, -(-facts.long_tokens // DEFAULT_CHUNK))
    whole = facts.values["long"]
    return {"long": 1.0, "stall": whole / max(whole / chunks, facts.values["stall"])}


def _batching(facts: Facts) -> Prediction:
    alone = 1 / facts.values["chat"]
    return {"burst": facts.values["burst"] / alone}


SWITCHES: tuple[Switch, ...] = (
    Switch(
        "speculation",
        ("--proposer", "none"),
        "one plain pass a token instead of a round's share",
        _speculation,
        needs=lambda facts: "" if facts.engine.get("proposer") != "none" else "nothing proposes",
    ),
    Switch(
        "block drafter",
        ("--proposer", "lookup"),
        "as without speculation, but copying keeps lookup",
        _drafter,
        needs=lambda facts: "" if facts.engine.get("drafter") else "no block drafter",
    ),
    Switch(
        "prompt lookup",
        ("--no-lookup",),
        "copying falls to what the drafter keeps in chats",
        _lookup,
        needs=lambda facts: "" if "lookup" in str(facts.engine.get("proposer")) else "no lookup",
    ),
    Switch(
        "controller",
        ("--block-length", "{block_length_max}"),
        "every round pays for the longest block; each drafted token kept independently",
        _controller,
        needs=lambda facts: "" if facts.engine.get("drafter") else "no block drafter",
    ),
    Switch(
        "quantised weights",
        ("--weights", "{dense}"),
        "a decoding pass reads the weights once: bytes in proportion; on a CPU the products too",
        _weights,
        needs=lambda facts: "" if facts.engine.get("weights") in ("int8", "int4") else "weights are not quantised",
    ),
    Switch(
        "native layers",
        ("--weights", "{weights}"),
        f"{SMALL_OPS_A_LAYER} small torch calls a layer at {SMALL_OP_SECONDS * 1e6:.0f} us come back",
        _native,
        {"FORETOKEN_NATIVE": "0"},
        lambda facts: "" if "layers in C" in str(facts.engine.get("kernel_path")) else "the C layers are not in use",
    ),
    Switch(
        "graphs",
        ("--no-graphs",),
        f"{LAUNCHES_A_LAYER} launches a layer at {LAUNCH_SECONDS * 1e6:.0f} us come back",
        _graphs,
        needs=lambda facts: "" if facts.on_cuda else "graphs exist on CUDA only",
    ),
    Switch(
        "prefix cache",
        ("--no-prefix-cache",),
        "a prompt seen before costs what a new one costs; new prompts do not change",
        _prefix_cache,
    ),
    Switch(
        "chunked prefill",
        ("--max-batch-tokens", "{whole_prompt}"),
        "a running chat waits for the whole prompt instead of one chunk",
        _chunks,
    ),
    Switch("batching", ("--max-num-seqs", "1"), "a burst goes at the speed of one chat", _batching),
)


def arguments_of(switch: Switch, facts: Facts) -> list[str]:
    """The switch's arguments with this server's own figures in place of the names in braces."""
    figures = {
        "block_length_max": facts.engine.get("block_length_max"),
        "dense": "fp16" if facts.on_cuda else "fp32",
        "weights": facts.engine.get("weights"),
        "whole_prompt": max(2 * facts.long_tokens, 2 * DEFAULT_CHUNK),
    }
    return [argument.format(**figures) for argument in switch.arguments]


def predict(switch: Switch, facts: Facts) -> Prediction:
    """Every measure's ratio; 1.0 where switching it off should change nothing."""
    return {**dict.fromkeys(MEASURES, 1.0), **switch.predict(facts)}
