"""The function that opens a model's weights on disk, whatever their format."""

from __future__ import annotations

from pathlib import Path

from ostinato.errors import ModelError
from ostinato.models.files.checkpoint import StoredCheckpoint


def open_checkpoint(path: str | Path) -> StoredCheckpoint:
    """Opens a `.gguf` file, or a folder with config.json, *.safetensors and tokenizer.json.  Any
    part of a GGUF model in parts stands for all, which must lie beside it.

    Raises ModelError if there is no such file or it cannot be read, ModelFormatError if it is
    damaged or inconsistent, UnsupportedModelError for an unsupported architecture or tensor type.
    """
    where = Path(path)
    try:
        if where.is_dir():
            from ostinato.models.files.safetensors import open_folder

            return open_folder(where)
        if not where.is_file():
            if where.exists():
                raise ModelError(f"{where}: it is neither a regular file nor a folder")
            raise ModelError(
                f"{where}: no such file or folder; give a .gguf file, or a folder with config.json "
                "and *.safetensors (names of models are for TextGenerator and the command)"
            )
        if where.suffix == ".safetensors":
            raise ModelError(
                f"{where}: give the folder that holds it, with config.json and tokenizer.json"
            )
        from ostinato.models.files.gguf import open_gguf

        return open_gguf(where)
    except OSError as error:
        raise ModelError(f"{where}: cannot be read: {error}") from error
