"""The layer program's kernels in NumPy: what the host driver runs, and the oracle for the others.

Their parameters are those of `program.SIGNATURES`.  Pointers are flat views up to the end of their
allocation; matrices are [out, in].  `live` holds the step's rows as `embed` resolved them, four
int32 each.  Rows are computed up to the last active one; those in between that are not active hold
zeros.

Not guaranteed: the same bits for other numbers of rows (BLAS sums in another order then).  The same
rows give the same bits, launched eagerly or from a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ostinato import HostKernel, host_kernel
from ostinato.models.program import ACTIVE, FROM_STATE, OPTIONS, SAMPLE, SIGNATURES
from ostinato.models.sampling import penalised
from ostinato.models.sampling import sample as sample_reference

__all__ = ["HOST_KERNELS", "advance", "sampled_rows"]

_CHUNK = 1 << 15  # scores of one attention product at a time, in rows * KV length
Floats: TypeAlias = npt.NDArray[np.float32]
Ints: TypeAlias = npt.NDArray[np.int32]

HOST_KERNELS: dict[str, HostKernel] = {}
"""By name."""

_FLAGS = 3
_ROW_BY_ROW = 4  # up to so many rows, matrix-vector products are faster than a matrix product


def _kernel(function: Callable[..., None]) -> Callable[..., None]:
    """Registers a kernel.  As on a GPU, infinities and NaN are values and no warnings."""
    name = function.__name__
    quiet = np.errstate(all="ignore")(function)
    HOST_KERNELS[name] = host_kernel(SIGNATURES[name], name=name)(quiet)
    return function


@dataclass(frozen=True, slots=True)
class Run:
    """Rows `start` to `stop` of one sequence at rising positions from `position`."""

    start: int
    stop: int
    sequence: int
    position: int


def _used_rows(live: Ints, row_count: int) -> int:
    """Rows up to the last active one."""
    if row_count == 1:
        return int(live[_FLAGS]) & ACTIVE
    active = np.flatnonzero(live[_FLAGS : 4 * row_count : 4] & ACTIVE)
    return int(active[-1]) + 1 if active.size else 0


def _runs_of(live: Ints, used: int) -> Iterator[Run]:
    run: Run | None = None
    for index, (_, position, sequence, flags) in enumerate(
        live[: 4 * used].reshape(-1, 4).tolist()
    ):
        if not flags & ACTIVE:
            continue
        if run is not None:
            follows = run.stop == index and run.sequence == sequence
            if follows and run.position + run.stop - run.start == position:
                run = Run(run.start, index + 1, sequence, run.position)
                continue
            yield run
        run = Run(index, index + 1, sequence, position)
    if run is not None:
        yield run


def sampled_rows(live: Ints, row_count: int) -> list[tuple[int, int, int]]:
    """(row, position, sequence) of the rows of a step that sample."""
    wanted = ACTIVE | SAMPLE
    rows = live[: 4 * _used_rows(live, row_count)].reshape(-1, 4).tolist()
    return [(i, row[1], row[2]) for i, row in enumerate(rows) if row[3] & wanted == wanted]


def _matrix(flat: npt.NDArray[Any], rows: int, columns: int) -> npt.NDArray[Any]:
    return flat[: rows * columns].reshape(rows, columns)


def _product(weight: Floats, x: Floats, out: Floats) -> None:
    """out = x @ weight.T for x [rows, in], weight [out, in].

    Measured with OpenBLAS on two cores, all layers of SmolLM2-135M: as `x @ weight.T` 2 rows take
    43 ms and 8 take 47; row by row 2 take 23; as `weight @ x.T` 8 take 38, the copy included.
    """
    if len(x) <= _ROW_BY_ROW:
        for row, target in zip(x, out, strict=True):
            np.matmul(weight, row, out=target)
    else:
        out[...] = np.matmul(weight, x.T).T


def _normed(x: Floats, norm: Floats, epsilon: float) -> Floats:
    """RMS norm of rows, times the weights."""
    width = x.shape[1]
    if len(x) == 1:
        row = x[0]
        scale = 1.0 / np.sqrt(np.dot(row, row) / np.float32(width) + np.float32(epsilon))
        out = x * np.float32(scale)
    else:
        squares = np.square(x).mean(axis=1, keepdims=True)
        squares += np.float32(epsilon)
        np.sqrt(squares, out=squares)
        out = x / squares
    out *= norm[:width]
    return out


def _rotate(x: Floats, cosine: Floats, sine: Floats, out: Floats) -> None:
    """Rope in the half-split order: x [rows, heads, head_size], tables [rows, 1, head_size / 2]."""
    half = x.shape[-1] // 2
    left, right = x[..., :half], x[..., half:]
    out_left, out_right = out[..., :half], out[..., half:]
    np.multiply(left, cosine, out=out_left)
    out_left -= right * sine
    np.multiply(right, cosine, out=out_right)
    out_right += left * sine


@_kernel
def embed(
    launch: object,
    rows: Ints,
    state: Ints,
    live: Ints,
    table: Floats,
    x: Floats,
    history: Ints,
    row_count: int,
    hidden: int,
    vocabulary: int,
    sequences: int,
    context: int,
) -> None:
    """Resolves the rows (FROM_STATE), looks their tokens up, and notes them in the history.

    A row that would reach outside of anything is not active afterwards.
    """
    out = _matrix(x, row_count, hidden)
    embedding = _matrix(table, vocabulary, hidden)
    for index, row in enumerate(rows[: 4 * row_count].reshape(-1, 4).tolist()):
        token, position, sequence, flags = row
        if not 0 <= sequence < sequences:
            flags &= ~ACTIVE
        elif flags & FROM_STATE:
            token, position, _, stopped = state[4 * sequence : 4 * sequence + 4].tolist()
            if stopped:
                flags &= ~ACTIVE
        if not (0 <= token < vocabulary and 0 <= position < context):
            flags &= ~ACTIVE
        live[4 * index : 4 * index + 4] = (token, position, sequence, flags)
        if flags & ACTIVE:
            history[sequence * context + position] = token
            out[index] = embedding[token]
        else:
            out[index] = 0.0


def _heads_to_cache(
    parts: Floats,
    live: Ints,
    rope: Floats,
    cache: Floats,
    q: Floats,
    heads: int,
    kv_heads: int,
    sequences: int,
    context: int,
) -> None:
    """Rope; queries to `q`, keys and values to the cache.  `parts`: [rows, all heads, size]."""
    used, _, head_size = parts.shape
    queries = _matrix(q, used, heads * head_size).reshape(used, heads, head_size)
    shape = (2, sequences, kv_heads, context, head_size)
    keys, values = cache[: 2 * sequences * kv_heads * context * head_size].reshape(shape)
    table = rope[: context * head_size].reshape(context, 2, 1, head_size // 2)
    for run in _runs_of(live, used):
        rows, end = slice(run.start, run.stop), run.position + run.stop - run.start
        cosine, sine = table[run.position : end, 0], table[run.position : end, 1]
        _rotate(parts[rows, :heads], cosine, sine, queries[rows])
        where = (run.sequence, slice(None), slice(run.position, end))
        _rotate(parts[rows, heads : heads + kv_heads], cosine, sine, keys[where].transpose(1, 0, 2))
        values[where] = parts[rows, heads + kv_heads :].transpose(1, 0, 2)


@_kernel
def norm_qkv_rope(
    launch: object,
    live: Ints,
    x: Floats,
    norm: Floats,
    weight: Floats,
    bias: Floats | None,
    rope: Floats,
    cache: Floats,
    q: Floats,
    workspace: Floats,
    row_count: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    head_size: int,
    sequences: int,
    context: int,
    epsilon: float,
) -> None:
    """Norm, queries, keys and values, rope, and the write of keys and values into the cache.

    `rope`: [context, 2, head_size / 2], cosines and sines.  `cache`: this layer's part, [2,
    sequences, kv_heads, context, head_size].  `q`: [rows, heads, head_size].  `bias`: of queries,
    keys and values, or None.
    """
    used = _used_rows(live, row_count)
    if not used:
        return
    width = (heads + 2 * kv_heads) * head_size
    qkv = _matrix(workspace, used, width)
    _product(_matrix(weight, width, hidden), _normed(_matrix(x, used, hidden), norm, epsilon), qkv)
    if bias is not None:
        qkv += bias[:width]
    parts = qkv.reshape(used, -1, head_size)
    _heads_to_cache(parts, live, rope, cache, q, heads, kv_heads, sequences, context)


@_kernel
def norm_qkv(
    launch: object,
    live: Ints,
    x: Floats,
    norm: Floats,
    weight: Floats,
    qkv: Floats,
    workspace: Floats,
    row_count: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    head_size: int,
    epsilon: float,
) -> None:
    """Norm, and the product with the weights of queries, keys and values: [rows, all heads]."""
    used = _used_rows(live, row_count)
    if used:
        width = (heads + 2 * kv_heads) * head_size
        before = _normed(_matrix(x, used, hidden), norm, epsilon)
        _product(_matrix(weight, width, hidden), before, _matrix(qkv, used, width))


@_kernel
def norm_rope(
    launch: object,
    live: Ints,
    qkv: Floats,
    bias: Floats | None,
    q_norm: Floats | None,
    k_norm: Floats | None,
    rope: Floats,
    cache: Floats,
    q: Floats,
    row_count: int,
    heads: int,
    kv_heads: int,
    head_size: int,
    sequences: int,
    context: int,
    epsilon: float,
) -> None:
    """The norm of each head of queries and keys, rope, and the write of keys and values into the
    cache.  `bias`, `q_norm`, `k_norm`: None where there is none."""
    used = _used_rows(live, row_count)
    if not used:
        return
    made = _matrix(qkv, used, (heads + 2 * kv_heads) * head_size)
    made = made + bias[: made.shape[1]] if bias is not None else made.copy()
    parts = made.reshape(used, -1, head_size)
    for weights, of in ((q_norm, slice(0, heads)), (k_norm, slice(heads, heads + kv_heads))):
        if weights is not None:
            squares = np.square(parts[:, of]).mean(axis=-1, keepdims=True)
            parts[:, of] /= np.sqrt(squares + np.float32(epsilon))
            parts[:, of] *= weights[:head_size]
    _heads_to_cache(parts, live, rope, cache, q, heads, kv_heads, sequences, context)


@_kernel
def attention(
    launch: object,
    live: Ints,
    q: Floats,
    cache: Floats,
    attended: Floats,
    workspace: Floats,
    row_count: int,
    heads: int,
    kv_heads: int,
    head_size: int,
    sequences: int,
    context: int,
    window: int,
    scale: float,
) -> None:
    """Each row attends to positions 0 to its own of its sequence, or to the last `window` of them
    unless that is 0; `attended` is [rows, heads, size]."""
    used = _used_rows(live, row_count)
    group = heads // kv_heads
    shape = (2, sequences, kv_heads, context, head_size)
    all_keys, all_values = cache[: 2 * sequences * kv_heads * context * head_size].reshape(shape)
    out = attended[: used * heads * head_size].reshape(used, kv_heads, group, head_size)
    queries = q[: used * heads * head_size].reshape(used, kv_heads, group, head_size)
    for run in _runs_of(live, used):
        keys, values = all_keys[run.sequence], all_values[run.sequence]
        step = max(1, _CHUNK // (run.position + run.stop - run.start))
        for start in range(run.start, run.stop, step):
            stop = min(start + step, run.stop)
            before = run.position + start - run.start
            end = before + stop - start
            # Of the first row; those of later rows begin behind it.
            first = max(0, before + 1 - window) if window else 0
            # [kv_heads, rows * group, head_size]: one product a key head, all its queries at once.
            scaled = queries[start:stop] * np.float32(scale)
            query = scaled.transpose(1, 0, 2, 3).reshape(kv_heads, -1, head_size)
            # Keys on the left: for one row's queries three times as fast as the other way round.
            scores = np.matmul(keys[:, first:end], query.transpose(0, 2, 1))
            scores = np.ascontiguousarray(scores.transpose(0, 2, 1))
            if stop - start > 1:
                by_row = scores.reshape(kv_heads, stop - start, group, end - first)
                later = np.triu(np.full((stop - start, stop - start), -np.inf, np.float32), 1)
                by_row[..., before - first :] += later[:, None]
                if window:
                    ends = np.arange(before + 1, end + 1)[:, None]
                    outside = np.arange(first, end)[None, :] < ends - window
                    by_row[np.broadcast_to(outside[:, None], by_row.shape)] = -np.inf
            scores -= scores.max(axis=-1, keepdims=True)
            np.exp(scores, out=scores)
            total = scores.sum(axis=-1, keepdims=True)
            mixed = np.matmul(scores, values[:, first:end])
            mixed /= total
            out[start:stop] = mixed.reshape(kv_heads, stop - start, group, head_size).transpose(
                1, 0, 2, 3
            )


def _add_product(
    live: Ints,
    source: Floats,
    weight: Floats,
    x: Floats,
    workspace: Floats,
    row_count: int,
    hidden: int,
    width: int,
) -> None:
    used = _used_rows(live, row_count)
    if not used:
        return
    added = _matrix(workspace, used, hidden)
    _product(_matrix(weight, hidden, width), _matrix(source, used, width), added)
    residual = _matrix(x, used, hidden)
    residual += added


@_kernel
def output_residual(launch: object, *arguments: Any) -> None:
    """x += attended @ weight.T"""
    _add_product(*arguments)


@_kernel
def norm_gate_up(
    launch: object,
    live: Ints,
    x: Floats,
    norm: Floats,
    weight: Floats,
    inner: Floats,
    workspace: Floats,
    row_count: int,
    hidden: int,
    width: int,
    epsilon: float,
) -> None:
    """inner = silu(gate) * up, of the normed residual; `weight` is [gate; up]."""
    used = _used_rows(live, row_count)
    if not used:
        return
    both = _matrix(workspace, used, 2 * width)
    before = _normed(_matrix(x, used, hidden), norm, epsilon)
    _product(_matrix(weight, 2 * width, hidden), before, both)
    gate, up = both[:, :width], both[:, width:]
    out = _matrix(inner, used, width)
    np.negative(gate, out=out)
    np.exp(out, out=out)  # infinite for gates below -88: their silu is 0 then
    out += np.float32(1)
    np.divide(gate, out, out=out)
    out *= up


@_kernel
def down_residual(launch: object, *arguments: Any) -> None:
    """x += inner @ weight.T"""
    _add_product(*arguments)


@_kernel
def head(
    launch: object,
    live: Ints,
    x: Floats,
    norm: Floats,
    weight: Floats,
    logits: Floats,
    workspace: Floats,
    row_count: int,
    hidden: int,
    vocabulary: int,
    epsilon: float,
) -> None:
    """Logits of the rows that sample; each sequence's at its own place, [sequences, vocabulary]."""
    sampled = sampled_rows(live, row_count)
    if not sampled:
        return
    table = _matrix(weight, vocabulary, hidden)
    rows = [row for row, _, _ in sampled]
    sequences = [sequence for _, _, sequence in sampled]
    final = _normed(_matrix(x, row_count, hidden)[rows], norm, epsilon)
    out = _matrix(logits, max(sequences) + 1, vocabulary)
    if len(rows) <= _ROW_BY_ROW:
        for row, sequence in zip(final, sequences, strict=True):
            np.matmul(table, row, out=out[sequence])
    else:
        out[sequences] = np.matmul(table, final.T).T


@_kernel
def sample(
    launch: object,
    live: Ints,
    logits: Floats,
    options: npt.NDArray[np.uint64],
    stops: Ints,
    state: Ints,
    ring: Ints,
    history: Ints,
    adjusted: Floats,
    row_count: int,
    vocabulary: int,
    stop_count: int,
    context: int,
    ring_size: int,
) -> None:
    """The next token of each row that samples, drawn for the position that it will take, and the
    new state of its sequence (`advance`).

    `history`: [sequences, context], the token at each position; a repetition penalty looks at those
    up to the row's own.  `adjusted`: [sequences, vocabulary], the logits with that penalty;
    `logits` stay the model's.  -1 is chosen if a logit is NaN or the largest is infinite: the model
    is broken, and no token of it means anything.
    """
    settings = options.view(OPTIONS)

    def token_of(position: int, sequence: int) -> int:
        temperature, top_p, seed, top_k, _, min_p, penalty = settings[sequence].item()
        values = logits[sequence * vocabulary : (sequence + 1) * vocabulary]
        best = int(values.argmax())  # the first NaN if there is one
        if penalty != 1.0 and not np.isnan(values[best]):
            seen = history[sequence * context : sequence * context + position + 1]
            out = adjusted[sequence * vocabulary : (sequence + 1) * vocabulary]
            out[...] = penalised(values, seen, penalty)
            values, best = out, int(out.argmax())
        if not np.isfinite(values[best]):
            return -1
        if temperature == 0:
            return best
        return sample_reference(values, temperature, top_k, top_p, seed, position + 1, min_p=min_p)

    for _, position, sequence in sampled_rows(live, row_count):
        token, own = token_of(position, sequence), settings[sequence]
        advance(token, position, sequence, own, stops[:stop_count], state, ring, context, ring_size)


def advance(
    token: int,
    position: int,
    sequence: int,
    options: np.void,
    stops: Ints,
    state: Ints,
    ring: Ints,
    context: int,
    ring_size: int,
) -> None:
    """The state of a sequence after the row at `position`, and its token into the ring that the
    host reads.  It stops at a token that is none, at one of `stops`, at the limit of its `options`
    and at the end of the context."""
    limit = min(int(options["limit"]), context)
    stopped = int(token < 0 or token in stops.tolist() or position + 1 >= limit)
    state[4 * sequence : 4 * sequence + 4] = (token, position + 1, position + 2, stopped)
    # One store of 8 bytes: another thread may be polling this entry.
    entry = (2 * (position + 1) + stopped) << 32 | token & 0xFFFFFFFF
    ring.view(np.int64)[sequence * ring_size + (position + 1) % ring_size] = entry


@_kernel
def continue_loop(
    launch: Any,
    condition: int,
    counter: Ints,
    rows: Ints,
    state: Ints,
    row_count: int,
    sequences: int,
    start: int,
) -> None:
    """Begins the count of a loop (`start` steps at most), or counts one step (`start` 0).

    The loop goes on if steps are left and one of them would compute a row: for rows that are not
    FROM_STATE only the first would, since they stay what they are.
    """
    wanted = ACTIVE | SAMPLE
    live = False
    for _, _, sequence, flags in rows[: 4 * row_count].reshape(-1, 4).tolist():
        if flags & wanted == wanted and 0 <= sequence < sequences:
            live |= not state[4 * sequence + 3] if flags & FROM_STATE else start > 0
    counter[0] = start if start else counter[0] - 1
    launch.set_conditional(condition, int(live and bool(counter[0] > 0)))
