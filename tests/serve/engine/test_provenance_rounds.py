"""Provenance from a real small engine: the trace's rounds, pieces that join to the text, and speculation off."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from serve.config import ServeConfig
from serve.engine.build import build_engine
from serve.engine.engine import Engine
from serve.protocol import Output, SamplingParams
from tests.serve.drafter.random_drafters import drafter_config, random_drafter, write_drafter
from tests.tiny_models import write_model

REPETITIVE = [50, 60, 70] * 9


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("provenance")
    write_model(folder / "model", num_hidden_layers=5)
    write_drafter(folder / "drafter", random_drafter(drafter_config()))
    return folder / "model", folder / "drafter"


def engine_of(folders: tuple[Path, Path], trace: Path) -> Engine:
    config = ServeConfig(
        model_dir=str(folders[0]),
        drafter_dir=str(folders[1]),
        weights="fp32",
        page_size=16,
        max_num_seqs=8,
        max_batch_tokens=64,
        threads=1,
        block_length=5,
        trace_dir=str(trace),
    )
    return build_engine(config)[0]


def outputs_of(engine: Engine, prompts: list[list[int]], params: SamplingParams) -> dict[str, list[Output]]:
    for index, prompt in enumerate(prompts):
        engine.add(str(index), prompt, params)
    found: dict[str, list[Output]] = {}
    while engine.has_work:
        for output in engine.step():
            # What travels is what is compared.
            found.setdefault(output.id, []).append(Output.from_json(json.loads(json.dumps(output.to_json()))))
    return found


def test_rounds_and_sources_are_those_of_the_trace(folders: tuple[Path, Path], tmp_path: Path) -> None:
    engine = engine_of(folders, tmp_path)
    prompts = [REPETITIVE, [10, 20, 30], list(range(40, 90))]
    params = SamplingParams(max_tokens=40, ignore_eos=True, stop=("zq",), provenance=True)
    found = outputs_of(engine, prompts, params)
    (file,) = tmp_path.iterdir()
    for line in map(json.loads, file.read_text().splitlines()):
        outputs = found[line["id"]]
        assert [list(o.round) for o in outputs if o.round is not None] == line["rounds"]
        assert outputs[0].round is None  # the first token comes out of the prompt pass
        assert [i for o in outputs for i in o.token_ids] == line["output_ids"]
        kept: Counter[str] = Counter()
        for source, _, accepted in line["rounds"]:
            kept[source] += accepted
        sources = Counter(source for o in outputs for source in o.sources)
        assert (sources["block"], sources["lookup"]) == (kept["block"], kept["lookup"])
        assert sum(sources.values()) == line["completion_tokens"]
        for output in outputs:
            assert output.pieces is not None
            assert len(output.pieces) == len(output.token_ids) == len(output.sources)
            assert "".join(output.pieces) == output.text
    assert any(source == "lookup" for outputs in found.values() for o in outputs for source in o.sources)


def test_a_request_without_speculation_has_no_draft_and_the_same_tokens(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    params = SamplingParams(max_tokens=40, temperature=0.8, seed=11, ignore_eos=True)
    engine = engine_of(folders, tmp_path)
    drafted = outputs_of(engine, [REPETITIVE], params)["0"]
    assert engine.stats().drafts > 0
    assert all(output.pieces is None and output.round is None for output in drafted)
    before = engine.stats().drafts
    plain = outputs_of(engine, [REPETITIVE], SamplingParams(**{**vars(params), "speculation": False}))["0"]
    assert engine.stats().drafts == before
    assert [i for o in plain for i in o.token_ids] == [i for o in drafted for i in o.token_ids]
    assert plain[-1].final is not None
    assert set(plain[-1].final["speculation"]["drafted"]) == {0}
