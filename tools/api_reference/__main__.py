"""`python -m tools.api_reference`: write docs/api.md. Names what has no test in tests/docs/covered.toml."""

from __future__ import annotations

from tools.api_reference.covered import load
from tools.api_reference.page import PATH, render


def main() -> None:
    covered = load()
    PATH.write_text(render(covered))
    for section, name in dict.fromkeys(covered.missing):
        print(f"tests/docs/covered.toml: no test of {name} in [{section}]")
    for section, name in sorted(covered.unused):
        print(f"tests/docs/covered.toml: there is no {name} in [{section}] any more")


if __name__ == "__main__":
    main()
