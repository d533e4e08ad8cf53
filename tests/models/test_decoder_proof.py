"""The decoder is right: logits against float32 and transformers, every way of running against
the others, one step against itself a thousand times.

The same bodies run on the host driver, where the NumPy kernels answer in float32, and on a GPU,
where the CUDA kernels do, with more shapes.  Batches are in test_decoder_batches.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ostinato.device import Device
from ostinato.errors import Status, driver_error
from ostinato.models.config import LlamaConfig, rope_inverse_frequencies
from ostinato.models.decoder import Decoder
from ostinato.step import Reason
from tests.gpu.foreign import library
from tests.models.model_files import hf_config, hf_name
from tests.models.proof import (
    FIRST,
    MODES,
    RELATIVE,
    SHAPES,
    WAYS,
    WIDE,
    Way,
    answer,
    check_ways,
    difference,
    expected,
    furthest,
    kind,
    on_both,
    open_decoder,
    values_of,
)
from tests.models.random_models import RandomModel

Logits = dict[int, npt.NDArray[np.float32]]
"""Logits by position, computed from the tokens up to and with that position."""


# ------------------------------------------------------------------ a walk through a whole context


@dataclass(frozen=True)
class Walk:
    """The tokens of a context from its first position to its last, and the logits on the way."""

    tokens: tuple[int, ...]
    logits: Logits

    @property
    def bits(self) -> tuple[object, ...]:
        return self.tokens, {at: found.tobytes() for at, found in self.logits.items()}

    def check(
        self, theirs: npt.NDArray[Any], bound: float, error: Callable[..., float] = difference
    ) -> None:
        """`theirs`: rows in the order of `logits`."""
        errors = {
            at: error(ours, row)
            for (at, ours), row in zip(self.logits.items(), theirs, strict=True)
        }
        wrong = {at: f"{error:.1e}" for at, error in errors.items() if not error < bound}
        assert not wrong, f"relative errors by position: {wrong}, bound {bound}"


def walk(decoder: Decoder, config: LlamaConfig, way: Way = WAYS["captured"]) -> Walk:
    """Prompts in pieces and single tokens in turns, from position 0 to the last."""
    last = config.context_length - 1
    given, found = RandomModel(config).tokens(last + 1), {}
    decoder.reset()
    moves = [(0, False), (1, True), (120, False), (127, True), (128, True), (485, False)]
    moves += [(500, True), (last - 3, False), (last, True)]
    done = -1
    for upto, single in moves:
        if single:
            way.decode(decoder, upto - done)
        else:
            decoder.prefill(given[done + 1 : upto + 1])
        done = upto
        found[upto] = decoder.logits()
    return Walk(decoder.tokens()[: last + 1], found)


def check_walk(
    device: Device, config: LlamaConfig, error: Callable[..., float] = difference
) -> None:
    with open_decoder(device, config) as decoder:
        for _ in range(2):  # the second time, single tokens and pieces are replays
            found = walk(decoder, config)
            theirs = expected(config, found.tokens, tuple(found.logits))
            found.check(theirs, RELATIVE[kind(device)], error)
        numbers = decoder.statistics()
    assert {0, 1, 127, 128, 500, config.context_length - 1} <= set(found.logits)
    assert not numbers.quarantined and numbers.launches_replayed > 40


@on_both("shape", host=SHAPES, cuda=SHAPES)
def test_logits_agree_with_float32_at_every_kind_of_position(machine: Device, shape: str) -> None:
    check_walk(machine, SHAPES[shape], furthest)


@on_both("shape", host=[], cuda=WIDE)
def test_logits_agree_with_float32_at_real_widths(machine: Device, shape: str) -> None:
    check_walk(machine, WIDE[shape])


@pytest.mark.filterwarnings("ignore")  # transformers' are its own affair
@on_both("shape", host=SHAPES, cuda=SHAPES)
def test_logits_agree_with_transformers(machine: Device, shape: str) -> None:
    config = SHAPES[shape]
    theirs = transformers_model(config)
    with open_decoder(machine, config) as decoder:
        found = walk(decoder, config)
    found.check(theirs(found.tokens, list(found.logits)), RELATIVE[kind(machine)])


def transformers_model(
    config: LlamaConfig,
) -> Callable[[Sequence[int], Sequence[int]], npt.NDArray[np.float32]]:
    """transformers' model in float32 on the CPU with the same weights: (tokens, positions) to
    logits.

    The test is skipped where it is not installed, or where it has no such model.
    """
    torch, transformers = library("torch"), library("transformers")
    if config.qk_norm and config.qkv_bias:
        pytest.skip("no model of transformers has all of that")
    rope: dict[str, Any] = {"rope_type": "default"}
    if config.rope_scaling is not None:
        scaling = config.rope_scaling
        rope = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_context,
        }
    fields = hf_config(config)
    if int(transformers.__version__.partition(".")[0]) >= 5:
        theta = fields.pop("rope_theta")
        fields["rope_parameters"] = {**rope, "rope_theta": theta}
    elif config.rope_scaling is not None:
        fields["rope_scaling"] = rope
    # Eager, since others may leave the window to a mask that they do not need for one prompt.
    made = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    model = transformers.AutoModelForCausalLM.from_config(made, attn_implementation="eager")
    model = model.to(torch.float32)
    state = {hf_name(name): torch.from_numpy(v) for name, v in values_of(config).items()}
    answer = model.load_state_dict(state, strict=False)
    assert not answer.unexpected_keys
    assert set(answer.missing_keys) <= ({"lm_head.weight"} if config.tied_embeddings else set())
    np.testing.assert_allclose(
        model.model.rotary_emb.inv_freq.numpy(), rope_inverse_frequencies(config), rtol=1e-5
    )
    model.eval()

    def logits(tokens: Sequence[int], after: Sequence[int]) -> npt.NDArray[np.float32]:
        with torch.no_grad():
            hidden = model.model(torch.tensor([list(tokens)])).last_hidden_state[0]
            found: npt.NDArray[np.float32] = model.lm_head(hidden[list(after)]).numpy()
        return found

    return logits


STEPS = replace(SHAPES[FIRST], layers=2)


@on_both("mode", host=[*MODES, "host sets rows, eager"], cuda=[*MODES, "host sets rows, eager"])
def test_prompts_and_steps_have_the_same_bits_in_every_mode(machine: Device, mode: str) -> None:
    options = MODES.get(mode, {"device_state": False, "graphs": False})
    opened = partial(open_decoder, machine, STEPS, max_rows=64)
    prompt = RandomModel(STEPS).tokens(75)
    graphs = check_ways(opened, lambda decoder: answer(decoder, prompt, 7), options)
    # 64 rows, the rest of the prompt, single tokens.
    assert graphs == [3 if options.get("graphs", True) else 0]


@on_both("max_rows", host=[1, 2, 3, 4, 8, 64], cuda=[1, 3, 8, 64])
def test_a_prompt_in_pieces_equals_token_by_token(machine: Device, max_rows: int) -> None:
    tokens = RandomModel(STEPS).tokens(70)
    wanted = expected(STEPS, tuple(tokens), (69,))[0]
    with open_decoder(machine, STEPS, max_rows=max_rows) as decoder:
        for _ in range(3):  # eager, captured, replayed
            decoder.reset()
            token = decoder.prefill(tokens)
            assert furthest(decoder.logits(), wanted) < RELATIVE[kind(machine)]
            assert token == int(decoder.logits().argmax())


@on_both("shape", host=["all of it"], cuda=SHAPES)
def test_every_way_of_running_gives_the_same_bits(machine: Device, shape: str) -> None:
    config, bits = SHAPES[shape], {}
    for name, way in WAYS.items():
        with open_decoder(machine, config, **way.options) as decoder:
            for attempt in range(2):
                bits[name, attempt] = walk(decoder, config, way).bits
            way.check(decoder)
    differing = [key for key, found in bits.items() if found != bits["eager", 0]]
    assert not differing


# ------------------------------------------------------------------------------------ a step, again

DEEP = {
    "host": replace(SHAPES[FIRST], layers=1, context_length=120),
    "cuda": replace(WIDE["as SmolLM2-135M"], layers=30),
}


@pytest.mark.parametrize("repeats", [200, pytest.param(1000, marks=pytest.mark.slow)])
@on_both("rows", host=[1, 8], cuda=[1, 8])
def test_a_step_gives_the_same_bits_each_time(machine: Device, rows: int, repeats: int) -> None:
    """Logits, tokens, and what goes into the cache."""
    config = DEEP[kind(machine)]
    repeats //= 1 if kind(machine) == "cuda" else 4
    start = config.context_length * 2 // 3
    with open_decoder(machine, config, sequences=rows) as decoder:
        for sequence in range(rows):
            decoder.prefill(
                RandomModel(config).tokens(start + 3 * sequence, seed=sequence), sequence
            )
        lengths = [len(decoder.tokens(sequence)) for sequence in range(rows)]
        seen = set()
        for _ in range(repeats):
            for sequence, length in enumerate(lengths):
                decoder.truncate(length, sequence)
            tokens = decoder.decode_batch(range(rows))
            bits = [decoder.logits(sequence).tobytes() for sequence in range(rows)]
            seen.add(hash((tuple(tokens), *bits)))
        numbers = decoder.statistics()
    assert len(seen) == 1, f"{len(seen)} different answers"
    assert numbers.launches_replayed >= repeats - 2 and not numbers.quarantined


# ---------------------------------------------------------------------------------- a large model


@on_both("layers", host=[], cuda=[32])
def test_the_whole_of_an_8b_model_decodes_and_its_graphs_are_exact(
    machine: Device, layers: int
) -> None:
    """16 GB of bfloat16.  It is loaded once: launch by launch is what profiling does."""
    config = replace(WIDE["as Llama-3.1-8B"], layers=layers)
    prompt = RandomModel(config).tokens(21)
    with open_decoder(machine, config, max_context=63) as decoder:
        with decoder.profile():
            eager = answer(decoder, prompt, 8)
        assert decoder.statistics().launches_replayed == 0
        for _ in range(3):
            assert answer(decoder, prompt, 8) == eager
        numbers = decoder.statistics()
    assert not numbers.quarantined and numbers.launches_replayed >= 16
    assert len({token for token, _ in eager}) > 1
    assert np.isfinite(np.frombuffer(eager[-1][1], np.float32)).all()


# ------------------------------------------------------------------------ a recorded run that fails


@on_both("sampled", host=[True, False], cuda=[True, False])
def test_a_refused_launch_of_a_recorded_run_costs_speed_only(
    machine: Device, sampled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever launch the driver refuses: the same call gives the right token, by an eager run,
    and all later calls too."""
    config = replace(SHAPES[FIRST], layers=2)
    given = RandomModel(config).tokens(9)
    launch, refused = machine.driver.launch_kernel, 0

    def answers(decoder: Decoder) -> tuple[object, ...]:
        if sampled:
            decoder.prefill(given[:1])
        else:
            decoder.extend(given[:-1])
            decoder.prefill(given[-1:])
        found = [decoder.decode() for _ in range(3)]
        return decoder.tokens(), found, decoder.logits().tobytes()

    def fails(*arguments: object) -> object:
        nonlocal refused
        refused -= 1
        if refused == 0:
            raise driver_error(Status.INVALID_VALUE, "launch_kernel")
        return launch(*arguments)

    with open_decoder(machine, config, build="record") as decoder:
        wanted = answers(decoder)
        launches = decoder.statistics().launches_per_token
    monkeypatch.setattr(machine.driver, "launch_kernel", fails)
    for at in range(1, launches + 1):
        with open_decoder(machine, config, build="record") as decoder:
            refused = at
            assert answers(decoder) == wanted, at
            assert refused <= 0
            numbers = decoder.statistics()
            assert "launch_kernel" in next(iter(numbers.quarantined.values()))
            assert Reason.BUILD_FAILED.value in numbers.eager_reasons
