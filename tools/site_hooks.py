"""What mkdocs.yml cannot say of the documentation site.

Links that leave docs/ lead to the repository.  In a copy of it they are relative and work as they
are; its address stands in pyproject.toml alone, and until it does they are their text.  In the
reference, attributes without a word about them are left out, as far as they are not fields of
records.
"""

from __future__ import annotations

import posixpath
import re
import tomllib
from pathlib import Path
from typing import Any

import griffe

ROOT = Path(__file__).resolve().parent.parent
_LINK = re.compile(
    r"(?P<image>!?)(?P<text>\[[^]]*\])\((?P<target>(?:\.\./)+[^)#\s]+)(?P<anchor>#[^)]*)?\)"
)


def on_config(config: Any) -> Any:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    config.repo_url = project.get("urls", {}).get("Repository")
    config.repo_name = project["name"]
    return config


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """The page with whole links to what is not in docs/."""
    folder = posixpath.join("docs", posixpath.dirname(page.file.src_uri))

    def whole(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, match["target"]))
        if path.startswith("docs/"):
            return match[0]
        if not (ROOT / path).exists():
            raise SystemExit(f"{page.file.src_uri} links to {match['target']}, which is not there")
        if config.repo_url is None:
            return "" if match["image"] else match["text"][1:-1]
        kind = "raw" if match["image"] else "blob"
        anchor = match["anchor"] or ""
        return f"{match['image']}{match['text']}({config.repo_url}/{kind}/main/{path}{anchor})"

    return _LINK.sub(whole, markdown)


class QuietAttributes(griffe.Extension):
    """Leaves out what an `__init__` sets without a docstring, and the labels of attributes."""

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        for name, member in list(cls.members.items()):
            if isinstance(member, griffe.Attribute):
                if member.labels == {"instance-attribute"} and not member.docstring:
                    del cls.members[name]
                member.labels -= {"class-attribute", "instance-attribute"}
