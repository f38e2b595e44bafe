"""What the package says of itself: the README without links that end at the edge of the repository.

A page that shows the README elsewhere, as PyPI does, cannot follow a link to ``docs/api.md``. While the
project has no public address, such links become their text, and pictures are left out. With an
``address`` in ``pyproject.toml`` they lead to the files of the tagged version, and the metadata names
the project's pages.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(
    r"(?P<picture>!?)\[(?P<text>[^\]]*)\]\((?P<target>(?!https?://|#|mailto:)[^)\s]+)\)"
)
VERSION = re.compile(r'^__version__ = "(?P<version>[^"]+)"$', re.MULTILINE)
HTTPS = "https://"


class PackageMetadata(MetadataHookInterface):
    """Sets ``readme`` and ``urls`` of the project; ``address`` is the repository's, or empty."""

    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        """Fill in both. Raises ``ValueError`` for an address that is no https URL."""
        root, address = Path(self.root), str(self.config.get("address", "")).rstrip("/")
        source = (root / "relay_queue" / "__init__.py").read_text(encoding="utf-8")
        found = VERSION.search(source)
        if found is None:
            raise ValueError("relay_queue/__init__.py has no line __version__ = …")
        text = (root / "README.md").read_text(encoding="utf-8")
        readme = portable(text, address, f"v{found['version']}")
        metadata["readme"] = {"content-type": "text/markdown", "text": readme}
        metadata["urls"] = urls(address)


def portable(readme: str, address: str, tag: str) -> str:
    """Return a README whose links into the repository lead to ``tag`` at ``address``.

    Without an address they are their text, and pictures are left out.
    """

    def elsewhere(link: re.Match[str]) -> str:
        picture, text, target = link["picture"], link["text"], link["target"]
        if not address:
            return "" if picture else text
        return f"{picture}[{text}]({address}/{'raw' if picture else 'blob'}/{tag}/{target})"

    return re.sub(r"\n{3,}", "\n\n", LINK.sub(elsewhere, readme))


def urls(address: str) -> dict[str, str]:
    """Return the pages of the project at ``address``; none without one."""
    if not address:
        return {}
    if not address.startswith(HTTPS):
        raise ValueError(
            f"the address of the project is {address!r}; use one that begins with {HTTPS}"
        )
    return {
        "Source": address,
        "Documentation": f"{address}/blob/HEAD/docs/index.md",
        "Changelog": f"{address}/blob/HEAD/CHANGELOG.md",
        "Issues": f"{address}/issues",
        "Security": f"{address}/blob/HEAD/docs/security.md",
    }
