"""A check of a step finds each difference between its graph and its function."""

from __future__ import annotations

import numpy as np
import pytest

import ostinato as ost
from ostinato.device import Device
from ostinato.errors import InputError, NotHeldError, VerificationError
from tests.footguns.common import N, checked_step, count_step, ones
from tests.sources import config, kernel


@pytest.mark.parametrize("build", ["capture", "record"])
@pytest.mark.parametrize("verify", ["first", 1])
def test_rows_of_a_state_that_padding_writes_are_found(
    device: Device, build: str, verify: object
) -> None:
    """The step adds 1 to as many rows as its bucket has, and so to the padding too."""
    acc, one = device.zeros(4, np.float32), device.array(np.ones(4, np.float32))
    factor = device.array(np.ones(1, np.float32))

    def work(stream: ost.Stream, sizes: ost.Sizes) -> None:
        ost.launch(stream, kernel(device, "axpy"), config(sizes.rows), one, factor, acc, sizes.rows)

    slots = [ost.Slot("acc", acc, "state", size="rows")]
    step = checked_step(device, work, slots, build=build, verify=verify)
    decisions = [step(rows=rows) for rows in (3, 3, 3, 4, 4)]
    assert acc.to_numpy(step.stream).tolist() == [5, 5, 5, 2]
    assert "padding rows of a state" in decisions[0].detail
    strict = checked_step(device, work, slots, build=build, verify=verify, strict=True)
    with pytest.raises(VerificationError, match="padding rows of a state"):
        strict(rows=3)
    assert acc.to_numpy(step.stream).tolist() == [5, 5, 5, 2], "an error has changed nothing"
    slots = [ost.Slot("acc", acc, "state", size="rows", scratch_padding=True)]
    allowed = checked_step(device, work, slots, build=build, verify=verify, strict=True)
    for _ in range(3):
        allowed(rows=3)
    assert acc.to_numpy(allowed.stream).tolist()[:3] == [8, 8, 8]


@pytest.mark.parametrize("made", ["prepared", "recorded", "held", "made again"])
def test_a_graph_is_checked_however_it_was_made(device: Device, made: str) -> None:
    x, value = ones(device), [1.0]

    def work(stream: ost.Stream, _: ost.Sizes) -> None:
        ost.launch(stream, kernel(device, "fill"), config(N), x, value[0], N)

    build = "record" if made == "recorded" else "capture"
    slots = [ost.Slot("x", x, "output")]
    step = checked_step(device, work, slots, verify="first", strict=True, build=build)
    if made == "prepared":
        step.prepare()
    elif made == "held":
        for _ in range(2):
            with pytest.raises(NotHeldError):  # a call does more than replay: it checks
                step.hold()
            step.prepare()
    else:
        step()
    if made == "made again":
        step.cache.evict_all()
        step.prepare()
    value[0] = 2.0
    with pytest.raises(VerificationError, match="changed since its capture"):
        step()


def test_a_graph_that_writes_nothing_is_found(device: Device) -> None:
    """The output already holds the right answer, which an earlier launch wrote."""
    x, out, other = ones(device), device.zeros(N, np.float32), device.zeros(N, np.float32)
    where = [out]

    def work(stream: ost.Stream, _: ost.Sizes) -> None:
        ost.launch(stream, kernel(device, "add"), config(N), x, x, where[0], N)

    slots = [ost.Slot("x", x, "input"), ost.Slot("out", out, "output")]
    step = checked_step(device, work, slots, verify="first", strict=True)
    ost.launch(step.stream, kernel(device, "add"), config(N), x, x, out, N)
    where[0] = other
    step.prepare()
    where[0] = out
    with pytest.raises(VerificationError, match="slot 'out'"):
        step()


def test_an_output_that_no_run_writes_is_found(device: Device) -> None:
    x, out = ones(device), device.zeros(N, np.float32)

    def work(stream: ost.Stream, _: ost.Sizes) -> None:
        ost.launch(stream, kernel(device, "scale"), config(N), x, N)

    slots = [ost.Slot("x", x, "state"), ost.Slot("out", out, "output")]
    step = checked_step(device, work, slots)
    assert "neither run writes it" in step().detail
    assert (x.to_numpy(step.stream) == 2).all()


@pytest.mark.parametrize("verify", [0, -1, True, False, 2.5, "always"])
def test_what_asks_for_no_checks_or_some_is_said(device: Device, verify: object) -> None:
    x = device.zeros(1, np.int32)
    slots = [ost.Slot("x", x, "state")]
    with pytest.raises(InputError, match="verify="):
        count_step(device, x, ost.GraphCache(device), 1, slots=slots, verify=verify)


def test_a_slot_of_a_single_value_is_checked(device: Device) -> None:
    stream, scale = device.create_stream(), kernel(device, "scale")
    count = ost.DeviceScalar(device, "f4", initial=1, stream=stream)
    step = ost.GraphedStep(
        lambda stream, sizes: ost.launch(stream, scale, config(1), count.buffer, 1),
        stream=stream,
        cache=ost.GraphCache(device),
        verify="first",
        slots=[ost.Slot("count", count.buffer, "state")],
    )
    for _ in range(3):
        step(rows=1)
    assert count.to_numpy(stream) == 8
    assert step.statistics().verified == 1


@pytest.mark.parametrize("dtype", [np.int32, np.uint16, np.int8, np.bool_, np.float16])
def test_padding_of_every_type_is_poisoned(device: Device, dtype: type) -> None:
    """A sum over all rows of the bucket is right if the padding holds zeros."""
    x = device.zeros(8, dtype)
    out = device.zeros(1, np.float32)

    @ost.host_kernel("x: *const bytes, n: u32, out: *f32")
    def total(launch, x, n, out):
        out[0] = float(x[:n].sum(dtype=np.float64))

    text = """extern "C" __global__ void total(const unsigned char* x, unsigned n, float* out) {
        float s = 0; for (unsigned i = 0; i < n; ++i) s += x[i]; *out = s; }"""
    source = ost.Source(cuda=text, host=[total], name="total")
    summed = device.modules.get_or_compile(source, "total")

    def work(stream: ost.Stream, sizes: ost.Sizes) -> None:
        nbytes = sizes.rows * np.dtype(dtype).itemsize
        ost.launch(stream, summed, ost.LaunchConfig(1, 1), x, nbytes, out)

    slots = [ost.Slot("x", x, "input", size="rows"), ost.Slot("out", out, "output")]
    step = checked_step(device, work, slots)
    x.set(np.array([1, 1, 0, 0, 0, 0, 0, 0], dtype), step.stream)
    expected = float(x.to_numpy(step.stream)[:3].view(np.uint8).sum())
    decision = step(rows=3)
    assert "padding" in decision.detail
    assert out.to_numpy(step.stream)[0] == expected
    assert x.to_numpy(step.stream).tolist() == np.array([1, 1, 0, 0, 0, 0, 0, 0], dtype).tolist()


def test_a_first_check_without_padding_is_repeated_with_some(device: Device) -> None:
    x, out = device.array(np.ones((4, 4), np.float32)), device.zeros(4, np.float32)

    def work(stream: ost.Stream, sizes: ost.Sizes) -> None:
        # The answer is the last row of the bucket, twice.
        ost.launch(stream, kernel(device, "add"), config(4), x, x[sizes.rows - 1], out, 4)

    slots = [ost.Slot("x", x, "input", size="rows"), ost.Slot("out", out, "output")]
    step = checked_step(device, work, slots, verify="first")
    assert step(rows=4).action.value == "build"
    assert "padding" in step(rows=3).detail


LEAKS = {
    # Reduction: dtype, the rows in use of each input, and the padding of each input.
    "min": (np.float32, [[5, 6, 7]], [9]),
    "max": (np.int32, [[5, 6, 7]], [9]),
    "total": (np.int32, [[0, 1, 1], [1, 0, 1]], [1, 0]),
    "differing": (np.int32, [[0, 1, 1], [1, 0, 1]], [1, 0]),
}


@pytest.mark.parametrize("how", LEAKS)
def test_padding_that_two_poisons_do_not_show_is_found(device: Device, how: str) -> None:
    """Two poisons do not show the padding of these reductions.

    A minimum ignores NaN and large numbers.  A maximum of whole numbers ignores values that rows
    in use hold.  The sum of two inputs stays the same if their poisons change places."""
    dtype, used, behind = LEAKS[how]
    kind = "f32" if dtype is np.float32 else "i32"
    word = {"f32": "float", "i32": "int"}[kind]

    @ost.host_kernel(f"x: *const {kind}, y: *const {kind}, n: u32, out: *out {kind}")
    def reduced(launch, x, y, n, out):
        x, y = x[:n], y[:n]
        match how:
            case "min":
                out[0] = np.fmin.reduce(x)
            case "max":
                out[0] = x.max()
            case "total":
                out[0] = (x + y).sum()
            case "differing":
                out[0] = (x != y).sum()

    first, line = {
        "min": ("x[0]", "s = x[i] < s ? x[i] : s;"),
        "max": ("x[0]", "s = x[i] > s ? x[i] : s;"),
        "total": ("0", "s += x[i] + y[i];"),
        "differing": ("0", "s += x[i] != y[i];"),
    }[how]
    text = f"""extern "C" __global__ void reduced(const {word}* x, const {word}* y, unsigned n,
        {word}* out) {{ {word} s = {first}; for (unsigned i = 0; i < n; ++i) {line} *out = s; }}"""
    source = ost.Source(cuda=text, host=[reduced], name="reduced")
    reduce = device.modules.get_or_compile(source, "reduced")
    rows = [[*values, more] for values, more in zip(used, behind, strict=True)]
    buffers = [device.array(np.array(values, dtype)) for values in rows]
    out = device.zeros(1, dtype)

    def work(stream: ost.Stream, sizes: ost.Sizes) -> None:
        ost.launch(stream, reduce, ost.LaunchConfig(1, 1), buffers[0], buffers[-1], sizes.rows, out)

    slots = [ost.Slot(f"x{i}", x, "input", size="rows") for i, x in enumerate(buffers)]
    step = checked_step(device, work, [*slots, ost.Slot("out", out, "output")])
    assert "padding rows reach the answer" in step(rows=3).detail
    wanted = {"min": 5, "max": 7, "total": 4, "differing": 2}[how]
    assert out.to_numpy(step.stream)[0] == wanted


def test_padding_of_each_size_is_checked(device: Device) -> None:
    """A check of the padding of one size says nothing of that of the other."""
    x, y = (device.array(np.ones(4, np.float32)) for _ in range(2))
    sums = [device.zeros(1, np.float32) for _ in range(2)]
    most = ost.DeviceScalar(
        device, "u4", initial=1 << 20, stream=(stream := device.create_stream())
    )

    def work(stream: ost.Stream, sizes: ost.Sizes) -> None:
        at = config(1)
        ost.launch(
            stream, kernel(device, "total"), at, x, sizes.rows, sizes.on_device("rows"), sums[0]
        )
        ost.launch(stream, kernel(device, "total"), at, y, sizes.columns, most, sums[1])

    slots = [
        ost.Slot("x", x, "input", size="rows"),
        ost.Slot("y", y, "input", size="columns"),
        *(ost.Slot(f"sum{i}", out, "output") for i, out in enumerate(sums)),
    ]
    step = checked_step(device, work, slots, verify="first", stream=stream)
    assert step(rows=3, columns=4).action.value == "build"
    assert "padding" in step(rows=4, columns=3).detail
    assert sums[1].to_numpy(stream).tolist() == [3]


def test_poison_of_two_inputs_is_no_row_in_use(device: Device) -> None:
    """A poison of the least token and the least place in use repeats row 0, which hides it."""
    tokens, at, kv = (device.zeros(8, np.int32) for _ in range(3))
    everything = device.array(np.array([8], np.uint32))

    def work(stream: ost.Stream, sizes: ost.Sizes) -> None:
        ost.launch(
            stream,
            kernel(device, "scatter"),
            config(1),
            tokens.view(dtype="f32"),
            at,
            kv.view(dtype="f32"),
            sizes.rows,
            everything,
        )

    slots = [
        ost.Slot("tokens", tokens, "input", size="rows"),
        ost.Slot("at", at, "input", size="rows"),
        ost.Slot("kv", kv, "state"),
    ]
    step = checked_step(device, work, slots, verify="first")
    tokens.set([50, 60, 70, 0, 0, 0, 0, 0], step.stream)
    at.set([5, 6, 7, 0, 0, 0, 0, 0], step.stream)
    assert "padding" in step(rows=3).detail
    assert kv.to_numpy(step.stream).tolist() == [0, 0, 0, 0, 0, 50, 60, 70]


@pytest.mark.parametrize("poison", [None, (0, 1)])
def test_an_answer_that_is_a_poison_hides_no_missing_launch(
    device: Device, poison: tuple[float, float] | None
) -> None:
    """The graph does not write the output, and an eager run writes the value of the poison."""
    value = 0x5A if poison is None else 1
    flag = device.zeros((), np.uint8)
    where = [device.array(np.array([value], np.uint8))]

    def work(stream: ost.Stream, _: ost.Sizes) -> None:
        ost.fill(stream, where[0], value)

    slots = [ost.Slot("flag", flag, "output", poison=poison)]
    step = checked_step(device, work, slots)
    step.prepare()
    where[0] = flag
    assert "lacks work of the step" in step().detail
    assert flag.to_numpy(step.stream) == value
    right = checked_step(device, work, slots)
    right()
    counts = right.statistics()
    assert (counts.calls, counts.replays, counts.verified) == (1, 1, 1)
    assert counts.quarantined == {}


def test_state_that_no_slot_declares_advances_once_a_call(device: Device) -> None:
    for verify in ("first", 1):
        hidden, x = device.zeros(1, np.int32), ones(device)

        def work(
            stream: ost.Stream, _: ost.Sizes, hidden: ost.Buffer = hidden, x: ost.Buffer = x
        ) -> None:
            ost.launch(stream, kernel(device, "scale"), config(N), x, N)
            ost.launch(stream, kernel(device, "increment"), config(1), hidden, 1)

        step = checked_step(device, work, [ost.Slot("x", x, "state")], verify=verify)
        for calls in range(1, 6):
            step()
            assert hidden.to_numpy(step.stream)[0] == calls
        assert step.statistics().quarantined == {}
        checked = step.statistics().last_check
        assert checked is not None and (checked.undeclared, checked.skipped) == (4, 0)


def test_memory_over_the_limit_of_a_check_is_said(device: Device) -> None:
    hidden, x = device.zeros(1000, np.float32), ones(device)

    def work(stream: ost.Stream, _: ost.Sizes) -> None:
        ost.launch(stream, kernel(device, "scale"), config(N), x, N)
        ost.launch(stream, kernel(device, "fill"), config(1000), hidden, 3.0, 1000)

    slots = [ost.Slot("x", x, "state")]
    step = checked_step(device, work, slots, check_limit="1 KiB")
    step()
    checked = step.statistics().last_check
    assert checked is not None and (checked.undeclared, checked.skipped) == (0, 4000)


@pytest.mark.parametrize("strict", [False, True])
def test_state_that_was_moved_since_the_capture_advances_once(device: Device, strict: bool) -> None:
    """Only the eager runs of the check write the new buffer, which no slot and no graph has."""
    x, factor = ones(device), device.array(np.ones(1, np.float32))
    state = [device.zeros(N, np.float32)]

    def work(stream: ost.Stream, _: ost.Sizes) -> None:
        ost.launch(stream, kernel(device, "axpy"), config(N), x, factor, state[0], N)

    step = checked_step(device, work, [ost.Slot("state", state[0], "state")], strict=strict)
    step()
    state[0] = device.array(state[0].to_numpy(step.stream))
    if strict:
        for _ in range(2):  # the second call raises too, and does not run eagerly
            with pytest.raises(VerificationError, match=r"argument 2 of operation 0 .* is y=0x"):
                step()
            assert (state[0].to_numpy(step.stream) == 1).all(), "an error has changed nothing"
        step.strict = False
    for calls in (2, 3, 4):
        step()
        assert (state[0].to_numpy(step.stream) == calls).all()


def test_a_check_does_not_write_to_what_the_step_closes_in_it(device: Device) -> None:
    """Another buffer may have that memory when the check restores what it saved."""
    x, out, others = ones(device), device.zeros(N, np.float32), []

    def work(stream: ost.Stream, _: ost.Sizes) -> None:
        if not stream.is_capturing():
            scratch = device.array(np.zeros(N, np.float32))
            ost.launch(stream, kernel(device, "add"), config(N), x, x, scratch, N)
            scratch.close()
            stream.synchronize()
            others.extend(device.array(np.full(N, 9, np.float32)) for _ in range(4))
        ost.launch(stream, kernel(device, "add"), config(N), x, x, out, N)

    slots = [ost.Slot("x", x, "input"), ost.Slot("out", out, "output")]
    step = checked_step(device, work, slots)
    for _ in range(3):
        assert step().action.value in ("build", "replay")
        assert (out.to_numpy(step.stream) == 2).all()
    assert all((other.to_numpy(step.stream) == 9).all() for other in others)


def test_a_check_that_raises_leaves_everything_as_it_was(device: Device) -> None:
    x = device.array(np.arange(8, dtype=np.float32))
    acc, fail = device.zeros(8, np.float32), [False]
    factor = device.array(np.ones(1, np.float32))

    def work(stream: ost.Stream, sizes: ost.Sizes) -> None:
        ost.launch(stream, kernel(device, "axpy"), config(sizes.rows), x, factor, acc, 3)
        if fail[0]:
            raise ZeroDivisionError("mine")

    slots = [
        ost.Slot("x", x, "input", size="rows"),
        ost.Slot("acc", acc, "state"),
    ]
    step = checked_step(device, work, slots)
    step(rows=3)
    before = [b.to_numpy(step.stream) for b in (x, acc)]
    fail[0] = True
    with pytest.raises(ZeroDivisionError):
        step(rows=3)
    for buffer, values in zip((x, acc), before, strict=True):
        np.testing.assert_array_equal(buffer.to_numpy(step.stream), values)


def test_poisons_that_do_not_fit_are_refused(device: Device) -> None:
    """NumPy cut 0.5 to 0, which is another number than the one that was asked for."""
    x = device.zeros(8, [("a", "i4"), ("b", "f4", (2,))])
    for buffer, poison in ((x, (0.5, 1)), (device.zeros(8, "i4"), (0.5, 1)), (x, (1 << 31, 0))):
        with pytest.raises(InputError, match="do not fit"):
            ost.Slot("x", buffer, "input", size="rows", poison=poison)
    ost.Slot("x", x, "input", size="rows", poison=(-1, 7))
