"""A flat batch as numbers and back: what a rank needs to run the same pass. Knows tensors; no sockets."""

from __future__ import annotations

from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from serve.model.batch import ROW_ALIGNMENT, FlatBatch


def batch_arrays(batch: FlatBatch) -> tuple[Tensor, ...]:
    """Row fields [4 * T], wanted rows, query starts, ends, page table lengths, pages: all int64 on the host. Waits for
    the device where the batch does not say what its rows are."""
    if batch.host is not None:
        rows, wanted = batch.host
    else:
        rows = torch.stack([batch.token_ids, batch.positions, batch.slots, batch.visible]).cpu()
        wanted = batch.logit_rows.cpu()
    lists = (
        batch.query_starts,
        batch.ends,
        [len(table) for table in batch.page_tables],
        [page for table in batch.page_tables for page in table],
    )
    return (rows, wanted, *(torch.tensor(values, dtype=torch.int64) for values in lists))


def batch_from(arrays: tuple[Tensor, ...], device: torch.device) -> FlatBatch:
    """The batch on ``device``."""
    rows, wanted, starts, ends, lengths, pages = arrays
    fields = rows.view(4, -1)
    # As the maker's rows: at addresses that kernels are compiled for.
    padded = F.pad(fields, (0, -fields.shape[1] % ROW_ALIGNMENT))
    token_ids, positions, slots, visible = padded.to(device)[:, : fields.shape[1]].unbind()
    flat = pages.tolist()
    stops = list(accumulate(lengths.tolist()))
    tables = tuple(tuple(flat[start:stop]) for start, stop in zip([0, *stops], stops, strict=False))
    return FlatBatch(
        token_ids=token_ids,
        positions=positions,
        slots=slots,
        visible=visible,
        query_starts=tuple(starts.tolist()),
        page_tables=tables,
        logit_rows=wanted.to(device),
        ends=tuple(ends.tolist()),
    )
