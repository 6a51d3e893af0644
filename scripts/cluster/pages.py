"""One metrics page out of many: every sample gets a ``replica`` label, every metric keeps one head.

It knows the Prometheus text format; it does not know what is measured.
"""

from __future__ import annotations

from collections.abc import Mapping


def merge_pages(pages: Mapping[str, str]) -> str:
    """The pages of several servers, by replica, as one: samples of a metric stay together, as the format wants it."""
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for replica, page in pages.items():
        name = ""
        for line in page.splitlines():
            if line.startswith("# "):
                _, kind, name, *_ = line.split(" ", 3)
                known = heads.setdefault(name, [])
                if not any(head.startswith(f"# {kind} ") for head in known):
                    known.append(line)
            elif line:
                samples.setdefault(name, []).append(_labelled(line, replica))
    return "".join(f"{line}\n" for name, head in heads.items() for line in (*head, *samples.get(name, ())))


def _labelled(sample: str, replica: str) -> str:
    """Our pages give every sample the model's name, so there is always a brace to go behind."""
    name, brace, rest = sample.partition("{")
    if not brace:
        raise ValueError(f"a sample without labels: {sample!r}")
    return f'{name}{{replica="{replica}",{rest}'
