"""An end token that is accepted in the middle of a drafted block ends the answer there."""

from __future__ import annotations

import json
from pathlib import Path

from serve.config import ServeConfig
from serve.engine.build import build_engine
from serve.protocol import SamplingParams
from tests.tiny_models import greedy, write_model
from verify.lossless import RehearsedDrafts

PROMPTS = [[10 + i, 20, 30 + 2 * i] for i in range(8)]


def test_an_end_token_inside_an_accepted_block_ends_the_answer(tmp_path: Path) -> None:
    """The drafts are the model's own text beyond its end, so whole blocks are accepted, the end token among them."""
    reference = write_model(tmp_path, seed=5)
    continued = [greedy(reference, prompt, 24) for prompt in PROMPTS]
    ends = sorted({text[9] for text in continued})
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    all_ends = {*ends, 2}
    settings = ServeConfig(model_dir=str(tmp_path), weights="fp32", threads=1, kv_memory_mib=4, block_length=15)
    engine, _ = build_engine(settings)
    engine.lookup = None
    known = {tuple(prompt): tuple(text) for prompt, text in zip(PROMPTS, continued, strict=True)}
    engine.block = RehearsedDrafts(known, 320, fault=0.0)
    inside = 0
    for index, (prompt, text) in enumerate(zip(PROMPTS, continued, strict=True)):
        until = next(i for i, token in enumerate(text) if token in all_ends) + 1
        engine.add(str(index), prompt, SamplingParams(max_tokens=24))
        outputs = []
        while engine.has_work:
            outputs += engine.step()
        assert [token for output in outputs for token in output.token_ids] == text[:until]
        assert outputs[-1].finish_reason == "stop"
        assert outputs[-1].final is not None
        assert outputs[-1].final["completion_tokens"] == until
        assert "<|" not in "".join(output.text for output in outputs)
        inside += len(outputs[-1].token_ids) > 1
    assert inside > 0, "no answer ended inside a block"
