"""The program's kernels in NumPy, which the host driver runs and other kernels are tested against.

Their parameters are those of `program.SIGNATURES`.  Pointers are flat views up to the end of their
allocation; matrices are [out, in].  `live` holds the step's rows as resolved by `embed`, four int32
each.  Rows are computed up to the last active one; inactive rows before it hold zeros.

A row of a step of up to `ROW_BY_ROW` rows has the bits of a step of its own.  With more rows it
may have others (BLAS then sums in another order).  The same rows give the same bits, launched
eagerly or from a graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ostinato import HostKernel, host_kernel
from ostinato.models.program import (
    ACTIVE,
    BIAS,
    DRAFT_KEY,
    DRAFTS,
    FROM_STATE,
    LOGPROBS,
    MASKED,
    MORE,
    MOST_BIASES,
    OPTIONS,
    SAMPLE,
    SIGNATURES,
    parameter_names,
)
from ostinato.models.sampling import SamplingOptions, changed_by, log_probabilities
from ostinato.models.sampling import sample as sample_reference

_CHUNK = 1 << 15  # logprobs of one attention product: rows * KV length
Function: TypeAlias = Callable[["Given"], None]
Floats: TypeAlias = npt.NDArray[np.float32]
Ints: TypeAlias = npt.NDArray[np.int32]

HOST_KERNELS: dict[str, HostKernel] = {}
"""The kernels by name."""

_FLAGS = 3
ROW_BY_ROW = 4
"""The most rows that are computed one by one: up to here matrix-vector products are faster than a
matrix product."""


class Given:
    """The arguments of a launch, by the parameter names in `SIGNATURES`.

    `cache`: one layer's, [2, sequences, kv_heads, context, head_size].  `rope`: [context, 2,
    head_size / 2], cosines and sines.  `q`, `attended`: [rows, heads, head_size].
    """

    launch: Any
    rows: Ints
    live: Ints
    state: Ints
    history: Ints
    stops: Ints
    ring: Ints
    biases: Ints
    allowed: npt.NDArray[np.uint32]
    logprobs: Ints
    counter: Ints
    options: npt.NDArray[np.uint64]
    keys: npt.NDArray[np.uint64]
    table: Floats
    x: Floats
    norm: Floats
    weight: Floats
    bias: Floats | None
    q_norm: Floats | None
    k_norm: Floats | None
    rope: Floats
    cache: Floats
    qkv: Floats
    q: Floats
    attended: Floats
    inner: Floats
    logits: Floats
    drafted: Ints
    scored: Ints
    workspace: Floats
    row_count: int
    hidden: int
    width: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    sequences: int
    context: int
    window: int
    ring_size: int
    stop_count: int
    condition: int
    start: int
    first: int
    most: int
    ranks: int
    epsilon: float
    scale: float

    def __init__(self, names: Iterable[str], values: Iterable[Any]) -> None:
        self.__dict__.update(zip(names, values, strict=True))


def kernel(into: dict[str, HostKernel]) -> Callable[[Function], Function]:
    """Registers a kernel.  As on a GPU, infinities and NaN are values and raise no warnings."""

    def decorate(function: Function) -> Function:
        name = function.__name__
        names = ("launch", *parameter_names(SIGNATURES[name]))

        @np.errstate(all="ignore")
        def run(*arguments: Any) -> None:
            function(Given(names, arguments))

        into[name] = host_kernel(SIGNATURES[name], name=name)(run)
        return function

    return decorate


@dataclass(frozen=True, slots=True)
class RowSpan:
    """Rows `start` to `stop` of one sequence at rising positions from `position`."""

    start: int
    stop: int
    sequence: int
    position: int


def _used_rows(live: Ints, row_count: int) -> int:
    if row_count == 1:
        return int(live[_FLAGS]) & ACTIVE
    active = np.flatnonzero(live[_FLAGS : 4 * row_count : 4] & ACTIVE)
    return int(active[-1]) + 1 if active.size else 0


def _spans_of(live: Ints, used: int) -> Iterator[RowSpan]:
    span: RowSpan | None = None
    for index, (_, position, sequence, flags) in enumerate(
        live[: 4 * used].reshape(-1, 4).tolist()
    ):
        if not flags & ACTIVE:
            continue
        if span is not None:
            follows = span.stop == index and span.sequence == sequence
            if follows and span.position + span.stop - span.start == position:
                span = RowSpan(span.start, index + 1, sequence, span.position)
                continue
            yield span
        span = RowSpan(index, index + 1, sequence, position)
    if span is not None:
        yield span


def sampled_rows(live: Ints, row_count: int) -> list[tuple[int, int, int]]:
    """Returns (row, position, sequence) of the rows of a step that sample."""
    wanted = ACTIVE | SAMPLE
    rows = live[: 4 * _used_rows(live, row_count)].reshape(-1, 4).tolist()
    return [(i, row[1], row[2]) for i, row in enumerate(rows) if row[3] & wanted == wanted]


def _matrix(flat: npt.NDArray[Any], rows: int, columns: int) -> npt.NDArray[Any]:
    return flat[: rows * columns].reshape(rows, columns)


def _cache(a: Given) -> tuple[Floats, Floats]:
    """Returns a layer's keys and values: [sequences, kv_heads, context, head_size] each."""
    shape = (2, a.sequences, a.kv_heads, a.context, a.head_size)
    keys, values = a.cache[: math.prod(shape)].reshape(shape)
    return keys, values


def _product(weight: Floats, x: Floats, out: Floats) -> None:
    """Computes out = x @ weight.T for x [rows, in], weight [out, in].

    Measured with OpenBLAS on two cores, all layers of SmolLM2-135M: with `x @ weight.T` 2 rows take
    43 ms and 8 take 47; row by row 2 take 23; with `weight @ x.T` 8 take 38, the copy included.
    """
    if len(x) <= ROW_BY_ROW:
        for row, target in zip(x, out, strict=True):
            np.matmul(weight, row, out=target)
    else:
        out[...] = np.matmul(weight, x.T).T


def _normed(x: Floats, norm: Floats, epsilon: float) -> Floats:
    """Returns the RMS norm of rows, times the weights."""
    width = x.shape[1]
    if len(x) <= ROW_BY_ROW:
        out = np.empty_like(x)
        for row, target in zip(x, out, strict=True):
            scale = 1.0 / np.sqrt(np.dot(row, row) / np.float32(width) + np.float32(epsilon))
            np.multiply(row, np.float32(scale), out=target)
    else:
        squares = np.square(x).mean(axis=1, keepdims=True)
        squares += np.float32(epsilon)
        np.sqrt(squares, out=squares)
        out = x / squares
    out *= norm[:width]
    return out


def _rotate(x: Floats, cosine: Floats, sine: Floats, out: Floats) -> None:
    """Applies rope in half-split order: x [rows, heads, size], tables [rows, 1, size / 2]."""
    half = x.shape[-1] // 2
    left, right = x[..., :half], x[..., half:]
    out_left, out_right = out[..., :half], out[..., half:]
    np.multiply(left, cosine, out=out_left)
    out_left -= right * sine
    np.multiply(right, cosine, out=out_right)
    out_right += left * sine


def _resolved(a: Given, row: list[int]) -> tuple[int, int, int, int]:
    """Returns token, position, sequence and flags of a row, the first two from the state where it
    asks for that; inactive if its sequence has stopped or is out of range."""
    token, position, sequence, flags = row
    if not 0 <= sequence < a.sequences:
        flags &= ~ACTIVE
    elif flags & FROM_STATE:
        token, position, _, stopped = a.state[4 * sequence : 4 * sequence + 4].tolist()
        if stopped:
            flags &= ~ACTIVE
    return token, position, sequence, flags


@kernel(HOST_KERNELS)
def embed(a: Given) -> None:
    """Resolves the rows (FROM_STATE), embeds their tokens, and stores them in the history.

    A row whose token, position or sequence is out of range becomes inactive.
    """
    out = _matrix(a.x, a.row_count, a.hidden)
    embedding = _matrix(a.table, a.vocabulary, a.hidden)
    for index, row in enumerate(a.rows[: 4 * a.row_count].reshape(-1, 4).tolist()):
        token, position, sequence, flags = _resolved(a, row)
        if not (0 <= token < a.vocabulary and 0 <= position < a.context):
            flags &= ~ACTIVE
        a.live[4 * index : 4 * index + 4] = (token, position, sequence, flags)
        if flags & ACTIVE:
            a.history[sequence * a.context + position] = token
            out[index] = embedding[token]
        else:
            out[index] = 0.0


def _heads_to_cache(parts: Floats, a: Given) -> None:
    """Applies rope, writes queries to `q`, keys and values to the cache.  `parts`: [rows, all
    heads, size]."""
    used, heads, head_size = len(parts), a.heads, a.head_size
    queries = _matrix(a.q, used, heads * head_size).reshape(used, heads, head_size)
    keys, values = _cache(a)
    table = a.rope[: a.context * head_size].reshape(a.context, 2, 1, head_size // 2)
    for span in _spans_of(a.live, used):
        rows, end = slice(span.start, span.stop), span.position + span.stop - span.start
        cosine, sine = table[span.position : end, 0], table[span.position : end, 1]
        _rotate(parts[rows, :heads], cosine, sine, queries[rows])
        where = (span.sequence, slice(None), slice(span.position, end))
        turned = keys[where].transpose(1, 0, 2)
        _rotate(parts[rows, heads : heads + a.kv_heads], cosine, sine, turned)
        values[where] = parts[rows, heads + a.kv_heads :].transpose(1, 0, 2)


def _qkv(a: Given, out: Floats) -> Floats:
    """Computes queries, keys and values of the normed residual into `out`; returns them, [rows up
    to the last active one, all heads]."""
    used, width = _used_rows(a.live, a.row_count), (a.heads + 2 * a.kv_heads) * a.head_size
    made: Floats = _matrix(out, used, width)
    if used:
        before = _normed(_matrix(a.x, used, a.hidden), a.norm, a.epsilon)
        _product(_matrix(a.weight, width, a.hidden), before, made)
    return made


@kernel(HOST_KERNELS)
def norm_qkv_rope(a: Given) -> None:
    """Norms the residual, computes queries, keys and values, applies rope, and writes keys and
    values to the cache.  `bias`: added to queries, keys and values, or None."""
    qkv = _qkv(a, a.workspace)
    if len(qkv):
        if a.bias is not None:
            qkv += a.bias[: qkv.shape[1]]
        _heads_to_cache(qkv.reshape(len(qkv), -1, a.head_size), a)


@kernel(HOST_KERNELS)
def norm_qkv(a: Given) -> None:
    """Norms the residual and computes queries, keys and values: `qkv` is [rows, all heads]."""
    _qkv(a, a.qkv)


@kernel(HOST_KERNELS)
def norm_rope(a: Given) -> None:
    """Norms each head of queries and keys, applies rope, and writes keys and values to the cache.
    `bias`, `q_norm`, `k_norm`: None if the model has none."""
    used = _used_rows(a.live, a.row_count)
    if not used:
        return
    made = _matrix(a.qkv, used, (a.heads + 2 * a.kv_heads) * a.head_size)
    made = made + a.bias[: made.shape[1]] if a.bias is not None else made.copy()
    parts = made.reshape(used, -1, a.head_size)
    keys = slice(a.heads, a.heads + a.kv_heads)
    for weights, of in ((a.q_norm, slice(0, a.heads)), (a.k_norm, keys)):
        if weights is not None:
            squares = np.square(parts[:, of]).mean(axis=-1, keepdims=True)
            parts[:, of] /= np.sqrt(squares + np.float32(a.epsilon))
            parts[:, of] *= weights[: a.head_size]
    _heads_to_cache(parts, a)


@kernel(HOST_KERNELS)
def attention(a: Given) -> None:
    """Computes each row's attention to positions 0 up to its own of its sequence, or to the last
    `window` of them if that is not 0; `attended` is [rows, heads, size]."""
    used = _used_rows(a.live, a.row_count)
    group = a.heads // a.kv_heads
    all_keys, all_values = _cache(a)
    out = a.attended[: used * a.heads * a.head_size].reshape(used, a.kv_heads, group, a.head_size)
    queries = a.q[: used * a.heads * a.head_size].reshape(used, a.kv_heads, group, a.head_size)
    for span in _spans_of(a.live, used):
        keys, values = all_keys[span.sequence], all_values[span.sequence]
        step = max(1, _CHUNK // (span.position + span.stop - span.start))
        step = 1 if used <= ROW_BY_ROW else step
        for start in range(span.start, span.stop, step):
            stop = min(start + step, span.stop)
            before = span.position + start - span.start
            end = before + stop - start
            # The first position of the first row; those of later rows begin further on.
            first = max(0, before + 1 - a.window) if a.window else 0
            # [kv_heads, rows * group, head_size]: one product a KV head for all its queries.
            scaled = queries[start:stop] * np.float32(a.scale)
            query = scaled.transpose(1, 0, 2, 3).reshape(a.kv_heads, -1, a.head_size)
            # Keys on the left: for one row's queries three times as fast as the other way round.
            logprobs = np.matmul(keys[:, first:end], query.transpose(0, 2, 1))
            logprobs = np.ascontiguousarray(logprobs.transpose(0, 2, 1))
            if stop - start > 1:
                by_row = logprobs.reshape(a.kv_heads, stop - start, group, end - first)
                later = np.triu(np.full((stop - start, stop - start), -np.inf, np.float32), 1)
                by_row[..., before - first :] += later[:, None]
                if a.window:
                    ends = np.arange(before + 1, end + 1)[:, None]
                    outside = np.arange(first, end)[None, :] < ends - a.window
                    by_row[np.broadcast_to(outside[:, None], by_row.shape)] = -np.inf
            logprobs -= logprobs.max(axis=-1, keepdims=True)
            np.exp(logprobs, out=logprobs)
            total = logprobs.sum(axis=-1, keepdims=True)
            mixed = np.matmul(logprobs, values[:, first:end])
            mixed /= total
            out[start:stop] = mixed.reshape(a.kv_heads, stop - start, group, a.head_size).transpose(
                1, 0, 2, 3
            )


def _add_product(a: Given, source: Floats) -> None:
    used = _used_rows(a.live, a.row_count)
    if not used:
        return
    added = _matrix(a.workspace, used, a.hidden)
    _product(_matrix(a.weight, a.hidden, a.width), _matrix(source, used, a.width), added)
    residual = _matrix(a.x, used, a.hidden)
    residual += added


@kernel(HOST_KERNELS)
def output_residual(a: Given) -> None:
    """Computes x += attended @ weight.T"""
    _add_product(a, a.attended)


@kernel(HOST_KERNELS)
def norm_gate_up(a: Given) -> None:
    """Computes inner = silu(gate) * up from the normed residual; `weight` is [gate; up]."""
    used = _used_rows(a.live, a.row_count)
    if not used:
        return
    both = _matrix(a.workspace, used, 2 * a.width)
    before = _normed(_matrix(a.x, used, a.hidden), a.norm, a.epsilon)
    _product(_matrix(a.weight, 2 * a.width, a.hidden), before, both)
    gate, up = both[:, : a.width], both[:, a.width :]
    out = _matrix(a.inner, used, a.width)
    np.negative(gate, out=out)
    np.exp(out, out=out)  # infinite for gates below -88, whose silu is then 0
    out += np.float32(1)
    np.divide(gate, out, out=out)
    out *= up


@kernel(HOST_KERNELS)
def down_residual(a: Given) -> None:
    """Computes x += inner @ weight.T"""
    _add_product(a, a.inner)


@kernel(HOST_KERNELS)
def head(a: Given) -> None:
    """Computes the logits of the rows that sample, by sequence: [sequences, vocabulary]."""
    sampled = sampled_rows(a.live, a.row_count)
    if not sampled:
        return
    table = _matrix(a.weight, a.vocabulary, a.hidden)
    rows = [row for row, _, _ in sampled]
    sequences = [sequence for _, _, sequence in sampled]
    final = _normed(_matrix(a.x, a.row_count, a.hidden)[rows], a.norm, a.epsilon)
    out = _matrix(a.logits, max(sequences) + 1, a.vocabulary)
    if len(rows) <= ROW_BY_ROW:
        for row, sequence in zip(final, sequences, strict=True):
            np.matmul(table, row, out=out[sequence])
    else:
        out[sequences] = np.matmul(table, final.T).T


@kernel(HOST_KERNELS)
def sample(a: Given) -> None:
    """Chooses the next token of each row that samples, drawn for the position that the token will
    take, and updates the state of its sequence (`advance`).

    `history`: [sequences, context], the token at each position; penalties apply to those up to the
    row's own.  `biases`: [sequences, MOST_BIASES] of `BIAS`; `allowed`: a bit for each token, for
    rows that are MASKED.  `logits` stay unchanged, and `logprobs` are made of them.  -1 is chosen
    if a logit is NaN or the largest is infinite: the model is broken, and any token would be
    meaningless.
    """
    settings = a.options.view(OPTIONS)

    def token_of(position: int, sequence: int, flags: int) -> int:
        one, first = settings[sequence], sequence * a.vocabulary
        part = slice(first, first + a.vocabulary)
        temperature, top_p, seed, top_k, _, min_p, *penalties, answer, biased, logprobs = one.item()
        repetition, frequency, presence = penalties
        logits = values = a.logits[part]
        best = int(values.argmax())  # the first NaN if there is one
        if np.isnan(values[best]):
            return -1
        if flags & MASKED or biased or penalties != [1.0, 0.0, 0.0]:
            biases = a.biases.view(BIAS)[sequence * MOST_BIASES :][:biased]
            seen = a.history[sequence * a.context : sequence * a.context + position + 1]
            allowed = _allowed(a, sequence) if flags & MASKED else None
            values = changed_by(
                logits, repetition, frequency, presence, biases, seen, answer, allowed
            )
            best = int(values.argmax())
        if not np.isfinite(values[best]):
            return -1
        if temperature == 0:
            token = best
        else:
            options = SamplingOptions(temperature, top_k, top_p, seed, min_p)
            token = sample_reference(values, options, position + 1)
        if logprobs and np.isfinite(logits.max()):
            entry = a.logprobs.view(LOGPROBS)[sequence * a.ring_size + (position + 1) % a.ring_size]
            found = log_probabilities(logits, token, logprobs - 1)
            entry["chosen"], top = found[0], len(found[1])
            entry["tokens"][:top], entry["top"][:top] = found[1:]
        return token

    for row, position, sequence in sampled_rows(a.live, a.row_count):
        flags = int(a.live[4 * row + _FLAGS])
        advance(a, token_of(position, sequence, flags), position, sequence)


def _allowed(a: Given, sequence: int) -> npt.NDArray[np.bool_]:
    """Returns whether each token is allowed by the sequence's mask."""
    words = -(-a.vocabulary // 32)
    mask = a.allowed[sequence * words : (sequence + 1) * words].astype("<u4", copy=False)
    return np.unpackbits(mask.view(np.uint8), count=a.vocabulary, bitorder="little").view(np.bool_)


@kernel(HOST_KERNELS)
def draft(a: Given) -> None:
    """Makes the rows of a step: those of `rows`, and behind each DRAFTS row up to `most` drafts
    (`drafts_of`), as far as there are rows before the next ACTIVE one.

    Rows of a sequence that drafts are not SAMPLE, so `sample` leaves them to `accept`.  `scored`
    has the same rows for `head`: all are SAMPLE, and each draft has a sequence of its own, its row
    behind the decoder's sequences."""
    rows = a.rows[: 4 * a.row_count].reshape(-1, 4)
    made, scored = np.zeros((2, a.row_count, 4), np.int32)
    first = [*np.flatnonzero(rows[:, _FLAGS] & ACTIVE).tolist(), a.row_count]
    for index, end in pairwise(first):
        token, position, sequence, flags = _resolved(a, rows[index].tolist())
        flags &= ~FROM_STATE
        scored[index] = (token, position, sequence, flags)
        if flags & DRAFTS:
            flags &= ~SAMPLE
        made[index] = (token, position, sequence, flags)
        if flags & DRAFTS and flags & ACTIVE and 0 <= position < a.context:
            before = a.history[sequence * a.context :][:position]
            drafts = drafts_of(np.append(before, np.int32(token)), min(a.most, end - index - 1))
            for row, found in enumerate(drafts.tolist(), index + 1):
                made[row] = (found, position + row - index, sequence, flags)
                scored[row] = (*made[row, :2], a.sequences + row, flags | SAMPLE)
    a.drafted[: made.size] = made.reshape(-1)
    a.scored[: scored.size] = scored.reshape(-1)


def drafts_of(tokens: Ints, most: int) -> Ints:
    """Returns the tokens that may follow `tokens`, int32, (`most`,), or none.

    They are those that followed the place that has the most last tokens in common with the end,
    DRAFT_KEY at most; of several places the last.  They go on with themselves where `tokens` end.
    """
    end = len(tokens) - 1
    places = np.flatnonzero(tokens[:end] == tokens[end])
    if not places.size:
        return tokens[:0]
    for back in range(1, DRAFT_KEY):
        alike = places[places >= back]
        alike = alike[tokens[alike - back] == tokens[end - back]]
        if not alike.size:
            break
        places = alike
    place = int(places[-1])
    return tokens[place + 1 + np.arange(most) % (end - place)]


@kernel(HOST_KERNELS)
def accept(a: Given) -> None:
    """Chooses the likeliest token of each row of a sequence that drafts in turn, and updates the
    sequence's state (`advance`), as long as the next row holds the token chosen: what follows a
    wrong draft is dropped.  `scored` names the place of a row's logits."""
    places = a.scored[2 : 4 * a.row_count : 4].tolist()

    def likeliest(row: int) -> int:
        values = a.logits[places[row] * a.vocabulary :][: a.vocabulary]
        best = int(values.argmax())  # the first NaN if there is one
        return best if np.isfinite(values[best]) else -1

    accept_by(a, likeliest)


def accept_by(a: Given, likeliest: Callable[[int], int]) -> None:
    """Does what `accept` does, with the likeliest token of each row, or -1, by a function."""
    wanted = ACTIVE | DRAFTS
    rows = [*a.live[: 4 * a.row_count].reshape(-1, 4).tolist(), (0, 0, 0, 0)]
    before, agreed = -1, False  # the sequence of the row before; whether it chose this row's token
    for index, (_, position, sequence, flags) in enumerate(rows):
        if flags & wanted != wanted or (sequence == before and not agreed):
            continue
        token = likeliest(index)
        next_token, _, next_sequence, next_flags = rows[index + 1]
        agreed = bool(next_flags & ACTIVE) and (next_sequence, next_token) == (sequence, token)
        agreed = advance(a, token, position, sequence, agreed)
        before = sequence


def advance(a: Given, token: int, position: int, sequence: int, agreed: bool = False) -> bool:
    """Sets the state of a sequence after the row at `position`, and writes the token to the ring
    that the host reads.  The sequence stops at token -1, at a token in `stops`, at the limit in its
    `options` and at the end of the context.  Returns whether the step goes on with the next token:
    if a draft `agreed` and the sequence has not stopped."""
    limit = min(int(a.options.view(OPTIONS)[sequence]["limit"]), a.context)
    stops = a.stops[: a.stop_count].tolist()
    stopped = int(token < 0 or token in stops or position + 1 >= limit)
    a.state[4 * sequence : 4 * sequence + 4] = (token, position + 1, position + 2, stopped)
    more = agreed and not stopped
    # One store of 8 bytes, since another thread may poll this entry.
    entry = (2 * (position + 1) + stopped) << 32 | (token | MORE * more) & 0xFFFFFFFF
    a.ring.view(np.int64)[sequence * a.ring_size + (position + 1) % a.ring_size] = entry
    return more


@kernel(HOST_KERNELS)
def continue_loop(a: Given) -> None:
    """Sets the count of a loop to `start` steps, or counts one step if `start` is 0.

    The loop continues if steps are left and the next one would compute a row.  Rows that are not
    FROM_STATE are computed only in the first step, since they do not change.
    """
    wanted = ACTIVE | SAMPLE
    live = False
    for _, _, sequence, flags in a.rows[: 4 * a.row_count].reshape(-1, 4).tolist():
        if flags & wanted == wanted and 0 <= sequence < a.sequences:
            live |= not a.state[4 * sequence + 3] if flags & FROM_STATE else a.start > 0
    a.counter[0] = a.start if a.start else a.counter[0] - 1
    a.launch.set_conditional(a.condition, int(live and bool(a.counter[0] > 0)))
