"""The opt-in account of where each token came from, one entry for each target pass that gave a choice tokens.

It knows what an Output says about its round; it does not know who asked or how the entries travel.
"""

from __future__ import annotations

from typing import Any

from serve.protocol import Output


def provenance_entry(output: Output) -> dict[str, Any]:
    """``round`` (null: the tokens came out of a prompt pass) and ``tokens`` in order, for an output that has both."""
    assert output.pieces is not None
    tokens = [
        {"id": token_id, "text": piece, "source": source}
        for token_id, piece, source in zip(output.token_ids, output.pieces, output.sources, strict=True)
    ]
    if output.round is None:
        return {"round": None, "tokens": tokens}
    proposer, drafted, accepted = output.round
    return {"round": {"proposer": proposer or None, "drafted": drafted, "accepted": accepted}, "tokens": tokens}
