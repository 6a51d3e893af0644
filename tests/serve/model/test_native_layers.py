"""The C layers against the eager forward they replace, their row invariance, and how the server does without them.

On a host with no C compiler the same tests hold the eager layers to the same properties, and to saying so.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from serve.config import ServeConfig
from serve.engine.build import build_engine
from serve.kernels.native.build import NativeUnavailable
from serve.kernels.native.pack import quantize_grouped
from serve.model import loader
from serve.model.loader import load_target
from serve.model.native_check import checked_library
from serve.model.target import TargetModel
from serve.protocol import SamplingParams
from tests.serve.model.random_models import Span, flat_batch, random_ids, write_random_model
from tests.tiny_models import write_model
from verify.lossless import RandomLengths, RehearsedDrafts

CPU = torch.device("cpu")
IDS = random_ids(70)
TABLE = (7, 3, 20, 1, 11)
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 32, "num_attention_heads": 6, "num_key_value_heads": 2},
}


def has_native() -> bool:
    try:
        checked_library()
    except NativeUnavailable:
        return False
    return True


def load(folder: Path, weights: str = "int4") -> TargetModel:
    model = load_target(folder, device=CPU, weights=weights)
    assert ("layers in C" in model.kernel_path) == has_native()
    return model


def write_dequantised(folder: Path, bits: int) -> None:
    """A model whose matrices are what ``bits``-bit codes stand for (the head and the table: 8-bit ones)."""
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        if weight.ndim == 2:
            wide = 8 if name in ("lm_head.weight", "model.embed_tokens.weight") else bits
            weights[name] = quantize_grouped(weight, wide).dequantize()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def rows(model: TargetModel, spans: list[Span], page_size: int = 16) -> list[Tensor]:
    """Logits and taps of each span in a fresh cache of stale numbers, earlier positions run first."""
    cache = model.allocate_cache(30, page_size)
    for layer in cache.layers:
        layer.fill_(1e30)
    for span in spans:
        if span.start:
            model.forward(flat_batch([Span(span.ids, 0, span.start, span.table)], page_size), cache)
    output = model.forward(flat_batch(spans, page_size), cache, taps=(1, 0))
    assert output.taps is not None
    both = torch.cat((output.logits, output.taps), 1)
    return list(torch.split(both, [span.stop - span.start for span in spans]))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("family", FAMILIES)
def test_codes_that_stand_for_the_weights_give_float32s_answer(family: str, bits: int, tmp_path: Path) -> None:
    write_random_model(tmp_path, family, **FAMILIES[family])
    write_dequantised(tmp_path, bits)
    native = load(tmp_path, f"int{bits}")
    exact = load_target(tmp_path, device=CPU, weights="fp32")
    spans = [Span(IDS, 0, 70, TABLE), Span(random_ids(50, seed=1), 49, 50, (2, 4, 6, 8))]
    tolerance = 1e-3 if has_native() else 0.2
    for got, want in zip(rows(native, spans), rows(exact, spans), strict=True):
        assert float((got - want).abs().max()) <= tolerance * float(want.abs().max())


@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_has_the_same_bits_in_any_chunk_batch_and_pages(threads: int, tmp_path: Path) -> None:
    write_random_model(tmp_path, "qwen3", **FAMILIES["qwen3"])
    model = load(tmp_path)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        whole = rows(model, [Span(IDS, 0, 70, TABLE)])[0]
        mates = [Span(random_ids(66, seed=2), 5, 66, (0, 2, 4, 6, 8)), Span(random_ids(9, seed=3), 8, 9, (21,))]
        for start, stop in ((0, 1), (31, 33), (16, 25), (40, 57), (69, 70), (3, 70)):
            assert torch.equal(rows(model, [Span(IDS, start, stop, (12, 9, 15, 10, 13))])[0], whole[start:stop])
            mixed = rows(model, [mates[0], Span(IDS, start, stop, TABLE), mates[1]])
            assert torch.equal(mixed[1], whole[start:stop])
            assert torch.equal(mixed[2], rows(model, [mates[1]])[0])
    finally:
        torch.set_num_threads(before)


def test_a_page_table_too_short_for_its_rows_is_refused(tmp_path: Path) -> None:
    write_random_model(tmp_path, "llama")
    model = load(tmp_path)
    batch = flat_batch([Span(IDS, 0, 20, TABLE)])
    with pytest.raises(ValueError, match="attends to 2 pages but its page table has 1"):
        model.forward(replace(batch, page_tables=((7,),)), model.allocate_cache(30, 16))


def test_no_logits_wanted_gives_none(tmp_path: Path) -> None:
    write_random_model(tmp_path, "llama")
    model = load(tmp_path)
    batch = replace(flat_batch([Span(IDS, 0, 5, TABLE)]), logit_rows=torch.empty(0, dtype=torch.int64))
    assert model.forward(batch, model.allocate_cache(30, 16)).logits.shape == (0, 192)


def test_sizes_the_c_layers_do_not_serve_go_to_torch_with_a_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_random_model(tmp_path, "llama", intermediate_size=168)
    with caplog.at_level(logging.INFO, "serve.model.loader"):
        assert type(load_target(tmp_path, device=CPU, weights="int4")) is TargetModel
    assert [record.message.startswith("torch runs the layers, not native code: ") for record in caplog.records] == [
        True
    ]


def test_auto_is_four_bits_where_they_lose_nothing(tmp_path: Path) -> None:
    write_random_model(tmp_path, "llama")
    assert load_target(tmp_path, device=CPU, weights="auto").weights == ("int8" if has_native() else "int4")
    write_dequantised(tmp_path, 4)
    assert load_target(tmp_path, device=CPU, weights="auto").weights == "int4"


def test_auto_is_int4_without_a_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_random_model(tmp_path, "llama")
    monkeypatch.setenv("PATH", str(tmp_path))
    with caplog.at_level(logging.INFO, "serve.model.loader"):
        assert load_target(tmp_path, device=CPU, weights="auto").weights == "int4"
    assert ["no C compiler" in record.message for record in caplog.records] == [True]


def test_a_compiled_layer_with_wrong_numbers_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def wrong() -> None:
        raise NativeUnavailable("the compiled layers differ from torch's")

    write_random_model(tmp_path, "llama")
    monkeypatch.setattr(loader, "checked_library", wrong)
    assert type(load_target(tmp_path, device=CPU, weights="int4")) is TargetModel


def test_the_check_sees_a_wrong_number(monkeypatch: pytest.MonkeyPatch) -> None:
    real = TargetModel.embed
    monkeypatch.setattr(
        TargetModel, "embed", lambda self, ids: real(self, ids) * (1.01 if type(self) is TargetModel else 1.0)
    )
    with pytest.raises(NativeUnavailable, match="differ from torch's" if has_native_files() else "."):
        checked_library()


def has_native_files() -> bool:
    from serve.kernels.native.build import build

    try:
        build()
    except NativeUnavailable:
        return False
    return True


def test_greedy_ids_are_the_same_with_any_drafts(tmp_path: Path) -> None:
    write_model(tmp_path, "qwen3", seed=3)
    config = ServeConfig(
        model_dir=str(tmp_path), weights="int4", page_size=16, max_num_seqs=8, max_batch_tokens=32, threads=1
    )
    prompts = [[10, 20, 30], [50, 60] * 9, list(range(40, 110)), [7], [99, 98, 97, 96] * 6]
    sampling = SamplingParams(max_tokens=24, ignore_eos=True)

    def run(drafts: dict[tuple[int, ...], tuple[int, ...]] | None) -> list[list[int]]:
        engine, info = build_engine(replace(config, proposer="none" if drafts is None else "auto"))
        assert ("layers in C" in info["kernel_path"]) == has_native()
        if drafts is not None:
            engine.lookup = None
            engine.controller = RandomLengths(engine.controller)
            engine.block = RehearsedDrafts(drafts, 320, fault=0.3)
        for index, prompt in enumerate(prompts):
            engine.add(str(index), prompt, sampling)
        got: dict[str, list[int]] = {str(index): [] for index in range(len(prompts))}
        while engine.has_work:
            for output in engine.step():
                got[output.id].extend(output.token_ids)
        assert drafts is None or engine.stats().accepted_tokens > 0
        return [got[str(index)] for index in range(len(prompts))]

    plain = run(None)
    assert run({tuple(p): tuple(e) for p, e in zip(prompts, plain, strict=True)}) == plain
