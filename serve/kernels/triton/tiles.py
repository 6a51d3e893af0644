"""Tile shapes and split counts of every kernel: functions of the layer's shape and the card, never of the batch.

A row's bits follow from these numbers, so nothing here may look at how many rows there are, except for the width of
the row tile, along which results are independent. Static: no autotuning, so a start costs compile time only. Knows no
Triton.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

ROW_TILES = (16, 32, 64, 128)
"""Widths of the row tile; more rows take several tiles. Turing's registers hold the first two, Ampere's three."""
INT4_UNIT, INT8_UNIT = 128, 64
"""Positions of K whose codes are 64 bytes: what four threads load of a weight row at once."""
STREAM_UNIT = 64
"""Positions of K that ``source/streams.py`` copies of a row at once: 128 bytes."""
LANE_WARPS = {"int8": 2112, "int4": 2240}
"""Of a matrix that is split: what an H200 holds at once with 128 registers a thread; of four bits the last split is
short, and waits for nobody."""
LANE_RUN = {"int8": 6, "int4": 4}
"""Fewest units of K that are worth a part of a split."""
KV_SPLIT = 256
"""Positions one program of the split attention reads: fixed, so that a row's sums never depend on the context of
others."""
SPLIT_PROGRAMS = 256
"""Programs that share the splits of attention, where there are so many: two a processor of an H200. One that goes on to
its next split has K and V of that on their way already (512 programs took 3 per cent longer at 8x8 and 32x1)."""
COUNTED_SPANS = 64
"""Room for so many spans or fewer: the split attention counts those that are there, and they share its programs."""
STREAM_LEAD, LATE_LEAD, TILE_LEAD = 4, 5, 2
"""Turns before its end at which a product lets the next kernel in: of streams (and of stored integers of 16 rows), of
qkv and what else of eight rows is not let in at once, of ``tl.dot``. That kernel's start costs two microseconds where
nothing runs beside it, and its programs crowd where they come too soon: 16 rows of bf16 on an H200 took 2.80 ms with no
lead, 2.74 with three, 2.81 with eight before gate|up's end and 2.93 where they came at once."""
LANE_LEAD = {"int8": 2, "int4": 4}
"""The same of stored integers of eight rows: one row of int8 takes 1.468 ms with none, 1.461 with two, 1.523 with four,
of int4 1.287, 1.261, 1.183."""
HEAD_OUTPUTS = 1 << 16
"""A matrix of so many rows is a head: its programs come in waves, and want more units on their way in each."""
QUERY_TILE = 16
"""Query rows x heads of one K/V group that one program of the split attention handles."""
LANE_QUERIES = 8
"""The same of a program whose threads multiply for themselves."""
LANE_ROWS = 2
"""Steps of so many rows or fewer attend so: of more, programs that fill a processor each keep the next kernel out."""
LANE_PROGRAMS = 132
"""Of such steps: one a processor of an H200."""
MAX_REGISTERS = 255
"""Said aloud at every launch: left alone, ptxas spills a few bytes to save registers nobody asked for."""
REGISTERS = 1 << 16
"""Of a processor, which one program's threads share."""
DEPENDENT_LAUNCH = True
"""A large kernel lets the next one in only near its end: a step of one row took 2.80 ms instead of 2.96 on an H200
(``device_kernels.py --late`` is without). Letting every kernel in at once had made it slower."""
NORM_WIDTH = 12_288
"""Three chunks of four numbers for each of 1,024 threads."""
HEADS_PER_PROGRAM = 8
COMBINE_BLOCK = 16
COMBINE_WARPS = 4
WRITE_WARPS = 8
ARGMAX_BLOCK = 4096
SILU_BLOCK = 1024
CODE_BLOCK = 1024
CODE_WARPS = 8
FP8_BLOCK = 2048
FP8_WARPS = 8
FP8_CARD = 89
"""The least capability that has 8-bit floats."""
EMBED_BLOCK = 1024
APPEND_BLOCK = 1024
WIDEN_ROWS = 32
WIDEN_BLOCK_K = 128


@dataclass(frozen=True)
class GemmTile:
    """block_n output features by block_k positions of K; prefetch: load the next tile by hand (no cp.async below
    80); ahead: bytes of each weight row asked for before the inputs are there (dependent launch); layouts: the
    capability whose register layouts to use, 0 for the card's own; ring: units of stored integers on their way to a
    thread's registers, or through shared memory (``source/lanes.py``); stream: so are units of 16-bit weights
    (``source/streams.py``); early: the next kernel is let in at once; lead: so many units or tiles before
    its end; registers: the most a thread may have."""

    block_n: int
    block_k: int
    warps: int
    stages: int
    prefetch: bool = False
    ahead: int = 0
    layouts: int = 0
    ring: int = 2
    shared: bool = False
    stream: bool = False
    early: bool = False
    lead: int = 0
    registers: int = MAX_REGISTERS


@dataclass(frozen=True)
class GemmPlan:
    """How one matrix is cut: split_depth positions of K make a split, whatever the rows; tiles: the tile of each width
    of the row tile, narrow to wide; parts: of a split in one program of ``source/lanes.py``, 0 where that has none.
    Only split_depth and parts (and the packing) enter a row's bits."""

    split_depth: int
    tiles: tuple[tuple[int, GemmTile], ...]
    parts: int = 0

    def tile(self, rows: int) -> tuple[int, GemmTile]:
        """The narrowest row tile that holds ``rows``, or the widest, and its tile."""
        return next((entry for entry in self.tiles if rows <= entry[0]), self.tiles[-1])

    @property
    def without_streams(self) -> GemmPlan:
        return replace(self, tiles=tuple((width, tile) for width, tile in self.tiles if not tile.stream))

    @property
    def streams(self) -> bool:
        """Whether few rows come by another way than many."""
        return any(tile.stream for _, tile in self.tiles)

    @property
    def for_interpreter(self) -> GemmPlan:
        """With few large programs where threads multiply for themselves: the interpreter's time goes by operations.
        Only a card gives streams the bits of other tiles."""
        if not self.parts:
            return self.without_streams
        return replace(self, tiles=((16, replace(self.tiles[0][1], block_n=256 // self.parts, shared=False)),))


@dataclass(frozen=True)
class AttentionTile:
    """block_m query rows (split attention: QUERY_TILE) by block_n positions. unmasked: a loop of its own for positions
    that all rows see, where registers allow it."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    unmasked: bool = False


STREAM_ROWS = (8, 16)
STREAM_TILES = tuple(GemmTile(64, STREAM_UNIT, warps=4, stages=1, ring=ring, stream=True) for ring in (5, 4))
"""For so many rows at most. Where a processor has but one program, ``tl.dot`` has more bytes on their way."""
PROCESSORS, TOGETHER = 132, 528
"""Of an H200, and programs of these tiles that it holds at once."""


def shared_limit(capability: int) -> int:
    """Bytes of shared memory one block may have."""
    if capability < 80:
        return 64 << 10
    return (163 << 10) if capability in (80, 87) else (227 << 10) if capability in (90, 100, 103) else (99 << 10)


def _roomy(capability: int) -> bool:
    return shared_limit(capability) > 100 << 10


def dependent_launch(capability: int) -> bool:
    """Whether a kernel may start before its predecessor ends (programmatic dependent launch: Hopper on)."""
    return DEPENDENT_LAUNCH and capability >= 90


def gemm_plan(weight_format: str, pack: int, outputs: int, depth: int, capability: int, *, split: bool) -> GemmPlan:
    """Tiles and splits of one matrix. ``pack``: positions of K in one int4 block or int8 group, 0 for none; outputs:
    rows of the matrix; split: its sums may be left in parts."""
    if lane_card(capability) and (weight_format == "int4" or (weight_format == "int8" and depth % INT8_UNIT == 0)):
        return _lane_plan(weight_format, outputs, depth, split)
    block_k = _block_k(weight_format, pack, capability)
    count = -(-depth // block_k)
    layers, splits = _fill(weight_format, -(-outputs // 64), count, capability) if split else (0, 1)
    tiles = _gemm_tiles(weight_format, block_k, layers, capability)
    few, some = STREAM_TILES
    programs = -(-outputs // few.block_n) * splits
    crowded = layers != 1 and programs > PROCESSORS
    if weight_format == "dense" and depth % STREAM_UNIT == 0 and crowded and stream_card(capability):
        # Not where three programs fill a processor: behind those comes attention, which needs room.
        early = layers != 3 and programs <= TOGETHER
        some = replace(some, lead=LATE_LEAD if layers == 3 else STREAM_LEAD)
        few = replace(few, early=early, lead=0 if early else LATE_LEAD)
        tiles = (*zip(STREAM_ROWS, (few, some), strict=True), *tiles)
    return GemmPlan(-(-count // splits) * block_k, tiles)


def int4_in_lanes(group: int, depth: int, capability: int) -> bool:
    """Whether int4 codes are packed for ``source/lanes.py``: pairs of units, and no more scales than its ring holds."""
    return lane_card(capability) and group > 32 and depth % (2 * INT4_UNIT) == 0


def stream_card(capability: int) -> bool:
    """Whether few rows take 16-bit weights through ``source/streams.py``: where it is faster, and its instruction has
    the bits of that of ``tl.dot``."""
    return capability == 90


def lane_card(capability: int) -> bool:
    """Whether stored integers are multiplied by ``source/lanes.py``, whose instruction came with Ampere."""
    return capability >= 80


def _lane_plan(weight_format: str, outputs: int, depth: int, split: bool) -> GemmPlan:
    """Two parts in a program where K allows it, and splits until a card has some seventeen warps a processor. Registers
    are as few as let all programs of a large matrix be there at once."""
    unit = INT4_UNIT if weight_format == "int4" else INT8_UNIT
    parts = 2 if depth // unit % 2 == 0 else 1
    runs = depth // (unit * parts)
    splits = (
        min(LANE_WARPS[weight_format] // (-(-outputs // 16) * parts), runs // LANE_RUN[weight_format]) if split else 1
    )
    crowded = 80 if weight_format == "int8" else 96
    few = GemmTile(64 // parts, unit, warps=4, stages=1, registers=128 if split else crowded)
    many = GemmTile(128 // parts, unit, warps=4, stages=1, ring=3, shared=True)
    some = replace(few, registers=168)
    if not split:
        some = replace(some, block_n=many.block_n) if weight_format == "int8" else many
        # Its successor finds room beside it. Behind other matrices, programs let in at once crowd.
        few = replace(few, early=True)
    if weight_format == "int8" and outputs >= HEAD_OUTPUTS:
        few = replace(few, ring=4, registers=96)
    if split:
        few = replace(few, lead=LANE_LEAD[weight_format])
    some = replace(some, lead=STREAM_LEAD)
    return GemmPlan(-(-runs // max(1, splits)) * parts * unit, ((8, few), (16, some), (32, many)), parts)


def _block_k(weight_format: str, pack: int, capability: int) -> int:
    """int4 tiles are as large as their packing says; Turing's registers hold two tiles of 64."""
    if weight_format == "int4_halves" or (weight_format == "int8_group" and capability >= 80):
        return pack
    return 64 if capability < 80 else 128


def _fill(weight_format: str, output_tiles: int, count: int, capability: int) -> tuple[int, int]:
    """How many programs a processor holds and how many splits of ``count`` K tiles follow: those that fill the card's
    processors best in one wave, the fewest that leave a program no more than 16 tiles. Small tiles need company."""
    choices = (3,) if capability < 80 else {"int4_halves": (2, 3), "int8_group": (3,)}.get(weight_format, (1, 2, 3))
    processors = 40 if capability < 80 else 108 if capability < 90 else 132
    best = (0.0, 1, 1)
    for layers in choices:
        splits = max(1, min(layers * processors // output_tiles, count // 4))
        splits = -(-count // -(-count // splits))  # none of them empty
        fill = min(1.0, output_tiles * splits / (layers * processors))
        long = -(-count // splits) > 16
        if fill > best[0] + 0.02 or (fill > best[0] - 0.02 and -(-count // best[2]) > 16 and not long):
            best = (fill, layers, splits)
    _, layers, splits = best
    if weight_format == "dense" and capability >= 90 and layers == 3:
        # Fewer and longer programs are quicker there: 16 rows of 6,144 x 2,560 in 3 splits instead of 4.
        splits = max(1, min(processors * 9 // 4 // output_tiles, splits))
        splits = -(-count // -(-count // splits))
    return layers, splits


def _gemm_tiles(weight_format: str, block_k: int, layers: int, capability: int) -> tuple[tuple[int, GemmTile], ...]:
    """The tile of each row width. layers: programs a processor is to hold, 0 where the matrix is not split."""
    if capability < 80:
        tile = GemmTile(block_n=64, block_k=block_k, warps=4, stages=1, prefetch=True)
        return tuple((width, tile) for width in ROW_TILES[:2])
    if capability < 90 or not _roomy(capability):
        tile = GemmTile(block_n=64, block_k=block_k, warps=4, stages=4 if _roomy(capability) else 2)
        return tuple((width, tile) for width in ROW_TILES[:3])
    if weight_format == "dense":
        few = GemmTile(64, 128, warps=4, stages={0: 6, 1: 6, 2: 4, 3: 3}[layers], ahead=1024)
        deep = {1: GemmTile(64, 128, warps=4, stages=4, ahead=256), 2: GemmTile(64, 128, warps=4, stages=3, ahead=256)}
        some = deep.get(layers, GemmTile(64, 64, warps=4, stages=4, ahead=256))
        many = GemmTile(64, 64, warps=4, stages=4 if layers in deep else 3, ahead=256)
        return ((16, replace(few, lead=TILE_LEAD)), (32, few), (64, some), (128, many))
    # Ampere's instructions take widened weights from registers in runs of four; Hopper's take them in pairs.
    few = GemmTile(64, block_k, warps=4, stages=6 if weight_format == "int8" else 3, ahead=256, layouts=80)
    wide = replace(few, block_n=128, warps=8, stages=2) if weight_format == "int8" else few
    if weight_format == "int8" and layers == 0:
        few = replace(few, block_k=256, stages=3)
    return ((16, few), (32, few), (64, wide))


def split_attention_tile(capability: int) -> AttentionTile:
    if capability < 80:
        return AttentionTile(QUERY_TILE, 32, warps=4, stages=1)
    return AttentionTile(QUERY_TILE, 64 if _roomy(capability) else 32, warps=4, stages=3 if _roomy(capability) else 2)


def split_programs(splits: int, tiles: int, kv_heads: int) -> int:
    """Programs of one K/V head that share the splits of so many tiles: all at once while the card has room. Which
    program computes a split changes none of its bits."""
    return tiles * max(1, min(splits, -(-enough_programs(kv_heads) // tiles)))


def enough_programs(kv_heads: int) -> int:
    """Programs of one K/V head, for any number of tiles."""
    return -(-SPLIT_PROGRAMS // kv_heads)


def attends_in_lanes(capability: int) -> bool:
    """Whether few rows attend by ``source/lane_attention.py``: where it was measured, and has the registers."""
    return capability == 90


def lane_programs(splits: int, tiles: int, kv_heads: int) -> int:
    """As ``split_programs``, for ``source/lane_attention.py``."""
    return tiles * max(1, min(splits, LANE_PROGRAMS // (tiles * kv_heads)))


def prefill_attention_tile(capability: int, head_dim: int) -> AttentionTile:
    if capability < 80:
        return AttentionTile(64, 32, warps=4, stages=1)
    if capability < 90 or head_dim < 64 or not _roomy(capability):
        return AttentionTile(64, 32, warps=4, stages=2, unmasked=True)
    if head_dim == 128:
        # Two programs a processor: each computes its softmax while the other has the tensor cores.
        return AttentionTile(64, 64, warps=4, stages=3, unmasked=True)
    return AttentionTile(128, 64, warps=8, stages=2, unmasked=True)


def norm_warps(width: int) -> int:
    """Of a norm that codes its row in eight bits."""
    return 8 if width > 2048 else 4


@dataclass(frozen=True)
class NormPlan:
    """How a row's norm is shared out: ``chunks`` of four numbers for each of ``threads`` threads. Both enter its
    bits."""

    threads: int
    chunks: int

    @classmethod
    def of(cls, width: int, *, interpreted: bool) -> NormPlan:
        """Of rows of ``width`` numbers; in one chunk where interpreted. Raises ValueError for a width that is not a
        multiple of four, or has no room in the registers of a program."""
        if width % 4 or width > NORM_WIDTH:
            raise ValueError(f"norms take rows of a multiple of 4 numbers, at most {NORM_WIDTH}; got {width}")
        units = width // 4
        if interpreted:
            return cls(max(32, 1 << (units - 1).bit_length()), 1)
        threads = 128
        while 3 * threads < units:
            threads *= 2
        return cls(threads, -(-units // threads))

    @property
    def registers(self) -> int:
        """The most that a thread may have."""
        return min(MAX_REGISTERS, REGISTERS // self.threads)
