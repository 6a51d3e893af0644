"""The assembly that widens integers, run by hand from the compiled PTX, gives every code its exact value.

No card is needed: the blocks are a dozen bit operations and fused multiply-adds, which this file knows how to do.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]
HALF = {"f16x2": torch.float16, "bf16x2": torch.bfloat16}
OFFSET = {torch.float16: 1024, torch.bfloat16: 128}
VARIANTS = {
    "int8 words fp16": (75, "gemm int8 partial x16"),
    "int8 bytes fp16": (75, "widen int8"),
    "int8 bytes bf16": (90, "widen int8"),
    "int8 lanes fp16": (90, "gemm int8 partial x8"),
    "int8 lanes bf16": (90, "gemm int8 partial x8 bf16"),
    "int4 words fp16": (75, "gemm int4_halves128 partial x16"),
    "int4 bytes fp16": (75, "widen int4_halves128"),
    "int4 bytes bf16": (90, "widen int4_halves32"),
    "lanes of int4 fp16": (90, "gemm int464 partial x8"),
    "lanes of int4 bf16": (90, "gemm int464 partial x8 bf16"),
}
COMPILE = """
import json, sys
from serve.kernels.triton import turing
from serve.kernels.triton.ahead import compile_ptx
from serve.kernels.triton.variants import all_variants
turing.install()
found = {}
for key, (card, name) in json.loads(sys.argv[1]).items():
    found[key] = compile_ptx(next(one for one in all_variants(card) if one.name == name), card)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def compiled() -> dict[str, str]:
    """The PTX of each variant. A process of its own: in this one kernels are interpreted."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("TRITON_")}
    command = [sys.executable, "-c", COMPILE, json.dumps(VARIANTS)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found


def block_with(ptx: str, *patterns: str) -> list[str]:
    """The instructions of the first assembly block that has one like each of ``patterns``."""
    for text in re.findall(r"// begin inline asm\n(.*?)// end inline asm", ptx, re.S):
        body = text.strip().removeprefix("{").removesuffix("}")
        lines = [line.strip() for line in body.split(";") if line.strip() and ".reg" not in line]
        if all(any(re.match(pattern, line) for line in lines) for pattern in patterns):
            return lines
    raise AssertionError(f"no block with {patterns}")


def pair(value: int, dtype: torch.dtype) -> torch.Tensor:
    """A register's low and high half as two numbers."""
    halves = torch.tensor([value & 0xFFFF, value >> 16], dtype=torch.int32)
    return (halves - ((halves >> 15) << 16)).to(torch.int16).view(dtype).double()


def bits(values: torch.Tensor, dtype: torch.dtype) -> int:
    low, high = (int(half) & 0xFFFF for half in values.to(dtype).view(torch.int16))
    return low | high << 16


def run(block: list[str], registers: dict[str, int]) -> None:
    """Executes the block on ``registers``, in place."""

    def value(name: str) -> int:
        return int(name, 0) if name[0].isdigit() else registers[name]

    for line in block:
        operation, rest = line.split(None, 1)
        parts = [part.strip() for part in re.findall(r"\{[^}]*\}|[^,{]+", rest) if part.strip()]
        kind = operation.split(".")[-1]
        target = parts[0]
        if target.startswith("{"):
            low, high = (name.strip() for name in target[1:-1].split(","))
            registers[low], registers[high] = value(parts[1]) & 0xFFFF, value(parts[1]) >> 16
        elif parts[1].startswith("{"):
            low, high = (name.strip() for name in parts[1][1:-1].split(","))
            registers[target] = registers[low] | registers[high] << 16
        elif operation.startswith("mov"):
            registers[target] = value(parts[1])
        elif operation.startswith("xor"):
            registers[target] = value(parts[1]) ^ value(parts[2])
        elif operation.startswith("shr"):
            registers[target] = value(parts[1]) >> value(parts[2])
        elif operation.startswith("lop3"):
            assert value(parts[4]) == 0xEA  # (a & b) | c
            registers[target] = value(parts[1]) & value(parts[2]) | value(parts[3])
        elif operation.startswith("prmt"):
            source = (value(parts[2]) << 32 | value(parts[1])).to_bytes(8, "little")
            picked = [source[value(parts[3]) >> 4 * place & 7] for place in range(4)]
            registers[target] = int.from_bytes(bytes(picked), "little")
        elif operation.startswith("fma"):
            a, b, c = (pair(value(part), HALF[kind]) for part in parts[1:4])
            registers[target] = bits(a * b + c, HALF[kind])
        elif operation.startswith("add"):
            a, b = (pair(value(part), HALF[kind]) for part in parts[1:3])
            registers[target] = bits(a + b, HALF[kind])
        elif operation.startswith("mul"):
            a, b = (pair(value(part), HALF[kind]) for part in parts[1:3])
            registers[target] = bits(a * b, HALF[kind])
        else:
            raise AssertionError(f"unknown instruction {line!r}")


def registers_of(block: list[str]) -> tuple[list[str], list[str]]:
    """Hardware registers the block writes, and those it only reads, each in order of their number."""
    text = " ; ".join(block)
    written: list[str] = []
    for line in block:
        target = line.split(None, 1)[1]
        target = target[1 : target.index("}")] if target.startswith("{") else target.split(",")[0]
        written += [name.strip() for name in target.split(",") if name.strip().startswith("%")]
    read = [name for name in re.findall(r"%\w+", text) if name not in written]

    def order(name: str) -> int:
        return int(re.sub(r"\D", "", name))

    return sorted(dict.fromkeys(written), key=order), list(dict.fromkeys(read))


def outputs_of(registers: dict[str, int], names: list[str], dtype: torch.dtype) -> torch.Tensor:
    """The block's four results: two registers of pairs, or four of one half each."""
    halves = [registers[name] for name in names]
    words = halves if len(halves) == 2 else [halves[0] | halves[1] << 16, halves[2] | halves[3] << 16]
    return torch.cat([pair(word, dtype) for word in words])


@pytest.mark.parametrize("kind", [kind for kind in VARIANTS if kind.startswith("int8")])
def test_every_int8_code(compiled: dict[str, str], kind: str) -> None:
    dtype = torch.bfloat16 if "bf16" in kind else torch.float16
    block = block_with(compiled[kind], "prmt.b32 low")
    outputs, inputs = registers_of(block)
    assert len(inputs) == 1
    for first in range(-127, 125, 3):
        codes = torch.arange(first, first + 4, dtype=torch.int8)
        registers = {inputs[0]: int.from_bytes(bytes(codes.view(torch.uint8).tolist()), "little")}
        run(block, registers)
        assert outputs_of(registers, outputs, dtype).tolist() == codes.tolist()


@pytest.mark.parametrize("high", [False, True])
@pytest.mark.parametrize("kind", [kind for kind in VARIANTS if kind.startswith("int4")])
def test_every_int4_code_and_zero(compiled: dict[str, str], kind: str, high: bool) -> None:
    dtype = torch.bfloat16 if "bf16" in kind else torch.float16
    block = block_with(compiled[kind], "shr.b32 t" if high else "mov.b32 t")
    outputs, inputs = registers_of(block)
    text = " ; ".join(block)
    packed = next(one for one in inputs if re.search(rf"(?:mov|shr)\.b32 t, {one}\b", text))
    zeros = [one for one in inputs if re.search(rf"(?:one, {one}\b|less, {{{one},)", text)]
    assert zeros
    assert set(inputs) - {packed, *zeros}
    scale = torch.tensor(0.37).to(dtype)
    for zero in (0, 7, 15):
        less = bits(torch.full((2,), -OFFSET[dtype] - zero, dtype=torch.float64), dtype)
        factor = bits(scale.double().expand(2), dtype)
        for first in range(0, 16, 4):
            nibbles = list(range(first, first + 4))
            raw = bytes(code << 4 | 15 - code if high else 15 - code << 4 | code for code in nibbles)
            registers = {one: less if one in zeros else factor for one in inputs}
            if "words" in kind:  # operands of one half each
                registers = {one: number & 0xFFFF for one, number in registers.items()}
            registers[packed] = int.from_bytes(raw, "little")
            run(block, registers)
            want = ((torch.tensor(nibbles).float() - zero) * scale.float()).to(dtype).double()
            assert torch.equal(outputs_of(registers, outputs, dtype), want)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("part", range(4))
def test_every_four_bit_code_of_a_word(compiled: dict[str, str], part: int, dtype: torch.dtype) -> None:
    half = dtype == torch.float16
    upper = half and part % 2 == 1
    away = 4 * (part - part % 2) if half else 4 * part
    shift = rf"shr\.b32 t, \S+ {away}$" if away else r"mov\.b32 t, "
    mask = rf"lop3\.b32 t, t, 0x00{'f000f0' if upper else '0f000f'}"
    block = block_with(compiled["lanes of int4 " + ("fp16" if half else "bf16")], shift, mask)
    outputs, inputs = registers_of(block)
    word = next(one for one in inputs if re.search(rf"(?:mov|shr)\.b32 t, {one}\b", " ; ".join(block)))
    (less,) = (one for one in inputs if one != word)
    assert len(outputs) == 1
    for zero in (0, 7, 15):
        offset = 64 if upper else OFFSET[dtype]
        for code in range(16):
            other = 15 - code
            registers = {less: bits(torch.full((2,), -float(offset + zero)), dtype)}
            registers[word] = 0x5A5A5A5A & ~(0x000F000F << 4 * part) | code << 4 * part | other << 4 * part + 16
            run(block, registers)
            assert pair(registers[outputs[0]], dtype).tolist() == [code - zero, other - zero]


def test_the_offset_of_every_other_part_follows_from_the_stored_one(compiled: dict[str, str]) -> None:
    block = block_with(compiled["lanes of int4 fp16"], r"add\.rn\.f16x2")
    (output,), (stored,) = registers_of(block)
    for zero in range(16):
        registers = {stored: bits(torch.full((2,), -1024.0 - zero), torch.float16)}
        run(block, registers)
        assert pair(registers[output], torch.float16).tolist() == [-64.0 - zero] * 2
