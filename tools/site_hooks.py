"""Hooks for the documentation site, beyond what mkdocs.yml can express.

Links out of docs/ are relative in the sources, so that they work in every copy of the repository.
The site needs the repository's address, which is in pyproject.toml; without one, a link becomes its
text.  The members of classes in the reference are ordered for users.
"""

from __future__ import annotations

import ast
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
# Search: the log is excluded, since it contains every word; pages for fewer readers come last.
_SEARCH: dict[str, dict[str, Any]] = {
    "log.md": {"exclude": True},
    "log/": {"exclude": True},
    "torch.md": {"boost": 2},
    "howto/": {"boost": 2},
    "correctness.md": {"boost": 0.5},
    "design.md": {"boost": 0.3},
    "graph-file.md": {"boost": 0.7},
    "performance.md": {"boost": 0.5},
    "relational.md": {"boost": 0.5},
    "reference/distributed.md": {"boost": 0.5},
    "reference/driver.md": {"boost": 0.3},
    "reference/relational.md": {"boost": 0.3},
}


def on_config(config: Any) -> Any:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    config.repo_url = project.get("urls", {}).get("Repository")
    config.repo_name = project["name"]
    return config


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Makes links out of docs/ absolute, and sets the page's display and search options."""
    for start, search in _SEARCH.items():
        if page.file.src_uri.startswith(start):
            page.meta["search"] = search
    if page.is_homepage:
        page.meta["hide"] = ["navigation", "toc"]
    elif not re.search("^##+ ", markdown, re.M):
        page.meta["hide"] = ["toc"]  # more room for its table
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


# Members that other packages of this project use, and users do not.
_INTERNAL = re.compile(
    r"""
    \w+\.(enter|guarded|announce|report|submitted|entering|lose|lost|reader|recount|attach|claim)
    | \w+\.(require_\w+|note_refused|watch|storages?|memory_closed|take_labels|spoil|kept|turn)
    | (Capture|Recording)\.(submissions|needs_access|recorded|waited|awaited|failed)
    | Graph\.(instantiated|replaced|add_operations?|add_recorded)
    | Node\.(held|places|keep|defaults)
    | GraphExec\.(suspect|instantiate)
    | GraphCache\.refusal
    | Group\.(note_progress|new_lane|detach)
    | Kernel\.(slots|call)
    | Operation\.(keep|once|usable)
    | Event\.owner
    | Stream\.(mark|launch)
    | GraphedModule\.(guards|read|others|methods)
    | (Token|Batch)Run\.end
    | Slot\.(scratch_padding|rows|poisoned)
    | KeyColumns\.(serial|stream|slots|of)
    | JoinIndex\.(table|grouped)
    """,
    re.X,
)
_LAUNCH = "ostinato.driver.launcher.PythonLauncher.launch"


class OfUsers(griffe.Extension):
    """Orders the members of classes for users, and leaves out internal ones.

    Methods come first, then attributes; records and enumerations keep their order.  Left out are
    `_INTERNAL`, attributes that an `__init__` sets without a docstring, and labels of attributes.
    """

    def on_module_node(self, *, node: Any, **_: Any) -> None:
        """Shows `dataclass` of `ostinato.records` to griffe as what it is for type checkers."""
        for statement in node.body:
            if isinstance(statement, ast.ImportFrom) and statement.module == "ostinato.records":
                statement.module = "dataclasses"

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        bases = "".join(map(str, cls.bases))
        record = "dataclass" in cls.labels or "Enum" in bases or "Flag" in bases
        calls: dict[str, Any] = {}
        attributes: dict[str, Any] = {}
        if cls.path == "ostinato.graph.executable.GraphExec":
            # Its base, the compiled launcher or the one in Python, is chosen at run time.
            calls["launch"] = griffe.Alias("launch", _LAUNCH, parent=cls)
        for name, member in cls.members.items():
            if _INTERNAL.fullmatch(f"{cls.name}.{name}"):
                continue
            if not isinstance(member, griffe.Attribute):
                calls[name] = member
                continue
            if member.labels == {"instance-attribute"} and not member.docstring:
                continue
            member.labels -= {"class-attribute", "instance-attribute"}
            (calls if record else attributes)[name] = member
        cls.members = calls | attributes
