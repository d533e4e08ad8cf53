"""`__all__` says what there is, and every public name has words."""

from __future__ import annotations

import importlib
import inspect
import pkgutil

import pytest

import ostinato

MODULES = [
    name
    for _, name, _ in pkgutil.walk_packages(ostinato.__path__, "ostinato.")
    if not name.endswith("__main__")
]


@pytest.mark.parametrize("name", MODULES)
def test_all_is_true(name: str) -> None:
    if name.startswith("ostinato.interop."):
        pytest.importorskip(name.rpartition(".")[2])
    if name == "ostinato.bench.transformers_loop":
        pytest.importorskip("transformers")
    module = importlib.import_module(name)
    for public in getattr(module, "__all__", ()):
        assert hasattr(module, public), f"{name}.__all__ names {public}, which is not there"


def test_the_top_has_every_public_name() -> None:
    for public in ostinato.__all__:
        value = getattr(ostinato, public)
        assert inspect.getdoc(value), f"ostinato.{public} has no docstring"


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = ostinato.no_such_name


def test_dir_lists_the_public_names() -> None:
    assert set(ostinato.__all__) <= set(dir(ostinato))


def test_every_error_is_ours() -> None:
    from ostinato import errors

    for public in errors.__all__:
        value = getattr(errors, public)
        if inspect.isclass(value) and issubclass(value, Exception):
            assert issubclass(value, errors.OstinatoError)
            assert public in (errors.__doc__ or ""), f"{public} is not in the tree at the top"
