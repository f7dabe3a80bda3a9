"""A mkdocs hook that rewrites links from the documentation to other files of the repository.

The site does not contain the target of `[a recipe](../recipes/x.yaml)`. With `repo_url` in mkdocs.yml the link points
to the code host, without it the text has the file's path. A missing file is a warning, which fails a strict build.
"""

from __future__ import annotations

import logging
import posixpath
import re
from pathlib import Path
from typing import Any

log = logging.getLogger("mkdocs.hooks.docs_links")

_FENCED_OR_LINK = re.compile(r"(?ms)^ *```.*?^ *```$|`[^`\n]+`|(?<!!)\[(?P<text>[^\[\]]+)\]\((?P<to>\.\./[^)\s]*)\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Returns a page's text with its links out of docs/ replaced."""
    root = Path(config.config_file_path).parent
    folder = posixpath.join(Path(config.docs_dir).name, posixpath.dirname(page.file.src_uri))

    def replaced(match: re.Match[str]) -> str:
        if match["to"] is None:
            return match[0]
        to, hash_sign, heading = match["to"].partition("#")
        path = posixpath.normpath(posixpath.join(folder, to))
        if not (root / path).exists():
            log.warning(
                "Doc file '%s' contains a link '%s', but there is no %s.", page.file.src_uri, match["to"], path
            )
        if config.repo_url:
            return f"[{match['text']}]({config.repo_url.rstrip('/')}/blob/main/{path}{hash_sign}{heading})"
        return f"`{path}`" if match["text"].strip("`") == path else f"{match['text']} (`{path}`)"

    return _FENCED_OR_LINK.sub(replaced, markdown)
