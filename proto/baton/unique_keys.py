"""YAML without keys that are there twice: of these, YAML takes the last one, and says nothing. Whatever else is wrong
with it is a YAMLError, too."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import yaml
from yaml.constructor import BaseConstructor, ConstructorError


class UniqueKeys(BaseConstructor):
    """A base of a YAML loader, before the loader itself. Raises yaml.YAMLError for a key that is there twice."""

    def get_single_data(self) -> Any:
        """Raises yaml.YAMLError, also for what PyYAML does not expect: a date or a character that cannot be, a tag on
        a value that is none of its kind, lists in a thousand lists."""
        try:
            return super().get_single_data()
        except yaml.YAMLError:
            raise
        except Exception as error:  # code of another package, whose exceptions are of ten kinds
            raise yaml.YAMLError(str(error)) from error

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set[str]()
        for key in (key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key in seen:
                raise ConstructorError(None, None, f"{key!r} is there twice", node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)
