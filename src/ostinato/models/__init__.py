"""Llama-family models on captured graphs: files, tokenizers, the decoder, text generation.

Names are imported on first use, as in `ostinato` itself.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from ostinato.models.extra import require_extra

if TYPE_CHECKING:
    from ostinato.models.config import LlamaConfig as LlamaConfig
    from ostinato.models.config import rope_inverse_frequencies as rope_inverse_frequencies
    from ostinato.models.conversation import Conversation as Conversation
    from ostinato.models.conversation import ConversationStatistics as ConversationStatistics
    from ostinato.models.decoder import Decoder as Decoder
    from ostinato.models.decoder_statistics import DecoderStatistics as DecoderStatistics
    from ostinato.models.files.checkpoint import Checkpoint as Checkpoint
    from ostinato.models.files.checkpoint import StoredCheckpoint as StoredCheckpoint
    from ostinato.models.files.open import open_checkpoint as open_checkpoint
    from ostinato.models.generate import TextGenerator as TextGenerator
    from ostinato.models.generation import AnswerText as AnswerText
    from ostinato.models.generation import Generation as Generation
    from ostinato.models.generation import Summary as Summary
    from ostinato.models.layout import weight_shapes as weight_shapes
    from ostinato.models.program import KernelCall as KernelCall
    from ostinato.models.program import decode_program as decode_program
    from ostinato.models.program import describe as describe
    from ostinato.models.run import BatchRun as BatchRun
    from ostinato.models.run import TokenRun as TokenRun
    from ostinato.models.sampling import SamplingOptions as SamplingOptions
    from ostinato.models.stepper import TokenLogprobs as TokenLogprobs
    from ostinato.models.stepper import TokenMasks as TokenMasks
    from ostinato.models.text.tokenizer import Tokenizer as Tokenizer
    from ostinato.models.text.tokenizer import load_tokenizer as load_tokenizer
    from ostinato.models.weights import Weights as Weights
    from ostinato.models.weights import adopt_weights as adopt_weights

_HOMES = {
    "AnswerText": "generation",
    "BatchRun": "run",
    "Checkpoint": "files.checkpoint",
    "Conversation": "conversation",
    "ConversationStatistics": "conversation",
    "Decoder": "decoder",
    "DecoderStatistics": "decoder_statistics",
    "Generation": "generation",
    "KernelCall": "program",
    "LlamaConfig": "config",
    "SamplingOptions": "sampling",
    "StoredCheckpoint": "files.checkpoint",
    "Summary": "generation",
    "TextGenerator": "generate",
    "TokenLogprobs": "stepper",
    "TokenMasks": "stepper",
    "TokenRun": "run",
    "Tokenizer": "text.tokenizer",
    "Weights": "weights",
    "adopt_weights": "weights",
    "decode_program": "program",
    "describe": "program",
    "load_tokenizer": "text.tokenizer",
    "open_checkpoint": "files.open",
    "rope_inverse_frequencies": "config",
    "weight_shapes": "layout",
}

__all__ = sorted(_HOMES)  # noqa: PLE0605 - one table serves the loader, dir() and this


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'ostinato.models' has no attribute {name!r}")
    require_extra("the decoder")
    value = getattr(importlib.import_module(f"ostinato.models.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
