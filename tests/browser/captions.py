"""Writes generated text between the markers of README and docs.

```
<!-- made: ui.png -->
...
<!-- end -->
```
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

_MADE = re.compile(r"(<!-- made: ([\w.-]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def fill(pages: Iterable[Path], texts: Mapping[str, str]) -> None:
    """Replace what is between the markers of each name, on all pages that have them.

    Raises ValueError if a name has no markers on any page; then nothing is written.
    """
    filled = {page: _filled(page.read_text(), texts) for page in pages}
    missing = texts.keys() - {name for text in filled.values() for name in marked_texts(text)}
    if missing:
        raise ValueError(
            f"no page has markers for {', '.join(sorted(missing))}; write `<!-- made: NAME -->` "
            "and `<!-- end -->` in lines of their own where the text belongs"
        )
    for page, text in filled.items():
        page.write_text(text)


def marked_texts(text: str) -> dict[str, str]:
    """Return what is between the markers of a page, by name."""
    return {match[2]: match[3].strip() for match in _MADE.finditer(text)}


def _filled(text: str, texts: Mapping[str, str]) -> str:
    def replace(match: re.Match[str]) -> str:
        return f"{match[1]}{texts[match[2]]}\n{match[4]}" if match[2] in texts else match[0]

    return _MADE.sub(replace, text)
